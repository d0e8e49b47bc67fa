"""`Routes`: for each switch and destination, the ports that lie on a best path.

Shapes: N nodes, P ports, H hosts, G destination groups. Hosts that hang on one switch by one cable share that switch's
group; a host with several cables is a group of its own. Candidates are sorted by (neighbour, port), so that a hash
picks the same one everywhere. Pure; knows nothing of queues or packets. The engine's tables and the deadlock proof
are made from it.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.fabric.topology import Topology

Paths = Literal["shortest", "up-down", "clockwise"]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Next hops.

    Attributes:
        owner_P, peer_P: int64 [P], the node that sends on a port, and the one that receives.
        leaf_H: int64 [H], the switch of a host with one cable, else -1.
        down_H: int64 [H], the port from that switch to the host, else -1.
        ports_H: the live ports of each host, as tuples.
        group_H: int64 [H], destination group of each host.
        first_NG, count_NG: int64 [N, G], slice of `ports` with the candidates of a switch; count 0 at a group's own
            switch (there `down_H` says the way) and for hosts.
        ports: int64, all candidate lists end to end.
        hops_NG: int64 [N, G], links from a switch to the group's switch (or host), -1 when it cannot be reached.
    """

    owner_P: IntArray
    peer_P: IntArray
    leaf_H: IntArray
    down_H: IntArray
    ports_H: tuple[tuple[int, ...], ...]
    group_H: IntArray
    first_NG: IntArray
    count_NG: IntArray
    ports: IntArray
    hops_NG: IntArray

    def candidates(self, node: int, host: int) -> list[int]:
        """The ports that a switch may use towards a host."""
        group = self.group_H[host]
        if node == self.leaf_H[host]:
            return [int(self.down_H[host])]
        first = int(self.first_NG[node, group])
        return [int(port) for port in self.ports[first : first + int(self.count_NG[node, group])]]


def compute_routes(topology: Topology, paths: Paths = "shortest") -> Routes:
    """All next hops of a topology. Raises `ConfigError` when a kind of path does not exist in it."""
    owner_P, peer_P = port_ends(topology)
    out = neighbours(topology, owner_P, peer_P)
    hosts, nodes = topology.hosts, len(topology.nodes)
    ports_H = tuple(tuple(sorted(port for _, port in out[h])) for h in range(hosts))
    single = [len(ports) == 1 for ports in ports_H]
    leaf_H = np.array([int(peer_P[ports_H[h][0]]) if single[h] else -1 for h in range(hosts)], np.int64)
    down_H = np.array([ports_H[h][0] ^ 1 if single[h] else -1 for h in range(hosts)], np.int64)
    targets: dict[int, int] = {}  # destination node -> group
    group_H = np.zeros(hosts, np.int64)
    for h in range(hosts):
        target = int(leaf_H[h]) if single[h] else h
        group_H[h] = targets.setdefault(target, len(targets))
    first_NG = np.zeros((nodes, len(targets)), np.int64)
    count_NG = np.zeros((nodes, len(targets)), np.int64)
    hops_NG = np.full((nodes, len(targets)), -1, np.int64)
    lists: list[int] = []
    rank = ranks(topology, out)
    for target, group in targets.items():
        next_hops, hops = _next_hops(topology, out, target, paths, rank)
        hops_NG[:, group] = hops
        for node in range(hosts, nodes):
            first_NG[node, group] = len(lists)
            count_NG[node, group] = len(next_hops[node])
            lists += next_hops[node]
    return Routes(
        owner_P=owner_P,
        peer_P=peer_P,
        leaf_H=leaf_H,
        down_H=down_H,
        ports_H=ports_H,
        group_H=group_H,
        first_NG=first_NG,
        count_NG=count_NG,
        ports=np.array(lists or [0], np.int64),
        hops_NG=hops_NG,
    )


def port_ends(topology: Topology) -> tuple[IntArray, IntArray]:
    """Owner and peer of each port: port 2i sends from `a` to `b` of link i, port 2i + 1 back."""
    ends = np.array([(link.a, link.b) for link in topology.links], np.int64).reshape(-1, 2)
    return ends.reshape(-1), ends[:, ::-1].reshape(-1).copy()


Neighbours = list[list[tuple[int, int]]]
"""Per node its live (neighbour, port), sorted."""


