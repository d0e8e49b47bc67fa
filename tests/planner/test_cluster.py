"""Cluster files: what they say, how they are shown back, and what a wrong one is told."""

from pathlib import Path

import pytest
import yaml

from bywash.errors import ConfigError
from bywash.fabric.builders import graph_file
from bywash.planner.cluster import load_cluster, parse_cluster, topology_yaml
from bywash.planner.cluster_file import ClusterFile
from bywash.planner.cluster_text import cluster_text
from bywash.planner.schema import SCHEMAS, json_schema
from bywash.planner.settings import values_data
from tests.planner.samples import FABRIC, cluster_of

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_example_is_sixteen_hosts_of_three_generations():
    cluster = load_cluster(EXAMPLES / "private-16x8-mixed.yaml")
    assert (len(cluster.hosts), cluster.gpus, cluster.topology.hosts) == (16, 128, 128)
    assert cluster.generations() == ("h200", "h100", "a100")
    assert cluster.topology.oversubscription() == 1.0
    assert cluster.hosts[15].switches == ("leaf7",) * 8
    assert cluster.hosts[1].port_of(3) == 11


def test_a_host_alone_needs_no_network():
    cluster = load_cluster(EXAMPLES / "laptop.yaml")
    assert cluster.topology is None
    assert cluster.hosts[0].device.is_cpu
    assert "4" in cluster_text(cluster)


def test_devices_share_nics_evenly():
    cluster = parse_cluster({
        "nodes": [{"name": "a", "count": 2, "device": "h100", "devices": 8, "nics": [{"gbps": 400, "count": 4}]}],
        "fabric": {"kind": "one-switch"},
    })  # fmt: skip
    assert [cluster.hosts[1].port_of(gpu) for gpu in range(8)] == [4, 4, 5, 5, 6, 6, 7, 7]
    assert [host.name for host in cluster.hosts] == ["a-0", "a-1"]


def test_rails_join_ports_of_one_number():
    cluster = cluster_of(("a", "h100", 4, 400), ("b", "h100", 4, 400), fabric=FABRIC | {"kind": "rail-optimised"})
    assert cluster.hosts[0].switches == cluster.hosts[1].switches == ("rail0", "rail1", "rail2", "rail3")


def test_tables_show_every_cable_and_both_rates():
    text = cluster_text(cluster_of(("a", "h100", 2, 400), ("b", "a100", 2, 200)))
    assert "1 x 400G" in text
    assert "2 x 200G" in text
    assert "0.50:1" in text  # b's leaf: 400 Gb/s down, 800 up
    rows = [line.split() for line in text.splitlines() if line.startswith(("h100 800G", "a100 400G"))]
    assert rows == [["h100", "800G", "800", "400"], ["a100", "400G", "400", "400"]]
    assert [line.split()[1:4] for line in text.splitlines() if "data sheet" in line] == [
        ["989", "1979", "3350"],
        ["312", "-", "2039"],
    ]


def test_one_cable_may_differ_or_fail():
    nodes = (("a", "h100", 2, 400), ("b", "h100", 2, 400))
    plain = cluster_of(*nodes).topology
    changed = cluster_of(
        *nodes,
        fabric=FABRIC | {"links": [{"link": "leaf0-spine1", "gbps": 100}, {"link": "leaf1-spine0", "failed": True}]},
    ).topology
    rates = [(link.gbps, link.failed) for link in changed.links]
    differing = [i for i, (a, b) in enumerate(zip(plain.links, changed.links)) if a != b]
    assert [rates[i] for i in differing] == [(100, False), (400, True)]


def test_the_network_reads_back_as_it_was(tmp_path):
    topology = cluster_of(("a", "h100", 2, 400), ("b", "a100", 2, 200)).topology
    (tmp_path / "topology.yaml").write_text(topology_yaml(topology))
    back = graph_file(path=str(tmp_path / "topology.yaml"))
    assert back.nodes == topology.nodes
    assert back.links == topology.links


