import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from bywash.cli.fabric import app
from bywash.errors import ConfigError
from bywash.fabric import Flows, Scenario, alltoall, from_matrix, join, poisson, simulate, single_switch
from bywash.fabric.files import load_scenario, parse_scenario, parse_short
from bywash.fabric.layout import LAST_PS
from bywash.fabric.traffic import LEAST_GBPS

GOOD = {
    "profile": "rocev2",
    "topology": {"kind": "leaf-spine", "hosts": 8, "leaves": 2, "spines": 2, "gbps": 400, "length_m": 20},
    "traffic": [{"kind": "alltoall", "bytes": 20_000, "schedule": "rotated", "active": 2}],
    "classes": [{"name": "roce"}, {"name": "bulk", "lossless": False}],
    "routing": {"mode": "adaptive"},
    "nic": {"out_of_order": True, "dcqcn": {"ai_mbps": 100}},
}


def changed(path, value):
    data = json.loads(json.dumps(GOOD))
    place = data
    *parents, last = path.split(".")
    for part in parents:
        place = place[int(part)] if part.isdigit() else place[part]
    place[last] = value
    return data


def test_a_file_becomes_a_scenario(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    scenario = load_scenario(path)
    assert scenario.name == "study"
    assert scenario.topology.links[0].delay_ns == 100
    assert scenario.nic.dcqcn.ai_mbps == 100.0
    assert scenario.nic.dcqcn.timer_us == 55.0
    assert scenario.frame.payload_bytes == 4096
    assert scenario.flows.count == 56
    assert simulate(scenario).verdict == "completed"


def test_an_exchange_in_a_file_is_paced_by_its_counts(tmp_path):
    (tmp_path / "m.csv").write_text("0,5,1\n3,0,3\n9,5,0\n")
    section = {"kind": "matrix", "path": "m.csv", "pace_by_counts": 2}
    data = {"topology": {"kind": "single-switch", "hosts": 3, "gbps": 100}, "traffic": [section]}
    flows = parse_scenario(data, tmp_path).flows
    into_H = np.bincount(flows.dst_F, flows.rate_gbps_F)
    assert into_H.tolist() == pytest.approx([200.0] * 3)
    assert flows.rate_gbps_F[(flows.src_F == 2) & (flows.dst_F == 0)] == pytest.approx(150.0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("profile", "ns4", r"profile = 'ns4'"),
        ("topology.kind", "torus", r"topology.kind = 'torus'"),
        ("topology.hots", 8, r"topology.hots: there is no such field"),
        ("topology.k", 8, r"topology.k: kind leaf-spine has no such field"),
        ("topology.delay_ns", 8, r"topology.length_m: give it or delay_ns"),
        ("topology.hosts", "many", r"topology.hosts = 'many'"),
        ("topology.nics", [{"hosts": "6-9", "gbps": 200}], r"topology.nics\[0\].hosts = '6-9'"),
        ("traffic.0.bytes", 0, r"nothing to send"),
        ("traffic.0.class", "urgent", r"traffic\[0\].class = 'urgent': classes are roce, bulk"),
        ("traffic.0.schedule", "random", r"traffic\[0\].schedule = 'random'"),
        ("traffic.0.pace_by_counts", 1.0, r"traffic\[0\].pace_by_counts: the traffic has a schedule of its own"),
        ("traffic.0.pace_by_counts", -1, r"traffic\[0\].pace_by_counts = -1"),
        ("traffic.0.pace_by_counts", float("inf"), r"traffic\[0\].pace_by_counts = inf"),
        ("traffic.0.bytes", 10**20, r"traffic\[0\].bytes = 100000000000000000000"),
        ("traffic.0.rate_gbps", 1e-10, r"traffic\[0\].rate_gbps_F\[0\] = 1e-10: must be 0 for none, or from 0.001"),
        ("traffic.0.rate_gbps", float("inf"), r"traffic\[0\].rate_gbps_F\[0\] = inf"),
        ("traffic.0.start_us", float("inf"), r"traffic\[0\].start_us = inf"),
        ("traffic.0.gap_us", float("nan"), r"traffic\[0\].gap_us = nan"),
        ("traffic.0.step_us", 1e30, r"traffic\[0\].step_us = 1e\+30"),
        ("traffic.0.phase", 10**11, r"traffic\[0\].phase = 100000000000"),
        ("traffic.0.phase", -1, r"traffic\[0\].phase = -1"),
        ("traffic", [{"kind": "permutation", "bytes": 1, "seed": -1}], r"traffic\[0\].seed = -1"),
        ("traffic", [{"kind": "poisson", "bytes": 0, "load": 0.1, "end_us": 9}], r"traffic\[0\].bytes = 0"),
        (
            "traffic",
            [{"kind": "incast", "bytes": 1, "receiver": 0, "senders": "0-99999999999"}],
            r"traffic\[0\].senders = '0-99999999999': hosts are 0 to 7",
        ),
        (
            "traffic",
            [{"kind": "incast", "bytes": 1, "receiver": 0, "pace_by_counts": 1}],
            r"traffic\[0\].pace_by_counts: is for kinds alltoall and matrix; kind incast has no counts",
        ),
        *(
            (
                "traffic",
                [{"kind": "flows", "flows": [{"src": 0, "dst": 1, "bytes": 5} | wrong]}],
                r"traffic\[0\].flows\[0\]",
            )
            for wrong in ({"src": float("nan")}, {"bytes": 1.5}, {"start_us": 1e30}, {"phase": 1e9})
        ),
        ("topology", {"kind": "fat-tree", "k": 100_000}, r"topology: fat-tree of 750,000,000,000,000 links"),
        ("topology", {"kind": "mesh", "rows": 10**5, "columns": 10**5}, r"topology: mesh of 30,000,000,000 links"),
        ("traffic", [], r"traffic"),
        ("traffic", [{"kind": "incast", "bytes": 1}], r"traffic\[0\].receiver: must be given"),
        ("traffic", [{"kind": "incast", "bytes": 1, "receiver": 8}], r"traffic"),
        ("nic.dcqcn.ai_mbps", "fast", r"nic.dcqcn.ai_mbps = 'fast': must be a number"),
        ("nic.dcqcn.ai", 1, r"nic.dcqcn.ai: there is no such field"),
        ("nic.out_of_order", False, r"routing.mode = adaptive: reorders packets"),
        ("nic.dcqcn", 5, r"nic.dcqcn = 5: must hold fields"),
        ("routing.mode", "magic", r"routing.mode = 'magic': must be one of"),
        ("switch", {"ecn": {"kmin_bytes": 9, "kmax_bytes": 8}}, r"switch.ecn.kmin_bytes = 9"),
        ("switch", {"buffer_bytes": 10_000}, r"switch.buffer_bytes = 10,000"),
        ("switch", {"alpha": float("nan")}, r"switch.alpha = nan"),
        ("run", {"seed": 1.5}, r"run.seed = 1.5: must be a whole number"),
        ("classes", [{"weight": 0}], r"classes\[0\].weight = 0"),
    ],
)
def test_what_is_wrong_is_named(path, value, message):
    with pytest.raises(ConfigError, match=message):
        parse_scenario(changed(path, value))


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is no YAML"), ("- 1\n", "must hold fields"), (None, "cannot read it")]
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_scenario(path)


