"""Cluster files from what operators already have. Each reader returns the plain data of a cluster file, for a person to
check and `planner.cluster.parse_cluster` to read; what a source does not say comes from `Defaults`, and is stated.

`nvidia_smi`: `nvidia-smi topo -m`, one text for each host. `nccl_xml`: NCCL's topology dump, one for each host.
`graph`: a graph file, or a networkx graph. `sonic`: config_db.json or minigraph.xml, one for each switch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.planner.importers.defaults import Defaults
from bywash.planner.importers.graph import from_graph_file, from_networkx
from bywash.planner.importers.nccl_xml import from_nccl_xml
from bywash.planner.importers.nvidia_smi import from_topo_text
from bywash.planner.importers.sonic import from_sonic

__all__ = [
    "Defaults",
    "from_graph_file",
    "from_nccl_xml",
    "from_networkx",
    "from_sonic",
    "from_topo_text",
    "read_cluster",
]


def read_cluster(kind: str, files: Sequence[Path], defaults: Defaults) -> dict[str, Any]:
    """The data of a cluster file from files of one kind.

    Raises:
        ConfigError: a file that cannot be read, or is not of that kind; the message names it.
    """
    if kind == "graph":
        if len(files) != 1:
            raise ConfigError(f"import-cluster graph: {len(files)} files; give one, with all hosts and switches in it")
        return from_graph_file(files[0], defaults)
    texts = [(file.stem, read_text(file)) for file in files]
    if kind == "sonic":
        return from_sonic(texts, defaults)
    reader = from_topo_text if kind == "nvidia-smi" else from_nccl_xml
    nodes = [reader(name, text, defaults) for name, text in texts]
    data: dict[str, Any] = {"name": "imported", "nodes": nodes}
    if len(nodes) > 1:
        if any(not node["nics"] for node in nodes):
            raise ConfigError(f"import-cluster {kind}: a host without NICs among {len(nodes)}; nothing joins them")
        data["fabric"] = {"kind": "one-switch"}  # hosts' own files say nothing of switches
    return data


def read_text(file: Path) -> str:
    """Raises `ConfigError` naming the file."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot read it: {getattr(error, 'strerror', None) or error}") from error
