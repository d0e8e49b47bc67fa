"""The counters, as text, through prometheus_client, over HTTP, and from inside an engine's worker."""

import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from bywash import metrics
from bywash.errors import ConfigError


@pytest.fixture
def counter():
    values = {"moe_steps": 3, "exchange_wire_bytes": 12345678901}
    stop = metrics.watch(lambda: values, rank="1")
    yield values
    stop()


EXPECTED = 'bywash_moe_steps_total{rank="1"}'


def test_text(counter):
    lines = metrics.text().splitlines()
    assert "# TYPE bywash_moe_steps_total counter" in lines
    assert f"{EXPECTED} 3" in lines
    assert 'bywash_exchange_wire_bytes_total{rank="1"} 12345678901' in lines


def test_a_source_that_stops_is_shown_no_more():
    stop = metrics.watch(lambda: {"passing": 1}, rank="0")
    assert "bywash_passing_total" in metrics.text()
    stop()
    stop()
    assert "passing" not in metrics.text()


def test_a_registry_shows_what_is_counted_later(counter):
    prometheus_client = pytest.importorskip("prometheus_client")
    registry = prometheus_client.CollectorRegistry()
    metrics.register(registry)
    metrics.register(registry)  # a second time changes nothing
    counter["moe_steps"] = 4
    second = metrics.watch(lambda: {"moe_steps": 9}, rank="2")
    try:
        text = prometheus_client.generate_latest(registry).decode()
        assert f"{EXPECTED} 4.0" in text
        assert 'bywash_moe_steps_total{rank="2"} 9.0' in text
    finally:
        second()


def test_two_exchanges_of_a_rank_are_one_line(counter):
    second = metrics.watch(lambda: {"moe_steps": 9}, rank="1")
    try:
        assert [line for line in metrics.text().splitlines() if line.startswith(EXPECTED)] == [f"{EXPECTED} 12"]
    finally:
        second()


def test_an_engine_without_prometheus_client_gets_no_publisher(monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/somewhere")
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    assert metrics.inside_engine(0) is None


def test_published_every_so_often_whichever_steps_are_seen(monkeypatch):
    publisher, published = metrics.Publisher(), []
    monkeypatch.setattr(publisher, "publish", lambda: published.append(1))
    for steps in range(1, 2 * metrics.PUBLISH_EVERY + 2, 2):  # two micro-batches in flight: never an even number
        publisher.keep_up(steps)
    assert len(published) == 2


def test_over_http(counter):
    server = metrics.serve(0)
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=100) as answer:
            assert f"{EXPECTED} 3" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=100)
        with pytest.raises(ConfigError, match="metrics port"):
            metrics.serve(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


def test_ports_of_ranks(monkeypatch):
    monkeypatch.setenv("BYWASH_METRICS_PORT", "http")
    with pytest.raises(ConfigError, match="BYWASH_METRICS_PORT=http"):
        metrics.inside_engine(0)


WORKER = """
from bywash import metrics
values = {"moe_steps": 0}
metrics.watch(lambda: values, rank="5")
publisher = metrics.inside_engine(5)
for values["moe_steps"] in (1, 4, 3):  # opened anew after the second
    publisher.publish()
"""


def test_workers_of_an_engine_publish_through_its_files(tmp_path):
    pytest.importorskip("prometheus_client")
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for code in (WORKER, WORKER):  # two workers: their sums are added
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=100)
    reader = (
        "import sys; from prometheus_client import CollectorRegistry, generate_latest, multiprocess as m; "
        "r = CollectorRegistry(); m.MultiProcessCollector(r); print(generate_latest(r).decode())"
    )
    found = subprocess.run([sys.executable, "-c", reader], env=env, check=True, timeout=100, capture_output=True)
    assert 'bywash_moe_steps_total{rank="5"} 14.0' in found.stdout.decode()