TWO = {"name": "b", "device": "h100", "nics": [{"gbps": 400, "count": 8}]}
NODE = {"name": "a", "device": "h100", "nics": [{"gbps": 400, "count": 8}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nodes": [NODE, NODE | {"name": "b", "nics": [{"gbps": -1}]}]}, "cluster.nodes[1].nics[0].gbps = -1"),
        ({"nodes": [NODE | {"gpus": 3}]}, "cluster.nodes[0].gpus: there is no such field"),
        ({"nodes": [{"name": "a"}]}, "cluster.nodes[0].device: must be given"),
        ({"nodes": [NODE | {"device": "tpu"}]}, "cluster.nodes[0].device = 'tpu': must be one of a100, h100"),
        ({"nodes": [NODE, NODE]}, "cluster.nodes[1].name = 'a': there is a host a already"),
        ({"nodes": [NODE, NODE | {"name": "b"}]}, "cluster.fabric: must be given for 2 hosts"),
        ({"nodes": [NODE | {"devices": 2}]}, "cluster.nodes[0].nics: 8 NIC ports for 2 devices"),
        ({"nodes": [{"name": "a", "device": "h100"}, TWO], "fabric": FABRIC}, "cluster.nodes[0].nics: must be given"),
        ({"nodes": [NODE, TWO], "fabric": FABRIC | {"leaf_asic": "x"}}, "cluster.fabric.leaf_asic"),
        ({"nodes": [NODE, TWO], "fabric": {"kind": "cables"}}, "cluster.nodes[0].nics[0].switch: must be given"),
        ({"nodes": [NODE], "fabric": FABRIC | {"cables": [{"a": "x", "b": "y", "gbps": 1}]}}, "fabric: cables are"),
        ({"nodes": [NODE, NODE | {"name": "b"}], "fabric": FABRIC | {"links": [{"link": "x-y"}]}}, "no such cable"),
        ({"nodes": []}, "cluster.nodes"),
        ({"nodes": [NODE], "devices": {"mine": {"like": "h1"}}}, "cluster.devices.mine.like = 'h1'"),
        ({"nodes": [NODE], "devices": {"h200": {"like": "h200"}}}, "cluster.devices.h200: is a known generation"),
        ({"nodes": [NODE], "devices": {"xeon": {"like": "cpu"}}}, "cluster.devices.xeon: is like cpu"),
    ],
)  # fmt: skip
def test_errors_name_the_field(data, message):
    with pytest.raises(ConfigError) as refused:
        parse_cluster(data)
    assert message in str(refused.value)


def test_own_generations_are_like_known_ones():
    cluster = parse_cluster({
        "devices": {"h100-64": {"like": "h100", "memory_gb": 64}},
        "nodes": [{"name": "a", "device": "h100-64", "devices": 2}],
    })  # fmt: skip
    assert cluster.hosts[0].device.memory_gb == 64
    assert cluster.hosts[0].device.bf16_tflops == 989


def test_a_cluster_without_a_name_is_called_like_its_file(tmp_path):
    file = tmp_path / "my cluster (1).yaml"
    file.write_text("nodes: [{name: a, device: h100}]")
    assert load_cluster(file).name == "my-cluster-1"
    file.write_text("nodes: [{name: 2026-13-01, device: h100}]")
    with pytest.raises(ConfigError, match="is no YAML"):
        load_cluster(file)


def test_asics_of_switches_go_by_patterns_that_match_no_other():
    nics = [{"gbps": 400, "switch": "s0"}, {"gbps": 400, "switch": "s1"}]
    nodes = [{"name": name, "device": "h100", "nics": nics} for name in "ab"]
    cables = [{"a": one, "b": "spine0", "gbps": 400} for one in ("s0", "s1")]
    cluster = parse_cluster({"nodes": nodes, "fabric": {"kind": "cables", "cables": cables}})
    rules = [(one["match"], one["asic"]) for one in values_data(cluster)["switches"]]
    assert rules == [("s0", "sn4700"), ("s1", "sn4700"), ("spine*", "sn5600")]


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_list_every_field(name):
    assert set(json_schema(name)["properties"]) == set(SCHEMAS[name].model_fields)


def test_examples_are_of_the_schema():
    for path in ("private-16x8-mixed.yaml", "laptop.yaml"):
        ClusterFile.model_validate(yaml.safe_load((EXAMPLES / path).read_text()))
