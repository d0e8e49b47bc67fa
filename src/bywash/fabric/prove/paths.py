"""The proof for paths that someone writes down: no routes, no failures, just these flows.

For cases of the literature and for fabrics whose paths come from elsewhere (explicit path lists of a controller).
"""

from collections.abc import Sequence
from itertools import pairwise

import networkx as nx

from bywash.errors import ConfigError
from bywash.fabric.prove.cycle import Cycle, Wait
from bywash.fabric.topology import Topology


def prove_paths(topology: Topology, paths: Sequence[Sequence[str]], priority: int = 3) -> Cycle | None:
    """A cycle of buffers that these paths make, or None. A path names hosts and switches, from host to host.

    Between parallel links any may be taken, so all are. Raises `ConfigError` where a step has no live link, or a path
    does not go from host to host.
    """
    waits: dict[tuple[int, int], int] = {}
    ends = {node.name for node in topology.nodes[: topology.hosts]}
    for number, path in enumerate(paths):
        ports = [_ports(topology, a, b, f"path[{number}]") for a, b in pairwise(path)]
        if len(path) < 3 or not {path[0], path[-1]} <= ends:
            raise ConfigError(
                f"path[{number}] = {','.join(path)!r}: must go from a host over switches to a host, as host0,sw0,host1"
            )
        for before, after in pairwise(ports):
            for one in before:
                for other in after:
                    waits.setdefault((one, other), number)
    graph = nx.DiGraph(list(waits))
    try:
        edges = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return None
    return Cycle(
        waits=tuple(
            Wait(
                switch=_far_end(topology, one),
                port=topology.port_name(one),
                priority=priority,
                flow=(paths[waits[one, other]][0], paths[waits[one, other]][-1]),
                path=tuple(paths[waits[one, other]][1:-1]),
            )
            for one, other in edges
        )
    )


def _ports(topology: Topology, a: str, b: str, where: str) -> list[int]:
    near, far = topology.index(a), topology.index(b)
    found = [2 * i for i, link in enumerate(topology.links) if (link.a, link.b) == (near, far) and not link.failed]
    found += [2 * i + 1 for i, link in enumerate(topology.links) if (link.b, link.a) == (near, far) and not link.failed]
    if not found:
        raise ConfigError(f"{where}: there is no live link from {a} to {b}")
    return found


def _far_end(topology: Topology, port: int) -> str:
    link = topology.links[port // 2]
    return topology.nodes[link.b if port % 2 == 0 else link.a].name
