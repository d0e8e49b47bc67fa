"""Weighted sums of rows in a fixed order, in float32, in blocks that stay in the cache.

Gives the bits of `rows.weighted_sum` (zero, then one product and one addition per term, in order) with fewer passes
over memory and fewer calls, from any place to any place: the `shm` exchange sums straight into a peer's heap.

Shapes: P rows to pick from, D hidden, N results, J terms per result at most, M terms in all, B blocks, n results
of one block, m terms of it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_BYTES = 1 << 20
"""Float32 bytes of the results of one block, and of the terms held at once: 128 rows of 2048. On one core 1,024 tokens
x 8 terms then take 12 ms, against 45 ms in one piece; at 16 rows the calls cost more than the sums (18 ms)."""


def block_rows(hidden: int) -> int:
    """Results of one block. Example: 128 at hidden 2048, 18 at 14,336."""
    return max(1, _BLOCK_BYTES // (4 * hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Schedule:
    """Which rows are added when: block by block; in a block first terms first, results with most terms first.

    The results that have a j-th term are then the first ones of their block, so that one addition takes them all.

    Attributes:
        at_M, weights_M: every term's row and factor, in that order.
        ends_BJ: where in M the j-th terms of each block end.
        place_N: each result's place in its block's order; None where that is the order they came in.
    """

    at_M: Tensor
    weights_M: Tensor | None
    ends_BJ: list[list[int]]
    place_N: Tensor | None


class OrderedSum:
    """Sums rows of one width and dtype; keeps its scratch space between calls.

    Attributes:
        block: results that are summed at once.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, *, block: int = 0) -> None:
        """Prepare for rows [*, hidden] of `dtype`, `block` results at once; 0 takes `block_rows(hidden)`."""
        self.block = block or block_rows(hidden)
        with torch.inference_mode(False):  # scratch outlives the model's inference mode
            self._term_mD = torch.empty(self.block, hidden)
            self._picked_mD = self._term_mD if dtype == torch.float32 else self._term_mD.to(dtype)
            self._total_nD = torch.empty(self.block, hidden)

    def __call__(
        self, rows_PD: Tensor, at_NJ: NDArray[np.int64], weights_NJ: NDArray[np.float32] | None, out_ND: Tensor
    ) -> None:
        """out[n] = sum over j of weights[n, j] * rows[at[n, j]], skipping at < 0, rounded once to out's dtype.

        Example: at = [[2, -1], [0, 2]], weights = [[1, 9], [2, 3]] gives [rows[2], 2 rows[0] + 3 rows[2]].

        Args:
            rows_PD: rows in the dtype given at construction.
            at_NJ: positions in rows_PD.
            weights_NJ: the factors, or None for 1.
            out_ND: written; same dtype as the rows; zeros where a result has no term.
        """
        if not at_NJ.shape[0]:
            return
        schedule = _schedule(at_NJ, weights_NJ, self.block)
        begin = 0
        for number, ends_J in enumerate(schedule.ends_BJ):
            block = slice(number * self.block, min(at_NJ.shape[0], (number + 1) * self.block))
            total_nD = self._total_nD[: block.stop - block.start].zero_()
            self._add_terms(total_nD, rows_PD, schedule, begin, ends_J)
            begin = ends_J[-1]
            if schedule.place_N is None:
                out_ND[block].copy_(total_nD)
                continue
            rounded_nD = total_nD
            if out_ND.dtype != torch.float32:
                rounded_nD = self._picked_mD[: total_nD.shape[0]].copy_(total_nD)
            torch.index_select(rounded_nD, 0, schedule.place_N[block], out=out_ND[block])

    def _add_terms(self, total_nD: Tensor, rows_PD: Tensor, schedule: _Schedule, begin: int, ends_J: list[int]) -> None:
        """Add a block's terms, which begin at `begin` in M, to its results."""
        held_from = held_to = first = begin
        for end in ends_J:
            if end > held_to:  # fetch as many whole terms as the scratch space holds
                held_from, held_to = first, max(e for e in ends_J if e <= first + self.block)
                self._fetch(rows_PD, schedule, slice(held_from, held_to))
            total_nD[: end - first].add_(self._term_mD[first - held_from : end - held_from])
            first = end

    def _fetch(self, rows_PD: Tensor, schedule: _Schedule, held: slice) -> None:
        """Put weighted rows into the scratch space, float32."""
        m = held.stop - held.start
        picked_mD, term_mD = self._picked_mD[:m], self._term_mD[:m]
        torch.index_select(rows_PD, 0, schedule.at_M[held], out=picked_mD)
        if self._picked_mD is not self._term_mD:
            term_mD.copy_(picked_mD)
        if schedule.weights_M is not None:
            term_mD.mul_(schedule.weights_M[held].unsqueeze(1))


def _schedule(at_NJ: NDArray[np.int64], weights_NJ: NDArray[np.float32] | None, block: int) -> _Schedule:
    """Sort all terms by (block, number of the term in its result, place of the result in its block)."""
    n, width = at_NJ.shape
    valid_NJ = at_NJ >= 0
    if n <= block and valid_NJ.all():  # a decode step: all first terms, then all second terms, nothing to sort
        return _Schedule(
            at_M=torch.from_numpy(at_NJ.T.ravel()),
            weights_M=None if weights_NJ is None else torch.from_numpy(weights_NJ.T.ravel()),
            ends_BJ=[[n * (j + 1) for j in range(width)]],
            place_N=None,
        )
    blocks, block_N = -(-n // block), np.arange(n) // block
    term_NJ = valid_NJ.cumsum(axis=1)
    terms_N = term_NJ[:, -1]
    place_N = np.arange(n) - block_N * block
    in_order = int(terms_N.min()) == width
    if not in_order:
        order_N = np.argsort(block_N * (width + 1) - terms_N, kind="stable")
        place_N = np.empty_like(order_N)
        place_N[order_N] = np.arange(n)
        place_N -= block_N * block
    group_M = (block_N[:, None] * width + term_NJ - 1)[valid_NJ]
    keys_M = group_M * block + np.broadcast_to(place_N[:, None], at_NJ.shape)[valid_NJ]
    order_M = np.argsort(keys_M, kind="stable")
    return _Schedule(
        at_M=torch.from_numpy(at_NJ[valid_NJ][order_M]),
        weights_M=None if weights_NJ is None else torch.from_numpy(weights_NJ[valid_NJ][order_M]),
        ends_BJ=np.bincount(group_M, minlength=blocks * width).cumsum().reshape(blocks, width).tolist(),
        place_N=None if in_order else torch.from_numpy(place_N),
    )
