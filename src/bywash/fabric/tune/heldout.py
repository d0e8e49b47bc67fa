"""Settings held against each other on traffic that the search has not seen, with confidence intervals.

Ratios are geometric means over cases of the paired ratios, their intervals percentiles of a bootstrap over cases:
what another draw of such traffic would show, not how the hardware differs. Knows nothing of search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.fabric.tune.objective import Outcome, Score, score

RESAMPLES = 10_000
TIMES = ("p99_us", "mean_us", "whole_us")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting on the held-out cases. `ratios` are its times over the tuned setting's: above 1, tuned is faster."""

    name: str
    score: Score
    pause_share: Interval
    ratios: Mapping[str, Interval]


def compare(outcomes: Mapping[str, Sequence[Outcome]], tuned: str, *, seed: int = 0) -> list[Row]:
    """A row for each name, in order.

    Args:
        outcomes: by name, on the same cases in the same order.
        tuned: the name that ratios are over.
        seed: of the bootstrap.
    """
    count = len(outcomes[tuned])
    draws_RC = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    rows = []
    for name, many in outcomes.items():
        paused_C = np.array([one.pause_share for one in many])
        ratios = {}
        for metric in TIMES:
            logs_C = np.log([getattr(a, metric) / getattr(b, metric) for a, b in zip(many, outcomes[tuned])])
            ratios[metric] = _interval(logs_C, draws_RC, exp=True)
        rows.append(
            Row(name=name, score=score(many), pause_share=_interval(paused_C, draws_RC, exp=False), ratios=ratios)
        )
    return rows


def _interval(values_C: NDArray[np.float64], draws_RC: NDArray[np.int64], *, exp: bool) -> Interval:
    """The mean over cases, bootstrapped; of logarithms when `exp`. Infinite when a case was not completed."""
    if not np.isfinite(values_C).all():
        return Interval(value=np.inf, low=np.inf, high=np.inf)
    low, high = np.percentile(values_C[draws_RC].mean(axis=1), [2.5, 97.5])
    three = np.array([values_C.mean(), low, high])
    value, low, high = np.exp(three) if exp else three
    return Interval(value=float(value), low=float(low), high=float(high))
