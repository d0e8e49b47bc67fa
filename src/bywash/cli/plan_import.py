"""`bywash plan import-cluster`, `show-cluster` and `schema`: cluster files made, shown back, described to editors."""

from pathlib import Path
from typing import Annotated

import typer

from bywash.cli.output import printing, replaceable
from bywash.errors import ConfigError

KINDS = ("nvidia-smi", "nccl-xml", "graph", "sonic")


def import_cluster(
    kind: Annotated[str, typer.Argument(help="nvidia-smi (topo -m), nccl-xml, graph (GraphML, JSON, YAML), or sonic")],
    files: Annotated[list[Path], typer.Argument(help="one for each host (nvidia-smi, nccl-xml) or switch (sonic)")],
    out: Annotated[Path, typer.Option(help="the cluster file to write (.yaml)")],
    device: Annotated[str, typer.Option(help="generation of the devices, where the files do not say it")] = "h100",
    gbps: Annotated[float, typer.Option(help="rate of a NIC, where the files do not say it")] = 400.0,
    devices: Annotated[int, typer.Option(help="of a host, where the files do not say it")] = 8,
) -> None:
    """Write a cluster file from `nvidia-smi topo -m` text, NCCL topology XML, a graph, or SONiC's config_db."""
    import yaml

    from bywash.planner.cluster import parse_cluster
    from bywash.planner.cluster_text import cluster_text
    from bywash.planner.importers import Defaults, read_cluster

    if kind not in KINDS:
        raise ConfigError(f"import-cluster {kind}: choose one of {', '.join(KINDS)}")
    replaceable(out, "--out")
    data = read_cluster(kind, files, Defaults(device=device, gbps=gbps, devices=devices))
    cluster = parse_cluster(data, note=f"imported from {kind}")
    try:
        out.write_text(f"# Imported from {kind}: {', '.join(str(file.name) for file in files)}; check it.\n"
                       + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120),
                       "utf-8", errors="replace")  # fmt: skip
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write it: {error.strerror or error}") from error
    with printing():
        print(cluster_text(cluster))


def show_cluster(file: Annotated[Path, typer.Argument(help="cluster file (YAML)")]) -> None:
    """Show a cluster file back as tables: hosts, cables of every switch, Gb/s between kinds of hosts."""
    from bywash.planner.cluster import load_cluster
    from bywash.planner.cluster_text import cluster_text

    with printing():
        print(cluster_text(load_cluster(file)))


def schema(
    name: Annotated[str, typer.Argument(help="cluster, workload or target")] = "cluster",
) -> None:
    """Print the JSON Schema of a file, for editors."""
    import json

    from bywash.planner.schema import SCHEMAS, json_schema

    if name not in SCHEMAS:
        raise ConfigError(f"schema {name}: choose one of {', '.join(SCHEMAS)}")
    with printing():
        print(json.dumps(json_schema(name), indent=2))
