"""Predictions held against measurements: `Check`, and what many of them amount to. Pure.

An error is |predicted / measured - 1|. `deepep`, `serving` and `own` make checks; `table` prints them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One measured number and ours for it.

    Attributes:
        regime: the row of the table that it belongs to, such as `normal dispatch, 4 nodes`.
        name: which point, such as `4096 tokens`.
        measured, predicted: in the same unit.
        other: a peer's prediction; None where it gives none.
        fitted: whether our figures were fitted to this very point.
    """

    regime: str
    name: str
    measured: float
    predicted: float
    other: float | None = None
    fitted: bool = False

    @property
    def error(self) -> float:
        """Ours."""
        return abs(self.predicted / self.measured - 1)

    @property
    def other_error(self) -> float | None:
        """The peer's."""
        return abs(self.other / self.measured - 1) if self.other is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, 90th percentile and largest of some errors; NaN for none."""

    count: int
    median: float
    p90: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.1%} (p90 {self.p90:.1%})" if self.count else "-"


def spread(errors: Sequence[float]) -> Spread:
    """Of errors; empty is no error."""
    if not errors:
        return Spread(count=0, median=float("nan"), p90=float("nan"), most=float("nan"))
    median, p90 = np.percentile(errors, [50, 90])
    return Spread(count=len(errors), median=float(median), p90=float(p90), most=max(errors))


def order(checks: Sequence[Check]) -> float:
    """Spearman's rank correlation of predicted and measured: 1 where both sort the points alike; NaN below 3 points."""
    if len(checks) < 3:
        return float("nan")
    ranks = [_ranks([getattr(one, name) for one in checks]) for name in ("predicted", "measured")]
    return float(np.asarray(np.corrcoef(ranks))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in sorted order, ties their mean."""
    sorted_values = np.sort(values)
    return [
        float(np.searchsorted(sorted_values, v) + np.searchsorted(sorted_values, v, side="right")) / 2 for v in values
    ]


def by_regime(checks: Sequence[Check]) -> dict[str, list[Check]]:
    """In order of first appearance."""
    found: dict[str, list[Check]] = {}
    for one in checks:
        found.setdefault(one.regime, []).append(one)
    return found
