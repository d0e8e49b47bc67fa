"""What may be chosen: levels, bounds, moves, references."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.fabric.tune.objective import planned, space_of
from bywash.fabric.tune.space import GROUPS, PARAMETERS, changes, gain, make_space, paper, pfc_alone, revert, vendor
from tests.fabric_tune.samples import plan_of

REFERENCES = (vendor(100), paper(), paper(100), pfc_alone(100))


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), start=st.integers(0, len(REFERENCES) - 1), sending=st.booleans())
def test_every_move_stays_within_the_levels_and_bounds(seed, start, sending):
    space = space_of(plan_of(), 100.0, sending=sending)
    rng = np.random.default_rng(seed)
    one = space.mutate(REFERENCES[start], rng, share=0.5)
    for _ in range(5):
        assert space.allows(one)
        kmin_below, kmax_below = space.bounds(one.dynamic_th)
        assert one.kmin_bytes < kmin_below
        assert one.kmin_bytes <= one.kmax_bytes < kmax_below
        moved = space.step(one, rng)
        assert moved != one
        assert len(changes(moved, one)) <= 2 or not space.allows(one)
        for name, (_, value) in changes(moved, one).items():
            assert value in space.levels[name]
        if not sending:
            assert not any(getattr(moved, name) for name in GROUPS["sending"])
        one = moved


def test_shares_of_the_receivers_link_go_with_no_other_pace_or_order():
    space = space_of(plan_of(), 100.0, sending=True)
    fits = replace(planned(plan_of(), 100.0), pace_by_counts=1.05)
    assert space.allows(fits)
    assert not space.allows(replace(fits, active=2))
    assert not space.allows(replace(fits, pace_gbps=25.0))


def test_moves_are_the_same_for_the_same_seed():
    space = space_of(plan_of(), 100.0, sending=True)
    twice = [[space.mutate(vendor(100), np.random.default_rng(4), share=0.5) for _ in range(3)] for _ in range(2)]
    assert twice[0] == twice[1]


def test_a_fabric_on_which_nothing_can_mark_first_is_refused():
    space = make_space(100.0, lambda dynamic_th: (1.0, 1.0), sending=False)
    with pytest.raises(ConfigError, match="no setting lets ECN mark before PFC"):
        space.mutate(vendor(100), np.random.default_rng(0), share=0.5)


def test_groups_hold_every_parameter_once():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(PARAMETERS)


def test_reverting_every_group_gives_the_base_back():
    one = paper(100)
    for group in GROUPS:
        one = revert(one, vendor(100), group)
    assert one == vendor(100)


def test_the_paper_is_the_papers():
    one = paper()
    assert (one.kmin_bytes, one.kmax_bytes, one.pmax_percent, one.increase_mbps) == (5_000, 200_000, 1, 40)
    assert gain(one.alpha_g) == 1 / 256
    assert paper(400).kmax_bytes == 10 * one.kmax_bytes


def test_the_vendors_thresholds_are_sonics():
    assert (vendor(400).kmin_bytes, vendor(400).kmax_bytes, vendor(400).pmax_percent) == (1 << 20, 2 << 20, 5)


def test_the_computed_setting_is_within_the_bounds_of_its_own_fabric():
    for shape in ("", "leaf-spine:hosts=16,leaves=4,spines=2,gbps=100,length_m=5,uplink_length_m=40"):
        plan = plan_of(shape)
        assert space_of(plan, 100.0, sending=False).allows(planned(plan, 100.0))
