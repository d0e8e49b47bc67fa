"""Laws that hold in every run: bytes are conserved, nothing is negative, lossless is lossless, it always ends."""

import numpy as np
import pytest

from bywash.fabric import layout as L
from bywash.fabric import run as running
from bywash.fabric.run import simulate
from tests.fabric.scenarios import random_scenario


def check(seed, monkeypatch, **options):
    scenario = random_scenario(seed, **options)
    states = []
    build = running.build
    monkeypatch.setattr(running, "build", lambda *a, **k: states.append(build(*a, **k)) or states[-1])
    result = simulate(scenario)
    arrays = states[-1].arrays
    po, sw, fl, sim = arrays["po"], arrays["sw"], arrays["fl"], arrays["sim"]
    po4 = arrays["po4"]
    qu = arrays["qu"].reshape(po.shape[0], -1, L.QU_COLUMNS)
    qu4 = qu.view(np.int32)
    assert result.verdict in ("completed", "stalled", "deadlock", "partial deadlock", "time limit")
    for rows, column in ((qu4, L.EGRESS), (qu4, L.INGRESS), (qu4, L.HEADROOM), (qu, L.TX_BYTES), (qu, L.PAUSED_TOTAL)):
        assert rows[:, :, column].min() >= 0
    assert (qu4[:, :, L.HEADROOM] <= qu4[:, :, L.HEADROOM_CAP]).all()
    hosts = states[-1].hosts
    assert (sw[hosts:, L.SHARED_USED] >= 0).all()
    assert (sw[hosts:, L.SHARED_USED] <= sw[hosts:, L.SHARED_CAP]).all()
    switch_ports = po4[:, L.OWNER] >= hosts
    for node in range(hosts, sw.shape[0]):  # what came in and was kept is what waits to go out
        mine = po4[:, L.OWNER] == node
        assert qu4[mine, 2:, L.EGRESS].sum() == (qu4[mine, 2:, L.INGRESS] + qu4[mine, 2:, L.HEADROOM]).sum()
    sent = qu[~switch_ports, 2:, L.TX_BYTES].sum()
    into_hosts = qu[switch_ports & (po4[:, L.PEER] < hosts), 2:, L.TX_BYTES].sum()
    dropped = sim[L.S_DROPPED_BYTES]
    waiting = qu4[switch_ports, 2:, L.EGRESS].sum()
    assert 0 <= sent - into_hosts - dropped - waiting <= in_pipes(arrays, po4)
    headroom_is_right = scenario.switch.headroom_bytes is None and scenario.switch.pfc.enabled
    headroom_is_right &= not scenario.frame.whole_ns  # truncated times make links faster than their rate
    if headroom_is_right and not result.scaled_watchdog and scenario.switch.pfc.mode == "on-off":
        lossless = [1 + c for c, one in enumerate(scenario.classes) if one.lossless]
        assert result.drops_PQ[:, lossless].sum() == 0
    done = fl[:, L.F_DONE] >= 0
    assert (fl[done, L.F_ARRIVED] > fl[done, L.F_START]).all()
    assert (fl[done, L.F_DONE] >= fl[done, L.F_ARRIVED]).all()  # equal when an ACK takes 0 whole ns
    if result.verdict == "completed":
        assert done[~scenario.flows.background_F].all()
    if result.drops_PQ.sum() == 0 and result.verdict != "time limit":
        assert result.verdict in ("completed", "deadlock", "partial deadlock")
    return result


def in_pipes(arrays, po4):
    """Data bytes on links into switches, and on links into hosts counted as sent already: an upper bound."""
    pk, total = arrays["pk"], 0
    for port in range(po4.shape[0]):
        packet = int(po4[port, L.PIPE_HEAD])
        while packet >= 0:
            if int(pk[packet, L.META]) >> L.TYPE_SHIFT & 7 == L.DATA:
                total += int(pk[packet, L.META]) & 0xFFFF
            packet = int(pk[packet, L.NEXT])
    return total


@pytest.mark.parametrize("seed", range(40_000, 40_050))
def test_laws(seed, monkeypatch):
    check(seed, monkeypatch, lean=seed % 3 == 0, packets=3000)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_laws_of_a_thousand(block, monkeypatch):
    for seed in range(50_000 + 50 * block, 50_050 + 50 * block):
        with monkeypatch.context() as patch:
            check(seed, patch, lean=seed % 3 == 0, packets=3000)


def test_fuzz_reaches_what_it_is_for():
    """Over the default seeds there are pauses, drops, marks, timeouts, early packets and every routing mode."""
    results = [simulate(random_scenario(seed, lean=seed % 3 == 0, packets=3000)) for seed in range(40_000, 40_050)]
    summaries = [result.summary() for result in results]
    for name in ("pauses", "drops", "ecn_marks", "cnps", "timeouts", "ooo_packets", "retransmitted"):
        assert sum(summary[name] > 0 for summary in summaries) >= 2, name
    assert {result.scenario.routing.mode for result in results} == {"ecmp", "flowlet", "adaptive", "spray"}
    assert np.mean([result.verdict == "completed" for result in results]) > 0.6
