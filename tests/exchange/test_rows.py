import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bywash.balance import Placement, plan_step
from bywash.exchange.rows import send_lists, weighted_sum
from bywash.routing import Routing


def routing_of(ids, experts, top_k):
    ids = torch.tensor(ids, dtype=torch.long).reshape(len(ids), top_k)
    return Routing(ids_TK=ids, weights_TK=torch.rand(ids.shape), num_experts=experts)


def test_send_lists_example():
    routing = routing_of([[0, 1], [1, 2]], 3, 2)
    placement = Placement(home_E=np.array([0, 0, 1], dtype=np.int32), ranks=2)
    plan = plan_step(np.stack([routing.counts_E().numpy(), [0, 0, 0]]).astype(np.int32), placement)
    first, second = send_lists(routing, plan)
    assert first.tokens_N.tolist() == [0, 1]
    assert first.ids_NK.tolist() == [[0, 1], [1, -1]]
    assert second.tokens_N.tolist() == [1]
    assert second.ids_NK.tolist() == [[-1, 2]]


@given(st.data())
def test_every_pair_goes_to_exactly_one_rank_and_every_token_once_per_rank(data):
    experts, ranks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    top_k = data.draw(st.integers(1, experts))
    tokens = data.draw(st.integers(0, 9))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(experts, generator=generator)[:top_k].tolist() for _ in range(tokens)]
    routing = routing_of(ids, experts, top_k)
    counts = np.zeros((ranks, experts), dtype=np.int32)
    counts[0] = routing.counts_E().numpy()
    placement = Placement.equal(experts, ranks)
    lists = send_lists(routing, plan_step(counts, placement))
    seen = []
    for rank, sent in enumerate(lists):
        assert sent.tokens_N.tolist() == sorted(set(sent.tokens_N.tolist()))
        for token, row in zip(sent.tokens_N.tolist(), sent.ids_NK.tolist(), strict=True):
            here = [e for e in row if e >= 0]
            assert here
            assert all(placement.home_E[e] == rank for e in here)
            seen += [(token, e) for e in here]
    assert sorted(seen) == sorted((t, e) for t, row in enumerate(ids) for e in row)


def test_weighted_sum_adds_in_k_order_in_float32():
    # In float32 (1e8 + 1) - 1e8 is 0 but (1e8 - 1e8) + 1 is 1: the order shows.
    y = torch.tensor([[1e8], [1.0], [-1e8]])
    ids, weights = torch.tensor([[0, 1, 2]]), torch.ones(1, 3)
    assert weighted_sum(y, ids, weights).item() == 0.0
    assert weighted_sum(y[[0, 2, 1]], ids, weights).item() == 1.0


def test_weighted_sum_skips_missing_pairs():
    y = torch.tensor([[2.0], [3.0]])
    ids = torch.tensor([[-1, 5], [4, -1], [-1, -1]])
    weights = torch.tensor([[9.0, 0.5], [2.0, float("nan")], [1.0, 1.0]])
    assert weighted_sum(y, ids, weights).tolist() == [[1.0], [6.0], [0.0]]
