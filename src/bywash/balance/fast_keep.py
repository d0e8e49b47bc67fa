"""The attempt of a plan that keeps what slots hold, compiled with numba: the same integers as `naive_keep.py`.

Shapes: R ranks, E experts, S slots per rank, N entries: first those of slots, by rank, then those to fetch. `fast.py`
calls it.
"""

# mypy: disable-error-code="no-any-return,return-value,assignment,arg-type"
# as in fast.py
from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from bywash.balance.limits import KEEP_ENTRIES, KEEP_FETCHES, KEEP_MOVES

I64: TypeAlias = NDArray[Any]
Flags: TypeAlias = NDArray[Any]

EXPERT, RANK, ROWS = 0, 1, 2
"""Columns of an entry."""


@njit(nogil=True)
def keep_pieces(
    rows_E: I64, home_E: I64, rows_R: I64, target_R: I64, held_RS: I64, left_R: I64, hot_E: I64,
    limits: tuple[int, int, int, int],
) -> I64:  # fmt: skip
    """int64 [P, 3], the pieces (expert, rank, rows); none if they would not fit."""
    entries_N3, first_R, held = _entries(held_RS, home_E)
    if held == 0 or held > KEEP_ENTRIES:
        return entries_N3[:0]
    capacity, _, fetch_rows, use_rows = limits
    stay_E, load_R, left_R = rows_E.copy(), rows_R.copy(), left_R.copy()
    seen_R, from_R = np.zeros(load_R.size, np.bool_), np.empty(load_R.size, np.int64)
    arc_RR = np.zeros((load_R.size, load_R.size), np.bool_)
    entries = held
    for _ in range(KEEP_MOVES):
        end = _chain(entries_N3[:entries], home_E, stay_E, load_R, target_R, left_R, capacity, arc_RR, seen_R, from_R)
        if end == -2:
            break
        if end >= 0:
            state = (entries_N3[:entries], held, first_R, home_E, stay_E, left_R, capacity)
            _carry(state, load_R, target_R, from_R, end)
            continue
        expert, rank = _best_fetch(
            entries_N3[:entries], home_E, stay_E, load_R, target_R, left_R, hot_E, seen_R, capacity, fetch_rows
        )
        if expert < 0 or entries == held + KEEP_FETCHES:
            return entries_N3[:0]
        entries_N3[entries, EXPERT], entries_N3[entries, RANK] = expert, rank
        entries += 1
    fits = stay_E.max() <= capacity
    for rank in range(load_R.size):
        fits &= load_R[rank] <= target_R[rank]
    for i in range(entries):
        least = use_rows if i < held else fetch_rows
        fits &= entries_N3[i, ROWS] == 0 or entries_N3[i, ROWS] >= least
    if not fits:
        return entries_N3[:0]
    pieces = 0
    for i in range(entries):
        if entries_N3[i, ROWS] > 0:
            entries_N3[pieces] = entries_N3[i]
            pieces += 1
    return entries_N3[:pieces]


@njit(nogil=True)
def _entries(held_RS: I64, home_E: I64) -> tuple[I64, I64, int]:
    """Entries of slots, room for fetches behind them; where each rank's begin; how many."""
    ranks, slots = held_RS.shape
    entries_N3, first_R = np.zeros((ranks * slots + KEEP_FETCHES, 3), np.int64), np.zeros(ranks + 1, np.int64)
    entries = 0
    for rank in range(ranks):
        for slot in range(slots):
            expert = held_RS[rank, slot]
            if expert >= 0 and home_E[expert] != rank:
                entries_N3[entries, EXPERT], entries_N3[entries, RANK] = expert, rank
                entries += 1
        first_R[rank + 1] = entries
    return entries_N3, first_R, entries


