"""The engine's heaps, compiled: pending events (4-ary, keys `time << 20 | source`), paced QPs, flows yet to start.

All orders are total (ties by source, QP or flow number), so that a run does not depend on insertion history.
"""

# mypy: ignore-errors

import numba

from bywash.fabric.layout import NO_EVENT


@numba.njit(forceinline=True, _nrt=False)
def replace_top(heap, size, key):
    """Put `key` in place of the smallest event. Slots from `size` on hold NO_EVENT, so that groups are always whole."""
    at = 0
    child = 1
    while child < size:
        a, b, c, d = heap[child], heap[child + 1], heap[child + 2], heap[child + 3]
        left = a if a < b else b
        right = c if c < d else d
        left_at = child + (b < a)
        right_at = child + 2 + (d < c)
        least = left if left < right else right
        if least >= key:
            break
        heap[at] = least
        at = left_at if left < right else right_at
        child = 4 * at + 1
    heap[at] = key


@numba.njit(forceinline=True, _nrt=False)
def pop_top(heap, size):
    """Remove the smallest event; the new size."""
    size -= 1
    key = heap[size]
    heap[size] = NO_EVENT
    if size > 0:
        replace_top(heap, size, key)
    return size


@numba.njit(forceinline=True, _nrt=False)
def push(heap, size, key):
    """Add an event; the new size."""
    at = size
    while at > 0:
        up = (at - 1) >> 2
        if heap[up] <= key:
            break
        heap[at] = heap[up]
        at = up
    heap[at] = key
    return size + 1


@numba.njit(forceinline=True, _nrt=False)
def nic_push(keys, base, size, key):
    """Add a paced QP to the binary heap in `keys[base:]`."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if keys[base + up] <= key:
            break
        keys[base + at] = keys[base + up]
        at = up
    keys[base + at] = key


@numba.njit(forceinline=True, _nrt=False)
def nic_pop(keys, base, size):
    """Remove the earliest of `size` paced QPs."""
    size -= 1
    key = keys[base + size]
    at = 0
    child = 1
    while child < size:
        if child + 1 < size and keys[base + child + 1] < keys[base + child]:
            child += 1
        if keys[base + child] >= key:
            break
        keys[base + at] = keys[base + child]
        at = child
        child = 2 * at + 1
    keys[base + at] = key


@numba.njit(forceinline=True, _nrt=False)
def start_push(times, flows, size, time, flow):
    """Add a flow that starts at `time`; ordered by (time, flow)."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if times[up] < time or (times[up] == time and flows[up] <= flow):
            break
        times[at], flows[at] = times[up], flows[up]
        at = up
    times[at], flows[at] = time, flow


@numba.njit(forceinline=True, _nrt=False)
def start_pop(times, flows, size):
    """Remove the first of `size` waiting flows."""
    size -= 1
    time, flow = times[size], flows[size]
    at = 0
    child = 1
    while child < size:
        other = child + 1
        if other < size and (
            times[other] < times[child] or (times[other] == times[child] and flows[other] < flows[child])
        ):
            child = other
        if times[child] > time or (times[child] == time and flows[child] >= flow):
            break
        times[at], flows[at] = times[child], flows[child]
        at = child
        child = 2 * at + 1
    times[at], flows[at] = time, flow
