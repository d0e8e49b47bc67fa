"""Cluster files from what operators have: each importer on a text as its tool writes it, and on broken ones."""

import json

import networkx as nx
import pytest
from typer.testing import CliRunner

from bywash.cli.main import app
from bywash.errors import BywashError, ConfigError
from bywash.planner.cluster import load_cluster, parse_cluster
from bywash.planner.importers import Defaults, from_networkx, from_sonic, from_topo_text, read_cluster

TOPO = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tNODE\tSYS\t0-47\t0
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tPXB\tSYS\t0-47\t0
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tSYS\tNODE\t48-95\t1
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tSYS\tNODE\t48-95\t1
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tNODE\tSYS
NIC1\tNODE\tPXB\tSYS\tSYS\tNODE\t X \tSYS
NIC2\tSYS\tSYS\tNODE\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""

NCCL = """\
<system version="1">
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:17:00.0" class="0x060400">
      <pci busid="0000:19:00.0" class="0x030200">
        <gpu dev="0" sm="90" rank="0" gdr="1"><nvlink target="0000:05:00.0" count="9" tclass="0x068000"/>
        <nvlink target="0000:06:00.0" count="9" tclass="0x068000"/></gpu>
      </pci>
      <pci busid="0000:18:00.0" class="0x020000">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1" guid="0x1" maxconn="131072" gdr="1"/></nic>
      </pci>
    </pci>
    <pci busid="0000:aa:00.0" class="0x030200">
      <gpu dev="1" sm="90" rank="1" gdr="1"><nvlink target="0000:05:00.0" count="18" tclass="0x068000"/></gpu>
    </pci>
    <nic><net name="eth0" dev="2" speed="10000" port="0" guid="0x2" maxconn="65536" gdr="0"/>
    <net name="mlx5_1" dev="1" speed="200000" port="1" guid="0x3" maxconn="131072" gdr="1"/></nic>
  </cpu>
</system>
"""


def switch(name, neighbours, speed="400000"):
    """config_db of a switch; neighbours as port -> (name, port, type)."""
    return json.dumps({
        "DEVICE_METADATA": {"localhost": {"hostname": name, "type": "LeafRouter"}},
        "DEVICE_NEIGHBOR": {port: {"name": one, "port": far} for port, (one, far, _) in neighbours.items()},
        "DEVICE_NEIGHBOR_METADATA": {one: {"type": kind} for one, _, kind in neighbours.values()},
        "PORT": {port: {"speed": speed} for port in neighbours},
    })  # fmt: skip


LEAF0 = switch("leaf0", {
    "Ethernet0": ("gpu-a", "mlx5_0", "Server"), "Ethernet8": ("gpu-a", "mlx5_1", "Server"),
    "Ethernet16": ("spine0", "Ethernet0", "SpineRouter"), "Ethernet24": ("spine0", "Ethernet8", "SpineRouter"),
})  # fmt: skip
LEAF1 = switch("leaf1", {
    "Ethernet0": ("gpu-b", "mlx5_0", "Server"), "Ethernet16": ("spine0", "Ethernet16", "SpineRouter")
})  # fmt: skip
SPINE0 = switch("spine0", {
    "Ethernet0": ("leaf0", "Ethernet16", "LeafRouter"), "Ethernet8": ("leaf0", "Ethernet24", "LeafRouter"),
    "Ethernet16": ("leaf1", "Ethernet16", "LeafRouter"),
})  # fmt: skip

MINIGRAPH = """\
<DeviceMiniGraph xmlns="Microsoft.Search.Autopilot.Evolution" xmlns:i="http://www.w3.org/2001/XMLSchema-instance">
  <PngDec>
    <DeviceInterfaceLinks>
      <DeviceLinkBase i:type="DeviceInterfaceLink"><Bandwidth>200000</Bandwidth><EndDevice>tor1</EndDevice>
        <EndPort>Ethernet0</EndPort><StartDevice>gpu-a</StartDevice><StartPort>eth0</StartPort></DeviceLinkBase>
      <DeviceLinkBase i:type="DeviceInterfaceLink"><Bandwidth>200000</Bandwidth><EndDevice>tor1</EndDevice>
        <EndPort>Ethernet4</EndPort><StartDevice>gpu-b</StartDevice><StartPort>eth0</StartPort></DeviceLinkBase>
    </DeviceInterfaceLinks>
    <Devices><Device i:type="Server"><Hostname>gpu-a</Hostname></Device></Devices>
  </PngDec>
  <Hostname>tor1</Hostname>
</DeviceMiniGraph>
"""


def test_nvidia_smi_gives_gpus_links_and_the_nics_beside_them():
    node = from_topo_text("a", TOPO, Defaults(gbps=200))
    assert node == {
        "name": "a", "device": "h100", "devices": 4, "peer_gbytes_per_s": 450.0, "nics": [{"gbps": 200, "count": 2}],
    }  # fmt: skip


