"""How skewed is the routing: per layer, per rank under contiguous placement, and over time.

Shapes: L layers, E experts, n expert-parallel sizes asked about, W windows of consecutive steps.
Knows nothing of tokens beyond their counts, nor of any placement but the contiguous one. The command line
prints it, the planner starts from it. Pure numpy.

For one layer with counts c_e and total C:

- hottest expert: max_e c_e / (C / E), "times the mean".
- top-1 share: max_e c_e / C. Top-10 % share: that of the floor(E / 10) hottest experts, at least one. Tokens
  that each choose K different experts bound the top-1 share by 1 / K.
- Zipf exponent: minus the slope of a least-squares line through (ln rank, ln count) over the top half of the
  experts
  that were used at all, sorted by count: floor(used / 2) of them, at least two. NaN with fewer than two used
      experts.
- busiest rank for R ranks: the greatest load of a rank over the mean, C / R. Contiguous placement: rank r
  owns a run of consecutive ids, and the first E mod R ranks own one more than the rest.
- drift: half the sum over experts of |p - q|, where p and q are the shares of the experts in successive
  windows (the
  total variation distance: the part of the work that moved), averaged over the pairs of windows. A router
      that never
  changes shows drift too, since windows are finite: `drift_noise` is what sampling alone would give.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.routing.trace import DECODE, RoutingTrace

Floats = NDArray[np.float64]
Counts = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SkewSummary:
    """The skew of each layer; the module's head defines each figure. NaN where a layer has no counts.

    Attributes:
        layers: the model's layer numbers, L of them.
        num_experts: E.
        ranks: the expert-parallel sizes of axis n.
        total_L: float64 [L], assignments (tokens x K).
        max_over_mean_L: float64 [L], load of the hottest expert over the mean.
        hottest_L: int64 [L], its id (the lowest of equals).
        top1_share_L, top10pct_share_L: float64 [L], shares in 0..1.
        zipf_L: float64 [L], the fitted exponent.
        unused_L: int64 [L], experts no token chose.
        rank_max_over_mean_Ln: float64 [L, n], load of the busiest rank over the mean.
        drift_L, drift_noise_L: float64 [L] in 0..1, or None without two windows of steps.
        window_steps: steps of a drift window, None without drift.
    """

    layers: tuple[int, ...]
    num_experts: int
    ranks: tuple[int, ...]
    total_L: Floats
    max_over_mean_L: Floats
    hottest_L: NDArray[np.int64]
    top1_share_L: Floats
    top10pct_share_L: Floats
    zipf_L: Floats
    unused_L: NDArray[np.int64]
    rank_max_over_mean_Ln: Floats
    drift_L: Floats | None = None
    drift_noise_L: Floats | None = None
    window_steps: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: one entry per layer, NaN as None."""
        rows = []
        for i, layer in enumerate(self.layers):
            row: dict[str, Any] = {
                "layer": layer,
                "assignments": _plain(self.total_L[i]),
                "hottest_expert": int(self.hottest_L[i]),
                "hottest_over_mean": _plain(self.max_over_mean_L[i]),
                "top1_share": _plain(self.top1_share_L[i]),
                "top10pct_share": _plain(self.top10pct_share_L[i]),
                "zipf_exponent": _plain(self.zipf_L[i]),
                "unused_experts": int(self.unused_L[i]),
                "busiest_rank_over_mean": {
                    str(r): _plain(x) for r, x in zip(self.ranks, self.rank_max_over_mean_Ln[i])
                },
            }
            if self.drift_L is not None and self.drift_noise_L is not None:
                row |= {"drift": _plain(self.drift_L[i]), "drift_noise": _plain(self.drift_noise_L[i])}
            rows.append(row)
        return {"num_experts": self.num_experts, "window_steps": self.window_steps, "layers": rows}


