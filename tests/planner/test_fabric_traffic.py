"""Flows in files, and `bywash fabric traffic`: what it writes is what the planner made, and a simulation runs it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bywash.cli.fabric import app
from bywash.errors import BywashError, ConfigError
from bywash.fabric import Flows, alltoall, simulate
from bywash.fabric.files import load_scenario
from bywash.fabric.flow_file import load_flows, save_flows
from bywash.planner import Compute, Wire, exposed_us, round_trip_us

SMALL = "rail-optimised:servers=4,nics_per_server=2,spines=1,gbps=100,delay_ns=100"
FIELDS = (
    "src_F",
    "dst_F",
    "bytes_F",
    "start_ps_F",
    "class_F",
    "qp_F",
    "phase_F",
    "after_F",
    "rate_gbps_F",
    "background_F",
)


def run(*args):
    done = CliRunner().invoke(app, ["traffic", *map(str, args)])
    if isinstance(done.exception, BywashError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("plain", [True, False])
def test_flows_come_back_bit_for_bit(tmp_path, plain):
    flows = alltoall(5, 1000, schedule="rotated", phase=1, gap_us=2.5)
    if not plain:
        rng = np.random.default_rng(1)
        flows = Flows(
            src_F=np.arange(7),
            dst_F=np.arange(7) + 1,
            bytes_F=rng.integers(1, 1 << 40, 7),
            start_ps_F=rng.integers(0, 99, 7),
            rate_gbps_F=rng.random(7) * 100,
            background_F=rng.random(7) < 0.5,
            class_F=np.arange(7),
            qp_F=np.arange(7),
        )
    save_flows(flows, tmp_path / "flows.csv")
    back = load_flows(tmp_path / "flows.csv", gaps_us=(flows.gap_ps_P / 1e6).tolist())
    for field in (*FIELDS, "gap_ps_P"):
        np.testing.assert_array_equal(getattr(back, field), getattr(flows, field), err_msg=field)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("src,dst\n0,1\n", "line 1 must name"),
        ("src,dst,bytes,colour\n0,1,2,3\n", "line 1 must name"),
        ("src,dst,bytes\n0,1\n", "2 columns under 3 names"),
        ("src,dst,bytes\n0,1,2.5\n", "column bytes must hold whole numbers"),
        ("src,dst,bytes\n0,1,nan\n", "column bytes must hold whole numbers"),
        ("src,dst,bytes\n0,x,1\n", "is no CSV of flows"),
        ("src,dst,bytes\n0,0,1\n", "is the source itself"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "flows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_flows(path)
    with pytest.raises(ConfigError, match="is no CSV of flows"):
        load_flows(tmp_path / "absent.csv")


@pytest.mark.parametrize("schedule", ["at-once", "rotated", "staggered", "paced", "by-counts", "receiver-granted"])
def test_a_trace_becomes_a_scenario(tmp_path, schedule):
    out = tmp_path / "step.yaml"
    text = run("--trace", "prose", "--out", out, "--topology", SMALL, "--tokens", 3, "--hidden", 64, "--layers", "0,5",
               "--schedule", schedule, "--experts-us", 2)  # fmt: skip
    assert "3 tokens per rank drawn from" in text
    scenario = load_scenario(out)
    assert (scenario.topology.hosts, scenario.flows.phases) == (8, 4)
    assert scenario.flows.gap_ps_P.tolist() == [0, 2_000_000] * 2
    assert scenario.nic.control == ("receiver" if schedule == "receiver-granted" else "dcqcn")
    server_H = np.arange(8) // 2
    bytes_HH = scenario.flows.bytes_HH(8)
    assert bytes_HH.any()
    assert not bytes_HH[server_H[:, None] == server_H].any()


def test_counts_become_a_scenario(tmp_path):
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps([[0] * 16, list(range(1, 17)), [5] * 16]))
    out = tmp_path / "step.yaml"
    router = ("--topk", 4, "--groups", 4, "--top-groups", 2)
    method = ("--placement", "balanced", "--rows", "per-node", "--path", "hierarchical")
    text = run("--trace", counts, "--out", out, "--topology", SMALL, "--tokens", 4, *router, *method)
    assert "top-4, from 2 of 4 groups, drawn to match counts.json" in text
    scenario = load_scenario(out)
    assert scenario.flows.barrier == "server"
    assert (scenario.flows.src_F % 2 == scenario.flows.dst_F % 2).all()  # one rail


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--out": "step.json"}, "must end in .yaml"),
        ({"--tokens": 0}, "--tokens 0"),
        ({"--layers": "1,99"}, "--layers 99"),
        ({"--layers": "2,1"}, "must rise"),
        ({"--phase": "both"}, "--phase 'both'"),
        ({"--placement": "random"}, "--placement 'random'"),
        ({"--rows": "per-token"}, "rows = 'per-token'"),
        ({"--topology": "rail-optimised:servers=4,spines=1,colour=1"}, "topology.colour"),
        ({"--trace": "absent.npz"}, "absent.npz"),
        ({"--profile": "mine"}, "profile = 'mine'"),
    ],
)
def test_a_mistake_names_its_option(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    options = {"--trace": "prose", "--out": "step.yaml", "--topology": SMALL, "--tokens": 2} | changes
    with pytest.raises(BywashError, match=message):
        run(*(part for pair in options.items() for part in pair))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["at-once", "rotated", "paced"])
def test_a_simulated_layer_takes_no_less_than_its_bound(tmp_path, schedule):
    """Slow: compiles the simulator. With one layer the bounds of dispatch and combine add up to one of the run."""
    out = tmp_path / "step.yaml"
    run("--trace", "prose", "--out", out, "--topology", SMALL, "--tokens", 20, "--layers", "3", "--experts-us", 5,
        "--schedule", schedule)  # fmt: skip
    scenario = load_scenario(out)
    result = simulate(scenario)
    assert result.verdict == "completed"
    wire = Wire(topology=scenario.topology, frame=scenario.frame, rtt_us=round_trip_us(scenario.topology, 0.0))
    bound_us = 0.0
    for phase in range(2):
        bytes_HH = np.zeros((8, 8), np.int64)
        here = scenario.flows.phase_F == phase
        np.add.at(bytes_HH, (scenario.flows.src_F[here], scenario.flows.dst_F[here]), scenario.flows.bytes_F[here])
        bound_us += wire.bound_us(bytes_HH)
    exposed = exposed_us(result, 1, Compute(experts_us=5.0))
    assert exposed == pytest.approx(result.summary()["completion_us"] - 5.0, abs=1e-3)
    assert bound_us <= exposed < 1.4 * bound_us
