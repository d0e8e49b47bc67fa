"""The planner compiled with numba: the same integers as `naive.py` and `kernels/plan.cu`, in some 20 to 60 us.

Shapes: R ranks, E experts, S slots per rank, P pieces. Arrays in, arrays out; `plan_step` checks and wraps them.
`naive.py` says what is computed and why; here every loop is over arrays, and nothing is allocated per piece.
Imported by the first plan that has limits: numba takes half a second to load.
"""

# mypy: disable-error-code="no-any-return,return-value,assignment,arg-type"
# numba makes every integer an int64; mypy takes those of arrays and those of Python for different things.
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from bywash.balance.fast_keep import keep_pieces
from bywash.balance.limits import ATTEMPTS, HOT_PLANS, MOST_AGE, MOST_HOT_ROWS, REFINED

I32: TypeAlias = NDArray[Any]
I64: TypeAlias = NDArray[Any]
Flags: TypeAlias = NDArray[Any]
Four: TypeAlias = tuple[int, int, int, int]

SOURCES = ("fast", "fast_keep", "limits")
LOAD, TARGET, LEFT, CLOSED = 0, 1, 2, 3
"""Columns of what an attempt knows of a rank: rows, rows it should have, slots still free, nothing left to try."""


def _sources() -> str:
    """A digest of all code and constants that are compiled into a plan: numba's cache looks at this file alone."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _compiled() -> Callable[..., int]:
    """`plan_arrays`, compiled at its first call or read from numba's cache. What it calls has no cache of its own."""
    VERSION = _sources()

    @njit(cache=True, nogil=True)
    def plan_arrays(
        counts_RE: I32,
        home_E: I32,
        speeds_R: I64,
        limits: Four,
        slots: tuple[int, int, int],
        keys_RS: I32,
        ages_RS: I32,
        hot_E: I32,
        rows_ER: I32,
        fetch_RS: I32,
        rows_R: I64,
    ) -> int:
        """Fill in a plan; returns its digest.

        Args:
            counts_RE, home_E, speeds_R: see `plan_step`.
            limits: capacity, alpha in 1024ths, fetch_rows, use_rows.
            slots: layer, layers, keep.
            keys_RS, ages_RS, hot_E: the directory, of which the layer's part, changed in place.
            rows_ER, fetch_RS, rows_R: written.
        """
        _ = VERSION  # part of the cache's key
        experts = home_E.size
        rows_E, weighed_E = np.zeros(experts, np.int64), np.zeros(experts, np.uint32)
        for source in range(counts_RE.shape[0]):
            spread = np.uint32(np.uint32(source + 1) * np.uint32(0x9E3779B9))
            weight = np.uint32((spread ^ (spread >> np.uint32(16))) | np.uint32(1))
            for expert in range(experts):
                rows_E[expert] += counts_RE[source, expert]
                weighed_E[expert] += np.uint32(weight * np.uint32(counts_RE[source, expert]))
        rows_R[:] = 0
        rows_ER[:] = 0
        for expert in range(experts):
            rows_R[home_E[expert]] += rows_E[expert]
            rows_ER[expert, home_E[expert]] = rows_E[expert]
            hot_E[expert] += min(rows_E[expert], MOST_HOT_ROWS) - hot_E[expert] // HOT_PLANS
        fetch_RS[:] = -1
        for rank in range(keys_RS.shape[0]):
            for slot in range(keys_RS.shape[1]):
                ages_RS[rank, slot] = min(ages_RS[rank, slot] + 1, MOST_AGE)
        if _over(rows_R, _targets(rows_R, speeds_R, limits[1])) or rows_E.max() > limits[0]:
            own_RS = keys_RS // experts == slots[0]
            held_RS = np.where(own_RS, keys_RS - slots[0] * experts, -1)
            left_R = ((keys_RS < 0) | own_RS | (ages_RS >= slots[2])).sum(axis=1)
            target_R = _targets(rows_R, speeds_R, limits[1])
            pieces_P3 = keep_pieces(rows_E, home_E, rows_R, target_R, held_RS, left_R, hot_E, limits)
            if pieces_P3.shape[0] == 0:
                pieces_P3 = _best_attempt(rows_E, home_E, rows_R, speeds_R, limits, held_RS, left_R)
            for expert, rank, rows in pieces_P3:
                rows_ER[expert, rank] = rows
                rows_ER[expert, home_E[expert]] -= rows
                rows_R[home_E[expert]] -= rows
                rows_R[rank] += rows
            _give_slots(pieces_P3, home_E, slots, keys_RS, ages_RS, fetch_RS)
        digest, position = np.int64(0), 0
        for words in (weighed_E.view(np.int32), home_E, rows_ER.ravel(), keys_RS.ravel(), fetch_RS.ravel()):
            digest += _mixed(words, position)
            position += words.size
        return digest & 0xFFFFFFFF

    return plan_arrays


