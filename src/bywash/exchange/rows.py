"""Pure arithmetic on rows that every CPU exchange shares: deduplicate, pair up, sum.

Shapes: T tokens, K experts per token, D hidden, R ranks, N rows, M (row, expert) pairs.
Knows nothing of processes or transports.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan, ranks_of_pairs
from bywash.routing import Routing

Ids: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of rows, by the number that a header has for them."""


def shape_text(shape: tuple[int, int, int]) -> str:
    """Hidden size, top-k and number of the dtype, in words."""
    return f"hidden {shape[0]}, top-{shape[1]}, {DTYPES[shape[2]]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SendList:
    """Which tokens go to one rank, and which of their experts run there.

    Attributes:
        tokens_N: int64 [N], ascending; each token once.
        ids_NK: int64 [N, K], the expert where that rank computes the pair, -1 elsewhere.
        weights_NK: float32 [N, K].
        alone_NK: bool [N, K], the pairs whose outputs travel back unsummed; None where that is all or none of them, as
            the combine mode says.
    """

    tokens_N: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    alone_NK: Tensor | None = None

    def to(self, device: torch.device) -> "SendList":
        """The same on another device."""
        return SendList(
            tokens_N=self.tokens_N.to(device), ids_NK=self.ids_NK.to(device), weights_NK=self.weights_NK.to(device)
        )


def send_lists(routing: Routing, plan: StepPlan, *, source: int = 0, mixed: bool = False) -> list[SendList]:
    """One deduplicated `SendList` for each rank, on the CPU, from where the plan computes each pair.

    Example: ids_TK = [[0, 1], [1, 2]] with rank_E = [0, 0, 1] sends tokens [0, 1] to rank 0 with
    ids [[0, 1], [1, -1]], and token [1] to rank 1 with ids [[-1, 2]].

    Args:
        routing: of the tokens of rank `source`.
        plan: says which rank computes which of an expert's rows.
        source: the rank whose tokens these are.
        mixed: mark the pairs that travel back alone (`stable` with spilled rows; see `mixed.py`).
    """
    ids_TK, weights_TK = routing.ids_TK.cpu().numpy(), routing.weights_TK.detach().cpu().numpy()
    # numpy: a decode step has so few numbers that calls are what costs.
    rank_TK = ranks_of_pairs(plan, source, ids_TK)
    alone_TK = pairs_alone(plan, ids_TK, rank_TK) if mixed else None
    lists = []
    for rank in range(plan.rows_R.size):
        here_TK = rank_TK == rank
        tokens = np.flatnonzero(here_TK.any(axis=1))
        ids_NK = np.where(here_TK[tokens], ids_TK[tokens], -1)
        sent = SendList(
            tokens_N=torch.from_numpy(tokens),
            ids_NK=torch.from_numpy(ids_NK),
            weights_NK=torch.from_numpy(weights_TK[tokens]),
            alone_NK=None if alone_TK is None else torch.from_numpy(alone_TK[tokens] & (ids_NK >= 0)),
        )
        lists.append(sent)
    return lists


def pairs_alone(plan: StepPlan, ids_TK: Ids, rank_TK: Ids) -> Mask:
    """bool [T, K]: the pairs of (token, home) groups of which any pair is computed away from its home.

    Example: experts 0 and 1 at home on rank 0, 2 on rank 1. A token with ids [0, 1, 2] whose expert 1 runs on rank 1
    gives [True, True, False].
    """
    home_TK = np.append(plan.rank_E, -1)[ids_TK]
    moved_TK = rank_TK != home_TK
    same_TKK = home_TK[:, :, None] == home_TK[:, None, :]
    alone_TK: Mask = (same_TKK & moved_TK[:, None, :]).any(axis=2) & (ids_TK >= 0)
    return alone_TK


def weighted_sum(y_MD: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Sum each row's outputs with their weights, in k order, in float32: [M, D] to [N, D] of y's dtype.

    `y_MD` has one row per pair with ids_NK >= 0, in row-major order. The order of the additions depends on
    nothing but k, which is what makes `exact` bitwise the same for any number of ranks.
    """
    valid_NK = ids_NK >= 0
    position_NK = (valid_NK.reshape(-1).cumsum(0) - 1).view_as(ids_NK)
    total = torch.zeros(ids_NK.shape[0], y_MD.shape[1], dtype=torch.float32, device=y_MD.device)
    for k in range(ids_NK.shape[1]):
        rows = valid_NK[:, k].nonzero().squeeze(1)
        y = y_MD[position_NK[rows, k]].float()
        total[rows] += y * weights_NK[rows, k, None]
    return total.to(y_MD.dtype)


def pairs_per_rank(lists: list[SendList]) -> list[int]:
    """How many (token, expert) pairs each rank computes for this one."""
    return [int(np.count_nonzero(sent.ids_NK.numpy() >= 0)) for sent in lists]
