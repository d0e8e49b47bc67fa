"""The compiled engine against its plain-Python twin: completions, pauses, marks, drops, peaks, to the picosecond."""

import numpy as np
import pytest

from bywash.fabric import simulate
from bywash.fabric.naive import run_naive
from tests.fabric.scenarios import random_scenario

VERDICTS = {
    "completed": ("completed",),
    "empty": ("deadlock", "stalled"),
    "time limit": ("time limit", "partial deadlock"),
}


def compare(seed, *, lean):
    scenario = random_scenario(seed, lean=lean, packets=400 if seed % 2 else 2000)
    result = simulate(scenario, full=not lean)
    twin = run_naive(scenario)
    assert result.verdict in VERDICTS[twin.verdict]
    assert result.end_ps == twin.now
    for name, column in (("start", "start_ps_F"), ("arrived", "arrived_ps_F"), ("done", "done_ps_F")):
        assert [getattr(flow, name) for flow in twin.flows] == getattr(result, column).tolist(), name
    assert result.packet_hops == twin.hops
    for name in ("cnps", "retransmitted", "timeouts"):
        assert getattr(result, name) == getattr(twin, name), name
    assert (result.ooo_packets, result.ooo_distance) == (twin.early, twin.early_max)
    for name, column in (
        ("peak", "peak_bytes_PQ"),
        ("marks", "marks_PQ"),
        ("drops", "drops_PQ"),
        ("pauses", "pauses_PQ"),
    ):
        wanted = [[getattr(queue, name) for queue in port.queues[2:]] for port in twin.ports]
        assert getattr(result, column)[:, 1:].tolist() == wanted, name
    held = [[q.paused_total + q.paused * (twin.now - q.paused_since) for q in p.queues[2:]] for p in twin.ports]
    assert result.paused_ps_PQ[:, 1:].tolist() == held
    assert result.sample_ps_T.tolist() == [time for time, _ in twin.samples]
    assert result.queue_bytes_TP.tolist() == [loads for _, loads in twin.samples]


@pytest.mark.parametrize("block", range(5))
def test_lean_kernel_equals_the_twin(block):
    for seed in range(8 * block, 8 * block + 8):
        compare(seed, lean=True)


@pytest.mark.parametrize("block", range(8))
def test_full_kernel_equals_the_twin(block):
    for seed in range(10_000 + 8 * block, 10_000 + 8 * block + 8):
        compare(seed, lean=False)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_scenarios_equal_the_twin(block):
    for seed in range(20_000 + 50 * block, 20_050 + 50 * block):
        compare(seed, lean=block % 2 == 0)


@pytest.mark.parametrize("seed", range(30_000, 30_010))
def test_both_kernels_agree(seed):
    scenario = random_scenario(seed, lean=True)
    lean, full = simulate(scenario, full=False), simulate(scenario, full=True)
    assert lean.done_ps_F.tolist() == full.done_ps_F.tolist()
    assert (lean.packet_hops, lean.end_ps, lean.verdict) == (full.packet_hops, full.end_ps, full.verdict)


def test_the_same_seed_gives_the_same_run_whatever_the_chunks():
    scenario = random_scenario(10_003)
    first, second = simulate(scenario), simulate(scenario, chunk=97)
    assert np.array_equal(first.done_ps_F, second.done_ps_F)
    assert first.events == second.events
