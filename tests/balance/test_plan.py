import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bywash.balance import Limits, Placement, digest32, plan_step
from bywash.balance.naive import plan_step_naive
from bywash.errors import ConfigError


@st.composite
def cases(draw):
    ranks, experts = draw(st.integers(1, 6)), draw(st.integers(1, 33))
    counts = draw(st.lists(st.integers(0, 2**20), min_size=ranks * experts, max_size=ranks * experts))
    home = draw(st.lists(st.integers(0, ranks - 1), min_size=experts, max_size=experts))
    placement = Placement(home_E=np.array(home, dtype=np.int32), ranks=ranks)
    return np.array(counts, dtype=np.int32).reshape(ranks, experts), placement


@given(cases())
def test_plan_equals_the_plain_python_oracle(case):
    counts_RE, placement = case
    plan = plan_step(counts_RE, placement)
    rank_E, rows_R, digest = plan_step_naive(counts_RE.tolist(), placement.home_E.tolist())
    assert plan.rank_E.tolist() == rank_E
    assert plan.rows_R.tolist() == rows_R
    assert plan.digest == digest
    assert plan.rows_R.sum() == counts_RE.sum(dtype=np.int64)


@given(cases(), st.data())
def test_any_changed_count_changes_the_digest(case, data):
    counts_RE, placement = case
    changed = counts_RE.copy()
    at = data.draw(st.integers(0, counts_RE.size - 1))
    changed.flat[at] += data.draw(st.integers(1, 1000))
    assert plan_step(changed, placement).digest != plan_step(counts_RE, placement).digest


@given(cases(), st.data())
@settings(deadline=None)  # numba takes its time when it is first used
def test_rows_counted_elsewhere_change_the_digest_of_a_plan_with_limits(case, data):
    """If only their rank is another one, nothing but the weights of the ranks shows it."""
    counts_RE, placement = case
    here, there = (data.draw(st.integers(0, counts_RE.size - 1)) for _ in range(2))
    if data.draw(st.booleans()):
        there = there // placement.num_experts * placement.num_experts + here % placement.num_experts
    assume(here != there)
    moved = counts_RE.copy()
    rows = data.draw(st.integers(1, 1000))
    counts_RE.flat[here] += rows
    moved.flat[there] += rows
    assert plan_step(moved, placement, Limits()).digest != plan_step(counts_RE, placement, Limits()).digest


def test_digest_depends_on_position():
    words = np.array([3, 7, 0], dtype=np.int32)
    assert digest32(words) != digest32(words[::-1].copy())


def test_imbalance_of_an_empty_step_is_one():
    assert plan_step(np.zeros((2, 4), dtype=np.int32), Placement.equal(4, 2)).imbalance == 1.0


def test_counts_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match="do not fit a placement of 2 ranks and 4 experts"):
        plan_step(np.zeros((3, 4), dtype=np.int32), Placement.equal(4, 2))


def test_negative_count_is_named():
    counts = np.zeros((2, 4), dtype=np.int32)
    counts[1, 2] = -5
    with pytest.raises(ConfigError, match=r"counts\[1, 2\] = -5"):
        plan_step(counts, Placement.equal(4, 2))
