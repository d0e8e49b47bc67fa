"""Expert compute in Triton from e4m3 rows and weights with float32 scales (DeepSeek-V3's layout), bf16 out.

Three launches: gate_up with SwiGLU (bf16 out), quantisation of what it gave, down. No host sync, fit for CUDA graphs,
like `triton_experts.py`, whose shapes it shares. Rows come as `exchange.peer_device.DeviceReceived` holds them when the
exchange sends fp8. The intermediate goes through memory in bf16 once more, since not every tile sees the 128 columns
that share a scale: that is 59 of 4,831 us for 32,700 pairs on an H200, too little to fuse.

Shapes also: C = columns / 128 rounded up, the scales of a row.
"""

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.kernels.experts_naive import SCALE_BLOCK, Fp8
from bywash.kernels.triton_experts import (
    MULTIPLE,
    Tiles,
    check_out,
    check_pair_of_weights,
    check_rows,
    fitted_to_device,
    lanes_of,
    multiprocessors,
    require_triton,
    weights_descriptor,
)

_ROWS_OF_QUANTISATION = 32


def choose_fp8_tiles(rows_per_expert: float) -> tuple[Tiles, Tiles]:
    """The tiles of gate_up and of down for experts that usually have so many rows, as measured on an H200.

    Any number of rows is right with any tiles, and has the same bits. 256 weight rows (two boxes, see the kernel) take
    7 to 11 % less time than 128 with 257 and 1,030 rows per expert; with 130 and 8, two small programs on each
    multiprocessor keep more loads under way.

    Returns:
        Tiles whose `rows` are 128 or 256, `main` 64 or 128, `tail` 0 and `depth` 128, as the kernel needs them.
    """
    if rows_per_expert > 160:
        return (Tiles(rows=256, main=128, tail=0, depth=SCALE_BLOCK),) * 2
    return (Tiles(rows=128, main=64, tail=0, depth=SCALE_BLOCK, warps=4, per_sm=2),) * 2