def test_short_forms():
    assert parse_short("leaf-spine:hosts=32,gbps=100.5,failed=leaf0-spine1/leaf1-spine0", "--topology") == {
        "kind": "leaf-spine",
        "hosts": 32,
        "gbps": 100.5,
        "failed": ["leaf0-spine1", "leaf1-spine0"],
    }
    with pytest.raises(ConfigError, match="'hosts' has no value"):
        parse_short("leaf-spine:hosts", "--topology")


def test_nics_of_several_generations():
    data = changed("topology.nics", [{"hosts": "0-3", "gbps": 200}])
    scenario = parse_scenario(data)
    assert [scenario.topology.host_gbps(h) for h in range(8)] == [200.0] * 4 + [400.0] * 4
    assert scenario.topology.links[-1].gbps == 400.0


def test_flows_and_matrix_from_files(tmp_path):
    (tmp_path / "m.csv").write_text("\n".join(",".join("0" if r == c else "3000" for c in range(8)) for r in range(8)))
    listed = {
        "kind": "flows",
        "flows": [{"src": 0, "dst": 1, "bytes": 5, "start_us": 1}, {"src": 0, "dst": 2, "bytes": 5, "after": 0}],
    }
    data = changed("traffic", [listed, {"kind": "matrix", "path": "m.csv"}])
    scenario = parse_scenario(data, tmp_path)
    assert scenario.flows.count == 2 + 56
    assert scenario.flows.after_F[:3].tolist() == [-1, 0, -1]
    result = simulate(scenario)
    assert result.start_ps_F[0] == 1_000_000
    assert result.start_ps_F[1] == result.done_ps_F[0]


