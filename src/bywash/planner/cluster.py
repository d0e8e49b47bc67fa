"""`Cluster`: hosts with their devices and NICs, and the network between them, checked once and then taken as true.

H topology hosts are NIC ports (see `fabric.topology`); a host here is a server. Knows nothing of models or traffic.
`load_cluster` reads what people write (`cluster_file`); importers make the same from what operators have.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bywash.errors import ConfigError
from bywash.fabric.config.asic import find_asic
from bywash.fabric.files import read_yaml
from bywash.fabric.schema import as_config_error
from bywash.fabric.topology import NS_PER_METRE, Link, Node, Topology
from bywash.planner.cluster_file import MOST_HOSTS, ClusterFile, FabricFile, NicFile
from bywash.planner.devices import DEVICES, Device, find_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One server.

    Attributes:
        name: unique.
        device: the generation of its devices.
        gpus: how many.
        nic_gbps: the rate of each of its NIC ports.
        ports: their numbers among the topology's hosts; () for a cluster of one host without a network.
        switches: the switch of each port's cable.
    """

    name: str
    device: Device
    gpus: int
    nic_gbps: tuple[float, ...] = ()
    ports: tuple[int, ...] = ()
    switches: tuple[str, ...] = ()

    def port_of(self, gpu: int) -> int:
        """The NIC port that a device uses: devices share ports evenly, neighbours the same one."""
        return self.ports[gpu * len(self.ports) // self.gpus]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """All of it.

    Attributes:
        name: for reports and file names.
        hosts: in the order of the file.
        topology: the network; None for one host.
        asics: switch -> ASIC, for switch configuration.
        note: where the description comes from.
    """

    name: str
    hosts: tuple[Host, ...]
    topology: Topology | None
    asics: Mapping[str, str]
    note: str = ""

    @property
    def gpus(self) -> int:
        """Devices over all hosts."""
        return sum(host.gpus for host in self.hosts)

    def generations(self) -> tuple[str, ...]:
        """The device generations there are, in order of first appearance."""
        return tuple(dict.fromkeys(host.device.name for host in self.hosts))


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises `ConfigError`: unreadable, or a field is wrong, with its path in front."""
    file = Path(path)
    data = read_yaml(file)
    if data["name"] == file.stem:  # it has no name of its own
        data["name"] = re.sub(r"[^A-Za-z0-9_.-]+", "-", file.stem).strip("_.-")[:64] or "cluster"
    return parse_cluster(data, note=file.name)


def parse_cluster(data: Mapping[str, Any], note: str = "") -> Cluster:
    """A cluster from the plain data of a file. Errors start with `cluster.` and the field's path."""
    try:
        file = ClusterFile.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            where = ".".join(["cluster", *map(str, first["loc"])])
            raise ConfigError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
        raise ConfigError(f"cluster.{as_config_error(error)}") from error
    return build_cluster(file, note)


def build_cluster(file: ClusterFile, note: str = "") -> Cluster:
    """Resolve generations, number the NIC ports, lay the cables."""
    known = dict(DEVICES)
    for name, own in file.devices.items():
        base = find_device(own.like, known, f"cluster.devices.{name}.like")
        _check_name(name, base)
        given = {key: value for key, value in own.model_dump(exclude={"like"}).items() if value is not None}
        known[name] = replace(base, name=name, source=f"the cluster file, like {own.like}", **given)
    hosts = _hosts(file, known)
    if len(hosts) > 1 and file.fabric is None:
        raise ConfigError(f"cluster.fabric: must be given for {len(hosts)} hosts")
    if file.fabric is None or len(hosts) == 1:  # nobody to send to
        return Cluster(name=file.name, hosts=hosts, topology=None, asics={}, note=note)
    for i, one in enumerate(file.nodes):
        if not one.nics:
            raise ConfigError(f"cluster.nodes[{i}].nics: must be given in a cluster with a fabric")
    for field in ("leaf_asic", "spine_asic"):
        find_asic(getattr(file.fabric, field), f"cluster.fabric.{field}")
    hosts = _on_switches(hosts, file)
    topology = _topology(file.name, hosts, file.fabric)
    asics = {
        node.name: file.fabric.leaf_asic if node.tier == 1 else file.fabric.spine_asic
        for node in topology.nodes[topology.hosts :]
    }
    return Cluster(name=file.name, hosts=hosts, topology=topology, asics=asics, note=note)


def _check_name(name: str, base: Device) -> None:
    """Measured rates and CPU ranks go by a generation's name, so that an own one may not borrow it."""
    if name in DEVICES:
        raise ConfigError(f"cluster.devices.{name}: is a known generation; give yours another name, such as {name}-own")
    if Device.is_cpu_name(name) != base.is_cpu:
        begin = "must begin with cpu" if base.is_cpu else "must not begin with cpu"
        raise ConfigError(f"cluster.devices.{name}: is like {base.name}, so that its name {begin}")


def _hosts(file: ClusterFile, known: dict[str, Device]) -> tuple[Host, ...]:
    hosts: list[Host] = []
    names: set[str] = set()
    for i, node in enumerate(file.nodes):
        device = find_device(node.device, known, f"cluster.nodes[{i}].device")
        if node.peer_gbytes_per_s is not None:
            device = replace(device, peer_gbytes_per_s=node.peer_gbytes_per_s)
        rates = tuple(nic.gbps for nic in node.nics for _ in range(nic.count))
        if len(rates) > node.devices:
            raise ConfigError(
                f"cluster.nodes[{i}].nics: {len(rates)} NIC ports for {node.devices} devices; a port is used by one or "
                "more devices, so give at most one for each"
            )
        for n in range(node.count):
            name = f"{node.name}-{n}" if node.count > 1 else node.name
            if name in names:
                raise ConfigError(f"cluster.nodes[{i}].name = {node.name!r}: there is a host {name} already")
            names.add(name)
            hosts.append(Host(name=name, device=device, gpus=node.devices, nic_gbps=rates))
    if len(hosts) > MOST_HOSTS:
        raise ConfigError(f"cluster.nodes: {len(hosts)} hosts; at most {MOST_HOSTS} are supported")
    return tuple(hosts)


def _on_switches(hosts: tuple[Host, ...], file: ClusterFile) -> tuple[Host, ...]:
    """Number the ports, host by host, and name the switch of each."""
    fabric = file.fabric
    assert fabric is not None
    nodes = [(i, node) for i, node in enumerate(file.nodes) for _ in range(node.count)]
    made, port = [], 0
    for number, (host, (i, node)) in enumerate(zip(hosts, nodes, strict=True)):
        nics = [(j, nic) for j, nic in enumerate(node.nics) for _ in range(nic.count)]
        switches = tuple(
            _switch_of(fabric, number, place, nic, f"cluster.nodes[{i}].nics[{j}].switch")
            for place, (j, nic) in enumerate(nics)
        )
        made.append(replace(host, ports=tuple(range(port, port + len(nics))), switches=switches))
        port += len(nics)
    return tuple(made)


def _switch_of(fabric: FabricFile, host: int, place: int, nic: NicFile, where: str) -> str:
    if fabric.kind == "cables":
        if nic.switch is None:
            raise ConfigError(f"{where}: must be given for a fabric of kind cables")
        return nic.switch
    if nic.switch is not None:
        raise ConfigError(f"{where}: kind {fabric.kind} says it already; leave it out, or use kind cables")
    if fabric.kind == "rail-optimised":
        return f"rail{place}"
    return "switch0" if fabric.kind == "one-switch" else f"leaf{host // fabric.nodes_per_leaf}"


def _topology(name: str, hosts: tuple[Host, ...], fabric: FabricFile) -> Topology:
    """Ports, then switches of tier 1, then the others; cables in that order too."""
    firsts = list(dict.fromkeys(switch for host in hosts for switch in host.switches))
    others = _other_switches(firsts, fabric)
    nodes = [
        Node(name=f"{host.name}.nic{j}", kind="host", tier=0, server=number)
        for number, host in enumerate(hosts)
        for j in range(len(host.ports))
    ]
    nodes += [Node(name=one, kind="switch", tier=1) for one in firsts]
    nodes += [Node(name=one, kind="switch", tier=2) for one in others]
    index = {node.name: number for number, node in enumerate(nodes)}
    links = [
        Link(a=port, b=index[switch], gbps=gbps, delay_ns=fabric.length_m * NS_PER_METRE)
        for host in hosts
        for port, switch, gbps in zip(host.ports, host.switches, host.nic_gbps, strict=True)
    ]
    if fabric.kind != "cables":
        far = fabric.uplink_length_m * NS_PER_METRE
        pairs = [(index[leaf], index[spine]) for leaf in firsts for spine in others]
        for a, b in pairs:
            links += [Link(a=a, b=b, gbps=fabric.uplink_gbps, delay_ns=far)] * fabric.links_per_pair
    for cable in fabric.cables:
        delay = cable.length_m * NS_PER_METRE
        links += [Link(a=index[cable.a], b=index[cable.b], gbps=cable.gbps, delay_ns=delay)] * cable.count
    try:
        return _with_special_links(Topology(name=name, nodes=tuple(nodes), links=tuple(links)), fabric)
    except ConfigError as error:
        raise ConfigError(f"cluster.fabric: {str(error).removeprefix('cluster.fabric.')}") from error


def _other_switches(firsts: list[str], fabric: FabricFile) -> list[str]:
    """Switches without hosts. One leaf reaches all of its hosts: spines would be idle."""
    if fabric.kind == "cables":
        ends = dict.fromkeys(end for cable in fabric.cables for end in (cable.a, cable.b))
        return [end for end in ends if end not in firsts]
    return [f"spine{i}" for i in range(fabric.spines)] if len(firsts) > 1 else []


def _with_special_links(topology: Topology, fabric: FabricFile) -> Topology:
    """The same with what `links` says of single cables."""
    if not fabric.links:
        return topology
    links = list(topology.links)
    names = {}
    for number in range(len(links)):
        for port in (2 * number, 2 * number + 1):
            names[topology.port_name(port).replace("->", "-")] = number
    for i, one in enumerate(fabric.links):
        if one.link not in names:
            known = next((name for name in names if "spine" in name), next(iter(names)))
            raise ConfigError(
                f"cluster.fabric.links[{i}].link = {one.link!r}: there is no such cable; write it as {known}"
            )
        number = names[one.link]
        gbps = one.gbps if one.gbps is not None else links[number].gbps
        links[number] = replace(links[number], gbps=gbps, failed=one.failed)
    return Topology(name=topology.name, nodes=topology.nodes, links=tuple(links))


def topology_yaml(topology: Topology) -> str:
    """The network as `fabric.builders.graph_file` reads it back."""
    data = {
        "nodes": [
            {"name": node.name, "kind": node.kind, "tier": node.tier}
            | ({"server": node.server} if node.kind == "host" else {})
            for node in topology.nodes
        ],
        "links": [
            {"a": topology.nodes[link.a].name, "b": topology.nodes[link.b].name}
            | {"gbps": link.gbps, "delay_ns": link.delay_ns}
            | ({"failed": True} if link.failed else {})
            for link in topology.links
        ],
    }
    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)
    return text
