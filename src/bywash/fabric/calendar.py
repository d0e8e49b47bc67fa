"""Pending events: those of the near future in a calendar, sorted a bucket at a time, all others in the heap.

A heap of P ports' events costs a cache line and a mispredicted branch for each of its levels, which came to half of a
packet-hop's time. Here an event goes to the bucket of its time, unsorted; when its turn comes, a sorting network
without branches puts the bucket in order. What does not fit, for whatever reason (too far ahead, in a bucket that has
had its turn or is full, a time that is not whole), goes to the heap, and the next event is the lesser of the two
fronts. So the order is that of the keys, whatever the buckets.

An event's place is its time with its source number below it, `ticks << source_bits | source`; a bucket is a range of
2^shift places. Where all times are whole ns a tick is one, and many events share it: then buckets cut it by source.
`shift` follows how full buckets were lately. Called by `kernel` only.

Arrays: wheel, int32 [B * SLOTS]: of each bucket the places within it, LAST_PLACE where there is none. counts, uint8
[B]. occupied, uint64 [B / 64]: a bit for each bucket that holds events. near, int64: keys of buckets that have had
their turn, in order, from `near_at` on, then NO_EVENT. cal: columns C_... of `layout`.
"""

# Column numbers are many and used everywhere here; numba code has no types that mypy could check.
# ruff: noqa: F403, F405
# mypy: ignore-errors

import numba
import numpy as np

from bywash.fabric.heaps import push
from bywash.fabric.hints import assume, sort_8, sort_16, trailing_zeros
from bywash.fabric.layout import *

_WHOLE = 1000
_REFIT_AFTER = 1024


@numba.njit(forceinline=True, _nrt=False)
def place_of(key, source_bits, whole):
    """The place of an event, rounded down to whole ns if `whole`."""
    time = key >> SOURCE_BITS
    if whole:
        time = time // _WHOLE
    return time << source_bits | key & SOURCE_MASK


@numba.njit(forceinline=True, _nrt=False)
def _key_of(place, source_bits, whole):
    time = place >> source_bits
    if whole:
        time *= _WHOLE
    return time << SOURCE_BITS | place & ((1 << source_bits) - 1)


@numba.njit(forceinline=True, _nrt=False)
def schedule(wheel, counts, occupied, heap, cal, n_heap, n_wheel, front, shift, source_bits, whole, key):
    """Add an event; the new sizes of heap and calendar. `front` is the last bucket that has had its turn."""
    place = place_of(key, source_bits, whole)
    ahead = (place >> shift) - front
    fits = True
    if whole:
        fits = (place >> source_bits) * _WHOLE == key >> SOURCE_BITS and (key & SOURCE_MASK) >> source_bits == 0
    if fits and ahead > 0 and ahead < counts.shape[0]:
        bucket = (front + ahead) & (counts.shape[0] - 1)
        assume(bucket >= 0)
        count = np.int64(counts[bucket])
        if count < SLOTS:
            wheel[bucket * SLOTS + count] = place & ((1 << shift) - 1)
            counts[bucket] = count + 1
            occupied[bucket >> 6] |= np.uint64(1) << np.uint64(bucket & 63)
            return n_heap, n_wheel + 1
        cal[C_FULL] += 1
    elif ahead <= 0:
        cal[C_LATE] += 1
    else:
        cal[C_FAR] += 1
    return push(heap, n_heap, key), n_wheel


