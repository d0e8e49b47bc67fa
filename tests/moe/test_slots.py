"""Rows that leave home: the same bits as without, on real processes, with weights copied into slots."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Limits, Placement
from bywash.errors import ConfigError, ExchangeError
from bywash.exchange import LocalExchange, open_exchange
from bywash.moe import ExpertParallel, GatedExperts, SlotPool
from bywash.moe.slots import SlotLayout
from tests.moe.common import Case, layer_cases, random_batch, random_experts


@dataclass(frozen=True, kw_only=True)
class Spill:
    """How a case is run: `layers` share the pool, and `steps` follow each other with other tokens."""

    exchange: str
    limits: Limits
    slots: int
    layers: int = 1
    steps: int = 2
    reuse_plan: bool = False


def steps_on_rank(group, case, spill):
    """Outputs of every (step, layer), with slots and without; and (rows spilled, fetches, bytes of weights sent)."""
    placement = Placement.equal(case.experts, group.ranks)
    mine = placement.experts_of(group.rank)
    outputs = []
    for with_slots in (True, False):
        exchange = open_exchange(spill.exchange, group, combine_mode=case.combine)
        pool = None
        if with_slots:
            pool = SlotPool(exchange, spill.limits, slots=spill.slots, experts=case.experts, layers=spill.layers)
        layers = [
            ExpertParallel(
                exchange=exchange,
                placement=placement,
                experts=random_experts(case.experts, case.hidden, case.inner, case.dtype, case.seed + layer, mine),
                pool=pool,
                layer=layer,
            )
            for layer in range(spill.layers)
        ]
        outputs.append([])
        for step in range(spill.steps):
            for number, layer in enumerate(layers):
                x_TD, routing = random_batch(replace(case, seed=case.seed + 7 * step + number), group.rank)
                outputs[-1].append(layer(x_TD, routing, reuse_plan=spill.reuse_plan))
        if pool is not None:
            spilled = sum(counted.rows_spilled for counted in pool.counters)
            done = (spilled, sum(counted.fetches for counted in pool.counters), exchange.traffic.weight_bytes)
        group.meet("between runs")
        exchange.close()
    return outputs, done


@st.composite
def cases(draw):
    case = draw(
        layer_cases(["exact", "stable"], ranks=(2, 4), least_experts=2, tokens=(0, 1, 5, 17, 33, 60), skews=(0.5, 50.0))
    )
    spill = Spill(
        exchange=draw(st.sampled_from(["gloo", "shm"])),
        limits=Limits(
            capacity=draw(st.sampled_from([4, 20, 10**6])),
            fetch_rows=draw(st.sampled_from([1, 3])),
            alpha_1024=draw(st.sampled_from([1024, 1200])),
        ),
        slots=draw(st.integers(0, 3)),
        layers=draw(st.integers(1, 2)),
        reuse_plan=draw(st.booleans()),
    )
    return case, spill


@settings(max_examples=40, deadline=None)
@given(drawn=cases())
def test_spilling_changes_no_bit(pools, drawn):
    case, spill = drawn
    for (spilled, plain), _ in pools(case.ranks).run(steps_on_rank, case, spill):
        for with_slots, without in zip(spilled, plain, strict=True):
            assert with_slots.dtype == case.dtype
            assert torch.equal(with_slots, without)


@pytest.mark.parametrize("exchange", ["gloo", "shm"])
@pytest.mark.parametrize("combine", ["exact", "stable", "fast"])
@pytest.mark.parametrize("reuse_plan", [False, True], ids=["counts first", "plan before"])
def test_rows_do_leave_home_and_weights_do_travel(pools, exchange, combine, reuse_plan):
    case = Case(
        hidden=32,
        inner=16,
        experts=12,
        top_k=3,
        tokens=(60, 40, 50),
        dtype=torch.float32,
        combine=combine,
        seed=4,
        skew=0.5,
    )
    spill = Spill(exchange=exchange, limits=Limits(), slots=3, layers=2, steps=3, reuse_plan=reuse_plan)
    results = pools(3).run(steps_on_rank, case, spill)
    slot_bytes = SlotLayout.of(random_experts(1, 32, 16, torch.float32, 0).parts).slot_bytes
    (_, (rows, fetches, _)) = results[0]
    assert rows > 100
    assert fetches > 0
    assert {done[:2] for _, done in results} == {(rows, fetches)}
    assert sum(done[2] for _, done in results) == fetches * slot_bytes
    for (spilled, plain), _ in results:
        for with_slots, without in zip(spilled, plain, strict=True):
            torch.testing.assert_close(with_slots, without, rtol=2e-5, atol=2e-5)


def bounded_on_rank(group, case, kind, most_pairs):
    """Outputs with and without a bound on pairs; the pairs of each wave; how many waves the counts call for."""
    placement = Placement.equal(case.experts, group.ranks)
    mine = placement.experts_of(group.rank)
    experts = random_experts(case.experts, case.hidden, case.inner, case.dtype, case.seed, mine)
    exchange, sizes = open_exchange(kind, group, combine_mode=case.combine), []

    class Recorded(ExpertParallel):
        def compute(self, received):
            y_MD = super().compute(received)
            sizes.append(y_MD.shape[0])
            return y_MD

    x_TD, routing = random_batch(case, group.rank)
    outputs = []
    for most in (most_pairs, 10**6):
        pool = SlotPool(
            exchange, Limits(), slots=1, experts=case.experts, most_pairs=most, ahead_pairs=case.top_k * 200
        )
        layer = Recorded(exchange=exchange, placement=placement, experts=experts, pool=pool)
        outputs.append([layer(x_TD, routing, reuse_plan=reuse) for reuse in (False, True)])
    group.meet("the end")
    exchange.close()
    return outputs, sizes


@pytest.mark.parametrize("exchange", ["gloo", "shm"])
@pytest.mark.parametrize("combine", ["exact", "stable"])
def test_outputs_are_bounded_whatever_the_routing(pools, exchange, combine):
    case = Case(
        hidden=32,
        inner=16,
        experts=6,
        top_k=3,
        tokens=(60, 0, 40),
        dtype=torch.float32,
        combine=combine,
        seed=9,
        skew=50.0,
    )
    most_pairs = 30
    results = pools(3).run(bounded_on_rank, case, exchange, most_pairs)
    waves = len(results[0][1]) - 2
    assert waves > 2 * 4
    assert (
        max(max(sizes[:waves]) for _, sizes in results) <= most_pairs < max(max(sizes[waves:]) for _, sizes in results)
    )
    for (bounded, plain), sizes in results:
        assert len(sizes) == waves + 2
        for ours, expected in zip(bounded, plain, strict=True):
            assert torch.equal(ours, expected)


def test_a_bound_below_one_token_of_each_rank_is_refused():
    exchange = LocalExchange()
    pool = SlotPool(exchange, Limits(), slots=0, experts=4, most_pairs=1)
    case = Case(hidden=8, inner=4, experts=4, top_k=2, tokens=(9,), dtype=torch.float32, combine="exact", seed=1)
    experts = random_experts(4, 8, 4, torch.float32, seed=0)
    layer = ExpertParallel(exchange=exchange, placement=Placement.equal(4, 1), experts=experts, pool=pool)
    with pytest.raises(ConfigError, match="room for 1 pairs; one token of each rank may bring 2"):
        layer(*random_batch(case, 0))


def test_waves_of_a_step_that_failed_are_forgotten():
    exchange = LocalExchange()
    pool = SlotPool(exchange, Limits(), slots=0, experts=4, most_pairs=8)
    experts = random_experts(4, 8, 4, torch.float32, seed=0)
    layer = ExpertParallel(exchange=exchange, placement=Placement.equal(4, 1), experts=experts, pool=pool)
    plain = ExpertParallel(exchange=exchange, placement=Placement.equal(4, 1), experts=experts)
    case = Case(hidden=8, inner=4, experts=4, top_k=2, tokens=(9, 2), dtype=torch.float32, combine="exact", seed=1)
    received, _ = layer.dispatch(*random_batch(case, 0))
    assert received.rows_ND.shape[0] < 9, "the rest waits for a combine, which an error keeps from coming"
    few = random_batch(case, 1)
    assert torch.equal(layer(*few), plain(*few))


class Waves(GatedExperts):
    """Counts calls, and the rows of the largest."""

    def __init__(self, experts):
        vars(self).update(vars(experts))
        self.calls = self.most_rows = 0

    def forward(self, slot, rows_ND):
        self.calls, self.most_rows = self.calls + 1, max(self.most_rows, rows_ND.shape[0])
        return super().forward(slot, rows_ND)


def test_a_single_rank_has_nobody_to_spill_to_and_computes_in_waves():
    exchange = LocalExchange()
    pool = SlotPool(exchange, Limits(capacity=2), slots=2, experts=4)
    experts = random_experts(4, 8, 4, torch.float32, seed=0)
    waves = Waves(experts)
    layer = ExpertParallel(exchange=exchange, placement=Placement.equal(4, 1), experts=waves, pool=pool)
    plain = ExpertParallel(exchange=exchange, placement=Placement.equal(4, 1), experts=experts)
    case = Case(hidden=8, inner=4, experts=4, top_k=2, tokens=(9,), dtype=torch.float32, combine="exact", seed=1)
    x_TD, routing = random_batch(case, 0)
    assert torch.equal(layer(x_TD, routing), plain(x_TD, routing))
    counted = pool.counters[0]
    assert counted.most_waves == layer.plans[0].waves_E.max() > 1
    assert waves.most_rows == 16  # a tile: two rows and zeros
    assert waves.calls == int(layer.plans[0].waves_E.sum())
    assert counted.rows_waited == int((layer.plans[0].home_rows_E - 2).clip(min=0).sum()) > 0


def damaged_weights(group):
    """Rank 1's weights are changed on the way: the copy must be refused where it arrives."""
    exchange = open_exchange("shm", group)
    pool = SlotPool(exchange, Limits(), slots=2, experts=4)
    placement = Placement.equal(4, 2)
    experts = random_experts(4, 8, 4, torch.float32, 0, placement.experts_of(group.rank))
    layer = ExpertParallel(exchange=exchange, placement=placement, experts=experts, pool=pool)
    original = SlotLayout.packed

    def packed(self, parts, expert):
        slot_B = original(self, parts, expert)
        slot_B[3] ^= 1
        return slot_B

    SlotLayout.packed = packed
    try:
        case = Case(
            hidden=8,
            inner=4,
            experts=4,
            top_k=1,
            tokens=(9, 9),
            dtype=torch.float32,
            combine="exact",
            seed=1,
            skew=50.0,
        )
        layer(*random_batch(case, group.rank))
    finally:
        SlotLayout.packed = original
        exchange.close()


def test_damaged_weights_are_refused_and_named(pools):
    pool = pools(2)
    pool.send(damaged_weights, [(), ()])
    errors = [pool.receive(rank) for rank in range(2)]
    pool.close()
    text = [
        str(error) for error in errors if isinstance(error, ExchangeError) and "arrived damaged from rank" in str(error)
    ]
    assert text, errors


def test_layers_of_other_shapes_need_their_own_pool():
    exchange = LocalExchange()
    pool = SlotPool(exchange, Limits(), slots=1, experts=4, layers=2)
    for layer, hidden in enumerate((8, 40)):
        experts = random_experts(4, hidden, 4, torch.float32, seed=0)
        if layer == 0:
            ExpertParallel(exchange=exchange, placement=Placement.equal(4, 1), experts=experts, pool=pool)
            continue
        with pytest.raises(ConfigError, match="layers that differ need a pool each"):
            ExpertParallel(exchange=exchange, placement=Placement.equal(4, 1), experts=experts, pool=pool, layer=1)
