"""What DeepEP tells about received rows, computed from their expert ids: counts, prefix sums, the expanded layout.

Sources: the documentation of `EPHandle` and `ElasticBuffer.dispatch` in DeepEP 2 (deep_ep/buffers/elastic.py). Pure
integer arithmetic in torch, on the device of its arguments and without a host sync where `rows` is a tensor;
`naive.py` beside it says the same in loops. `buffer.ElasticBuffer` calls it.

Shapes: N rows received, K experts per token, L local experts, X expanded rows, D columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayout:
    """Where received rows stand by expert.

    Attributes:
        counts_L: int32 [L], rows of each local expert.
        psum_L: int32 [L]. Plain layout: sums of the counts rounded up to the alignment, each including its own.
            Expanded: where expert l's real rows end; the next expert begins at that, rounded up.
        slots_NK: int32 [N, K], each pair's row in the expanded layout, -1 for none; None in the plain layout.
    """

    counts_L: Tensor
    psum_L: Tensor
    slots_NK: Tensor | None = None


def local_ids(ids_NK: Tensor, first: int, experts: int, rows: Tensor | int) -> Tensor:
    """int64 [N, K]: ids counted from this rank's first expert, -1 for experts elsewhere and for rows past `rows`."""
    here_NK = (ids_NK >= first) & (ids_NK < first + experts)
    here_NK &= (torch.arange(ids_NK.shape[0], device=ids_NK.device) < rows)[:, None]
    return torch.where(here_NK, ids_NK.long() - first, -1)


def expert_layout(local_NK: Tensor, experts: int, alignment: int, *, expand: bool) -> ExpertLayout:
    """The layout of rows whose local expert ids are `local_NK` (int64, -1 for none; an expert once in a row at most).

    Example: ids [[0, 1], [1, -1]], 2 experts, alignment 4: counts [1, 2]; plain psum [4, 8]; expanded psum [1, 6] and
    slots [[0, 4], [5, -1]].
    """
    flat_M = torch.where(local_NK >= 0, local_NK, experts).reshape(-1)
    counts_L = _count(flat_M, experts)
    aligned_L = (counts_L + alignment - 1) // alignment * alignment
    ends_L = aligned_L.cumsum(0)
    if not expand:
        return ExpertLayout(counts_L=counts_L.int(), psum_L=ends_L.int())
    starts_L = ends_L - aligned_L
    order_M = flat_M.argsort(stable=True)
    # The how manieth pair of its expert each one is: its place in the order less where the expert begins there.
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(order_M.numel(), device=order_M.device)
    real_starts_L = counts_L.cumsum(0) - counts_L
    shift_L = torch.cat([starts_L - real_starts_L, starts_L.new_zeros(1)])
    slots_M = torch.where(flat_M < experts, place_M + shift_L[flat_M], -1)
    return ExpertLayout(
        counts_L=counts_L.int(), psum_L=(starts_L + counts_L).int(), slots_NK=slots_M.view_as(local_NK).int()
    )


def expanded_rows(experts: int, alignment: int, rows: int, top_k: int) -> int:
    """The most rows that an expanded layout may have, for outputs whose size must not depend on counts."""
    most = rows * min(top_k, experts) + (alignment - 1) * experts
    return -(-most // alignment) * alignment


def expand_rows(rows_ND: Tensor, slots_NK: Tensor, total: int) -> Tensor:
    """[X, D]: every row in each of its slots, zeros in slots of nobody."""
    rows, device = slots_NK.shape[0], slots_NK.device
    row_NK = torch.arange(rows, device=device)[:, None].expand_as(slots_NK)
    from_X = torch.full((total + 1,), rows, device=device)  # the extra slot takes what has none
    from_X[torch.where(slots_NK >= 0, slots_NK.long(), total)] = row_NK
    bytes_NB = rows_ND.contiguous().view(torch.uint8) if rows_ND.dtype.itemsize == 1 else rows_ND  # torch cats no e4m3
    bytes_NB = torch.cat([bytes_NB, bytes_NB.new_zeros((1, *bytes_NB.shape[1:]))])
    return bytes_NB[from_X[:total]].view(rows_ND.dtype)


def reduce_rows(rows_XD: Tensor, slots_NK: Tensor) -> Tensor:
    """[N, D]: the sum of each row's slots, in k order, in float32, rounded once."""
    total_ND = torch.zeros((slots_NK.shape[0], rows_XD.shape[1]), dtype=torch.float32, device=rows_XD.device)
    if rows_XD.shape[0]:
        for k in range(slots_NK.shape[1]):
            slot_N = slots_NK[:, k].long()
            part_ND = rows_XD[slot_N.clamp(min=0)].float()
            total_ND += torch.where(slot_N[:, None] >= 0, part_ND, 0.0)
    return total_ND.to(rows_XD.dtype)


def _count(flat_M: Tensor, experts: int) -> Tensor:
    """int64 [L]. Not bincount, which waits for the device to learn how many bins there are."""
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat_M.device)
    return counts.scatter_add_(0, flat_M, torch.ones_like(flat_M))[:experts]
