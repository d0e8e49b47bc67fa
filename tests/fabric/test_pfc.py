"""Shared buffer and PFC against closed forms and the figures of ns-3's HPCC simulator."""

from dataclasses import replace

import numpy as np
import pytest

from bywash.fabric import (
    EcnConfig,
    Flows,
    NicConfig,
    PfcConfig,
    RunConfig,
    Scenario,
    SwitchConfig,
    TrafficClass,
    alltoall,
    incast,
    join,
    leaf_spine,
    simulate,
    single_switch,
)

FRAME = 1048
SWITCH = SwitchConfig(headroom_bytes=37_500, ecn=EcnConfig(enabled=False))
NO_CONTROL = NicConfig(control="none")


def fan_in(senders, size=1_000_000, **options):
    settings = {"switch": SWITCH, "nic": NO_CONTROL} | options
    return simulate(
        Scenario(topology=single_switch(hosts=senders + 1), flows=incast(range(1, senders + 1), 0, size), **settings)
    )


@pytest.mark.parametrize(("senders", "peak_kb"), [(2, 1048), (4, 3144), (8, 7336), (16, 15_720)])
def test_incast_queues_without_a_pause(senders, peak_kb):
    result = fan_in(senders)
    assert abs(int(result.peak_bytes_PQ.max()) - peak_kb * 1000) <= FRAME
    assert result.pauses_PQ.sum() == 0


def test_incast_of_32_pauses_256_times_first_at_68_us():
    result = fan_in(32)
    assert result.pauses_PQ.sum() == 256
    first = result.first_pause_ps_PQ
    assert first[first >= 0].min() / 1e6 == pytest.approx(68.07, rel=0.01)
    assert result.drops_PQ.sum() == 0
    assert result.verdict == "completed"


@pytest.mark.parametrize("queues", [1, 2, 4, 8])
@pytest.mark.parametrize("alpha", [0.125, 1.0])
def test_equal_queues_settle_at_the_dynamic_threshold(queues, alpha):
    """n queues, each filled by one ingress port of its own, settle at alpha B' / (1 + n alpha) (Choudhury, Hahne)."""
    hosts = 2 * queues
    topology = single_switch(hosts=hosts, gbps=[10.0] * queues + [400.0] * queues, delay_ns=10)
    flows = Flows(src_F=np.arange(queues, hosts), dst_F=np.arange(queues), bytes_F=np.full(queues, 40_000_000))
    switch = replace(SWITCH, buffer_bytes=12_000_000, alpha=alpha, reserve_bytes=0, xon_offset_bytes=0)
    scenario = Scenario(
        topology=topology, flows=flows, switch=switch, nic=NO_CONTROL, run=RunConfig(end_us=8_000, sample_us=20)
    )
    result = simulate(scenario)
    pool = 12_000_000 - hosts * 37_500
    late = result.queue_bytes_TP[result.sample_ps_T > 4_000_000_000]
    egress = [2 * host + 1 for host in range(queues)]
    assert late[:, egress].mean() == pytest.approx(alpha * pool / (1 + queues * alpha), rel=0.01)


def test_lossless_never_drops_with_computed_headroom():
    switch = SwitchConfig(buffer_bytes=1_500_000, ecn=EcnConfig(enabled=False))
    scenario = Scenario(
        topology=leaf_spine(hosts=16, leaves=4, spines=2), flows=alltoall(16, 100_000), switch=switch, nic=NO_CONTROL
    )
    result = simulate(scenario)
    assert result.pauses_PQ.sum() > 0
    assert result.drops_PQ.sum() == 0
    assert result.verdict == "completed"


def test_too_little_headroom_drops_and_recovers():
    switch = SwitchConfig(buffer_bytes=1_500_000, headroom_bytes=2096, ecn=EcnConfig(enabled=False))
    scenario = Scenario(
        topology=leaf_spine(hosts=16, leaves=4, spines=2), flows=alltoall(16, 100_000), switch=switch, nic=NO_CONTROL
    )
    result = simulate(scenario)
    assert result.drops_PQ.sum() > 0
    assert result.retransmitted > 0
    assert result.verdict == "completed"


