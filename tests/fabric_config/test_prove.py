import networkx as nx
import numpy as np
import pytest

from bywash.errors import ConfigError
from bywash.fabric.builders import fat_tree, from_graph, leaf_spine, mesh, rail_optimised, ring
from bywash.fabric.prove import POLICIES, cures, naive, one_class, prove, prove_paths, tagged_classes
from bywash.fabric.prove.graph import switch_graph
from bywash.fabric.prove.prover import HEALTHY, Classes, Routes, _failures
from bywash.fabric.routes import compute_routes


def small_fabric(graph):
    """A host on every node of a networkx graph."""
    nodes = {f"h{i}": {} for i in graph} | {f"s{i}": {"tier": 1} for i in graph}
    links = [(f"h{i}", f"s{i}", {}) for i in graph] + [(f"s{a}", f"s{b}", {}) for a, b in graph.edges]
    return from_graph(nodes, links)


def edges_of(routes):
    """Dependencies as `naive` has them."""
    graph = routes.graph
    return {
        ((int(link), int(p)), (int(graph.out_S[graph.head_L[link], o]), int(q)))
        for link, p, o, q in zip(*np.nonzero(routes.edges))
    }


def compare_with_brute_force(graph):
    """Every policy, with and without bounce priorities, healthy and under every single failure."""
    topology = small_fabric(graph)
    arrays = switch_graph(topology)
    compared = cycles = 0
    for policy in POLICIES:
        for classes in (one_class(topology.switches), tagged_classes(topology.switches, (3, 4))):
            routes = Routes(arrays, policy, classes)
            assert edges_of(routes) == naive.dependencies(arrays, policy, classes)
            for failure in (HEALTHY, *_failures(arrays, "single")):
                verdict = routes.healthy() if failure is HEALTHY else routes.under(failure)
                wanted = naive.has_cycle(naive.dependencies(arrays, policy, classes, failure))
                assert verdict.deadlock_free != wanted, (graph.edges, policy, failure)
                compared, cycles = compared + 1, cycles + wanted
    return compared, cycles


def connected(nodes):
    return [graph for graph in nx.graph_atlas_g() if graph.number_of_nodes() == nodes and nx.is_connected(graph)]


def test_exact_on_every_graph_of_up_to_five_switches():
    totals = np.array([compare_with_brute_force(graph) for nodes in (2, 3, 4, 5) for graph in connected(nodes)]).sum(
        axis=0
    )
    assert totals[0] > 1500
    assert totals[1] > 80


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_exact_on_every_graph_of_six_switches(part):
    for graph in connected(6)[part::4]:
        compare_with_brute_force(graph)


def test_ring_of_the_literature():
    """Hu et al., HotNets 2016: shortest paths on a ring of four close the circle of buffers."""
    proof = prove(ring(switches=4))
    assert not proof.verdicts[0].deadlock_free
    waits = proof.verdicts[0].cycle.waits
    assert [wait.port for wait in waits] == ["sw0->sw1", "sw1->sw2", "sw2->sw3", "sw3->sw0"]
    assert all(verdict.deadlock_free for verdict in proof.verdicts[1:])  # a broken ring is a chain


def test_a_named_flow_really_takes_the_two_buffers():
    for wait in prove(ring(switches=6)).verdicts[0].cycle.waits:
        a, b = wait.port.split("->")
        position = wait.path.index(a)
        assert wait.path[position + 1] == b == wait.switch
        assert position + 2 < len(wait.path)


def test_hotnets_flows_as_paths():
    topology = ring(switches=4)
    first = ["host0", "sw0", "sw1", "sw2", "sw3", "host3"]
    second = ["host2", "sw2", "sw3", "sw0", "sw1", "host1"]
    assert prove_paths(topology, [first]) is None
    cycle = prove_paths(topology, [first, second])
    assert {wait.flow for wait in cycle.waits} == {("host0", "host3"), ("host2", "host1")}


@pytest.mark.parametrize(
    "topology",
    [
        leaf_spine(hosts=16, leaves=4, spines=2, links_per_pair=2),
        fat_tree(k=4),
        rail_optimised(servers=4, nics_per_server=4, spines=2),
    ],
    ids=["leaf-spine", "fat-tree", "rails"],
)
@pytest.mark.parametrize("policy", ["shortest", "up-down"])
def test_clos_fabrics_are_free_under_every_single_failure(topology, policy):
    proof = prove(topology, policy)
    switch_links = sum(link.a >= topology.hosts and link.b >= topology.hosts for link in topology.links)
    assert len(proof.verdicts) == 1 + switch_links + topology.switches
    assert proof.deadlock_free


