"""What ran when in one replay, from the profiler, and how much of the communication ran behind what.

Names and kinds come from CUPTI through torch.profiler: kernels by name, copies by what they are. Copies of a step's
input and output are left out: only what lies between the first router and the last sum counts.
"""

import json
import os
import tempfile
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bywash.moe.pipeline import Kind, Schedule, Span

EXPERTS, ROUTE, FINISH = "experts", "route", "finish"
CLASSES = {
    "route": "route",
    "prepare_rows": "index",
    "count_pairs": "index",
    "scan_counts": "index",
    "place_pairs": "index",
    "dispatch_receive": "index",
    "sum_partial": "sums",
    "prepare_outputs": "sums",
    "sum_outputs": "finish",
    "combine_receive": "finish",
    "experts": "experts",
    "wait_rows": "wait",
    "wait_outputs": "wait",
    "dispatch_send": "wire",
    "dispatch_both": "wire",
    "combine_send": "wire",
    "combine_both": "wire",
}


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or copy: class, name, begin and end in microseconds, bytes of a copy."""

    kind: str
    name: str
    begin: float
    end: float
    size: int
    stream: int


def record(replay, meet, calls=3):
    """Events of the last of `calls` replays, by begin, on this rank's device.

    Ranks start a profiler at different times; `meet` and the replays before the last one bring them into step.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        meet()
        for _ in range(calls):
            replay()
        torch.cuda.synchronize()
    path = tempfile.mktemp(suffix=".json")
    recorded.export_chrome_trace(path)
    with open(path) as file:
        traced = json.load(file)["traceEvents"]
    os.remove(path)
    found = [_event(one) for one in traced if one.get("cat") in ("kernel", "gpu_memcpy")]
    found.sort(key=lambda one: one.begin)
    routed = [one.begin for one in found if one.kind == ROUTE]
    last = routed[len(routed) * (calls - 1) // calls] if routed else 0.0  # where the last replay begins
    return _within_step([one for one in found if one.begin >= last])


def _event(traced):
    args, name = traced.get("args", {}), traced.get("name", "")
    return Event(
        kind=_class_of(traced["cat"], name),
        name=name,
        begin=float(traced["ts"]),
        end=float(traced["ts"]) + float(traced["dur"]),
        size=int(args.get("bytes", 0)),
        stream=int(args.get("stream", -1)),
    )


def _class_of(category, name):
    if category == "gpu_memcpy" or "nccl" in name:
        return "wire"
    for word in ("gemm", "nvjet", "cutlass"):
        if word in name:
            return "attention"
    return CLASSES.get(name.split("(")[0].split(" ")[-1], "other")


def _within_step(events):
    routed = [one for one in events if one.kind == "route"]
    ended = [one for one in events if one.kind in ("finish", "wire", "wait")]
    if not routed:
        return events
    first = min(one.begin for one in routed)
    last = (
        max(one.end for one in events if one.kind == "finish") if any(one.kind == "finish" for one in ended) else 1e99
    )
    return [one for one in events if one.begin >= first and one.begin <= last]


def union(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def length(intervals):
    return sum(end - begin for begin, end in union(intervals))


def together(first, second):
    """Time that lies in both."""
    return length(first) + length(second) - length(list(first) + list(second))


def shares(events):
    """Microseconds by class, and what of the wire's time ran behind expert or attention kernels, or behind any."""
    by_kind = {}
    for one in events:
        by_kind.setdefault(one.kind, []).append((one.begin, one.end))
    wire = by_kind.get("wire", [])
    heavy = by_kind.get("experts", []) + by_kind.get("attention", [])
    kernels = [interval for kind, spans in by_kind.items() if kind not in ("wire", "wait") for interval in spans]
    total = length(wire)
    found = {
        "step_us": max(one.end for one in events) - min(one.begin for one in events),
        "us": {kind: round(length(spans), 1) for kind, spans in by_kind.items()},
        "count": {kind: len(spans) for kind, spans in by_kind.items()},
        "wire_bytes": sum(one.size for one in events if one.kind == "wire"),
        "busy_us": round(length(kernels), 1),
    }
    found["hidden_by_experts"] = together(wire, heavy) / total if total else 1.0
    found["hidden_by_kernels"] = together(wire, kernels) / total if total else 1.0
    return found


def names(events, most=24):
    """Name, number, total microseconds, streams: for reading what the classes hide."""
    table = {}
    for one in events:
        entry = table.setdefault(one.name[:60], [0, 0.0, set()])
        entry[0] += 1
        entry[1] += one.end - one.begin
        entry[2].add(one.stream)
    ordered = sorted(table.items(), key=lambda item: -item[1][1])[:most]
    return [
        f"{count:5d} x {total:10.1f} us  streams {sorted(streams)}  {name}" for name, (count, total, streams) in ordered
    ]


def spans_of(events, schedule: Schedule, events_of):
    """The profile as spans of the schedule's ops: the n-th expert kernel is the n-th experts op, and so on.

    `events_of(kind)`: copies or kernels of a dispatch or combine op. None where the numbers do not fit.
    """
    chunks = schedule.split.chunks
    marks = {Kind.EXPERTS: 1, Kind.ROUTE: chunks, Kind.FINISH: chunks, Kind.ATTENTION: 1}
    spans = []
    for kind, each in marks.items():
        found = _in_turn(schedule, lambda op, kind=kind: op.kind == kind, events, str(kind), lambda op, each=each: each)
        if found is None and not (kind == Kind.FINISH and not schedule.split.overlapped):  # a kernel does both halves
            return None
        spans += found or []
    wire = _in_turn(schedule, lambda op: op.kind.communicates, events, "wire", lambda op: events_of(op.kind))
    return None if wire is None else spans + wire


def _in_turn(schedule, chosen, events, name, count_of):
    """Give the events of class `name`, by begin, to the chosen ops in turn; None if the numbers do not fit."""
    ran, at, spans = [one for one in events if one.kind == name], 0, []
    for op in schedule.ops:
        if chosen(op):
            mine = ran[at : at + count_of(op)]
            at += count_of(op)
            if len(mine) == count_of(op):
                spans.append(_span(op, mine))
    return spans if at == len(ran) else None


def _span(op, events):
    begin, end = min(one.begin for one in events), max(one.end for one in events)
    sent = sum(one.size for one in events)
    return Span(op=op, start_ns=round(begin * 1e3), end_ns=round(end * 1e3), sent_bytes=sent)
