import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Placement
from bywash.errors import ConfigError

counts = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


def loads(placement, counts_E):
    return np.bincount(placement.home_E, weights=counts_E, minlength=placement.ranks)


def test_the_example_of_the_docstring():
    assert Placement.from_counts(np.array([6, 5, 2, 1]), 2).home_E.tolist() == [0, 1, 1, 0]


@settings(deadline=None)
@given(counts, st.integers(1, 8))
def test_as_many_experts_per_rank_as_equal_and_never_worse_than_blocks(counts_E, ranks):
    placement = Placement.from_counts(np.array(counts_E), ranks)
    blocks = Placement.equal(len(counts_E), ranks)
    assert (
        np.bincount(placement.home_E, minlength=ranks).tolist() == np.bincount(blocks.home_E, minlength=ranks).tolist()
    )
    assert loads(placement, counts_E).max() <= loads(blocks, counts_E).max() or len(counts_E) < 2 * ranks


def test_layers_take_turns():
    counts_LE = np.array([[6, 5, 2, 1]] * 3)
    assert [p.home_E.tolist() for p in Placement.of_layers(counts_LE, 2)] == [[0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0]]
    rng = np.random.default_rng(4)
    counts_LE = rng.integers(0, 1000, (9, 12))
    for speeds in ((), (2, 2, 1), (3, 2, 1)):  # alike, two alike, all different
        for layer, placement in enumerate(Placement.of_layers(counts_LE, 3, speeds)):
            alone = Placement.from_counts(counts_LE[layer], 3, speeds)
            turned = np.array([placement.home_E[alone.experts_of(rank)[0]] for rank in range(3)])
            assert (turned[alone.home_E] == placement.home_E).all()
            circle = {(): 3, (2, 2, 1): 2, (3, 2, 1): 1}[speeds]
            assert turned.tolist() == [*np.roll(range(circle), -layer), *range(circle, 3)]


@settings(deadline=None)
@given(counts, st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(any))
def test_no_swap_helps_the_slowest_rank(counts_E, speeds):
    placement = Placement.from_counts(np.array(counts_E), len(speeds), speeds)
    time_R = [load / speed if speed else load * 0.0 for load, speed in zip(loads(placement, counts_E), speeds)]
    slowest = int(np.argmax(time_R))
    if not speeds[slowest]:
        return
    for a, b in itertools.product(placement.experts_of(slowest), range(len(counts_E))):
        other = int(placement.home_E[b])
        if other == slowest:
            continue
        less = counts_E[a] - counts_E[b]
        after = max(time_R[slowest] - less / speeds[slowest], time_R[other] + less / speeds[other])
        assert after >= time_R[slowest] - 1e-9


def test_close_to_the_best_placement_of_small_cases():
    rng = np.random.default_rng(3)
    for _ in range(20):
        counts_E = rng.integers(1, 100, 6)
        best = min(
            np.bincount(home, weights=counts_E, minlength=2).max()
            for home in itertools.product((0, 1), repeat=6)
            if sum(home) == 3
        )
        assert loads(Placement.from_counts(counts_E, 2), counts_E).max() <= 1.1 * best


@pytest.mark.parametrize(
    ("counts_E", "speeds", "message"),
    [([], (), "placement.counts"), ([1, -1], (), "placement.counts"), ([1, 2], (1, 1, 1), "placement.speeds: 3 for 2")],
)
def test_bad_input_names_the_field(counts_E, speeds, message):
    with pytest.raises(ConfigError, match=message):
        Placement.from_counts(np.array(counts_E, dtype=np.int64), 2, speeds)