@pytest.mark.parametrize(
    "topology",
    [
        {"kind": "leaf-spine", "hosts": 12, "leaves": 3, "spines": 2, "links_per_pair": 2},
        {"kind": "fat-tree", "k": 4},
        {"kind": "rail-optimised", "servers": 3, "nics_per_server": 4, "spines": 2, "links_per_pair": 2},
        {"kind": "ring", "switches": 4, "hosts_per_switch": 2},
        {"kind": "mesh", "rows": 3, "columns": 2, "hosts_per_switch": 3},
        {"kind": "single-switch", "hosts": 5},
    ],
    ids=lambda one: one["kind"],
)
def test_a_topology_too_large_is_known_before_it_is_built(topology, monkeypatch):
    links = len(parse_scenario(changed("topology", topology)).topology.links)
    bound = links + (5 if topology["kind"] == "mesh" else 0)  # those at two of its sides are counted, and not there
    monkeypatch.setattr("bywash.fabric.file_topology.MOST_LINKS", bound - 1)
    with pytest.raises(ConfigError, match=f"topology: {topology['kind']} of {bound} links; at most {bound - 1}"):
        parse_scenario(changed("topology", topology))


# ---- traffic


def test_a_pace_that_outlasts_simulated_time_is_its_end_not_a_stall():
    flows = from_matrix([[0, 9000, 0], [0, 0, 0], [0, 0, 0]], rate_gbps=LEAST_GBPS)
    late = replace(flows, start_ps_F=flows.start_ps_F + LAST_PS - 10_000_000)  # a second packet would be 8 ms later
    result = simulate(Scenario(topology=single_switch(hosts=3), flows=late))
    assert result.verdict == "time limit"


def test_rotated_keeps_as_many_flows_under_way_as_asked():
    flows = alltoall(5, 1000, schedule="rotated", active=2)
    assert flows.dst_F[:4].tolist() == [1, 2, 3, 4]
    assert flows.after_F[:4].tolist() == [-1, -1, 0, 1]


def test_staggered_starts():
    flows = alltoall(4, 1000, schedule="staggered", step_us=2.5)
    assert flows.start_ps_F[:3].tolist() == [0, 2_500_000, 5_000_000]


def test_bytes_are_split_over_queue_pairs_without_loss():
    matrix = np.array([[0, 10, 0], [7, 0, 1], [3, 3, 0]])
    flows = from_matrix(matrix, qps_per_pair=4)
    assert flows.bytes_HH(3).tolist() == matrix.tolist()
    assert flows.qp_F.max() == 3


def test_phases_wait_for_their_hosts():
    """The second phase of a host begins its gap after all the host sent and was due has arrived."""
    scenario = parse_scenario(changed("traffic", [
        {"kind": "alltoall", "bytes": 10_000}, {"kind": "alltoall", "bytes": 5_000, "phase": 1, "gap_us": 7},
    ]))  # fmt: skip
    result = simulate(scenario)
    flows = scenario.flows
    for host in range(8):
        first = flows.phase_F == 0
        sent, due = first & (flows.src_F == host), first & (flows.dst_F == host)
        ready = max(result.done_ps_F[sent].max(), result.arrived_ps_F[due].max())
        starts = result.start_ps_F[(flows.phase_F == 1) & (flows.src_F == host)]
        assert (starts == ready + 7_000_000).all()


