"""The HotNets 2016 ring: PFC deadlocks it, and what prevents that."""

from dataclasses import replace

import numpy as np
import pytest

from bywash.fabric import (
    EcnConfig,
    Flows,
    NicConfig,
    PfcConfig,
    RoutingConfig,
    RunConfig,
    Scenario,
    SwitchConfig,
    ring,
    simulate,
)

SWITCH = SwitchConfig(buffer_bytes=1 << 20, headroom_bytes=37_500, ecn=EcnConfig(enabled=False))
RING = {"sw0->sw1/roce", "sw1->sw2/roce", "sw2->sw3/roce", "sw3->sw0/roce"}


def ring_run(pairs, *, size=20_000_000, paths="clockwise", **options):
    src, dst = np.array(pairs).T
    flows = Flows(src_F=src, dst_F=dst, bytes_F=np.full(len(pairs), size))
    scenario = Scenario(
        topology=ring(switches=4, gbps=40), flows=flows, switch=SWITCH, nic=NicConfig(control="none"),
        routing=RoutingConfig(paths=paths),
    )  # fmt: skip
    return simulate(replace(scenario, **options))


F1, F2, F3 = (0, 3), (2, 1), (1, 2)


def test_two_flows_around_the_ring_finish():
    result = ring_run([F1, F2])
    assert result.verdict == "completed"
    assert result.cycle == ()


def test_a_third_flow_deadlocks_it_after_about_380_us():
    result = ring_run([F1, F2, F3])
    assert result.verdict == "deadlock"
    assert set(result.cycle) == RING
    assert result.end_ps / 1e6 == pytest.approx(380, rel=0.1)
    assert result.summary()["deadlock_cycle"] == list(result.cycle)


def test_each_queue_of_the_cycle_waits_for_the_next():
    cycle = ring_run([F1, F2, F3]).cycle
    for queue, following in zip(cycle, cycle[1:] + cycle[:1]):
        assert queue.split("/")[0].split("->")[1] == following.split("->")[0]


def test_the_same_traffic_runs_through_on_up_down_routes():
    result = ring_run([F1, F2, F3], paths="up-down")
    assert result.verdict == "completed"


def test_a_scaled_watchdog_breaks_it_and_says_so():
    switch = replace(SWITCH, pfc=PfcConfig(watchdog_us=200, watchdog_restore_us=50))
    nic = NicConfig(control="none", rto_us=200)
    result = ring_run([F1, F2, F3], size=4_000_000, switch=switch, nic=nic)
    assert result.verdict == "completed"
    assert result.drops_PQ.sum() > 0
    assert "scaled" in result.summary()["watchdog"]


def test_a_deadlock_beside_traffic_that_moves_is_partial():
    """Pause refreshes and a healthy flow keep events coming; the circle is found between chunks."""
    switch = replace(SWITCH, pfc=PfcConfig(mode="quanta", quanta=2000))
    scenario_pairs = [F1, F2, F3]
    src, dst = np.array(scenario_pairs).T
    flows = Flows(src_F=src, dst_F=dst, bytes_F=np.full(3, 20_000_000))
    scenario = Scenario(
        topology=ring(switches=4, gbps=40), flows=flows, switch=switch, nic=NicConfig(control="none"),
        routing=RoutingConfig(paths="clockwise"), run=RunConfig(end_us=50_000),
    )  # fmt: skip
    result = simulate(scenario, chunk=20_000)
    assert result.verdict == "partial deadlock"
    assert set(result.cycle) == RING


def test_dcqcn_alone_does_not_save_the_ring_from_a_first_burst():
    """The burst is shorter than a control loop: with thresholds above the PFC threshold nothing is marked in time."""
    ecn = EcnConfig(kmin_bytes=400_000, kmax_bytes=1_600_000)
    result = ring_run([F1, F2, F3], switch=replace(SWITCH, ecn=ecn), nic=NicConfig())
    assert result.verdict == "deadlock"
