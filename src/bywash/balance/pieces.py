"""Where each (token, expert) pair is computed, from a plan and the pair's place among its source's pairs.

Shapes: T tokens of one source rank, K experts per token, E experts, R ranks, Q source ranks. Knows nothing of rows or
transports; every exchange calls it, and the device computes the same.
"""

import numpy as np
from numpy.typing import NDArray

from bywash.balance.plan import StepPlan


def ranks_of_pairs(plan: StepPlan, source: int, ids_TK: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [T, K]: the rank that computes each pair, -1 where there is none.

    A pair's position is the rows that earlier source ranks send to the expert plus the pairs of earlier tokens here.
    Under an earlier step's plan, pairs beyond those that it counted go home, which takes any number of them.

    Example: 5 rows of expert 0, rows_ER[0] = [3, 2], of which source 0 sends 4: its token 0 to 2 go to rank 0, token 3
    to rank 1, and a fifth that the plan did not count to the home.
    """
    rank_TK = np.append(plan.rank_E, -1)[ids_TK].astype(np.int64)
    if not plan.spilled:
        return rank_TK
    split_E = np.append(plan.home_rows_E < plan.counts_RE.sum(axis=0, dtype=np.int64), False)
    pairs_P = np.flatnonzero(split_E[ids_TK])
    expert_P = ids_TK.reshape(-1)[pairs_P]
    place_P = _places_within(expert_P)
    counted_P = place_P < plan.counts_RE[source, expert_P]
    pairs_P, expert_P, place_P = pairs_P[counted_P], expert_P[counted_P], place_P[counted_P]
    place_P += plan.counts_RE[:source].sum(axis=0, dtype=np.int64)[expert_P]
    ends_ER = plan.rows_ER.cumsum(axis=1, dtype=np.int64)
    rank_TK.reshape(-1)[pairs_P] = (place_P[:, None] >= ends_ER[expert_P]).sum(axis=1)
    return rank_TK


def rows_under(plan: StepPlan, counts_RE: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 [E, R]: the rows of each expert that each rank computes in a step with these counts under `plan`.

    That is `plan.rows_ER` where the plan was made from these counts. Under an earlier step's plan, slots get what they
    were meant to get or less, and homes the rest; the sum over an expert's ranks of `ranks_of_pairs` is the same.

    Args:
        plan: see `ranks_of_pairs`.
        counts_RE: int32 [R, E], of the step that runs.
    """
    rows_E = counts_RE.sum(axis=0, dtype=np.int64)
    counted_QE = np.minimum(counts_RE, plan.counts_RE).astype(np.int64)
    starts_QE = plan.counts_RE.cumsum(axis=0, dtype=np.int64) - plan.counts_RE
    ends_ER = plan.rows_ER.cumsum(axis=1, dtype=np.int64)
    first_QER = np.maximum(starts_QE[:, :, None], ends_ER - plan.rows_ER)
    last_QER = np.minimum((starts_QE + counted_QE)[:, :, None], ends_ER)
    found_ER: NDArray[np.int64] = (last_QER - first_QER).clip(min=0).sum(axis=0)
    found_ER[np.arange(plan.rank_E.size), plan.rank_E] += rows_E - found_ER.sum(axis=1)
    return found_ER


def _places_within(expert_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many earlier pairs have the same expert. Example: [7, 2, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(expert_P, kind="stable")
    sorted_P = expert_P[order]
    first_P = np.searchsorted(sorted_P, sorted_P)
    place_P = np.empty_like(expert_P)
    place_P[order] = np.arange(expert_P.size) - first_P
    return place_P