@njit(nogil=True)
def _chain(
    entries_N3: I64, home_E: I64, stay_E: I64, load_R: I64, target_R: I64, left_R: I64, capacity: int, arc_RR: Flags,
    seen_R: Flags, from_R: I64,
) -> int:  # fmt: skip
    """The end of a chain, with `from_R` along it; -1 for none, `seen_R` are the ranks reached; -2: nobody is over."""
    ranks = load_R.size
    arc_RR[:] = False
    for i in range(entries_N3.shape[0]):
        expert, rank, rows = entries_N3[i]
        home = home_E[expert]
        if stay_E[expert] > 0 and rows < capacity and (rows > 0 or left_R[rank] > 0):
            arc_RR[home, rank] = True
        if rows > 0:
            arc_RR[rank, home] = True
    frontier_R, found = np.empty(ranks, np.int64), 0
    for rank in range(ranks):
        seen_R[rank], from_R[rank] = load_R[rank] > target_R[rank], -1
        if seen_R[rank]:
            frontier_R[found] = rank
            found += 1
    if found == 0:
        return -2
    begin = 0
    while begin < found:
        last, end, room = found, -1, np.int64(0)
        for rank in range(ranks):
            if seen_R[rank]:
                continue
            for i in range(begin, last):
                if arc_RR[frontier_R[i], rank]:
                    from_R[rank] = frontier_R[i]
                    frontier_R[found] = rank
                    found += 1
                    if target_R[rank] - load_R[rank] > room:
                        end, room = rank, target_R[rank] - load_R[rank]
                    break
        if end >= 0:
            return end
        for i in range(last, found):
            seen_R[frontier_R[i]] = True
        begin = last
    return -1


@njit(nogil=True)
def _carry(state: tuple[I64, int, I64, I64, I64, I64, int], load_R: I64, target_R: I64, from_R: I64, end: int) -> None:
    """Move what the chain to `end` can carry."""
    entries_N3, _, _, home_E, stay_E, left_R, _ = state
    rows, rank = target_R[end] - load_R[end], end
    while from_R[rank] >= 0:
        rows = min(rows, _link(state, from_R[rank], rank)[1])
        rank = from_R[rank]
    rows = min(rows, load_R[rank] - target_R[rank])
    load_R[rank] -= rows
    load_R[end] += rows
    rank = end
    while from_R[rank] >= 0:
        entry, _ = _link(state, from_R[rank], rank)
        expert, there = entries_N3[entry, EXPERT], entries_N3[entry, RANK]
        moved = rows if there == rank and home_E[expert] == from_R[rank] else -rows
        left_R[there] += entries_N3[entry, ROWS] > 0
        entries_N3[entry, ROWS] += moved
        left_R[there] -= entries_N3[entry, ROWS] > 0
        stay_E[expert] -= moved
        rank = from_R[rank]


@njit(nogil=True)
def _link(state: tuple[I64, int, I64, I64, I64, I64, int], giver: int, taker: int) -> tuple[int, int]:
    """The entry that moves rows from rank to rank, and how many it may: out, else back."""
    entries_N3, held, first_R, home_E, stay_E, left_R, capacity = state
    best, most = -1, np.int64(0)
    for back in (False, True):
        owner, home = (giver, taker) if back else (taker, giver)
        own = first_R[owner + 1] - first_R[owner]
        for k in range(own + entries_N3.shape[0] - held):
            i = first_R[owner] + k if k < own else held + k - own
            expert, rank, rows = entries_N3[i]
            if rank != owner or home_E[expert] != home:
                continue
            can = rows
            if not back:
                can = min(stay_E[expert], capacity - rows) if rows > 0 or left_R[rank] > 0 else np.int64(0)
            if can > most:
                best, most = i, can
        if best >= 0:
            break
    return best, most


@njit(nogil=True)
def _best_fetch(
    entries_N3: I64, home_E: I64, stay_E: I64, load_R: I64, target_R: I64, left_R: I64, hot_E: I64, seen_R: Flags,
    capacity: int, least: int,
) -> tuple[int, int]:  # fmt: skip
    """(expert, rank) that relieves most, the hottest on ties; -1 for none."""
    rank, room, top = -1, np.int64(0), np.int64(0)
    for r in range(load_R.size):
        top = max(top, load_R[r] - target_R[r])
        if left_R[r] > 0 and target_R[r] - load_R[r] > room:
            rank, room = r, target_R[r] - load_R[r]
    best, best_gain, hottest = -1, least - 1, np.int64(0)
    if rank < 0:
        return best, rank
    there_E = np.zeros(home_E.size, np.bool_)
    for i in range(entries_N3.shape[0]):
        if entries_N3[i, RANK] == rank:
            there_E[entries_N3[i, EXPERT]] = True
    for expert in range(home_E.size):
        home = home_E[expert]
        if not seen_R[home] or there_E[expert]:
            continue
        excess = load_R[home] - target_R[home]
        gain = min(min(stay_E[expert], excess if excess > 0 else top), min(room, capacity))
        if gain > best_gain or (gain == best_gain and best >= 0 and hot_E[expert] > hottest):
            best, best_gain, hottest = expert, gain, np.int64(hot_E[expert])
    return best, rank
