"""One placement that serves all layers of a trace: what `bywash run --plan` takes, since it loads whole experts.

Shapes: L layers, R ranks, E experts, O experts of other ranks. Deterministic; ties go to the lower numbers. Knows
counts and speeds only. `plan` calls it.
"""

import numpy as np
from numpy.typing import NDArray

from bywash.balance.placement import Placement
from bywash.planner.group import IntArray, placements

MOST_SWAPS = 200


def common_placement(counts_LE: IntArray, own_R: IntArray, speeds: IntArray) -> Placement:
    """One placement for all layers: swaps of two experts, the best first, while the summed time of layers shrinks.

    A layer takes as long as its most loaded rank, so that a placement by summed counts alone can be worse than none.
    Starts from the better of consecutive numbers and summed counts. `own_R` experts on each rank throughout.
    """
    experts = counts_LE.shape[1]
    total = counts_LE.sum(axis=0, keepdims=True)
    starts = (placements(None, own_R, 1, experts)[0], placements(total, own_R, 1, experts)[0])
    best = min(starts, key=lambda one: _layers_time(counts_LE, one.home_E, speeds))
    home_E = best.home_E.copy()
    for _ in range(MOST_SWAPS):
        swap = _best_swap(counts_LE, home_E, speeds)
        if swap is None:
            break
        a, b = swap
        home_E[a], home_E[b] = home_E[b], home_E[a]
    return Placement(home_E=home_E, ranks=own_R.size)


def _loads_LR(counts_LE: IntArray, home_E: NDArray[np.int32], ranks: int) -> IntArray:
    loads_LR = np.zeros((counts_LE.shape[0], ranks), np.int64)
    np.add.at(loads_LR.T, home_E, counts_LE.T)
    return loads_LR


def _layers_time(counts_LE: IntArray, home_E: NDArray[np.int32], speeds: IntArray) -> float:
    return float((_loads_LR(counts_LE, home_E, speeds.size) / speeds).max(axis=1).sum())


def _best_swap(counts_LE: IntArray, home_E: NDArray[np.int32], speeds: IntArray) -> tuple[int, int] | None:
    """Experts of the rank that is slowest in most layers' time against all others; None when no swap helps."""
    time_LR = _loads_LR(counts_LE, home_E, speeds.size) / speeds
    now = float(time_LR.max(axis=1).sum())
    slowest = int(np.bincount(time_LR.argmax(axis=1), weights=time_LR.max(axis=1), minlength=speeds.size).argmax())
    mine, others = np.flatnonzero(home_E == slowest), np.flatnonzero(home_E != slowest)
    found: tuple[float, int, int] = (now, -1, -1)
    for a in mine:
        less_LO = counts_LE[:, a : a + 1] - counts_LE[:, others]
        mine_LO = time_LR[:, slowest : slowest + 1] - less_LO / speeds[slowest]
        theirs_LO = time_LR[:, home_E[others]] + less_LO / speeds[home_E[others]]
        rest_LR = time_LR.copy()
        rest_LR[:, slowest] = 0
        # The most loaded of the ranks that the swap leaves alone: the largest, or the second where that is swapped.
        order_LR = np.argsort(rest_LR, axis=1)
        first, second = order_LR[:, -1:], order_LR[:, -2:-1]
        is_first_LO = first == home_E[others][None, :]
        rest_LO = np.where(is_first_LO, np.take_along_axis(rest_LR, second, 1), np.take_along_axis(rest_LR, first, 1))
        sums_O = np.maximum(np.maximum(mine_LO, theirs_LO), rest_LO).sum(axis=0)
        at = int(sums_O.argmin()) if others.size else -1
        if at >= 0 and sums_O[at] < found[0] * (1 - 1e-9):
            found = (float(sums_O[at]), int(a), int(others[at]))
    return (found[1], found[2]) if found[1] >= 0 else None
