"""The slow, obvious oracle of every expert kernel: one expert at a time, products in float32, on any device.

Shapes: L experts of this rank, D hidden, F intermediate, G = 2F (first F rows gate, next F up), P places for received
rows, M (row, expert) pairs, ordered by expert. fp8 scales cover 128 columns of a row (`_PC`, C = D / 128 rounded up)
or a 128 x 128 block of a weight (`_LBC`).
Knows nothing of Triton, CUDA C++ or launches; tests and benchmarks compare the fast kernels with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.exchange.fp8_rows import E4M3_MAX, dequantise_rows, quantise_rows

SCALE_BLOCK = 128
"""Columns (and, for weights, rows) under one fp8 scale: DeepSeek-V3's layout."""


def experts_naive(
    rows_PD: Tensor, index_M: Tensor, ends_L: Tensor, gate_up_LGD: Tensor, down_LDF: Tensor, *, round_to: torch.dtype
) -> Tensor:
    """y[m] = (silu(x Wg^T) * (x Wu^T)) Wd^T with x = rows[index[m]]: float32 [M, D], not rounded at the end.

    Args:
        rows_PD: received rows; read only where `index_M` points.
        index_M: int32 [M or more], the place that each pair reads.
        ends_L: int32 [L], one past each expert's last pair; the last is M.
        gate_up_LGD, down_LDF: weights.
        round_to: what the kernel under test keeps the intermediate in, usually bfloat16.
    """
    parts = []
    for expert, index_m in enumerate(_pairs_of_experts(index_M, ends_L)):
        h_mF = _swiglu(rows_PD[index_m].float(), gate_up_LGD[expert].float())
        parts.append(h_mF.to(round_to).float() @ down_LDF[expert].float().T)
    return torch.cat(parts)


def _swiglu(x_mD: Tensor, gate_up_GD: Tensor) -> Tensor:
    gate_mF, up_mF = (x_mD @ gate_up_GD.T).chunk(2, dim=1)
    return F.silu(gate_mF) * up_mF


def _pairs_of_experts(index_M: Tensor, ends_L: Tensor) -> list[Tensor]:
    """The places that each expert reads, as int64."""
    ends = ends_L.tolist()
    return [index_M[start:end].long() for start, end in zip([0, *ends], ends)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """e4m3 values with the float32 scales that multiply them; rows are as `exchange.fp8_rows.quantise_rows` makes them.

    Attributes:
        values: float8_e4m3fn, [..., rows, columns].
        scales: float32, one per 128 columns of a row, or per 128 x 128 block of a weight.
    """

    values: Tensor
    scales: Tensor


def quantise_weights_naive(weight_LND: Tensor) -> Fp8:
    """Weights as e4m3 with a scale per 128 x 128 block; blocks at the edges may be smaller."""
    experts, n, d = weight_LND.shape
    shape = (experts, -(-n // SCALE_BLOCK), -(-d // SCALE_BLOCK))
    scales_LBC = torch.ones(shape, device=weight_LND.device)
    values = torch.empty_like(weight_LND, dtype=torch.float8_e4m3fn)
    for b in range(shape[1]):
        for c in range(shape[2]):
            rows, columns = (slice(i * SCALE_BLOCK, (i + 1) * SCALE_BLOCK) for i in (b, c))
            block = weight_LND[:, rows, columns].float()
            scales_LBC[:, b, c] = scale_of(block.abs().amax(dim=(1, 2)))
            values[:, rows, columns] = (block / scales_LBC[:, b, c, None, None]).to(torch.float8_e4m3fn)
    return Fp8(values=values, scales=scales_LBC)


def quantise_gate_up_naive(gate_up_LGD: Tensor) -> Fp8:
    """The same for gate and up each, as checkpoints keep them: the scales of gate's blocks, then of up's."""
    halves = [quantise_weights_naive(half) for half in gate_up_LGD.chunk(2, dim=1)]
    return Fp8(values=torch.cat([h.values for h in halves], 1), scales=torch.cat([h.scales for h in halves], 1))


def scale_of(largest: Tensor) -> Tensor:
    """float32 scale that brings `largest` to 448, and 1 for zero."""
    return torch.where(largest > 0, largest / E4M3_MAX, torch.ones_like(largest))


def dequantise_weights_naive(weights: Fp8) -> Tensor:
    """float32 [L, N, D]."""
    n, d = weights.values.shape[-2:]
    scales = weights.scales.repeat_interleave(SCALE_BLOCK, dim=-2).repeat_interleave(SCALE_BLOCK, dim=-1)
    return weights.values.float() * scales[..., :n, :d]


def dequantise_gate_up_naive(gate_up: Fp8) -> Tensor:
    """float32 [L, G, D]."""
    halves = zip(gate_up.values.chunk(2, dim=1), gate_up.scales.chunk(2, dim=1))
    return torch.cat([dequantise_weights_naive(Fp8(values=v, scales=s)) for v, s in halves], dim=1)


def experts_fp8_naive(rows: Fp8, index_M: Tensor, ends_L: Tensor, gate_up: Fp8, down: Fp8) -> Tensor:
    """The same from fp8: the intermediate is rounded to bfloat16, then quantised per (row, 128 columns).

    Args:
        rows: [P, D].
        index_M, ends_L: as above.
        gate_up: [L, G, D], quantised by halves.
        down: [L, D, F].

    Returns:
        float32 [M, D].
    """
    x_PD = dequantise_rows(rows.values, rows.scales)
    gate_up_LGD, down_LDF = dequantise_gate_up_naive(gate_up), dequantise_weights_naive(down)
    parts = []
    for expert, index_m in enumerate(_pairs_of_experts(index_M, ends_L)):
        h = quantise_rows(_swiglu(x_PD[index_m], gate_up_LGD[expert]).bfloat16())
        parts.append(dequantise_rows(*h) @ down_LDF[expert].T)
    return torch.cat(parts)
