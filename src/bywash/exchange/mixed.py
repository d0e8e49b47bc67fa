"""Combine `stable` where some rows are computed away from home: the same bits as without.

Without spilled rows, a home sums a token's outputs of its experts in k order, rounds the sum once, and the source adds
the homes' sums in rank order. A (token, home) group of which any pair was computed elsewhere is *open*: its outputs
travel alone, unsummed, and the source does what the home would have done. All other groups are summed at home as ever.

A rank that computed returns, for each row: the sum of what does not travel alone, if there is any, then the rest in k
order. Pairs that travel alone are marked on the wire by adding the number of experts to their id.

Shapes: T tokens of the source, N rows of one message, K experts per token, R ranks, M pairs computed here, O outputs
returned, G open groups, D hidden. Pure arithmetic for `gloo` and `shm`; knows nothing of transports.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.exchange.rows import SendList, weighted_sum

Ids = NDArray[np.int64]


def wire_ids(sent: SendList, experts: int) -> Tensor:
    """[N, K]: ids with the mark of pairs that travel alone."""
    return sent.ids_NK if sent.alone_NK is None else sent.ids_NK + sent.alone_NK * experts


def read_ids(wire_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The ids and the mark, bool [N, K], again."""
    alone_NK = wire_NK >= experts
    return wire_NK - alone_NK * experts, alone_NK


def outputs_per_row(ids_NK: Tensor, alone_NK: Tensor) -> Ids:
    """int64 [N]: how many outputs come back for each row."""
    summed_NK = (ids_NK >= 0) & ~alone_NK
    counts_N: Ids = (summed_NK.any(dim=1).long() + alone_NK.sum(dim=1)).numpy()
    return counts_N


def mixed_rows_per_rank(lists: list[SendList]) -> list[int]:
    """How many outputs each rank returns for the rows of its list."""
    return [int(outputs_per_row(sent.ids_NK, _mark(sent)).sum()) for sent in lists]


def mixed_outputs(y_MD: Tensor, ids_NK: Tensor, alone_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """[O, D]: what goes back, row by row. `y_MD` has one row per pair with ids_NK >= 0."""
    valid_NK = ids_NK >= 0
    sums_N, alone_at_NK, total = _places(ids_NK, alone_NK)
    out_OD = y_MD.new_empty(total, y_MD.shape[1])
    out_OD[alone_at_NK[alone_NK]] = y_MD[alone_NK[valid_NK]]
    summed_ids_NK = torch.where(alone_NK, -1, ids_NK)
    with_sum_N = sums_N >= 0
    sums_ND = weighted_sum(y_MD[~alone_NK[valid_NK]], summed_ids_NK[with_sum_N], weights_NK[with_sum_N])
    out_OD[sums_N[with_sum_N]] = sums_ND
    return out_OD


def add_mixed(
    outputs_PD: Tensor, lists: list[SendList], first_R: list[int], ids_TK: Tensor, weights_TK: Tensor, plan: StepPlan
) -> Tensor:
    """[T, D]: each token's sum, from what every rank returned; rank r's outputs begin at `first_R[r]`."""
    tokens, top_k = ids_TK.shape
    sum_at_TR = torch.full((tokens, len(lists)), -1)
    alone_at_TK = torch.full((tokens, top_k), -1)
    for rank, (sent, first) in enumerate(zip(lists, first_R, strict=True)):
        sums_N, alone_at_NK, _ = _places(sent.ids_NK, _mark(sent))
        sum_at_TR[sent.tokens_N, rank] = torch.where(sums_N >= 0, sums_N + first, -1)
        rows, ks = _mark(sent).nonzero(as_tuple=True)
        alone_at_TK[sent.tokens_N[rows], ks] = alone_at_NK[rows, ks] + first
    home_TK = torch.from_numpy(np.append(plan.rank_E, -1).astype(np.int64))[ids_TK]
    total_TD = torch.zeros(tokens, outputs_PD.shape[1])
    for rank in range(len(lists)):
        summed_T = (sum_at_TR[:, rank] >= 0).nonzero()[:, 0]
        total_TD[summed_T] += outputs_PD[sum_at_TR[summed_T, rank]].float()
        at_TK = torch.where(home_TK == rank, alone_at_TK, -1)
        open_G = (at_TK >= 0).any(dim=1).nonzero()[:, 0]
        at_GK = at_TK[open_G]
        total_TD[open_G] += weighted_sum(outputs_PD[at_GK[at_GK >= 0]], at_GK, weights_TK[open_G]).float()
    return total_TD.to(outputs_PD.dtype)


def _mark(sent: SendList) -> Tensor:
    assert sent.alone_NK is not None, "every list of a mixed step has the mark"
    return sent.alone_NK


def _places(ids_NK: Tensor, alone_NK: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where each row's sum is, [N], -1 for none; where its pairs that travel alone are, [N, K]; how many in all."""
    has_sum_N = ((ids_NK >= 0) & ~alone_NK).any(dim=1)
    count_N = has_sum_N.long() + alone_NK.sum(dim=1)
    begin_N = count_N.cumsum(0) - count_N
    alone_at_NK = begin_N[:, None] + has_sum_N[:, None] + alone_NK.cumsum(1) - 1
    return torch.where(has_sum_N, begin_N, -1), alone_at_NK, int(count_N.sum())
