"""Home placement: which rank owns which expert, before any step is planned.

Shapes: E experts, R ranks. Pure integers; knows nothing of processes, bytes or devices.
The planner and the command line make a `Placement`; `plan_step` and the checkpoint loader read it.
"""

import math
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

    @classmethod
    def from_counts(cls, counts_E: NDArray[np.int64], ranks: int, speeds: Sequence[int] = ()) -> Self:
        """Spread recorded load: as many experts per rank as `weighted` gives, loads as even as swapping makes them.

        Longest processing time first, then swaps of two experts between the most loaded rank and another, the best swap
        first, until none helps. Exact integers, ties to the lower number. Load is relative to speed.
        Example: counts [6, 5, 2, 1] on 2 ranks gives home_E = [0, 1, 1, 0].

        Args:
            counts_E: whole numbers [E], the rows of each expert in a trace.
            ranks: R.
            speeds: as in `weighted`; () for equal ranks.

        Raises:
            ConfigError: no counts, a negative one, or bad speeds.
        """
        counts = [int(count) for count in counts_E]
        if not counts or min(counts) < 0:
            raise ConfigError("placement.counts: one whole number, 0 or more, for each expert is needed")
        if speeds and len(speeds) != ranks:
            raise ConfigError(f"placement.speeds: {len(speeds)} for {ranks} ranks")
        shares_R = np.bincount(cls.weighted(len(counts), speeds or [1] * ranks).home_E, minlength=ranks)
        common = math.lcm(*(int(speed) for speed in speeds if speed))
        times_R = [common // int(speed) if speed else 0 for speed in speeds] or [1] * ranks
        home_E = _longest_first(counts, shares_R.tolist(), times_R)
        return cls(home_E=_swapped(np.array(counts), home_E, np.array(times_R)), ranks=ranks)

    @classmethod
    def of_layers(cls, counts_LE: NDArray[np.int64], ranks: int, speeds: Sequence[int] = ()) -> list[Self]:
        """`from_counts` of each layer, ranks that are alike exchanged in a circle, by one more in each layer.

        Else the hottest expert would be at rank 0 in every layer, and what is uneven in each would add up.
        Example: counts [[6, 5, 2, 1], [6, 5, 2, 1]] on 2 ranks give home_E = [0, 1, 1, 0] and [1, 0, 0, 1].
        """
        made = []
        for layer, counts_E in enumerate(counts_LE):
            placed = cls.from_counts(counts_E, ranks, speeds)
            own_R, to_R = np.bincount(placed.home_E, minlength=ranks), np.arange(ranks, dtype=np.int32)
            kinds = list(zip(own_R.tolist(), speeds or [1] * ranks, strict=True))
            for kind in dict.fromkeys(kinds):
                alike = np.array([rank for rank in range(ranks) if kinds[rank] == kind])
                to_R[alike] = np.roll(alike, -layer)
            made.append(cls(home_E=to_R[placed.home_E], ranks=ranks))
        return made


def _longest_first(counts: list[int], shares_R: list[int], times_R: list[int]) -> NDArray[np.int32]:
    """Each expert, largest first, to the rank with room that has the least time so far."""
    home_E, time_R = np.empty(len(counts), np.int32), [0] * len(shares_R)
    for expert in sorted(range(len(counts)), key=lambda e: (-counts[e], e)):
        rank = min((r for r, room in enumerate(shares_R) if room), key=lambda r: (time_R[r], r))
        home_E[expert] = rank
        shares_R[rank] -= 1
        time_R[rank] += counts[expert] * times_R[rank]
    return home_E


def _swapped(counts_E: NDArray[np.int64], home_E: NDArray[np.int32], times_R: NDArray[np.int64]) -> NDArray[np.int32]:
    """Swap experts of the slowest rank for smaller ones elsewhere while that makes the slower of the two faster."""
    time_R = np.zeros(times_R.size, np.int64)
    np.add.at(time_R, home_E, counts_E * times_R[home_E])
    while True:
        slowest = int(time_R.argmax())
        own, others = np.flatnonzero(home_E == slowest), np.flatnonzero(home_E != slowest)
        if not own.size or not others.size:
            return home_E
        less = counts_E[own][:, None] - counts_E[others]
        after = np.maximum(
            time_R[slowest] - less * times_R[slowest], time_R[home_E[others]] + less * times_R[home_E[others]]
        )
        a, b = np.unravel_index(int(after.argmin()), after.shape)
        if after[a, b] >= time_R[slowest]:
            return home_E
        rank = home_E[others[b]]
        time_R[slowest] -= less[a, b] * times_R[slowest]
        time_R[rank] += less[a, b] * times_R[rank]
        home_E[own[a]], home_E[others[b]] = rank, slowest
