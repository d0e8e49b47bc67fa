"""What slots would do to a step: the runtime's own plan (`balance.plan_step`) on the sampled traffic.

Shapes: R ranks, E experts, L sampled layers. Every layer starts from empty slots, as in a model whose layers share few
of them; slots that stay filled only make it better. Knows rows, nothing of time but what a copied expert costs.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.balance.limits import MOST_ROWS, Limits, SlotDirectory
from bywash.balance.placement import Placement
from bywash.balance.plan import plan_step
from bywash.planner.traffic import LayerRows, Traffic

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """Expert rows of each rank in one layer, and what made them so.

    Attributes:
        rows_R: float64 [R]. active_R: float64 [R], experts with rows on each rank.
        fetches_R: weights that each rank copies before the step.
        spilled: rows computed away from home.
    """

    rows_R: FloatArray
    active_R: FloatArray
    fetches_R: FloatArray
    spilled: float = 0.0

    def imbalance(self, speeds_R: NDArray[np.int64]) -> float:
        """The most loaded rank over its fair share: the mean, for ranks of one speed."""
        total = float(self.rows_R.sum())
        return float((self.rows_R / speeds_R).max()) * float(speeds_R.sum()) / total if total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRule:
    """When rows leave home.

    Attributes:
        slots: on each rank.
        alpha_1024: the load that it keeps, in 1024ths of its share.
        break_even: rows that are worth a copy of an expert's weights.
        capacity_factor: most rows of an expert at once, over the mean; 0 for no cap.
    """

    slots: int = 0
    alpha_1024: int = 1044
    break_even: int = 1
    capacity_factor: float = 0.0


def home_loads(layer: LayerRows, ranks: int, tokens: float, reference: int) -> Loads:
    """All rows at home, in a step of `tokens`; experts are met as Poisson arrivals."""
    rows_E = layer.expert_rows_E * (tokens / reference)
    rows_R = np.bincount(layer.home_E, weights=rows_E, minlength=ranks).astype(np.float64)
    active_R = np.bincount(layer.home_E, weights=-np.expm1(-rows_E), minlength=ranks).astype(np.float64)
    return Loads(rows_R=rows_R, active_R=active_R, fetches_R=np.zeros(ranks))


def slot_loads(traffic: Traffic, layer: LayerRows, tokens: float, rule: SlotRule, speeds_R: NDArray[np.int64]) -> Loads:
    """Under the runtime's plan. Sources are taken to bring experts in the proportion of their tokens."""
    ranks, experts = traffic.tokens_R.size, layer.home_E.size
    rows_E = np.asarray(layer.expert_rows_E * (tokens / traffic.tokens), np.float64)
    counts_RE = _dealt(rows_E, traffic.tokens_R)
    limits = Limits(
        capacity=_capacity(rule, float(rows_E.mean())),
        alpha_1024=rule.alpha_1024,
        fetch_rows=rule.break_even,
        speeds=tuple(int(speed) for speed in speeds_R) if len(set(speeds_R.tolist())) > 1 else (),
    )
    directory = SlotDirectory.empty(ranks=ranks, slots=rule.slots, experts=experts)
    plan = plan_step(counts_RE, Placement(home_E=layer.home_E, ranks=ranks), limits, directory)
    return Loads(
        rows_R=plan.rows_R.astype(np.float64),
        active_R=(plan.rows_ER > 0).sum(axis=0).astype(np.float64),
        fetches_R=(plan.fetch_RS >= 0).sum(axis=1).astype(np.float64),
        spilled=float(plan.spilled),
    )


def _dealt(rows_E: FloatArray, tokens_R: NDArray[np.int64]) -> NDArray[np.int32]:
    """Whole rows of each expert, over source ranks in proportion to their tokens: int32 [R, E]."""
    ends = np.cumsum(tokens_R) / tokens_R.sum()
    upto_RE = np.rint(ends[:, None] * np.rint(rows_E)[None, :])
    return np.asarray(np.diff(upto_RE, axis=0, prepend=0.0), np.int32)


def _capacity(rule: SlotRule, mean_rows: float) -> int:
    """In rows; at least the break-even, below which no slot could be used."""
    if not rule.capacity_factor:
        return MOST_ROWS
    return min(MOST_ROWS, max(rule.break_even, 1, math.ceil(rule.capacity_factor * mean_rows)))


def capacity_factor_of(traffic: Traffic) -> float:
    """A cap that traffic like the sample's does not reach: a quarter above its hottest expert, in quarters of the mean.

    Example: a hottest expert of 3.1 times the mean gives 4.0.
    """
    hottest = max(float(layer.expert_rows_E.max() / layer.expert_rows_E.mean()) for layer in traffic.layers)
    return math.ceil(hottest * 1.25 * 4) / 4


def break_even_rows(weight_bytes: float, tflops: float, gbytes_per_s: float) -> int:
    """Rows below which copying an expert takes longer than computing them: bytes / rate = rows x 2 flop a weight.

    Example: bf16, 600 TFLOP/s, 348 GB/s: 2 B x 600e12 / (2 x 348e9) = 1,724 rows.
    """
    return max(1, round(weight_bytes * tflops * 1e3 / (2 * gbytes_per_s)))
