"""What `bywash bench layer` says: definitions, one line for each schedule, the JSON, the timeline. Pure.

All times are those of the slowest rank, medians over rounds; ratios are of medians of the same run.
"""

from typing import Any

import numpy as np

from bywash.bench.layer import LayerBench, LayerResult, Rounds
from bywash.report.timeline import Track, tracks_of

DEFINITIONS = """\
# compute alone: the same kernels in the same order on rows that have already arrived
# comm alone: the same messages without compute; ideal: the longer of the two
# exposed: (step - compute alone) / step; steady: at the pace of the middle layers
# hidden: share of the communication, from the measured timeline, during which a compute stage ran
# expected: the schedule simulated with the stage times of the serial step; serial is one unsplit micro-batch in turn"""

_COLUMNS = "{:>28} {:>9} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>7}"


def rows_of(results_R: list[LayerResult]) -> list[dict[str, Any]]:
    """One JSON row for each split; times in milliseconds."""
    rows: list[dict[str, Any]] = []
    for splits in zip(*(result.splits for result in results_R), strict=True):
        rows.append(_row(list(splits)))
    for row in rows:
        row["faster_than_serial"] = round(rows[0]["step_ms"] / row["step_ms"], 3)
        row["best_faster_than_serial"] = round(rows[0]["best_step_ms"] / row["best_step_ms"], 3)
    return rows


def _row(ranks: list[Rounds]) -> dict[str, Any]:
    slowest = {
        name: np.max([getattr(one, f"{name}_ns") for one in ranks], axis=0) / 1e6
        for name in ("step", "steady", "compute", "communication")
    }
    step, steady, compute, communication = (float(np.median(times)) for times in slowest.values())
    ideal = max(compute, communication)
    best_ideal = max(float(slowest["compute"].min()), float(slowest["communication"].min()))
    hidden = np.mean([[used.hidden_share for used in one.usage] for one in ranks], axis=0)
    return {
        "schedule": str(ranks[0].split),
        "micro_batches": ranks[0].split.lanes,
        "chunks": ranks[0].split.chunks,
        "overlapped": ranks[0].split.overlapped,
        "step_ms": round(step, 3),
        "compute_alone_ms": round(compute, 3),
        "communication_alone_ms": round(communication, 3),
        "expected_ms": round(ranks[0].expected_ns / 1e6, 3),
        "steady_ms": round(steady, 3),
        "step_over_ideal": round(step / ideal, 3),
        "steady_over_ideal": round(steady / ideal, 3),
        "exposed_fraction": round((step - compute) / step, 4),
        "hidden_share": round(float(np.median(hidden)), 4),
        "best_step_ms": round(float(slowest["step"].min()), 3),
        "best_step_over_ideal": round(float(slowest["step"].min()) / best_ideal, 3),
        "wrong": sum(one.wrong for one in ranks),
    }


def header(bench: LayerBench, ranks: int, emulated: str) -> str:
    """What is measured, and the column names."""
    shape = bench.shape
    lines = [
        f"# {ranks} processes of one machine, one compute thread each; {shape.layers} layers, hidden {shape.hidden}, "
        f"intermediate {shape.intermediate}, {shape.experts} experts, top-{shape.top_k}, {bench.batches} sequences of "
        f"{shape.sequence} tokens a rank, float32, combine {bench.combine}",
        f"# {emulated}: communication times are emulated, compute and copies are real",
        DEFINITIONS,
    ]
    names = (
        ("schedule", "step", "compute", "comm", "expected", "step /", "steady /", "serial /", "exposed", "hidden"),
        ("", "ms", "alone", "alone", "ms", "ideal", "ideal", "step", "%", "%"),
    )
    more = (("best /", "#wrong"), ("ideal", ""))
    return "\n".join([*lines, *(_COLUMNS.format(*line, *extra) for line, extra in zip(names, more, strict=True))])


def line(row: dict[str, Any]) -> str:
    """One measurement under the header."""
    return _COLUMNS.format(
        row["schedule"],
        f"{row['step_ms']:.1f}",
        f"{row['compute_alone_ms']:.1f}",
        f"{row['communication_alone_ms']:.1f}",
        f"{row['expected_ms']:.1f}",
        f"{row['step_over_ideal']:.3f}",
        f"{row['steady_over_ideal']:.3f}",
        f"{row['faster_than_serial']:.2f}",
        f"{100 * row['exposed_fraction']:.1f}",
        f"{100 * row['hidden_share']:.1f}",
        f"{row['best_step_over_ideal']:.3f}",
        row["wrong"],
    )


def verdict(rows: list[dict[str, Any]]) -> str:
    """Which schedule the simulation would take, and which was fastest."""
    expected, fastest = (min(rows, key=lambda row: row[key]) for key in ("expected_ms", "step_ms"))
    return (
        f"# the cost model takes: {expected['schedule']} ({expected['expected_ms']:.1f} ms expected, "
        f"{expected['step_ms']:.1f} measured); fastest measured: {fastest['schedule']} ({fastest['step_ms']:.1f} ms)"
    )


def tracks(results_R: list[LayerResult]) -> list[Track]:
    """The last round of every split on every rank, each split from its own beginning."""
    found: list[Track] = []
    for splits in zip(*(result.splits for result in results_R), strict=True):
        found += tracks_of([one.spans for one in splits], prefix=f"{splits[0].split}, ")
    return found
