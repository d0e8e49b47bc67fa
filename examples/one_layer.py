"""One expert-parallel MoE layer between two processes, with both halves of dispatch and combine in the open.

    python examples/one_layer.py

Each rank holds half of 8 experts and has its own tokens. The result is compared with one process that holds all.
"""

import torch
from torch.nn import functional as F

from bywash.balance import Placement, plan_step
from bywash.exchange import Group, open_exchange
from bywash.launch import run_local
from bywash.moe import GatedExperts, expert_parallel_naive, run_experts
from bywash.routing import Gate, route

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 8, 64, 32, 2, 10


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate and up halves side by side."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def experts(ids: list[int]) -> GatedExperts:
    """The listed experts; their weights come from the seed, as they would from a checkpoint."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 8
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator) / 8
    return GatedExperts(gate_up_LGD=gate_up[ids], down_LDF=down[ids], apply_gate=swiglu)


def rank_main(_: object, rank: int, ranks: int, store: object) -> None:
    """What each rank does: route, count, plan, dispatch, compute, combine."""
    group = Group(rank=rank, ranks=ranks, store=store)
    exchange = open_exchange("gloo", group)
    placement = Placement.equal(EXPERTS, ranks)
    mine = placement.experts_of(rank)
    slot_of_E = torch.full((EXPERTS,), -1)
    slot_of_E[mine] = torch.arange(len(mine))

    generator = torch.Generator().manual_seed(100 + rank)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=generator)
    routing = route(Gate(kind="softmax", top_k=TOP_K), torch.randn(TOKENS, EXPERTS, generator=generator))

    counts_RE = exchange.counts(routing.counts_E().int().numpy())
    plan = plan_step(counts_RE, placement)
    handle = exchange.dispatch_start(x_TD, routing, plan)
    # ... other work runs here while the rows travel ...
    received = exchange.dispatch_finish(handle)
    y_MD = run_experts(experts(mine), received.rows_ND, received.ids_NK, slot_of_E, row_tile=16)
    exchange.combine_start(handle, y_MD)
    # ... and here while the outputs come back ...
    out_TD = exchange.combine_finish(handle)

    expected = expert_parallel_naive(x_TD, routing, experts(list(range(EXPERTS))))
    print(
        f"rank {rank}: received {received.rows_ND.shape[0]} rows for {y_MD.shape[0]} (token, expert) pairs; "
        f"largest difference to one process {float((out_TD - expected).abs().max()):.1e}"
    )
    torch.testing.assert_close(out_TD, expected)
    group.close()


if __name__ == "__main__":
    run_local(rank_main, None, ranks=2, deadline_s=60.0)
