"""How others balance, written by us from their descriptions, to plan the same counts and compare. No code of theirs.

Shapes: E experts, R ranks. Each takes rows_E, the rows of each expert in one step, and says how many rows each rank
computes, how many of them away from home, and how many copies of weights the step needs. `bywash bench overflow` and
benchmarks/balance call them. Left out: whatever does not change these three numbers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.balance.placement import Placement

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a policy makes of one step: rows [R], rows away from home, copies of an expert's weights."""

    rows_R: Rows
    spilled: int
    fetches: int


def at_home(rows_E: Rows, placement: Placement) -> Outcome:
    """`none`: every row at its expert's home."""
    rows_R = np.zeros(placement.ranks, np.int64)
    np.add.at(rows_R, placement.home_E, rows_E)
    return Outcome(rows_R=rows_R, spilled=0, fetches=0)


def eplb(rows_E: Rows, history_E: Rows, ranks: int, slots: int) -> Outcome:
    """`eplb`: replicas from history. Extra copies go to the expert with the most rows per copy; copies are packed,
    largest first, on the least loaded rank with room; a step's rows are dealt evenly over an expert's copies.

    Nothing is fetched in a step: placing copies again, now and then, is not counted. `slots` copies a rank are extra.
    """
    experts = rows_E.size
    places_R = np.bincount(Placement.equal(experts, ranks).home_E, minlength=ranks) + slots
    copies_E = np.ones(experts, np.int64)
    for _ in range(slots * ranks):
        copies_E[int((history_E / copies_E).argmax())] += 1
    copies = np.repeat(np.arange(experts), copies_E)
    expected = history_E[copies] / copies_E[copies]
    time_R, rows_R = np.zeros(ranks), np.zeros(ranks, np.int64)
    dealt_E = np.zeros(experts, np.int64)
    for copy in np.argsort(-expected, kind="stable"):
        rank = int(np.where(places_R > 0, time_R, np.inf).argmin())
        places_R[rank] -= 1
        time_R[rank] += expected[copy]
        expert = copies[copy]
        share, extra = divmod(int(rows_E[expert]), int(copies_E[expert]))
        rows_R[rank] += share + (dealt_E[expert] < extra)
        dealt_E[expert] += 1
    return Outcome(rows_R=rows_R, spilled=int(rows_E[copies_E > 1].sum()), fetches=0)


def llep(rows_E: Rows, placement: Placement, *, alpha_1024: int = 1024, least: int = 1) -> Outcome:
    """`llep`: least-loaded expert parallelism. Experts, largest first: the home takes rows up to its capacity (alpha
    times the mean, less what its other experts still bring); the rest goes in chunks to the least loaded ranks, with
    the weights, every step anew and with room for any number of them; chunks below `least` stay at home.
    """
    ranks, home_E = placement.ranks, placement.home_E
    most = -(-int(rows_E.sum()) * alpha_1024 // (1024 * ranks))
    pending_R = at_home(rows_E, placement).rows_R  # rows that homes still bring
    rows_R = np.zeros(ranks, np.int64)
    spilled = fetches = 0
    for expert in np.argsort(-rows_E, kind="stable"):
        home, rows = int(home_E[expert]), int(rows_E[expert])
        pending_R[home] -= rows
        kept = min(rows, max(0, most - int(rows_R[home]) - int(pending_R[home])))
        rows_R[home] += kept
        rest = rows - kept
        while rest > 0:
            load_R = rows_R + pending_R
            load_R[home] = np.iinfo(np.int64).max
            rank = int(load_R.argmin()) if ranks > 1 else home
            chunk = min(rest, most - int(load_R[rank])) if ranks > 1 else 0
            if chunk < least:
                rows_R[home] += rest
                break
            rows_R[rank] += chunk
            rest -= chunk
            spilled, fetches = spilled + chunk, fetches + 1
    return Outcome(rows_R=rows_R, spilled=spilled, fetches=fetches)
