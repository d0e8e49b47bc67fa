"""What a step of the GPU exchange costs by each algorithm, and which to take: pure arithmetic that can show itself.

Two algorithms, estimated for dispatch and combine apart and chosen for both together:

- *all-to-all by kernel*: each token's row once to every rank that computes for it. Least bytes, takes multiprocessors.
- *all-gather / reduce-scatter by copy engine*: every row to every rank, every rank's partial sum of every token back.
  More bytes, no multiprocessor, no counts, and nothing can overflow. Its combine first sums on the computing rank in a
  pass of its own, where the kernel sums while it sends.

The default rates come from docs/benchmarks.md (two H200). Those of the kernel are fits through its times at 4,096 and
128 tokens. Of the copies, the rate is the engine's, and the start is the one whose error is as large at 4,096 as at 128
tokens (8 %) for what whole layers took beside their experts. Knows nothing of devices. `exchange.select` follows it,
`bywash bench exchange --explain` prints it.
"""

from dataclasses import dataclass
from math import comb
from typing import Literal

from bywash.errors import ConfigError
from bywash.exchange.names import COMBINES, Combine

Algorithm = Literal["all-to-all", "all-gather"]
_PAIR_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the machine does, both directions of every link busy. Rates in 10^9 bytes per second, times in microseconds.

    Attributes:
        kernel_gbytes_per_s, kernel_start_us: rows written into peers' memory by a kernel on all multiprocessors, and
            what a launch costs before and after (counts, plan, flags, index).
        copy_gbytes_per_s, copy_start_us: the same by copy engine.
        combine_start_us: of the combine kernel.
        sum_gbytes_per_s: what the source's sum reads and writes after the last row has come.
        memory_gbytes_per_s: a pass over the device's own memory, reads and writes together.
        source: where the figures come from.
    """

    kernel_gbytes_per_s: float = 348.0
    kernel_start_us: float = 7.1
    copy_gbytes_per_s: float = 377.0
    copy_start_us: float = 47.0
    combine_start_us: float = 8.1
    sum_gbytes_per_s: float = 3530.0
    memory_gbytes_per_s: float = 4300.0
    source: str = "measured on two H200, NV18 (docs/benchmarks.md)"

    def __post_init__(self) -> None:
        for name in ("kernel_gbytes_per_s", "copy_gbytes_per_s", "sum_gbytes_per_s", "memory_gbytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rates.{name} = {getattr(self, name)}: must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of one layer.

    Attributes:
        ranks, tokens, hidden, item_bytes, top_k, experts: R, T per rank, D, bytes of an element, K, E.
        combine: see `Exchange`; only `fast` and `stable` have sums to scatter.
        remote_ranks: other ranks that compute for a token, on average; None takes uniform routing.
    """

    ranks: int
    tokens: int
    hidden: int
    item_bytes: int
    top_k: int
    experts: int
    combine: Combine = "fast"
    remote_ranks: float | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "hidden", "item_bytes", "top_k", "experts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"step.{name} = {getattr(self, name)}: must be at least 1")
        if self.top_k > self.experts:
            raise ConfigError(f"step.top_k = {self.top_k}: there are only {self.experts} experts")
        if self.combine not in COMBINES:
            raise ConfigError(f"step.combine = {self.combine!r}: choose one of {', '.join(COMBINES)}")
        if self.remote_ranks is not None and not 0 <= self.remote_ranks <= self.ranks - 1:
            raise ConfigError(f"step.remote_ranks = {self.remote_ranks}: 0 to {self.ranks - 1}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return self.hidden * self.item_bytes

    @property
    def reached(self) -> float:
        """Other ranks that compute for a token, on average.

        With uniform routing a rank that owns e of E experts is missed by all K choices with C(E - e, K) / C(E, K).
        Example: 256 experts, top-8: 0.997 of 1 rank at EP2, 2.71 of 3 at EP4, 4.63 of 7 at EP8.
        """
        if self.remote_ranks is not None:
            return self.remote_ranks
        share, extra = divmod(self.experts, self.ranks)
        sizes = [share + 1] * extra + [share] * (self.ranks - extra)
        hit = [1 - comb(self.experts - size, self.top_k) / comb(self.experts, self.top_k) for size in sizes]
        return sum(hit) * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One half of a step by one algorithm.

    Attributes:
        algorithm: which.
        half: `dispatch` or `combine`.
        wire_bytes: sent by each rank to others.
        time_us: expected time, nothing else running.
        uses_sms: whether multiprocessors are busy with it.
        arithmetic: how the time comes about.
    """

    algorithm: Algorithm
    half: Literal["dispatch", "combine"]
    wire_bytes: int
    time_us: float
    uses_sms: bool
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The algorithm to take for both halves of a step, every way that was looked at, and why."""

    algorithm: Algorithm
    estimates: tuple[Estimate, ...]
    why: str

    def time_us(self, algorithm: Algorithm) -> float:
        """Dispatch and combine by one algorithm."""
        return sum(one.time_us for one in self.estimates if one.algorithm == algorithm)


def estimates(step: Step, rates: Rates) -> tuple[Estimate, ...]:
    """Every way that a step can go: dispatch by both, combine by what its mode allows."""
    found = (_dispatch_by_kernel(step, rates), _dispatch_by_copy(step, rates), _combine_by_kernel(step, rates))
    return found if step.combine == "exact" else (*found, _combine_by_copy(step, rates))


OVERLAP_PATIENCE = 1.5
MARGIN = 1.02
"""All-gather must be this much faster: where both take as long, the fewer bytes are left for others."""


def choose(step: Step, rates: Rates | None = None, *, overlapped: bool = False) -> Choice:
    """The algorithm for a step: one for both halves, since one end of the exchange does both.

    Args:
        step: sizes.
        rates: of the machine.
        overlapped: whether other work wants the multiprocessors meanwhile. The way that takes none is then preferred as
            long as it is not slower by more than half: a kernel would stretch that work by about its own time.
    """
    ways = estimates(step, rates or Rates())
    if step.combine == "exact":
        why = "the only way: `exact` returns every pair unsummed, there is nothing to scatter"
        return Choice(algorithm="all-to-all", estimates=ways, why=why)
    kernel_us, copy_us = (
        sum(one.time_us for one in ways if one.algorithm == name) for name in ("all-to-all", "all-gather")
    )
    handicap = 1 / OVERLAP_PATIENCE if overlapped else MARGIN
    algorithm: Algorithm = "all-gather" if copy_us * handicap < kernel_us else "all-to-all"
    return Choice(algorithm=algorithm, estimates=ways, why=_why(algorithm, kernel_us, copy_us))


def _why(algorithm: Algorithm, kernel_us: float, copy_us: float) -> str:
    if algorithm == "all-gather":
        if copy_us > kernel_us:
            return f"takes no multiprocessor from the work beside it, for {copy_us - kernel_us:.1f} us more"
        return f"{kernel_us / copy_us:.2f}x faster than all-to-all"
    if kernel_us > copy_us / MARGIN:
        return f"as fast as all-gather within {MARGIN - 1:.0%}, for fewer bytes"
    return f"{copy_us / kernel_us:.2f}x faster than all-gather"


def _dispatch_by_kernel(step: Step, rates: Rates) -> Estimate:
    rows = step.tokens * step.reached
    index = (step.ranks - 1) * (step.tokens * step.top_k * _PAIR_BYTES + 8 * step.experts)
    wire = round(rows * step.row_bytes) + index
    return Estimate(
        algorithm="all-to-all",
        half="dispatch",
        wire_bytes=wire,
        time_us=rates.kernel_start_us + _us(wire, rates.kernel_gbytes_per_s),
        uses_sms=True,
        arithmetic=(
            f"{rates.kernel_start_us:g} us + ({step.tokens} tokens x {step.reached:.3f} ranks x {step.row_bytes} B + "
            f"{index:,} B of index) / {rates.kernel_gbytes_per_s:g} GB/s"
        ),
    )


def _dispatch_by_copy(step: Step, rates: Rates) -> Estimate:
    others = step.ranks - 1
    index = others * step.tokens * step.top_k * _PAIR_BYTES
    wire = others * step.tokens * step.row_bytes + index
    return Estimate(
        algorithm="all-gather",
        half="dispatch",
        wire_bytes=wire,
        time_us=rates.copy_start_us + _us(wire, rates.copy_gbytes_per_s),
        uses_sms=False,
        arithmetic=(
            f"{rates.copy_start_us:g} us + ({step.tokens} tokens x {others} ranks x {step.row_bytes} B + "
            f"{index:,} B of index) / {rates.copy_gbytes_per_s:g} GB/s"
        ),
    )


def _combine_by_kernel(step: Step, rates: Rates) -> Estimate:
    """Sends while it reads the outputs; what the source still adds up afterwards comes on top.

    `exact` sends all pairs, which takes so long that the source's sums are done meanwhile.
    """
    per_token, rows_read = step.reached, step.reached + 1
    summed, sums = step.tokens * (rows_read + 1) * step.row_bytes, ""
    if step.combine == "exact":
        per_token, summed = step.top_k * (step.ranks - 1) / step.ranks, 0
    else:
        sums = f" + sum of {rows_read:.3f} rows a token at {rates.sum_gbytes_per_s:g} GB/s"
    wire = round(step.tokens * per_token * step.row_bytes)
    return Estimate(
        algorithm="all-to-all",
        half="combine",
        wire_bytes=wire,
        time_us=rates.combine_start_us + _us(wire, rates.kernel_gbytes_per_s) + _us(summed, rates.sum_gbytes_per_s),
        uses_sms=True,
        arithmetic=(
            f"{rates.combine_start_us:g} us + {step.tokens} tokens x {per_token:.3f} rows x {step.row_bytes} B / "
            f"{rates.kernel_gbytes_per_s:g} GB/s{sums}"
        ),
    )


def _combine_by_copy(step: Step, rates: Rates) -> Estimate:
    """Partial sums of all ranks' tokens first, in a pass over the outputs; then copies; then the source's sum."""
    others, everyone = step.ranks - 1, step.ranks * step.tokens
    partial = (step.tokens * step.top_k + everyone) * step.row_bytes  # K rows a token read, spread evenly over ranks
    wire, summed = others * step.tokens * step.row_bytes, step.tokens * (step.ranks + 1) * step.row_bytes
    return Estimate(
        algorithm="all-gather",
        half="combine",
        wire_bytes=wire,
        time_us=rates.copy_start_us
        + _us(partial, rates.memory_gbytes_per_s)
        + _us(wire, rates.copy_gbytes_per_s)
        + _us(summed, rates.sum_gbytes_per_s),
        uses_sms=False,
        arithmetic=(
            f"{rates.copy_start_us:g} us + partial sums, {partial:,} B at {rates.memory_gbytes_per_s:g} GB/s + "
            f"{step.tokens} tokens x {others} ranks x {step.row_bytes} B / {rates.copy_gbytes_per_s:g} GB/s + sum of "
            f"{step.ranks} rows a token at {rates.sum_gbytes_per_s:g} GB/s"
        ),
    )


def _us(size_bytes: float, gbytes_per_s: float) -> float:
    return size_bytes / gbytes_per_s * 1e-3
