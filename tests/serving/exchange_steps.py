"""A serving engine's layer in few lines: rows out, every local expert multiplies by its number, rows back.

Inputs of all ranks come from seeds, so each rank knows what it must get; compared bit for bit.
"""

import torch

from bywash.serving.exchange import ServingExchange

EXPERTS, TOP_K = 10, 3


def inputs(rank, seed, tokens, hidden, device):
    made = torch.Generator().manual_seed(31 * seed + rank)
    x = torch.randn(tokens, hidden, generator=made).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=made).argsort(dim=1)[:, :TOP_K]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=made) < 0.2, -1)
    return [part.to(device) for part in (x, ids, torch.rand(ids.shape, generator=made))]


def computed(x, ids, weights, rank, rank_E):
    """What a rank's experts give for rows: the weighted sum of number x row, rounded once."""
    mine = (ids >= 0) & (rank_E[ids.clamp(min=0)] == rank)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for k in range(TOP_K):
        factor = torch.where(mine[:, k], weights[:, k] * (ids[:, k] + 1), 0.0)
        total += factor[:, None] * x.float()
    return total.to(x.dtype)


def expected(x, ids, weights, ranks, rank_E):
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(ranks):
        total += computed(x, ids, weights, rank, rank_E).float()
    return total.to(x.dtype)


class Layers:
    """Two layers, one after the other, over one exchange."""

    def __init__(self, group, most, sync, device):
        self.exchange = ServingExchange(group=group)
        self.group, self.most, self.sync = group, most, sync
        self.rank_E = (torch.arange(EXPERTS) * group.ranks // EXPERTS).to(device)

    def __call__(self, x, ids, weights, step_tokens=None):
        for _ in range(2):
            flight = self.exchange.start(
                x,
                ids,
                weights,
                self.rank_E,
                out_dtype=torch.bfloat16,
                most_tokens=self.most,
                step_tokens=step_tokens,
                sync=self.sync,
            )
            got = flight.dispatched()
            y = computed(got.x_ND, got.ids_NK, got.weights_NK, self.group.rank, self.rank_E)
            # Rows that nobody sent must not matter: an engine computes on them what it likes.
            y = torch.where((got.ids_NK >= 0).any(dim=1, keepdim=True), y, torch.nan)
            flight.give_back(y)
            x = flight.result()[:, : x.shape[1]]
        return x

    def check(self, got, x, ids, weights):
        for _ in range(2):
            x = expected(x, ids, weights, self.group.ranks, self.rank_E)
        assert torch.equal(got.float() + 0.0, x.float() + 0.0), f"{int((got != x).sum())} of {x.numel()} differ"


def steps(group, count, most=20, hidden=72, sync=True, device="cpu"):
    """Random token counts, zero among them."""
    if device == "cuda":
        torch.cuda.set_device(group.rank % torch.cuda.device_count())
    with torch.inference_mode():
        layers = Layers(group, most, sync, device)
        for step in range(count):
            tokens = [(7 * step + 5 * rank) % (most + 1) for rank in range(group.ranks)]
            given = inputs(group.rank, step, tokens[group.rank], hidden, device)
            layers.check(layers(*given, step_tokens=max(tokens)), *given)
        for carrier in layers.exchange._carriers.values():
            carrier.check()
        counters = layers.exchange.counters()
        layers.exchange.close()
        return counters


def graph_replays(group, replays, tokens=33, hidden=512):
    """Both layers in one CUDA graph, replayed with other rows and other routing."""
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    with torch.inference_mode():
        layers = Layers(group, tokens, False, "cuda")
        given = inputs(group.rank, 0, tokens, hidden, "cuda")
        layers.check(layers(*given), *given)  # opens the heaps
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layers(*given)
        for replay in range(1, replays + 1):
            for static, new in zip(given, inputs(group.rank, replay, tokens, hidden, "cuda"), strict=True):
                static.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            layers.check(out, *given)
        for carrier in layers.exchange._carriers.values():
            carrier.check()
        return replays
