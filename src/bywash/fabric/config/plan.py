"""The plan: every number that a fabric's switches, NICs and libraries need, derived once from values and topology.

Writers (`sonic`, `cumulus`, `nic`, `nccl`) only put these numbers into words. Every number comes with the lines of
its arithmetic. Called by the command line and `audit`; knows no syntax of any switch.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bywash.errors import ConfigError
from bywash.fabric.config.asic import KIB, Asic
from bywash.fabric.config.headroom import Headroom, LookupTable, formula, lua
from bywash.fabric.config.thresholds import EgressCase, Marking, choose_marking, given_marking
from bywash.fabric.config.values import SwitchRule, Values, rule_for
from bywash.fabric.prove.graph import SwitchGraph, switch_graph
from bywash.fabric.prove.prover import Routes, one_class
from bywash.fabric.topology import NS_PER_METRE, Topology

MANAGEMENT_BYTES = 256 * KIB
"""Kept for the CPU port and the egress minimum of lossy queues."""
LOSSY_QUEUE_BYTES = 9216
CNP_FRAME_BYTES = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """One port of a switch. `profile` and `wred` name its headroom and marking."""

    name: str
    number: int
    gbps: int
    cable_m: int
    lanes: str
    peer: str
    peer_is_host: bool
    profile: str
    wred: str

    @property
    def speed_mbps(self) -> int:
        """As SONiC has it."""
        return self.gbps * 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadroomPlan:
    """The headroom of one speed and cable on a switch; `on_switch` is what a dynamic buffer model computes itself."""

    name: str
    gbps: int
    cable_m: int
    headroom: Headroom
    on_switch: Headroom | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WredPlan:
    """The marking of one link speed on a switch, and the port whose traffic decided it."""

    name: str
    gbps: int
    marking: Marking
    decided_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlan:
    """One switch. `pool_bytes` is what all ports share once headroom and reserves are taken off."""

    name: str
    rule: SwitchRule
    asic: Asic
    ports: tuple[PortPlan, ...]
    headrooms: tuple[HeadroomPlan, ...]
    wreds: tuple[WredPlan, ...]
    pool_bytes: int
    reserved_bytes: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicPlan:
    """One NIC port. `interface` and `device` are its names in its server."""

    host: str
    server: int
    interface: str
    device: str
    gbps: float
    cable_m: int
    increase_mbps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricPlan:
    """Everything. `pace_gbps` and `rotation` are the bounds that senders must keep, None where none is needed."""

    values: Values
    topology: Topology
    switches: tuple[SwitchPlan, ...]
    nics: tuple[NicPlan, ...]
    loop_us: float
    pace_gbps: float | None
    rotation: int | None

    def switch(self, name: str) -> SwitchPlan:
        """The switch of that name. Raises `ConfigError` when there is none."""
        for one in self.switches:
            if one.name == name:
                return one
        raise ConfigError(f"there is no switch {name!r} in the topology; its switches are {self.switches[0].name}, ...")


def make_plan(values: Values, topology: Topology, table: LookupTable | None = None) -> FabricPlan:
    """Derive the plan.

    Args:
        values: see `values.Values`.
        topology: the network that it describes.
        table: headroom rows of the user's; needed for ASICs without a formula.

    Raises:
        ConfigError: a speed no ASIC has, headroom that exceeds the memory, marking that cannot precede pausing, ...
    """
    graph = switch_graph(topology)
    routes = Routes(graph, "shortest", one_class(topology.switches))
    traffic = _Traffic(values, topology, graph, routes)
    switches = tuple(_switch(values, topology, s, traffic, table) for s in range(topology.switches))
    markings = [wred.marking for switch in switches for wred in switch.wreds]
    paces = [marking.pace_gbps for marking in markings if marking.pace_gbps is not None]
    rotations = [marking.rotation for marking in markings if marking.rotation is not None]
    return FabricPlan(
        values=values,
        topology=topology,
        switches=switches,
        nics=_nics(values, topology),
        loop_us=traffic.loop_us,
        pace_gbps=min(paces, default=None),
        rotation=min(rotations, default=None),
    )


class _Traffic:
    """What routes say of the traffic: who feeds whom inside a switch, and how long a control loop takes."""

    def __init__(self, values: Values, topology: Topology, graph: SwitchGraph, routes: Routes) -> None:
        self.topology, self.graph, self.routes = topology, graph, routes
        self.loop_us = _loop_us(values, topology, graph, routes.hop_DL)
        self.sender_gbps = max(topology.host_gbps(host) for host in range(topology.hosts))
        self.link_of_port = {int(port): link for link, port in enumerate(graph.port_L)}
        self.feeds_LO = routes.edges.any(axis=(1, 3))

    def inputs(self, switch: int, egress: int) -> tuple[float, ...]:
        """Rates of the ports of a switch that may send to an egress port (a `Topology` port number)."""
        graph, links = self.graph, self.topology.links
        node = self.topology.hosts + switch
        hosts = [
            port
            for port, far in _ports_of(self.topology, node)
            if far < self.topology.hosts and port != egress and not links[port // 2].failed
        ]
        out = self.link_of_port.get(egress)
        if out is not None:
            entering = [int(link) for link in np.flatnonzero(graph.head_L == switch)]
            fed = [int(graph.port_L[link]) for link in entering if self.feeds_LO[link, graph.place_L[out]]]
            starts = bool((self.routes.hop_DL[:, out] & graph.source_DS[:, switch]).any())
            return tuple(links[port // 2].gbps for port in fed + (hosts if starts else []))
        reaches = self.routes.hop_DL[graph.attached_DS[:, switch]].any(axis=0) & (graph.head_L == switch)
        ports = [int(port) for port in graph.port_L[reaches]]
        return tuple(links[port // 2].gbps for port in ports + hosts)


def _loop_us(values: Values, topology: Topology, graph: SwitchGraph, hop_DL: npt.NDArray[np.bool_]) -> float:
    """Longest control loop: a frame from sender to receiver on the slowest route, the CNP back, the NICs' reaction."""
    legs = []
    for frame in (values.mtu_bytes, CNP_FRAME_BYTES):
        cost_L = np.array([_leg_ns(topology, int(port), frame) for port in graph.port_L])
        far_DS = np.zeros(graph.attached_DS.shape)
        for _ in range(topology.switches):
            before = far_DS.copy()
            for link in range(graph.links):
                through = np.where(hop_DL[:, link], far_DS[:, graph.head_L[link]] + cost_L[link], 0.0)
                np.maximum(far_DS[:, graph.tail_L[link]], through, out=far_DS[:, graph.tail_L[link]])
            if np.array_equal(before, far_DS):
                break
        edge = [_leg_ns(topology, 2 * i, frame) for i, link in enumerate(topology.links) if link.a < topology.hosts]
        edge += [_leg_ns(topology, 2 * i, frame) for i, link in enumerate(topology.links) if link.b < topology.hosts]
        legs.append(float(far_DS.max()) + 2 * max(edge))
    return sum(legs) / 1000 + values.nic.reaction_us


