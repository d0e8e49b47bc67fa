"""What senders may keep to: chains, caps, and shares of the receiver's link."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.fabric import EcnConfig, Flows, NicConfig, Scenario, SwitchConfig, from_matrix, leaf_spine, simulate
from bywash.fabric.sending import by_counts, in_turn, with_sending

LINES = [10.0, 25.0, 25.0, 40.0, 100.0]


@st.composite
def traffic(draw):
    """Flows of a few hosts in a few phases, some of them background, in any order."""
    count, rng = draw(st.integers(1, 40)), np.random.default_rng(draw(st.integers(0, 1000)))
    src = rng.integers(0, 5, count)
    background = rng.random(count) < 0.2
    background[0] = False
    return Flows(
        src_F=src,
        dst_F=(src + rng.integers(1, 5, count)) % 5,
        bytes_F=rng.integers(1, 10_000, count),
        phase_F=rng.integers(0, 3, count),
        background_F=background,
    )


def naive_after(flows, active):
    """One flow at a time, with a list of what each (source, phase) has sent."""
    sent, after = {}, []
    for flow in range(flows.count):
        line = sent.setdefault((flows.src_F[flow], flows.phase_F[flow]), [])
        after.append(-1)
        if not flows.background_F[flow]:
            after[flow] = line[-active] if len(line) >= active else -1
            line.append(flow)
    return after


@settings(deadline=None)
@given(flows=traffic(), active=st.integers(1, 6))
def test_a_schedule_chains_the_flows_of_a_source_and_phase(flows, active):
    assert in_turn(flows, active).after_F.tolist() == naive_after(flows, active)


@settings(deadline=None)
@given(flows=traffic())
def test_no_schedule_and_no_pace_change_nothing(flows):
    assert with_sending(flows, LINES) is flows


def naive_shares(flows, factor):
    """One message at a time, with what everybody sends to its receiver in its phase."""
    caps = []
    for flow in range(flows.count):
        if flows.background_F[flow]:
            caps.append(0.0)
            continue
        due = sum(
            int(flows.bytes_F[other])
            for other in range(flows.count)
            if not flows.background_F[other]
            and (flows.dst_F[other], flows.phase_F[other]) == (flows.dst_F[flow], flows.phase_F[flow])
        )
        caps.append(factor * LINES[flows.dst_F[flow]] * int(flows.bytes_F[flow]) / due)
    return caps


@settings(deadline=None)
@given(flows=traffic(), factor=st.sampled_from([0.5, 1.0, 1.25]))
def test_by_counts_every_receiver_is_offered_its_line(flows, factor):
    paced = by_counts(flows, LINES, factor)
    assert paced.rate_gbps_F.tolist() == pytest.approx(naive_shares(flows, factor))
    front_F = ~flows.background_F
    for host in range(5):
        for phase in range(flows.phases):
            here_F = front_F & (flows.dst_F == host) & (flows.phase_F == phase)
            if here_F.any():
                assert paced.rate_gbps_F[here_F].sum() == pytest.approx(factor * LINES[host])
                ends_F = flows.bytes_F[here_F] / paced.rate_gbps_F[here_F]
                assert ends_F.max() == pytest.approx(ends_F.min())


def test_the_slowest_cap_holds():
    matrix = np.full((3, 3), 1000)
    flows = replace(from_matrix(matrix), rate_gbps_F=np.array([5.0, 0.0, 5.0, 0.0, 5.0, 0.0]))
    assert set(with_sending(flows, [30.0] * 3, pace_gbps=20.0).rate_gbps_F.tolist()) == {5.0, 20.0}
    assert set(with_sending(flows, [30.0] * 3, pace_by_counts=1.0).rate_gbps_F.tolist()) == {5.0, 15.0}
    both = with_sending(flows, [30.0] * 3, pace_gbps=12.0, pace_by_counts=1.0)
    assert set(both.rate_gbps_F.tolist()) == {5.0, 12.0}


@pytest.mark.parametrize("wanted", [{"active": 2}, {"pace_by_counts": 1.0}])
def test_a_second_schedule_is_refused(wanted):
    flows = in_turn(from_matrix(np.full((5, 5), 1000)), 2)
    with pytest.raises(ConfigError, match="has a schedule of its own"):
        with_sending(flows, LINES, **wanted)


@pytest.mark.parametrize("qps", [1, 3])
@pytest.mark.parametrize("slow", [1.0, 0.5])
def test_by_counts_skew_pauses_nobody_and_takes_no_longer_than_it_must(qps, slow):
    """One of eight receivers is due eight times the mean, perhaps on a slower link; buffers are small, no ECN acts."""
    gbps = [100.0 * slow, *[100.0] * 7]
    topology = leaf_spine(hosts=8, leaves=2, spines=2, links_per_pair=2, gbps=gbps, uplink_gbps=100.0)
    matrix = np.full((8, 8), 200_000)
    matrix[:, 0] *= 8
    made = {}
    for name, factor in (("at once", 0.0), ("by counts", 1.0)):
        flows = with_sending(from_matrix(matrix, qps_per_pair=qps), topology.gbps_H, pace_by_counts=factor)
        made[name] = simulate(
            Scenario(
                topology=topology,
                flows=flows,
                switch=SwitchConfig(buffer_bytes=2 << 20, alpha=1.0, ecn=EcnConfig(enabled=False)),
                nic=NicConfig(control="none"),
            )
        )
    assert made["at once"].pauses_PQ.sum() > 0
    paced = made["by counts"]
    assert paced.pauses_PQ.sum() == 0
    assert paced.peak_bytes_PQ.max() < made["at once"].peak_bytes_PQ.max() / 4
    bound_us = 7 * 8 * 200_000 * 1.048 * 8 / (gbps[0] * 1e3)
    assert bound_us < paced.done_ps_F.max() / 1e6 < 1.1 * bound_us
