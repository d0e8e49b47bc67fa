"""Flows in a file: CSV, one message a line, for traffic that no pattern describes.

The first line names the columns: `src,dst,bytes` and any of `start_ps,class,qp,phase,after,rate_gbps,background`, as in
`Flows`. Written by `bywash fabric traffic`, read for `traffic: [{kind: flows, path: FILE, gaps_us: [...]}]`; gaps and
barrier stand in the scenario.
"""

from pathlib import Path
from typing import Any

import numpy as np

from bywash.errors import ConfigError
from bywash.fabric.traffic import PS_PER_US, Flows

_NEEDED = ("src", "dst", "bytes")
_FIELDS = {
    "src": "src_F",
    "dst": "dst_F",
    "bytes": "bytes_F",
    "start_ps": "start_ps_F",
    "class": "class_F",
    "qp": "qp_F",
    "phase": "phase_F",
    "after": "after_F",
    "rate_gbps": "rate_gbps_F",
    "background": "background_F",
}
MAX_GAP_US = 1e6
_EXACT = 1 << 53  # whole numbers are read as float64


def save_flows(flows: Flows, path: Path) -> None:
    """Write all columns that differ from their default. `load_flows` gives the same flows back, bit for bit."""
    bare = Flows(src_F=flows.src_F, dst_F=flows.dst_F, bytes_F=flows.bytes_F)
    names = [n for n, f in _FIELDS.items() if n in _NEEDED or (getattr(flows, f) != getattr(bare, f)).any()]
    columns = [getattr(flows, _FIELDS[name]) for name in names]
    rows = zip(
        *(column.astype(np.int64).tolist() if column.dtype == np.bool_ else column.tolist() for column in columns)
    )
    lines = [",".join(names)] + [",".join(map(repr, row)) for row in rows]  # repr keeps every bit of a float
    path.write_text("\n".join(lines) + "\n")


def load_flows(path: Path, *, gaps_us: list[float] | None = None, traffic_class: int = 0) -> Flows:
    """Read a file of flows; `gaps_us` is the compute time before each phase, `traffic_class` for files without classes.

    Raises:
        ConfigError: naming the file, and the line or column that is wrong.
    """
    try:
        with open(path) as file:
            names = [name.strip() for name in file.readline().split(",")]
            table = np.loadtxt(file, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: is no CSV of flows: {error}") from error
    wrong = [n for n in names if n not in _FIELDS] or [n for n in _NEEDED if n not in names]
    if wrong or len(set(names)) != len(names):
        raise ConfigError(
            f"{path}: line 1 must name {', '.join(_NEEDED)}, and may name {', '.join(list(_FIELDS)[3:])}; each once"
        )
    if table.size and table.shape[1] != len(names):
        raise ConfigError(f"{path}: {table.shape[1]} columns under {len(names)} names")
    table = table.reshape(-1, len(names))
    columns: dict[str, Any] = {"class_F": np.full(len(table), traffic_class)}
    for at, name in enumerate(names):
        value = table[:, at]
        if name != "rate_gbps" and not ((value == np.floor(value)) & (np.abs(value) < _EXACT)).all():
            raise ConfigError(f"{path}: column {name} must hold whole numbers")
        columns[_FIELDS[name]] = value if name == "rate_gbps" else value.astype(np.int64)
    gaps = gaps_us or []
    for at, gap in enumerate(gaps):
        if not 0 <= gap <= MAX_GAP_US:
            raise ConfigError(f"traffic.gaps_us[{at}] = {gap:g}: must be from 0 to {MAX_GAP_US:g}")
    return Flows(**columns, gap_ps_P=np.array([round(gap * PS_PER_US) for gap in gaps], np.int64))
