import pytest

from bywash.errors import ConfigError
from bywash.fabric import Link, Node, Topology, fat_tree, from_graph, graph_file, leaf_spine, mesh, rail_optimised, ring
from bywash.fabric.routes import compute_routes


@pytest.mark.parametrize(
    ("topology", "hosts", "switches", "links"),
    [
        (leaf_spine(hosts=32, leaves=4, spines=8), 32, 12, 64),
        (leaf_spine(hosts=128, leaves=8, spines=2, links_per_pair=4), 128, 10, 192),
        (fat_tree(k=4), 16, 20, 48),
        (rail_optimised(servers=4, spines=2), 32, 10, 48),
        (ring(switches=5, hosts_per_switch=2), 10, 5, 15),
        (mesh(rows=2, columns=3), 6, 6, 13),
    ],
    ids=["leaf-spine", "two-spines", "fat-tree", "rail", "ring", "mesh"],
)
def test_sizes_of_the_usual_shapes(topology, hosts, switches, links):
    assert (topology.hosts, topology.switches, len(topology.links)) == (hosts, switches, links)


def test_oversubscription_is_stated():
    assert leaf_spine(hosts=32, leaves=4, spines=8).oversubscription() == 1.0
    two = leaf_spine(hosts=128, leaves=8, spines=2, links_per_pair=4)
    assert two.oversubscription() == 2.0
    assert "oversubscription 2.00:1" in two.describe()
    assert ring(switches=4).oversubscription() == 0.0


def test_failed_links_are_neither_used_nor_counted():
    topology = leaf_spine(hosts=8, leaves=2, spines=4, failed=["leaf0-spine1", "spine2-leaf1"])
    assert topology.oversubscription() == pytest.approx(4 / 3)
    routes = compute_routes(topology)
    leaf0, far_host = 8, 7
    spines = {topology.nodes[int(routes.peer_P[p])].name for p in routes.candidates(leaf0, far_host)}
    assert spines == {"spine0", "spine3"}


def test_parallel_links_are_named_and_used():
    topology = leaf_spine(hosts=4, leaves=2, spines=1, links_per_pair=3)
    routes = compute_routes(topology)
    names = [topology.port_name(p) for p in routes.candidates(4, 3)]
    assert names == ["leaf0->spine0", "leaf0->spine0#2", "leaf0->spine0#3"]


def test_every_route_leads_to_its_host():
    for topology in (fat_tree(k=4), rail_optimised(servers=3, spines=2), mesh(rows=3, columns=3), ring(switches=5)):
        for paths in ("shortest", "up-down"):
            routes = compute_routes(topology, paths)
            for src in range(topology.hosts):
                for dst in range(topology.hosts):
                    if src != dst:
                        walk(topology, routes, src, dst)


def walk(topology, routes, src, dst):
    """Follow every candidate; none may loop."""
    edge, steps = {int(routes.peer_P[routes.ports_H[src][0]])}, 0
    while edge:
        steps += 1
        assert steps <= len(topology.nodes)
        edge = {int(routes.peer_P[p]) for node in edge if node != dst for p in routes.candidates(node, dst)}
        edge.discard(dst)


