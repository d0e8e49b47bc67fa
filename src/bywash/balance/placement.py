"""Home placement: which rank owns which expert, before any step is planned.

Shapes: E experts, R ranks. Pure integers; knows nothing of processes, bytes or devices.
The planner and the command line make a `Placement`; `plan_step` and the checkpoint loader read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """The home rank of every expert.

    Attributes:
        home_E: int32 [E], the rank that owns each expert.
        ranks: R, the number of ranks; some may own no expert.
    """

    home_E: NDArray[np.int32]
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"placement.ranks = {self.ranks}: at least one rank is needed")
        if self.home_E.ndim != 1 or self.home_E.size == 0:
            raise ConfigError("placement.home must be a list with one rank for each expert")
        outside = np.flatnonzero((self.home_E < 0) | (self.home_E >= self.ranks))
        if outside.size:
            expert = int(outside[0])
            raise ConfigError(f"placement.home[{expert}] = {int(self.home_E[expert])}: ranks are 0..{self.ranks - 1}")

    @property
    def num_experts(self) -> int:
        """E, the experts of the layer over all ranks."""
        return self.home_E.size

    def experts_of(self, rank: int) -> list[int]:
        """The experts whose home is `rank`, ascending. Their order is the order of that rank's weights."""
        return [int(e) for e in np.flatnonzero(self.home_E == rank)]

    @classmethod
    def equal(cls, num_experts: int, ranks: int) -> Self:
        """Contiguous blocks; where R does not divide E the first E % R ranks own one expert more.

        Example: 5 experts on 3 ranks gives home_E = [0, 0, 1, 1, 2].
        """
        return cls.weighted(num_experts, [1] * ranks)

    @classmethod
    def weighted(cls, num_experts: int, speeds: Sequence[int]) -> Self:
        """Contiguous blocks in proportion to integer `speeds` (any unit, one per rank).

        Largest remainder in exact integers, ties to the lower rank, so every rank computes the same.
        Example: 6 experts, speeds [2, 1] gives home_E = [0, 0, 0, 0, 1, 1].

        Raises:
            ConfigError: no rank, a negative speed, or no rank with a positive one.
        """
        if not speeds:
            raise ConfigError("placement.ranks = 0: at least one rank is needed")
        for rank, speed in enumerate(speeds):
            if speed != int(speed) or speed < 0:
                raise ConfigError(f"placement.speeds[{rank}] = {speed}: must be a whole number, 0 or more")
        total = sum(speeds)
        if total == 0:
            raise ConfigError("placement.speeds: all are 0; at least one rank must compute")
        shares = [num_experts * int(speed) // total for speed in speeds]
        by_remainder = sorted(range(len(speeds)), key=lambda r: (-(num_experts * int(speeds[r]) % total), r))
        for rank in by_remainder[: num_experts - sum(shares)]:
            shares[rank] += 1
        home = np.repeat(np.arange(len(speeds), dtype=np.int32), shares)
        return cls(home_E=home, ranks=len(speeds))
