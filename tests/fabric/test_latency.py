"""Times that can be computed by hand, exact to the picosecond."""

import numpy as np
import pytest

from bywash.fabric import (
    Flows,
    FrameConfig,
    NicConfig,
    RunConfig,
    Scenario,
    SwitchConfig,
    fat_tree,
    incast,
    leaf_spine,
    simulate,
    single_switch,
)

NO_CONTROL = NicConfig(control="none")


def one_flow(topology, src, dst, size, **options):
    flows = Flows(src_F=np.array([src]), dst_F=np.array([dst]), bytes_F=np.array([size]))
    return simulate(Scenario(topology=topology, flows=flows, nic=NO_CONTROL, **options))


def test_one_kilobyte_over_two_links_takes_4177_92_ns():
    result = one_flow(single_switch(hosts=2), 1, 0, 1000)
    assert result.done_ps_F.tolist() == [4_177_920]  # 2 x (83.84 + 1000) there, 2 x (5.12 + 1000) back
    assert result.arrived_ps_F.tolist() == [2_167_680]
    assert result.packet_hops == 4


def test_one_kilobyte_over_four_links_takes_8355_84_ns():
    result = one_flow(leaf_spine(hosts=4, leaves=2, spines=1), 0, 3, 1000)
    assert result.done_ps_F.tolist() == [8_355_840]


def test_six_links_of_a_fat_tree():
    result = one_flow(fat_tree(k=4), 0, 15, 1000)
    assert result.done_ps_F.tolist() == [6 * 1_083_840 + 6 * 1_005_120]


@pytest.mark.parametrize("packets", [1, 2, 17])
@pytest.mark.parametrize("gbps", [25, 100, 400])
def test_a_pipeline_of_packets_ends_after_the_last_one(packets, gbps):
    result = one_flow(single_switch(hosts=2, gbps=gbps, delay_ns=250), 1, 0, packets * 1000 - 1)
    per_byte = 8000 // gbps
    frame, last, ack = 1048 * per_byte, 1047 * per_byte, 64 * per_byte
    there = 2 * 250_000 + (
        packets * frame + last if packets > 1 else 2 * last
    )  # a shorter last one waits at the switch
    assert result.arrived_ps_F.tolist() == [there]
    assert result.done_ps_F.tolist() == [there + 2 * ack + 2 * 250_000]
    assert result.base_ps_F.tolist() == result.done_ps_F.tolist()
    assert result.summary()["slowdown"]["max"] == 1.0


def test_the_slowest_link_sets_the_pace():
    topology = single_switch(hosts=2, gbps=[25.0, 100.0])
    result = one_flow(topology, 1, 0, 100_000)
    assert result.arrived_ps_F.tolist() == [1_083_840 + 100 * 1048 * 320 + 1_000_000]


def test_times_of_whole_nanoseconds():
    result = one_flow(single_switch(hosts=2), 1, 0, 1000, frame=FrameConfig(ack_bytes=60, whole_ns=True))
    assert result.done_ps_F.tolist() == [2 * (83_000 + 1_000_000) + 2 * (4_000 + 1_000_000)]


def test_switch_latency_is_added_at_each_switch():
    plain = one_flow(leaf_spine(hosts=4, leaves=2, spines=1), 0, 3, 1000)
    slower = one_flow(leaf_spine(hosts=4, leaves=2, spines=1), 0, 3, 1000, switch=SwitchConfig(latency_ns=300))
    assert slower.done_ps_F[0] - plain.done_ps_F[0] == 6 * 300_000


def test_mean_waiting_is_that_of_an_m_d_1_queue():
    """Poisson messages of one packet leave a NIC one after another: waiting rho / (2 (1 - rho)) services."""
    rho, count, service_ps = 0.6, 200_000, 83_840
    rng = np.random.default_rng(5)
    start = np.cumsum(rng.exponential(service_ps / rho, count)).astype(np.int64)
    flows = Flows(
        src_F=np.ones(count, np.int64),
        dst_F=np.zeros(count, np.int64),
        bytes_F=np.full(count, 1000),
        start_ps_F=start,
        qp_F=np.arange(count) % 64,
    )
    result = simulate(Scenario(topology=single_switch(hosts=2), flows=flows, nic=NO_CONTROL))
    waiting = (result.done_ps_F - result.start_ps_F - result.base_ps_F).mean() / service_ps
    assert waiting == pytest.approx(rho / (2 * (1 - rho)), rel=0.02)


def test_the_end_of_a_run_is_a_verdict_and_not_a_hang():
    flows = incast([1, 2], 0, 10_000_000)
    result = simulate(Scenario(topology=single_switch(hosts=3), flows=flows, run=RunConfig(end_us=100)))
    assert result.verdict == "time limit"
    assert result.end_ps <= 100_000_000
    assert np.isnan(result.fct_us_F).all()
