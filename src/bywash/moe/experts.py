"""Expert weights and their compute: a gated MLP per expert, rows grouped by expert.

Shapes: L experts of this rank, D hidden, F intermediate, G = 2F, N rows received, K experts per token, M (row, expert)
pairs.
Row tiles make every row's result independent of its neighbours: a matrix product of one fixed shape gives a row the
same bits wherever it stands, while a product over "however many rows came" does not.
Knows nothing of ranks or transports. `ExpertParallel` calls it with what an exchange received.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.errors import ConfigError

ROW_TILE = 16
"""Rows of one tile. Small, since a decode step brings few rows to each expert; measured on CPU only."""


class Experts(Protocol):
    """What `ExpertParallel` needs of a rank's experts: `hidden` is D, the width of a row."""

    hidden: int

    def forward(self, slot: int, rows_ND: Tensor) -> Tensor:
        """Rows [N, D] through the expert in `slot` (its position among this rank's experts), unweighted."""


class GatedExperts:
    """Gated MLPs: down(gate_fn(gate_up(x) + b1)) + b2, the expert of every family that bywash runs.

    Matrix products on sizes that are no multiple of 16 would depend on where a row stands in its tile (seen with
    5 x 7 weights in float32 on CPU), so odd weights are padded with zeros once, here.
    """

    def __init__(
        self,
        *,
        gate_up_LGD: Tensor,
        down_LDF: Tensor,
        apply_gate: Callable[[Tensor], Tensor],
        gate_up_bias_LG: Tensor | None = None,
        down_bias_LD: Tensor | None = None,
    ) -> None:
        """Hold weights (not copied unless padded).

        Args:
            gate_up_LGD: [L, G, D], G = 2F in the layout that `apply_gate` expects.
            down_LDF: [L, D, F].
            apply_gate: [n, G] to [n, F], the model's own activation.
            gate_up_bias_LG, down_bias_LD: biases, if the family has them.
        """
        self.hidden, self._apply_gate = gate_up_LGD.shape[2], apply_gate
        self._gate_up_width = gate_up_LGD.shape[1]
        self._gate_up, self._down = _padded(gate_up_LGD), _padded(down_LDF)
        self._gate_up_bias, self._down_bias = gate_up_bias_LG, down_bias_LD

    def forward(self, slot: int, rows_ND: Tensor) -> Tensor:
        """See `Experts.forward`."""
        gate_up = _product(rows_ND, self._gate_up[slot])[:, : self._gate_up_width]
        if self._gate_up_bias is not None:
            gate_up = gate_up + self._gate_up_bias[slot]
        out = _product(self._gated(gate_up), self._down[slot])[:, : self.hidden]
        return out if self._down_bias is None else out + self._down_bias[slot]

    def _gated(self, gate_up_nG: Tensor) -> Tensor:
        """The activation, with extra rows where the intermediate size is odd.

        torch computes the last few elements of a whole tensor with scalar code, whose sigmoid differs in the last
        bit; a number of elements that is a multiple of 64 leaves no such tail for any dtype.
        """
        n = gate_up_nG.shape[0]
        extra = -n % 64 if n * gate_up_nG.shape[1] // 2 % 64 else 0
        return self._apply_gate(F.pad(gate_up_nG, (0, 0, 0, extra)))[:n] if extra else self._apply_gate(gate_up_nG)


def _padded(weights: Tensor) -> Tensor:
    """Both matrix sizes rounded up to a multiple of 16 with zeros; the same tensor if they already are."""
    rows, columns = (-size % 16 for size in weights.shape[1:])
    return F.pad(weights, (0, columns, 0, rows)) if rows or columns else weights


def _product(rows_nD: Tensor, weight: Tensor) -> Tensor:
    missing = weight.shape[1] - rows_nD.shape[1]
    return F.linear(F.pad(rows_nD, (0, missing)) if missing else rows_nD, weight)


def run_experts(
    experts: Experts, rows_ND: Tensor, ids_NK: Tensor, slot_of_E: Tensor, *, row_tile: int | None
) -> Tensor:
    """Every received pair through its expert: [M, D], in row-major order of the pairs with ids_NK >= 0.

    Example: ids_NK = [[4, -1], [4, 7]] with experts 4 and 7 here in slots 0 and 1 runs rows [0, 1] through slot 0,
    row [1] through slot 1, and returns [row 0 by 4, row 1 by 4, row 1 by 7].

    Args:
        experts: this rank's experts.
        rows_ND: received rows.
        ids_NK: the expert of each pair computed here, -1 elsewhere.
        slot_of_E: int64 [E], position of each expert among this rank's, -1 where it lives elsewhere.
        row_tile: rows of one fixed-shape product (`exact`), or None for one product per expert (`fast`).

    Raises:
        ConfigError: a row came for an expert that this rank does not have.
    """
    valid_NK = ids_NK >= 0
    slots_M = slot_of_E[ids_NK[valid_NK]]
    if slots_M.numel() and int(slots_M.min()) < 0:
        expert = int(ids_NK[valid_NK][slots_M < 0][0])
        raise ConfigError(f"rows for expert {expert} arrived at a rank that does not hold it: plan and weights differ")
    row_M = valid_NK.nonzero()[:, 0]
    y_MD = rows_ND.new_empty(row_M.numel(), rows_ND.shape[1])
    for slot, pairs in _groups(slots_M):
        rows = rows_ND[row_M[pairs]]
        y_MD[pairs] = experts.forward(slot, rows) if row_tile is None else _tiled(experts, slot, rows, row_tile)
    return y_MD


def _groups(slots_M: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(slot, positions of its pairs in M), slots ascending, positions ascending."""
    order = torch.argsort(slots_M, stable=True)
    slots, sizes = torch.unique_consecutive(slots_M[order], return_counts=True)
    yield from zip(slots.tolist(), order.split(sizes.tolist()), strict=True)


def _tiled(experts: Experts, slot: int, rows_nD: Tensor, row_tile: int) -> Tensor:
    """The same in products of exactly `row_tile` rows, the last one filled up with zero rows."""
    n = rows_nD.shape[0]
    padded = F.pad(rows_nD, (0, 0, 0, -n % row_tile))
    return torch.cat([experts.forward(slot, tile) for tile in padded.split(row_tile)])[:n]
