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