def test_up_down_routes_never_climb_after_descending():
    topology = fat_tree(k=4)
    routes = compute_routes(topology, "up-down")
    tier = [node.tier for node in topology.nodes]
    for dst in range(topology.hosts):
        edge = [(int(routes.peer_P[routes.ports_H[src][0]]), False) for src in range(topology.hosts) if src != dst]
        while edge:
            node, down = edge.pop()
            for port in routes.candidates(node, dst) if node != dst else []:
                peer = int(routes.peer_P[port])
                assert not (down and tier[peer] > tier[node])
                edge.append((peer, down or tier[peer] < tier[node]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: leaf_spine(hosts=10, leaves=4, spines=2), r"topology.hosts = 10: must be a multiple of leaves = 4"),
        (lambda: leaf_spine(hosts=8, leaves=0, spines=2), r"topology.leaves = 0"),
        (lambda: leaf_spine(hosts=8, leaves=2, spines=2, gbps=[100.0] * 7), r"topology.gbps: 7 rates for 8 hosts"),
        (lambda: leaf_spine(hosts=8, leaves=2, spines=2, gbps=0), r"topology.links\[0\].gbps = 0"),
        (lambda: leaf_spine(hosts=8, leaves=2, spines=2, delay_ns=-1), r"topology.links\[0\].delay_ns = -1"),
        (lambda: leaf_spine(hosts=8, leaves=2, spines=1, failed=["leaf0-spine0"]), r"no live path from host0 to host4"),
        (
            lambda: leaf_spine(hosts=8, leaves=2, spines=1, failed=["leaf0-spine9"]),
            r"topology.failed\[0\] = 'leaf0-spine9'",
        ),
        (lambda: fat_tree(k=3), r"topology.k = 3"),
        (lambda: ring(switches=2), r"topology.switches = 2"),
        (lambda: Topology(name="x", nodes=(Node(name="a", kind="host", tier=0),), links=()), r"1 hosts"),
    ],
)
def test_bad_topologies_are_refused_with_the_field(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_two_hosts_may_not_be_joined_directly():
    nodes = tuple(Node(name=f"h{i}", kind="host", tier=0) for i in range(2))
    with pytest.raises(ConfigError, match="joins two hosts"):
        Topology(name="x", nodes=nodes, links=(Link(a=0, b=1, gbps=1, delay_ns=1),))


def test_a_dual_homed_host_uses_both_switches():
    nodes = {"h0": {}, "h1": {}, "tor0": {}, "tor1": {}}
    links = [(h, tor, {"gbps": 50}) for h in ("h0", "h1") for tor in ("tor0", "tor1")]
    topology = from_graph(nodes, links)
    assert topology.host_gbps(0) == 100
    routes = compute_routes(topology)
    assert len(routes.ports_H[0]) == 2
    assert routes.candidates(2, 1) == [routes.ports_H[1][0] ^ 1]


YAML = """
nodes: [h0, h1, {name: s0, kind: switch}]
links:
  - {a: h0, b: s0, gbps: 25, length_m: 10}
  - {a: h1, b: s0, count: 2}
"""
GRAPHML = """<?xml version="1.0"?><graphml xmlns="http://graphml.graphdrawing.org/xmlns">
<key id="g" for="edge" attr.name="gbps" attr.type="double"/>
<graph edgedefault="undirected"><node id="h0"/><node id="h1"/><node id="sw"/>
<edge source="h0" target="sw"><data key="g">40</data></edge><edge source="h1" target="sw"/></graph></graphml>"""
JSON = """{"nodes": [{"id": "h0"}, {"id": "h1"}, {"id": "sw"}],
"links": [{"source": "h0", "target": "sw"}, {"source": "h1", "target": "sw"}]}"""


@pytest.mark.parametrize(
    ("name", "text", "links"), [("n.yaml", YAML, 3), ("n.graphml", GRAPHML, 2), ("n.json", JSON, 2)]
)
def test_graph_files(tmp_path, name, text, links):
    (tmp_path / name).write_text(text)
    topology = graph_file(path=str(tmp_path / name))
    assert (topology.hosts, topology.switches, len(topology.links)) == (2, 1, links)
    if name == "n.yaml":
        assert (topology.links[0].gbps, topology.links[0].delay_ns) == (25, 50)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [", "no graph that can be read"),
        ("nodes: []\n", "0 hosts"),
        ("a: 1\n", "wants lists"),
        ("nodes: [h0, h1, s]\nlinks: [{a: h0, b: x}]\n", "there is no node 'x'"),
        ("nodes: [h0, h1, s]\nlinks: [{a: h0, b: s, gbps: fast}]\n", r"topology.links\[0\].gbps = 'fast'"),
    ],
)
def test_bad_graph_files(tmp_path, text, message):
    (tmp_path / "n.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        graph_file(path=str(tmp_path / "n.yaml"))
