"""What `peer_exchange.py` compares with, in the same run: NCCL by hand, torch only, and a peer copy of the same bytes.

Shapes: T tokens per rank, K experts per token, D hidden, R ranks, E experts, contiguous placement.
"""

import torch
import torch.distributed as dist


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


class PeerCopy:
    """The copy engine writing the same bytes to the other GPUs: the wire's ceiling, both directions at once.

    With more than two ranks an equal part for each, the neighbour's first, one after the other: each takes all links.
    """

    def __init__(self, rank, ranks, size_bytes):
        part = size_bytes // (ranks - 1)
        self.source = torch.randint(0, 255, (part,), dtype=torch.uint8, device="cuda")
        others = [(rank + 1 + i) % ranks for i in range(ranks - 1)]
        self.targets = [torch.empty(part, dtype=torch.uint8, device=f"cuda:{other}") for other in others]

    def __call__(self):
        for target in self.targets:
            target.copy_(self.source, non_blocking=True)
