"""What ran when in one replay, from the profiler, and how much of the communication ran behind what.

Names and kinds come from CUPTI through torch.profiler: kernels by name, copies by what they are. Copies of a step's
input and output are left out: only what lies between the first norm and the last counts.
"""

import json
import os
import tempfile
from dataclasses import dataclass, replace

import torch
from torch.profiler import ProfilerActivity, profile

from bywash.moe.pipeline import Kind, Schedule, Span

NORM = "add_norm"
CLASSES = {
    "route": "route",
    NORM: "norm",
    "prepare_rows": "index",
    "count_pairs": "index",
    "scan_counts": "index",
    "place_pairs": "index",
    "dispatch_receive": "index",
    "sum_others": "sums",
    "prepare_outputs": "sums",
    "sum_own": "finish",
    "combine_receive": "finish",
    "experts": "experts",
    "wait_rows": "wait",
    "wait_outputs": "wait",
    "dispatch_send": "wire",
    "dispatch_both": "wire",
    "combine_send": "wire",
    "combine_both": "wire",
}
"""Our kernels by name. Copies and NCCL's kernels are the wire; what is left belongs to attention."""
PRODUCTS = ("experts", "attention", "shared")


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or copy: class, name, begin and end in microseconds, bytes of a copy."""

    kind: str
    name: str
    begin: float
    end: float
    size: int
    stream: int


def record(replay, meet, schedule, calls=3):
    """Events of the last of `calls` replays, by begin, on this rank's device, from its first norm's end to the last's.

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
    return last_step(sorted(found, key=lambda one: one.begin), schedule, calls)


def last_step(events, schedule, calls):
    """Of `calls` equal steps: what lies behind the norms that the last one begins with, up to its last norm."""
    norms = [one for one in events if one.kind == "norm"]
    first = len(norms) // calls * (calls - 1) + schedule.split.lanes * schedule.split.chunks - 1
    if not norms or first >= len(norms):
        raise ValueError(f"{len(norms)} norms in {calls} replays")
    return [one for one in events if norms[first].end <= one.begin <= norms[-1].begin]


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


def base_name(name):
    """A kernel's without arguments and return type."""
    return name.split("(")[0].split(" ")[-1]


def _class_of(category, name):
    if category == "gpu_memcpy" or "nccl" in name:
        return "wire"
    return CLASSES.get(base_name(name), "attention")


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
    """Microseconds by class, and what of the wire's time ran behind experts, behind all products, behind any kernel."""
    by_kind = {}
    for one in events:
        by_kind.setdefault(one.kind, []).append((one.begin, one.end))
    wire = by_kind.get("wire", [])
    covers = {
        "experts": by_kind.get("experts", []),
        "experts, attention, shared": [interval for kind in PRODUCTS for interval in by_kind.get(kind, [])],
        "any kernel": [
            interval for kind, spans in by_kind.items() if kind not in ("wire", "wait") for interval in spans
        ],
    }
    total = length(wire)
    return {
        "step_us": max(one.end for one in events) - min(one.begin for one in events),
        "us": {kind: round(length(spans), 1) for kind, spans in by_kind.items()},
        "count": {kind: len(spans) for kind, spans in by_kind.items()},
        "wire_bytes": sum(one.size for one in events if one.kind == "wire"),
        "busy_us": round(length(covers["any kernel"]), 1),
        "hidden": {what: together(wire, spans) / total if total else 1.0 for what, spans in covers.items()},
    }


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


def by_op(events, schedule: Schedule, wire_counts, by_copies):
    """(events with the shared expert told from the others, the profile as spans of the schedule's ops).

    The compute stream's kernels ran op by op, and each op ends with a kernel that only its kind ends with, so many
    times as it has parts; in decode the shared expert is torch's kernels, up to the routed experts'. `wire_counts`:
    copies or kernels of a dispatch or combine op. Where the numbers do not fit the events come back as they are, with
    None.
    """
    parts, computed = schedule.split.chunks, [one for one in events if one.kind not in ("wire", "wait")]
    last = {
        Kind.ATTENTION: (NORM, parts),
        Kind.ROUTE: ("prepare_rows" if by_copies else "route", parts),
        **dict.fromkeys((kind for kind in Kind if kind.shared), ("experts", parts)),
        Kind.EXPERTS: ("prepare_outputs" if by_copies else "experts", 1),
        Kind.FINISH: (NORM, parts),
    }
    own = sum(base_name(one.name) == "experts" for one in computed)
    by_torch = own == sum(op.kind == Kind.EXPERTS for op in schedule.ops)
    spans, named, at = [], [], 0
    for op in schedule.ops:
        if op.kind in last:
            if op.kind.shared and by_torch:
                end = next((n for n in range(at, len(computed)) if computed[n].kind != "attention"), None)
            else:
                end = _end_of(computed, at, *last[op.kind])
            if end is None:
                return events, None
            mine = [replace(one, kind=_class_in(op.kind, one)) for one in computed[at:end]]
            spans.append(_span(op, mine))
            named += mine
            at = end
    wire = _wire_in_turn(schedule, [one for one in events if one.kind == "wire"], wire_counts)
    others = [one for one in events if one.kind in ("wire", "wait")]
    complete = at == len(computed) and wire is not None
    return sorted(named + computed[at:] + others, key=lambda one: one.begin), spans + wire if complete else None


def _end_of(events, at, name, count):
    """Where `count` kernels of that name have come, from `at` on; None if they have not."""
    for place in range(at, len(events)):
        count -= base_name(events[place].name) == name
        if not count:
            return place + 1
    return None


def _class_in(kind, event):
    if event.kind == "norm":
        return "norm"
    return "shared" if kind.shared else "attention" if kind == Kind.ATTENTION else event.kind


def _wire_in_turn(schedule, ran, counts):
    """Give the wire's events to dispatch and combine ops in turn; None if the numbers do not fit.

    Through the host one op's copies out run beside the copies in of the op before: each direction has its own turn.
    """
    lines = [[one for one in ran if ("HtoD" in one.name) == back] for back in (False, True)]
    lines = [line for line in lines if line]
    at, spans = 0, []
    for op in schedule.ops:
        if counts and op.kind.communicates:
            end = at + counts[op.kind] // len(lines) if lines else at
            mine = [one for line in lines for one in line[at:end]]
            at = end
            if len(mine) == counts[op.kind]:
                spans.append(_span(op, mine))
    return spans if counts and all(at == len(line) for line in lines) else None


def _span(op, events):
    begin, end = min(one.begin for one in events), max(one.end for one in events)
    sent = sum(one.size for one in events if one.kind == "wire")
    return Span(op=op, start_ns=round(begin * 1e3), end_ns=round(end * 1e3), sent_bytes=sent)
