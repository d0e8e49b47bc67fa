from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Placement, plan_step
from bywash.errors import ConfigError, PlanMismatchError
from bywash.exchange import LocalExchange, open_exchange
from bywash.exchange.shm import ShmExchange
from bywash.moe import ExpertParallel, expert_parallel_naive
from bywash.routing import Routing
from tests.exchange.shm_steps import counts_of, expected, outputs_of, step_input
from tests.moe.common import Case, layer_cases, random_batch, random_experts

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
COMBINES = ["exact", "stable", "fast"]


def shifted(case, rank, step):
    """The batch of one step; its size differs from step to step, and so the heap grows on the way."""
    tokens = tuple((t * (1 + 2 * step)) % 71 for t in case.tokens)
    return random_batch(replace(case, tokens=tokens, seed=case.seed + 7919 * step), rank)


def layer_steps(group, case, reuse_S, names=("shm",)):
    """Steps of one layer on one rank, counts first or under the plan before; outputs by exchange name and step."""
    placement = Placement.equal(case.experts, group.ranks)
    mine = random_experts(
        case.experts, case.hidden, case.inner, case.dtype, case.seed, placement.experts_of(group.rank)
    )
    results = {}
    for name in names:
        exchange = open_exchange(name, group, combine_mode=case.combine)
        layer = ExpertParallel(exchange=exchange, placement=placement, experts=mine)
        results[name] = [
            layer(*shifted(case, group.rank, step), reuse_plan=reuse) for step, reuse in enumerate(reuse_S)
        ]
        exchange.close()
    return results


