"""The least possible load of the most loaded rank, by mixed-integer programming (HiGHS in scipy): small cases only.

Shapes: E experts, R ranks. Rows may be cut anywhere; each expert away from home takes one of a rank's slots.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array


def least_max_load(rows_E, home_E, ranks, slots, *, seconds=20.0):
    """Lower bound and best value found of max load, in rows; equal when HiGHS finished.

    Variables: rows x[e, r], use y[e, r] in {0, 1}, and the load z to minimise.
    """
    experts = rows_E.size
    pairs = experts * ranks
    expert_P, rank_P = np.repeat(np.arange(experts), ranks), np.tile(np.arange(ranks), experts)
    pair_P, away_P = np.arange(pairs), rank_P != home_E[expert_P]
    first_load, first_use, first_slot = experts, experts + ranks, experts + ranks + pairs
    entries = [
        (expert_P, pair_P, np.ones(pairs)),  # all rows of an expert are somewhere
        (first_load + rank_P, pair_P, np.ones(pairs)),  # load of a rank, minus z, is at most 0
        (first_load + np.arange(ranks), np.full(ranks, 2 * pairs), -np.ones(ranks)),
        (first_use + pair_P[away_P], pair_P[away_P], np.ones(away_P.sum())),  # rows only where y is 1
        (first_use + pair_P[away_P], pairs + pair_P[away_P], -rows_E[expert_P[away_P]].astype(float)),
        (first_slot + rank_P[away_P], pairs + pair_P[away_P], np.ones(away_P.sum())),  # slots of a rank
    ]
    at, column, value = (np.concatenate(part) for part in zip(*entries))
    matrix = coo_array((value, (at, column)), shape=(first_slot + ranks, 2 * pairs + 1)).tocsr()
    high = np.concatenate([rows_E, np.zeros(ranks + pairs), np.full(ranks, slots)]).astype(float)
    low = np.concatenate([rows_E, np.full(2 * ranks + pairs, -np.inf)])
    cost, integral = np.zeros(2 * pairs + 1), np.zeros(2 * pairs + 1)
    cost[-1], integral[pairs:-1] = 1, 1
    upper = np.full(2 * pairs + 1, np.inf)
    upper[pairs:-1] = 1
    solved = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),
        integrality=integral,
        bounds=Bounds(np.zeros(2 * pairs + 1), upper),
        options={"time_limit": seconds, "mip_rel_gap": 1e-4},
    )
    if solved.x is None:
        raise RuntimeError(f"HiGHS: {solved.message}")
    return float(solved.mip_dual_bound), float(solved.x[-1])


def small_cases(number, seed=0):
    """(rows_E, home_E, ranks, slots) of skewed little layers: Zipf, gamma and lognormal popularity in turn."""
    rng = np.random.default_rng(seed)
    shapes = ((4, 16, 1), (4, 16, 2), (6, 24, 1), (6, 24, 2), (8, 32, 1), (8, 32, 2), (4, 32, 1), (8, 64, 1))
    for case in range(number):
        ranks, experts, slots = shapes[case % len(shapes)]
        weights = (
            rng.permutation(1 / np.arange(1, experts + 1) ** 0.8),
            rng.gamma(0.7, size=experts),
            rng.lognormal(0, 1, size=experts),
        )[case // len(shapes) % 3]
        rows_E = np.floor(weights / weights.sum() * ranks * 4096).astype(np.int64)
        yield rows_E, np.repeat(np.arange(ranks, dtype=np.int32), experts // ranks), ranks, slots
