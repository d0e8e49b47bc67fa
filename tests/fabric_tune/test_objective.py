"""From settings to scenarios, and from results to the numbers that count."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.fabric import FrameConfig, from_matrix, join, leaf_spine, simulate
from bywash.fabric.scenario import shared_pool_bytes
from bywash.fabric.tune import Case
from bywash.fabric.tune.objective import (
    Outcome,
    floor_us,
    make_fabric,
    message_us_F,
    outcome,
    scenario,
    score,
)
from bywash.fabric.tune.space import paper, pfc_alone, vendor
from tests.fabric.test_sending import traffic
from tests.fabric_tune.samples import cases, plan_of


@settings(max_examples=40, deadline=None)
@given(flows=traffic())
def test_the_floor_is_the_busiest_hosts(flows):
    """What one host after another has to send or receive, phase by phase, frame by frame."""
    topology, frame = leaf_spine(hosts=5, leaves=1, spines=1, gbps=[10.0, 25.0, 25.0, 40.0, 100.0]), FrameConfig()
    times = []
    for host in range(5):
        busy_us = 0.0
        for phase in range(flows.phases):
            sides = []
            for end in (flows.src_F, flows.dst_F):
                mine = [
                    int(flows.bytes_F[f])
                    for f in range(flows.count)
                    if end[f] == host and flows.phase_F[f] == phase and not flows.background_F[f]
                ]
                frames = sum(math.ceil(one / frame.payload_bytes) for one in mine)
                sides.append((sum(mine) + frames * frame.header_bytes) * 8 / (topology.host_gbps(host) * 1e3))
            busy_us += max(sides)
        times.append(busy_us)
    assert floor_us(topology, frame, flows) == pytest.approx(max(times))


def test_no_switch_gets_a_larger_pool_than_it_has():
    plan = plan_of()
    one = scenario(make_fabric(plan), vendor(100), cases(1)[0])
    pools = shared_pool_bytes(one)[plan.topology.hosts :]
    real = [switch.pool_bytes for switch in plan.switches]
    assert all(ours <= theirs for ours, theirs in zip(pools, real))
    assert any(ours == theirs for ours, theirs in zip(pools, real))


def test_completion_counts_from_the_phase_not_from_the_schedule():
    """Two phases, one message at a time: the n-th message of a source has waited for those before it."""
    matrix = np.full((8, 8), 50_000)
    np.fill_diagonal(matrix, 0)
    flows = join([from_matrix(matrix), from_matrix(matrix, phase=1, gap_us=30.0)])
    case = Case(name="two phases", flows=flows)
    result = simulate(scenario(make_fabric(plan_of()), replace(vendor(100), active=1), case))
    took_F = message_us_F(result)
    for flow in range(flows.count):
        mine = (flows.src_F == flows.src_F[flow]) & (flows.phase_F == flows.phase_F[flow])
        assert took_F[flow] == pytest.approx((result.done_ps_F[flow] - result.start_ps_F[mine].min()) / 1e6)
    assert (took_F >= result.fct_us_F - 1e-6).all()
    assert took_F[flows.phase_F == 1].max() < result.done_ps_F.max() / 1e6 - 30


def test_a_setting_reaches_the_scenario():
    one = scenario(make_fabric(plan_of()), paper(), cases(1)[0])
    ecn, dcqcn = one.switch.ecn, one.nic.dcqcn
    assert (ecn.kmin_bytes, ecn.kmax_bytes, ecn.pmax, ecn.reference_gbps) == (5_000, 200_000, 0.01, 100.0)
    assert (dcqcn.g, dcqcn.cnp_interval_us, dcqcn.alpha_us, dcqcn.timer_us) == (1 / 256, 50.0, 55.0, 55.0)
    assert (dcqcn.ai_mbps, dcqcn.hai_mbps, dcqcn.byte_counter, dcqcn.fast_recovery) == (40.0, 400.0, 10_000_000, 5)
    assert one.switch.alpha == 1.0
    assert scenario(make_fabric(plan_of()), replace(paper(), dynamic_th=-2), cases(1)[0]).switch.alpha == 0.25


def test_without_marking_only_pauses_act():
    result = simulate(scenario(make_fabric(plan_of()), pfc_alone(100), cases(1)[0]))
    numbers = outcome(result)
    assert result.marks_PQ.sum() == 0
    assert numbers.pause_share > 0
    assert numbers.completed


def test_a_case_that_takes_too_long_has_failed_it():
    one = scenario(make_fabric(plan_of()), vendor(100), cases(1)[0])
    numbers = outcome(simulate(replace(one, run=replace(one.run, end_us=20.0))))
    assert not numbers.completed
    assert numbers.p99_us == numbers.whole_us == math.inf
    assert score([numbers]).rank(1.0)[0] == 2


@settings(max_examples=50, deadline=None)
@given(budget=st.floats(0, 0.01), shares=st.lists(st.floats(0, 0.02), min_size=1, max_size=5), drops=st.integers(0, 1))
def test_lossless_and_within_the_pause_budget_comes_first(budget, shares, drops):
    made = [
        Outcome(
            p99_us=10.0, mean_us=5.0, whole_us=40.0, pause_share=share, peak_queue_bytes=1, drops=drops, floor_us=9.0
        )
        for share in shares
    ]
    total = score(made)
    assert total.objective_us == pytest.approx(20.0)
    place = total.rank(budget)[0]
    assert place == (2 if drops else int(max(shares) > budget))
