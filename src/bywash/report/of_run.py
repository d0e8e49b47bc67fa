"""A finished run as a report, from the document of `bywash run --json`.

Shapes: L layers, R ranks. pydantic reads the fields that are shown and leaves the others. Knows nothing of drawing.
`sources` calls it.
"""

from typing import Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from bywash.errors import ConfigError
from bywash.report.document import Bars, Block, Heat, Lines, Report, Section, Series, Table

HEAT_RANKS = 16
NAMES = {
    "imbalance_max_over_mean": "busiest rank over the mean, mean of layers",
    "imbalance_worst_layer": "busiest rank over the mean, worst layer",
    "rows_sent": "rows sent",
    "wire_bytes": "bytes on the wire",
    "logical_bytes": "bytes of (token, expert) rows out and back",
}


class _Phase(BaseModel):
    split: str
    why: str
    communication_fraction: float
    exposed_fraction: float
    hidden_share: float


class _Overlap(BaseModel):
    prefill: _Phase
    decode: _Phase


class _Layer(BaseModel):
    layer: int
    rows_home: int
    rows_spilled: int
    rows_waited: int
    busiest_home: int
    busiest: int
    fetches: int
    most_waves: int


class _Overflow(BaseModel):
    slots: int
    imbalance_at_home: float
    imbalance: float
    layers: list[_Layer]


class _Run(BaseModel):
    model: str
    ranks: int = Field(ge=1)
    exchange: str
    dtype: str
    emulated: str | None = None
    prompts: int
    generated_tokens: int
    rows_sent: int
    wire_bytes: int
    logical_bytes: int
    imbalance_max_over_mean: float
    imbalance_worst_layer: float
    rows_per_layer_and_rank: list[list[int]]
    prefill_s: float
    decode_s: float
    load_s: float
    tokens_per_s: float
    overlap: _Overlap | None = None
    overflow: _Overflow | None = None


def run_report(data: Any, where: str) -> Report:
    """A page of a run. Raises `ConfigError` naming `where` and the field: not a document of `bywash run --json`."""
    try:
        run = _Run.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {path}: {first['msg']}; is it from `bywash run --json`?") from error
    widths = {len(rows) for rows in run.rows_per_layer_and_rank}
    if widths != {run.ranks}:
        raise ConfigError(f"{where}: rows_per_layer_and_rank: must have {run.ranks} numbers for every layer")
    emulated = f" {run.emulated}: times are emulated." if run.emulated else ""
    return Report(
        title=f"Run of {run.model}",
        headline=f"{run.generated_tokens:,} tokens for {run.prompts} prompts on {run.ranks} ranks: "
        f"{run.tokens_per_s:,.4g} tokens/s.{emulated}",
        facts=(
            ("exchange", run.exchange),
            ("dtype", run.dtype),
            ("prefill", f"{run.prefill_s:.3g} s"),
            ("decode", f"{run.decode_s:.3g} s"),
            ("loading", f"{run.load_s:.3g} s"),
        ),
        sections=tuple(_sections(run)),
    )


def _sections(run: _Run) -> list[Section]:
    blocks: list[Block] = [_skew(run), _rows(run), _numbers(run)]
    sections = [Section(title="Measured load", text="Expert rows, all steps together.", blocks=tuple(blocks))]
    if run.overlap is not None:
        sections.append(Section(title="Measured overlap", blocks=(_overlap(run.overlap),)))
    if run.overflow is not None:
        sections.append(_overflow(run.overflow))
    return sections


def _skew(run: _Run) -> Bars | Lines:
    rows_LR = np.array(run.rows_per_layer_and_rank, np.float64)
    busiest_L = rows_LR.max(axis=1) / np.maximum(rows_LR.mean(axis=1), 1e-9)
    title, note = "Skew by layer, as run", "rows of the busiest rank over the mean"
    if len(busiest_L) <= 12:
        return Bars(
            title=title, names=tuple(f"layer {i}" for i in range(len(busiest_L))), values=tuple(busiest_L.tolist()),
            unit="x", note=note,
        )  # fmt: skip
    x, y = tuple(float(i) for i in range(len(busiest_L))), tuple(busiest_L.tolist())
    series = (Series(name="as run", y=y),)
    return Lines(title=title, x=x, series=series, x_name="layer", y_name="busiest / mean", note=note)


def _rows(run: _Run) -> Heat | Table:
    if run.ranks <= HEAT_RANKS:
        return Heat(
            title="Rows of each rank",
            rows=tuple(f"layer {i}" for i in range(len(run.rows_per_layer_and_rank))),
            columns=tuple(f"rank {r}" for r in range(run.ranks)),
            values=tuple(tuple(float(n) for n in rows) for rows in run.rows_per_layer_and_rank),
            unit="rows",
        )
    totals = np.array(run.rows_per_layer_and_rank).sum(axis=0)
    rows = tuple((f"rank {r}", f"{int(n):,}") for r, n in enumerate(totals))
    return Table(title="Rows of each rank, all layers", columns=("rank", "rows"), rows=rows)


def _numbers(run: _Run) -> Table:
    rows = tuple((words, f"{getattr(run, name):,}") for name, words in NAMES.items())
    return Table(title="Counts", columns=("what", "value"), rows=rows)


def _overlap(overlap: _Overlap) -> Table:
    return Table(
        columns=("phase", "split", "communication", "exposed", "hidden", "why"),
        rows=tuple(
            (name, one.split, f"{one.communication_fraction:.1%}", f"{one.exposed_fraction:.1%}",
             f"{one.hidden_share:.0%}", one.why)
            for name, one in (("prefill", overlap.prefill), ("decode", overlap.decode))
        ),
        words=(5,),
        note="communication and exposed: shares of the layers' time; hidden: share of the communication",
    )  # fmt: skip


def _overflow(overflow: _Overflow) -> Section:
    x = tuple(float(one.layer) for one in overflow.layers)
    totals = [max(1, one.rows_home + one.rows_spilled) for one in overflow.layers]
    before = tuple(one.busiest_home / total for one, total in zip(overflow.layers, totals))
    after = tuple(one.busiest / total for one, total in zip(overflow.layers, totals))
    chart = Lines(
        title="Busiest rank's share of the rows, before and after",
        x=x,
        series=(Series(name="all at home", y=before), Series(name="as run", y=after)),
        x_name="layer",
        y_name="share",
        note=f"over the mean: {overflow.imbalance_at_home:.2f} at home, {overflow.imbalance:.2f} as run",
    )
    table = Table(
        columns=("layer", "rows at home", "moved", "waited", "most waves", "copies of weights"),
        rows=tuple(
            (str(one.layer), f"{one.rows_home:,}", f"{one.rows_spilled:,}", f"{one.rows_waited:,}",
             str(one.most_waves), f"{one.fetches:,}")
            for one in overflow.layers
        ),
    )  # fmt: skip
    return Section(title="Measured overflow", text=f"{overflow.slots} slots on each rank.", blocks=(chart, table))