@njit(nogil=True)
def _mixed(words: I32, position: int) -> int:
    """The sum of `digest32` over words that begin after `position`."""
    total = np.uint64(0)
    for i in range(words.size):
        mixed = np.uint32(np.uint32(words[i]) + np.uint32(position + i + 1) * np.uint32(0x9E3779B9))
        mixed = np.uint32(np.uint32(mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B))
        mixed = np.uint32(np.uint32(mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35))
        total += np.uint64(np.uint32(mixed ^ (mixed >> np.uint32(16))))
    return np.int64(total)


@njit(nogil=True)
def _targets(load_R: I64, speeds_R: I64, alpha_1024: int) -> I64:
    total, speed = load_R.sum(), speeds_R.sum()
    target_R = np.empty_like(load_R)
    for rank in range(load_R.size):
        share = total * speeds_R[rank] * alpha_1024
        target_R[rank] = min(total, (share + 1024 * speed - 1) // (1024 * speed))
    return target_R


@njit(nogil=True)
def _over(load_R: I64, target_R: I64) -> bool:
    for rank in range(load_R.size):  # noqa: SIM110, numba compiles no generators
        if load_R[rank] > target_R[rank]:
            return True
    return False


@njit(nogil=True)
def _best_attempt(
    rows_E: I64, home_E: I32, rows_R: I64, speeds_R: I64, limits: Four, held_RS: I32, left_R: I64
) -> I64:  # fmt: skip
    """int64 [P, 3], the pieces (expert, rank, rows) of the first attempt that fits, else of the best one."""
    experts, ranks = home_E.size, rows_R.size
    by_home_E = np.argsort(home_E, kind="mergesort")
    first_R = np.searchsorted(home_E[by_home_E], np.arange(ranks + 1))
    given = (rows_E, home_E, rows_R, speeds_R, limits, held_RS, left_R, by_home_E, first_R)
    pieces_P3 = np.empty((left_R.sum(), 3), np.int64)
    holds = held_RS.size > 0 and held_RS.max() >= 0  # else an attempt from scratch is the same
    room = (np.empty_like(rows_E), np.empty((ranks, 4), np.int64), np.zeros((experts, ranks), np.bool_), pieces_P3)
    best_P3, best, best_pieces = np.empty_like(pieces_P3), np.int64(-1), 0
    for turn in range(2 * ATTEMPTS):
        attempt, afresh = (turn // 2, turn % 2 > 0) if turn >= 4 else (turn % 2, turn >= 2)
        if afresh and not holds:
            continue
        alpha = _alpha(limits[1], attempt)
        pieces, fits, worst = _try(alpha, attempt > 0, afresh, given, room)
        if fits or best < 0 or worst < best:
            best, best_pieces = worst, pieces
            best_P3[:pieces] = pieces_P3[:pieces]
        if fits:
            break
    last, fails, fitting = _alpha(limits[1], attempt - 1), 0, 16 if fits and attempt >= REFINED else 0
    while fitting - fails > 1:
        middle = (fails + fitting) // 2
        pieces, fits, _ = _try(last + (alpha - last) * middle // 16, True, afresh, given, room)
        if fits:
            fitting, best_pieces = middle, pieces
            best_P3[:pieces] = pieces_P3[:pieces]
        else:
            fails = middle
    return best_P3[:best_pieces]


@njit(nogil=True)
def _alpha(alpha_1024: int, attempt: int) -> int:
    """The target of an attempt, in 1024ths of the fair share."""
    step = max(attempt - 1, 0)
    return alpha_1024 + alpha_1024 * step * step // 256


@njit(nogil=True)
def _try(
    alpha: int,
    overdraw: bool,
    afresh: bool,
    given: tuple[I64, I32, I64, I64, Four, I32, I64, I64, I64],
    room: tuple[I64, I64, Flags, I64],
) -> tuple[int, bool, int]:
    """An attempt from everything at home: pieces, whether everything fits, the worst load relative to speed."""
    rows_E, home_E, rows_R, speeds_R, limits, held_RS, left_R, by_home_E, first_R = given
    stay_E, ranks_R4, here_ER, pieces_P3 = room
    stay_E[:] = rows_E
    ranks_R4[:, LOAD] = rows_R
    ranks_R4[:, TARGET] = _targets(rows_R, speeds_R, alpha)
    ranks_R4[:, LEFT] = left_R
    how = (overdraw, afresh)
    pieces, fits = _attempt(stay_E, home_E, ranks_R4, held_RS, by_home_E, first_R, here_ER, limits, how, pieces_P3)
    for piece in range(pieces):
        here_ER[pieces_P3[piece, 0], pieces_P3[piece, 1]] = False
    return pieces, fits, (ranks_R4[:, LOAD] * speeds_R.sum() // np.maximum(1, speeds_R)).max()


@njit(nogil=True)
def _attempt(
    stay_E: I64, home_E: I32, ranks_R4: I64, held_RS: I32, by_home_E: I64, first_R: I64, here_ER: Flags, limits: Four,
    how: tuple[bool, bool], pieces_P3: I64,
) -> tuple[int, bool]:  # fmt: skip
    """Move pieces until everything fits or nothing moves; returns how many there are and whether everything fits."""
    (capacity, _, fetch_rows, use_rows), (overdraw, afresh) = limits, how
    pieces, above = 0, (stay_E > capacity).sum()
    for fetching in (False, True):
        if afresh and not fetching:
            continue
        least = fetch_rows if fetching else use_rows
        ranks_R4[:, CLOSED] = 0
        while above > 0 or _over(ranks_R4[:, LOAD], ranks_R4[:, TARGET]):
            rank = _emptiest(ranks_R4, least)
            if rank < 0:
                break
            rules = (capacity, least, overdraw, fetching)
            if fetching:
                expert, rows = _best_owned(rank, stay_E, home_E, ranks_R4, by_home_E, first_R, here_ER, rules)
            else:
                expert, rows = _best_held(rank, stay_E, home_E, ranks_R4, held_RS, here_ER, rules)
            if expert < 0:
                ranks_R4[rank, CLOSED] = 1
                continue
            rows = min(rows, ranks_R4[rank, TARGET] - ranks_R4[rank, LOAD], capacity)
            above -= stay_E[expert] > capacity >= stay_E[expert] - rows
            stay_E[expert] -= rows
            ranks_R4[home_E[expert], LOAD] -= rows
            ranks_R4[rank, LOAD] += rows
            ranks_R4[rank, LEFT] -= 1
            here_ER[expert, rank] = True
            pieces_P3[pieces, 0], pieces_P3[pieces, 1], pieces_P3[pieces, 2] = expert, rank, rows
            pieces += 1
    return pieces, above == 0 and not _over(ranks_R4[:, LOAD], ranks_R4[:, TARGET])


@njit(nogil=True)
def _emptiest(ranks_R4: I64, least: int) -> int:
    """The rank with a free slot that is most below its target, by at least `least`; -1 for none."""
    found, most = -1, least - 1
    for rank in range(ranks_R4.shape[0]):
        room = ranks_R4[rank, TARGET] - ranks_R4[rank, LOAD]
        if room > most and ranks_R4[rank, LEFT] > 0 and not ranks_R4[rank, CLOSED]:
            found, most = rank, room
    return found


@njit(nogil=True)
def _best_held(
    rank: int, stay_E: I64, home_E: I32, ranks_R4: I64, held_RS: I32, here_ER: Flags, rules: tuple[int, int, bool, bool]
) -> tuple[int, int]:
    """The expert that `rank` should take rows from, of those in its slots, and how many may leave."""
    best_key, best, rows = np.int64(0), -1, np.int64(0)
    for slot in range(held_RS.shape[1]):
        expert = held_RS[rank, slot]
        if expert < 0 or home_E[expert] == rank or here_ER[expert, rank]:
            continue
        key, can = _key(rank, home_E[expert], stay_E[expert], ranks_R4, rules)
        if key > best_key:
            best_key, best, rows = key, expert, can
    return best, rows


@njit(nogil=True)
def _best_owned(
    rank: int, stay_E: I64, home_E: I32, ranks_R4: I64, by_home_E: I64, first_R: I64, here_ER: Flags,
    rules: tuple[int, int, bool, bool],
) -> tuple[int, int]:  # fmt: skip
    """The same of all experts: the largest one of each donor."""
    best_key, best, rows = np.int64(0), -1, np.int64(0)
    for donor in range(ranks_R4.shape[0]):
        if donor == rank:
            continue
        largest, most = -1, np.int64(0)
        for i in range(first_R[donor], first_R[donor + 1]):
            expert = by_home_E[i]
            if stay_E[expert] > most and not here_ER[expert, rank]:
                largest, most = expert, stay_E[expert]
        if largest < 0:
            continue
        key, can = _key(rank, donor, most, ranks_R4, rules)
        if key > best_key:
            best_key, best, rows = key, largest, can
    return best, rows


@njit(nogil=True)
def _key(rank: int, donor: int, stay: int, ranks_R4: I64, rules: tuple[int, int, bool, bool]) -> tuple[int, int]:
    """How good it is to give rows of an expert to `rank` (class << 30 | value; 0: no use), and how many may leave."""
    capacity, least, overdraw, fetching = rules
    excess = ranks_R4[donor, LOAD] - ranks_R4[donor, TARGET]
    can = stay if overdraw else min(stay, max(excess, stay - capacity))
    if can < least:
        return np.int64(0), np.int64(0)
    room, left = ranks_R4[rank, TARGET] - ranks_R4[rank, LOAD], ranks_R4[rank, LEFT]
    fills = can >= min(max((room + left - 1) // left, least), capacity)
    over = excess > 0 or stay > capacity
    value = excess + ranks_R4[:, TARGET].max()
    if fills and over:
        return np.int64(3 << 30) + value, can
    if fills and fetching and overdraw and ranks_R4[donor, LEFT] > 0:
        return np.int64(2 << 30) + value, can
    return np.int64(1 << 30) + can if over else np.int64(0), can


@njit(nogil=True)
def _give_slots(
    pieces_P3: I64, home_E: I32, slots: tuple[int, int, int], keys_RS: I32, ages_RS: I32, fetch_RS: I32
) -> None:
    """Slots that hold the expert first, so that none of them is taken; then the least useful one for each other."""
    layer, layers, keep = slots
    experts = home_E.size
    found_P = np.zeros(pieces_P3.shape[0], np.bool_)
    for piece in range(pieces_P3.shape[0]):
        for slot in range(keys_RS.shape[1]):
            if keys_RS[pieces_P3[piece, 1], slot] == layer * experts + pieces_P3[piece, 0]:
                ages_RS[pieces_P3[piece, 1], slot] = 0
                found_P[piece] = True
    for piece in range(pieces_P3.shape[0]):
        if found_P[piece]:
            continue
        expert, rank = pieces_P3[piece, 0], pieces_P3[piece, 1]
        most, chosen = np.int64(-1), -1
        for slot in range(keys_RS.shape[1]):
            key, age = np.int64(keys_RS[rank, slot]), np.int64(ages_RS[rank, slot])
            if key < 0:
                worth = np.int64(3 << 30)
            elif age == 0 or (key // experts != layer and age < keep):
                continue
            else:
                worth = np.int64(2 << 30) + age if age >= layers else np.int64(1 << 30) + layers - age
            if worth > most:
                most, chosen = worth, slot
        keys_RS[rank, chosen], ages_RS[rank, chosen] = layer * experts + expert, 0
        fetch_RS[rank, chosen] = home_E[expert]


plan_arrays = _compiled()
