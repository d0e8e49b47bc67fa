"""From rows as they arrived to what a dispatch returns, and from what a combine is given to rows that travel back.

Shapes: N rows received, K experts per token, D hidden, G scales of a row, X rows of the expanded layout, W columns of a
carried row.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.deepep.handle import EPHandle
from bywash.deepep.layout import expand_rows, expanded_rows, expert_layout, local_ids, reduce_rows
from bywash.deepep.request import Request
from bywash.deepep.weights import check_returned, split_weights
from bywash.exchange.carrier import Arrived, Step
from bywash.exchange.payload import RowFormat, RowParts, column_major_like


def unpacked(form: RowFormat, arrived: Arrived, rows: int) -> RowParts:
    """The parts of the first `rows` rows, with rows of zeros where fewer came."""
    rows_PB, at_N = arrived.rows_PB, arrived.at_N
    if at_N is not None:
        return form.unpack(rows_PB, at_N[:rows])
    return form.unpack(F.pad(rows_PB, (0, 0, 0, rows - rows_PB.shape[0])))


def new_handle(
    request: Request,
    got: RowParts,
    arrived: Arrived,
    *,
    step: Step,
    ranks: int,
    rank: int,
    kept_idx: Tensor,
    num_sms: int,
    work: Any,
) -> EPHandle:
    """The handle of a dispatch by new routing. Waits for the device only if the request syncs."""
    assert got.ids_NK is not None, "sent by every dispatch without a handle"
    experts = request.num_experts // ranks
    psum_R = arrived.from_R.cumsum(0).int()
    local_NK = local_ids(got.ids_NK, rank * experts, experts, psum_R[-1])
    layout = expert_layout(local_NK, experts, request.alignment, expand=request.expand)
    rows, top_k = local_NK.shape
    counts: list[int] = []
    total = expanded_rows(experts, request.alignment, rows, top_k)
    if request.sync:
        counts = [-(-count // request.alignment) * request.alignment for count in layout.counts_L.tolist()]
        total = sum(counts)
    number_N = torch.arange(rows, dtype=torch.int32, device=local_NK.device)
    slots_NK = torch.full_like(local_NK, -1, dtype=torch.int32) if layout.slots_NK is None else layout.slots_NK
    return EPHandle(
        do_expand=request.expand,
        num_experts=request.num_experts,
        expert_alignment=request.alignment,
        num_max_tokens_per_rank=request.most,
        num_sms=num_sms,
        topk_idx=kept_idx,
        num_recv_tokens=rows,
        num_expanded_tokens=total,
        num_recv_tokens_per_expert_list=counts,
        psum_num_recv_tokens_per_scaleup_rank=psum_R,
        psum_num_recv_tokens_per_expert=layout.psum_L,
        num_unaligned_recv_tokens_per_expert=layout.counts_L if request.expand else None,
        recv_src_metadata=torch.cat([torch.stack([got.source_N, number_N], dim=1), slots_NK], dim=1),
        _recv_topk_idx=local_NK.to(request.topk_idx.dtype),
        _counts_L=layout.counts_L,
        _step=step,
        _work=work,
    )


def arranged(got: RowParts, handle: EPHandle, *, column_major: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows, scales and weights in the handle's layout; weights of pairs computed elsewhere are 0."""
    weights_NK = got.weights_NK
    assert weights_NK is not None, "every row has room for them"
    weights_NK = weights_NK.masked_fill(handle._recv_topk_idx < 0, 0.0)
    x, scales = got.x_ND, got.scales_NG
    if not handle.do_expand:
        return x, _column_major(scales) if column_major else scales, weights_NK
    slots_NK, total = handle.slots_NK, handle.num_expanded_tokens
    weights_X = weights_NK.new_zeros(total + 1)  # the extra one takes what has no slot
    weights_X[torch.where(slots_NK >= 0, slots_NK.long(), total)] = weights_NK
    scales = None if scales is None else expand_rows(scales, slots_NK, total)
    return expand_rows(x, slots_NK, total), _column_major(scales) if column_major else scales, weights_X[:total]


def outputs(x: Tensor, topk_weights: Tensor | None, handle: EPHandle, columns: int) -> Tensor:
    """[N, W]: outputs to return, one row for each received one, with weights in pieces behind them."""
    local_NK = handle._recv_topk_idx
    if handle.do_expand:
        if topk_weights is not None:
            check_returned(topk_weights, x.shape[:1], x.dtype)
        x = reduce_rows(x, handle.slots_NK)
        if topk_weights is not None:
            padded_X = torch.cat([topk_weights, topk_weights.new_zeros(1)])  # -1 reads the last, a zero
            topk_weights = padded_X[handle.slots_NK.long()]
    y_NW = x.new_empty((x.shape[0], columns))
    y_NW[:, : x.shape[1]] = x
    y_NW[:, x.shape[1] :] = 0
    if topk_weights is not None:
        check_returned(topk_weights, local_NK.shape, x.dtype)
        pieces = split_weights(topk_weights.masked_fill(local_NK < 0, 0.0), x.dtype)
        y_NW[:, x.shape[1] : x.shape[1] + pieces.shape[1]] = pieces
    return y_NW


def _column_major(scales: Tensor | None) -> Tensor | None:
    """The same values with consecutive rows side by side."""
    if scales is None:
        return None
    return column_major_like(scales.shape, dtype=scales.dtype, device=scales.device).copy_(scales)
