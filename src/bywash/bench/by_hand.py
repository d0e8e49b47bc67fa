"""The baseline that people write by hand: sort by expert, read the splits on the host, `all_to_all_single`.

Every (token, expert) pair travels as its own row, out and back, as in transformers' own all-to-all. It is here to be
measured against, not to be used.

Shapes: T tokens, K experts per token, D hidden, R ranks, M pairs received.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bywash.balance import Placement
from bywash.routing import Routing


def by_hand_step(
    x_TD: Tensor, routing: Routing, placement: Placement, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """One dispatch and combine on the default gloo group; every rank calls it.

    Args:
        x_TD: this rank's tokens.
        routing: their routing; every id must be an expert.
        placement: homes of the experts, in blocks.
        compute: rows [M, D] and their experts [M] to outputs [M, D].

    Returns:
        [T, D], summed in k order in float32.
    """
    ranks = placement.ranks
    home_E = torch.from_numpy(placement.home_E).long()
    expert_M = routing.ids_TK.reshape(-1)
    order = torch.argsort(home_E[expert_M], stable=True)
    send_sizes = torch.bincount(home_E[expert_M], minlength=ranks)
    recv_sizes = torch.empty_like(send_sizes)
    dist.all_to_all_single(recv_sizes, send_sizes)
    send, recv = send_sizes.tolist(), recv_sizes.tolist()
    experts = torch.empty(sum(recv), dtype=torch.int64)
    dist.all_to_all_single(experts, expert_M[order], recv, send)
    rows = x_TD.new_empty(sum(recv), x_TD.shape[1])
    dist.all_to_all_single(rows, x_TD[order // routing.top_k], recv, send)
    outputs = compute(rows, experts)
    back = x_TD.new_empty(order.numel(), x_TD.shape[1])
    dist.all_to_all_single(back, outputs, send, recv)
    y_MD = torch.empty_like(back)
    y_MD[order] = back
    total = torch.zeros(x_TD.shape, dtype=torch.float32)
    for k in range(routing.top_k):
        total += y_MD[k :: routing.top_k].float() * routing.weights_TK[:, k, None]
    return total.to(x_TD.dtype)


def by_hand_bytes(routing: Routing, placement: Placement, rank: int, row_bytes: int) -> int:
    """Bytes that one `by_hand_step` of this rank's tokens puts on the wire, both ways, sizes included."""
    home_E = torch.from_numpy(placement.home_E).long()
    remote = int((home_E[routing.ids_TK] != rank).sum())
    return remote * (2 * row_bytes + 8) + 8 * (placement.ranks - 1)
