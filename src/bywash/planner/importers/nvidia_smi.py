"""One host from the text of `nvidia-smi topo -m`: how many GPUs, how wide their NVLinks, how many NICs beside them."""

import re
from typing import Any

from bywash.errors import ConfigError
from bywash.planner.importers.defaults import Defaults

LINK_GBYTES_PER_S = 25.0
"""Of one NVLink of generations 3 and 4, one direction: NV12 is 300 GB/s (A100), NV18 450 GB/s (H100)."""


def from_topo_text(name: str, text: str, defaults: Defaults) -> dict[str, Any]:
    """A node of a cluster file.

    Args:
        name: of the host.
        text: of `nvidia-smi topo -m`, with or without its legend.
        defaults: generation and NIC rate, which the text does not say.

    Raises:
        ConfigError: no matrix in the text, or rows that do not fit its head.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    head = next((line.split() for line in lines if re.match(r"\s+GPU0\b", line)), None)
    if head is None:
        raise ConfigError(f"{name}: is no output of `nvidia-smi topo -m`: there is no line with GPU0, GPU1, ... in it")
    columns = [word for word in head if re.fullmatch(r"GPU\d+|NIC\d+|mlx\w+", word)]
    gpus = [word for word in columns if word.startswith("GPU")]
    rows = {line.split()[0]: line.split()[1:] for line in lines if re.match(r"GPU\d+\s", line)}
    for gpu in gpus:
        if gpu not in rows or len(rows[gpu]) < len(columns):
            raise ConfigError(f"{name}: the row of {gpu} has fewer cells than the {len(columns)} columns of the head")
    node: dict[str, Any] = {"name": name, "device": defaults.device, "devices": len(gpus)}
    rate = _peer_gbytes_per_s(gpus, columns, rows)
    if rate:
        node["peer_gbytes_per_s"] = rate
    near = _near_nics(columns, gpus, rows)
    node["nics"] = [{"gbps": defaults.gbps, "count": near}] if near else []
    return node


def _peer_gbytes_per_s(gpus: list[str], columns: list[str], rows: dict[str, list[str]]) -> float:
    """Of the GPU with least: through a switch every pair shows all links, without one each pair has its own."""
    rates = []
    for gpu in gpus:
        cells = [rows[gpu][columns.index(other)] for other in gpus if other != gpu]
        links = [int(match[1]) for match in (re.fullmatch(r"NV(\d+)", cell) for cell in cells) if match]
        switched = len(links) == len(cells) and len(set(links)) == 1 and len(cells) > 1 and links[0] > 4
        rates.append((links[0] if switched else sum(links)) * LINK_GBYTES_PER_S if links else 0.0)
    return min(rates, default=0.0) if len(gpus) > 1 else 0.0


def _near_nics(columns: list[str], gpus: list[str], rows: dict[str, list[str]]) -> int:
    """NICs on a PCIe bridge with a GPU, at most one for each; all of them where none is so near (storage NICs too)."""
    nics = [word for word in columns if not word.startswith("GPU")]
    near = [nic for nic in nics if any(rows[gpu][columns.index(nic)] in ("PIX", "PXB") for gpu in gpus)]
    return min(len(gpus), len(near or nics))
