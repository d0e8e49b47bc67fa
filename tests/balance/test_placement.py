import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bywash.balance import Placement
from bywash.errors import ConfigError


def test_equal_gives_the_first_ranks_one_more():
    assert Placement.equal(5, 3).home_E.tolist() == [0, 0, 1, 1, 2]


def test_weighted_example():
    assert Placement.weighted(6, [2, 1]).home_E.tolist() == [0, 0, 0, 0, 1, 1]


@given(st.integers(1, 300), st.lists(st.integers(0, 9), min_size=1, max_size=40).filter(any))
def test_weighted_places_every_expert_within_one_of_its_share(experts, speeds):
    placement = Placement.weighted(experts, speeds)
    owned = np.bincount(placement.home_E, minlength=len(speeds))
    assert owned.sum() == experts
    assert (np.diff(placement.home_E) >= 0).all()
    for count, speed in zip(owned, speeds, strict=True):
        assert abs(count - experts * speed / sum(speeds)) < 1
    assert [placement.experts_of(r) for r in range(len(speeds))] == [
        np.flatnonzero(placement.home_E == r).tolist() for r in range(len(speeds))
    ]


@given(st.integers(1, 100), st.integers(1, 20))
def test_equal_differs_by_at_most_one(experts, ranks):
    owned = np.bincount(Placement.equal(experts, ranks).home_E, minlength=ranks)
    assert owned.max() - owned.min() <= 1


@pytest.mark.parametrize(
    ("speeds", "field"),
    [([], "placement.ranks"), ([0, 0], "placement.speeds"), ([1, -1], r"placement.speeds\[1\]")],
)
def test_bad_speeds_name_the_field(speeds, field):
    with pytest.raises(ConfigError, match=field):
        Placement.weighted(4, speeds)


def test_home_outside_the_ranks_is_named():
    with pytest.raises(ConfigError, match=r"placement.home\[1\] = 2"):
        Placement(home_E=np.array([0, 2], dtype=np.int32), ranks=2)