@settings(max_examples=100, deadline=None)
@given(case=layer_cases(COMBINES), reuse_S=st.lists(st.booleans(), min_size=1, max_size=3))
def test_both_protocols_equal_the_oracle_and_in_exact_one_rank_bitwise(pools, case, reuse_S):
    everything = random_experts(case.experts, case.hidden, case.inner, case.dtype, case.seed)
    alone = ExpertParallel(
        exchange=LocalExchange(combine_mode=case.combine),
        placement=Placement.equal(case.experts, 1),
        experts=everything,
    )
    tolerance = TOLERANCE[case.dtype]
    for rank, outputs in enumerate(pools(case.ranks).run(layer_steps, case, reuse_S)):
        for step, out_TD in enumerate(outputs["shm"]):
            x_TD, routing = shifted(case, rank, step)
            assert out_TD.dtype == case.dtype
            wanted = expert_parallel_naive(x_TD, routing, everything)
            torch.testing.assert_close(out_TD, wanted, rtol=tolerance, atol=tolerance)
            if case.combine == "exact":
                assert torch.equal(out_TD, alone(x_TD, routing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("combine", COMBINES)
def test_shm_and_gloo_give_the_same_bits_in_every_mode(pools, combine, dtype):
    case = Case(
        hidden=48, inner=16, experts=7, top_k=3, tokens=(20, 0, 33), dtype=dtype, combine=combine, seed=5, skew=0.3
    )
    for outputs in pools(3).run(layer_steps, case, [False, True, True], ("shm", "gloo")):
        for by_shm, by_gloo in zip(outputs["shm"], outputs["gloo"], strict=True):
            assert torch.equal(by_shm, by_gloo)


SHAPE = {"hidden": 24, "experts": 9, "top_k": 4}


def received_and_traffic(group, tokens_R, name):
    exchange = open_exchange(name, group)
    x, routing = step_input(group.rank, 0, tokens=tokens_R[group.rank], **SHAPE)
    plan = plan_step(exchange.counts(counts_of(routing)), Placement.equal(SHAPE["experts"], group.ranks))
    received, handle = exchange.dispatch(x, routing, plan)
    rows = received.rows_ND.clone()
    out = exchange.combine(handle, outputs_of(received))
    assert torch.equal(out, expected(x, routing))
    exchange.close()
    facts = (rows, received.ids_NK, received.weights_NK)
    traffic = exchange.traffic
    return (
        facts,
        received.rows_from_R,
        received.counts_RE,
        [traffic.steps, traffic.rows_returned, traffic.logical_bytes],
    )


@pytest.mark.parametrize("tokens_R", [(5, 9), (0, 4), (7, 0, 3), (0, 0, 0), (3, 8, 1, 20)], ids=str)
def test_what_arrives_is_what_gloo_delivers(pools, tokens_R):
    """Rows in the order of (source, token), index, weights, counts, and what traffic does not depend on the wire."""
    pool = pools(len(tokens_R))
    for by_shm, by_gloo in zip(
        pool.run(received_and_traffic, tokens_R, "shm"), pool.run(received_and_traffic, tokens_R, "gloo"), strict=True
    ):
        for ours, theirs in zip(by_shm[0], by_gloo[0], strict=True):
            assert torch.equal(ours, theirs)
        assert by_shm[1] == by_gloo[1]
        assert np.array_equal(by_shm[2], by_gloo[2])
        assert by_shm[3] == by_gloo[3]


def wire_bytes_of_steps(group, tokens, steps):
    exchange = ShmExchange(group, tokens=tokens)
    x, routing = step_input(group.rank, 0, tokens=tokens, **SHAPE)
    placement = Placement.equal(SHAPE["experts"], group.ranks)
    plan = plan_step(exchange.counts(counts_of(routing)), placement)
    before = []
    for _ in range(steps):
        before.append((exchange.traffic.wire_bytes, exchange.traffic.rows_sent))
        received, handle = exchange.dispatch(x, routing, plan)
        exchange.combine(handle, outputs_of(received))
    exchange.close()
    (first, rows_first), (last, rows_last) = before[-2], before[-1]
    return last - first, rows_last - rows_first, routing


def test_wire_bytes_are_rows_index_weights_header_counts_and_flags(pools):
    results = pools(2).run(wire_bytes_of_steps, 13, 3)
    homes = Placement.equal(SHAPE["experts"], 2).home_E
    for rank, (wire_bytes, rows, routing) in enumerate(results):
        other = results[1 - rank][2]
        away = (routing.ids_TK >= 0) & (torch.from_numpy(homes)[routing.ids_TK] != rank)
        assert rows == int(away.any(dim=1).sum())
        brought = int(((other.ids_TK >= 0) & (torch.from_numpy(homes)[other.ids_TK] == rank)).sum())
        record, header, flags = 24 * 4 + 8 * 4, 64 + 8 * 9, 2 * 16
        assert wire_bytes == rows * record + brought * 24 * 4 + header + flags


def growing_steps(group, tokens_S, mode, inference_S=()):
    exchange = ShmExchange(group, combine_mode=mode)
    placement = Placement.equal(SHAPE["experts"], group.ranks)
    rooms, plan = [], None
    for step, tokens_R in enumerate(tokens_S):
        x, routing = step_input(group.rank, step, tokens=tokens_R[group.rank], **SHAPE)
        with torch.inference_mode(step in inference_S):
            plan = plan or plan_step(exchange.counts(counts_of(routing)), placement)
            received, handle = exchange.dispatch(x, routing, plan)
            assert torch.equal(exchange.combine(handle, outputs_of(received)), expected(x, routing))
        rooms.append(exchange._rows.layout.tokens)
    exchange.close()
    return rooms


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_step_larger_than_the_heap_grows_it_on_all_ranks_together(pools, mode):
    tokens_S = [(0, 0), (3, 1), (1, 200), (150, 2), (0, 0), (1000, 1000)]
    assert pools(2).run(growing_steps, tokens_S, mode) == [[16, 16, 224, 224, 224, 1024]] * 2


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_what_a_step_in_inference_mode_opens_serves_steps_outside_it(pools, mode):
    tokens_S = [(3, 1), (2, 2), (90, 1), (5, 5)]
    assert pools(2).run(growing_steps, tokens_S, mode, (0, 2)) == [[16, 16, 96, 96]] * 2


def interleaved(group, tokens_S):
    """Two micro-batches in flight: B is dispatched before A is combined, and A's heap is outgrown under way."""
    exchange = ShmExchange(group)
    placement = Placement.equal(SHAPE["experts"], group.ranks)
    started = []
    for step, tokens in enumerate(tokens_S):
        x, routing = step_input(group.rank, step, tokens=tokens + group.rank, **SHAPE)
        plan = plan_step(exchange.counts(counts_of(routing)), placement)
        started.append((exchange.dispatch_start(x, routing, plan), x, routing))
    with pytest.raises(ConfigError, match="2 steps are in flight"):
        exchange.dispatch_start(x, routing, plan)
    arrived = [exchange.dispatch_finish(handle) for handle, _, _ in started]
    for (handle, _, _), received in zip(started, arrived, strict=True):
        exchange.combine_start(handle, outputs_of(received))
    outs = [exchange.combine_finish(handle) for handle, _, _ in started]
    exchange.close()
    return [torch.equal(out, expected(x, routing)) for out, (_, x, routing) in zip(outs, started, strict=True)]


@pytest.mark.parametrize("tokens_S", [(5, 90), (90, 5)], ids=str)
def test_two_steps_in_flight_and_no_third(pools, tokens_S):
    assert pools(2).run(interleaved, tokens_S) == [[True, True]] * 2


def mistakes(group):
    """Errors a caller can make, each before anything is sent: the exchange goes on working after them."""
    exchange = ShmExchange(group)
    x, routing = step_input(group.rank, 0, tokens=6, **SHAPE)
    placement = Placement.equal(SHAPE["experts"], group.ranks)
    plan = plan_step(exchange.counts(counts_of(routing)), placement)
    received, handle = exchange.dispatch(x, routing, plan)
    y = outputs_of(received)
    with pytest.raises(ConfigError, match="combine: outputs are"):
        exchange.combine_start(handle, y[:-1])
    with pytest.raises(ConfigError, match=r"combine: outputs are torch\.bfloat16"):
        exchange.combine_start(handle, y.bfloat16())
    exchange.combine_start(handle, y)
    with pytest.raises(ConfigError, match="combine_start was called where combine_finish is next"):
        exchange.combine_start(handle, y)
    exchange.combine_finish(handle)
    with pytest.raises(ConfigError, match=r"hidden 23, top-4, torch\.float32; the exchange was opened by a step with"):
        exchange.dispatch_start(x[:, :23].contiguous(), routing, plan)
    with pytest.raises(ConfigError, match=r"rows are torch\.float64"):
        exchange.dispatch_start(x.double(), routing, plan)
    with pytest.raises(ConfigError, match=r"rows \[5, 24\] for 6 routed tokens"):
        exchange.dispatch_start(x[:5], routing, plan)
    with pytest.raises(ConfigError, match="5 experts, but it was opened for 9"):
        exchange.counts(np.zeros(5, dtype=np.int32))
    with pytest.raises(ConfigError, match="a plan for 1 ranks"):
        exchange.dispatch_start(x, routing, plan_step(plan.counts_RE[:1], Placement.equal(9, 1)))
    received, handle = exchange.dispatch(x, routing, plan)
    out = exchange.combine(handle, outputs_of(received))
    exchange.close()
    exchange.close()
    with pytest.raises(ConfigError, match="closed"):
        exchange.counts(np.zeros(9, dtype=np.int32))
    return torch.equal(out, expected(x, routing))


def test_a_callers_mistake_is_refused_before_anything_moves(pools):
    assert pools(2).run(mistakes) == [True, True]


def different_options(group, combine_R, hidden_R, plan_off):
    exchange = ShmExchange(group, combine_mode=combine_R[group.rank])
    ids = torch.tensor([[0]])
    routing = Routing(ids_TK=ids, weights_TK=torch.ones(1, 1), num_experts=3)
    counts_RE = exchange.counts(counts_of(routing))
    if group.rank in plan_off:
        counts_RE[0, 0] += 1
    try:
        exchange.dispatch(
            torch.ones(1, hidden_R[group.rank]), routing, plan_step(counts_RE, Placement.equal(3, group.ranks))
        )
    finally:
        exchange.close()


def refusals(pool, *args):
    pool.send(different_options, [args] * pool.ranks)
    return [pool.receive(rank) for rank in range(pool.ranks)]


def test_ranks_that_were_started_differently_are_named(pools):
    errors = refusals(pools(2), ("exact", "fast"), (8, 8), ())
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert all("--combine: rank 1 has 'fast', rank 0 has 'exact'" in str(error) for error in errors)
    errors = refusals(pools(2), ("exact", "exact"), (8, 9), ())
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert "rank 1 sends rows of hidden 9" in str(errors[0])


def test_a_plan_mismatch_names_the_rank_that_differs_from_the_others(pools):
    two = refusals(pools(2), ("exact",) * 2, (8,) * 2, (1,))
    assert [type(error) for error in two] == [PlanMismatchError] * 2
    assert [error.ranks for error in two] == [(1,), (0,)]
    three = refusals(pools(3), ("exact",) * 3, (8,) * 3, (1,))
    assert [type(error) for error in three] == [PlanMismatchError] * 3
    assert [error.ranks for error in three] == [(1,)] * 3
    assert "rank 1 (this one) planned this step differently" in str(three[1])
    # And the processes and their group go on: a new exchange works.
    assert pools(3).run(growing_steps, [(3, 1, 4)], "exact") == [[16]] * 3
