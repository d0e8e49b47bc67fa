"""Routing: which experts each token goes to; its recording, its skew and made-up traffic with a known law.

Knows nothing of ranks, devices, networks or models. Names that need torch are imported when first used, so
that the simulator, the planner and `bywash trace show` read traces without loading it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bywash.routing.counts import load_counts
from bywash.routing.recorder import TraceRecorder, merge_traces
from bywash.routing.shipped import SHIPPED_TRACES, shipped_trace
from bywash.routing.skew import TraceShape, drifting, hot_set, uniform, zipf
from bywash.routing.summary import SkewSummary, contiguous_loads, summarise
from bywash.routing.trace import DECODE, PREFILL, RoutingTrace

if TYPE_CHECKING:
    from bywash.routing.gates import Gate, route
    from bywash.routing.routing import NO_EXPERT, Routing

__all__ = [
    "DECODE",
    "NO_EXPERT",
    "PREFILL",
    "SHIPPED_TRACES",
    "Gate",
    "Routing",
    "RoutingTrace",
    "SkewSummary",
    "TraceRecorder",
    "TraceShape",
    "contiguous_loads",
    "drifting",
    "hot_set",
    "load_counts",
    "merge_traces",
    "route",
    "shipped_trace",
    "summarise",
    "uniform",
    "zipf",
]

_NEED_TORCH = {
    "Gate": "bywash.routing.gates",
    "route": "bywash.routing.gates",
    "NO_EXPERT": "bywash.routing.routing",
    "Routing": "bywash.routing.routing",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEED_TORCH[name]), name)
