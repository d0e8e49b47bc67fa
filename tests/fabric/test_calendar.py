"""The calendar of events against a sorted list: the order is that of the keys, wherever an event is kept."""

import heapq

import numba
import numpy as np
import pytest

from bywash.fabric import layout as L
from bywash.fabric.calendar import follow, refill, schedule
from bywash.fabric.heaps import pop_top
from bywash.fabric.hints import sort_8, sort_16
from bywash.fabric.layout import AHEAD, C_FULL, C_LATE, NO_EVENT


@numba.njit
def take_and_add(wheel, counts, occupied, near, heap, cal, shift, source_bits, whole, first, delays):
    """As the event loop does: take the earliest event, put it back `delays` later; the keys in the order taken."""
    n_heap = n_wheel = front = near_at = 0
    taken = np.zeros(len(delays), np.int64)
    for key in first:
        n_heap, n_wheel = schedule(
            wheel, counts, occupied, heap, cal, n_heap, n_wheel, front, shift, source_bits, whole, key
        )
    for i in range(len(delays)):
        if n_wheel > 0 and near[near_at + AHEAD] == NO_EVENT:
            n_heap, n_wheel, front, shift = refill(
                wheel, counts, occupied, near, heap, cal, n_heap, n_wheel, front, shift, source_bits, whole, near_at
            )
            near_at = 0
        key = min(near[near_at], heap[0])
        if key == near[near_at]:
            near_at += 1
        else:
            n_heap = pop_top(heap, n_heap)
            if near[near_at] == NO_EVENT:
                front, shift = follow(cal, front, shift, source_bits, whole, key)
        taken[i] = key
        n_heap, n_wheel = schedule(
            wheel, counts, occupied, heap, cal, n_heap, n_wheel, front, shift, source_bits, whole, key + delays[i]
        )
    return taken, shift


def run(*, whole, buckets, shift, source_bits, sources, events, rng):
    """The keys in the order taken, those of a sorted list, the last shift, and how often things did not fit."""
    unit = 1000 if whole else 1
    delays = rng.choice([0, 5, 5, 80, 84, 1000, 90_000], events) * 1000 + rng.integers(0, 3, events) * unit
    if whole:
        delays[rng.random(events) < 0.02] += 7  # some times are not whole, in spite of the flag
    first = np.arange(sources) | rng.integers(0, 50, sources) * unit << L.SOURCE_BITS
    first[: sources // 8] = first[0]  # the same key more than once: stale events may do that
    wheel = np.full(buckets * L.SLOTS, L.LAST_PLACE, np.int32)
    cal = np.zeros(L.CAL_SIZE, np.int64)
    cal[L.C_DRAINS] = 1000  # soon fitted
    taken, last_shift = take_and_add(
        wheel,
        np.zeros(buckets, np.uint8),
        np.zeros(buckets // 64, np.uint64),
        np.full(L.SLOTS + 2 * AHEAD + 1, NO_EVENT, np.int64),
        np.full(4 * sources + 64, NO_EVENT, np.int64),
        cal,
        shift,
        source_bits,
        whole,
        first,
        delays << L.SOURCE_BITS,
    )
    waiting, wanted = first.tolist(), []
    heapq.heapify(waiting)
    for delay in (delays << L.SOURCE_BITS).tolist():
        wanted.append(waiting[0])
        heapq.heapreplace(waiting, waiting[0] + delay)
    return taken.tolist(), wanted, last_shift, cal


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("buckets", [64, 256])
@pytest.mark.parametrize("shift", [0, 6, 14, 24, 30])
def test_order_is_that_of_the_keys(whole, buckets, shift):
    """Buckets far too narrow and far too wide, source numbers that have no place, equal keys."""
    rng = np.random.default_rng(shift + buckets)
    taken, wanted, last_shift, _ = run(
        whole=whole, buckets=buckets, shift=shift, source_bits=7 if whole else 8, sources=200, events=20_000, rng=rng
    )
    assert taken == wanted
    assert last_shift != shift or shift in (6, 14)  # fitted: neither extreme stays


def test_full_and_late_events_go_to_the_heap():
    """All at one instant, in one bucket: fifteen times more than fit, and zero delays into the bucket that has its
    turn."""
    rng = np.random.default_rng(0)
    taken, wanted, _, cal = run(whole=True, buckets=64, shift=30, source_bits=8, sources=250, events=900, rng=rng)
    assert taken == wanted
    assert cal[C_FULL] + cal[C_LATE] > 100


@numba.njit
def _sort(values, eight):
    if eight:
        sort_8(values, 0)
    else:
        sort_16(values, 0)


@pytest.mark.parametrize("size", [8, 16])
def test_networks_sort(size):
    """Every 0-1 sequence (the 0-1 principle: then every sequence), of 16 every 37th; and some with repeats."""
    step = 1 if size == 8 else 37
    for word in range(0, 1 << size, step):
        values = np.array([word >> i & 1 for i in range(size)], np.int32)
        ones = int(values.sum())
        _sort(values, size == 8)
        assert values.tolist() == [0] * (size - ones) + [1] * ones
    values = np.random.default_rng(size).integers(-5, 5, size).astype(np.int32)
    wanted = sorted(values.tolist())
    _sort(values, size == 8)
    assert values.tolist() == wanted
