"""What `peer_exchange.py` compares with, in the same run: NCCL by hand, torch only, and copy engines.

Shapes: T tokens per rank, K experts per token, D hidden, R ranks, E experts, contiguous placement.
"""

import torch
import torch.distributed as dist

from bywash.exchange.moves import copy
from bywash.memory.cuda_heap import open_cuda_heaps


class ByHand:
    """argsort, counts by all_to_all_single, host splits, rows expanded to one per (token, expert)."""

    def __init__(self, nccl, rank, ranks, experts):
        self.nccl, self.rank, self.ranks, self.experts = nccl, rank, ranks, experts

    def dispatch(self, x_TD, ids_TK, weights_TK):
        flat = ids_TK.reshape(-1)
        order = flat.argsort(stable=True)
        counts_E = torch.bincount(flat, minlength=self.experts)
        theirs_RL = torch.empty_like(counts_E)
        dist.all_to_all_single(theirs_RL, counts_E, group=self.nccl)
        send = counts_E.view(self.ranks, -1).sum(1).tolist()
        received = theirs_RL.view(self.ranks, -1)
        take = received.sum(1).tolist()
        rows = x_TD[order // ids_TK.shape[1]]
        got = torch.empty(sum(take), x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
        dist.all_to_all_single(got, rows, take, send, group=self.nccl)
        local = torch.arange(received.shape[1], device=x_TD.device).repeat(self.ranks)
        expert_M = torch.repeat_interleave(local, received.reshape(-1), output_size=sum(take))
        by_expert = expert_M.argsort(stable=True)
        ends_L = received.sum(0).cumsum(0).int()
        return got[by_expert], (order, send, take, by_expert, ends_L)

    def combine(self, y_MD, state, weights_TK):
        order, send, take, by_expert, _ = state
        back = torch.empty_like(y_MD)
        back[by_expert] = y_MD
        got = torch.empty(sum(send), y_MD.shape[1], dtype=y_MD.dtype, device=y_MD.device)
        dist.all_to_all_single(got, back, send, take, group=self.nccl)
        ordered = torch.empty_like(got)
        ordered[order] = got
        tokens, top_k = weights_TK.shape
        return (ordered.view(tokens, top_k, -1) * weights_TK.to(got.dtype)[:, :, None]).sum(1)


class AllGather:
    """All-gather rows and routing, index locally; partial sums by index_add, then reduce-scatter."""

    def __init__(self, nccl, rank, ranks, experts):
        self.nccl, self.rank, self.ranks, self.experts = nccl, rank, ranks, experts

    def dispatch(self, x_TD, ids_TK, weights_TK):
        gathered = []
        for tensor in (x_TD, ids_TK, weights_TK):
            out = tensor.new_empty(self.ranks * tensor.shape[0], tensor.shape[1])
            dist.all_gather_into_tensor(out, tensor, group=self.nccl)
            gathered.append(out)
        rows_ND, ids_NK, weights_NK = gathered
        share = self.experts // self.ranks
        local = ids_NK.reshape(-1) - self.rank * share
        local = torch.where((local >= 0) & (local < share), local, share)
        order = local.argsort(stable=True)
        counts = torch.bincount(local, minlength=share + 1)
        return rows_ND, (order, counts.cumsum(0), weights_NK)

    def combine(self, y_MD, state, pairs):
        order, _, weights_NK = state
        order = order[:pairs]
        top_k = weights_NK.shape[1]
        total = torch.zeros(weights_NK.shape[0], y_MD.shape[1], dtype=y_MD.dtype, device=y_MD.device)
        total.index_add_(0, order // top_k, y_MD * weights_NK.reshape(-1)[order].to(y_MD.dtype)[:, None])
        out = y_MD.new_empty(weights_NK.shape[0] // self.ranks, y_MD.shape[1])
        dist.reduce_scatter_tensor(out, total, group=self.nccl)
        return out


class PeerCopies:
    """Copy engines of all GPUs writing to each other at once: what the wire gives for the same bytes.

    A rank writes to its neighbour first, one after the other: each takes all links. One heap serves all sizes.
    """

    def __init__(self, group, most_bytes):
        self.group, self.rank = group, group.rank
        self.source = torch.randint(0, 255, (most_bytes,), dtype=torch.uint8, device="cuda")
        facts = {"copied bytes": most_bytes}
        self.heaps = open_cuda_heaps(group, most_bytes, arithmetic=f"{most_bytes} bytes", facts=facts)

    def of(self, bytes_RR):
        """A function that writes what this rank sends by `bytes_RR` [source, target]; a target gets `most_bytes` at
        most. Where in a heap each source writes does not overlap."""
        ranks, starts_RR = len(self.heaps), bytes_RR.cumsum(0) - bytes_RR
        others = [(self.rank + 1 + i) % ranks for i in range(ranks - 1)]
        pieces = [(self.heaps[o].address + int(starts_RR[self.rank, o]), int(bytes_RR[self.rank, o])) for o in others]

        def write():
            for address, size in pieces:
                if size:
                    copy(address, self.source.data_ptr(), size)

        return write
