"""`plan_step`: from this step's counts, who computes which rows.

Shapes: R ranks, E experts. Pure integers, ties by id, no float: every rank computes the same arrays from the
same counts, and the 32-bit digest that travels with each message proves it before any row is read.

Today every row is computed at its expert's home. Overflow (capacity, slots) belongs in `plan_step`, between the
counts and `rank_E`: an expert's rows then go to several ranks. Nothing else here decides anything.
Knows nothing of torch, processes or bytes. `ExpertParallel` calls it; the exchange only carries the digest.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.balance.placement import Placement
from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What every rank agrees on for one layer of one step.

    Attributes:
        counts_RE: int32 [R, E], rows that each source rank sends to each expert.
        rank_E: int32 [E], the rank that computes each expert's rows in this step.
        rows_R: int64 [R], expert rows that each rank computes in this step.
        digest: 32-bit hash of the arrays above, equal on all ranks that agree.
    """

    counts_RE: NDArray[np.int32]
    rank_E: NDArray[np.int32]
    rows_R: NDArray[np.int64]
    digest: int

    @property
    def imbalance(self) -> float:
        """Rows on the most loaded rank over the mean (1.0 when nothing is routed). For reports only."""
        total = int(self.rows_R.sum())
        return float(self.rows_R.max()) * self.rows_R.size / total if total else 1.0


def plan_step(counts_RE: NDArray[np.int32], placement: Placement) -> StepPlan:
    """Plan one step: pure, deterministic, the same on every rank.

    Example: counts_RE = [[3, 0], [1, 2]] with home_E = [0, 1] gives rank_E = [0, 1] and rows_R = [4, 2].

    Args:
        counts_RE: int32 [R, E], the gathered count matrix.
        placement: the homes, for the same R and E.

    Raises:
        ConfigError: shapes that do not fit the placement, or a negative count.
    """
    if counts_RE.shape != (placement.ranks, placement.num_experts):
        raise ConfigError(
            f"counts {list(counts_RE.shape)} do not fit a placement of {placement.ranks} ranks and "
            f"{placement.num_experts} experts"
        )
    if counts_RE.size and counts_RE.min() < 0:
        rank, expert = (int(i) for i in np.argwhere(counts_RE < 0)[0])
        raise ConfigError(f"counts[{rank}, {expert}] = {int(counts_RE[rank, expert])}: a count is never negative")
    rank_E = placement.home_E
    rows_R = np.zeros(placement.ranks, dtype=np.int64)
    np.add.at(rows_R, rank_E, counts_RE.sum(axis=0, dtype=np.int64))
    digest = digest32(np.concatenate([counts_RE.ravel(), rank_E]))
    return StepPlan(counts_RE=counts_RE, rank_E=rank_E, rows_R=rows_R, digest=digest)


def digest32(words: NDArray[np.int32]) -> int:
    """Position-dependent 32-bit hash of int32 words.

    Each word is mixed with its position by the 32-bit finaliser of MurmurHash3 (Appleby, public domain) and the
    results are summed modulo 2^32, so that a device can compute it in any order, in parallel.
    """
    mixed = words.view(np.uint32) + np.arange(1, words.size + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return int((mixed ^ (mixed >> np.uint32(16))).sum(dtype=np.uint32))
