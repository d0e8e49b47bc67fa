"""How evenly a group's experts are loaded, layer by layer, before and after placement and slots.

Shapes: L layers, R ranks, E experts, C kinds of placement. With a trace of the planned model: every recorded layer.
Without: the sampled layers, of which nobody knows which experts are hot. Knows plans; nothing of drawing.
"""

import numpy as np
from numpy.typing import NDArray

from bywash.planner.candidate import PhaseCost
from bywash.planner.group import placements
from bywash.planner.plan import PlannedGroup
from bywash.report.document import Bars, Block, Lines, Series, Table

LAYERS_AS_LINES = 6

FloatArray = NDArray[np.float64]


def skew_blocks(names: str, one: PlannedGroup) -> list[Block]:
    """Charts of one group, for each phase; `names` of the groups that are like it."""
    blocks: list[Block] = []
    recorded = one.cost.problem.sample.recorded
    if recorded is not None:
        blocks += recorded_skew(names, one, recorded.counts_LE())
    for phase in (one.outcome.prefill, one.outcome.decode):
        if phase is not None:
            blocks += _ranks(names, one, phase)
    replay = one.replay
    if replay is not None and replay.counters:
        home, planned = replay.step_imbalance
        blocks.append(
            Table(
                title=f"{names}: the trace, replayed with slots",
                columns=("layer", "home rows of busiest", "as planned", "rows moved", "fetches", "most waves"),
                rows=tuple(
                    (str(i), f"{c.busiest_home:,}", f"{c.busiest:,}", f"{c.rows_spilled:,}", f"{c.fetches:,}",
                     str(c.most_waves))
                    for i, c in enumerate(replay.counters)
                ),
                note=f"busiest over mean, step by step: {home:.3f} at home, {planned:.3f} as planned",
            )
        )  # fmt: skip
    return blocks


def recorded_skew(names: str, one: PlannedGroup, counts_LE: NDArray[np.integer]) -> list[Block]:
    """Busiest rank over its fair share in every recorded layer: experts in order, and placed by load."""
    cost = one.cost
    plain = placements(None, one.experts_R, counts_LE.shape[0], counts_LE.shape[1])
    homes = one.homes if len(one.homes) == counts_LE.shape[0] else (one.homes[0],) * counts_LE.shape[0]
    kinds = {
        "consecutive experts": [p.home_E for p in plain],
        "placed by load, each layer": [p.home_E for p in homes],
        "one placement for all layers": [one.common_home.home_E] * counts_LE.shape[0],
    }
    values = {name: busiest_L(counts_LE, np.stack(home_LE), cost.speeds) for name, home_LE in kinds.items()}
    note = "rows of the busiest rank over its fair share, all steps of the trace together; 1 is even"
    if counts_LE.shape[0] < LAYERS_AS_LINES:
        bars = [
            (f"{name.split(',')[0]}, layer {i}", float(v)) for name, line in values.items() for i, v in enumerate(line)
        ]
        return [Bars(title=f"{names}: skew by layer", names=tuple(n for n, _ in bars), values=tuple(v for _, v in bars),
                     unit="x", note=note)]  # fmt: skip
    return [
        Lines(
            title=f"{names}: skew by layer, before and after placement",
            x=tuple(float(i) for i in range(counts_LE.shape[0])),
            series=tuple(Series(name=name, y=tuple(line.tolist())) for name, line in values.items()),
            x_name="layer",
            y_name="busiest / fair share",
            note=note,
        )
    ]


def busiest_L(
    counts_LE: NDArray[np.integer], home_LE: NDArray[np.integer], speeds_R: NDArray[np.integer]
) -> FloatArray:
    """Rows of the busiest rank over its share by speed: float64 [L].

    Example: counts 3 and 1 on two equal ranks: 3 / 2 = 1.5.
    """
    made = []
    for counts_E, home_E in zip(counts_LE, home_LE, strict=True):
        rows_R = np.bincount(home_E, weights=counts_E, minlength=speeds_R.size)
        share_R = rows_R.sum() * speeds_R / speeds_R.sum()
        made.append(float((rows_R / share_R).max()) if rows_R.sum() else 1.0)
    return np.array(made)


def _ranks(names: str, one: PlannedGroup, phase: PhaseCost) -> list[Block]:
    """Rows of every rank in the sampled layers, the busiest first, over the fair share."""
    share_R = one.cost.speeds / one.cost.speeds.sum()
    series = []
    moved = not np.array_equal(phase.home_rows_LR, phase.rows_LR)
    for i, (home_R, rows_R) in enumerate(zip(phase.home_rows_LR, phase.rows_LR, strict=True)):
        fair_R = home_R.sum() * share_R
        series.append(Series(name=f"layer {i}, all at home", y=_sorted(home_R / fair_R)))
        if moved:
            series.append(Series(name=f"layer {i}, with slots", y=_sorted(rows_R / fair_R)))
    return [
        Lines(
            title=f"{names}: {phase.name}, rows by rank",
            x=tuple(float(i) for i in range(share_R.size)),
            series=tuple(series),
            x_name="ranks, busiest first",
            y_name="rows / fair share",
            note=(
                f"sampled layers of a step of {phase.tokens:,} tokens; busiest over fair share "
                f"{phase.imbalance_home:.2f} at home, {phase.imbalance:.2f} as planned"
            ),
        )
    ]


def _sorted(values_R: FloatArray) -> tuple[float, ...]:
    return tuple(sorted(values_R.tolist(), reverse=True))
