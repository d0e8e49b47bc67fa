"""Expert weights and their compute: a gated MLP per expert, rows grouped by expert.

Shapes: L experts of this rank, D hidden, F intermediate, G = 2F, N rows received, K experts per token, M (row, expert)
pairs.
Row tiles make every row's result independent of its neighbours: a matrix product of one fixed shape gives a row the
same bits wherever it stands, while a product over "however many rows came" does not.
Knows nothing of ranks or transports. `ExpertParallel` calls it with what an exchange received.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
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

    Attributes:
        swiglu_weights: (gate_up_LGD, down_LDF) where that is all there is to an expert; None with biases or another
            activation.

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
        swiglu: bool = False,
    ) -> None:
        """Hold weights (not copied unless padded).

        Args:
            gate_up_LGD: [L, G, D], G = 2F in the layout that `apply_gate` expects.
            down_LDF: [L, D, F].
            apply_gate: [n, G] to [n, F], the model's own activation.
            gate_up_bias_LG, down_bias_LD: biases, if the family has them.
            swiglu: `apply_gate` is silu(first F columns) * the others, which device kernels compute by themselves.
        """
        self.hidden, self._apply_gate = gate_up_LGD.shape[2], apply_gate
        plain = swiglu and gate_up_bias_LG is None and down_bias_LD is None
        self.swiglu_weights = (gate_up_LGD, down_LDF) if plain else None
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

    @property
    def parts(self) -> list[Tensor]:
        """Every tensor of the weights, experts first, as they are computed with (padded)."""
        found = (self._gate_up, self._down, self._gate_up_bias, self._down_bias)
        return [part for part in found if part is not None]

    def with_parts(self, parts: Sequence[Tensor]) -> "GatedExperts":
        """Other experts of the same kind, on tensors that are shaped like `parts` but for the number of experts."""
        other = copy(self)
        given = iter(parts)
        other._gate_up, other._down = next(given), next(given)
        other._gate_up_bias = next(given) if self._gate_up_bias is not None else None
        other._down_bias = next(given) if self._down_bias is not None else None
        other.swiglu_weights = None
        return other

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


class GroupedExperts(Protocol):
    """All of a rank's experts in one call, as devices compute them."""

    def __call__(self, rows_ND: Tensor, row_M: Tensor, slots_M: Tensor) -> Tensor:
        """Pair m's row `row_M[m]` through the expert in `slots_M[m]`: [M, D]."""


def run_experts(
    experts: Experts,
    rows_ND: Tensor,
    ids_NK: Tensor,
    slot_of_E: Tensor,
    *,
    row_tile: int | None,
    wave_rows: int | None = None,
    grouped: GroupedExperts | None = None,
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
        wave_rows: the most rows of an expert at once: what bounds all that is held besides the outputs. None for all.
        grouped: computes instead of `experts`, all at once.

    Raises:
        ConfigError: a row came for an expert that this rank does not have.
    """
    valid_NK = ids_NK >= 0
    slots_M = slot_of_E[ids_NK[valid_NK]]
    if slots_M.numel() and int(slots_M.min()) < 0:
        expert = int(ids_NK[valid_NK][slots_M < 0][0])
        raise ConfigError(f"rows for expert {expert} arrived at a rank that does not hold it: plan and weights differ")
    row_M = valid_NK.nonzero()[:, 0]
    if grouped is not None:
        return grouped(rows_ND, row_M, slots_M)
    y_MD = rows_ND.new_empty(row_M.numel(), rows_ND.shape[1])
    for slot, pairs in _groups(slots_M):
        for wave in pairs.split(wave_rows or pairs.numel()):
            rows = rows_ND[row_M[wave]]
            y_MD[wave] = experts.forward(slot, rows) if row_tile is None else _tiled(experts, slot, rows, row_tile)
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
