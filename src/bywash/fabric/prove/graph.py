"""The switches of a topology as arrays, for the proof: directed links between them, and who hangs where.

Letters: S switches, L directed links between switches, D destinations (groups of hosts on the same switches),
C traffic classes, P lossless priorities. Links to and from hosts are left out: hosts do not forward, so the buffer
behind a host's link waits for others but nothing waits for it, and no cycle can pass it.

Knows nothing of routes or failures. `kernel` walks these arrays, `prover` builds and reads them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bywash.errors import ConfigError
from bywash.fabric.routes import neighbours, port_ends, ranks
from bywash.fabric.topology import Topology

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchGraph:
    """What the kernels walk.

    Attributes:
        tail_L, head_L: switch numbers, 0..S-1 in the topology's order.
        twin_L: the link of the same cable in the other direction.
        up_L: leads towards the top: to an earlier switch in `routes.ranks` (the up*/down* order).
        top_first_S: the switches in that order.
        port_L: `Topology` port number, for names.
        out_S, degree_S, place_L: links leaving switch s are `out_S[s, :degree_S[s]]`, link l the `place_L[l]`-th.
        in_S, indegree_S: links entering switch s, likewise.
        attached_DS: whether destination d hangs on switch s.
        source_DS: whether traffic for d starts at s.
        hosts_D: the hosts of each destination.
    """

    topology: Topology
    tail_L: Ints
    head_L: Ints
    twin_L: Ints
    up_L: Bools
    top_first_S: Ints
    port_L: Ints
    out_S: Ints
    degree_S: Ints
    place_L: Ints
    in_S: Ints
    indegree_S: Ints
    attached_DS: Bools
    source_DS: Bools
    hosts_D: tuple[tuple[int, ...], ...]

    @property
    def links(self) -> int:
        """L."""
        return len(self.tail_L)

    def switch_name(self, switch: int) -> str:
        """Name of switch s."""
        return self.topology.nodes[self.topology.hosts + switch].name

    def link_name(self, link: int) -> str:
        """`leaf0->spine1`, as the topology names ports."""
        return self.topology.port_name(int(self.port_L[link]))


def switch_graph(topology: Topology, pairs: tuple[tuple[int, int], ...] | None = None) -> SwitchGraph:
    """Arrays of a topology's live links. `pairs` of hosts (source, destination) restrict the traffic; None is all.

    Raises:
        ConfigError: a pair names no host, or names one twice.
    """
    base = topology.hosts
    switches = topology.switches
    live = [(i, link) for i, link in enumerate(topology.links) if not link.failed]
    cables = [(i, link) for i, link in live if link.a >= base and link.b >= base]
    tail = [end - base for _, link in cables for end in (link.a, link.b)]
    head = [end - base for _, link in cables for end in (link.b, link.a)]
    rank = ranks(topology, neighbours(topology, *port_ends(topology)))[base:]
    groups = _groups(topology)
    attached = np.zeros((len(groups), switches), dtype=np.bool_)
    for d, where in enumerate(groups):
        attached[d, list(where)] = True
    hosts = tuple(groups.values())
    out, degree, place = _adjacency(tail, switches)
    into, indegree, _ = _adjacency(head, switches)
    return SwitchGraph(
        topology=topology,
        tail_L=np.array(tail, dtype=np.int32),
        head_L=np.array(head, dtype=np.int32),
        twin_L=np.array([link ^ 1 for link in range(len(tail))], dtype=np.int32),
        up_L=np.array([rank[h] < rank[t] for t, h in zip(tail, head)], dtype=np.bool_),
        top_first_S=np.array(sorted(range(switches), key=lambda s: rank[s]), dtype=np.int32),
        port_L=np.array([2 * i + side for i, _ in cables for side in (0, 1)], dtype=np.int32),
        out_S=out,
        degree_S=degree,
        place_L=place,
        in_S=into,
        indegree_S=indegree,
        attached_DS=attached,
        source_DS=_sources(topology, attached, hosts, pairs),
        hosts_D=hosts,
    )


def _groups(topology: Topology) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Hosts by the switches they hang on: hosts of one group share every route."""
    where: list[set[int]] = [set() for _ in range(topology.hosts)]
    for link in topology.links:
        for host, switch in ((link.a, link.b), (link.b, link.a)):
            if host < topology.hosts and not link.failed:
                where[host].add(switch - topology.hosts)
    groups: dict[tuple[int, ...], list[int]] = {}
    for host, switches in enumerate(where):
        groups.setdefault(tuple(sorted(switches)), []).append(host)
    return {key: tuple(hosts) for key, hosts in groups.items()}


def _sources(
    topology: Topology,
    attached: Bools,
    hosts: tuple[tuple[int, ...], ...],
    pairs: tuple[tuple[int, int], ...] | None,
) -> Bools:
    """Where traffic for each destination starts; never at a switch that already delivers it."""
    if pairs is None:
        return ~attached & np.atleast_1d(attached.any(axis=0))
    group_of = {host: d for d, group in enumerate(hosts) for host in group}
    sources = np.zeros_like(attached)
    for source, destination in pairs:
        for host in (source, destination):
            if host not in group_of:
                raise ConfigError(f"flow {source}-{destination}: there are hosts 0 to {topology.hosts - 1}")
        if source == destination:
            raise ConfigError(f"flow {source}-{destination}: a host does not send to itself")
        d = group_of[destination]
        sources[d] |= attached[group_of[source]] & ~attached[d]
    return sources


def _adjacency(ends: list[int], switches: int) -> tuple[Ints, Ints, Ints]:
    """Links by switch: a padded table, its row lengths, and each link's place in its row."""
    rows: list[list[int]] = [[] for _ in range(switches)]
    place = np.zeros(len(ends), dtype=np.int32)
    for link, switch in enumerate(ends):
        place[link] = len(rows[switch])
        rows[switch].append(link)
    degree = np.array([len(row) for row in rows], dtype=np.int32)
    table = np.full((switches, max(1, int(degree.max(initial=0)))), -1, dtype=np.int32)
    for switch, row in enumerate(rows):
        table[switch, : len(row)] = row
    return table, degree, place
