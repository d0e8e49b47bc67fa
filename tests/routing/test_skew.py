"""The generators: their laws, their bounds, and that a seed fixes everything."""

import numpy as np
import pytest

from bywash.errors import ConfigError
from bywash.routing import DECODE, TraceShape, drifting, hot_set, summarise, uniform, zipf
from bywash.routing.skew import draw_distinct

MAKERS = {
    "uniform": lambda shape, seed: uniform(shape, seed=seed),
    "zipf": lambda shape, seed: zipf(shape, exponent=0.8, seed=seed),
    "hot_set": lambda shape, seed: hot_set(shape, hot=2, share=0.6, seed=seed),
    "drifting": lambda shape, seed: drifting(shape, topics=2, period=2, seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("experts", "top_k"), [(7, 1), (13, 13), (300, 5)])
def test_shape_marks_and_seed(name, experts, top_k):
    shape = TraceShape(num_experts=experts, top_k=top_k, layers=3, tokens=11, steps=5)
    trace, again, other = (MAKERS[name](shape, seed) for seed in (4, 4, 5))
    assert trace.ids_NLK.shape == (55, 3, top_k)
    assert (trace.source, trace.seed, trace.steps) == ("generated", 4, 5)
    assert trace.note.startswith(name)
    assert (trace.step_phase_S == DECODE).all()
    assert np.array_equal(trace.ids_NLK, again.ids_NLK)
    assert not np.array_equal(trace.ids_NLK, other.ids_NLK)


def test_drawing_without_replacement_has_the_marginal_of_successive_draws():
    p = np.array([0.6, 0.25, 0.1, 0.05])
    tokens = 200_000
    ids = draw_distinct(p, tokens, 2, np.random.default_rng(0))
    deviation = 5 / np.sqrt(tokens)  # five times the greatest standard deviation of a share of tokens, 0.5 / sqrt
    assert np.bincount(ids[:, 0]) / tokens == pytest.approx(p, abs=deviation / 2)
    second = [sum(p[first] * p[e] / (1 - p[first]) for first in range(4) if first != e) for e in range(4)]
    assert np.bincount(ids[:, 1]) / tokens == pytest.approx(np.array(second), abs=deviation / 2)


def test_the_documented_example():
    ids = draw_distinct(np.array([0.8, 0.1, 0.1]), 100_000, 2, np.random.default_rng(1))
    assert (ids == 0).mean() == pytest.approx(0.489, abs=0.003)


def test_uniform_is_even():
    trace = uniform(TraceShape(num_experts=16, top_k=4, layers=2, tokens=4000), seed=0)
    assert trace.counts_LE() == pytest.approx(np.full((2, 16), 1000), abs=5 * np.sqrt(1000 * 0.75))


@pytest.mark.parametrize("exponent", [0.3, 0.6, 0.9, 1.2])
def test_the_fitted_exponent_is_the_one_asked_for(exponent):
    shape = TraceShape(num_experts=64, top_k=1, layers=4, tokens=40_000)
    fitted = summarise(zipf(shape, exponent=exponent, seed=1)).zipf_L
    assert fitted == pytest.approx(np.full(4, exponent), abs=0.04)


def test_top_k_flattens_the_law():
    fitted = [
        summarise(zipf(TraceShape(num_experts=64, top_k=k, tokens=20_000), exponent=1.2, seed=1)).zipf_L[0]
        for k in (1, 4, 16, 64)
    ]
    assert fitted == sorted(fitted, reverse=True)
    assert fitted[-1] == pytest.approx(0)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_no_share_exceeds_one_in_k(top_k):
    shape = TraceShape(num_experts=32, top_k=top_k, layers=2, tokens=5000)
    summary = summarise(zipf(shape, exponent=6.0, seed=0))
    assert (summary.top1_share_L <= 1 / top_k).all()
    assert (summary.top1_share_L > 0.95 / top_k).all()  # and a steep law comes close to it


def test_hot_set_takes_its_share():
    shape = TraceShape(num_experts=64, top_k=1, layers=3, tokens=20_000)
    counts = np.sort(hot_set(shape, hot=3, share=0.7, seed=2).counts_LE(), axis=1)
    assert counts[:, -3:].sum(axis=1) / 20_000 == pytest.approx(np.full(3, 0.7), abs=0.02)
    assert counts[:, -3:] / 20_000 == pytest.approx(np.full((3, 3), 0.7 / 3), abs=0.02)
    # with top-8 three experts cannot have more than 3/8
    wide = TraceShape(num_experts=64, top_k=8, layers=3, tokens=5000)
    counts = np.sort(hot_set(wide, hot=3, share=0.999, seed=2).counts_LE(), axis=1)
    assert counts[:, -3:].sum(axis=1) / 40_000 == pytest.approx(np.full(3, 3 / 8), abs=0.01)


def test_experts_without_popularity_are_never_drawn():
    counts = hot_set(TraceShape(num_experts=32, top_k=4, tokens=2000), hot=4, share=1.0, seed=0).counts_LE()
    assert np.sort(counts[0])[-4:].tolist() == [2000] * 4
    counts = hot_set(TraceShape(num_experts=32, top_k=4, tokens=2000), hot=4, share=0.0, seed=0).counts_LE()
    assert (counts == 0).sum() == 4


def test_hot_experts_lie_elsewhere_in_every_layer():
    shape = TraceShape(num_experts=128, top_k=1, layers=12, tokens=2000)
    hottest = summarise(zipf(shape, exponent=1.2, seed=0)).hottest_L
    assert len(np.unique(hottest)) > 8


def test_drifting_changes_the_hot_experts_with_the_topic_and_comes_back():
    shape = TraceShape(num_experts=64, top_k=1, layers=2, tokens=1000, steps=12)
    trace = drifting(shape, topics=2, period=3, seed=0, exponent=1.5)
    hottest_SL = trace.counts_SLE().argmax(axis=2)
    assert (hottest_SL[:3] == hottest_SL[0]).all()
    assert (hottest_SL[6:9] == hottest_SL[0]).all()
    assert (hottest_SL[3:6] == hottest_SL[3]).all()
    assert (hottest_SL[0] != hottest_SL[3]).any()
    assert trace.prompts == 4 * 1000
    assert [trace.topics[p] for p in (0, 999, 1000, 2000)] == ["topic-0", "topic-0", "topic-1", "topic-0"]
    assert trace.token_position_N.max() == 2


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda s: TraceShape(num_experts=8, top_k=9), "top_k = 9"),
        (lambda s: TraceShape(num_experts=8, top_k=2, steps=0), "steps = 0"),
        (lambda s: TraceShape(num_experts=70_000, top_k=2), "num_experts = 70000"),
        (lambda s: zipf(s, exponent=-1.0, seed=0), "exponent = -1"),
        (lambda s: zipf(s, exponent=float("nan"), seed=0), "exponent = nan"),
        (lambda s: hot_set(s, hot=8, share=0.5, seed=0), "hot = 8"),
        (lambda s: hot_set(s, hot=0, share=0.5, seed=0), "hot = 0"),
        (lambda s: hot_set(s, hot=1, share=1.5, seed=0), "share = 1.5"),
        (lambda s: hot_set(s, hot=1, share=1.0, seed=0), "share = 1: leaves fewer than top_k = 2"),
        (lambda s: drifting(s, topics=0, period=1, seed=0), "topics = 0"),
        (lambda s: drifting(s, topics=1, period=0, seed=0), "period = 0"),
        (lambda s: uniform(s, seed=-1), "seed = -1"),
    ],
)
def test_a_wrong_option_is_named(call, field):
    with pytest.raises(ConfigError, match=f"^{field}"):
        call(TraceShape(num_experts=8, top_k=2))
