"""Expert weights as e4m3 with a float32 scale per 128 x 128 block (DeepSeek-V3's layout), made one expert at a time.

Bit for bit what `kernels.experts_naive` does block by block, on any device. A checkpoint that is in this layout already
needs none of it. Knows nothing of rows. Who opens `TritonExpertsFp8` from bf16 weights calls it once.

Shapes: L experts, N x D a weight, B = ceil(N / 128) and C = ceil(D / 128) blocks of it, G = 2F rows of gate and up.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.kernels.experts_naive import SCALE_BLOCK, Fp8, scale_of


def quantise_weights(weight_LND: Tensor) -> Fp8:
    """e4m3 [L, N, D] with scales [L, B, C]: a block's largest magnitude becomes 448. Those at the edges may be smaller.

    Needs room for one expert in float32 beside the result.
    """
    experts, n, d = weight_LND.shape
    blocks = -(-n // SCALE_BLOCK), -(-d // SCALE_BLOCK)
    with torch.inference_mode(False):  # outlives the model's inference mode
        values = torch.empty_like(weight_LND, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
        scales_LBC = torch.empty(experts, *blocks, device=weight_LND.device)
    missing = (0, blocks[1] * SCALE_BLOCK - d, 0, blocks[0] * SCALE_BLOCK - n)
    for expert in range(experts):
        padded = F.pad(weight_LND[expert].float(), missing)
        tiles = padded.view(blocks[0], SCALE_BLOCK, blocks[1], SCALE_BLOCK)
        scales_LBC[expert] = scale_of(tiles.abs().amax(dim=(1, 3)))
        tiles = tiles / scales_LBC[expert][:, None, :, None]
        values[expert] = tiles.view_as(padded)[:n, :d].to(torch.float8_e4m3fn)
    return Fp8(values=values, scales=scales_LBC)


def quantise_gate_up(gate_up_LGD: Tensor) -> Fp8:
    """The same for gate and up each, as checkpoints keep them: the scales of gate's blocks, then of up's."""
    gate, up = (quantise_weights(half) for half in gate_up_LGD.chunk(2, dim=1))
    return Fp8(values=torch.cat([gate.values, up.values], 1), scales=torch.cat([gate.scales, up.scales], 1))
