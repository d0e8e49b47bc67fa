"""Reads expert counts that other systems dump as JSON, so that they can be summarised without a trace.

Shapes: L layers, E experts. Knows nothing of tokens or steps. The command line calls it.

Accepted: a list of layers, each a list of E numbers; or an object with that list under `logical_count`, as
SGLang's expert-distribution recorder writes it. A layer of zeros is a dense one and left out.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bywash.errors import TraceError

_MOST = 1 << 53  # beyond it float64 skips whole numbers


def load_counts(path: Path) -> tuple[tuple[int, ...], NDArray[np.float64]]:
    """Read a counts file.

    Returns:
        The numbers of the layers that have counts, and their counts, float64 [L, E].

    Raises:
        TraceError: naming the file and the entry that is wrong.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: cannot read the counts: {error.strerror or error}") from error
    except RecursionError as error:
        raise TraceError(f"{path}: is nested too deeply; give a trace file or a JSON list of counts") from error
    except ValueError as error:
        raise TraceError(f"{path}: is not JSON ({error}); give a trace file or a JSON list of counts") from error
    field, rows = "counts", data
    if isinstance(data, dict):
        field, rows = "logical_count", data.get("logical_count")
    if not isinstance(rows, list) or not rows:
        raise TraceError(f"{path}: {field}: must be a list of layers, each a list of one number per expert")
    experts = len(rows[0]) if isinstance(rows[0], list) else 0
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or not row or not all(_is_count(c) for c in row):
            raise TraceError(
                f"{path}: {field}[{layer}]: must be a list of numbers, finite and not negative (2**53 at most)"
            )
        if len(row) != experts:
            raise TraceError(f"{path}: {field}[{layer}]: has {len(row)} experts, layer 0 has {experts}")
    counts_LE = np.array(rows, np.float64)
    layers = tuple(np.flatnonzero(counts_LE.any(axis=1)).tolist())
    if not layers:
        raise TraceError(f"{path}: {field}: all counts are zero; record with traffic")
    return layers, counts_LE[list(layers)]


def _is_count(value: Any) -> bool:
    """Zero, or a number whose sums and ratios stay finite."""
    return type(value) in (int, float) and (value == 0 or 1e-9 <= value <= _MOST)
