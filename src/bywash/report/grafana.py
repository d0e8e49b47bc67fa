"""A Grafana dashboard for the metrics of running jobs and serving engines, as JSON to import.

Draws names of `models.job_metrics.METRICS` only. All ranks of a job count the same overflow, so its panels read rank 0.
`bywash report --dashboard` writes it.
"""

import json
from dataclasses import dataclass
from typing import Any

RANK_0 = '{rank="0"}'
RANKS = "scalar(count(bywash_exchange_steps_total))"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart: `queries` are (legend, PromQL); `about` says how to read it."""

    title: str
    unit: str
    about: str
    queries: tuple[tuple[str, str], ...]


def _rate(name: str, only: str = "") -> str:
    return f"rate(bywash_{name}_total{only}[$__rate_interval])"


def _sum(name: str) -> str:
    return f"sum({_rate(name, RANK_0)})"


_ROWS = f"({_sum('overflow_rows_home')} + {_sum('overflow_rows_spilled')})"

PANELS: tuple[Panel, ...] = (
    Panel(
        title="Exchange steps",
        unit="ops",
        about="Dispatches a second, by rank. Ranks that differ wait for each other.",
        queries=(("rank {{rank}}", _rate("exchange_steps")),),
    ),
    Panel(
        title="Rows sent to other ranks",
        unit="short",
        about="Each token once for each destination; a second, by rank.",
        queries=(("rank {{rank}}", _rate("exchange_rows_sent")),),
    ),
    Panel(
        title="Bytes on the wire",
        unit="Bps",
        about="Rows, index, weights of tokens, counts and headers; copies of experts apart.",
        queries=(
            ("rank {{rank}}", _rate("exchange_wire_bytes")),
            ("experts, rank {{rank}}", _rate("exchange_weight_bytes")),
        ),
    ),
    Panel(
        title="Bytes saved by sending rows once",
        unit="short",
        about="Bytes of one row for each (token, expert) pair over bytes sent.",
        queries=(("logical / wire", f"sum({_rate('exchange_logical_bytes')}) / sum({_rate('exchange_wire_bytes')})"),),
    ),
    Panel(
        title="Busiest rank over the mean",
        unit="short",
        about="Step by step: had all rows been computed at home, and as they were. 1 is even.",
        queries=(
            ("at home", f"{_sum('overflow_busiest_home')} * {RANKS} / {_ROWS}"),
            ("as run", f"{_sum('overflow_busiest')} * {RANKS} / {_ROWS}"),
        ),
    ),
    Panel(
        title="Rows away from home, and rows that waited",
        unit="percentunit",
        about="Shares of all expert rows. Rows wait at home when the capacity is full and no slot takes them.",
        queries=(
            ("moved", f"{_sum('overflow_rows_spilled')} / {_ROWS}"),
            ("waited", f"{_sum('overflow_rows_waited')} / {_ROWS}"),
        ),
    ),
    Panel(
        title="Copies of experts' weights",
        unit="Bps",
        about="Bytes copied into slots, and copies, a second. High and steady: the slots are too few.",
        queries=(("bytes", _sum("overflow_fetched_bytes")), ("copies", _sum("overflow_fetches"))),
    ),
    Panel(
        title="Planning time of a step",
        unit="µs",
        about="Mean over the layers' steps, by rank.",
        queries=(
            (
                "rank {{rank}}",
                f"sum by (rank) ({_rate('overflow_plan_us')}) / sum by (rank) ({_rate('overflow_steps')})",
            ),
        ),
    ),
    Panel(
        title="Serving: tokens through MoE layers",
        unit="short",
        about="Tokens a second over all layers, by rank, of vLLM or SGLang.",
        queries=(("rank {{rank}}", _rate("moe_tokens")),),
    ),
    Panel(
        title="Serving: extra steps",
        unit="short",
        about="Steps beyond the engine's own; should stay 0.",
        queries=(("rank {{rank}}", _rate("moe_extra_steps")), ("steps, rank {{rank}}", _rate("moe_steps"))),
    ),
    Panel(
        title="Rows returned",
        unit="short",
        about="Rows that combine sent back to other ranks, a second.",
        queries=(("rank {{rank}}", _rate("exchange_rows_returned")),),
    ),
)


def dashboard_json() -> str:
    """The text of the dashboard file."""
    return json.dumps(dashboard(), indent=2) + "\n"


def dashboard() -> dict[str, Any]:
    """Two panels a row; the data source is asked for on import."""
    return {
        "title": "bywash",
        "uid": "bywash-moe",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus", "label": "data source"}]
        },
        "panels": [_panel(number, one) for number, one in enumerate(PANELS)],
    }


def _panel(number: int, one: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": one.title,
        "description": one.about,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": one.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(one.queries)
        ],
    }
