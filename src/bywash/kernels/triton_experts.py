"""Expert compute in Triton: the portable path beside the Hopper kernels. Rows are read through an index.

Two launches, gate_up with SwiGLU and down, on torch's current stream. How many rows each expert has stays in device
memory, so a captured CUDA graph replays for any counts. `triton_experts_kernels.py` holds the kernel and its design.
Knows nothing of exchanges: the GPU layer calls it with what `exchange.peer_device.DeviceReceived` holds.

Shapes: L experts of this rank, D hidden, F intermediate, G = 2F (first F rows gate, next F up: transformers'
Qwen3-MoE), P places for received rows, M pairs by expert, N and K rows and columns of one expert's matrix.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bywash.errors import ConfigError

MULTIPLE = 16
"""D and F are multiples of this: rows must start on 16 bytes for TMA and cp.async, in fp8 too."""
_MIN_LANES = 128
"""The kernel's table of experts has at least this many entries, so that fewer experts need no other machine code."""
_FEWEST_TOKENS = 32
_SPARE = 2048
"""Bytes of shared memory for barriers and what Triton adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """The shape of one product's tiles.

    Attributes:
        rows: weight rows (gate and up together), 64 to 256.
        main: tokens, 32 to 256.
        tail: further tokens that share the tile's weights if no more are left; 0 for none.
        depth: K of one step.
        warps, stages: of Triton.
        per_sm: programs that stay on a multiprocessor together.
    """

    rows: int
    main: int
    tail: int
    depth: int = 64
    warps: int = 8
    stages: int = 4
    per_sm: int = 1


def choose_tiles(rows_per_expert: float) -> tuple[Tiles, Tiles]:
    """The tiles of gate_up and of down for experts that usually have so many rows, as measured on an H200.

    Any number of rows is right with any tiles, and has the same bits: this is about time only. Of the pairs tried with
    1,030, 257, 130 and 8 rows per expert, none took 2 % less.
    """
    if rows_per_expert > 512:
        return (Tiles(rows=256, main=128, tail=0),) * 2
    if rows_per_expert > 160:
        return Tiles(rows=128, main=256, tail=32), Tiles(rows=256, main=128, tail=0)
    if rows_per_expert > 80:
        return (Tiles(rows=128, main=128, tail=16, warps=4, stages=3, per_sm=2),) * 2
    return (Tiles(rows=128, main=64, tail=16, warps=4, stages=4, per_sm=2),) * 2


def fitted(tiles: Tiles, *, element_bytes: int, shared_bytes: int) -> Tiles:
    """The tiles, with fewer stages or tokens if the slices in flight would not fit in a block's shared memory.

    Example: bf16 128x256+32 in 4 stages of 64 takes 213 kB, which Hopper has; for the 167 kB of an A100 it gets 3
    stages, for the 101 kB of smaller GPUs 128 + 32 tokens in 2.
    """
    while tiles.stages * (tiles.rows + tiles.main + tiles.tail) * tiles.depth * element_bytes > shared_bytes - _SPARE:
        if tiles.stages > 2:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.main > _FEWEST_TOKENS:
            main = tiles.main // 2
            tiles = replace(tiles, main=main, tail=min(tiles.tail, main // 2))
        else:
            break
    return tiles


class GroupedProduct:
    """One expert product: y[m] = W[expert of m] x[m], or, gated, SwiGLU of its two halves with x[index[m]]."""

    def __init__(self, weights_LNK: Tensor, *, gated: bool, tiles: Tiles) -> None:
        """Describe the weights (not copied) and compile.

        Raises:
            ConfigError: no triton, or weights that the kernel cannot read; says which size.
        """
        experts, n, k = weights_LNK.shape
        halves = 2 if gated else 1
        self.depth, self.columns, self._experts = k, n // halves, experts
        _check_weights(weights_LNK, self.columns)
        require_triton()
        self._gated, self._tiles = gated, tiles
        self._weights = weights_descriptor(weights_LNK, halves, tiles.rows, tiles.depth)
        self._programs = tiles.per_sm * multiprocessors(weights_LNK.device)
        nothing = torch.zeros(experts, dtype=torch.int32, device=weights_LNK.device)
        self(weights_LNK.view(-1, k), nothing, nothing, weights_LNK.new_empty(1, self.columns))

    def __call__(self, x_PK: Tensor, index_M: Tensor, ends_L: Tensor, y_MN: Tensor) -> None:
        """Launch. `index_M` is not read unless gated."""
        from bywash.kernels.triton_experts_kernels import grouped_product

        tiles = self._tiles
        grouped_product[(self._programs,)](
            x_PK,
            index_M,
            ends_L,
            self._weights,
            y_MN,
            self._experts,
            self.depth,
            self.columns,
            x_PK.stride(0),
            GATED=self._gated,
            LANES=lanes_of(self._experts),
            ROWS=tiles.rows,
            MAIN=tiles.main,
            TAIL=tiles.tail,
            DEPTH=tiles.depth,
            EVEN=self.depth % tiles.depth == 0,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


class TritonExperts:
    """All experts of a rank: y[m] = down(silu(gate(x)) * up(x)) with x = rows[index[m]], summed in float32.

    A row's result has the same bits whatever rows stand beside it, however many, and whatever the tiles: ranks that
    hold other numbers of experts agree. That holds for GPUs of one architecture.
    """

    def __init__(
        self,
        gate_up_LGD: Tensor,
        down_LDF: Tensor,
        *,
        pairs: int,
        rows_per_expert: float | None = None,
        tiles: tuple[Tiles, Tiles] | None = None,
    ) -> None:
        """Hold the weights (not copied), allocate the intermediate [pairs, F], compile.

        Args:
            gate_up_LGD: bfloat16 or float16, contiguous.
            down_LDF: the same.
            pairs: the most pairs (row, expert) of a step.
            rows_per_expert: rows that an expert usually has, to choose tiles by; `pairs` / L if not given.
            tiles: of gate_up and of down, instead of the choice for these rows and this GPU.

        Raises:
            ConfigError: no triton, sizes that are no multiple of 16, other dtypes, layouts or devices.
        """
        check_pair_of_weights(gate_up_LGD, down_LDF)
        if tiles is None:
            choice = choose_tiles(pairs / len(down_LDF) if rows_per_expert is None else rows_per_expert)
            tiles = fitted_to_device(choice, down_LDF)
        self.pairs, self.hidden = pairs, down_LDF.shape[1]
        self._gate_up = GroupedProduct(gate_up_LGD, gated=True, tiles=tiles[0])
        self._down = GroupedProduct(down_LDF, gated=False, tiles=tiles[1])
        self._dtype = down_LDF.dtype
        with torch.inference_mode(False):  # outlives the model's inference mode
            self._h_MF = down_LDF.new_empty(pairs, down_LDF.shape[2])

    def __call__(
        self,
        rows_PD: Tensor,
        index_M: Tensor,
        ends_L: Tensor,
        out_MD: Tensor | None = None,
        *,
        first: int = 0,
        last: int = 1,
    ) -> Tensor:
        """Two launches, no host sync.

        Args:
            rows_PD: [P, D], read only where `index_M` points below M.
            index_M: int32 [M or more, at most `pairs`], the place of each pair, by expert.
            ends_L: int32 [L], one past each expert's last pair; the last is M.
            out_MD: [M or more, D], contiguous; rows past M stay as they are.
            first, last: stages to run: 0 makes the intermediate, 1 the outputs from it.

        Returns:
            `out_MD`, or a new [pairs, D] whose rows past M are not set.

        Raises:
            ConfigError: dtypes or shapes that do not fit.
        """
        check_rows(rows_PD, self._dtype, self.hidden, index_M, self.pairs)
        out_MD = rows_PD.new_empty(self.pairs, self.hidden) if out_MD is None else out_MD
        check_out(out_MD, self._dtype, self.hidden)
        if first == 0:
            self._gate_up(rows_PD, index_M, ends_L, self._h_MF)
        if last == 1:
            self._down(self._h_MF, index_M, ends_L, out_MD)
        return out_MD


def check_pair_of_weights(gate_up_LGD: Tensor, down_LDF: Tensor) -> None:
    """Raises: ConfigError: the two do not belong together."""
    experts, hidden, inner = down_LDF.shape
    if gate_up_LGD.shape != (experts, 2 * inner, hidden) or gate_up_LGD.dtype != down_LDF.dtype:
        raise ConfigError(
            f"experts: gate_up is {_named(gate_up_LGD)} and down is {_named(down_LDF)}; with down [L, D, F], gate_up "
            "is [L, 2F, D] of the same dtype"
        )


def check_rows(rows_PD: Tensor, dtype: torch.dtype, hidden: int, index_M: Tensor, pairs: int) -> None:
    """Raises: ConfigError: rows or index of another width, dtype or layout than the kernels read."""
    if rows_PD.dtype != dtype or rows_PD.shape[1] != hidden:
        raise ConfigError(f"experts: rows are {_named(rows_PD)}; the weights want {dtype} rows of {hidden}")
    if rows_PD.stride(1) != 1 or rows_PD.stride(0) % MULTIPLE or rows_PD.data_ptr() % 16:
        raise ConfigError(
            f"experts: rows with strides {rows_PD.stride()} at address {rows_PD.data_ptr():#x}; rows must be "
            f"contiguous, a multiple of {MULTIPLE} elements apart, on 16 bytes"
        )
    if index_M.dtype != torch.int32 or index_M.numel() > pairs:
        raise ConfigError(f"experts: the index is {_named(index_M)}; int32 and at most {pairs} pairs are expected")


def check_out(out_MD: Tensor, dtype: torch.dtype, hidden: int) -> None:
    """Raises: ConfigError: outputs cannot be stored there."""
    if out_MD.dtype != dtype or out_MD.shape[1:] != (hidden,) or not out_MD.is_contiguous() or out_MD.data_ptr() % 16:
        raise ConfigError(f"experts: out is {_named(out_MD)}; contiguous {dtype} [M, {hidden}] on 16 bytes is expected")


def _check_weights(weights_LNK: Tensor, columns: int) -> None:
    if weights_LNK.dtype not in (torch.bfloat16, torch.float16) or not weights_LNK.is_contiguous():
        raise ConfigError(f"experts: weights are {_named(weights_LNK)}; contiguous bfloat16 or float16 is expected")
    for size in (columns, weights_LNK.shape[2]):
        if size % MULTIPLE:
            raise ConfigError(f"experts: a size of {size} in {_named(weights_LNK)} is no multiple of {MULTIPLE}")


def _named(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def weights_descriptor(weights_LNK: Tensor, halves: int, rows: int, depth: int) -> Any:
    """What the kernels load boxes of rows x depth by: [L, N / 8, halves, 8, K], gate and up interleaved by 8 rows."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    experts, n, k = weights_LNK.shape
    columns = n // halves
    return TensorDescriptor(
        weights_LNK,
        [experts, columns // 8, halves, 8, k],
        [n * k, 8 * k, columns * k, k, 1],
        [1, rows // (8 * halves), halves, 8, depth],
    )


def lanes_of(experts: int) -> int:
    """Entries of the kernel's table of experts."""
    return max(_MIN_LANES, 1 << (experts - 1).bit_length())


def require_triton() -> None:
    """Raises: ConfigError: Triton is not installed."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"Triton experts need triton ({error}): pip install triton; torch's CUDA wheels for Linux bring it"
        ) from error


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 3 elsewhere, where Triton's interpreter runs programs one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def fitted_to_device(tiles: tuple[Tiles, Tiles], weights: Tensor) -> tuple[Tiles, Tiles]:
    """The tiles for the GPU of the weights and the size of their elements: see `fitted`.

    GPUs before Hopper multiply from registers, where larger tiles than 128 x 128 do not fit. Compiled for them, not
    measured on them.
    """
    if weights.device.type != "cuda":
        return tiles
    require_triton()
    from triton.runtime import driver

    index = torch.cuda.current_device() if weights.device.index is None else weights.device.index
    if torch.cuda.get_device_capability(index) < (9, 0):
        small = [replace(t, rows=min(t.rows, 128), main=min(t.main, 128), warps=8, per_sm=1) for t in tiles]
        tiles = small[0], small[1]
    shared_bytes = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    first, second = (fitted(t, element_bytes=weights.element_size(), shared_bytes=shared_bytes) for t in tiles)
    return first, second