class GroupedProductFp8:
    """One expert product from e4m3: see `triton_experts.GroupedProduct`."""

    def __init__(self, weights: Fp8, *, gated: bool, tiles: Tiles) -> None:
        """Describe the weights [L, N, K] with scales [L, 2 or 1, N / 128, K / 128] (flattened or not), and compile.

        Raises:
            ConfigError: no triton, or weights or scales that the kernel cannot read.
        """
        values_LNK = weights.values
        experts, n, k = values_LNK.shape
        halves = 2 if gated else 1
        self.depth, self.columns, self._experts = k, n // halves, experts
        _check_fp8_weights(weights, halves)
        require_triton()
        self._gated, self._tiles, self._scales = gated, tiles, weights.scales
        self._box_rows = min(tiles.rows, SCALE_BLOCK)
        self._weights = weights_descriptor(values_LNK, halves, self._box_rows, SCALE_BLOCK)
        self._programs = tiles.per_sm * multiprocessors(values_LNK.device)
        nothing = torch.zeros(experts, dtype=torch.int32, device=values_LNK.device)
        y_MN = torch.empty(1, self.columns, dtype=torch.bfloat16, device=values_LNK.device)
        self(Fp8(values=values_LNK.view(-1, k), scales=weights.scales), nothing, nothing, y_MN)

    def __call__(self, x: Fp8, index_M: Tensor, ends_L: Tensor, y_MN: Tensor) -> None:
        """Launch. `index_M` is not read unless gated."""
        from bywash.kernels.triton_experts_fp8_kernels import grouped_product_fp8

        tiles = self._tiles
        grouped_product_fp8[(self._programs,)](
            x.values,
            x.scales,
            index_M,
            ends_L,
            self._weights,
            self._scales,
            y_MN,
            self._experts,
            self.depth,
            self.columns,
            x.values.stride(0),
            x.scales.stride(0),
            GATED=self._gated,
            LANES=lanes_of(self._experts),
            ROWS=self._box_rows,
            PAIR=tiles.rows > self._box_rows,
            MAIN=tiles.main,
            EVEN=self.depth % SCALE_BLOCK == 0,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


class TritonExpertsFp8:
    """All experts of a rank in fp8: y[m] = down(quantised(silu(gate(x)) * up(x))), x = rows[index[m]].

    A row's bits are as independent as in `TritonExperts`.
    """

    def __init__(
        self,
        gate_up: Fp8,
        down: Fp8,
        *,
        pairs: int,
        rows_per_expert: float | None = None,
        tiles: tuple[Tiles, Tiles] | None = None,
    ) -> None:
        """Hold the weights (not copied), allocate the intermediate, compile.

        Args:
            gate_up: e4m3 [L, 2F, D], scales float32 [L, 2 ceil(F / 128), ceil(D / 128)]: gate's blocks, then up's.
            down: e4m3 [L, D, F], scales [L, ceil(D / 128), ceil(F / 128)].
            pairs, rows_per_expert, tiles: as for `TritonExperts`.

        Raises:
            ConfigError: no triton, a GPU before sm_89, sizes that are no multiple of 16, other dtypes or layouts.
        """
        check_pair_of_weights(gate_up.values, down.values)
        if tiles is None:
            choice = choose_fp8_tiles(pairs / len(down.values) if rows_per_expert is None else rows_per_expert)
            tiles = fitted_to_device(choice, down.values)
        self.pairs, (_, self.hidden, inner) = pairs, down.values.shape
        self._gate_up = GroupedProductFp8(gate_up, gated=True, tiles=tiles[0])
        self._down = GroupedProductFp8(down, gated=False, tiles=tiles[1])
        device = down.values.device
        with torch.inference_mode(False):  # outlives the model's inference mode
            self._h_MF = torch.empty(pairs, inner, dtype=torch.bfloat16, device=device)
            self._h = _empty_rows(pairs, inner, device)
        quantise_rows(self._h_MF, torch.zeros(1, dtype=torch.int32, device=device), self._h)

    def __call__(
        self, rows_PD: Tensor, scales_PC: Tensor, index_M: Tensor, ends_L: Tensor, out_MD: Tensor | None = None
    ) -> Tensor:
        """Three launches, no host sync. See `TritonExperts.__call__`; the output is bfloat16.

        Args:
            rows_PD: float8_e4m3fn.
            scales_PC: float32; rows may be apart, as they are in the exchange's heap.
            index_M, ends_L, out_MD: as there.

        Raises:
            ConfigError: dtypes or shapes that do not fit.
        """
        check_rows(rows_PD, torch.float8_e4m3fn, self.hidden, index_M, self.pairs)
        _check_scales("rows", scales_PC, (len(rows_PD), -(-self.hidden // SCALE_BLOCK)))
        if out_MD is None:
            out_MD = torch.empty(self.pairs, self.hidden, dtype=torch.bfloat16, device=rows_PD.device)
        check_out(out_MD, torch.bfloat16, self.hidden)
        self._gate_up(Fp8(values=rows_PD, scales=scales_PC), index_M, ends_L, self._h_MF)
        quantise_rows(self._h_MF, ends_L[-1:], self._h)
        self._down(self._h, index_M, ends_L, out_MD)
        return out_MD


def quantise_rows(x_PD: Tensor, count: Tensor, out: Fp8 | None = None) -> Fp8:
    """Rows as e4m3 with a scale per (row, 128 columns), equal to `exchange.fp8_rows.quantise_rows` bit for bit.

    Args:
        x_PD: [P, D] contiguous, floating.
        count: int32 [1] on the device, the rows to quantise; others are left alone.
        out: where to put them.
    """
    require_triton()
    from bywash.kernels.triton_experts_fp8_kernels import quantise_rows as kernel

    out = _empty_rows(x_PD.shape[0], x_PD.shape[1], x_PD.device) if out is None else out
    programs = 8 * multiprocessors(x_PD.device)
    kernel[(programs,)](x_PD, count, out.values, out.scales, x_PD.shape[1], ROWS=_ROWS_OF_QUANTISATION, num_warps=4)
    return out


def _empty_rows(rows: int, columns: int, device: torch.device) -> Fp8:
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    return Fp8(values=values, scales=torch.empty(rows, -(-columns // SCALE_BLOCK), device=device))


def _check_fp8_weights(weights: Fp8, halves: int) -> None:
    experts, n, k = weights.values.shape
    if weights.values.dtype != torch.float8_e4m3fn or not weights.values.is_contiguous():
        raise ConfigError(f"experts: fp8 weights are {weights.values.dtype}; contiguous float8_e4m3fn is expected")
    for size in (n // halves, k):
        if size % MULTIPLE:
            raise ConfigError(f"experts: a size of {size} in weights {[experts, n, k]} is no multiple of {MULTIPLE}")
    bands = halves * -(-(n // halves) // SCALE_BLOCK)
    _check_scales("weights", weights.scales, (experts, bands, -(-k // SCALE_BLOCK)))
    if not weights.scales.is_contiguous():
        raise ConfigError(f"experts: scales of weights with strides {weights.scales.stride()}; contiguous is expected")
    if weights.values.is_cuda and torch.cuda.get_device_capability(weights.values.device) < (8, 9):
        raise ConfigError("experts: e4m3 needs a GPU of compute capability 8.9 or later; use bf16 weights")


def _check_scales(whose: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    if scales.dtype != torch.float32 or scales.shape != shape or scales.stride(-1) != 1:
        raise ConfigError(
            f"experts: scales of {whose} are {scales.dtype} {list(scales.shape)} with strides {scales.stride()}; "
            f"float32 {list(shape)} is expected, side by side in a row"
        )
