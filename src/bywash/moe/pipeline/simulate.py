"""When each op of a schedule would run, given how long each takes; and what any run's times amount to.

A stream is a resource: it runs its ops in order, each as soon as the ops it comes after have ended. Times are integer
nanoseconds. The same measures apply to simulated and measured spans. Knows nothing of what takes the time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bywash.moe.pipeline.schedule import Op, Schedule, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One op, as it ran or would run.

    Attributes:
        op: which.
        start_ns, end_ns: on any one clock.
        sent_bytes: what it sent to other ranks.
        step: which forward pass.
    """

    op: Op
    start_ns: int
    end_ns: int
    sent_bytes: int = 0
    step: int = 0


def simulate(schedule: Schedule, cost_ns: Callable[[Op], int]) -> list[Span]:
    """Start and end of every op, by number.

    Example: A computes for 2, its rows travel for 3, and B, which computes for 2 meanwhile, ends at 4; A's experts
    begin at 5.
    """
    free = dict.fromkeys(Stream, 0)
    spans: list[Span] = []
    for op in schedule.ops:
        start = max([free[op.stream], *(spans[before].end_ns for before in op.after)])
        free[op.stream] = start + cost_ns(op)
        spans.append(Span(op=op, start_ns=start, end_ns=free[op.stream]))
    return spans


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """The ops that make the step as long as it is, first to last: each begins when the one before it ends.

    `spans` are simulated ones, by number of the op.
    """
    path = [max(spans, key=lambda span: span.end_ns)]
    while path[-1].start_ns > 0:
        last = path[-1]
        binding = [s for s in spans[: last.op.number] if s.end_ns == last.start_ns and _holds(s.op, last.op)]
        path.append(binding[-1])
    return path[::-1]


def _holds(before: Op, op: Op) -> bool:
    return before.number in op.after or before.stream == op.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a set of spans amounts to, nanoseconds.

    Attributes:
        step_ns: from the first start to the last end.
        compute_ns: time during which a compute op ran.
        communication_ns: time during which dispatch or combine ran, waiting for other ranks included.
        exposed_ns: that part of it during which no compute op ran.
        uncovered_ns: that part of it during which no stage of products (`Kind.covers`) ran.
    """

    step_ns: int = 0
    compute_ns: int = 0
    communication_ns: int = 0
    exposed_ns: int = 0
    uncovered_ns: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            step_ns=self.step_ns + other.step_ns,
            compute_ns=self.compute_ns + other.compute_ns,
            communication_ns=self.communication_ns + other.communication_ns,
            exposed_ns=self.exposed_ns + other.exposed_ns,
            uncovered_ns=self.uncovered_ns + other.uncovered_ns,
        )

    @property
    def exposed_fraction(self) -> float:
        """Exposed communication over the step; 0 for an empty one."""
        return self.exposed_ns / self.step_ns if self.step_ns else 0.0

    @property
    def hidden_share(self) -> float:
        """The share of the communication that ran behind compute; 1 if there was none."""
        return 1 - self.exposed_ns / self.communication_ns if self.communication_ns else 1.0


def usage(spans: Sequence[Span]) -> Usage:
    """Measure the spans of one forward pass."""
    if not spans:
        return Usage()
    computing = _union([(s.start_ns, s.end_ns) for s in spans if not s.op.kind.communicates])
    covering = _union([(s.start_ns, s.end_ns) for s in spans if s.op.kind.covers])
    communicating = _union([(s.start_ns, s.end_ns) for s in spans if s.op.kind.communicates])
    return Usage(
        step_ns=max(s.end_ns for s in spans) - min(s.start_ns for s in spans),
        compute_ns=_length(computing),
        communication_ns=_length(communicating),
        exposed_ns=_length(_union(computing + communicating)) - _length(computing),
        uncovered_ns=_length(_union(covering + communicating)) - _length(covering),
    )


def _union(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same time in intervals that do not touch, ascending."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)