def test_pauses_spread_up_the_tree_and_hold_an_innocent_flow():
    """32 senders flood host 0; a flow from their leaf to an idle host suffers: the victim, and the pause tree."""
    topology = leaf_spine(hosts=32, leaves=2, spines=1, links_per_pair=16)
    victim = Flows(src_F=np.array([17]), dst_F=np.array([1]), bytes_F=np.array([100_000]))
    storm = incast([h for h in range(16, 32) if h != 17], 0, 1_000_000)
    switch = SwitchConfig(buffer_bytes=4_000_000, ecn=EcnConfig(enabled=False))
    together = Scenario(
        topology=topology, flows=join([victim, storm]), switch=switch, nic=NO_CONTROL, run=RunConfig(burst_bytes=1)
    )
    result = simulate(together)
    assert result.slowdown_F[0] > 1.5
    leaf_to_spine = [p for p in range(2 * 32, 2 * len(topology.links)) if result.paused_ps_PQ[p].sum() > 0]
    assert leaf_to_spine
    assert any(parents for parents in result.paused_by.values())


def test_pause_quanta_run_out_unless_refreshed():
    result = fan_in(32, switch=replace(SWITCH, pfc=PfcConfig(mode="quanta", quanta=200)))
    assert result.verdict == "completed"
    assert result.drops_PQ.sum() == 0
    assert result.pauses_PQ.sum() > 256  # refreshed


def test_two_lossless_classes_do_not_pause_each_other():
    classes = (TrafficClass(name="a"), TrafficClass(name="b"))
    busy = incast(range(1, 33), 0, 1_000_000)
    calm = Flows(src_F=np.array([1]), dst_F=np.array([33]), bytes_F=np.array([100_000]), class_F=np.array([1]))
    scenario = Scenario(
        topology=single_switch(hosts=34),
        flows=join([busy, calm]),
        classes=classes,
        switch=replace(SWITCH, buffer_bytes=16 << 20),
        nic=NO_CONTROL,
    )
    result = simulate(scenario)
    assert result.paused_ps_PQ[:, 1].sum() > 0
    assert result.paused_ps_PQ[:, 2].sum() == 0


@pytest.mark.parametrize(("weights", "share"), [((1, 1), 0.5), ((1, 3), 0.25)])
def test_weighted_classes_share_a_link_by_weight(weights, share):
    classes = tuple(TrafficClass(name=f"c{i}", weight=weight) for i, weight in enumerate(weights))
    flows = join([incast([1], 0, 20_000_000), incast([2], 0, 20_000_000, traffic_class=1)])
    scenario = Scenario(
        topology=single_switch(hosts=3), flows=flows, classes=classes, switch=SWITCH, nic=NO_CONTROL,
        run=RunConfig(end_us=1000),
    )  # fmt: skip
    sent = simulate(scenario).sent_bytes_PQ[1, 1:]
    assert sent[0] / sent.sum() == pytest.approx(share, rel=0.02)


def test_a_strict_class_goes_first():
    classes = (TrafficClass(name="bulk"), TrafficClass(name="urgent", strict=True))
    flows = join([incast([1], 0, 5_000_000), incast([2], 0, 1_000_000, traffic_class=1)])
    result = simulate(
        Scenario(topology=single_switch(hosts=3), flows=flows, classes=classes, switch=SWITCH, nic=NO_CONTROL)
    )
    assert result.slowdown_F[1] < 1.01
    assert result.slowdown_F[0] > 1.15


def test_a_lossy_class_is_dropped_at_its_threshold_and_recovers():
    classes = (TrafficClass(name="bulk", lossless=False),)
    switch = SwitchConfig(buffer_bytes=500_000, lossy_alpha=1.0, ecn=EcnConfig(enabled=False))
    result = fan_in(8, size=300_000, classes=classes, switch=switch)
    pool = 500_000 - 9 * 4096
    assert result.drops_PQ.sum() > 0
    assert result.pauses_PQ.sum() == 0
    assert int(result.peak_bytes_PQ.max()) <= pool
    assert result.verdict == "completed"


def test_selective_recovery_sends_again_what_was_dropped_and_go_back_n_more():
    classes = (TrafficClass(name="bulk", lossless=False),)
    switch = SwitchConfig(buffer_bytes=500_000, ecn=EcnConfig(enabled=False))
    back = fan_in(8, size=300_000, classes=classes, switch=switch)
    nic = NicConfig(control="none", out_of_order=True, recovery="selective")
    some = fan_in(8, size=300_000, classes=classes, switch=switch, nic=nic)
    assert some.verdict == back.verdict == "completed"
    assert some.retransmitted == some.drops_PQ.sum() > 0
    assert back.retransmitted > back.drops_PQ.sum() > 0
