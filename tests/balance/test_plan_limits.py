"""Plans with limits and slots: equal to the oracle, and what must hold whatever the counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Limits, Placement, SlotDirectory, plan_step
from bywash.balance.limits import MOST_ROWS
from bywash.balance.naive import plan_limits_naive
from bywash.errors import ConfigError
from tests.balance.plan_cases import SHAPES, draw_case, draw_counts

seeds = st.integers(0, 2**32 - 1)


def plans_of(case):
    """(counts, directory before, plan, layer) of each plan in turn."""
    directory = case.directory
    for number, counts_RE in enumerate(case.counts):
        layer = number % directory.layers
        plan = plan_step(counts_RE, case.placement, case.limits, directory, layer=layer)
        yield counts_RE, directory, plan, layer
        directory = plan.directory


def check_equals_oracle(case):
    start, home = case.directory, case.placement.home_E.tolist()
    keys, ages, hot = start.keys_RS.tolist(), start.ages_RS.tolist(), start.hot_LE.tolist()
    for counts_RE, _, plan, layer in plans_of(case):
        naive = plan_limits_naive(counts_RE.tolist(), home, case.limits, keys, ages, hot, layer)
        keys, ages, hot = naive.keys, naive.ages, naive.hot
        assert plan.rows_ER.tolist() == naive.rows
        assert plan.fetch_RS.tolist() == naive.fetch
        assert plan.directory.keys_RS.tolist() == keys
        assert plan.directory.ages_RS.tolist() == ages
        assert plan.directory.hot_LE.tolist() == hot
        assert plan.digest == naive.digest


def check_laws(case):
    limits, home_E = case.limits, case.placement.home_E
    for counts_RE, before, plan, layer in plans_of(case):
        rows_E, experts = counts_RE.sum(axis=0), home_E.size
        away_ER = plan.rows_ER.copy()
        away_ER[np.arange(experts), home_E] = 0
        # every row once, none anywhere else
        assert (plan.rows_ER >= 0).all()
        assert (plan.rows_ER.sum(axis=1) == rows_E).all()
        assert (plan.rows_ER.sum(axis=0) == plan.rows_R).all()
        assert plan.spilled == away_ER.sum()
        # caps: no slot takes more, home takes more only in rounds of `capacity`
        assert away_ER.max() <= limits.capacity
        assert (plan.home_rows_E <= plan.waves_E * limits.capacity).all()
        # a slot holds what is computed there, was fetched if it was not there, and pays
        for rank in range(plan.rows_R.size):
            held, held_before = plan.directory.held(rank, layer), before.held(rank, layer)
            assert len(held) <= before.keys_RS.shape[1]
            for expert in np.flatnonzero(away_ER[:, rank]):
                fetched = plan.fetch_RS[rank, held[expert]]
                assert fetched == (-1 if expert in held_before else home_E[expert])
                assert away_ER[expert, rank] >= (
                    min(limits.use_rows, limits.fetch_rows) if fetched < 0 else limits.fetch_rows
                )
            check_slots_kept(rank, before, plan, layer, limits)
        # recipients stay at or below their share times 1 + 14^2 / 256 of alpha, rounded up
        speeds_R = limits.speeds_R(plan.rows_R.size)
        most = -(-rows_E.sum() * speeds_R * limits.alpha_1024 * (256 + 196) // (speeds_R.sum() * 1024 * 256)) + 1
        got_R = away_ER.sum(axis=0)
        assert (plan.rows_R[got_R > 0] <= most[got_R > 0]).all()


def check_slots_kept(rank, before, plan, layer, limits):
    """Slots change only by a fetch, and none is taken from a layer whose plan may still be run."""
    for slot, (old, new) in enumerate(zip(before.keys_RS[rank], plan.directory.keys_RS[rank], strict=True)):
        assert (old != new) == (plan.fetch_RS[rank, slot] >= 0)
        if old != new and old >= 0 and old // before.experts != layer:
            assert before.ages_RS[rank, slot] + 1 >= limits.keep


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_equals_the_oracle(seed):
    check_equals_oracle(draw_case(np.random.default_rng(seed)))


@settings(max_examples=300, deadline=None)
@given(seeds)
def test_laws_hold(seed):
    check_laws(draw_case(np.random.default_rng(seed), most_ranks=12, most_experts=40))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_laws_hold_for_100_000_count_matrices():
    rng = np.random.default_rng(2026)
    for number in range(100_000 // 10):
        case = draw_case(rng, most_ranks=16, most_experts=64, most_slots=6, plans=10)
        check_laws(case)
        if number % 20 == 0:
            check_equals_oracle(case)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 256, 4), (32, 128, 2), (2, 9, 1)])
def test_adversarial_counts_at_real_sizes(shape, ranks, experts, slots):
    rng = np.random.default_rng(5)
    placement = Placement.equal(experts, ranks)
    directory = SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts)
    counts_RE = draw_counts(rng, ranks, experts, shape)
    plan = plan_step(counts_RE, placement, Limits(), directory)
    assert (plan.rows_ER.sum(axis=1) == counts_RE.sum(axis=0)).all()
    if shape == "one expert":  # 1 / R of it each, whatever the home
        assert plan.rows_R.max() == -(-counts_RE.sum() // ranks)


def test_example_of_the_docstring():
    counts_RE = np.array([[3, 0], [1, 2]], dtype=np.int32)
    plan = plan_step(counts_RE, Placement.equal(2, 2), Limits(), SlotDirectory.empty(ranks=2, slots=1, experts=2))
    assert plan.rows_ER.tolist() == [[3, 1], [0, 2]]
    assert plan.fetch_RS.tolist() == [[-1], [0]]
    assert plan.rows_R.tolist() == [3, 3]
    assert plan.spilled == 1


def test_a_second_plan_finds_the_weights_where_they_are():
    counts_RE = np.array([[30, 0], [10, 2]], dtype=np.int32)
    directory = SlotDirectory.empty(ranks=2, slots=1, experts=2)
    first = plan_step(counts_RE, Placement.equal(2, 2), Limits(), directory)
    second = plan_step(counts_RE, Placement.equal(2, 2), Limits(), first.directory)
    assert (first.fetches, second.fetches) == (1, 0)
    assert second.rows_ER.tolist() == first.rows_ER.tolist()
    assert directory.keys_RS.tolist() == [[-1], [-1]]  # what went in is as it was


def test_rows_beyond_the_capacity_leave_an_idle_home():
    counts_RE = np.array([[10, 0, 0], [0, 90, 90], [0, 0, 0]], dtype=np.int32)
    placement = Placement(home_E=np.array([0, 1, 2], np.int32), ranks=3)
    directory = SlotDirectory.empty(ranks=3, slots=3, experts=3)
    plan = plan_step(counts_RE, placement, Limits(capacity=80, alpha_1024=2048), directory)
    assert plan.rows_ER.tolist() == [[10, 0, 0], [10, 80, 0], [10, 0, 80]]  # loads alone would move nothing
    assert plan.waves_E.tolist() == [1, 1, 1]


def test_without_slots_everything_is_computed_at_home_in_waves():
    counts_RE = np.array([[10, 0], [7, 2]], dtype=np.int32)
    plan = plan_step(counts_RE, Placement.equal(2, 2), Limits(capacity=4))
    assert plan.rows_ER.tolist() == [[17, 0], [0, 2]]
    assert plan.waves_E.tolist() == [5, 1]
    assert plan.spilled == plan.fetches == 0


def test_slots_of_a_layer_whose_plan_may_run_are_not_taken():
    counts_RE = np.array([[40, 0], [0, 2]], dtype=np.int32)
    directory = SlotDirectory.empty(ranks=2, slots=1, experts=2, layers=2)
    limits = Limits(keep=2)
    first = plan_step(counts_RE, Placement.equal(2, 2), limits, directory, layer=0)
    second = plan_step(counts_RE, Placement.equal(2, 2), limits, first.directory, layer=1)
    assert (first.fetches, second.fetches) == (1, 0)
    at_once = plan_step(counts_RE, Placement.equal(2, 2), Limits(), first.directory, layer=1)
    assert at_once.fetches == 1


def test_slow_ranks_get_their_share():
    counts_RE = np.full((2, 8), 100, dtype=np.int32)
    directory = SlotDirectory.empty(ranks=2, slots=4, experts=8)
    plan = plan_step(counts_RE, Placement.equal(8, 2), Limits(speeds=(3, 1)), directory)
    assert plan.rows_R.tolist() == [1200, 400]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"capacity": 0}, "limits.capacity = 0"),
        ({"alpha_1024": 1000}, "limits.alpha_1024 = 1000"),
        ({"fetch_rows": 0}, "limits.fetch_rows = 0"),
        ({"capacity": 8, "fetch_rows": 9}, "no slot could ever be used"),
        ({"use_rows": -1}, "limits.use_rows = -1"),
        ({"keep": -1}, "limits.keep = -1"),
        ({"speeds": (1, 5000)}, r"limits.speeds\[1\] = 5000"),
        ({"speeds": (0, 0)}, "all are 0"),
    ],
)
def test_bad_limits_name_the_field(values, field):
    with pytest.raises(ConfigError, match=field):
        Limits(**values)


def test_what_does_not_fit_is_refused():
    counts_RE, placement = np.ones((2, 4), np.int32), Placement.equal(4, 2)
    directory = SlotDirectory.empty(ranks=2, slots=1, experts=5)
    with pytest.raises(ConfigError, match="2 ranks and 5 experts"):
        plan_step(counts_RE, placement, Limits(), directory)
    with pytest.raises(ConfigError, match="layer 1 of a directory"):
        plan_step(counts_RE, placement, Limits(), SlotDirectory.empty(ranks=2, slots=1, experts=4), layer=1)
    with pytest.raises(ConfigError, match="3 for 2 ranks"):
        plan_step(counts_RE, placement, Limits(speeds=(1, 1, 1)))
    with pytest.raises(ConfigError, match="rows in one step"):
        plan_step(counts_RE * (MOST_ROWS // 4), placement, Limits())