def neighbours(topology: Topology, owner_P: IntArray, peer_P: IntArray) -> Neighbours:
    """Who is next to whom over live links."""
    out: Neighbours = [[] for _ in topology.nodes]
    for port, (owner, peer) in enumerate(zip(owner_P.tolist(), peer_P.tolist())):
        if not topology.links[port // 2].failed:
            out[owner].append((peer, port))
    for edges in out:
        edges.sort()
    return out


def _next_hops(
    topology: Topology, out: Neighbours, target: int, paths: Paths, rank: list[tuple[int, int, int]]
) -> tuple[list[list[int]], list[int]]:
    hosts, nodes = topology.hosts, len(topology.nodes)
    if paths == "clockwise":
        return _clockwise(topology, out, target)
    if paths == "shortest":
        hops = _distances(out, target, hosts, lambda a, b: True)
        chosen = [
            [port for peer, port in out[node] if hops[node] > 0 and hops[peer] == hops[node] - 1]
            if node >= hosts
            else []
            for node in range(nodes)
        ]
        return chosen, hops
    return _up_down(topology, out, target, rank)


def _up_down(
    topology: Topology, out: Neighbours, target: int, rank: list[tuple[int, int, int]]
) -> tuple[list[list[int]], list[int]]:
    """Once a packet has gone down it never goes up: who has a way down takes it, the others climb."""
    hosts, nodes = topology.hosts, len(topology.nodes)

    def above(a: int, b: int) -> bool:
        return b < hosts or (a >= hosts and rank[a] < rank[b])

    down = _distances(out, target, hosts, above)
    hops = list(down)
    chosen: list[list[int]] = [[] for _ in range(nodes)]
    for node in sorted(range(hosts, nodes), key=lambda n: rank[n]):
        if down[node] == 0:
            continue
        if down[node] > 0:
            chosen[node] = [port for peer, port in out[node] if above(node, peer) and down[peer] == down[node] - 1]
            continue
        ways = [
            (hops[peer], port) for peer, port in out[node] if peer >= hosts and above(peer, node) and hops[peer] >= 0
        ]
        if not ways:
            continue  # such as a spine that lost its link to the target: nobody is sent there
        best = min(way[0] for way in ways)
        hops[node] = best + 1
        chosen[node] = [port for distance, port in ways if distance == best]
    for node in range(hosts, nodes):
        if hops[node] < 0 and any(peer < hosts for peer, _ in out[node]):
            names = topology.nodes[node].name, topology.nodes[target].name
            raise ConfigError(f"routing.paths = up-down: {names[0]} has no up-down path to {names[1]}")
    return chosen, hops


def _clockwise(topology: Topology, out: Neighbours, target: int) -> tuple[list[list[int]], list[int]]:
    """Switch i sends to switch i + 1, whatever the destination: the ring on which PFC deadlocks."""
    hosts, nodes = topology.hosts, len(topology.nodes)
    chosen: list[list[int]] = [[] for _ in range(nodes)]
    hops = [-1] * nodes
    size = nodes - hosts
    for node in range(hosts, nodes):
        following = hosts + (node - hosts + 1) % size
        ahead = [port for peer, port in out[node] if peer == following]
        direct = [port for peer, port in out[node] if peer == target]
        if not ahead:
            raise ConfigError(f"routing.paths = clockwise: {topology.nodes[node].name} has no link to the next switch")
        if node == target:
            hops[node] = 0
        elif target < hosts and direct:
            chosen[node], hops[node] = direct, 1
        else:
            chosen[node] = ahead
            hops[node] = (target - node) % size if target >= hosts else size
    return chosen, hops


def _distances(out: Neighbours, target: int, hosts: int, may: Callable[[int, int], bool]) -> list[int]:
    """Links from each node to the target along edges that `may(from, to)` allows; hosts do not forward."""
    hops = [-1] * len(out)
    hops[target] = 0
    edge = deque([target])
    while edge:
        node = edge.popleft()
        for peer, _ in out[node]:  # links are two-way: peer -> node exists too
            if hops[peer] < 0 and peer >= hosts and may(peer, node):
                hops[peer] = hops[node] + 1
                edge.append(peer)
    return hops


def ranks(topology: Topology, out: Neighbours) -> list[tuple[int, int, int]]:
    """Order of switches from the top: by tier, then distance from the first switch, then number."""
    hosts = topology.hosts
    level = [math.inf] * len(out)
    level[hosts] = 0
    edge = deque([hosts])
    while edge:
        node = edge.popleft()
        for peer, _ in out[node]:
            if peer >= hosts and level[peer] == math.inf:
                level[peer] = level[node] + 1
                edge.append(peer)
    far = len(out)
    return [(-n.tier, int(level[i]) if level[i] < math.inf else far, i) for i, n in enumerate(topology.nodes)]
