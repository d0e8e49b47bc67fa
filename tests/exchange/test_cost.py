import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.exchange.cost import MARGIN, OVERLAP_PATIENCE, Rates, Step, choose, estimates


def deepseek(ranks, tokens, **changes):
    sizes = {"ranks": ranks, "tokens": tokens, "hidden": 7168, "item_bytes": 2, "top_k": 8, "experts": 256}
    return Step(**{**sizes, **changes})


def by(step, algorithm, half):
    return next(e for e in estimates(step, Rates()) if (e.algorithm, e.half) == (algorithm, half))


@pytest.mark.parametrize(
    ("tokens", "combine", "half", "measured_us"),
    [
        (4096, "fast", "dispatch", 176.0),
        (4096, "fast", "combine", 226.1),
        (4096, "exact", "combine", 678.1),
        (128, "fast", "dispatch", 12.4),
        (128, "fast", "combine", 14.9),
        (128, "exact", "combine", 30.8),
    ],
)
def test_default_rates_give_the_times_that_were_measured(tokens, combine, half, measured_us):
    """docs/benchmarks.md, two H200; `exact` is a prediction, the others were fitted."""
    assert by(deepseek(2, tokens, combine=combine), "all-to-all", half).time_us == pytest.approx(measured_us, rel=0.06)


@pytest.mark.parametrize(("tokens", "measured_us"), [(4096, 551.5), (128, 118.9)])
def test_all_gather_takes_what_whole_layers_took_beside_their_experts(tokens, measured_us):
    assert choose(deepseek(2, tokens)).time_us("all-gather") == pytest.approx(measured_us, rel=0.09)


@pytest.mark.parametrize(("ranks", "more"), [(2, 0.003), (4, 0.11), (8, 0.52)])
def test_all_gather_sends_what_deduplication_saves(ranks, more):
    gather, direct = (by(deepseek(ranks, 4096), name, "dispatch") for name in ("all-gather", "all-to-all"))
    assert gather.wire_bytes / direct.wire_bytes - 1 == pytest.approx(more, abs=0.015)


@given(
    ranks=st.integers(1, 9),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_ranks_reached_by_uniform_routing_agree_with_drawing_it(ranks, experts, top_k, seed):
    top_k = min(top_k, experts)
    step = deepseek(ranks, 1, experts=experts, top_k=top_k)
    generator, draws = random.Random(seed), 400
    share, extra = divmod(experts, ranks)
    home = [r for r in range(ranks) for _ in range(share + (r < extra))]
    reached = 0
    for draw in range(draws):
        reached += len({home[e] for e in generator.sample(range(experts), top_k)} - {draw % ranks})
    assert reached / draws == pytest.approx(step.reached, abs=0.35)
    assert 0 <= step.reached <= min(ranks - 1, top_k)


@given(
    ranks=st.integers(1, 32),
    tokens=st.integers(1, 10_000),
    experts=st.integers(1, 300),
    combine=st.sampled_from(["exact", "stable", "fast"]),
    overlapped=st.booleans(),
)
def test_the_choice_is_the_cheapest_and_its_arithmetic_is_shown(ranks, tokens, experts, combine, overlapped):
    step = deepseek(ranks, tokens, experts=experts, top_k=min(8, experts), combine=combine)
    choice = choose(step, overlapped=overlapped)
    assert all(e.time_us > 0 and e.wire_bytes >= 0 and "us +" in e.arithmetic for e in choice.estimates)
    assert len(choice.estimates) == (3 if combine == "exact" else 4)
    if combine == "exact":
        assert choice.algorithm == "all-to-all"
        return
    taken_us, least_us = choice.time_us(choice.algorithm), min(map(choice.time_us, ("all-to-all", "all-gather")))
    assert taken_us <= MARGIN * least_us or (overlapped and choice.algorithm == "all-gather")
    assert taken_us <= OVERLAP_PATIENCE * least_us


def test_what_decides():
    short = choose(deepseek(2, 128))
    assert short.algorithm == "all-to-all"
    assert "x faster than all-gather" in short.why
    beside_work = choose(deepseek(2, 4096), overlapped=True)
    assert beside_work.algorithm == "all-gather"
    assert "takes no multiprocessor" in beside_work.why
    assert choose(deepseek(8, 16_384), overlapped=True).algorithm == "all-to-all"  # half as many bytes again
    quick_copies = choose(deepseek(2, 16_384), Rates(copy_gbytes_per_s=800.0))
    assert quick_copies.algorithm == "all-gather"
    assert "x faster than all-to-all" in quick_copies.why
    free_sums = Rates(memory_gbytes_per_s=1e9, copy_gbytes_per_s=349.0, copy_start_us=7.5)
    assert "as fast as all-gather within 2%" in choose(deepseek(2, 4096), free_sums).why


def test_known_traffic_replaces_uniform_routing():
    few = deepseek(8, 4096, remote_ranks=1.0)
    assert by(few, "all-to-all", "dispatch").wire_bytes < by(deepseek(8, 4096), "all-to-all", "dispatch").wire_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, r"step\.tokens = 0"),
        ({"top_k": 300}, r"step\.top_k = 300: there are only 256"),
        ({"combine": "sum"}, r"step\.combine = 'sum'"),
        ({"remote_ranks": 2.0}, r"step\.remote_ranks = 2\.0: 0 to 1"),
    ],
)
def test_impossible_steps_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        deepseek(2, **{"tokens": 4096, **changes})


def test_impossible_rates_are_refused():
    with pytest.raises(ConfigError, match=r"rates\.copy_gbytes_per_s = 0"):
        Rates(copy_gbytes_per_s=0)
