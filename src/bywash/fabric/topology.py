"""`Topology`: hosts, switches and the links between them, checked once and then taken as true.

A host here is one NIC port, the unit that sends and receives; a server with eight NICs is eight hosts with the
same `server`. Hosts come first and are numbered 0..H-1 in order, then the switches, so that host numbers double as
rank numbers. A link carries the same rate both ways; parallel links are separate entries.

Knows nothing of routes, traffic or switch settings. `builders` makes topologies of usual shapes and reads graph
files; `routes`, the simulator, the deadlock proof and the configuration writers use them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError

NodeKind = Literal["host", "switch"]

NS_PER_METRE = 5.0
"""Light in glass: 2e8 m/s, the usual round figure."""

MAX_DELAY_NS = 2_000_000.0
"""A link's longest delay (400 km): the engine keeps arrival times of packets in flight as 32-bit picoseconds."""

MAX_PORTS = 200_000
"""Four event sources a port must fit the 20 bits that an event has for its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NIC port or a switch.

    Attributes:
        name: unique, such as `host12` or `leaf0`.
        kind: `host` or `switch`.
        tier: 0 for hosts, 1 for the switches they hang on, and so on upwards; orders up-down routes.
        server: for hosts, the server that the NIC sits in; -1 for switches.
    """

    name: str
    kind: NodeKind
    tier: int
    server: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A cable between nodes `a` and `b` (indices into `Topology.nodes`); full duplex.

    Attributes:
        gbps: rate of each direction, in Gb/s.
        delay_ns: propagation one way, in ns (5 ns a metre).
        failed: present but dead: no route uses it.
    """

    a: int
    b: int
    gbps: float
    delay_ns: float
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A checked network. The constructor raises `ConfigError` naming the node or link at fault.

    Attributes:
        name: what shape it is, in words, for reports.
        nodes: hosts first, then switches.
        links: in port order: link i has ports 2i (at `a`, sending to `b`) and 2i + 1 (the other way).
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    hosts: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", sum(node.kind == "host" for node in self.nodes))
        _check_nodes(self.nodes, self.hosts)
        for number, link in enumerate(self.links):
            _check_link(link, number, self.nodes)
        if 2 * len(self.links) > MAX_PORTS:
            raise ConfigError(f"topology.links: {len(self.links):,} links; at most {MAX_PORTS // 2:,} are supported")
        _check_reach(self)

    @property
    def switches(self) -> int:
        """How many switches there are."""
        return len(self.nodes) - self.hosts

    def index(self, name: str) -> int:
        """The number of the node of that name. Raises `ConfigError` when there is none."""
        for number, node in enumerate(self.nodes):
            if node.name == name:
                return number
        raise ConfigError(f"topology.nodes: there is no node {name!r}")

    def port_name(self, port: int) -> str:
        """`leaf0->spine1`, with `#2` behind it for the second of parallel links, and so on."""
        link = self.links[port // 2]
        ends = {link.a, link.b}
        twins = [i for i, other in enumerate(self.links[: port // 2 + 1]) if {other.a, other.b} == ends]
        a, b = (link.a, link.b) if port % 2 == 0 else (link.b, link.a)
        return f"{self.nodes[a].name}->{self.nodes[b].name}" + (f"#{len(twins)}" if len(twins) > 1 else "")

    def host_gbps(self, host: int) -> float:
        """What a host can send: the sum over its live links, in Gb/s."""
        return sum(link.gbps for link in self.links if host in (link.a, link.b) and not link.failed)

    @property
    def gbps_H(self) -> NDArray[np.float64]:
        """`host_gbps` of every host: float64 [H]."""
        return np.array([self.host_gbps(host) for host in range(self.hosts)])

    def oversubscription(self) -> float:
        """The worst switch of tier 1: rate towards hosts over rate towards tier 2 (0 when there is no tier 2).

        1.0 is a fabric without oversubscription. Failed links count on neither side.
        """
        down = [0.0] * len(self.nodes)
        up = [0.0] * len(self.nodes)
        for link in self.links:
            for near, far in ((link.a, link.b), (link.b, link.a)):
                if self.nodes[near].tier == 1 and not link.failed:
                    if self.nodes[far].kind == "host":
                        down[near] += link.gbps
                    elif self.nodes[far].tier > 1:
                        up[near] += link.gbps
        ratios = [d / u if u else math.inf for d, u in zip(down, up) if d]
        return max(ratios) if any(up) and ratios else 0.0

    def describe(self) -> str:
        """One line for reports: shape, sizes, rates, oversubscription, failed links."""
        rates = sorted({link.gbps for link in self.links})
        failed = sum(link.failed for link in self.links)
        ratio = self.oversubscription()
        parts = [
            f"{self.name}: {self.hosts} hosts, {self.switches} switches, {len(self.links)} links",
            f"{'/'.join(f'{rate:g}' for rate in rates)} Gb/s",
            f"oversubscription {ratio:.2f}:1" if ratio else "",
            f"{failed} failed links" if failed else "",
        ]
        return ", ".join(part for part in parts if part)


def _check_nodes(nodes: tuple[Node, ...], hosts: int) -> None:
    if hosts < 2:
        raise ConfigError(f"topology.nodes: {hosts} hosts; traffic needs at least 2")
    names: set[str] = set()
    for number, node in enumerate(nodes):
        where = f"topology.nodes[{number}]"
        if node.kind not in ("host", "switch"):
            raise ConfigError(f"{where}.kind = {node.kind!r}: must be host or switch")
        if not node.name or node.name in names:
            raise ConfigError(f"{where}.name = {node.name!r}: must be given, and once only")
        if (node.kind == "host") != (number < hosts):
            raise ConfigError(f"{where}.kind: hosts must come before switches")
        if (node.kind == "host") != (node.tier == 0):
            raise ConfigError(f"{where}.tier = {node.tier}: hosts have tier 0, switches 1 or more")
        names.add(node.name)


def _check_link(link: Link, number: int, nodes: tuple[Node, ...]) -> None:
    where = f"topology.links[{number}]"
    for end, node in (("a", link.a), ("b", link.b)):
        if not 0 <= node < len(nodes):
            raise ConfigError(f"{where}.{end} = {node}: there are {len(nodes)} nodes")
    if link.a == link.b:
        raise ConfigError(f"{where}: joins {nodes[link.a].name} to itself")
    if nodes[link.a].kind == nodes[link.b].kind == "host":
        raise ConfigError(
            f"{where}: joins two hosts, {nodes[link.a].name} and {nodes[link.b].name}; put a switch between"
        )
    if not 0.1 <= link.gbps <= 10_000:
        raise ConfigError(f"{where}.gbps = {link.gbps:g}: must be from 0.1 to 10000")
    if not 0 <= link.delay_ns <= MAX_DELAY_NS:
        raise ConfigError(f"{where}.delay_ns = {link.delay_ns:g}: must be from 0 to {MAX_DELAY_NS:g}")


def _check_reach(topology: Topology) -> None:
    """Every host must reach every other over live links."""
    near: list[list[int]] = [[] for _ in topology.nodes]
    for link in topology.links:
        if not link.failed:
            near[link.a].append(link.b)
            near[link.b].append(link.a)
    for host in range(topology.hosts):
        if not near[host]:
            raise ConfigError(f"topology: {topology.nodes[host].name} has no live link")
    seen = _reachable(0, near, topology.hosts)
    for host in range(topology.hosts):
        if host not in seen:
            names = topology.nodes[0].name, topology.nodes[host].name
            raise ConfigError(f"topology: no live path from {names[0]} to {names[1]}; are too many links failed?")


def _reachable(start: int, near: list[list[int]], hosts: int) -> set[int]:
    seen, edge = {start}, [start]
    while edge:
        node = edge.pop()
        if node != start and node < hosts:
            continue  # hosts do not forward
        fresh: Iterable[int] = [other for other in near[node] if other not in seen]
        seen.update(fresh)
        edge.extend(fresh)
    return seen
