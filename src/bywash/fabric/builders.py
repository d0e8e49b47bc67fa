"""Topologies of the usual shapes, and any graph from a file.

Each builder is a pure function from sizes to a checked `Topology`; sizes that do not fit raise `ConfigError` naming
the argument. Hosts under one switch are neighbours in number. `failed` names links as `leaf0-spine1`, with `#2`
behind it for the second of parallel links. Called by `files` for scenario files, and by anyone from Python.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.fabric.topology import Link, Node, Topology

Rates = float | Sequence[float]
"""One rate for all hosts, or one per host: several generations of NICs in one fabric."""


def leaf_spine(
    *,
    hosts: int,
    leaves: int,
    spines: int,
    gbps: Rates = 100.0,
    uplink_gbps: float | None = None,
    links_per_pair: int = 1,
    delay_ns: float = 1000.0,
    uplink_delay_ns: float | None = None,
    nics_per_server: int = 1,
    failed: Sequence[str] = (),
) -> Topology:
    """Two tiers: every leaf joined to every spine by `links_per_pair` cables; `hosts / leaves` hosts a leaf."""
    _positive(hosts=hosts, leaves=leaves, spines=spines, links_per_pair=links_per_pair)
    if hosts % leaves:
        raise ConfigError(f"topology.hosts = {hosts}: must be a multiple of leaves = {leaves}")
    rates = _rates(gbps, hosts)
    up = uplink_gbps if uplink_gbps is not None else max(rates)
    up_delay = uplink_delay_ns if uplink_delay_ns is not None else delay_ns
    nodes = _hosts(hosts, nics_per_server)
    nodes += [Node(name=f"leaf{i}", kind="switch", tier=1) for i in range(leaves)]
    nodes += [Node(name=f"spine{i}", kind="switch", tier=2) for i in range(spines)]
    per_leaf = hosts // leaves
    links = [_link(h, hosts + h // per_leaf, rates[h], delay_ns) for h in range(hosts)]
    for leaf in range(leaves):
        for spine in range(spines):
            links += [_link(hosts + leaf, hosts + leaves + spine, up, up_delay)] * links_per_pair
    return _finish(f"leaf-spine {leaves} x {spines}", nodes, links, failed)


def fat_tree(
    *, k: int, gbps: Rates = 100.0, delay_ns: float = 1000.0, nics_per_server: int = 1, failed: Sequence[str] = ()
) -> Topology:
    """Three tiers of k-port switches (Al-Fares 2008): k pods of k/2 edge and k/2 aggregation switches, k^3/4 hosts."""
    if k < 2 or k % 2:
        raise ConfigError(f"topology.k = {k}: must be even and at least 2")
    half = k // 2
    hosts = k * half * half
    rates = _rates(gbps, hosts)
    edge, agg, core = hosts, hosts + k * half, hosts + 2 * k * half
    nodes = _hosts(hosts, nics_per_server)
    nodes += [Node(name=f"edge{i}", kind="switch", tier=1) for i in range(k * half)]
    nodes += [Node(name=f"agg{i}", kind="switch", tier=2) for i in range(k * half)]
    nodes += [Node(name=f"core{i}", kind="switch", tier=3) for i in range(half * half)]
    up = max(rates)
    links = [_link(h, edge + h // half, rates[h], delay_ns) for h in range(hosts)]
    for pod in range(k):
        for i in range(half):
            links += [_link(edge + pod * half + i, agg + pod * half + j, up, delay_ns) for j in range(half)]
    for pod in range(k):
        for i in range(half):
            links += [_link(agg + pod * half + i, core + i * half + j, up, delay_ns) for j in range(half)]
    return _finish(f"fat tree, k = {k}", nodes, links, failed)


def rail_optimised(
    *,
    servers: int,
    nics_per_server: int = 8,
    spines: int,
    gbps: Rates = 100.0,
    uplink_gbps: float | None = None,
    links_per_pair: int = 1,
    delay_ns: float = 1000.0,
    failed: Sequence[str] = (),
) -> Topology:
    """NIC r of every server on rail switch r; the rails are joined by spines. Hosts are numbered server by server."""
    _positive(servers=servers, nics_per_server=nics_per_server, spines=spines, links_per_pair=links_per_pair)
    hosts = servers * nics_per_server
    rates = _rates(gbps, hosts)
    up = uplink_gbps if uplink_gbps is not None else max(rates)
    nodes = _hosts(hosts, nics_per_server)
    nodes += [Node(name=f"rail{i}", kind="switch", tier=1) for i in range(nics_per_server)]
    nodes += [Node(name=f"spine{i}", kind="switch", tier=2) for i in range(spines)]
    links = [_link(h, hosts + h % nics_per_server, rates[h], delay_ns) for h in range(hosts)]
    for rail in range(nics_per_server):
        for spine in range(spines):
            links += [_link(hosts + rail, hosts + nics_per_server + spine, up, delay_ns)] * links_per_pair
    return _finish(f"rail-optimised, {nics_per_server} rails x {spines} spines", nodes, links, failed)


def ring(
    *,
    switches: int,
    hosts_per_switch: int = 1,
    gbps: Rates = 100.0,
    delay_ns: float = 1000.0,
    failed: Sequence[str] = (),
) -> Topology:
    """Switches A, B, C, ... in a circle, for deadlock cases; host i hangs on switch i // hosts_per_switch."""
    _positive(hosts_per_switch=hosts_per_switch)
    if switches < 3:
        raise ConfigError(f"topology.switches = {switches}: a ring has at least 3")
    hosts = switches * hosts_per_switch
    rates = _rates(gbps, hosts)
    nodes = _hosts(hosts, 1) + [Node(name=f"sw{i}", kind="switch", tier=1) for i in range(switches)]
    links = [_link(h, hosts + h // hosts_per_switch, rates[h], delay_ns) for h in range(hosts)]
    links += [_link(hosts + i, hosts + (i + 1) % switches, max(rates), delay_ns) for i in range(switches)]
    return _finish(f"ring of {switches}", nodes, links, failed)


def mesh(
    *,
    rows: int,
    columns: int,
    hosts_per_switch: int = 1,
    gbps: Rates = 100.0,
    delay_ns: float = 1000.0,
    failed: Sequence[str] = (),
) -> Topology:
    """A grid of switches, each joined to its neighbours; switch (r, c) is number r * columns + c."""
    _positive(rows=rows, columns=columns, hosts_per_switch=hosts_per_switch)
    hosts = rows * columns * hosts_per_switch
    rates = _rates(gbps, hosts)
    nodes = _hosts(hosts, 1) + [Node(name=f"sw{i}", kind="switch", tier=1) for i in range(rows * columns)]
    links = [_link(h, hosts + h // hosts_per_switch, rates[h], delay_ns) for h in range(hosts)]
    for r in range(rows):
        for c in range(columns):
            here = hosts + r * columns + c
            if c + 1 < columns:
                links.append(_link(here, here + 1, max(rates), delay_ns))
            if r + 1 < rows:
                links.append(_link(here, here + columns, max(rates), delay_ns))
    return _finish(f"mesh {rows} x {columns}", nodes, links, failed)


def single_switch(
    *, hosts: int, gbps: Rates = 100.0, delay_ns: float = 1000.0, nics_per_server: int = 1, failed: Sequence[str] = ()
) -> Topology:
    """All hosts on one switch."""
    _positive(hosts=hosts)
    rates = _rates(gbps, hosts)
    nodes = [*_hosts(hosts, nics_per_server), Node(name="sw0", kind="switch", tier=1)]
    return _finish("one switch", nodes, [_link(h, hosts, rates[h], delay_ns) for h in range(hosts)], failed)


def graph_file(*, path: str, gbps: float = 100.0, delay_ns: float = 1000.0, failed: Sequence[str] = ()) -> Topology:
    """A topology from GraphML (`.graphml`), node-link JSON (`.json`) or YAML (`nodes:` and `links:` lists).

    Nodes have `kind` (host or switch; by default a node whose name starts with h is a host) and optionally `tier`,
    `server`; links have `gbps`, `delay_ns` or `length_m`, `count`, `failed`, with the arguments as defaults.
    """
    nodes, links = _read_graph(Path(path))
    return from_graph(nodes, links, gbps=gbps, delay_ns=delay_ns, failed=failed, name=Path(path).name)


def from_graph(
    nodes: Mapping[str, Mapping[str, Any]],
    links: Sequence[tuple[str, str, Mapping[str, Any]]],
    *,
    gbps: float = 100.0,
    delay_ns: float = 1000.0,
    failed: Sequence[str] = (),
    name: str = "graph",
) -> Topology:
    """A topology from named nodes and links with attributes, as networkx has them; see `graph_file`."""
    kinds = {
        key: str(value.get("kind", "host" if key.lower().startswith("h") else "switch")) for key, value in nodes.items()
    }
    order = [key for key in nodes if kinds[key] == "host"] + [key for key in nodes if kinds[key] != "host"]
    number = {key: i for i, key in enumerate(order)}
    made = []
    for i, key in enumerate(order):
        data = nodes[key]
        host = kinds[key] == "host"
        tier = 0 if host else _whole(data.get("tier", 1), f"topology.nodes[{key}].tier")
        server = _whole(data.get("server", i), f"topology.nodes[{key}].server") if host else -1
        made.append(Node(name=key, kind=kinds[key], tier=tier, server=server))  # type: ignore[arg-type]
    cables: list[Link] = []
    for i, (a, b, data) in enumerate(links):
        where = f"topology.links[{i}]"
        for end in (a, b):
            if end not in number:
                raise ConfigError(f"{where}: there is no node {end!r}")
        delay = data.get("delay_ns", delay_ns)
        if "length_m" in data:
            delay = _number(data["length_m"], f"{where}.length_m") * 5.0
        cable = Link(
            a=number[a],
            b=number[b],
            gbps=_number(data.get("gbps", gbps), f"{where}.gbps"),
            delay_ns=_number(delay, f"{where}.delay_ns"),
            failed=bool(data.get("failed", False)),
        )
        cables += [cable] * _whole(data.get("count", 1), f"{where}.count")
    return _finish(name, made, cables, failed)


def _read_graph(path: Path) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    import json

    import networkx as nx
    import yaml

    try:
        if path.suffix == ".graphml":
            graph = nx.read_graphml(path, force_multigraph=True)
        else:
            text = path.read_text()
            data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
            if isinstance(data, dict) and isinstance(data.get("nodes"), list):
                return _from_lists(data)
            raise ConfigError(f"topology.path = {path}: wants lists `nodes` and `links`")
    except OSError as error:
        raise ConfigError(f"topology.path = {path}: cannot read it: {error.strerror or error}") from error
    except ConfigError:
        raise
    except Exception as error:  # parsers raise many kinds
        raise ConfigError(f"topology.path = {path}: is no graph that can be read: {error}") from error
    return {str(n): d for n, d in graph.nodes(data=True)}, [(str(a), str(b), d) for a, b, d in graph.edges(data=True)]


def _from_lists(data: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str, Any]]]:
    """Our YAML, and networkx's node-link JSON: nodes by `name` or `id`, links by `a`/`b` or `source`/`target`."""
    nodes: dict[str, Any] = {}
    for i, node in enumerate(data["nodes"]):
        row = {"name": node} if isinstance(node, str) else node
        if not isinstance(row, dict) or not (row.get("name") or row.get("id")):
            raise ConfigError(f"topology.nodes[{i}]: wants a name")
        nodes[str(row.get("name") or row["id"])] = row
    links: list[tuple[str, str, Any]] = []
    for i, link in enumerate(data.get("links") or data.get("edges") or []):
        if not isinstance(link, dict):
            raise ConfigError(f"topology.links[{i}]: wants a and b")
        a, b = link.get("a", link.get("source")), link.get("b", link.get("target"))
        if a is None or b is None:
            raise ConfigError(f"topology.links[{i}]: wants a and b")
        links.append((str(a), str(b), link))
    return nodes, links


def _finish(name: str, nodes: list[Node], links: list[Link], failed: Sequence[str]) -> Topology:
    """Mark failed links by name, then let `Topology` check the whole."""
    if not failed:
        return Topology(name=name, nodes=tuple(nodes), links=tuple(links))
    seen: dict[tuple[int, int], int] = {}
    names: dict[str, int] = {}
    for i, link in enumerate(links):
        twin = seen[link.a, link.b] = seen.get((link.a, link.b), 0) + 1
        behind = f"#{twin}" if twin > 1 else ""
        for a, b in ((link.a, link.b), (link.b, link.a)):
            names[f"{nodes[a].name}-{nodes[b].name}{behind}"] = i
    for position, cut in enumerate(failed):
        if cut not in names:
            raise ConfigError(
                f"topology.failed[{position}] = {cut!r}: there is no such link; write it as {next(iter(names))}"
            )
        i = names[cut]
        links[i] = Link(a=links[i].a, b=links[i].b, gbps=links[i].gbps, delay_ns=links[i].delay_ns, failed=True)
    return Topology(name=name, nodes=tuple(nodes), links=tuple(links))


def _hosts(hosts: int, nics_per_server: int) -> list[Node]:
    _positive(nics_per_server=nics_per_server)
    return [Node(name=f"host{i}", kind="host", tier=0, server=i // nics_per_server) for i in range(hosts)]


def _link(a: int, b: int, gbps: float, delay_ns: float) -> Link:
    return Link(a=a, b=b, gbps=gbps, delay_ns=delay_ns)


def _rates(gbps: Rates, hosts: int) -> list[float]:
    rates = [float(gbps)] * hosts if isinstance(gbps, int | float) else [float(g) for g in gbps]
    if len(rates) != hosts:
        raise ConfigError(f"topology.gbps: {len(rates)} rates for {hosts} hosts")
    return rates


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"topology.{name} = {size}: must be at least 1")


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} = {value!r}: must be a number") from error


def _whole(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or number < 0:
        raise ConfigError(f"{where} = {value!r}: must be a whole number")
    return int(number)
