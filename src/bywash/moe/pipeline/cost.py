"""One micro-batch, several, or chunks: which split of a step is fastest, and why. Pure arithmetic that shows itself.

Splitting hides communication behind compute, but every part reads the weights again: a stage takes somewhat more than
the longer of its arithmetic and its weights' way from memory. With 256 experts and 4,096 tokens on two H200 two
micro-batches lose (6.1 against 4.8 ms of experts); with fewer experts per rank, more tokens, or a slow link they win.
Stage times come from the sizes and a `Machine`; the schedule itself, simulated, says what they add up to.

Knows nothing of devices. `bywash run --overlap auto` follows it; the planner simulates the same schedules with stage
times of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bywash.errors import ConfigError
from bywash.exchange.cost import Step
from bywash.exchange.names import Combine
from bywash.moe.pipeline.order import build_schedule
from bywash.moe.pipeline.schedule import SERIAL, Kind, LayerForm, Split
from bywash.moe.pipeline.simulate import Usage, simulate, usage

MODES = ("off", "microbatch", "tile", "shared", "auto")
_SHARED_MATRICES = {Kind.SHARED: 3, Kind.SHARED_UP: 2, Kind.SHARED_DOWN: 1}
_MOST_LANES = 4
_CHUNKS = (2, 4)
_MIX = 4.0
"""Exponent of the norm that joins arithmetic and weights' way: where both are as long, a stage takes 1.19 times either.
Fitted: experts of two H200, 256 in all, took 4.84, 3.06 and 2.80 ms for 4,096, 2,048 and 1,024 tokens a rank."""
_LAYERS = 8
"""Layers that are simulated: enough for a steady state; beginning and end weigh a little more than in a deep model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one rank's device and link do. Rates of one rank; 10^9 bytes per second, 10^12 operations per second.

    Attributes:
        tflops: of matrix products in the model's dtype.
        memory_gbytes_per_s: reading weights.
        link_gbytes_per_s: rows from one rank to all others together, while all send.
        exchange_start_us: of a dispatch or a combine, whatever it carries.
        stage_start_us: of a compute stage.
        source: where the figures come from.
        tail_us: what the last tiles of a stage of products leave idle; joined with its weights like the arithmetic.
    """

    tflops: float
    memory_gbytes_per_s: float
    link_gbytes_per_s: float
    exchange_start_us: float
    stage_start_us: float
    source: str
    tail_us: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tflops", "memory_gbytes_per_s", "link_gbytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"machine.{name} = {getattr(self, name)}: must be above 0")


H200_NVLINK = Machine(
    tflops=630.0,
    memory_gbytes_per_s=4100.0,
    link_gbytes_per_s=386.0,
    exchange_start_us=10.0,
    stage_start_us=15.0,
    source="two H200, NV18: products and tails inside a step of many layers, copies by copy engine (docs/overlap.md)",
    tail_us=120.0,
)


def cpu_rank(link_gbps: float, latency_us: float) -> Machine:
    """One CPU core with an emulated link of its own. Rates are estimates for a Zen 4 core in float32, 16-row tiles."""
    return Machine(
        tflops=0.05,
        memory_gbytes_per_s=8.0,
        link_gbytes_per_s=link_gbps / 8,
        exchange_start_us=latency_us + 500.0,
        stage_start_us=100.0,
        source="estimates for one Zen 4 core in float32, and the emulated link",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One rank's step through one layer.

    Attributes:
        ranks, tokens, hidden, item_bytes, top_k, experts, combine: as in `exchange.cost.Step`; tokens per rank.
        intermediate: of an expert.
        shared_intermediate: of the expert that every token visits; 0 for none.
        attention_weights: numbers in the attention's matrices.
        attention_size: query heads x their size; 0 for `hidden`.
        context: positions that a token attends to, on average.
        passes: whether sums are passes over memory of their own, as on GPUs, or made where rows are, as on CPUs. An
            exchange by kernels makes them on the way, and takes that much longer.
    """

    ranks: int
    tokens: int
    hidden: int
    item_bytes: int
    top_k: int
    experts: int
    combine: Combine
    intermediate: int
    shared_intermediate: int = 0
    attention_weights: int = 0
    attention_size: int = 0
    context: int = 0
    passes: bool = False

    def stage_ns(self, kind: Kind, split: Split, machine: Machine) -> int:
        """Nanoseconds of one op of `kind`: of a lane, or of one of its chunks."""
        tokens = self.tokens / split.lanes
        if kind in (Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE):
            tokens /= split.chunks
        if kind.communicates:
            return round(self._wire_bytes(kind, tokens) / machine.link_gbytes_per_s + machine.exchange_start_us * 1e3)
        flops, weights = self._work(kind, tokens)
        ns_per_number = self.item_bytes / machine.memory_gbytes_per_s
        sums_ns = self._summed(kind, tokens) * ns_per_number if self.passes else 0.0
        tail_ns = machine.tail_us * 1e3 if kind.covers else 0.0
        both_ns = flops / machine.tflops * 1e-3 + tail_ns, weights * ns_per_number
        products_ns: float = sum(ns**_MIX for ns in both_ns) ** (1 / _MIX)
        return round(products_ns + sums_ns + machine.stage_start_us * 1e3)

    def _work(self, kind: Kind, tokens: float) -> tuple[float, float]:
        """(operations, numbers read) of a compute stage."""
        if kind == Kind.EXPERTS:
            pairs, expert = tokens * self.top_k, 3 * self.hidden * self.intermediate
            return 2 * pairs * expert, min(self.experts / self.ranks, pairs) * expert
        if kind in _SHARED_MATRICES:
            numbers = _SHARED_MATRICES[kind] * self.hidden * self.shared_intermediate
            return 2 * tokens * numbers, numbers
        if kind == Kind.ATTENTION:
            scores = 4 * tokens * self.context * (self.attention_size or self.hidden)
            return 2 * tokens * self.attention_weights + scores, self.attention_weights
        if kind == Kind.ROUTE:
            return 2 * tokens * self.hidden * self.experts, self.hidden * self.experts
        return 0.0, 3 * tokens * self.hidden  # finish: residual, read and written

    def _summed(self, kind: Kind, tokens: float) -> float:
        """Numbers that pass through memory where sums are kernels of their own: others' tokens first, then own ones."""
        here = self.top_k / self.ranks  # pairs of a token that one rank computes, on average
        if kind == Kind.EXPERTS:
            return (self.ranks - 1) * tokens * (here + 1) * self.hidden
        return tokens * (here + self.ranks) * self.hidden if kind == Kind.FINISH else 0.0

    def _wire_bytes(self, kind: Kind, tokens: float) -> float:
        reached = self._step().reached
        row_bytes = self.hidden * self.item_bytes
        if kind == Kind.DISPATCH:
            return tokens * reached * (row_bytes + 8 * self.top_k)
        unsummed = self.top_k * (self.ranks - 1) / self.ranks
        return tokens * (unsummed if self.combine == "exact" else reached) * row_bytes

    def _step(self) -> Step:
        return Step(
            ranks=self.ranks,
            tokens=max(1, self.tokens),
            hidden=self.hidden,
            item_bytes=self.item_bytes,
            top_k=self.top_k,
            experts=self.experts,
            combine=self.combine,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One split: the simulated step of `_LAYERS` layers; stage times of one layer over its lanes and chunks, ns."""

    split: Split
    usage: Usage
    stages_ns: dict[Kind, int]

    def __str__(self) -> str:
        return f"{self.split}: {self.usage.step_ns / _LAYERS / 1e6:.3g} ms a layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, what else there was (the serial schedule first), and why."""

    split: Split
    candidates: tuple[Candidate, ...]
    why: str


def splits_of(mode: str, most_lanes: int) -> tuple[Split, ...]:
    """The splits that `--overlap mode` may take, for ranks that have up to `most_lanes` batches to spread over lanes.

    Raises:
        ConfigError: an unknown mode.
    """
    if mode not in MODES:
        raise ConfigError(f"--overlap {mode}: choose one of {', '.join(MODES)}")
    lanes = tuple(Split(lanes=n) for n in range(2, max(2, min(_MOST_LANES, most_lanes)) + 1))
    chunks = tuple(Split(chunks=n) for n in _CHUNKS)
    if mode == "auto":
        return (SERIAL, *(lanes if most_lanes > 1 else ()), *chunks, Split())
    return {"off": (SERIAL,), "microbatch": lanes, "tile": chunks, "shared": (Split(),)}[mode]


def decide(load: Load, machine: Machine, allowed: Sequence[Split]) -> Decision:
    """The fastest of the allowed splits; of equals the first. A whole step has nothing to hide behind without a shared
    expert, and is left out then unless nothing else is allowed."""
    form = LayerForm(shared=load.shared_intermediate > 0, attention=load.attention_weights > 0)
    serial = _candidate(load, machine, form, SERIAL)
    useful = [split for split in allowed if form.shared or not split.whole] or allowed
    others = [_candidate(load, machine, form, split) for split in useful if split.overlapped]
    choice = min([serial, *others] if SERIAL in allowed else others, key=lambda one: one.usage.step_ns)
    return Decision(split=choice.split, candidates=(serial, *others), why=_why(choice, serial, others))


def _candidate(load: Load, machine: Machine, form: LayerForm, split: Split) -> Candidate:
    cost = {kind: load.stage_ns(kind, split, machine) for kind in Kind}
    schedule = build_schedule([form] * _LAYERS, split, cost=lambda kind, lane: cost[kind])
    spans = simulate(schedule, lambda op: cost[op.kind])
    times = {kind: split.lanes * ns for kind, ns in cost.items()}
    for kind in (Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE):
        times[kind] *= split.chunks
    return Candidate(split=split, usage=usage(spans), stages_ns=times)


def _why(choice: Candidate, serial: Candidate, others: Sequence[Candidate]) -> str:
    """The choice against the serial schedule, or against the best of the others."""
    other = serial if choice is not serial else min(others, key=lambda one: one.usage.step_ns, default=serial)
    if other is choice:
        return f"{choice}; nothing else was allowed"
    ours, theirs = (one.usage for one in (choice, other))
    experts = [one.stages_ns[Kind.EXPERTS] / 1e6 for one in (serial, other if choice is serial else choice)]
    split = other if choice is serial else choice
    return (
        f"{choice} against {other} ({theirs.step_ns / ours.step_ns:.2f}x); splitting into {split.split} makes experts "
        f"{experts[0]:.3g} -> {experts[1]:.3g} ms a layer and hides {split.usage.hidden_share:.0%} of the communication"
    )
