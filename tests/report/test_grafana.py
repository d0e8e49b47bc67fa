"""The dashboard asks for metrics that exist, and a running job shows them."""

import json
import re
import socket
import urllib.request
from types import SimpleNamespace

from bywash import metrics
from bywash.balance.counters import LayerCounters
from bywash.exchange.base import Traffic
from bywash.models.job_metrics import EXCHANGE, METRICS, OVERFLOW, SERVING, job_metrics
from bywash.report.grafana import dashboard_json
from bywash.serving.exchange import ServingExchange
from tests.leftovers import free_port


def _job():
    traffic = Traffic(steps=3, rows_sent=70, wire_bytes=1234)
    layers = [LayerCounters(steps=3, rows_home=90, busiest=40), LayerCounters(steps=3, rows_spilled=7, plan_us=1.5)]
    return SimpleNamespace(rank=1, traffic=traffic), SimpleNamespace(counters=layers)


def _names(text):
    return set(re.findall(r"^(bywash_\w+)\{", text, flags=re.MULTILINE))


def test_every_metric_of_the_dashboard_exists():
    asked = {name for panel in json.loads(dashboard_json())["panels"] for target in panel["targets"]
             for name in re.findall(r"bywash_\w+", target["expr"])}  # fmt: skip
    assert asked <= set(METRICS)
    with job_metrics(*_job()):
        shown = _names(metrics.text())
    assert shown == {f"bywash_exchange_{one}_total" for one in EXCHANGE} | {
        f"bywash_overflow_{one}_total" for one in OVERFLOW
    }
    assert set(METRICS) - shown == {f"bywash_{one}_total" for one in SERVING}


def test_serving_metrics_are_those_of_the_serving_exchange():
    engine = SimpleNamespace(steps=1, tokens=2, _carriers={})
    assert tuple(ServingExchange.counters(engine)) == SERVING


def test_every_panel_has_its_own_place():
    panels = json.loads(dashboard_json())["panels"]
    assert (
        len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len({p["id"] for p in panels}) == len(panels)
    )


def test_a_running_job_answers_on_its_port_and_stops(monkeypatch):
    port = free_port()
    monkeypatch.setenv("BYWASH_METRICS_PORT", str(port - 1))  # rank 1 takes the next
    with job_metrics(*_job()), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'bywash_exchange_rows_sent_total{rank="1"} 70' in text
    assert 'bywash_overflow_rows_spilled_total{layer="1",rank="1"} 7' in text
    assert 'bywash_overflow_plan_us_total{layer="1",rank="1"} 1.5' in text
    assert "bywash_" not in metrics.text()
    with socket.socket() as probe:
        probe.settimeout(60)
        assert probe.connect_ex(("127.0.0.1", port)) != 0
