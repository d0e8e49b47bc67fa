"""Tensors that go into and come out of `peer_device`: what was received, and checks of what is given and asked for.

Shapes: P places for received rows, D hidden, G groups of 128 columns, K experts per token, M pairs (row, expert)
computed here, R ranks, E experts, L experts of this rank, C capacity of an expert's batch, N rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.errors import ConfigError
from bywash.exchange.peer_layout import VEC_BYTES

GPU = "cuda"
_Channel = TypeVar("_Channel")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReceived:
    """What arrived, ready for a grouped GEMM that gathers. All on the device; M is known there only.

    Attributes:
        rows_PD: [P, padded D], each token once, at the place (source, token); other places hold old rows. With fp8 they
            are float8_e4m3fn.
        index_M: int32 [capacity], the place that each pair reads: by expert, then source, then token.
        ends_L: int32 [L], one past each local expert's last pair: the offsets of `grouped_mm`.
        starts_E: int32 [E + 1], the first pair of every expert; the last is M.
        m_PK: int32 [P, K], where in M each pair stands, -1 if it is computed elsewhere. Valid below tokens_R.
        counts_RE: int32 [R, E].
        tokens_R: int32 [R].
        scales_PG: float32 [P, G] with fp8, else None: a group of a row is its e4m3 values times its scale.
        target_M: int64 [capacity], where outputs travel unsummed (`exact`, elastic `stable`), else None: addresses of
            rows of D in other ranks' heaps, 0 for pairs that have none. Experts may write each output that has a target
            there, once, between this dispatch and its combine, and nowhere else; `combine` is then told `pushed`.
    """

    rows_PD: Tensor
    index_M: Tensor
    ends_L: Tensor
    starts_E: Tensor
    m_PK: Tensor
    counts_RE: Tensor
    tokens_R: Tensor
    scales_PG: Tensor | None = None
    target_M: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBatches:
    """Received rows for a GEMM over a batch of C rows for every expert of this rank.

    Attributes:
        index_LC: int32 [L, C], the place that each row is read from, -1 past the expert's last row.
        counts_L: int32 [L], rows of each expert.
    """

    index_LC: Tensor
    counts_L: Tensor


class Channels(Generic[_Channel]):
    """An exchange's channels by generation; asking for one that is not there, or no more, is an error for users."""

    def __init__(self, who: str, channels: Sequence[_Channel] = ()) -> None:
        """Those of an exchange that is open; none for one that is closed."""
        self._who, self._channels = who, channels

    def __getitem__(self, generation: int) -> _Channel:
        if not self._channels:
            raise ConfigError(f"{self._who}: closed; open a new one")
        if not 0 <= generation < len(self._channels):
            raise ConfigError(f"{self._who}: generation {generation}; 0 to {len(self._channels) - 1} can be in flight")
        return self._channels[generation]


def expect(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check an argument.

    Raises:
        ConfigError: it has another shape or dtype, or is not on the GPU.
    """
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != GPU:
        raise ConfigError(
            f"exchange peer: {name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}; the exchange was opened "
            f"for {list(shape)} {dtype} on the GPU"
        )


def padded(rows_ND: Tensor, columns: int) -> Tensor:
    """Rows padded to whole vectors and aligned, by a copy where they are not."""
    missing = columns - rows_ND.shape[1]
    if missing and rows_ND.dtype == torch.float8_e4m3fn:  # torch pads no e4m3
        rows_ND = F.pad(rows_ND.view(torch.uint8), (0, missing)).view(rows_ND.dtype)
    rows_ND = F.pad(rows_ND, (0, missing)) if columns > rows_ND.shape[1] else rows_ND.contiguous()
    return rows_ND if rows_ND.data_ptr() % VEC_BYTES == 0 else rows_ND.clone()
