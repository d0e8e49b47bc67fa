"""`--slots`, `--capacity-factor`: what a job does with rows beyond what their home should take, and what came of it.

All ranks turn the same options into the same limits in whole rows, before the first step. `cli/run.py` fills the
options, `job.py` opens the pool. Knows nothing of steps or tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bywash.balance import Limits
from bywash.balance.counters import LayerCounters
from bywash.balance.limits import MOST_ROWS
from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowOptions:
    """As a user gives them.

    Attributes:
        slots: for foreign experts on each rank, shared by all layers.
        capacity_factor: the most rows of one expert at once, as a multiple of the mean in prefill; 0 for no cap.
        alpha_1024: see `Limits`.
        break_even: rows below which no weights are copied.
    """

    slots: int
    capacity_factor: float
    alpha_1024: int
    break_even: int

    def limits(self, *, tokens: int, top_k: int, experts: int, speeds: Sequence[int]) -> Limits:
        """Limits in rows.

        Example: 100 tokens, top-2 of 16 experts are 12.5 rows of each on average; factor 1.5 caps at 19.

        Args:
            tokens: of the job's largest step, over all ranks.
            top_k, experts: of the model.
            speeds: of the ranks; empty for equal ones.

        Raises:
            ConfigError: a capacity below the break-even, so that no slot could ever be used.
        """
        capacity = MOST_ROWS
        if self.capacity_factor:
            capacity = min(MOST_ROWS, max(1, -int(-self.capacity_factor * tokens * top_k // experts)))
        if capacity < self.break_even:
            raise ConfigError(
                f"--capacity-factor {self.capacity_factor:g}: {capacity} rows of an expert at once, below --break-even "
                f"{self.break_even}, so that no slot could ever be used; raise it or lower --break-even"
            )
        return Limits(capacity=capacity, alpha_1024=self.alpha_1024, fetch_rows=self.break_even, speeds=tuple(speeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowResult:
    """What one rank knows when the job is done: the capacity in rows (None without one), and each layer's counters."""

    capacity: int | None
    counters: list[LayerCounters]