def test_background_load_is_neither_waited_for_nor_counted():
    load = poisson(8, load=0.3, gbps=400, bytes_per_flow=100_000, end_us=5_000, seed=3)
    scenario = parse_scenario(GOOD)
    both = join([scenario.flows, load])
    from dataclasses import replace

    result = simulate(replace(scenario, flows=both))
    assert result.verdict == "completed"
    assert result.summary()["flows"] == 56
    assert result.end_ps < 5_000_000_000
    assert result.summary()["fct_us"]["mean"] > simulate(scenario).summary()["fct_us"]["mean"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dst_F": [0, 1]}, r"traffic.dst_F\[0\] = 0: is the source itself"),
        ({"bytes_F": [1, 0]}, r"traffic.bytes_F\[1\] = 0"),
        ({"bytes_F": [1]}, r"traffic.bytes_F: 1 entries for 2 flows"),
        ({"after_F": [-1, 1]}, r"traffic.after_F\[1\] = 1: must be an earlier flow"),
        ({"src_F": [0, 1], "after_F": [-1, 0]}, r"traffic.after_F\[1\] = 0: that flow has another src_F"),
        ({"start_ps_F": [-5, 0]}, r"traffic.start_ps_F\[0\] = -5"),
    ],
)
def test_bad_flows(changes, message):
    good = {"src_F": [0, 0], "dst_F": [1, 2], "bytes_F": [1, 1]}
    with pytest.raises(ConfigError, match=message):
        Flows(**{name: np.array(value) for name, value in (good | changes).items()})


# ---- command line


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_simulate_from_flags_as_json():
    topology = "leaf-spine:hosts=8,leaves=2,spines=2,gbps=100,delay_ns=1000"
    done = run(
        "simulate", "--topology", topology, "--traffic", "alltoall:bytes=10000", "--profile", "ns3-hpcc", "--json", "-"
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["verdict"] == "completed"
    assert set(data["fct_us"]) == {"mean", "p50", "p99", "max"}
    assert data["deadlock"] is False
    for name in ("completion_us", "pause_us", "drops", "ecn_marks"):
        assert name in data


def test_simulate_a_file_with_changes(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    done = run("simulate", str(path), "--set", "nic.control=window", "--set", "nic.window_bytes=65536", "--seed", "3")
    assert done.exit_code == 0, done.output
    assert "completed" in done.stdout
    wrong = run("simulate", str(path), "--set", "nic.kontrol=window")
    assert isinstance(wrong.exception, ConfigError)
    assert "nic.kontrol: there is no such field" in str(wrong.exception)


def test_a_deadlock_is_printed_and_ends_with_code_3(tmp_path):
    ring = {
        "topology": {"kind": "ring", "switches": 4, "gbps": 40},
        "traffic": [
            {"kind": "flows", "flows": [{"src": s, "dst": d, "bytes": 20_000_000} for s, d in ((0, 3), (2, 1), (1, 2))]}
        ],
        "switch": {"buffer_bytes": 1 << 20, "ecn": {"enabled": False}},
        "nic": {"control": "none"},
        "routing": {"paths": "clockwise"},
    }
    path = tmp_path / "ring.yaml"
    path.write_text(yaml.safe_dump(ring))
    done = run("simulate", str(path))
    assert done.exit_code == 3
    assert "sw0->sw1/roce waits for sw1->sw2/roce" in " ".join(done.stdout.split())


def test_bench_prints_and_writes_its_rows(tmp_path):
    path = tmp_path / "bench.json"
    done = run("bench", "--workloads", "inc32", "--rounds", "1", "--json", str(path))
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["workload"], row["features"]) for row in rows] == [("inc32", "lean"), ("inc32", "full")]
    assert rows[0]["packet_hops"] == rows[1]["packet_hops"] == 392_000
    assert rows[0]["packet_hops_per_s"] == pytest.approx(392_000 / rows[0]["seconds"], rel=0.01)


def test_bench_refuses_unknown_workloads():
    assert "--workloads 'inc33'" in str(run("bench", "--workloads", "inc33").exception)
