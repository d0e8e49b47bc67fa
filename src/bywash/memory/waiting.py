"""Waiting for words in shared memory without burning a core: spin a moment, then yield, then sleep.

Measured on two cores: a flag is seen within a microsecond while both ranks run, and a rank that spins instead of
yielding keeps its peer from running when there are more ranks than cores. Knows nothing of ranks' states: the caller's
`check` decides when to give up.
"""

import ctypes
import time
from collections.abc import Callable

_sched_yield = ctypes.CDLL(None).sched_yield
"""Not `os.sched_yield`: before Python 3.12 that keeps the interpreter's lock, so a thread that computes beside the one
that waits stands still for as long as this one yields."""

_SPIN_NS = 20_000
_YIELD_NS = 2_000_000
_CHECK_NS = 50_000_000
_SLEEP_MIN_S, _SLEEP_MAX_S = 20e-6, 500e-6
_WAKE_NS = 100_000
"""A sleep ends up to this much late (timer slack and wake-up); the rest of a timed wait yields instead."""


def wait_until(pending: Callable[[], list[int]], check: Callable[[list[int], int], None]) -> None:
    """Return when `pending()` is empty.

    Args:
        pending: the ranks still waited for; called many times, so it must be cheap.
        check: called with those ranks and the nanoseconds waited so far, first after 2 ms and then every 50 ms;
            raises to give up.
    """
    if not pending():
        return
    start = time.monotonic_ns()
    next_check = _YIELD_NS
    while left := pending():
        waited = time.monotonic_ns() - start
        if waited < _SPIN_NS:
            continue
        if waited < _YIELD_NS:
            _sched_yield()
            continue
        if waited >= next_check:
            check(left, waited)
            next_check = waited + _CHECK_NS
        # Sleep in proportion to the wait so far: late by at most a twentieth of it.
        time.sleep(min(max(waited * 5e-11, _SLEEP_MIN_S), _SLEEP_MAX_S))


def sleep_until_ns(due_ns: int) -> None:
    """Return at `due_ns` on CLOCK_MONOTONIC (which ranks of one host share), asleep but for the last 0.1 ms."""
    while (left := due_ns - time.monotonic_ns()) > 0:
        if left > _WAKE_NS:
            time.sleep((left - _WAKE_NS) * 1e-9)
        else:
            _sched_yield()
