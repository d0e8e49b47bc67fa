"""A forward pass as data: which stage of which layer runs on which stream, and what orders the streams.

A *lane* is one micro-batch of the pipeline (A, B, ...): while one lane's rows travel, another lane computes. A *chunk*
is a part of a lane's tokens with an exchange of its own: rows of one chunk are computed while the next one's travel, so
that one lane also overlaps with itself. An *op* is one stage of one layer for one lane, or for one of its chunks.

Every stream runs its ops in the order in which the schedule lists them. Order between streams comes from semaphores
alone: the source op raises, the target op waits. `check` proves that this is enough for every dependency and that
nothing can wait for itself; `order` decides the order, here is only what it means.

Knows nothing of tensors, threads, devices or time. Executors run it (`run_threads`), `simulate` costs it, reports
draw it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from bywash.errors import ConfigError


class Stream(StrEnum):
    """What runs ops one after the other: a thread on CPU, a stream on a GPU."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


class Kind(StrEnum):
    """The stages of a decoder layer. A shared expert is one stage, or two that cover one half of the exchange each."""

    ATTENTION = "attention"
    DENSE = "dense"
    ROUTE = "route"
    DISPATCH = "dispatch"
    SHARED = "shared expert"
    SHARED_UP = "shared expert up"
    SHARED_DOWN = "shared expert down"
    EXPERTS = "experts"
    COMBINE = "combine"
    FINISH = "finish"

    @property
    def communicates(self) -> bool:
        """Whether the stage is part of the exchange."""
        return self in (Kind.DISPATCH, Kind.COMBINE)

    @property
    def covers(self) -> bool:
        """Whether the stage is mostly products, behind which communication counts as hidden."""
        return self in (Kind.ATTENTION, Kind.DENSE, Kind.EXPERTS) or self.shared

    @property
    def shared(self) -> bool:
        """Whether the stage is a shared expert or a part of one: it may run whenever the stream has nothing better."""
        return self in (Kind.SHARED, Kind.SHARED_UP, Kind.SHARED_DOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a step is cut: `lanes` micro-batches, each of which exchanges its tokens in `chunks` parts.

    An overlapped step in one piece hides dispatch and combine behind the two halves of a shared expert.

    Attributes:
        lanes, chunks: at least 1 each.
        overlapped: whether communication has a stream of its own; without one everything runs in turn.
    """

    lanes: int = 1
    chunks: int = 1
    overlapped: bool = True

    def __post_init__(self) -> None:
        for name in ("lanes", "chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"split.{name} = {getattr(self, name)}: must be at least 1")

    @property
    def whole(self) -> bool:
        """Whether an overlapped step is in one piece."""
        return self.overlapped and self.lanes * self.chunks == 1

    def __str__(self) -> str:
        if not self.overlapped:
            return "serial"
        words = [f"{self.lanes} micro-batches"] if self.lanes > 1 else []
        words += [f"{self.chunks} chunks"] if self.chunks > 1 else []
        return " x ".join(words) or "one micro-batch, overlapped"


SERIAL = Split(overlapped=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """Which stages a layer has. A layer without experts has attention and dense; a synthetic one may lack attention."""

    moe: bool = True
    shared: bool = False
    attention: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One stage of one layer, for one lane or chunk.

    Attributes:
        number: its place in `Schedule.ops`.
        kind, layer, lane, chunk: what it is; `chunk` is 0 for stages of a whole lane.
        stream: where it runs.
        after: numbers of the ops that must have ended: those whose results it reads, and the exchange step whose
            buffers it takes over.
        awaits, signals: numbers of the semaphores that it waits for before, and raises after.
    """

    number: int
    kind: Kind
    layer: int
    lane: int
    chunk: int
    stream: Stream
    after: tuple[int, ...]
    awaits: tuple[int, ...] = ()
    signals: tuple[int, ...] = ()

    def __str__(self) -> str:
        lane = chr(ord("A") + self.lane) if self.lane < 26 else str(self.lane)
        return f"{self.kind} {lane}{self.chunk} of layer {self.layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Semaphore:
    """Order between two streams: `target` waits until `source` has ended. Numbers of ops."""

    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One forward pass over the layers of a model.

    Attributes:
        split: how the step is cut.
        in_flight: exchange steps that may be between dispatch and the end of combine at once.
        ops: in an order that respects every dependency; each stream runs its own ops in this order.
        semaphores: by number.
    """

    split: Split
    in_flight: int
    ops: tuple[Op, ...]
    semaphores: tuple[Semaphore, ...]

    def on(self, stream: Stream) -> tuple[Op, ...]:
        """The ops of one stream, in order."""
        return tuple(op for op in self.ops if op.stream == stream)


Clock = dict[Stream, int]
"""For each stream, the last op that is known to have ended; -1 for none."""


def semaphores_for(ops: Sequence[Op]) -> list[Semaphore]:
    """The fewest semaphores that order `ops` as their dependencies ask, given that each stream keeps its order.

    A dependency needs none if it is on the op's own stream, or if what the stream has waited for before implies it.
    Example: if op 2 (communication) follows op 1 (compute), one semaphore orders op 2, and every later op of its
    stream, after ops 0 and 1.
    """
    found: list[Semaphore] = []

    def await_newest(op: Op, known: Clock, ended: list[Clock]) -> None:
        for stream in Stream:
            before = [number for number in op.after if ops[number].stream == stream]
            if stream != op.stream and before and known[stream] < max(before):
                found.append(Semaphore(source=max(before), target=op.number))
                _merge(known, ended[max(before)])

    _walk(ops, await_newest)
    return found


def check(schedule: Schedule) -> Schedule:
    """Return the schedule if it is sound.

    Sound: every op comes after those it depends on (so nothing waits in a circle), stream order and semaphores together
    imply every dependency, semaphores and ops name each other, and no more than `in_flight` exchange steps are open.

    Raises:
        ConfigError: the first op that is not ordered as it must be.
    """
    ops = schedule.ops
    for place, op in enumerate(ops):
        late = [number for number in op.after if not 0 <= number < place]
        if op.number != place or late:
            raise ConfigError(f"schedule.ops[{place}] ({op}): numbered {op.number}, after ops {late} that come later")
    _check_names(schedule)

    def must_know(op: Op, known: Clock, ended: list[Clock]) -> None:
        for number in op.awaits:
            _merge(known, ended[schedule.semaphores[number].source])
        for number in op.after:
            if known[ops[number].stream] < number:
                raise ConfigError(f"schedule.ops[{op.number}] ({op}): no semaphore orders it after {ops[number]}")

    _walk(ops, must_know)
    _check_in_flight(schedule)
    return schedule


def _walk(ops: Sequence[Op], visit: Callable[[Op, Clock, list[Clock]], None]) -> None:
    """Call `visit(op, known, ended)` for each op: what its stream knows to have ended, and knew at each op's end."""
    known: dict[Stream, Clock] = {stream: dict.fromkeys(Stream, -1) for stream in Stream}
    ended: list[Clock] = []
    for op in ops:
        mine = known[op.stream]
        visit(op, mine, ended)
        mine[op.stream] = op.number
        ended.append(dict(mine))


def _merge(known: Clock, other: Clock) -> None:
    for stream in Stream:
        known[stream] = max(known[stream], other[stream])


def _check_names(schedule: Schedule) -> None:
    for number, semaphore in enumerate(schedule.semaphores):
        signalling = [op.number for op in schedule.ops if number in op.signals]
        awaiting = [op.number for op in schedule.ops if number in op.awaits]
        if signalling != [semaphore.source] or awaiting != [semaphore.target] or semaphore.source >= semaphore.target:
            raise ConfigError(
                f"schedule.semaphores[{number}]: orders op {semaphore.source} before {semaphore.target}, but is raised "
                f"by {signalling} and awaited by {awaiting}"
            )


def _check_in_flight(schedule: Schedule) -> None:
    """Dispatch number i takes over the buffers of number i - in_flight, so that one's combine must have ended."""
    ops = schedule.ops
    dispatches = [op for op in ops if op.kind == Kind.DISPATCH]
    combines = {(op.layer, op.lane, op.chunk): op.number for op in ops if op.kind == Kind.COMBINE}
    for op, before in zip(dispatches[schedule.in_flight :], dispatches):
        if combines[before.layer, before.lane, before.chunk] not in op.after:
            raise ConfigError(
                f"schedule.ops[{op.number}] ({op}): may begin before the combine of {before} has ended; "
                f"{schedule.in_flight} exchange steps may be open at once"
            )
