"""Random layers and batches that parent and rank processes can make alike from a seed."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from bywash.moe import GatedExperts
from bywash.routing import Routing


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def random_experts(count, hidden, inner, dtype, seed, of=None, gate=swiglu):
    """`count` experts, or of those only the ones listed in `of`; expert e is the same either way."""
    gate_up, down = [], []
    for expert in range(count):
        generator = torch.Generator().manual_seed(seed * 1000 + expert)
        gate_up.append(torch.randn(2 * inner, hidden, generator=generator) * hidden**-0.5)
        down.append(torch.randn(hidden, inner, generator=generator) * inner**-0.5)
    chosen = range(count) if of is None else of
    return GatedExperts(
        gate_up_LGD=torch.stack([gate_up[e] for e in chosen]).to(dtype)
        if chosen
        else torch.empty(0, 2 * inner, hidden, dtype=dtype),
        down_LDF=torch.stack([down[e] for e in chosen]).to(dtype)
        if chosen
        else torch.empty(0, hidden, inner, dtype=dtype),
        apply_gate=gate,
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random layer: `tokens` per rank."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: tuple[int, ...]
    dtype: torch.dtype
    combine: str
    seed: int
    skew: float = 0.0

    @property
    def ranks(self):
        return len(self.tokens)


@st.composite
def layer_cases(
    draw, combines, *, ranks=(1, 4), least_experts=1, inner=40, tokens=(0, 0, 1, 2, 5, 17, 33), skews=(0.0, 0.5, 50.0)
):
    """Odd sizes, ranks without tokens, every dtype; `ranks` from and to, `inner` at most."""
    count = draw(st.integers(*ranks))
    experts = draw(st.integers(least_experts, 13))
    return Case(
        hidden=draw(st.integers(1, 70)),
        inner=draw(st.integers(1, inner)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 6))),
        tokens=tuple(draw(st.lists(st.sampled_from(tokens), min_size=count, max_size=count))),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        combine=draw(st.sampled_from(combines)),
        seed=draw(st.integers(0, 10**6)),
        skew=draw(st.sampled_from(skews)),
    )


def random_batch(case, rank):
    """(x_TD, routing) of one rank. A few pairs are -1: tokens with fewer experts, or none."""
    generator = torch.Generator().manual_seed(case.seed * 100 + rank)
    tokens = case.tokens[rank]
    x = torch.randn(tokens, case.hidden, generator=generator).to(case.dtype)
    logits = torch.randn(tokens, case.experts, generator=generator)
    logits -= case.skew * torch.arange(case.experts)
    ids = logits.topk(case.top_k, dim=1).indices
    weights = torch.rand(tokens, case.top_k, generator=generator)
    ids[torch.rand(tokens, case.top_k, generator=generator) < 0.1] = -1
    return x, Routing(ids_TK=ids, weights_TK=weights, num_experts=case.experts)