def _leg_ns(topology: Topology, port: int, frame_bytes: int) -> float:
    link = topology.links[port // 2]
    return link.delay_ns + frame_bytes * 8 / link.gbps


def _ports_of(topology: Topology, node: int) -> list[tuple[int, int]]:
    """(port that the node sends on, node at its far end), in link order; failed cables are ports too."""
    found = []
    for i, link in enumerate(topology.links):
        if link.a == node:
            found.append((2 * i, link.b))
        if link.b == node:
            found.append((2 * i + 1, link.a))
    return found


def _switch(
    values: Values, topology: Topology, number: int, traffic: _Traffic, table: LookupTable | None
) -> SwitchPlan:
    name = topology.nodes[topology.hosts + number].name
    rule, asic = rule_for(values, name)
    ends = _ports_of(topology, topology.hosts + number)
    ports = tuple(_port(topology, rule, asic, name, i, port, far) for i, (port, far) in enumerate(ends))
    headrooms = tuple(
        _headroom(values, rule, asic, gbps, cable, table, name)
        for gbps, cable in sorted({(port.gbps, port.cable_m) for port in ports})
    )
    size_of = {(one.gbps, one.cable_m): _reserves(one, rule) for one in headrooms}
    lossless = len(values.priorities)
    headroom_bytes = sum(lossless * size_of[port.gbps, port.cable_m] for port in ports)
    reserved = headroom_bytes + len(ports) * LOSSY_QUEUE_BYTES + MANAGEMENT_BYTES
    arithmetic = (
        f"memory {asic.buffer_bytes:,} B - headroom {headroom_bytes:,} ({lossless} lossless x {len(ports)} ports) - "
        f"lossy queues {len(ports)} x {LOSSY_QUEUE_BYTES:,} - management {MANAGEMENT_BYTES:,}"
    )
    pool = (asic.buffer_bytes - reserved) // KIB * KIB
    if pool <= 0:
        raise ConfigError(
            f"{name}: headroom does not fit: {arithmetic} = {asic.buffer_bytes - reserved:,} B; use shorter cables, "
            "fewer lossless classes, fewer ports, or a switch with more memory"
        )
    try:
        wreds = _wreds(values, traffic, number, ends, ports, pool)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return SwitchPlan(
        name=name,
        rule=rule,
        asic=asic,
        ports=ports,
        headrooms=headrooms,
        wreds=wreds,
        pool_bytes=pool,
        reserved_bytes=reserved,
        lines=(f"shared pool: {arithmetic} = {pool:,} B",),
    )


def _reserves(one: HeadroomPlan, rule: SwitchRule) -> int:
    """What the switch really takes: its own computation under the dynamic model, the profile's size otherwise."""
    taken = one.on_switch if rule.buffer_model == "dynamic" and one.on_switch is not None else one.headroom
    return taken.size_bytes


def _port(topology: Topology, rule: SwitchRule, asic: Asic, switch: str, i: int, port: int, far: int) -> PortPlan:
    link = topology.links[port // 2]
    gbps = int(link.gbps)
    if gbps != link.gbps:
        raise ConfigError(f"{switch}: a port of {link.gbps:g} Gb/s has no setting; use whole Gb/s")
    cable = math.ceil(link.delay_ns / NS_PER_METRE)
    lanes = 8 if asic.max_gbps >= 400 else 4
    if rule.ports is not None and len(rule.ports) <= i:
        raise ConfigError(f"{switch}: its rule names {len(rule.ports)} ports, the topology has port number {i}")
    return PortPlan(
        name=rule.ports[i] if rule.ports is not None else _port_name(rule, i, lanes),
        number=i,
        gbps=gbps,
        cable_m=cable,
        lanes=",".join(str(i * lanes + lane) for lane in range(lanes)),
        peer=topology.nodes[far].name,
        peer_is_host=far < topology.hosts,
        profile=f"pg_lossless_{gbps * 1000}_{cable}m_profile",
        wred=f"ROCE_{gbps}G",
    )


def _port_name(rule: SwitchRule, i: int, lanes: int) -> str:
    return f"swp{i + 1}" if rule.os == "cumulus" else f"Ethernet{i * lanes}"


def _headroom(
    values: Values, rule: SwitchRule, asic: Asic, gbps: int, cable_m: int, table: LookupTable | None, switch: str
) -> HeadroomPlan:
    """The user's table where it has the SKU, the formula elsewhere."""
    known = table is not None and any(row.sku in ("", asic.hwsku) for row in table.rows)
    try:
        if known or not asic.has_formula:
            if table is None:
                raise ConfigError(
                    f"{asic.hwsku} has no headroom formula; give its pg_profile_lookup.ini with --pg-lookup"
                )
            chosen = table.find(asic.hwsku, gbps, cable_m)
        else:
            chosen = formula(asic, gbps, cable_m, mtu_bytes=values.mtu_bytes)
        computed = lua(asic, gbps, cable_m, mtu_bytes=values.mtu_bytes) if asic.has_formula else None
    except ConfigError as error:
        raise ConfigError(f"{switch}: {error}") from error
    name = f"pg_lossless_{gbps * 1000}_{cable_m}m_profile"
    return HeadroomPlan(name=name, gbps=gbps, cable_m=cable_m, headroom=chosen, on_switch=computed)


def _wreds(
    values: Values,
    traffic: _Traffic,
    number: int,
    ends: list[tuple[int, int]],
    ports: tuple[PortPlan, ...],
    pool_bytes: int,
) -> tuple[WredPlan, ...]:
    """One marking per link speed, decided by the port with the least room; ports alike are looked at once."""
    cases: dict[EgressCase, str] = {}
    for (egress, _), port in zip(ends, ports):
        inputs = traffic.inputs(number, egress)
        if not inputs:
            continue  # routes send nothing here: the marking of its speed, or of any speed, does no harm
        case = EgressCase(
            gbps=port.gbps,
            inputs_gbps=tuple(sorted(inputs)),
            senders=min(values.incast, traffic.topology.hosts - 1),
            sender_gbps=traffic.sender_gbps,
            shared_bytes=pool_bytes,
            ports=len(ports),
            priorities=len(values.priorities),
            dynamic_th=values.dynamic_th,
            loop_us=traffic.loop_us,
            mtu_bytes=values.mtu_bytes,
            mark_at_enqueue=values.mark_at == "enqueue",
            message_bytes=values.message_bytes,
        )
        cases.setdefault(case, port.name)
    best: dict[int, WredPlan] = {}
    for case, port_name in cases.items():
        marking = _marking(values, case)
        old = best.get(int(case.gbps))
        if old is None or _tightness(marking) < _tightness(old.marking):
            speed = int(case.gbps)
            best[speed] = WredPlan(name=f"ROCE_{speed}G", gbps=speed, marking=marking, decided_by=port_name)
    missing = {port.gbps for port in ports} - set(best)
    for speed in sorted(missing):  # ports that no route uses today
        nearest = min(best.values(), key=lambda one: abs(one.gbps - speed), default=None)
        if nearest is None:
            raise ConfigError("no route leads through it; leave it out of the topology")
        best[speed] = WredPlan(
            name=f"ROCE_{speed}G", gbps=speed, marking=nearest.marking, decided_by=nearest.decided_by
        )
    return tuple(best[speed] for speed in sorted(best))


def _marking(values: Values, case: EgressCase) -> Marking:
    """As the values file has it, or computed."""
    if values.marking is None:
        return choose_marking(case, values.dcqcn.control(case.gbps))
    return given_marking(case, *values.marking.at(case.gbps), values.marking.pmax_percent)


def _tightness(marking: Marking) -> tuple[float, float]:
    """Smaller is tighter: a bound on senders before none, then the smaller Kmax."""
    return marking.pace_gbps if marking.pace_gbps is not None else math.inf, marking.kmax_bytes


def _nics(values: Values, topology: Topology) -> tuple[NicPlan, ...]:
    seen: dict[int, int] = {}
    nics = []
    for host in range(topology.hosts):
        node = topology.nodes[host]
        n = seen[node.server] = seen.get(node.server, -1) + 1
        cables = [link for link in topology.links if host in (link.a, link.b)]
        gbps = max(link.gbps for link in cables)
        nics.append(
            NicPlan(
                host=node.name,
                server=node.server,
                interface=values.nic.interface.replace("{n}", str(n)),
                device=values.nic.device.replace("{n}", str(n)),
                gbps=gbps,
                cable_m=math.ceil(max(link.delay_ns for link in cables) / NS_PER_METRE),
                increase_mbps=values.dcqcn.increase_for(gbps),
            )
        )
    return tuple(nics)
