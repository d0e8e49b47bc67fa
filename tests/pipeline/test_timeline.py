"""Timelines: what the trace says, and that the picture draws what it says."""

import json
import xml.etree.ElementTree as ET

import pytest

from bywash.errors import ConfigError
from bywash.moe.pipeline import Kind, LayerForm, Span, Split, build_schedule, simulate
from bywash.report.timeline import chrome_trace, cut_to_layers, trace_svg, tracks_of

SCHEDULE = build_schedule([LayerForm(shared=True)] * 2, Split(lanes=2))
SPANS = [
    Span(op=s.op, start_ns=s.start_ns + 5_000, end_ns=s.end_ns + 5_000, sent_bytes=7, step=3)
    for s in simulate(SCHEDULE, lambda op: 1_000 * (1 + op.kind.communicates))
]


def test_the_trace_holds_every_op_and_every_semaphore():
    trace = json.loads(json.dumps(chrome_trace(tracks_of([SPANS, SPANS]), {"emulated": "a link"})))
    assert trace["otherData"] == {"emulated": "a link"}
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(bars) == 2 * len(SCHEDULE.ops)
    assert min(e["ts"] for e in bars) == 0
    for bar, span in zip([e for e in bars if e["pid"] == 1], SPANS):
        assert bar["ts"] == (span.start_ns - 5_000) / 1e3
        assert bar["dur"] == (span.end_ns - span.start_ns) / 1e3
        assert bar["cat"] == str(span.op.kind)
        assert bar["tid"] == span.op.kind.communicates
        assert bar["args"] == {
            "step": 3,
            "layer": span.op.layer,
            "micro-batch": "AB"[span.op.lane],
            "chunk": 0,
            "bytes": 7,
        }
    arrows = [e for e in trace["traceEvents"] if e["ph"] in "sf"]
    assert len({e["id"] for e in arrows}) == 2 * len(SCHEDULE.semaphores)
    for number, semaphore in enumerate(SCHEDULE.semaphores):
        start, finish = sorted((e for e in arrows if e["id"] == f"0.3.{number}"), key=lambda e: e["ph"] != "s")
        assert start["ts"] == (SPANS[semaphore.source].end_ns - 5_000) / 1e3
        assert finish["ts"] == (SPANS[semaphore.target].start_ns - 5_000) / 1e3
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1"]


def test_an_empty_trace_is_one():
    assert chrome_trace([], {})["traceEvents"] == []
    assert "<svg" in trace_svg(chrome_trace([], {}))


def test_the_picture_has_a_bar_for_each_op_in_its_place():
    trace = chrome_trace(tracks_of([SPANS, SPANS], prefix="serial <1>, "), {})
    picture = ET.fromstring(trace_svg(trace, processes=[1], width=1000))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [r for r in picture.iter(f"{svg}rect") if r.get("stroke")]
    assert len(bars) == len(SCHEDULE.ops)
    widths = {float(bar.get("width")) for bar in bars}
    assert len(widths) == 2
    assert max(widths) / min(widths) > 1.9
    texts = [t.text for t in picture.iter(f"{svg}text")]
    assert any(text.startswith("serial <1>, rank 1: ") for text in texts)
    assert {str(kind) for kind in (Kind.DISPATCH, Kind.EXPERTS)} <= set(texts)
    assert "B1" in texts


def test_a_cut_keeps_what_runs_while_the_layer_does():
    trace = chrome_trace(tracks_of([SPANS]), {"what": "two layers"})
    whole, cut = ([e for e in t["traceEvents"] if e["ph"] == "X"] for t in (trace, cut_to_layers(trace, 1, 1)))
    mine = [e for e in whole if e["args"]["layer"] == 1]
    begin = min(e["ts"] for e in mine)
    assert [(e["ts"] + begin, e["dur"]) for e in cut if e["args"]["layer"] == 1] == [(e["ts"], e["dur"]) for e in mine]
    assert min(e["ts"] for e in cut) == 0
    beside = [e for e in whole if e["args"]["layer"] == 0 and e["ts"] + e["dur"] > begin]
    assert len(beside) == len(cut) - len(mine) > 0
    with pytest.raises(ConfigError, match="layers 2 to 5"):
        cut_to_layers(trace, 2, 5)
