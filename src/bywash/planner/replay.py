"""A recorded run, replayed under a plan: exactly which rows every rank will compute, without running anything.

Shapes: R ranks, L layers, E experts, S steps. The runtime's own planner, slots and counters decide here as they do
there, from the trace's counts in place of the exchanged ones; so prediction and measurement can be compared for
equality. Holds where the second run routes as the recorded one did: same model, prompts, micro-batch, and `exact`
combine. Knows nothing of time. `plan` calls it when the trace is of the planned model; tests close the loop with it.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bywash.balance.counters import LayerCounters, imbalance
from bywash.balance.limits import Limits
from bywash.balance.placement import Placement
from bywash.balance.plan import StepPlan, plan_step
from bywash.routing.trace import PREFILL, RoutingTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What a run of the trace's prompts does under a placement and slots.

    Attributes:
        rows_LR: int64 [L, R], expert rows of each rank over all steps.
        counters: of each layer, as the runtime counts; () without slots or a capacity.
    """

    rows_LR: NDArray[np.int64]
    counters: tuple[LayerCounters, ...] = ()

    @property
    def imbalance(self) -> float:
        """Rows of the busiest rank over the mean, averaged over layers: `imbalance_max_over_mean` of a run."""
        per_layer = self.rows_LR.max(axis=1) / np.maximum(self.rows_LR.mean(axis=1), 1e-9)
        return round(float(per_layer.mean()), 4)

    @property
    def step_imbalance(self) -> tuple[float, float]:
        """Busiest over mean step by step: all at home, and as run; only with slots."""
        return imbalance(self.counters, self.rows_LR.shape[1])


def replay(
    trace: RoutingTrace,
    placement: Placement,
    *,
    micro_batch: int,
    limits: Limits | None = None,
    slots: int = 0,
) -> Replay:
    """Every step of the trace, layer by layer. Without a cap no step is done in waves.

    Args:
        trace: recorded; prompts in groups of `micro_batch` are dealt to ranks in turn, as a run does.
        placement: the home of each expert, the same in all layers.
        micro_batch: of the run.
        limits, slots: as `bywash run` derives them, no capacity among them; without limits all rows stay at home.
    """
    ranks = placement.ranks
    rank_P = np.arange(trace.prompts) // micro_batch % ranks
    layers = [_Layer(number, placement) for number in range(len(trace.layers))]
    pool = _Pool(ranks, limits, slots, trace) if limits is not None else None
    rows_LR = np.zeros((len(layers), ranks), np.int64)
    for step in range(trace.steps):
        ahead = int(trace.step_phase_S[step]) != PREFILL
        for number, layer in enumerate(layers):
            counts_RE = trace.counts_RE(step, trace.layers[number], ranks, rank_P)
            rows_LR[number] += layer.step(counts_RE, pool, ahead)
    return Replay(rows_LR=rows_LR, counters=tuple(pool.slots.counters) if pool is not None else ())


class _Layer:
    """What `ExpertParallel.dispatch` decides, without the rows."""

    def __init__(self, number: int, placement: Placement) -> None:
        self._number, self._placement = number, placement
        self._plan: StepPlan | None = None

    def step(self, counts_RE: NDArray[np.int32], pool: "_Pool | None", ahead: bool) -> NDArray[np.int64]:
        """Rows of each rank: int64 [R]."""
        if pool is None:
            return plan_step(counts_RE, self._placement).rows_R
        plan = self._plan if ahead else None
        if plan is None or not pool.slots.may_reuse(plan):
            plan = self._plan = pool.plan(counts_RE, self._placement, self._number, ahead)
        pool.fill(self._number)
        if ahead:
            self._plan = pool.plan(counts_RE, self._placement, self._number, ahead)
        return pool.slots.counters[self._number].add_step(plan, counts_RE)


class _Pool:
    """The runtime's own pool, and which slots still lack the weights that a plan gave them."""

    def __init__(self, ranks: int, limits: Limits, slots: int, trace: RoutingTrace) -> None:
        from bywash.moe.slots import SlotPool

        exchange = cast(Any, SimpleNamespace(ranks=ranks))  # the pool asks for no more until weights are to come
        self.slots = SlotPool(
            exchange,
            limits,
            slots=slots,
            experts=trace.num_experts,
            layers=len(trace.layers),
            ahead_pairs=trace.prompts * trace.top_k,
        )
        self._missing_RS = np.zeros((ranks, slots), np.bool_)

    def plan(self, counts_RE: NDArray[np.int32], placement: Placement, layer: int, ahead: bool) -> StepPlan:
        """As a layer plans."""
        plan = self.slots.plan(counts_RE, placement, layer, ahead=ahead)
        self._missing_RS |= plan.fetch_RS >= 0
        return plan

    def fill(self, layer: int) -> None:
        """Count what the layer's slots would fetch now."""
        directory = self.slots.directory
        wanted_RS = self._missing_RS & (directory.keys_RS // directory.experts == layer)
        self._missing_RS[wanted_RS] = False
        self.slots.counters[layer].fetches += int(np.count_nonzero(wanted_RS))
