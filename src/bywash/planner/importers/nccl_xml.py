"""One host from NCCL's topology dump (`NCCL_TOPO_DUMP_FILE`): GPUs, NVLinks, NICs with rates."""

from typing import Any
from xml.etree import ElementTree

from bywash.errors import ConfigError
from bywash.planner.importers.defaults import Defaults
from bywash.planner.importers.nvidia_smi import LINK_GBYTES_PER_S

_GENERATIONS = {80: "a100", 89: "l40s", 90: "h100", 100: "b200"}
"""Compute capability to generation; H200 has H100's, so that memory is the data sheet's of the smaller one."""


def from_nccl_xml(name: str, text: str, defaults: Defaults) -> dict[str, Any]:
    """A node of a cluster file.

    Raises:
        ConfigError: no XML, or no GPU in it.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"{name}: is no XML: {error}") from error
    gpus = list(root.iter("gpu"))
    if root.tag != "system" or not gpus:
        raise ConfigError(f"{name}: is no topology dump of NCCL: there is no <gpu> under <system>")
    kinds = {_GENERATIONS.get(_whole(gpu, "sm", name), defaults.device) for gpu in gpus}
    if len(kinds) > 1:
        raise ConfigError(f"{name}: GPUs of several generations, {', '.join(sorted(kinds))}; a host has one kind")
    node: dict[str, Any] = {"name": name, "device": kinds.pop(), "devices": len(gpus)}
    links = [sum(_whole(link, "count", name) for link in gpu.iter("nvlink")) for gpu in gpus]
    if min(links):
        node["peer_gbytes_per_s"] = min(links) * LINK_GBYTES_PER_S
    node["nics"] = _nics(root, len(gpus), name)
    return node


def _nics(root: ElementTree.Element, most: int, name: str) -> list[dict[str, Any]]:
    """Ports by rate; NCCL's `speed` is in Mb/s. Sockets (`eth0`, 10 Gb/s and less) carry no rows."""
    ports: dict[tuple[str, str], float] = {}
    for net in root.iter("net"):
        gbps = _whole(net, "speed", name) / 1000
        if gbps > 10:
            ports[net.get("name", "") + net.get("dev", ""), net.get("port", "0")] = gbps
    rates = list(ports.values())[:most]
    return [{"gbps": rate, "count": rates.count(rate)} for rate in dict.fromkeys(rates)]


def _whole(element: ElementTree.Element, attribute: str, name: str) -> int:
    text = element.get(attribute, "0")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name}: <{element.tag} {attribute}={text!r}>: must be a whole number") from error
