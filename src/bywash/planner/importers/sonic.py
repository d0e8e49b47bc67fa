"""A cluster from what SONiC switches know of their neighbours: `config_db.json` (DEVICE_NEIGHBOR, PORT) or
`minigraph.xml` (DeviceInterfaceLinks), one file for each switch.

A neighbour that is no switch of the given files and no device of a switch's type is a host. A cable between two
switches stands in both files and counts once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from bywash.errors import ConfigError
from bywash.planner.importers.defaults import Defaults

_SWITCH_TYPES = ("router", "tor", "leaf", "spine", "switch")


@dataclass(frozen=True, slots=True)
class _End:
    """One cable as a switch sees it; `gbps` 0 where it does not say."""

    switch: str
    port: str
    neighbour: str
    neighbour_port: str
    gbps: float
    is_switch: bool


def from_sonic(texts: Sequence[tuple[str, str]], defaults: Defaults) -> dict[str, Any]:
    """The data of a cluster file.

    Args:
        texts: (name of the file without its ending, text) for each switch.
        defaults: generation and devices of a host, and rates that no file says.

    Raises:
        ConfigError: a file that is neither, or names no neighbour; or no host anywhere.
    """
    ends = [end for name, text in texts for end in _ends(name, text)]
    switches = {end.switch for end in ends} | {end.neighbour for end in ends if end.is_switch}
    hosts: dict[str, list[dict[str, Any]]] = {}
    cables: dict[tuple[str, str, float], set[tuple[str, ...]]] = {}
    for end in ends:
        gbps = end.gbps or defaults.gbps
        if end.neighbour not in switches:
            hosts.setdefault(end.neighbour, []).append({"gbps": gbps, "switch": end.switch})
            continue
        a, b = sorted((end.switch, end.neighbour))
        ports = sorted(((end.switch, end.port), (end.neighbour, end.neighbour_port)))
        cables.setdefault((a, b, gbps), set()).add(tuple(part for port in ports for part in port))
    if not hosts:
        raise ConfigError("import-cluster sonic: no switch has a neighbour that is a host (type Server)")
    nodes = [
        {"name": name, "device": defaults.device, "devices": max(defaults.devices, len(nics)), "nics": nics}
        for name, nics in sorted(hosts.items())
    ]
    joined = [{"a": a, "b": b, "gbps": gbps, "count": len(found)} for (a, b, gbps), found in sorted(cables.items())]
    return {"name": "imported", "nodes": nodes, "fabric": {"kind": "cables", "cables": joined}}


def _ends(name: str, text: str) -> list[_End]:
    found = _from_minigraph(name, text) if text.lstrip().startswith("<") else _from_config_db(name, text)
    if not found:
        raise ConfigError(f"{name}: names no neighbour (DEVICE_NEIGHBOR, or DeviceInterfaceLinks of a minigraph)")
    return found


def _from_config_db(name: str, text: str) -> list[_End]:
    try:
        data = json.loads(text)
        metadata = data.get("DEVICE_METADATA", {}).get("localhost", {})
        types = {key: str(one.get("type", "")) for key, one in data.get("DEVICE_NEIGHBOR_METADATA", {}).items()}
        ports = data.get("PORT", {})
        switch = str(metadata.get("hostname", name))
        return [
            _End(
                switch,
                port,
                str(one["name"]),
                str(one.get("port", "")),
                float(ports.get(port, {}).get("speed", 0)) / 1000,
                any(word in types.get(str(one["name"]), "").lower() for word in _SWITCH_TYPES),
            )
            for port, one in data.get("DEVICE_NEIGHBOR", {}).items()
        ]
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{name}: cannot be read as config_db.json: {error!r}") from error


def _from_minigraph(name: str, text: str) -> list[_End]:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"{name}: is no XML: {error}") from error
    own = next((one.text or "" for one in root if _tag(one) == "Hostname"), name)
    types = {_child(one, "Hostname"): one.get(_XSI_TYPE, "") for one in root.iter() if _tag(one) == "Device"}
    found = []
    for link in root.iter():
        if _tag(link) != "DeviceLinkBase":
            continue
        a, b = (
            (_child(link, "StartDevice"), _child(link, "StartPort")),
            (_child(link, "EndDevice"), _child(link, "EndPort")),
        )
        if own not in (a[0], b[0]):
            continue
        near, far = (a, b) if a[0] == own else (b, a)
        gbps = _mbps(_child(link, "Bandwidth"), name) / 1000
        is_switch = any(word in types.get(far[0], "").lower() for word in _SWITCH_TYPES)
        found.append(_End(own, near[1], far[0], far[1], gbps, is_switch))
    return found


def _mbps(text: str, name: str) -> float:
    try:
        return float(text or 0)
    except ValueError as error:
        raise ConfigError(f"{name}: <Bandwidth>{text}</Bandwidth>: must be a number, in Mb/s") from error


_XSI_TYPE = "{http://www.w3.org/2001/XMLSchema-instance}type"


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _child(element: ElementTree.Element, tag: str) -> str:
    return next(((one.text or "").strip() for one in element if _tag(one) == tag), "")