def summarise(
    trace: RoutingTrace | Counts,
    ranks: Sequence[int] = (2, 4, 8),
    *,
    layers: Sequence[int] | None = None,
    window_steps: int | None = None,
) -> SkewSummary:
    """Summarise the skew of a trace, or of counts.

    Args:
        trace: a trace, or counts [L, E] of any real dtype.
        ranks: expert-parallel sizes to report; any, also such that do not divide E.
        layers: layer numbers for counts (default 0..L-1); a trace has its own.
        window_steps: steps of a drift window; default an eighth of the steps, at least one. Of a trace with
            both phases only the decode steps are windowed, since a change of phase is no drift.

    Raises:
        ConfigError: counts of a wrong shape or negative, a rank count or window below 1.
    """
    drift: tuple[Floats, Floats] | None = None
    if isinstance(trace, RoutingTrace):
        counts_LE, layers = trace.counts_LE().astype(np.float64), trace.layers
        counts_WLE, window_steps = _window_counts(trace, window_steps)
        drift = drift_between(counts_WLE) if len(counts_WLE) > 1 else None
    else:
        counts_LE = np.asarray(trace, np.float64)
        layers = range(len(counts_LE)) if layers is None else layers
    if counts_LE.ndim != 2 or counts_LE.shape[1] < 1 or counts_LE.shape[0] != len(layers):
        raise ConfigError(f"counts: shape {list(counts_LE.shape)} must be [{len(layers)} layers, experts]")
    if not (np.isfinite(counts_LE) & (counts_LE >= 0)).all():
        raise ConfigError("counts: must be finite and not negative")
    experts = counts_LE.shape[1]
    sorted_LE = np.sort(counts_LE, axis=1)[:, ::-1]
    total_L = counts_LE.sum(axis=1)
    rank_Ln = [max_over_mean(contiguous_loads(counts_LE, r)) for r in ranks]
    with np.errstate(invalid="ignore", divide="ignore"):
        top1_L, top10_L = (
            sorted_LE[:, 0] / total_L,
            sorted_LE[:, : max(1, experts // 10)].sum(axis=1) / total_L,
        )
    return SkewSummary(
        layers=tuple(layers),
        num_experts=experts,
        ranks=tuple(ranks),
        total_L=total_L,
        max_over_mean_L=max_over_mean(counts_LE),
        hottest_L=counts_LE.argmax(axis=1),
        top1_share_L=top1_L,
        top10pct_share_L=top10_L,
        zipf_L=zipf_exponent(counts_LE),
        unused_L=(counts_LE == 0).sum(axis=1),
        rank_max_over_mean_Ln=np.stack(rank_Ln, axis=1) if ranks else np.zeros((len(layers), 0)),
        drift_L=drift[0] if drift else None,
        drift_noise_L=drift[1] if drift else None,
        window_steps=window_steps if drift else None,
    )


def max_over_mean(loads_LX: Counts) -> Floats:
    """Greatest over mean along the last axis, float64 [L]; NaN where all are zero."""
    with np.errstate(invalid="ignore"):
        ratio: Floats = loads_LX.max(axis=-1) / loads_LX.mean(axis=-1)
    return ratio


def contiguous_loads(counts_LE: Counts, ranks: int) -> Counts:
    """Load of each rank under contiguous placement: [L, ranks]; the first E mod R ranks own one expert more.

    With more ranks than experts the last ranks own none. Raises `ConfigError` when `ranks` < 1.
    """
    if ranks < 1:
        raise ConfigError(f"ranks = {ranks}: must be at least 1")
    size, more = divmod(counts_LE.shape[1], ranks)
    bounds = np.concatenate([[0], np.cumsum(np.repeat([size + 1, size], [more, ranks - more]))])
    running = np.concatenate([np.zeros_like(counts_LE[:, :1]), np.cumsum(counts_LE, axis=1)], axis=1)
    loads: Counts = running[:, bounds[1:]] - running[:, bounds[:-1]]
    return loads


def zipf_exponent(counts_LE: Counts) -> Floats:
    """The fitted Zipf exponent of each layer, float64 [L]; the module's head defines the fit."""
    sorted_LE = np.sort(np.asarray(counts_LE, np.float64), axis=1)[:, ::-1]
    used_L = (sorted_LE > 0).sum(axis=1)
    fitted_L = np.where(used_L < 2, 0, np.maximum(2, used_L // 2))
    inside_LE = np.arange(sorted_LE.shape[1]) < fitted_L[:, None]
    x_E = np.log(np.arange(1, sorted_LE.shape[1] + 1))
    y_LE = np.log(np.where(inside_LE, sorted_LE, 1.0))
    with np.errstate(invalid="ignore", divide="ignore"):
        x_LE = np.where(inside_LE, x_E - (inside_LE * x_E).sum(axis=1, keepdims=True) / fitted_L[:, None], 0.0)
        slope_L: Floats = (x_LE * y_LE).sum(axis=1) / (x_LE * x_LE).sum(axis=1)
    return -slope_L


def drift_between(counts_WLE: Counts) -> tuple[Floats, Floats]:
    """Mean drift between successive windows, and the drift that sampling alone would show.

    The noise takes the two windows for independent samples of their common distribution p with n and m
    assignments: a share differs by a normal variable of variance p (1 - p) (1/n + 1/m), whose mean size is
    sqrt(2 / pi) of its deviation. A token's K choices count as independent; they are distinct, which makes
    the truth a little smaller.

    Args:
        counts_WLE: [W, L, E], W >= 2, every window with at least one assignment in each layer.

    Returns:
        float64 [L] and float64 [L], both in 0..1.
    """
    total_WL = counts_WLE.sum(axis=2, dtype=np.float64)
    share_WLE = counts_WLE / total_WL[:, :, None]
    drift_WL = np.abs(np.diff(share_WLE, axis=0)).sum(axis=2) / 2
    pooled_WLE = (counts_WLE[1:] + counts_WLE[:-1]) / (total_WL[1:] + total_WL[:-1])[:, :, None]
    spread_WL = np.sqrt(pooled_WLE * (1 - pooled_WLE)).sum(axis=2) * np.sqrt(1 / total_WL[1:] + 1 / total_WL[:-1])
    return drift_WL.mean(axis=0), np.minimum(1.0, math.sqrt(2 / math.pi) / 2 * spread_WL.mean(axis=0))


def _window_counts(trace: RoutingTrace, window_steps: int | None) -> tuple[Counts, int]:
    """Counts [W, L, E] of windows of steps that have tokens, without a last, shorter window."""
    decode_S = trace.step_phase_S == DECODE
    wanted_S = trace.step_tokens_S > 0
    if decode_S.any():
        wanted_S = wanted_S & decode_S
    steps = int(wanted_S.sum())
    if window_steps is None:
        window_steps = max(1, steps // 8)
    if window_steps < 1:
        raise ConfigError(f"window_steps = {window_steps}: must be at least 1")
    counts_SLE = trace.counts_SLE()[wanted_S]
    windows = steps // window_steps
    whole = counts_SLE[: windows * window_steps]
    shape = (windows, window_steps, len(trace.layers), trace.num_experts)
    return whole.reshape(shape).sum(axis=1, dtype=np.int64), window_steps


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
