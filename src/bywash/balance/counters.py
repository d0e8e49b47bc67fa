"""What became of each layer's rows, summed over steps: for reports, `--json` and metrics. Counts only.

Shapes: R ranks, E experts. `SlotPool` adds to them; whoever reports reads them. Knows nothing of output formats but a
line of Prometheus text.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.balance.pieces import rows_under
from bywash.balance.plan import StepPlan


@dataclass(slots=True, kw_only=True)
class LayerCounters:
    """Sums over the steps of one layer, over all ranks; the same on every rank but for `plan_us`.

    Attributes:
        steps: that ran.
        rows_home, rows_spilled: computed at home, and away from it.
        rows_waited: of those at home, rows beyond the capacity or of later tokens, in a second wave or later.
        most_waves: the most waves that one step took for an expert.
        busiest_home: rows of each step's (or wave's) most loaded rank, had all rows been computed at home.
        busiest: rows of each step's (or wave's) most loaded rank.
        fetches, fetched_bytes: copies of an expert's weights into slots.
        plan_us: time spent planning, microseconds.
    """

    steps: int = 0
    rows_home: int = 0
    rows_spilled: int = 0
    rows_waited: int = 0
    most_waves: int = 0
    busiest_home: int = 0
    busiest: int = 0
    fetches: int = 0
    fetched_bytes: int = 0
    plan_us: float = 0.0

    def add_step(self, plan: StepPlan, counts_RE: NDArray[np.int32], *, wave: int = 0) -> NDArray[np.int64]:
        """Count a step that runs under `plan`, made from its own counts or an earlier step's.

        Args:
            plan: see above.
            counts_RE: int32 [R, E], the step's own counts.
            wave: where a step's tokens come in several waves, each with a plan and counts, which of them this is.

        Returns:
            int64 [R], the rows that each rank computes in it.
        """
        rows_ER = rows_under(plan, counts_RE)
        rows_R: NDArray[np.int64] = rows_ER.sum(axis=0)
        home_E = plan.rank_E
        home_rows_E = rows_ER[np.arange(home_E.size), home_E]
        at_home_R = np.zeros_like(rows_R)
        np.add.at(at_home_R, home_E, rows_ER.sum(axis=1))
        self.steps += wave == 0
        self.rows_home += int(home_rows_E.sum())
        self.rows_spilled += int(rows_R.sum() - home_rows_E.sum())
        self.rows_waited += int((home_rows_E - (0 if wave else plan.capacity)).clip(min=0).sum())
        self.most_waves = max(self.most_waves, wave + int((-(-home_rows_E // plan.capacity)).max(initial=0)))
        self.busiest_home += int(at_home_R.max())
        self.busiest += int(rows_R.max())
        return rows_R


def imbalance(counters: Sequence[LayerCounters], ranks: int) -> tuple[float, float]:
    """Rows on the most loaded rank over the mean, had all been computed at home and as they were, over all steps.

    Every step waits for its most loaded rank: so these are sums over steps of the maximum, not the maximum of sums.
    """
    rows = sum(counted.rows_home + counted.rows_spilled for counted in counters)
    busiest_home, busiest = (sum(getattr(c, name) for c in counters) for name in ("busiest_home", "busiest"))
    return (busiest_home * ranks / rows, busiest * ranks / rows) if rows else (1.0, 1.0)


def as_json(counters: Sequence[LayerCounters]) -> list[dict[str, float]]:
    """One object per layer, with its number."""
    return [{"layer": layer, **asdict(counted)} for layer, counted in enumerate(counters)]


def as_prometheus(counters: Sequence[LayerCounters], prefix: str = "bywash_overflow") -> str:
    """Prometheus text format: each counter with a label for the layer."""
    lines = []
    for name in asdict(LayerCounters()):
        kind = "gauge" if name == "most_waves" else "counter"
        suffix = "" if kind == "gauge" else "_total"
        lines.append(f"# TYPE {prefix}_{name}{suffix} {kind}")
        for layer, counted in enumerate(counters):
            lines.append(f'{prefix}_{name}{suffix}{{layer="{layer}"}} {getattr(counted, name)}')
    return "\n".join(lines) + "\n"