def test_links_without_a_switch_add_up():
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tNV2\tNV1\nGPU1\tNV2\tX\tNV1\nGPU2\tNV1\tNV1\tX\n"
    assert from_topo_text("a", text, Defaults())["peer_gbytes_per_s"] == 50.0


def test_nccl_knows_generation_and_rates(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.xml").write_text(NCCL)
    data = read_cluster("nccl-xml", [tmp_path / "a.xml", tmp_path / "b.xml"], Defaults())
    assert data["nodes"][0] == {
        "name": "a", "device": "h100", "devices": 2, "peer_gbytes_per_s": 450.0,
        "nics": [{"gbps": 400.0, "count": 1}, {"gbps": 200.0, "count": 1}],
    }  # fmt: skip
    cluster = parse_cluster(data)
    assert cluster.topology.host_gbps(3) == 200.0


def test_sonic_names_hosts_and_counts_cables_once():
    data = from_sonic([("x", LEAF0), ("y", LEAF1), ("z", SPINE0)], Defaults(device="h200"))
    cluster = parse_cluster(data)
    assert [(host.name, host.switches) for host in cluster.hosts] == [("gpu-a", ("leaf0",) * 2), ("gpu-b", ("leaf1",))]
    assert {cable["a"] + cable["b"]: cable["count"] for cable in data["fabric"]["cables"]} == {
        "leaf0spine0": 2, "leaf1spine0": 1,
    }  # fmt: skip
    assert from_sonic([("x", LEAF0), ("y", LEAF1)], Defaults(device="h200")) == data  # leaves alone know as much


def test_a_minigraph_is_read_as_well():
    cluster = parse_cluster(from_sonic([("tor1", MINIGRAPH)], Defaults()))
    assert [(host.name, host.nic_gbps) for host in cluster.hosts] == [("gpu-a", (200.0,)), ("gpu-b", (200.0,))]


def test_a_networkx_graph_becomes_hosts_and_cables():
    graph = nx.MultiGraph()
    for host in range(4):
        graph.add_node(f"h{host}", kind="host", server=host // 2)
        graph.add_edge(f"h{host}", f"s{host // 2}", gbps=100)
    graph.add_edge("s0", "s1", gbps=400, length_m=30)
    graph.add_edge("s0", "s1", gbps=400, length_m=30)
    data = from_networkx(graph, Defaults(devices=4))
    cluster = parse_cluster(data)
    assert [host.nic_gbps for host in cluster.hosts] == [(100.0, 100.0)] * 2
    assert data["fabric"]["cables"] == [{"a": "s0", "b": "s1", "gbps": 400.0, "length_m": 30.0, "count": 2}]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("nvidia-smi", "hello", "is no output of `nvidia-smi topo -m`"),
        ("nvidia-smi", "\tGPU0\tGPU1\nGPU0\tX\n", "the row of GPU0 has fewer cells"),
        ("nccl-xml", "<system>", "is no XML"),
        ("nccl-xml", "<system/>", "there is no <gpu>"),
        ("nccl-xml", "<system><gpu sm='x'/></system>", "must be a whole number"),
        ("sonic", "{}", "names no neighbour"),
        ("sonic", "[1", "cannot be read as config_db.json"),
        ("sonic", '{"DEVICE_NEIGHBOR": {"Ethernet0": {}}}', "cannot be read as config_db.json"),
        ("sonic", "<a", "is no XML"),
        ("sonic", MINIGRAPH.replace("200000", "fast", 1), "<Bandwidth>fast</Bandwidth>: must be a number"),
        ("sonic", switch("a", {"Ethernet0": ("b", "x", "SpineRouter")}), "no switch has a neighbour that is a host"),
        ("graph", "nodes: 3", "wants lists"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, kind, text, message):
    file = tmp_path / "one.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_cluster(kind, [file], Defaults())
    assert message in str(refused.value)


def test_the_command_writes_a_file_that_loads(tmp_path):
    (tmp_path / "a.txt").write_text(TOPO)
    (tmp_path / "b.txt").write_text(TOPO)
    args = [
        "plan",
        "import-cluster",
        "nvidia-smi",
        tmp_path / "a.txt",
        tmp_path / "b.txt",
        "--out",
        tmp_path / "c.yaml",
    ]
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    assert "4 x 400G" in done.output or "2 x 400G" in done.output
    assert len(load_cluster(tmp_path / "c.yaml").hosts) == 2
    wrong = CliRunner().invoke(app, ["plan", "import-cluster", "lldp", "x", "--out", str(tmp_path / "d.yaml")])
    assert isinstance(wrong.exception, BywashError)
