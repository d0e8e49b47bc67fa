"""Metrics of a running `bywash run`: what its exchange and its slots count, on `BYWASH_METRICS_PORT` plus the rank.

`models.job` reports while it generates. Serving engines have `metrics.inside_engine`; names are the same where they
count the same. `METRICS` is every name that either may show: `grafana` draws no other.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial

from bywash import metrics
from bywash.balance.counters import LayerCounters
from bywash.exchange.base import Exchange
from bywash.moe import SlotPool

_MAXIMA = ("most_waves",)
"""Largest values, which sums over time would misread."""
EXCHANGE = ("steps", "rows_sent", "rows_returned", "wire_bytes", "logical_bytes", "weight_bytes")
OVERFLOW = tuple(field.name for field in fields(LayerCounters) if field.name not in _MAXIMA)
SERVING = ("moe_steps", "moe_tokens", "moe_extra_steps")
METRICS = tuple(
    f"{metrics.PREFIX}{name}_total"
    for name in (*(f"exchange_{one}" for one in EXCHANGE), *(f"overflow_{one}" for one in OVERFLOW), *SERVING)
)


@contextmanager
def job_metrics(exchange: Exchange, pool: SlotPool | None) -> Iterator[None]:
    """Report this rank's counters inside the block; answer GET /metrics where BYWASH_METRICS_PORT asks for it.

    Raises:
        ConfigError: a port that is no number or cannot be had.
    """
    rank = str(exchange.rank)
    stops = [metrics.watch(partial(exchange_counts, exchange), rank=rank)]
    for layer, counted in enumerate(pool.counters if pool is not None else ()):
        stops.append(metrics.watch(partial(overflow_counts, counted), rank=rank, layer=str(layer)))
    port = metrics.port_of(exchange.rank)
    server = metrics.serve(port) if port is not None else None
    try:
        yield
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
        for stop in stops:
            stop()


def exchange_counts(exchange: Exchange) -> Mapping[str, float]:
    """Sums of `Traffic` under their metrics' names."""
    return {f"exchange_{name}": getattr(exchange.traffic, name) for name in EXCHANGE}


def overflow_counts(counted: LayerCounters) -> Mapping[str, float]:
    """Sums of one layer under their metrics' names. All ranks count the same; `plan_us` is this rank's."""
    return {f"overflow_{name}": getattr(counted, name) for name in OVERFLOW}
