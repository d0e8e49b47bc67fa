"""`bywash bench layer`: how much of the exchange a schedule hides, on a stack of MoE layers, in one run.

For every split of the step the same batches go through the same weights serially and overlapped, over a link emulated
at a rate at which communication alone takes as long as compute alone (or one that the caller names). Compute alone runs
the same kernels on rows that have already arrived; communication alone sends the same messages without computing.

All times are those of the slowest rank.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bywash.balance import Placement
from bywash.bench.alone import CommunicationAlone, ComputeAlone, Recorded, RecordingForward
from bywash.bench.stack import Batch, Stack, StackShape, SyntheticLayer, make_batches, split_batches
from bywash.errors import BywashError
from bywash.exchange import Group, Link, ShmExchange
from bywash.exchange.names import Combine
from bywash.moe import ExpertParallel
from bywash.moe.pipeline import (
    SERIAL,
    Forward,
    Kind,
    Span,
    Split,
    ThreadExecutor,
    Usage,
    build_schedule,
    simulate,
    usage,
)

_CALIBRATIONS = 5
_CLOSE_ENOUGH = 0.02
_PER_CHUNK = (Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBench:
    """What to measure.

    Attributes:
        shape: of the stack.
        batches: sequences of each rank.
        splits: those to measure beside the serial schedule.
        combine: see `Exchange`.
        link: the emulated link; None calibrates one of `latency_us`.
        rounds: of each measurement, taken in turn.
    """

    shape: StackShape
    batches: int
    splits: tuple[Split, ...]
    combine: Combine
    link: Link | None
    latency_us: float
    rounds: int


@dataclass(slots=True, kw_only=True)
class Rounds:
    """One split on one rank; nanoseconds, one value for each round.

    Attributes:
        split: which.
        expected_ns: the step that the simulation expects from the stage times of the serial schedule.
        step_ns: the whole step.
        compute_ns: the same compute ops on arrived rows.
        communication_ns: the same messages without compute.
        usage: of the step's timeline.
        steady_ns: from the timeline, time per layer without the first and the last two, times the number of layers.
        wrong: elements of the output that differ from the serial schedule's.
        spans: timeline of the last round.
    """

    split: Split
    expected_ns: int
    step_ns: list[int] = field(default_factory=list)
    compute_ns: list[int] = field(default_factory=list)
    communication_ns: list[int] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    steady_ns: list[int] = field(default_factory=list)
    wrong: int = 0
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """What one rank measured: the link that was used, and each split, the serial schedule first."""

    link: Link
    splits: list[Rounds]


def measure(group: Group, bench: LayerBench) -> LayerResult:
    """Calibrate, then measure every split on this rank. All ranks call it alike.

    Raises:
        BywashError: without any link communication takes as long as compute already.
    """
    torch.set_num_threads(1)
    # An exchange has up to four waits of its own, each with the group's deadline, and the better error.
    with torch.inference_mode(), ThreadExecutor(deadline_s=5 * group.deadline_s) as executor:
        rig = _Rig(group, bench, executor)
        try:
            link = bench.link or _calibrate(rig)
            rig.open(link)
            costs = rig.stage_costs()
            cases = [_Case(rig, split, costs) for split in (SERIAL, *bench.splits)]
            for _ in range(bench.rounds):
                for case in cases:
                    case.round()
            for case in cases:
                case.rounds.wrong = sum(
                    int((ours != theirs).sum()) for ours, theirs in zip(case.output, cases[0].output, strict=True)
                )
        finally:
            rig.exchange.close()
    return LayerResult(link=link, splits=[case.rounds for case in cases])


class _Rig:
    """The stack, the exchange that is open, and clocks that all ranks start together."""

    def __init__(self, group: Group, bench: LayerBench, executor: ThreadExecutor) -> None:
        self.group, self.bench, self.executor = group, bench, executor
        self.stack = Stack(bench.shape, Placement.equal(bench.shape.experts, group.ranks), group.rank)
        self.open(None)

    def open(self, link: Link | None) -> None:
        """A new exchange over `link`, with every layer on it."""
        tokens = self.bench.batches * self.bench.shape.sequence
        self.exchange = ShmExchange(self.group, combine_mode=self.bench.combine, tokens=tokens, link=link)
        self.experts = self.stack.on(self.exchange)

    def timed(self, run: Callable[[], object]) -> int:
        """Nanoseconds of `run`, begun on all ranks together."""
        with self.group.blame("starting a round"):
            dist.barrier()
        start_ns = time.monotonic_ns()
        run()
        return time.monotonic_ns() - start_ns

    def slowest(self, value_ns: int) -> int:
        """The largest over ranks."""
        return max(int(text) for text in self.group.share(str(value_ns), "comparing times"))

    def stage_costs(self) -> dict[Kind, int]:
        """Nanoseconds of each kind of stage in a layer, from two serial steps of rank 0, the same on all ranks."""
        case = _Case(self, SERIAL, {})
        case.step()
        case.step()
        costs = {
            str(kind): int(np.median([s.end_ns - s.start_ns for s in case.rounds.spans if s.op.kind == kind] or [0]))
            for kind in Kind
        }
        shared = json.loads(self.group.share(json.dumps(costs), "sharing stage times")[0])
        return {kind: shared[kind] for kind in Kind}


class _Case:
    """One split, measured on the rig."""

    def __init__(self, rig: _Rig, split: Split, costs: dict[Kind, int]) -> None:
        self._rig, self._split, bench = rig, split, rig.bench
        sizes = [len(lane) for lane in split_batches(make_batches(bench.shape, bench.batches, 0), split.lanes)]

        def cost(kind: Kind, lane: int) -> int:
            parts = bench.batches * (split.chunks if kind in _PER_CHUNK else 1)
            return costs.get(kind, 0) * sizes[lane] // parts

        self.schedule = build_schedule(rig.stack.forms, split, cost=cost)
        expected = simulate(self.schedule, lambda op: cost(op.kind, op.lane))
        self.rounds = Rounds(split=split, expected_ns=usage(expected).step_ns)
        self._recorded = Recorded()
        self.step(recording=True)

    def round(self) -> None:
        """One round of each measurement."""
        step_ns = self._rig.timed(self.step)
        self.rounds.step_ns.append(step_ns)
        self.rounds.usage.append(usage(self.rounds.spans))
        self.rounds.steady_ns.append(_steady_ns(self.rounds.spans, self._rig.bench.shape.layers))
        self.rounds.compute_ns.append(self._rig.timed(self.compute_alone))
        self.rounds.communication_ns.append(self._rig.timed(self.communication_alone))

    def step(self, *, recording: bool = False) -> None:
        """The whole step."""
        lanes = self._lanes()
        if recording:
            work: Forward = RecordingForward(*self._model(), lanes, **self._options(), recorded=self._recorded)
        else:
            work = Forward(*self._model(), lanes, **self._options())
        self.rounds.spans = self._rig.executor.run(self.schedule, work)
        self.output = [batch.hidden_BSD for lane in lanes for batch in lane]

    def compute_alone(self) -> None:
        """The compute ops, in their order, on rows that have arrived."""
        work = ComputeAlone(*self._model(), self._lanes(), **self._options(), recorded=self._recorded)
        for op in self.schedule.ops:
            work(op)

    def communication_alone(self) -> None:
        """The exchanges, in their order, of rows and outputs that are there."""
        work = CommunicationAlone(self._rig.experts, chunks=self._split.chunks, recorded=self._recorded)
        for op in self.schedule.ops:
            if op.kind.communicates:
                work(op)

    def _lanes(self) -> list[list[Batch]]:
        bench = self._rig.bench
        batches = make_batches(bench.shape, bench.batches, self._rig.group.rank)
        return split_batches(batches, self._split.lanes)

    def _model(self) -> tuple[list[SyntheticLayer], dict[int, ExpertParallel]]:
        return self._rig.stack.layers, self._rig.experts

    def _options(self) -> dict[str, Any]:
        return {"chunks": self._split.chunks, "nothing": self._rig.stack.nothing}


def _calibrate(rig: _Rig) -> Link:
    """The link over which communication alone takes as long as compute alone, within 2 % if it settles."""
    case = _Case(rig, SERIAL, {})
    compute_ns = rig.slowest(sorted(rig.timed(case.compute_alone) for _ in range(3))[1])
    bare_ns = rig.slowest(min(rig.timed(case.communication_alone) for _ in range(2)))
    if bare_ns > 0.7 * compute_ns:
        raise BywashError(
            f"bench layer: moving the rows takes {bare_ns / 1e6:.1f} ms without any link, compute "
            f"{compute_ns / 1e6:.1f} ms; no link makes them equal. Raise --intermediate, or lower --topk"
        )
    sent_bytes = rig.slowest(sum(span.sent_bytes for span in case.rounds.spans))
    link = Link(rate_gbps=sent_bytes * 8 / compute_ns, latency_us=rig.bench.latency_us)
    for _ in range(_CALIBRATIONS):
        rig.exchange.close()
        rig.open(link)
        ratio = rig.slowest(min(rig.timed(case.communication_alone) for _ in range(2))) / compute_ns
        if abs(ratio - 1) < _CLOSE_ENOUGH:
            break
        link = Link(rate_gbps=link.rate_gbps * ratio, latency_us=link.latency_us)
    rig.exchange.close()
    return link


def _steady_ns(spans: list[Span], layers: int) -> int:
    """Step time at the pace of the middle layers: between the ends of layer 1 and of the last but two."""
    ends = [max(s.end_ns for s in spans if s.op.layer == layer) for layer in (1, layers - 3)] if layers > 4 else []
    return (ends[1] - ends[0]) * layers // (layers - 4) if ends else usage(spans).step_ns
