import pytest
import torch
from hypothesis import given, settings

from bywash.balance import Placement, plan_step
from bywash.errors import ConfigError, PlanMismatchError, RoutingError
from bywash.exchange import LocalExchange, open_exchange
from bywash.moe import ExpertParallel, expert_parallel_naive
from bywash.routing import Routing
from tests.moe.common import Case, layer_cases, random_batch, random_experts

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def on_rank(group, case, exchange_name="gloo"):
    """One step of the layer on one rank."""
    exchange = open_exchange(exchange_name, group, combine_mode=case.combine)
    placement = Placement.equal(case.experts, group.ranks)
    mine = random_experts(
        case.experts, case.hidden, case.inner, case.dtype, case.seed, placement.experts_of(group.rank)
    )
    layer = ExpertParallel(exchange=exchange, placement=placement, experts=mine)
    return layer(*random_batch(case, group.rank)), exchange.traffic


@settings(max_examples=200, deadline=None)
@given(case=layer_cases(["exact", "fast"]))
def test_many_ranks_equal_the_oracle(pools, case):
    """200 random layers on 1 to 4 processes: equal to one-token-at-a-time, and in `exact` bitwise to one rank."""
    everything = random_experts(case.experts, case.hidden, case.inner, case.dtype, case.seed)
    alone = ExpertParallel(
        exchange=LocalExchange(combine_mode=case.combine),
        placement=Placement.equal(case.experts, 1),
        experts=everything,
    )
    results = pools(case.ranks).run(on_rank, case)
    for rank, (out_TD, _) in enumerate(results):
        x_TD, routing = random_batch(case, rank)
        expected = expert_parallel_naive(x_TD, routing, everything)
        assert out_TD.dtype == case.dtype
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(out_TD, expected, rtol=tolerance, atol=tolerance)
        if case.combine == "exact":
            assert torch.equal(out_TD, alone(x_TD, routing))


def test_traffic_counts_deduplicated_rows_and_wire_bytes(pools):
    case = Case(hidden=64, inner=16, experts=8, top_k=4, tokens=(30, 0), dtype=torch.float32, combine="exact", seed=3)
    (_, sender), (_, other) = pools(2).run(on_rank, case)
    _, routing = random_batch(case, 0)
    remote = routing.ids_TK >= 4  # experts 4..7 live on rank 1
    rows, pairs = int(remote.any(dim=1).sum()), int(remote.sum())
    counts_and_sizes = 8 * 4 + 8 * (2 + 8)  # int32 counts gathered; rows, digest and counts again before the rows
    assert sender.rows_sent == rows
    assert other.rows_returned == pairs
    assert sender.wire_bytes == rows * (64 * 4 + 4 * 8) + counts_and_sizes
    assert other.wire_bytes == pairs * 64 * 4 + counts_and_sizes
    assert sender.logical_bytes == 2 * int((routing.ids_TK >= 0).sum()) * 64 * 4


def different_plans(group):
    exchange = open_exchange("gloo", group)
    ids = torch.tensor([[0]])
    routing = Routing(ids_TK=ids, weights_TK=torch.ones(1, 1), num_experts=2)
    counts = exchange.counts(routing.counts_E().numpy().astype("int32"))
    placement = Placement.equal(2, 2)
    if group.rank == 1:
        counts[0, 0] += 1
    exchange.dispatch(torch.ones(1, 4), routing, plan_step(counts, placement))


def test_a_plan_mismatch_names_the_rank_before_rows_are_read(pools):
    pool = pools(2)
    pool.send(different_plans, [(), ()])
    errors = [pool.receive(rank) for rank in range(2)]
    pool.close()
    assert all(isinstance(error, PlanMismatchError) for error in errors)
    assert errors[0].ranks == (1,)
    assert "rank 1 planned this step differently" in str(errors[0])
    assert errors[1].ranks == (0,)


def layer_of(experts=4, hidden=8):
    return ExpertParallel(
        exchange=LocalExchange(),
        placement=Placement.equal(experts, 1),
        experts=random_experts(experts, hidden, 4, torch.float32, seed=0),
    )


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        ([[0, 4]], [[1.0, 1.0]], r"ids\[0, 1\] = 4 is not an expert"),
        ([[0, -2]], [[1.0, 1.0]], r"ids\[0, 1\] = -2 is not an expert"),
        ([[0, 1]], [[float("nan"), 1.0]], r"weights\[0, 0\] = nan"),
        ([[0, 1]], [[1.0, float("inf")]], r"weights\[0, 1\] = inf"),
        ([[2, 2]], [[1.0, 1.0]], r"names an expert twice"),
    ],
)
def test_impossible_routing_is_refused_with_its_place(ids, weights, message):
    routing = Routing(ids_TK=torch.tensor(ids), weights_TK=torch.tensor(weights), num_experts=4)
    with pytest.raises(RoutingError, match=message):
        layer_of()(torch.ones(1, 8), routing)


def test_shapes_that_do_not_fit_are_refused():
    routing = Routing(ids_TK=torch.tensor([[0]]), weights_TK=torch.ones(1, 1), num_experts=4)
    with pytest.raises(ConfigError, match="hidden 8"):
        layer_of()(torch.ones(1, 9), routing)
    with pytest.raises(ConfigError, match="1 routed tokens"):
        layer_of()(torch.ones(2, 8), routing)
    with pytest.raises(ConfigError, match="over 4 experts, the layer has 5"):
        layer_of(experts=5)(torch.ones(1, 8), routing)


def test_halves_called_out_of_order_are_refused():
    exchange = LocalExchange()
    routing = Routing(ids_TK=torch.tensor([[0]]), weights_TK=torch.ones(1, 1), num_experts=1)
    plan = plan_step(exchange.counts(routing.counts_E().numpy().astype("int32")), Placement.equal(1, 1))
    handle = exchange.dispatch_start(torch.ones(1, 4), routing, plan)
    with pytest.raises(ConfigError, match="combine_start was called where dispatch_finish is next"):
        exchange.combine_start(handle, torch.ones(1, 4))
