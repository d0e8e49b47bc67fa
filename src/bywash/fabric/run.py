"""`simulate`: run a scenario to its verdict, with progress, growth of memory, and deadlock checks in between.

The compiled loop is called in chunks; between them this module grows what is full, looks for deadlocks (queues that
wait for each other in a circle) and tells the caller how far things are. Knows the engine's rows through `layout`.
Called by the command line, the planner and sweeps; safe in several processes at once.
"""

import time
from collections.abc import Callable
from typing import Any

from bywash.errors import BywashError
from bywash.fabric import layout as L
from bywash.fabric.collect import collect
from bywash.fabric.deadlock import find_cycle
from bywash.fabric.result import Result, Verdict
from bywash.fabric.scenario import Scenario
from bywash.fabric.state import State, build, grow_heap, grow_packets, grow_samples, needs_full

CHUNK_EVENTS = 2_000_000

Progress = Callable[[float, float], None]
"""Called with simulated microseconds and the share of flows that are done (background apart), 0..1."""

_ARGUMENTS = [
    "heap",
    "wheel",
    "counts",
    "occupied",
    "near",
    "cal",
    "pk",
    "po",
    "po4",
    "qu",
    "qu4",
    "qp",
    "qp4",
    "qpf",
    "qc",
    "qcf",
    "rx",
    "rx4",
    "fl",
    "flf",
    "sw",
    "ho",
    "nic_key",
    "load_P",
    "route",
    "ports",
    "leaf_H",
    "down_H",
    "group_H",
    "bits",
    "sacks",
    "left_GP",
    "entered_GP",
    "first_GP",
    "members",
    "at_G",
    "gap_P",
    "start_time",
    "start_flow",
    "flowlets",
    "log",
    "samples",
    "pend",
    "wake",
    "kick",
    "ctl",
    "pfc",
    "sim",
    "par",
    "parf",
    "rng",
]


def simulate(
    scenario: Scenario, on_progress: Progress | None = None, *, full: bool | None = None, chunk: int = CHUNK_EVENTS
) -> Result:
    """Run a scenario.

    Args:
        scenario: what to run; the same one gives the same result, bit for bit.
        on_progress: called after every `chunk` events with simulated us and the share of flows done.
        full: force the full (True) or lean (False) kernel; by default the lean one when it can run the scenario.
        chunk: events between progress calls and deadlock checks.

    Raises:
        ConfigError: the scenario needs more packets in flight than `run.packets`, or its buffers do not add up.
    """
    wants_full = bool(needs_full(scenario)) if full is None else full
    if not wants_full and needs_full(scenario):
        raise BywashError(f"full = False: the lean kernel has no {needs_full(scenario)}")
    loop, compile_s = _compiled(wants_full)
    state = build(scenario, full=wants_full)
    verdict, cycle, seconds = _drive(state, loop, on_progress, chunk)
    if verdict is None:  # a packet was dropped, which the lean kernel cannot recover from
        return simulate(scenario, on_progress, full=True, chunk=chunk)
    return collect(state, verdict, cycle, seconds, compile_s)


def _drive(
    state: State, loop: Callable[..., int], on_progress: Progress | None, chunk: int
) -> tuple[Verdict | None, tuple[str, ...], float]:
    """Call the loop until it is done: verdict (None: the lean kernel met a drop), cycle, CPU seconds."""
    sim, flows = state.arrays["sim"], max(1, int(state.arrays["sim"][L.S_LEFT]))
    stop, seconds = chunk, 0.0
    grow = {L.GROW_PACKETS: grow_packets, L.GROW_HEAP: grow_heap, L.GROW_SAMPLES: grow_samples}
    while True:
        started = time.thread_time()
        status = loop(stop, *_sizes(state), *(state.arrays[name] for name in _ARGUMENTS))
        seconds += time.thread_time() - started
        if status in grow:
            grow[status](state)
        elif status == L.CHUNK:
            stop += chunk
            if on_progress is not None:
                on_progress(float(sim[L.S_NOW]) / 1e6, 1 - float(sim[L.S_LEFT]) / flows)
            cycle = find_cycle(state)
            if cycle:
                return "partial deadlock", cycle, seconds
        elif status == L.LEAN_DROP:
            return None, (), seconds
        elif status == L.FINISHED:
            return "completed", (), seconds
        else:
            cycle = find_cycle(state)
            if status == L.EMPTY and not _beyond_time(state):
                return ("deadlock" if cycle else "stalled"), cycle, seconds
            return ("partial deadlock" if cycle else "time limit"), cycle, seconds


def _beyond_time(state: State) -> bool:
    """When no event is left: whether a QP waits for its pace, which will come after the last time there is."""
    return bool((state.arrays["qp4"][:, L.STATE] == L.PACED).any())


def _sizes(state: State) -> tuple[int, ...]:
    groups = int(state.routes.first_NG.shape[1])
    return state.hosts, state.ports_count, state.queues, groups, state.phases


_loaded: dict[bool, Callable[..., int]] = {}


def _compiled(full: bool) -> tuple[Callable[..., int], float]:
    """The loop, compiled, and the seconds that compiling or loading took in this call (0 when it was there)."""
    if full in _loaded:
        return _loaded[full], 0.0
    started = time.perf_counter()
    from bywash.fabric.kernel import make_kernel

    loop = make_kernel(full)
    state = build(_smallest(), full=full)
    loop(0, *_sizes(state), *(state.arrays[name] for name in _ARGUMENTS))
    _loaded[full] = loop
    return loop, time.perf_counter() - started


def _smallest() -> Scenario:
    from bywash.fabric.builders import single_switch
    from bywash.fabric.traffic import incast

    return Scenario(topology=single_switch(hosts=2), flows=incast([1], 0, 1))


def thread_seconds(work: Callable[[], Any]) -> float:
    """CPU seconds of this thread that `work` takes."""
    started = time.thread_time()
    work()
    return time.thread_time() - started
