"""Weights that come back with outputs, through sums that round to the dtype of rows, without losing a bit.

A float32 is the exact sum of three bfloat16: each takes the next 8 of its 24 bits. For every (token, expert) only one
rank returns something but zeros, so a sum over ranks leaves the pieces as they are.

Shapes: N rows, K weights of a row.
"""

import torch
from torch import Tensor

from bywash.errors import ConfigError

PIECES = 3


def check_returned(weights: Tensor, pairs: torch.Size, dtype: torch.dtype) -> None:
    """Check weights that are given to a combine.

    Raises:
        ConfigError: not one for each pair, or beside float16, whose exponents do not reach far enough.
    """
    if weights.shape != pairs or weights.dtype != torch.float32:
        raise ConfigError(
            f"deepep: combine of topk_weights {list(weights.shape)} {weights.dtype}; float32 {list(pairs)} is needed"
        )
    if dtype == torch.float16:
        raise ConfigError("deepep: combine moves topk_weights beside bfloat16 or float32 rows, not beside float16")


def split_weights(weights_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, 3 K] of `dtype`: first parts, second parts, third parts. Exact for magnitudes of 2^-110 and above, and 0.

    Example: 1 + 2^-10 + 2^-20 in bfloat16 gives 1, 2^-10 and 2^-20.
    """
    rest, pieces = weights_NK.float(), []
    for _ in range(PIECES):
        piece = rest.to(dtype)
        pieces.append(piece)
        rest = rest - piece.float()
    return torch.cat(pieces, dim=1)


def join_weights(pieces_NJ: Tensor) -> Tensor:
    """float32 [N, K] from what `split_weights` made."""
    first, second, third = pieces_NJ.float().chunk(PIECES, dim=1)
    return (first + second) + third
