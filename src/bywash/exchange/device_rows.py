"""`DeviceRows`: packed rows on a GPU, each step one launch; `payload.RowFormat` is the same in torch.

Knows the format of a row and who owns an expert, not how rows travel. The faces for DeepEP, vLLM and SGLang call it
where a `DeviceCarrier` carries their rows.

Shapes: T rows to send, N rows received, K experts per token, J ranks of a token, R ranks, E experts, L experts of this
rank, D values of a row, G scales, W columns of a carried output row, B bytes of a packed row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bywash.exchange.carrier import Arrived
from bywash.exchange.payload import RowFormat, column_major_like
from bywash.kernels.compile import THREADS
from bywash.kernels.rows import row_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Who owns the experts.

    Attributes:
        ranks: R.
        per_rank: E / R, where rank r owns the r-th part.
        rank_E: int64 [E], the rank of each; None for equal parts.
    """

    ranks: int
    per_rank: int = 0
    rank_E: Tensor | None = None


class DeviceRows:
    """The work on the current device."""

    def __init__(self, form: RowFormat) -> None:
        """Compile the kernels, or take them from the cache."""
        self.form = form
        self._launch = row_kernels(torch.cuda.current_device())
        self._sizes = {
            "top_k": form.top_k,
            "value_bytes": form.columns * form.dtype.itemsize,
            "scale_count": form.scales,
        }

    def pack(
        self,
        x_TD: Tensor,
        scales_TG: Tensor | None,
        ids_TK: Tensor,
        weights_TK: Tensor | None,
        owners: Owners,
        *,
        row_bytes: int,
        source: int,
        summary: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """uint8 [T, B] and int64 [T, J], each token's ranks as `carrier.distinct_ranks` gives them.

        Args:
            x_TD, scales_TG, weights_TK: see `RowParts`.
            ids_TK: int64 or int32 [T, K].
            owners: of the experts.
            row_bytes: B.
            source: number of the first row.
            summary: int32 [R + 2 L + 1], set to 0 for `read`.
        """
        tokens, top_k = ids_TK.shape
        x_TD, ids_TK = x_TD.contiguous(), ids_TK.contiguous()
        scales = {} if scales_TG is None else _scales(scales_TG)
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        packed_TB = torch.empty((tokens, row_bytes), dtype=torch.uint8, device=x_TD.device)
        ranks_TJ = torch.empty((tokens, min(top_k, owners.ranks)), dtype=torch.int64, device=x_TD.device)
        self._launch(
            "pack_rows",
            tokens,
            **self._sizes,
            **scales,
            rows=tokens,
            ranks=owners.ranks,
            top_ranks=ranks_TJ.shape[1],
            packed=packed_TB.data_ptr(),
            packed_bytes=row_bytes,
            x=x_TD.data_ptr(),
            source=source,
            ids=ids_TK.data_ptr(),
            id_bytes=ids_TK.element_size(),
            weights=_address(weights_TK),
            ranks_TJ=ranks_TJ.data_ptr(),
            owner_E=_address(owners.rank_E),
            experts_all=0 if owners.rank_E is None else owners.rank_E.numel(),
            experts=owners.per_rank,
            summary=_address(summary),
        )
        return packed_TB, ranks_TJ

    def read(
        self,
        arrived: Arrived,
        ids_NK: Tensor,
        *,
        first: int,
        experts: int,
        metadata: Tensor | None = None,
        summary: Tensor | None = None,
        alignment: int = 1,
        stats_L: Tensor | None = None,
    ) -> None:
        """Fill in ids of what arrived, and what follows from them.

        Args:
            arrived: the rows.
            ids_NK: int64 or int32 [N, K], out: ids counted from `first`, -1 for those outside and past the real rows.
            first, experts: which experts count.
            metadata: int32 [N, 2 + K], out: source, n, and -1 for each expert.
            summary: int32 [R + 2 L + 1] from `pack`, out: rows up to each rank, rows of each expert, sums of those
                rounded up to the alignment, and a word for the kernel.
            alignment: see there.
            stats_L: int32 [L], to which the rows of each expert are added.
        """
        self._launch(
            "read_rows",
            -(-ids_NK.numel() // THREADS),
            **self._sizes,
            **_arrived(arrived),
            rows=ids_NK.shape[0],
            ids=ids_NK.data_ptr(),
            id_bytes=ids_NK.element_size(),
            first_expert=first,
            experts=experts,
            metadata=_address(metadata),
            summary=_address(summary),
            alignment=alignment,
            stats=_address(stats_L),
        )

    def copy(
        self, arrived: Arrived, rows: int, *, weighted: bool, ids_NK: Tensor | None = None, column_major: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[N, D], scales [N, G] and float32 [N, K] of the first N rows; zeros past the real ones.

        Args:
            arrived: the rows.
            rows: N.
            ids_NK: weights of ids below 0 become 0; None leaves them.
            weighted: whether weights are wanted.
            column_major: consecutive rows' scales side by side, see `column_major_like`.
        """
        form, device = self.form, arrived.rows_PB.device
        x_ND = torch.empty((rows, form.columns), dtype=form.dtype, device=device)
        scales_NG = None
        if form.scales:
            empty = column_major_like if column_major else torch.empty
            scales_NG = empty((rows, form.scales), dtype=form.scale_dtype, device=device)
        weights_NK = torch.empty((rows, form.top_k), dtype=torch.float32, device=device) if weighted else None
        self._launch(
            "copy_rows",
            rows,
            **self._sizes,
            **_arrived(arrived),
            **({} if scales_NG is None else _scales(scales_NG)),
            rows=rows,
            x=x_ND.data_ptr(),
            weights=_address(weights_NK),
            ids=_address(ids_NK),
            id_bytes=0 if ids_NK is None else ids_NK.element_size(),
        )
        return x_ND, scales_NG, weights_NK

    def pack_outputs(
        self, y_ND: Tensor, from_R: Tensor, columns: int, *, ids_NK: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """[N, W]: values, then weights in pieces where `ids_NK` is not below 0, then zeros; only rows that are real.

        Args:
            y_ND: bfloat16, float16 or float32; with weights not float16.
            from_R: int32 [R], rows that came from each rank.
            columns: W.
            ids_NK, weights: [N, K], or both None.
        """
        y_ND = y_ND.contiguous()
        weights = None if weights is None else weights.contiguous()
        y_NW = y_ND.new_empty((y_ND.shape[0], columns))
        self._launch(
            "pack_outputs",
            y_ND.shape[0],
            **_outputs(y_NW, y_ND),
            rows=y_ND.shape[0],
            from_R=from_R.data_ptr(),
            from_stride=from_R.stride(0),
            ranks=from_R.shape[0],
            top_k=self.form.top_k,
            weights=_address(weights),
            ids=_address(ids_NK),
            id_bytes=0 if ids_NK is None else ids_NK.element_size(),
        )
        return y_NW

    def unpack_outputs(self, out_TW: Tensor, hidden: int, *, weighted: bool = False) -> tuple[Tensor, Tensor | None]:
        """[T, D], and float32 [T, K] from pieces if wanted, of sums that came back."""
        tokens = out_TW.shape[0]
        out_TD = out_TW.new_empty((tokens, hidden))
        shape = (tokens, self.form.top_k)
        weights_TK = torch.empty(shape, dtype=torch.float32, device=out_TW.device) if weighted else None
        self._launch(
            "unpack_outputs",
            tokens,
            **_outputs(out_TW, out_TD),
            rows=tokens,
            top_k=self.form.top_k,
            weights=_address(weights_TK),
        )
        return out_TD, weights_TK


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _scales(scales: Tensor) -> dict[str, int]:
    row, column = scales.stride()
    return {"scales": scales.data_ptr(), "scale_row": row, "scale_column": column}


def _arrived(arrived: Arrived) -> dict[str, int]:
    assert arrived.at_N is not None, "a GPU's rows lie where their source put them"
    return {
        "packed": arrived.rows_PB.data_ptr(),
        "packed_bytes": arrived.rows_PB.stride(0),
        "at_N": arrived.at_N.data_ptr(),
        "from_R": arrived.from_R.data_ptr(),
        "from_stride": arrived.from_R.stride(0),
        "ranks": arrived.from_R.shape[0],
    }


def _outputs(carried: Tensor, values: Tensor) -> dict[str, int]:
    return {
        "packed": carried.data_ptr(),
        "packed_bytes": carried.stride(0) * carried.element_size(),
        "columns": carried.shape[1],
        "x": values.data_ptr(),
        "value_bytes": values.shape[1] * values.element_size(),
        "is_float": int(values.dtype == torch.float32),
    }
