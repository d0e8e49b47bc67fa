"""`RowFormat`: what engines send along with a row, as bytes of the row itself.

A row is its values, then its scales, then where it comes from, its expert ids and their weights; each part is only
moved, never computed with, so bytes arrive as they left. Pure tensor layout, on any device; knows nothing of ranks. The
faces for DeepEP, vLLM and SGLang pack and unpack with it, a `RowCarrier` moves the bytes.

Shapes: T rows to send, N rows received, D columns, G scales of a row, K experts per token, B bytes of a packed row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD, _TMA_BYTES = 4, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParts:
    """A row's parts.

    Attributes:
        x_ND: [N, D], the values.
        scales_NG: [N, G] of a dtype of 4 bytes, or None.
        source_N: int32 [N], a number for the token, unique over ranks.
        ids_NK: int32 [N, K]; None where the row has none.
        weights_NK: float32 [N, K]; None where the row has none.
    """

    x_ND: Tensor
    scales_NG: Tensor | None = None
    source_N: Tensor
    ids_NK: Tensor | None = None
    weights_NK: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """Sizes of a packed row's parts.

    Attributes:
        columns: D.
        dtype: of the values.
        scales: G; 0 for none.
        scale_dtype: of the scales, 4 bytes.
        top_k: K; 0 for rows without ids and weights.
    """

    columns: int
    dtype: torch.dtype
    scales: int = 0
    scale_dtype: torch.dtype = torch.float32
    top_k: int = 0

    @property
    def value_bytes(self) -> int:
        """Of the values, rounded up to whole words."""
        return _WORD * -(-self.columns * self.dtype.itemsize // _WORD)

    @property
    def bytes(self) -> int:
        """B."""
        return self.value_bytes + _WORD * (self.scales + 1 + 2 * self.top_k)

    def pack(self, parts: RowParts, row_bytes: int) -> Tensor:
        """uint8 [T, row_bytes]; parts that are not given, and bytes past B, hold anything."""
        tokens = parts.x_ND.shape[0]
        packed_TB = torch.empty((tokens, row_bytes), dtype=torch.uint8, device=parts.x_ND.device)
        given = (parts.x_ND, parts.scales_NG, parts.source_N[:, None], parts.ids_NK, parts.weights_NK)
        for part, place in zip(given, self._places(), strict=True):
            if part is not None and tokens:
                into, values = _widest(packed_TB[:, place], part.contiguous().view(torch.uint8))
                into.copy_(values)
        return packed_TB

    def unpack(self, rows_PB: Tensor, at_N: Tensor | None = None) -> RowParts:
        """Copies of the parts of packed rows: of all, or of those at `at_N`."""
        x, scales, source, ids, weights = (rows_PB[:, place] for place in self._places())
        return RowParts(
            x_ND=_taken(x, at_N, self.dtype, self.columns),
            scales_NG=_taken(scales, at_N, self.scale_dtype, self.scales) if self.scales else None,
            source_N=_taken(source, at_N, torch.int32, 1)[:, 0],
            ids_NK=_taken(ids, at_N, torch.int32, self.top_k) if self.top_k else None,
            weights_NK=_taken(weights, at_N, torch.float32, self.top_k) if self.top_k else None,
        )

    def _places(self) -> list[slice]:
        """Bytes of values, scales, source, ids and weights."""
        starts = [0, self.value_bytes]
        for words in (self.scales, 1, self.top_k, self.top_k):
            starts.append(starts[-1] + _WORD * words)
        ends = [self.columns * self.dtype.itemsize, *starts[2:]]
        return [slice(start, end) for start, end in zip(starts[:-1], ends, strict=True)]


def column_major_like(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty [N, G] with consecutive rows side by side, columns at multiples of 16 bytes, as TMA loads want them."""
    rows, columns = shape
    step = _TMA_BYTES // dtype.itemsize
    return torch.empty_strided((rows, columns), (1, step * max(1, -(-rows // step))), dtype=dtype, device=device)


def _taken(part_PB: Tensor, at_N: Tensor | None, dtype: torch.dtype, columns: int) -> Tensor:
    rows = part_PB.shape[0] if at_N is None else at_N.shape[0]
    if rows == 0:  # a tensor of no rows may have any strides, which view() refuses
        return torch.empty((0, columns), dtype=dtype, device=part_PB.device)
    (words,) = _widest(part_PB)
    # Both copy: rows may lie in a buffer that the next step overwrites.
    taken = words.clone(memory_format=torch.contiguous_format) if at_N is None else words.index_select(0, at_N)
    return taken.view(dtype)


def _widest(*parts: Tensor) -> tuple[Tensor, ...]:
    """The same bytes in the largest words that all of them consist of: kernels move a word at a time."""
    for dtype in (torch.int64, torch.int32):
        size = dtype.itemsize
        fit = (
            part.shape[1] % size == part.stride(0) % size == part.storage_offset() % size == part.data_ptr() % size == 0
            for part in parts
        )
        if all(fit):
            return tuple(part.view(dtype) for part in parts)
    return parts
