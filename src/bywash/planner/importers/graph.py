"""A cluster from a graph of NIC ports and switches: a file (GraphML, node-link JSON, YAML) or a networkx graph."""

from pathlib import Path
from typing import Any

from bywash.fabric.builders import from_graph, graph_file
from bywash.fabric.topology import NS_PER_METRE, Topology
from bywash.planner.importers.defaults import Defaults


def from_graph_file(path: Path, defaults: Defaults) -> dict[str, Any]:
    """The data of a cluster file; node and link attributes as `fabric.builders.graph_file` reads them."""
    return from_topology(graph_file(path=str(path), gbps=defaults.gbps), defaults)


def from_networkx(graph: Any, defaults: Defaults) -> dict[str, Any]:
    """The same from a networkx graph in memory."""
    nodes = {str(name): data for name, data in graph.nodes(data=True)}
    links = [(str(a), str(b), data) for a, b, data in graph.edges(data=True)]
    return from_topology(from_graph(nodes, links, gbps=defaults.gbps), defaults)


def from_topology(topology: Topology, defaults: Defaults) -> dict[str, Any]:
    """Ports with one `server` are one host; switches are joined by the cables that there are."""
    servers: dict[int, list[int]] = {}
    for port in range(topology.hosts):
        servers.setdefault(topology.nodes[port].server, []).append(port)
    where: dict[int, tuple[str, float]] = {}
    cables: dict[tuple[str, str, float, float], int] = {}
    for link in topology.links:
        if link.failed:
            continue
        a, b = sorted((link.a, link.b))
        if a < topology.hosts:
            where[a] = topology.nodes[b].name, link.gbps
            continue
        key = topology.nodes[a].name, topology.nodes[b].name, link.gbps, link.delay_ns / NS_PER_METRE
        cables[key] = cables.get(key, 0) + 1
    nodes = [
        {
            "name": topology.nodes[ports[0]].name if len(ports) == 1 else f"host{server}",
            "device": defaults.device,
            "devices": max(defaults.devices, len(ports)),
            "nics": [{"gbps": where[port][1], "switch": where[port][0]} for port in ports],
        }
        for server, ports in servers.items()
    ]
    joined = [
        {"a": a, "b": b, "gbps": gbps, "length_m": length, "count": count}
        for (a, b, gbps, length), count in cables.items()
    ]
    return {"name": "imported", "nodes": nodes, "fabric": {"kind": "cables", "cables": joined}}
