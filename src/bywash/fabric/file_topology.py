"""The topology section of a scenario file, to a `Topology`: which builder, lengths to delays, NIC generations.

Called by `files`, and by other readers of files with a topology in them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.fabric import builders
from bywash.fabric.schema import NicRate, TopologyFile
from bywash.fabric.topology import NS_PER_METRE, Topology

_BUILDERS: dict[str, tuple[Callable[..., Topology], tuple[str, ...]]] = {
    "leaf-spine": (builders.leaf_spine, ("hosts", "leaves", "spines")),
    "fat-tree": (builders.fat_tree, ("k",)),
    "rail-optimised": (builders.rail_optimised, ("servers", "spines")),
    "ring": (builders.ring, ("switches",)),
    "mesh": (builders.mesh, ("rows", "columns")),
    "single-switch": (builders.single_switch, ("hosts",)),
    "file": (builders.graph_file, ("path",)),
}

_LINKS: dict[str, Callable[[Mapping[str, int]], int]] = {
    "leaf-spine": lambda n: n["hosts"] + n["leaves"] * n["spines"] * n["links_per_pair"],
    "fat-tree": lambda n: 3 * n["k"] ** 3 // 4,
    "rail-optimised": lambda n: n["nics_per_server"] * (n["servers"] + n["spines"] * n["links_per_pair"]),
    "ring": lambda n: n["switches"] * (1 + n["hosts_per_switch"]),
    "mesh": lambda n: n["rows"] * n["columns"] * (2 + n["hosts_per_switch"]),
    "single-switch": lambda n: n["hosts"],
}
MOST_LINKS = 1_000_000
"""Beyond what any command gets through; a number with too many digits must not take the machine's memory."""


def build_topology(file: TopologyFile, directory: Path = Path()) -> Topology:
    """Call the builder that a topology section names."""
    builder, needed = _BUILDERS[file.kind]
    given = {k: v for k, v in file.model_dump(exclude={"kind", "nics"}).items() if v is not None and v != []}
    for length, delay in (("length_m", "delay_ns"), ("uplink_length_m", "uplink_delay_ns")):
        if length in given:
            if delay in given:
                raise ConfigError(f"topology.{length}: give it or {delay}, not both")
            given[delay] = given.pop(length) * NS_PER_METRE
    for name in needed:
        if name not in given:
            raise ConfigError(f"topology.{name}: must be given for kind {file.kind}")
    if file.kind in ("ring", "mesh") and "hosts" in given:
        given["hosts_per_switch"] = _hosts_per_switch(given.pop("hosts"), given)
    known = builder.__kwdefaults__ or {}
    for name in given:
        if name not in known and name not in needed:
            raise ConfigError(f"topology.{name}: kind {file.kind} has no such field")
    if file.kind in _LINKS and (links := _LINKS[file.kind](known | given)) > MOST_LINKS:
        raise ConfigError(f"topology: {file.kind} of {links:,} links; at most {MOST_LINKS:,} are supported")
    if file.kind == "file":
        given["path"] = str(directory / given["path"])
    made = builder(**given)
    return _with_nics(made, builder, given, file.nics) if file.nics else made


def _hosts_per_switch(hosts: int, given: Mapping[str, Any]) -> int:
    """`hosts` of a ring or mesh, all in all, spread evenly."""
    switches = given["switches"] if "switches" in given else given["rows"] * given["columns"]
    if "hosts_per_switch" in given:
        raise ConfigError("topology.hosts: give it or hosts_per_switch, not both")
    if switches < 1 or hosts < 1 or hosts % switches:
        raise ConfigError(f"topology.hosts = {hosts}: must be a multiple of the {switches} switches")
    return int(hosts // switches)


def _with_nics(
    made: Topology, builder: Callable[..., Topology], given: dict[str, Any], nics: list[NicRate]
) -> Topology:
    if builder is builders.graph_file:
        raise ConfigError("topology.nics: a graph file has the rates of its links")
    rates = [made.host_gbps(host) for host in range(made.hosts)]
    base = float(given.get("gbps", 100.0))
    for i, one in enumerate(nics):
        for host in host_numbers(one.hosts, made.hosts, f"topology.nics[{i}].hosts"):
            rates[host] = one.gbps
    if "uplink_gbps" in (builder.__kwdefaults__ or {}):
        given = {"uplink_gbps": base} | given
    return builder(**given | {"gbps": rates})


def host_numbers(text: str | int | Sequence[int], hosts: int, where: str) -> list[int]:
    """`0-15`, `3`, `0-3 8-11` or a list, to host numbers."""
    if isinstance(text, list | tuple):
        chosen = [int(host) for host in text]
    else:
        chosen = []
        for part in str(text).replace("/", " ").split():
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            if match is None:
                raise ConfigError(f"{where} = {text!r}: must be host numbers such as 0-15")
            first, last = int(match[1]), int(match[2] or match[1])
            if last >= hosts:
                raise ConfigError(f"{where} = {text!r}: hosts are 0 to {hosts - 1}")
            chosen += range(first, last + 1)
    if not chosen or max(chosen) >= hosts or min(chosen) < 0:
        raise ConfigError(f"{where} = {text!r}: hosts are 0 to {hosts - 1}")
    return chosen
