"""Rates that kernels reached: our own measurements, and how close a formula through them comes.

The time of a grouped product is `(flop_us ** p + read_us ** p) ** (1 / p)`, p = 3: the longer of arithmetic and reading
weights, with a bend where both count. `MEASURED` holds the points of docs/benchmarks.md; rates are fitted to them, and
`worst_error` is asserted by a test. Other generations take the measured share of their data sheet's peak, and are
labelled roofline. Knows nothing of models or clusters; `compute` calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BEND = 3.0

Source = Literal["measured", "roofline", "simulated", "bound"]
"""`measured`: a formula through our own measurements on that device. `roofline`: a data sheet's peak times the share
that was measured elsewhere. `simulated`: the fabric simulator on the very traffic. `bound`: the busiest link alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A time in us, where it comes from, and how it comes about."""

    us: float
    source: Source
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPoint:
    """Measured experts of one layer on one device (gate_up, SwiGLU, down).

    Attributes:
        experts, rows: local experts, and rows over all of them.
        hidden, intermediate: of an expert.
        us: what it took.
        where: which run.
    """

    device: str
    dtype: str
    experts: int
    rows: int
    hidden: int
    intermediate: int
    us: float
    where: str


_LAYER, _KERNEL = "docs/benchmarks.md, whole layer", "docs/benchmarks.md, expert kernels"
MEASURED: tuple[ExpertPoint, ...] = tuple(
    ExpertPoint(
        device="h200", dtype=dtype, experts=experts, rows=rows, hidden=7168, intermediate=2048, us=us, where=where
    )
    for dtype, experts, rows, us, where in (
        ("bf16", 128, 32_768, 5205.0, _LAYER),
        ("bf16", 32, 32_768, 4869.0, _LAYER),
        ("bf16", 8, 1_024, 194.1, _LAYER),
        ("bf16", 128, 1_024, 2563.0, _LAYER),
        ("bf16", 128, 32_666, 4989.0, _KERNEL),
        ("bf16", 32, 33_012, 4851.0, _KERNEL),
        ("bf16", 8, 1_015, 195.7, _KERNEL),
        ("fp8", 128, 32_768, 4738.0, _LAYER),
        ("fp8", 32, 32_768, 3773.0, _LAYER),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What grouped products reach. `tile_rows`: rows of an expert are computed in whole tiles of so many."""

    tflops: float
    gbytes_per_s: float
    tile_rows: int
    source: Source


_FITTED: dict[tuple[str, str], tuple[float, float, int]] = {
    ("h200", "bf16"): (600.0, 4400.0, 1),
    ("h200", "fp8"): (790.0, 4400.0, 128),
}
"""(device, dtype) -> TFLOP/s, GB/s, tile. fp8 is the Triton kernel with tiles of 128 rows; bf16 the Hopper one."""
_PEAKS = {("h200", "bf16"): (989.0, 4800.0), ("h200", "fp8"): (1979.0, 4800.0)}
DENSE_SHARE = 0.80
"""Dense products over the peak: 786 to 790 of 989 TFLOP/s on H200."""
READ_SHARE = 4400.0 / 4800.0
"""Reading weights over the peak, in decode on H200."""
PEER_SHARE = 348.0 / 450.0
"""Rows written into peers' memory over NVLink's name (`exchange.cost`)."""
STAGE_START_US = 5.0
"""Of a compute stage in a captured graph."""
CPU_STAGE_START_US = 100.0


def expert_rates(device: str, dtype: str, tflops: float, gbytes_per_s: float) -> Rates:
    """Measured rates of the device, or the share of its peaks that the same dtype reached on H200."""
    kind = "fp8" if dtype == "fp8" else "bf16"
    if (device, kind) in _FITTED:
        flops, read, tile = _FITTED[device, kind]
        return Rates(tflops=flops, gbytes_per_s=read, tile_rows=tile, source="measured")
    flops, read, tile = _FITTED["h200", kind]
    peak_flops, peak_read = _PEAKS["h200", kind]
    return Rates(
        tflops=tflops * flops / peak_flops,
        gbytes_per_s=gbytes_per_s * read / peak_read,
        tile_rows=tile,
        source="roofline",
    )


def bent(flop_us: float, read_us: float) -> float:
    """The longer of the two, and a little more where they are alike."""
    return float((flop_us**BEND + read_us**BEND) ** (1 / BEND))


def grouped_us(rows: float, experts: float, weights: int, weight_bytes: float, rates: Rates) -> float:
    """Grouped products of a rank's experts, without the start of the stage.

    Args:
        rows: that the rank computes; in whole tiles that is half a tile more for each expert, on average.
        experts: that have any rows.
        weights, weight_bytes: numbers in an expert's matrices, and their bytes.
        rates: see there.
    """
    padded = rows + experts * (rates.tile_rows - 1) / 2
    return bent(2 * padded * weights / rates.tflops * 1e-6, experts * weight_bytes / rates.gbytes_per_s * 1e-3)


def worst_error(points: Sequence[ExpertPoint] = MEASURED) -> float:
    """The largest relative error of the formula on measured points."""
    worst = 0.0
    for one in points:
        rates = expert_rates(one.device, one.dtype, 989.0, 4800.0)
        weights = 3 * one.hidden * one.intermediate
        item = 1.0 if one.dtype == "fp8" else 2.0
        worst = max(worst, abs(grouped_us(one.rows, one.experts, weights, weights * item, rates) / one.us - 1))
    return worst