@numba.njit(forceinline=True, _nrt=False)
def refill(wheel, counts, occupied, near, heap, cal, n_heap, n_wheel, front, shift, source_bits, whole, near_at):
    """Move what is left of `near` to its start and sort the next bucket behind it; some bucket holds events.

    The new sizes of heap and calendar, front and shift.
    """
    left = 0
    while near[near_at] != NO_EVENT:
        near[left] = near[near_at]
        near_at += 1
        left += 1
    front = _next_bucket(occupied, front, counts.shape[0] - 1)
    bucket = front & (counts.shape[0] - 1)
    assume(bucket >= 0)
    row = bucket * SLOTS
    count = np.int64(counts[bucket])
    if count <= 8:
        sort_8(wheel, row)
    else:
        sort_16(wheel, row)
    for i in range(count):
        near[left + i] = _key_of(front << shift | np.int64(wheel[row + i]), source_bits, whole)
        wheel[row + i] = LAST_PLACE
    for i in range(AHEAD + 1):
        near[left + count + i] = NO_EVENT
    counts[bucket] = 0
    occupied[bucket >> 6] &= ~(np.uint64(1) << np.uint64(bucket & 63))
    n_wheel -= count
    cal[C_DRAINS] += 1
    cal[C_DRAINED] += count
    if cal[C_DRAINS] >= _REFIT_AFTER and n_heap + n_wheel < heap.shape[0] - 8:
        step = _too_wide_or_narrow(cal, shift)
        if step != 0:
            n_heap = _empty(wheel, counts, occupied, heap, n_heap, front, shift, source_bits, whole)
            n_wheel = 0
            shift += step
            front = place_of(near[left + count - 1], source_bits, whole) >> shift
    return n_heap, n_wheel, front, shift


@numba.njit(forceinline=True, _nrt=False)
def _next_bucket(occupied, front, mask):
    """The first bucket after `front` that holds events; there is one."""
    bucket = (front + 1) & mask
    assume(bucket >= 0)
    word = occupied[bucket >> 6] >> np.uint64(bucket & 63)
    if word == 0:
        bucket = ((bucket | 63) + 1) & mask
        assume(bucket >= 0)
        word = occupied[bucket >> 6]
        while word == 0:
            bucket = (bucket + 64) & mask
            assume(bucket >= 0)
            word = occupied[bucket >> 6]
    bucket += trailing_zeros(word)
    return front + 1 + ((bucket - front - 1) & mask)


@numba.njit(forceinline=True, _nrt=False)
def follow(cal, front, shift, source_bits, whole, key):
    """The calendar is empty and `key` came from the heap: the new front and shift."""
    if cal[C_FULL] + cal[C_FAR] + cal[C_LATE] >= _REFIT_AFTER:
        step = _too_wide_or_narrow(cal, shift)
        if step != 0:
            return place_of(key, source_bits, whole) >> (shift + step), shift + step
    return max(front, place_of(key, source_bits, whole) >> shift), shift


@numba.njit(_nrt=False)
def _too_wide_or_narrow(cal, shift):
    """-1 when buckets should be halved, by what happened since the last call, 1 when doubled, else 0."""
    drains, drained, full, far, late = cal[C_DRAINS], cal[C_DRAINED], cal[C_FULL], cal[C_FAR], cal[C_LATE]
    for column in (C_DRAINS, C_DRAINED, C_FULL, C_FAR, C_LATE):
        cal[column] = 0
    events = drained + full + far + late
    step = 0
    if far > full + late:
        step = 1 if 8 * far > events else 0
    elif 8 * (full + late) > events or drained > 10 * drains:
        step = -1
    elif drained < 5 * drains and 16 * (full + late) < events:
        step = 1
    return step if 0 <= shift + step <= MOST_SHIFT else 0


@numba.njit(_nrt=False)
def _empty(wheel, counts, occupied, heap, n_heap, front, shift, source_bits, whole):
    """Move all of the calendar to the heap; its new size."""
    mask = counts.shape[0] - 1
    for number in range(front + 1, front + mask + 1):
        bucket = number & mask
        row = bucket * SLOTS
        for i in range(counts[bucket]):
            place = number << shift | np.int64(wheel[row + i])
            n_heap = push(heap, n_heap, _key_of(place, source_bits, whole))
            wheel[row + i] = LAST_PLACE
        counts[bucket] = 0
    occupied[:] = 0
    return n_heap
