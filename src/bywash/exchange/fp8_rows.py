"""Rows as e4m3 with a float32 scale for each group of 128 columns: the format that fp8 grouped GEMMs take.

In plain torch, on any device: what `peer` does while it sends (kernels/peer_push.cu) is the same bit for bit, and is
tested against this. For rows that are quantised before the exchange, and to read them back.

Shapes: N rows, D columns, G = ceil(D / 128) groups, the last one shorter where D is no multiple of 128.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.exchange.peer_layout import GROUP_COLUMNS

E4M3_MAX = 448.0
SMALLEST_AMAX = 2.0**-110
"""Groups whose magnitudes are all below it are scaled as if it were their largest, so that no scale is 0."""
_NAN = 0x7F


def quantise_rows(x_ND: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [N, D], float32 [N, G]) such that x is about q times its group's scale.

    With amax the largest magnitude of a group: scale = amax / 448 and q = e4m3(x * (448 / amax)), or, as a power of
    two, scale is the one at or above amax / 448 and q = e4m3(x / scale). All in float32, rounded to nearest even.
    A NaN stays a NaN (byte 0x7f), alone; an infinity makes NaN of its group, with scale inf.

    Example: the group [3, -448, 0...] has scale 1 and bytes [0x44, 0xfe, 0...].
    """
    groups = group_columns(x_ND.float())
    amax = groups.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=2, keepdim=True).clamp(min=SMALLEST_AMAX)
    largest = torch.full_like(amax, E4M3_MAX)  # a tensor: on GPUs torch multiplies by a number's reciprocal instead
    scale, inverse = amax / largest, largest / amax
    if power_of_two:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
        inverse = torch.ones_like(scale) / scale
    scaled_ND = (groups * inverse).flatten(1)[:, : x_ND.shape[1]]
    bytes_ND = scaled_ND.to(torch.float8_e4m3fn).view(torch.uint8)
    bytes_ND = torch.where(scaled_ND.isnan(), _NAN, bytes_ND)
    return bytes_ND.view(torch.float8_e4m3fn), scale.flatten(1)


def dequantise_rows(q_ND: Tensor, scales_NG: Tensor) -> Tensor:
    """float32 [N, D]: every value times its group's scale."""
    return (group_columns(q_ND.float()) * scales_NG[:, :, None]).flatten(1)[:, : q_ND.shape[1]]


def group_columns(x_ND: Tensor) -> Tensor:
    """[N, G, 128], filled up with zeros."""
    groups = -(-x_ND.shape[1] // GROUP_COLUMNS)
    return F.pad(x_ND, (0, groups * GROUP_COLUMNS - x_ND.shape[1])).view(x_ND.shape[0], groups, GROUP_COLUMNS)
