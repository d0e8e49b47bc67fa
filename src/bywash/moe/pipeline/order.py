"""Build a schedule: the stages of every layer and lane, put in an order that keeps both streams busy.

Pure integers, ties by position: every rank that calls with the same arguments gets the same schedule, which matters,
since all ranks must make the same exchange calls in the same order.

Knows nothing of tensors or threads; costs come as numbers from the caller (`cost`, or measured ones).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bywash.errors import ConfigError
from bywash.moe.pipeline.schedule import Kind, LayerForm, Op, Schedule, Split, Stream, check, semaphores_for
from bywash.moe.pipeline.simulate import simulate, usage

IN_FLIGHT = 2
"""Exchange steps that may be open at once: the exchanges keep two generations of every buffer."""

Cost = Callable[[Kind, int], int]
"""(kind, lane) to the time of one such op, in any integer unit; of one chunk where the split has chunks."""

_Key = tuple[Kind, int, int, int]
_FOR_EVER = 1 << 60

_TYPICAL = {Kind.ROUTE: 1, Kind.FINISH: 1, Kind.SHARED: 4, Kind.ATTENTION: 10, Kind.DENSE: 10, Kind.EXPERTS: 12}
_TYPICAL |= {Kind.SHARED_UP: 3, Kind.SHARED_DOWN: 1}


def typical_cost(kind: Kind, lane: int) -> int:
    """For a caller who knows nothing better: attention, experts, dispatch and combine take about as long."""
    return _TYPICAL.get(kind, 10)


@dataclass(frozen=True, slots=True)
class _Stage:
    """An op before it has a place: what it is, and the stages it comes after."""

    key: _Key
    after: tuple[_Key, ...]


def build_schedule(layers: Sequence[LayerForm], split: Split, *, cost: Cost = typical_cost) -> Schedule:
    """The schedule of one forward pass over `layers`, checked.

    List scheduling by each rule (`_RULES`); of the results the shortest, by the costs given, and of equals the one with
    less communication that no products cover. Without overlap all stages run on the compute stream, layer by layer.

    Args:
        layers: which stages each layer has, in order.
        split: lanes and chunks.
        cost: what the order is made for. A wrong one costs time, never correctness.

    Raises:
        ConfigError: no layers, or a negative cost.
    """
    if not layers:
        raise ConfigError("schedule: the model has no layers")
    stages = _stages(layers, split)
    if not split.overlapped:
        return _numbered([(stage.key, stage.after) for stage in stages], split)
    found = [_numbered(_Order(stages, split, cost, rule).run(), split) for rule in _RULES]

    def time(schedule: Schedule) -> tuple[int, int]:
        used = usage(simulate(schedule, lambda op: cost(op.kind, op.lane)))
        return used.step_ns, used.uncovered_ns

    return min(found, key=time)


def _numbered(order: Sequence[tuple[_Key, tuple[_Key, ...]]], split: Split) -> Schedule:
    """Stages in this order, with the semaphores that it needs, checked."""
    number = {key: place for place, (key, _) in enumerate(order)}
    ops = [
        Op(
            number=number[key],
            kind=key[0],
            layer=key[1],
            lane=key[2],
            chunk=key[3],
            stream=_stream(key[0], split),
            after=tuple(sorted(number[before] for before in after)),
        )
        for key, after in order
    ]
    semaphores = semaphores_for(ops)
    for place, semaphore in enumerate(semaphores):
        source, target = ops[semaphore.source], ops[semaphore.target]
        ops[source.number] = replace(source, signals=(*source.signals, place))
        ops[target.number] = replace(ops[target.number], awaits=(*ops[target.number].awaits, place))
    in_flight = IN_FLIGHT if split.overlapped else 1
    return check(Schedule(split=split, in_flight=in_flight, ops=tuple(ops), semaphores=tuple(semaphores)))


def _stream(kind: Kind, split: Split) -> Stream:
    return Stream.COMMUNICATION if kind.communicates and split.overlapped else Stream.COMPUTE


def _stages(layers: Sequence[LayerForm], split: Split) -> list[_Stage]:
    """Every stage with its dependencies, layer by layer, in the order in which one stream could run them."""
    stages: list[_Stage] = []
    last: list[_Key | None] = [None] * split.lanes
    opened: _Key | None = None  # without overlap: the exchange step before, which must have ended

    def add(kind: Kind, layer: int, lane: int, chunk: int, *after: _Key | None) -> _Key:
        key = (kind, layer, lane, chunk)
        stages.append(_Stage(key, tuple(before for before in after if before is not None)))
        return key

    for index, form in enumerate(layers):
        for lane in range(split.lanes):
            if form.attention:
                last[lane] = add(Kind.ATTENTION, index, lane, 0, last[lane])
            if not form.moe:
                last[lane] = add(Kind.DENSE, index, lane, 0, last[lane])
                continue
            stream_in = last[lane]
            routed = add(Kind.ROUTE, index, lane, 0, stream_in)
            shared: _Key | None = None
            if form.shared and split.whole:
                shared = add(Kind.SHARED_DOWN, index, lane, 0, add(Kind.SHARED_UP, index, lane, 0, routed))
            elif form.shared:
                shared = add(Kind.SHARED, index, lane, 0, routed)
            combined = []
            for chunk in range(split.chunks):
                sent = add(Kind.DISPATCH, index, lane, chunk, routed, None if split.overlapped else opened)
                computed = add(Kind.EXPERTS, index, lane, chunk, sent)
                opened = add(Kind.COMBINE, index, lane, chunk, computed)
                combined.append(opened)
            last[lane] = add(Kind.FINISH, index, lane, 0, *combined, shared)
    return stages


class _Order:
    """List scheduling on two streams, with at most `IN_FLIGHT` exchange steps open."""

    def __init__(self, stages: Sequence[_Stage], split: Split, cost: Cost, rule: "_Rule") -> None:
        self._rule, self._last = rule, Kind.FINISH  # last: what the compute stream was given before
        self._after = {stage.key: stage.after for stage in stages}
        self._stream_of = {stage.key: _stream(stage.key[0], split) for stage in stages}
        self._cost = {stage.key: _checked(cost, stage.key) for stage in stages}
        self._end: dict[_Key, int] = {}
        self._free = dict.fromkeys(Stream, 0)
        self._dispatched: list[_Key] = []
        self._missing = {stage.key: len(stage.after) for stage in stages}
        self._followers: dict[_Key, list[_Key]] = {stage.key: [] for stage in stages}
        for stage in stages:
            for before in stage.after:
                self._followers[before].append(stage.key)
        self._reach: dict[_Key, int] = {}
        for stage in reversed(stages):
            self._reach[stage.key] = self._compute_until_communication(stage.key)
        self._ready = [key for key, missing in self._missing.items() if not missing]

    def run(self) -> list[tuple[_Key, tuple[_Key, ...]]]:
        """The order, each stage with all that it comes after."""
        order = []
        while self._ready:
            begin, _, _, _, key = min(
                (self._begin(key), self._rule(key[0], self._last), self._reach[key], key[1:], key)
                for key in self._ready
                if all(before in self._end for before in self._after_of(key))
            )
            order.append((key, self._after_of(key)))
            self._take(key, begin)
        return order

    def _begin(self, key: _Key) -> int:
        return max([self._free[self._stream_of[key]], *(self._end[before] for before in self._after_of(key))])

    def _after_of(self, key: _Key) -> tuple[_Key, ...]:
        """Its dependencies, and for a dispatch the combine that frees its buffers."""
        if key[0] != Kind.DISPATCH or len(self._dispatched) < IN_FLIGHT:
            return self._after[key]
        return (*self._after[key], (Kind.COMBINE, *self._dispatched[-IN_FLIGHT][1:]))

    def _compute_until_communication(self, key: _Key) -> int:
        """Compute time from the start of this stage until dispatch or combine can begin; for ever after the last."""
        if key[0].communicates:
            return 0
        return self._cost[key] + min((self._reach[follower] for follower in self._followers[key]), default=_FOR_EVER)

    def _take(self, key: _Key, begin: int) -> None:
        self._end[key] = self._free[self._stream_of[key]] = begin + self._cost[key]
        self._ready.remove(key)
        if not key[0].communicates:
            self._last = key[0]
        if key[0] == Kind.DISPATCH:
            self._dispatched.append(key)
        for follower in self._followers[key]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._ready.append(follower)


_Rule = Callable[[Kind, Kind], int]
"""(stage, what the compute stream ran before) to a rank: of stages that can begin at once the lowest goes first."""


def _soonest(kind: Kind, last: Kind) -> int:
    """All alike: of stages that can begin at once the one goes first that leads to communication soonest, then the one
    of the lowest layer, lane, chunk. (Lowest layer first lets a long stage of an old layer delay a router, and the wire
    runs dry: up to 1.3 times the ideal with three lanes, against 1.04.)"""
    return 0


def _covered(kind: Kind, last: Kind) -> int:
    """For a link that is faster than the products: no short stage while rows travel.

    Behind a stage that lets communication begin come products, else a shared expert, which waits for such a place;
    elsewhere short stages come first, those that let communication begin last.
    """
    if kind.communicates:
        return 0
    if last in (Kind.ROUTE, Kind.EXPERTS):
        return 2 if not kind.covers else int(kind.shared)
    return 3 if kind.shared else {Kind.FINISH: 0, Kind.ROUTE: 1}.get(kind, 2)


_RULES: tuple[_Rule, ...] = (_soonest, _covered)


def _checked(cost: Cost, key: _Key) -> int:
    value = cost(key[0], key[2])
    if value < 0:
        raise ConfigError(f"schedule: the cost of {key[0]} in lane {key[2]} is {value}: must be 0 or more")
    return value
