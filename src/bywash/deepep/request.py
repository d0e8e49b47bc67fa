"""What a dispatch is asked for, checked and with its defaults filled in.

Shapes: T tokens of this rank, K experts per token, D hidden, G scales of a row, R ranks, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bywash.deepep.handle import EPHandle
from bywash.deepep.weights import PIECES
from bywash.errors import ConfigError, RoutingError
from bywash.exchange.payload import RowFormat, RowParts

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What decides which carrier a row needs.

    Attributes:
        cuda: whether rows are on a GPU.
        format: of a packed row.
    """

    cuda: bool
    format: RowFormat

    @property
    def narrow(self) -> bool:
        """Whether rows go out with a byte for each column that comes back."""
        return self.format.dtype.itemsize == 1

    @property
    def out_dtype(self) -> torch.dtype:
        """Of outputs: bfloat16 for e4m3 rows."""
        return torch.bfloat16 if self.narrow else self.format.dtype

    @property
    def columns(self) -> int:
        """The fewest of an output row: its values, and weights in pieces."""
        return self.format.columns + PIECES * self.format.top_k


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One dispatch. The fields are `ElasticBuffer.dispatch`'s, without what does not concern rows.

    Attributes:
        most: num_max_tokens_per_rank; whether this rank keeps to it is not checked here, since all must hear of it.
        sync: whether the host learns how many rows came.
        handle: of the earlier dispatch whose routing is used again, or None.
    """

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor | None
    num_experts: int
    alignment: int
    most: int
    expand: bool
    sync: bool
    handle: EPHandle | None

    def __post_init__(self) -> None:
        _check_rows(self.x, self.scales)
        tokens = self.x.shape[0]
        if self.topk_idx.dim() != 2 or self.topk_idx.shape[0] != tokens or self.topk_idx.shape[1] < 1:
            raise ConfigError(f"deepep: topk_idx {list(self.topk_idx.shape)} for {tokens} tokens")
        if self.topk_idx.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"deepep: topk_idx is {self.topk_idx.dtype}, not int64 or int32")
        weights = self.topk_weights
        places = {str(part.device) for part in (self.x, self.scales, self.topk_idx, weights) if part is not None}
        if len(places) > 1:
            raise ConfigError(f"deepep: x, scales, topk_idx and topk_weights are on {' and '.join(sorted(places))}")
        if weights is not None and (weights.shape != self.topk_idx.shape or weights.dtype != torch.float32):
            raise ConfigError(
                f"deepep: topk_weights {list(weights.shape)} {weights.dtype}; float32 {list(self.topk_idx.shape)} "
                "like topk_idx is needed"
            )
        if self.alignment < 1:
            raise ConfigError(f"deepep: expert_alignment {self.alignment}; at least 1")
        if not self.topk_idx.is_cuda and bool((self.topk_idx >= self.num_experts).any()):
            raise RoutingError(
                f"deepep: topk_idx names expert {int(self.topk_idx.max())}, num_experts is {self.num_experts}"
            )

    @property
    def way(self) -> Way:
        """Which carrier the rows need."""
        scales = self.scales
        return Way(
            cuda=self.x.is_cuda,
            format=RowFormat(
                columns=self.x.shape[1],
                dtype=self.x.dtype,
                scales=0 if scales is None else scales.shape[1],
                scale_dtype=torch.float32 if scales is None else scales.dtype,
                top_k=self.topk_idx.shape[1],
            ),
        )

    def packed(self, rank: int, row_bytes: int) -> Tensor:
        """uint8 [T, row_bytes]: what rank `rank` sends. Ids of a handle are where its rows went."""
        source_T = torch.arange(self.x.shape[0], dtype=torch.int32, device=self.x.device) + rank * self.most
        ids_TK = self.topk_idx.int() if self.handle is None else None
        parts = RowParts(
            x_ND=self.x, scales_NG=self.scales, source_N=source_T, ids_NK=ids_TK, weights_NK=self.topk_weights
        )
        return self.way.format.pack(parts, row_bytes)


def first_request(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor | None,
    topk_weights: Tensor | None,
    *,
    ranks: int,
    num_experts: int | None,
    alignment: int | None,
    most: int,
    expand: bool,
    sync: bool | None,
) -> Request:
    """A dispatch by new routing.

    Raises:
        ConfigError: something is missing or does not fit.
        RoutingError: an id that is no expert.
    """
    if topk_idx is None or not num_experts:
        raise ConfigError("deepep: dispatch needs topk_idx and num_experts, or a handle")
    if num_experts < 1 or num_experts % ranks:
        raise ConfigError(f"deepep: num_experts {num_experts} on {ranks} ranks; every rank owns equally many")
    if most < 1:
        raise ConfigError("deepep: num_max_tokens_per_rank was given neither to the buffer nor to dispatch")
    return Request(
        x=x,
        scales=scales,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_experts=num_experts,
        alignment=1 if alignment is None else alignment,
        most=most,
        expand=expand,
        sync=sync is not False,
        handle=None,
    )


def cached_request(
    x: Tensor, scales: Tensor | None, topk_weights: Tensor | None, *, expand: bool, handle: EPHandle
) -> Request:
    """A dispatch by the routing of an earlier one.

    Raises:
        ConfigError: what does not fit the handle.
    """
    if expand != handle.do_expand:
        raise ConfigError(f"deepep: do_expand={expand}, but the handle was made with do_expand={handle.do_expand}")
    return Request(
        x=x,
        scales=scales,
        topk_idx=handle.topk_idx,
        topk_weights=topk_weights,
        num_experts=handle.num_experts,
        alignment=handle.expert_alignment,
        most=handle.num_max_tokens_per_rank,
        expand=expand,
        sync=False,
        handle=handle,
    )


def _check_rows(x: Tensor, scales: Tensor | None) -> None:
    if x.dim() != 2:
        raise ConfigError(f"deepep: x {list(x.shape)} must be [tokens, hidden]")
    if scales is None:
        if x.dtype not in _DTYPES:
            raise ConfigError(f"deepep: x is {x.dtype}; bfloat16, float16 or float32, or (float8_e4m3fn, scales)")
        return
    if x.dtype != torch.float8_e4m3fn:
        raise ConfigError(f"deepep: rows with scales are {x.dtype}, not float8_e4m3fn")
    if scales.dim() != 2 or scales.shape[0] != x.shape[0] or scales.dtype.itemsize != 4:
        raise ConfigError(f"deepep: scales {list(scales.shape)} {scales.dtype}; [tokens, packs] of 4 bytes each")
