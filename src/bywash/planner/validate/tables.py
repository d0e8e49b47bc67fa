"""Public measurements on disk: AIConfigurator's tables, as they lie in its package or a folder. Reading only.

`deepep_rows` are DeepEP's kernels on H100, `serving_rows` the measured serving points. The tables are Apache-2.0 and
never part of bywash. Nothing else reads them.
"""

import csv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.planner.validate.deepep import Measured

SERVING_FILE = "silicon_sample.csv"
DEEPEP_FILES = "h100_sxm/comm/sglang/*/wideep_deepep_{}_perf.parquet"
PACKAGE = "aiconfigurator_core"


def find_tables(folder: Path | None) -> Path | None:
    """The folder with the serving file, within `folder` or the installed package; None where nothing is installed.

    Raises:
        ConfigError: `folder` was given and has no such file.
    """
    if folder is None:
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.rglob(SERVING_FILE))
    if not found:
        raise ConfigError(f"--data {folder}: has no {SERVING_FILE}; give a folder with AIConfigurator's `systems`")
    return found[0].parent


def deepep_rows(tables: Path) -> list[Measured]:
    """Both kinds of kernels, of the version that was measured on several nodes.

    Of normal kernels the rows with most multiprocessors, transmit time alone: at 8 nodes notification takes longer.
    """
    measured: list[Measured] = []
    for row in _parquet(tables, "ll"):
        for half in ("dispatch", "combine"):
            measured.append(_row(row, "low-latency", half, f"{half}_avg_t_us"))
    normal = list(_parquet(tables, "normal"))
    most = {
        n: max(row["dispatch_sms"] for row in normal if row["node_num"] == n) for n in {r["node_num"] for r in normal}
    }
    for row in normal:
        if row["dispatch_sms"] == most[row["node_num"]]:
            for half in ("dispatch", "combine"):
                measured.append(_row(row, "normal", half, f"{half}_transmit_us"))
    return measured


def _row(row: dict[str, Any], mode: Any, half: Any, column: str) -> Measured:
    return Measured(
        mode=mode, half=half, nodes=row["node_num"], experts=row["num_experts"], tokens=row["num_token"], us=row[column]
    )


def _parquet(tables: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Rows of the file that goes beyond one node."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            "validate: pip install 'bywash[planner]' (pyarrow is missing, which reads the tables)"
        ) from error
    for file in sorted(tables.rglob(DEEPEP_FILES.format(kind))):
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        if max(row["node_num"] for row in rows) > 1:
            yield from rows
            return
    raise ConfigError(f"{tables}: has no {DEEPEP_FILES.format(kind)} of several nodes")


def serving_rows(tables: Path) -> list[dict[str, str]]:
    """All points, as text."""
    try:
        with open(tables / SERVING_FILE, newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{tables / SERVING_FILE}: cannot read it: {error}") from error
