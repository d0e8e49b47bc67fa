"""Weighted sums of rows in a fixed order, in float32, in blocks that stay in the cache.

Gives the bits of `rows.weighted_sum` (zero, then one product and one addition per term, in order) with fewer passes
over memory and fewer calls, from any place to any place: the `shm` exchange sums straight into a peer's heap.

Shapes: P rows to pick from, D hidden, N results, J terms per result at most, n results of one block, m terms of it.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BLOCK_BYTES = 1 << 21
"""Float32 bytes of the terms of one block: 256 rows of 2048. On one core 1,024 tokens x 8 terms then take 13 ms,
against 45 ms unblocked; at 64 rows the calls cost more than the sums (18 ms), at 512 the cache is too small (23 ms)."""


class OrderedSum:
    """Sums rows of one width and dtype; keeps its scratch space between calls.

    Attributes:
        block_terms: how many terms are summed at once.
    """

    def __init__(self, hidden: int, dtype: torch.dtype, most_terms: int) -> None:
        """Prepare for rows [*, hidden] of `dtype` and at most `most_terms` terms in a result."""
        self.block_terms = max(most_terms, _BLOCK_BYTES // (4 * hidden))
        with torch.inference_mode(False):  # scratch outlives the model's inference mode
            self._term_mD = torch.empty(self.block_terms, hidden)
            self._picked_mD = self._term_mD if dtype == torch.float32 else self._term_mD.to(dtype)
            self._total_nD = torch.empty(self.block_terms, hidden)
            self._rounded_nD = self._picked_mD  # free again when the sum is done

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
        size = self.block_terms // max(1, at_NJ.shape[1])
        for start in range(0, at_NJ.shape[0], size):
            block = slice(start, start + size)
            self._sum_block(rows_PD, at_NJ[block], None if weights_NJ is None else weights_NJ[block], out_ND[block])

    def _sum_block(
        self, rows_PD: Tensor, at_nJ: NDArray[np.int64], weights_nJ: NDArray[np.float32] | None, out_nD: Tensor
    ) -> None:
        n, width = at_nJ.shape
        terms_n = np.count_nonzero(at_nJ >= 0, axis=1)
        order_n = None
        if terms_n.min() < width:
            order_n, at_nJ, weights_nJ = _longest_first(terms_n, at_nJ, weights_nJ)
        # Term by term: the first terms of all results, then the second ones of those that have any, and so on.
        valid_Jn = at_nJ.T >= 0
        term_ends = np.cumsum(np.count_nonzero(valid_Jn, axis=1)).tolist()
        m = term_ends[-1]
        picked_mD, term_mD = self._picked_mD[:m], self._term_mD[:m]
        torch.index_select(rows_PD, 0, torch.from_numpy(at_nJ.T[valid_Jn]), out=picked_mD)
        if picked_mD.dtype != torch.float32:
            term_mD.copy_(picked_mD)
        if weights_nJ is not None:
            term_mD.mul_(torch.from_numpy(weights_nJ.T[valid_Jn]).unsqueeze(1))
        total_nD = self._total_nD[:n].zero_()
        first = 0
        for end in term_ends:
            total_nD[: end - first].add_(term_mD[first:end])
            first = end
        if order_n is None:
            out_nD.copy_(total_nD)
            return
        rounded_nD = total_nD if out_nD.dtype == torch.float32 else self._rounded_nD[:n].copy_(total_nD)
        back_n = np.empty_like(order_n)
        back_n[order_n] = np.arange(n)
        torch.index_select(rounded_nD, 0, torch.from_numpy(back_n), out=out_nD)


def _longest_first(
    terms_n: NDArray[np.int64], at_nJ: NDArray[np.int64], weights_nJ: NDArray[np.float32] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32] | None]:
    """Push each result's terms to the left, still in order, and sort results by their number of terms, descending.

    The results that have a j-th term are then the first ones, so that one addition takes them all.
    """
    order_n = np.argsort(-terms_n, kind="stable")
    at_nJ = at_nJ[order_n]
    left_nJ = np.argsort(at_nJ < 0, axis=1, kind="stable")
    at_nJ = np.take_along_axis(at_nJ, left_nJ, axis=1)
    if weights_nJ is not None:
        weights_nJ = np.take_along_axis(weights_nJ[order_n], left_nJ, axis=1)
    return order_n, at_nJ, weights_nJ
