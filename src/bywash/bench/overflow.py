"""`bywash bench overflow`: plan every layer of recorded counts under a policy, and say what came out.

Shapes: L layers, S steps, R ranks, E experts. Plans only; no row is moved. Knows nothing of files or printing; the
command line and benchmarks/balance call it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bywash.balance import Limits, Placement, SlotDirectory, plan_step
from bywash.balance.rivals import Outcome, at_home, eplb, llep
from bywash.errors import ConfigError

POLICIES = ("bywash", "refetch", "none", "eplb", "llep")
"""`refetch` is ours with slots that forget everything after a step; eplb and llep are by us from their descriptions."""

Counts = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowBench:
    """What to plan.

    Attributes:
        ranks, slots: R, and slots for foreign experts of each rank, shared by all layers.
        limits: when rows leave home.
        policy: one of `POLICIES`.
        rearrange: place the experts of each layer by all its counts first, instead of in blocks.
    """

    ranks: int
    slots: int
    limits: Limits
    policy: str = "bywash"
    rearrange: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(f"--policy {self.policy}: choose one of {', '.join(POLICIES)}")


def scaled_counts(counts_LE: NDArray[np.float64], ranks: int, rows: int) -> Counts:
    """One step, int32 [1, L, R, E], in which each rank sends `rows` rows in the proportions of each layer's counts.

    Largest remainder, so that the rows of a layer are exactly R x `rows`; sources are alike up to one row.
    """
    step = np.empty((1, counts_LE.shape[0], ranks, counts_LE.shape[1]), np.int32)
    for layer, counts_E in enumerate(counts_LE):
        exact_E = counts_E / counts_E.sum() * (rows * ranks)
        rows_E = np.floor(exact_E).astype(np.int64)
        missing = rows * ranks - int(rows_E.sum())
        rows_E[np.argsort(rows_E - exact_E, kind="stable")[:missing]] += 1
        ends_E = rows_E.cumsum()
        begins_E = ends_E - rows_E
        cuts_R = np.arange(ranks)[:, None]
        # source r takes rows r, r + R, r + 2 R, ... of the sequence of all rows
        step[0, layer] = (ends_E - cuts_R + ranks - 1) // ranks - (begins_E - cuts_R + ranks - 1) // ranks
    return step


def measure(bench: OverflowBench, steps_LRE: Counts, layers: tuple[int, ...]) -> dict[str, Any]:
    """Plan the steps in turn, int32 [S, L, R, E]; `layers` names the L layers. What `--json` gets."""
    per_layer = {layer: _LayerSums() for layer in layers}
    times_us: list[float] = []
    dropped = 0
    for index, before, outcome, took_us in _outcomes(bench, steps_LRE):
        per_layer[layers[index]].add(before, outcome)
        times_us.append(took_us)
        dropped += int(before.sum()) - int(outcome.rows_R.sum())
    rows = [{"layer": layer, **sums.summary()} for layer, sums in per_layer.items()]
    steps = steps_LRE.shape[0]
    return {
        "policy": bench.policy,
        "ranks": bench.ranks,
        "slots": bench.slots,
        "steps": steps,
        "layers": rows,
        "max_over_mean_before": statistics.mean(row["max_over_mean_before"] for row in rows),
        "max_over_mean_after": statistics.mean(row["max_over_mean_after"] for row in rows),
        "worst_after": max(row["worst_after"] for row in rows),
        "fetches_per_step": sum(row["fetches"] for row in rows) / steps,
        "dropped_rows": dropped,
        "plan_us_median": statistics.median(times_us),
    }


class _LayerSums:
    """Of one layer, over steps."""

    def __init__(self) -> None:
        self._before: list[float] = []
        self._after: list[float] = []
        self._fetches = self._spilled = 0

    def add(self, before_R: NDArray[np.int64], outcome: Outcome) -> None:
        if not before_R.any():
            return
        self._before.append(float(before_R.max()) / before_R.mean())
        self._after.append(float(outcome.rows_R.max()) / before_R.mean())
        self._fetches += outcome.fetches
        self._spilled += outcome.spilled

    def summary(self) -> dict[str, Any]:
        return {
            "max_over_mean_before": statistics.mean(self._before or [1.0]),
            "max_over_mean_after": statistics.mean(self._after or [1.0]),
            "worst_after": max(self._after, default=1.0),
            "fetches": self._fetches,
            "rows_spilled": self._spilled,
        }


def _outcomes(bench: OverflowBench, steps_LRE: Counts) -> Iterator[tuple[int, NDArray[np.int64], Outcome, float]]:
    """(layer's index, rows per rank at home, outcome, microseconds) of every plan, in the order of a run."""
    layers, experts = steps_LRE.shape[1], steps_LRE.shape[3]
    history_LE = steps_LRE.sum(axis=(0, 2), dtype=np.int64)
    placements = [Placement.equal(experts, bench.ranks)] * layers
    if bench.rearrange:
        placements = Placement.of_layers(history_LE, bench.ranks, bench.limits.speeds)
    policy = _policy(bench, placements, history_LE)
    policy(0, steps_LRE[0, 0])  # loads the compiled planner
    policy = _policy(bench, placements, history_LE)
    for counts_LRE in steps_LRE:
        for layer, counts_RE in enumerate(counts_LRE):
            begin = time.perf_counter()
            outcome = policy(layer, counts_RE)
            took_us = (time.perf_counter() - begin) * 1e6
            yield layer, at_home(counts_RE.sum(axis=0, dtype=np.int64), placements[layer]).rows_R, outcome, took_us


def _policy(
    bench: OverflowBench, placements: list[Placement], history_LE: NDArray[np.int64]
) -> Callable[[int, Counts], Outcome]:
    """The bench's policy as a function of (layer's index, counts)."""
    if bench.policy in ("bywash", "refetch"):
        return _Planner(bench, placements)
    limits = bench.limits
    if bench.policy == "eplb":
        return lambda layer, counts_RE: eplb(_rows(counts_RE), history_LE[layer], bench.ranks, bench.slots)
    if bench.policy == "llep":
        return lambda layer, counts_RE: llep(
            _rows(counts_RE), placements[layer], alpha_1024=limits.alpha_1024, least=limits.fetch_rows
        )
    return lambda layer, counts_RE: at_home(_rows(counts_RE), placements[layer])


def _rows(counts_RE: Counts) -> NDArray[np.int64]:
    rows_E: NDArray[np.int64] = counts_RE.sum(axis=0, dtype=np.int64)
    return rows_E


class _Planner:
    """Our own plans, with one directory for all layers."""

    def __init__(self, bench: OverflowBench, placements: list[Placement]) -> None:
        self._bench, self._placements = bench, placements
        self._empty = SlotDirectory.empty(
            ranks=bench.ranks, slots=bench.slots, experts=placements[0].num_experts, layers=len(placements)
        )
        self._directory = self._empty

    def __call__(self, layer: int, counts_RE: Counts) -> Outcome:
        before = self._empty if self._bench.policy == "refetch" else self._directory
        plan = plan_step(counts_RE, self._placements[layer], self._bench.limits, before, layer=layer)
        assert plan.directory is not None, "a plan with slots has one"
        self._directory = plan.directory
        return Outcome(rows_R=plan.rows_R, spilled=plan.spilled, fetches=plan.fetches)
