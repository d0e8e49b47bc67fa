"""Timelines of the pipeline: Chrome trace JSON (Perfetto, chrome://tracing), and a small SVG of it for documents.

Drawn from spans, measured or simulated: a process for each rank, a row for each stream, a bar for each op, an arrow for
each semaphore. Pure: returns documents, writes nothing. `bywash run --timeline` and `bywash bench layer --timeline`
make the trace; `benchmarks/pipeline/draw.py` draws one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from bywash.errors import ConfigError
from bywash.moe.pipeline import Kind, Op, Span, Stream

_STREAMS = list(Stream)
_COLOURS = {
    Kind.ATTENTION: "#7aa6c2",
    Kind.DENSE: "#7aa6c2",
    Kind.ROUTE: "#c9b458",
    Kind.SHARED: "#5f8f6b",
    Kind.SHARED_UP: "#5f8f6b",
    Kind.SHARED_DOWN: "#5f8f6b",
    Kind.EXPERTS: "#8fbf7f",
    Kind.FINISH: "#bbbbbb",
    Kind.DISPATCH: "#d98b5f",
    Kind.COMBINE: "#b3667e",
}
_ROW, _GAP, _LEFT, _FONT = 26, 10, 150, 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What one rank did.

    Attributes:
        name: such as `rank 0`.
        spans: when its ops ran.
        begin_ns: time 0 of the picture, on the spans' clock; ranks that ran together share it.
    """

    name: str
    spans: Sequence[Span]
    begin_ns: int


def tracks_of(spans_R: Sequence[Sequence[Span]], prefix: str = "") -> list[Track]:
    """A track for each rank of ranks that ran together on one clock (ranks of one host share it)."""
    begin_ns = min((span.start_ns for spans in spans_R for span in spans), default=0)
    return [Track(name=f"{prefix}rank {r}", spans=spans, begin_ns=begin_ns) for r, spans in enumerate(spans_R)]


def chrome_trace(tracks: Sequence[Track], notes: dict[str, Any]) -> dict[str, Any]:
    """The document, in Chrome's trace event format; times in microseconds.

    Args:
        tracks: one for each process of the picture.
        notes: what the reader must know, such as what is emulated; stored in `otherData`.
    """
    events: list[dict[str, Any]] = []
    for process, track in enumerate(tracks):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": track.name}})
        for number, stream in enumerate(_STREAMS):
            name = {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": str(stream)}}
            events.append(name)
        for span in track.spans:
            events.append(_bar(process, span, track.begin_ns))
            events += _arrow_ends(process, span, track.begin_ns)
    return {"displayTimeUnit": "ms", "otherData": notes, "traceEvents": events}


def _bar(process: int, span: Span, begin_ns: int) -> dict[str, Any]:
    op = span.op
    return {
        "ph": "X",
        "name": f"{op.kind} {lane_name(op)}",
        "cat": str(op.kind),
        "pid": process,
        "tid": _STREAMS.index(op.stream),
        "ts": (span.start_ns - begin_ns) / 1e3,
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {
            "step": span.step,
            "layer": op.layer,
            "micro-batch": lane_name(op),
            "chunk": op.chunk,
            "bytes": span.sent_bytes,
        },
    }


def _arrow_ends(process: int, span: Span, begin_ns: int) -> list[dict[str, Any]]:
    """Where semaphores leave this op, and where they reach it."""
    place = {"cat": "semaphore", "name": "semaphore", "pid": process, "tid": _STREAMS.index(span.op.stream)}

    def end(phase: str, number: int, at_ns: int) -> dict[str, Any]:
        mark = {"bp": "e"} if phase == "f" else {}
        return {"ph": phase, "id": f"{process}.{span.step}.{number}", "ts": (at_ns - begin_ns) / 1e3, **place, **mark}

    return [end("s", number, span.end_ns) for number in span.op.signals] + [
        end("f", number, span.start_ns) for number in span.op.awaits
    ]


def lane_name(op: Op) -> str:
    """A, B, ... Example: lane 1 is B."""
    return chr(ord("A") + op.lane) if op.lane < 26 else str(op.lane)


def cut_to_layers(trace: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The bars of a trace while any of layers `first` to `last` runs, cut at both ends; time begins at 0 again.

    Raises:
        ConfigError: no bar of such a layer.
    """
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    mine = [e for e in bars if first <= e["args"]["layer"] <= last]
    if not mine:
        raise ConfigError(f"timeline: no stage of layers {first} to {last}")
    begin, end = min(e["ts"] for e in mine), max(e["ts"] + e["dur"] for e in mine)
    kept = []
    for bar in bars:
        start, stop = max(bar["ts"], begin), min(bar["ts"] + bar["dur"], end)
        if start < stop:
            kept.append({**bar, "ts": start - begin, "dur": stop - start})
    return {**trace, "traceEvents": [e for e in trace["traceEvents"] if e["ph"] == "M"] + kept}


def trace_svg(trace: dict[str, Any], *, processes: Sequence[int] = (), width: int = 1100) -> str:
    """A picture of a trace made by `chrome_trace`, streams as rows, one time scale for all.

    Bars carry micro-batch and layer where they are wide enough; the legend names the colours.

    Args:
        trace: the document.
        processes: which to draw, in this order; none means all.
        width: in pixels.
    """
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    bars = [e for e in events if e["ph"] == "X"]
    drawn = list(processes) or list(names)
    longest_us = max((e["ts"] + e["dur"] for e in bars if e["pid"] in drawn), default=1.0)
    scale = (width - _LEFT - 10) / longest_us
    body, top = [_legend()], 2 * _ROW
    for process in drawn:
        mine = [e for e in bars if e["pid"] == process]
        took_ms = max((e["ts"] + e["dur"] for e in mine), default=0.0) / 1e3
        body.append(_text(4, top + 14, f"{names[process]}: {took_ms:.1f} ms", weight="bold"))
        top += _ROW
        for stream in sorted({e["tid"] for e in mine}):
            body.append(_text(4, top + 16, str(_STREAMS[stream])))
            body += [_svg_bar(e, scale, top) for e in mine if e["tid"] == stream]
            top += _ROW
        top += _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" font-family="sans-serif" '
        f'font-size="{_FONT}">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _svg_bar(event: dict[str, Any], scale: float, top: int) -> str:
    x, wide = _LEFT + event["ts"] * scale, max(0.5, event["dur"] * scale)
    label = f"{event['args']['micro-batch']}{event['args']['layer']}"
    text = _text(x + wide / 2, top + 16, label, anchor="middle") if wide > 18 else ""
    return (
        f'<rect x="{x:.1f}" y="{top + 2}" width="{wide:.1f}" height="{_ROW - 4}" fill="{_COLOURS[Kind(event["cat"])]}" '
        f'stroke="white" stroke-width="0.5"/>{text}'
    )


def _legend() -> str:
    parts, x = [], _LEFT
    for kind in (Kind.ATTENTION, Kind.ROUTE, Kind.EXPERTS, Kind.SHARED, Kind.DISPATCH, Kind.COMBINE):
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        parts.append(_text(x + 16, 18, str(kind)))
        x += 30 + 7 * len(kind)
    return "".join(parts)


def _text(x: float, y: float, text: str, *, weight: str = "normal", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
