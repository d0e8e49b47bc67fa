"""The traces that ship with bywash, recorded from its own trained model: real routing for tests, simulator, planner.

`examples/record_traces.py` made them. The command line, tests and the planner load them by name.
"""

from pathlib import Path

from bywash.errors import TraceError
from bywash.routing.trace import RoutingTrace

_FOLDER = Path(__file__).parent / "shipped_traces"

SHIPPED_TRACES = ("prose", "code", "tables", "mixed")
"""One topic each: documentation, source code, tables; in `mixed` the three take turns."""


def shipped_trace(name: str) -> RoutingTrace:
    """Load a shipped trace: `bywash-tiny` on 16 or 24 prompts, 256 bytes of prefill and 96 decode steps.

    Raises:
        TraceError: no such trace; the message lists those there are.
    """
    if name not in SHIPPED_TRACES:
        raise TraceError(f"{name!r} is not a shipped trace: choose one of {', '.join(SHIPPED_TRACES)}")
    return RoutingTrace.load(_FOLDER / f"{name}.npz")
