"""Pure arithmetic on rows that every CPU exchange shares: deduplicate, pair up, sum.

Shapes: T tokens, K experts per token, D hidden, R ranks, N rows, M (row, expert) pairs.
Knows nothing of processes or transports.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bywash.balance import StepPlan
from bywash.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class SendList:
    """Which tokens go to one rank, and which of their experts run there.

    Attributes:
        tokens_N: int64 [N], ascending; each token once.
        ids_NK: int64 [N, K], the expert where that rank computes the pair, -1 elsewhere.
        weights_NK: float32 [N, K].
    """

    tokens_N: Tensor
    ids_NK: Tensor
    weights_NK: Tensor


def send_lists(routing: Routing, plan: StepPlan) -> list[SendList]:
    """One deduplicated `SendList` for each rank, from the plan's rank of every expert.

    Example: ids_TK = [[0, 1], [1, 2]] with rank_E = [0, 0, 1] sends tokens [0, 1] to rank 0 with
    ids [[0, 1], [1, -1]], and token [1] to rank 1 with ids [[-1, 2]].
    """
    ids_TK, weights_TK = routing.ids_TK.numpy(), routing.weights_TK.detach().numpy()
    # numpy: a decode step has so few numbers that calls are what costs. "No expert" (-1) finds the rank appended last.
    rank_TK = np.append(plan.rank_E, -1)[ids_TK]
    lists = []
    for rank in range(plan.rows_R.size):
        here_TK = rank_TK == rank
        tokens = np.flatnonzero(here_TK.any(axis=1))
        ids_NK = np.where(here_TK[tokens], ids_TK[tokens], -1)
        sent = SendList(
            tokens_N=torch.from_numpy(tokens),
            ids_NK=torch.from_numpy(ids_NK),
            weights_NK=torch.from_numpy(weights_TK[tokens]),
        )
        lists.append(sent)
    return lists


def weighted_sum(y_MD: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Sum each row's outputs with their weights, in k order, in float32: [M, D] to [N, D] of y's dtype.

    `y_MD` has one row per pair with ids_NK >= 0, in row-major order. The order of the additions depends on
    nothing but k, which is what makes `exact` bitwise the same for any number of ranks.
    """
    valid_NK = ids_NK >= 0
    position_NK = (valid_NK.reshape(-1).cumsum(0) - 1).view_as(ids_NK)
    total = torch.zeros(ids_NK.shape[0], y_MD.shape[1], dtype=torch.float32)
    for k in range(ids_NK.shape[1]):
        rows = valid_NK[:, k].nonzero().squeeze(1)
        y = y_MD[position_NK[rows, k]].float()
        total[rows] += y * weights_NK[rows, k, None]
    return total.to(y_MD.dtype)


def pairs_per_rank(lists: list[SendList]) -> list[int]:
    """How many (token, expert) pairs each rank computes for this one."""
    return [int(np.count_nonzero(sent.ids_NK.numpy() >= 0)) for sent in lists]
