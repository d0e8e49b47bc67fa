"""Timelines for a report: from spans of the pipeline's schedule, or from a Chrome trace that `--timeline` wrote.

Knows traces as `report.timeline` makes them; nothing of plans. `of_plan` and `sources` call it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from bywash.errors import ConfigError
from bywash.moe.pipeline.order import build_schedule
from bywash.moe.pipeline.schedule import Kind, LayerForm, Split
from bywash.moe.pipeline.simulate import simulate
from bywash.planner.cost import op_costs_ns
from bywash.report.document import Lane, Report, Section, Span, Timeline
from bywash.report.timeline import chrome_trace, cut_to_layers, tracks_of

LAYERS = 4
MIDDLE = 2
RANKS_SHOWN = 4


def layer_timeline(title: str, cost_us: Mapping[Kind, float], split: Split, *, note: str = "") -> Timeline:
    """A layer in the middle of several, by the pipeline's own order.

    Args:
        title: of the chart.
        cost_us: of one op of each kind under `split`.
        split: of the step.
        note: beneath.
    """
    form = LayerForm(shared=Kind.SHARED in cost_us)
    cost_ns = op_costs_ns(cost_us, split)
    schedule = build_schedule([form] * LAYERS, split, cost=lambda kind, lane: cost_ns[kind])
    spans = simulate(schedule, lambda op: cost_ns[op.kind])
    trace = cut_to_layers(chrome_trace(tracks_of([spans]), {}), MIDDLE, MIDDLE)
    return Timeline(title=title, lanes=_lanes(trace, names=False), note=note)


def timeline_report(trace: Any, where: str) -> Report:
    """A page of a trace file: one layer in the middle of the last step. Raises `ConfigError`: no such trace."""
    try:
        bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        layers = sorted({int(event["args"]["layer"]) for event in bars})
        step = max(int(event["args"]["step"]) for event in bars)
        last = dict(trace, traceEvents=[e for e in trace["traceEvents"] if e["ph"] != "X" or e["args"]["step"] == step])
        middle = layers[len(layers) // 2]
        one = _lanes(cut_to_layers(last, middle, middle), names=True)
        notes = dict(trace.get("otherData") or {})
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(f"{where}: is no timeline of `bywash run --timeline`") from error
    blocks = tuple(Timeline(title=f"layer {middle}, {rank}", lanes=lanes) for rank, lanes in _by_rank(one).items())[
        :RANKS_SHOWN
    ]
    section = Section(
        title="Measured timeline",
        text="; ".join(f"{key}: {value}" for key, value in notes.items() if value),
        blocks=blocks,
    )
    headline = f"{len(layers)} layers, step {step}, as it ran."
    return Report(title="Timeline of a run", headline=headline, sections=(section,))


def _by_rank(lanes: Sequence[Lane]) -> dict[str, tuple[Lane, ...]]:
    found: dict[str, list[Lane]] = {}
    for lane in lanes:
        rank, _, stream = lane.name.partition(": ")
        found.setdefault(rank, []).append(Lane(name=stream, spans=lane.spans))
    return {rank: tuple(made) for rank, made in found.items()}


def _lanes(trace: Mapping[str, Any], *, names: bool) -> tuple[Lane, ...]:
    """A row for each stream; `names` puts the process in front."""
    events = trace["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    stream = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    rows = sorted({(e["pid"], e["tid"]) for e in bars})
    return tuple(
        Lane(
            name=(f"{process[pid]}: " if names else "") + stream[pid, tid],
            spans=tuple(
                Span(start_us=e["ts"], end_us=e["ts"] + e["dur"], stage=e["cat"], label=_label(e))
                for e in bars
                if (e["pid"], e["tid"]) == (pid, tid)
            ),
        )
        for pid, tid in rows
    )


def _label(event: Mapping[str, Any]) -> str:
    return f"{event['args']['micro-batch']}{event['args']['layer']}"