def test_bounced_leaf_spine_is_a_hazard_and_both_cures_open_it():
    """Two failed links and local detours: packets bounce off leaves, as behind a dual ToR (Tagger, CoNEXT 2017)."""
    topology = leaf_spine(hosts=8, leaves=4, spines=2, failed=["leaf0-spine0"])
    proof = prove(topology, "detour", failures="links")
    hazards = {verdict.failure.name for verdict in proof.hazards}
    assert proof.verdicts[0].deadlock_free
    assert "leaf1-spine1" in hazards
    up_down, bounce = cures(topology, "detour", failures="links")
    assert up_down.proof.deadlock_free
    assert bounce.proof.deadlock_free
    assert bounce.proof.classes.priorities == (3, 4)  # one bounce needs two priorities


def test_k_bounces_need_k_plus_one_priorities():
    """Round a mesh, shortest paths turn from down to up more than once; fewer priorities make packets lossy."""
    topology = mesh(rows=3, columns=3)
    lossy = []
    for count in (1, 2, 3):
        classes = tagged_classes(topology.switches, (3, 4, 5)[:count])
        proof = prove(topology, "shortest", classes=classes, failures="none")
        assert proof.deadlock_free
        lossy.append(proof.verdicts[0].lossy_turns)
    assert lossy[0] > lossy[1] >= lossy[2]
    assert lossy[2] == 0


def test_a_switch_that_treats_the_class_as_lossy_breaks_the_cycle():
    topology = ring(switches=4)
    plain = one_class(4)
    priority_SC = plain.priority_SC.copy()
    priority_SC[2, 0] = -1
    classes = Classes(
        names=plain.names,
        priority_SC=priority_SC,
        priorities=plain.priorities,
        first_C=plain.first_C,
        bounced_C=plain.bounced_C,
    )
    assert prove(topology, classes=classes, failures="none").deadlock_free


def test_only_the_given_pairs_count():
    topology = ring(switches=4)
    assert prove(topology, pairs=((0, 1), (1, 2)), failures="none").deadlock_free
    circle = tuple((i, (i + 2) % 4) for i in range(4))
    assert not prove(topology, pairs=circle, failures="none").deadlock_free


@pytest.mark.parametrize("policy", ["shortest", "up-down"])
@pytest.mark.parametrize(
    "topology",
    [
        leaf_spine(hosts=8, leaves=4, spines=3, links_per_pair=2),
        fat_tree(k=4),
        mesh(rows=3, columns=4),
        ring(switches=5, failed=["sw1-sw2"]),
    ],
    ids=["leaf-spine", "fat-tree", "mesh", "broken ring"],
)
def test_next_hops_are_those_of_the_simulator(topology, policy):
    theirs = compute_routes(topology, policy)
    graph = switch_graph(topology)
    mine = Routes(graph, policy, one_class(topology.switches))
    for d, hosts in enumerate(graph.hosts_D):
        for s in range(topology.switches):
            if not graph.attached_DS[d, s]:
                ports = {int(graph.port_L[link]) for link in np.flatnonzero(mine.hop_DL[d] & (graph.tail_L == s))}
                assert ports == set(theirs.candidates(topology.hosts + s, hosts[0]))


def test_unreachable_pairs_are_counted():
    proof = prove(leaf_spine(hosts=4, leaves=2, spines=1), failures="links")
    assert [verdict.unreachable for verdict in proof.verdicts] == [0, 2, 2]


def test_what_names_no_host_is_refused():
    with pytest.raises(ConfigError, match="hosts 0 to 3"):
        prove(ring(switches=4), pairs=((0, 9),))
    with pytest.raises(ConfigError, match="no live link"):
        prove_paths(ring(switches=4), [["host0", "sw2"]])
    for path in ([""], ["host0"], ["sw0", "sw1", "sw2"], ["host0", "sw0"]):
        with pytest.raises(ConfigError, match=r"path.0. = .*: must go from a host over switches to a host"):
            prove_paths(ring(switches=4), [path])
    with pytest.raises(ConfigError, match="policy"):
        prove(ring(switches=4), "magic")


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "free"), [("shortest", True), ("up-down", True), ("detour", False)])
def test_a_fat_tree_of_1024_hosts_under_every_single_failure(policy, free):
    proof = prove(fat_tree(k=16), policy)
    assert len(proof.verdicts) == 1 + 2048 + 320
    assert proof.deadlock_free == free
    assert all(verdict.failure.kind == "switch" for verdict in proof.hazards)
