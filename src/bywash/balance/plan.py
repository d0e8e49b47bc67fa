"""`plan_step`: from this step's counts, who computes which rows.

Shapes: R ranks, E experts, S slots per rank. Pure integers, ties by number, no float: every rank computes the same
arrays from the same counts, and the 32-bit digest that travels with each message proves it before any row is read.

Without `Limits` every row is computed at its expert's home. With them an expert's rows may be cut into pieces:
`naive.py` tells how the pieces are found, `fast.py` finds them, `pieces.py` says where one pair of a token goes.
Knows nothing of torch, processes or bytes. `ExpertParallel` calls it; the exchange only carries the digest.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bywash.balance.limits import MOST_ROWS, Limits, SlotDirectory
from bywash.balance.placement import Placement
from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What every rank agrees on for one layer of one step.

    Attributes:
        counts_RE: int32 [R, E], rows that each source rank sends to each expert.
        rank_E: int32 [E], the home of each expert.
        rows_ER: int32 [E, R], rows of each expert that each rank computes. An expert's rows are ordered by source rank,
            then token; rank 0 computes the first of them, rank 1 the next, and so on.
        rows_R: int64 [R], expert rows that each rank computes in this step.
        fetch_RS: int32 [R, S], the rank to copy a slot's weights from before the step; -1 where nothing is to copy.
        directory: what the slots hold in this step (`fetch_RS` says what is not there yet); None without slots.
        spilled: rows computed away from home.
        capacity: rows of one expert that a rank holds at once.
        digest: 32-bit hash of all these arrays, equal on all ranks that agree. With limits, `naive.weighed_naive` says
            how the counts go into it.
    """

    counts_RE: NDArray[np.int32]
    rank_E: NDArray[np.int32]
    rows_ER: NDArray[np.int32]
    rows_R: NDArray[np.int64]
    fetch_RS: NDArray[np.int32]
    directory: SlotDirectory | None = None
    spilled: int = 0
    capacity: int = MOST_ROWS
    digest: int

    @property
    def imbalance(self) -> float:
        """Rows on the most loaded rank over the mean (1.0 when nothing is routed). For reports only."""
        total = int(self.rows_R.sum())
        return float(self.rows_R.max()) * self.rows_R.size / total if total else 1.0

    @property
    def home_rows_E(self) -> NDArray[np.int32]:
        """int32 [E]: the rows of each expert that its home computes."""
        return self.rows_ER[np.arange(self.rank_E.size), self.rank_E]

    @property
    def waves_E(self) -> NDArray[np.int32]:
        """int32 [E]: in how many rounds of at most `capacity` rows the home computes each expert."""
        return -(-self.home_rows_E // self.capacity)

    @property
    def fetches(self) -> int:
        """Copies of an expert's weights that this step needs, over all ranks."""
        return int(np.count_nonzero(self.fetch_RS >= 0))


def plan_step(
    counts_RE: NDArray[np.int32],
    placement: Placement,
    limits: Limits | None = None,
    directory: SlotDirectory | None = None,
    *,
    layer: int = 0,
) -> StepPlan:
    """Plan one step: pure, deterministic, the same on every rank.

    Example: counts_RE = [[3, 0], [1, 2]] with home_E = [0, 1] gives rows_R = [4, 2]. With limits and one empty slot
    for each rank, rank 1 computes one row of expert 0: rows_ER = [[3, 1], [0, 2]], fetch_RS = [[-1], [0]].

    Args:
        counts_RE: int32 [R, E], the gathered count matrix.
        placement: the homes, for the same R and E.
        limits: when rows leave home; None computes all at home.
        directory: what the slots held after the plan before; None is no slots, so that limits only make waves.
        layer: which of the directory's layers this is.

    Raises:
        ConfigError: shapes that do not fit, a negative count, or more than 2^29 - 1 rows with limits.
    """
    _check_counts(counts_RE, placement)
    if limits is None:
        return _plan_at_home(counts_RE, placement)
    ranks, experts = counts_RE.shape
    directory = directory or SlotDirectory.empty(ranks=ranks, slots=0, experts=experts)
    _check_directory(directory, ranks, experts, layer)
    if int(counts_RE.sum(dtype=np.int64)) > MOST_ROWS:
        raise ConfigError(f"counts: more than {MOST_ROWS} rows in one step; use smaller micro-batches")
    after = replace(
        directory,
        keys_RS=directory.keys_RS.copy(),
        ages_RS=directory.ages_RS.copy(),
        hot_LE=directory.hot_LE.copy(),
    )
    rows_ER, fetch_RS = np.empty((experts, ranks), np.int32), np.empty_like(after.keys_RS)
    rows_R, home_E = np.empty(ranks, np.int64), placement.home_E
    digest = _planner()(
        np.ascontiguousarray(counts_RE, np.int32),
        home_E,
        limits.speeds_R(ranks),
        (limits.capacity, limits.alpha_1024, limits.fetch_rows, limits.use_rows),
        (layer, directory.layers, limits.keep),
        after.keys_RS,
        after.ages_RS,
        after.hot_LE[layer],
        rows_ER,
        fetch_RS,
        rows_R,
    )
    return StepPlan(
        counts_RE=counts_RE,
        rank_E=home_E,
        rows_ER=rows_ER,
        rows_R=rows_R,
        fetch_RS=fetch_RS,
        directory=after,
        spilled=int(rows_R.sum()) - int(rows_ER[np.arange(experts), home_E].sum(dtype=np.int64)),
        capacity=limits.capacity,
        digest=digest,
    )


def prepare_planner() -> None:
    """Make the first plan with limits quick: numba compiles for up to a minute where it has never run.

    A job calls this while its ranks may still be late, since its first step has a deadline.

    Raises:
        ConfigError: there is nowhere to keep what was compiled.
    """
    counts_RE = np.zeros((1, 1), np.int32)
    plan_step(counts_RE, Placement.equal(1, 1), Limits(), SlotDirectory.empty(ranks=1, slots=1, experts=1))


def _planner() -> Callable[..., int]:
    """The compiled planner, loaded late: numba takes half a second, which `bywash --help` need not wait for."""
    try:
        from bywash.balance.fast import plan_arrays
    except RuntimeError as error:
        raise ConfigError(f"plan: {error}; set NUMBA_CACHE_DIR to a directory that can be written") from error
    return plan_arrays


def _plan_at_home(counts_RE: NDArray[np.int32], placement: Placement) -> StepPlan:
    ranks, experts = counts_RE.shape
    rows_E = counts_RE.sum(axis=0, dtype=np.int64)
    rows_R = np.zeros(ranks, dtype=np.int64)
    np.add.at(rows_R, placement.home_E, rows_E)
    rows_ER = np.zeros((experts, ranks), dtype=np.int32)
    rows_ER[np.arange(experts), placement.home_E] = rows_E
    return StepPlan(
        counts_RE=counts_RE,
        rank_E=placement.home_E,
        rows_ER=rows_ER,
        rows_R=rows_R,
        fetch_RS=np.empty((ranks, 0), np.int32),
        digest=digest32(np.concatenate([counts_RE.ravel(), placement.home_E])),
    )


def _check_counts(counts_RE: NDArray[np.int32], placement: Placement) -> None:
    if counts_RE.shape != (placement.ranks, placement.num_experts):
        raise ConfigError(
            f"counts {list(counts_RE.shape)} do not fit a placement of {placement.ranks} ranks and "
            f"{placement.num_experts} experts"
        )
    if counts_RE.size and counts_RE.min() < 0:
        rank, expert = (int(i) for i in np.argwhere(counts_RE < 0)[0])
        raise ConfigError(f"counts[{rank}, {expert}] = {int(counts_RE[rank, expert])}: a count is never negative")


def _check_directory(directory: SlotDirectory, ranks: int, experts: int, layer: int) -> None:
    if directory.keys_RS.shape[0] != ranks or directory.experts != experts:
        raise ConfigError(
            f"slots: a directory for {directory.keys_RS.shape[0]} ranks and {directory.experts} experts, the plan is "
            f"for {ranks} and {experts}"
        )
    if not 0 <= layer < directory.layers:
        raise ConfigError(f"slots: layer {layer} of a directory with layers 0..{directory.layers - 1}")


def digest32(words: NDArray[np.int32]) -> int:
    """Position-dependent 32-bit hash of int32 words.

    Each word is mixed with its position by the 32-bit finaliser of MurmurHash3 (Appleby, public domain) and the
    results are summed modulo 2^32, so that a device can compute it in any order, in parallel.
    """
    mixed = words.view(np.uint32) + np.arange(1, words.size + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return int((mixed ^ (mixed >> np.uint32(16))).sum(dtype=np.uint32))
