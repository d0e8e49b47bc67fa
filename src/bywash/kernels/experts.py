"""The experts of one rank on Hopper (sm_90): both matrix products and SwiGLU in one kernel that reads rows by index.

`expert_gemm.cu` says how it works; here are its static choices, the tensor maps and the launch. Nothing is asked of the
host: counts are read on the device, so a captured graph replays with others. Other GPUs: see `triton_experts`.

For long steps power is the limit: an H200 that multiplied 33,000 pairs at 577 TFLOP/s ran at 1,592 MHz of its 1,980.

Shapes: L experts of this rank, D hidden, F intermediate, G = 2F (first F rows gate, next F up), P places for received
rows, M (row, expert) pairs computed here, ordered by expert.
Knows nothing of ranks or routing. `moe.device_experts` calls it.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bywash.errors import BywashError, ConfigError
from bywash.kernels.compile import compile_source, kernel_source
from bywash.kernels.driver import check, driver
from bywash.kernels.launch import launch, load_functions

ARCH = "sm_90a"
SIZE_STEP = 8
"""D and F must be multiples of this: rows are read in 16-byte pieces."""
THREADS = 384
FIELDS = (
    "rows",
    "row_vecs",
    "places",
    "index",
    "pairs",
    "ends",
    "h",
    "y",
    "targets",
    "hidden",
    "inner",
    "experts",
    "state",
    "first_stage",
    "last_stage",
    "first",
)
"""What follows the two tensor maps in the kernel's `Params`."""
_MAP_WORDS, _STEP_K = 16, 64
_MAX_N, _STAGES = 160, 4
"""The largest tile whose sums fit in registers, and the steps of it that fit in shared memory."""
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 56, 224
"""Of a thread that loads and of one that multiplies: 56 + 2 x 224 = 504 for three warpgroups, all that there are."""
_AT_FAULTS, _STATE_WORDS = 2, 3
_FAULTS = {
    1: "ends decrease, or lie past the index",
    2: "the index names a place past the rows",
}
_WHO = "experts hopper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is compiled in: no sizes of matrices, no counts. Any choice gives the same bits.

    Attributes:
        cluster: 1 or 2 blocks that share weights by multicast and split an expert's tokens. A single one keeps neither
            weights nor outputs in the L2 cache.
        max_n: the most tokens of a block's tile; a multiple of 8, up to 160.
    """

    cluster: int = 2
    max_n: int = _MAX_N

    def __post_init__(self) -> None:
        if self.cluster not in (1, 2) or not 8 <= self.max_n <= _MAX_N or self.max_n % 8:
            raise ConfigError(f"{_WHO}: cluster 1 or 2, max_n a multiple of 8 up to {_MAX_N}; got {self}")

    @property
    def shared_bytes(self) -> int:
        """Loaded steps, two output buffers of 32 tokens by 272 bytes, barriers, and room to align to 1,024."""
        step = (256 + self.max_n) * 2 * _STEP_K
        return _STAGES * step + 2 * 32 * 272 + 16 * _STAGES + 40 + 1024

    @classmethod
    def choose(cls, rows_per_expert: float) -> "Tuning":
        """By the rows that an expert usually has; right for any number.

        Up to 160 fit one block's tile: two blocks would halve it, and their products would then wait for shared memory
        (a 64-row product takes n / 2 cycles, reading its operands 16 + n / 4), 13 % more time with 128 rows. Beyond,
        two blocks share the weights, 4 % less time with 256 rows.
        """
        return cls(cluster=1 if rows_per_expert <= _MAX_N else 2)

    def macros(self) -> list[tuple[str, str]]:
        """The definitions that the source expects."""
        values = {
            "CLUSTER": self.cluster,
            "MAX_N": self.max_n,
            "STAGES": _STAGES,
            "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
            "CONSUMER_REGISTERS": _CONSUMER_REGISTERS,
            "SHARED_BYTES": self.shared_bytes,
        }
        return [(name, str(value)) for name, value in values.items()]


def wgmma_source(n: int) -> str:
    """`Wgmma<n>` in CUDA C++: d += a b with 64 x n in n / 2 registers a thread. One instruction that names them all."""
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
template <>
struct Wgmma<{n}> {{
  static __device__ __forceinline__ void run(float (&d)[{count}], u64 a, u64 b) {{
    asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{registers}}}, %{count}, %{count + 1}, "
                 "1, 1, 1, 0, 0;" : {outputs} : "l"(a), "l"(b));
  }}
}};
"""


def experts_source(tuning: Tuning) -> str:
    """The whole text for NVRTC."""
    products = "".join(wgmma_source(n) for n in range(8, tuning.max_n + 1, 8))
    return kernel_source(("hopper.cuh",)) + products + kernel_source(("expert_tiles.cuh", "expert_gemm.cu"))


def compile_experts(tuning: Tuning, *, cache: Path | None = None) -> bytes:
    """Machine code for sm_90a, on any machine.

    Raises:
        ConfigError: packages are missing, or NVRTC does not know the architecture.
    """
    return compile_source(experts_source(tuning), tuning.macros(), ARCH, name="experts", what=_WHO, cache=cache)


class HopperExperts:
    """y[m] = (silu(x Wg^T) * (x Wu^T)) Wd^T with x = rows[index[m]]: bfloat16 in and out, sums in float32.

    A row's result has the same bits whatever rows stand beside it, however many, and whatever the tuning: ranks that
    hold other numbers of experts agree.
    """

    can_push: ClassVar[Literal[True]] = True

    def __init__(
        self,
        gate_up_LGD: Tensor,
        down_LDF: Tensor,
        *,
        pairs: int,
        rows_per_expert: float | None = None,
        tuning: Tuning | None = None,
        max_blocks: int | None = None,
        first: int = 0,
        intermediate: Tensor | None = None,
    ) -> None:
        """Compile or take from the cache, describe the weights, make room for the intermediate.

        Args:
            gate_up_LGD: bfloat16 [L, G, D], contiguous; not copied, so it must live as long as this.
            down_LDF: bfloat16 [L, D, F], likewise.
            pairs: the most (row, expert) pairs that can arrive.
            rows_per_expert: what to tune for; by default as if all pairs arrived, evenly.
            tuning: static choices; see `Tuning.choose` for the default.
            max_blocks: multiprocessors to use, so that another kernel can run beside; all by default.
            first: groups of the index before those of these weights; they are left alone, so that several of these
                share an index, its outputs and the intermediate. `ends_L` then has `first` + L entries.
            intermediate: bfloat16 [pairs, F] to use instead of an own one, by one launch at a time.

        Raises:
            ConfigError: not an sm_90 GPU, packages missing, or weights of a dtype, shape or layout not supported.
        """
        _check_weights(gate_up_LGD, down_LDF, pairs)
        device = gate_up_LGD.device
        if torch.cuda.get_device_capability(device) != (9, 0):
            name = torch.cuda.get_device_name(device)
            raise ConfigError(f"{_WHO}: written for sm_90 (H100, H200), and this is {name}; use the Triton experts")
        experts, self.hidden, inner = down_LDF.shape
        self._tuning = tuning or Tuning.choose(pairs / experts if rows_per_expert is None else rows_per_expert)
        self._weights = (gate_up_LGD, down_LDF)
        self.pairs, self._first = pairs, first
        if intermediate is not None and (intermediate.shape != (pairs, inner) or not intermediate.is_contiguous()):
            raise ConfigError(f"{_WHO}: intermediate must be [{pairs}, {inner}]; got {list(intermediate.shape)}")
        with torch.inference_mode(False):  # outlives the model's inference mode
            if intermediate is None:
                intermediate = torch.empty(pairs, inner, dtype=torch.bfloat16, device=device)
            self._h_MF = intermediate
            self._state = torch.zeros(_STATE_WORDS + first + experts, dtype=torch.int32, device=device)
        code, shared_bytes = compile_experts(self._tuning), self._tuning.shared_bytes
        (self._function,) = load_functions(code, ("experts",), _WHO, shared_bytes=shared_bytes)
        self.blocks = _grid(device, self._tuning.cluster, max_blocks)
        fixed = {
            "h": self._h_MF.data_ptr(),
            "hidden": self.hidden,
            "inner": inner,
            "experts": first + experts,
            "first": first,
            "state": self._state.data_ptr(),
        }
        words = [*_gate_up_map(gate_up_LGD), *_down_map(down_LDF), *(fixed.get(name, 0) for name in FIELDS)]
        self._parameters = (ctypes.c_uint64 * len(words))(*words)

    def __call__(
        self,
        rows_PD: Tensor,
        index_M: Tensor,
        ends_L: Tensor,
        out_MD: Tensor | None = None,
        *,
        targets_M: Tensor | None = None,
        first: int = 0,
        last: int = 1,
    ) -> Tensor:
        """Launch on torch's current stream; one launch at a time, since they share the intermediate.

        Args:
            rows_PD: bfloat16 [P, at least D], rows of any multiple of 8 values apart.
            index_M: int32 [at most `pairs`], the place below P that each pair reads.
            ends_L: int32 [L], one past each expert's last pair: not decreasing, at most `index_M`'s length. What the
                device finds beyond these bounds is left out or read as place 0, and `check` says so.
            out_MD: bfloat16 [at least index_M's length, D], contiguous; made if absent. Rows past M are left alone.
            targets_M: int64 [at least index_M's length], where a pair's output goes instead of its row of `out_MD`: an
                address that this device can write D values to, a multiple of 16, as `DeviceReceived.target_M` has them;
                0 for `out_MD`. The kernel takes them as they are.
            first, last: stages to run: 0 makes the intermediate, 1 the outputs from it.

        Raises:
            ConfigError: a tensor of another dtype, shape or layout.
        """
        if out_MD is None:
            out_MD = torch.empty(index_M.shape[0], self.hidden, dtype=torch.bfloat16, device=rows_PD.device)
        _check_call(self, rows_PD, index_M, ends_L, out_MD)
        if targets_M is not None:
            _check_targets(targets_M, index_M)
        self._set(rows=rows_PD.data_ptr(), row_vecs=rows_PD.stride(0) // 8, places=rows_PD.shape[0])
        self._set(index=index_M.data_ptr(), pairs=index_M.shape[0], ends=ends_L.data_ptr(), y=out_MD.data_ptr())
        self._set(targets=0 if targets_M is None else targets_M.data_ptr(), first_stage=first, last_stage=last)
        arguments, shared_bytes = (self._parameters,), self._tuning.shared_bytes
        launch(self._function, self.blocks, THREADS, arguments, "experts", _WHO, shared_bytes=shared_bytes)
        return out_MD

    def check(self) -> None:
        """Wait for the device and learn whether a call since the last check was given bad ends or places.

        Raises:
            BywashError: one was; outputs since then are not to be used.
        """
        found = int(self._state[_AT_FAULTS])
        if found:
            self._state[_AT_FAULTS] = 0
            raise BywashError(f"{_WHO}: {'; '.join(text for bit, text in _FAULTS.items() if found & bit)}")

    @property
    def experts(self) -> int:
        """L, with those before `first`."""
        return self._first + int(self._weights[1].shape[0])

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self._parameters[2 * _MAP_WORDS + FIELDS.index(name)] = value


def _check_weights(gate_up_LGD: Tensor, down_LDF: Tensor, pairs: int) -> None:
    shapes = f"gate_up {list(gate_up_LGD.shape)}, down {list(down_LDF.shape)}"
    if gate_up_LGD.dim() != 3 or down_LDF.dim() != 3:
        raise ConfigError(f"{_WHO}: weights must be gate_up [L, 2F, D] and down [L, D, F]; got {shapes}")
    experts, hidden, inner = down_LDF.shape
    if gate_up_LGD.shape != (experts, 2 * inner, hidden):
        raise ConfigError(f"{_WHO}: weights must be gate_up [L, 2F, D] and down [L, D, F]; got {shapes}")
    if not experts or hidden % SIZE_STEP or inner % SIZE_STEP or not hidden or not inner:
        raise ConfigError(f"{_WHO}: hidden and intermediate must be multiples of {SIZE_STEP}, not 0; got {shapes}")
    for name, tensor in (("gate_up", gate_up_LGD), ("down", down_LDF)):
        if tensor.dtype != torch.bfloat16 or not tensor.is_cuda or not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ConfigError(
                f"{_WHO}: {name} must be a contiguous bfloat16 tensor on a GPU; got {tensor.dtype} on {tensor.device}"
            )
    if not 0 < pairs * inner // 8 < 1 << 32:
        raise ConfigError(f"{_WHO}: {pairs} pairs of {inner} values; at least 1, and below {(1 << 35) // inner} pairs")


def _check_call(experts: HopperExperts, rows_PD: Tensor, index_M: Tensor, ends_L: Tensor, out_MD: Tensor) -> None:
    if index_M.dtype != torch.int32 or ends_L.dtype != torch.int32 or not (index_M.is_cuda and ends_L.is_cuda):
        raise ConfigError(f"{_WHO}: index and ends must be int32 on the GPU; got {index_M.dtype} and {ends_L.dtype}")
    if not index_M.is_contiguous() or not ends_L.is_contiguous() or ends_L.shape != (experts.experts,):
        raise ConfigError(f"{_WHO}: ends must be [{experts.experts}], contiguous; got {list(ends_L.shape)}")
    if index_M.dim() != 1 or index_M.shape[0] > experts.pairs:
        raise ConfigError(f"{_WHO}: index of {list(index_M.shape)}; one dimension, at most {experts.pairs} pairs")
    for name, tensor in (("rows", rows_PD), ("out", out_MD)):
        if tensor.dtype != torch.bfloat16 or not tensor.is_cuda or tensor.dim() != 2 or tensor.data_ptr() % 16:
            raise ConfigError(f"{_WHO}: {name} must be two-dimensional bfloat16 on the GPU; got {tensor.dtype}")
    width, stride = rows_PD.shape[1], rows_PD.stride(0)
    if width < experts.hidden or rows_PD.stride(1) != 1 or stride % 8 or rows_PD.shape[0] * stride >= 1 << 35:
        raise ConfigError(f"{_WHO}: rows must hold {experts.hidden} values each, a multiple of 8 apart; got {width}")
    if index_M.shape[0] and not rows_PD.shape[0]:
        raise ConfigError(f"{_WHO}: no rows, and an index of {index_M.shape[0]}")
    if out_MD.shape[0] < index_M.shape[0] or out_MD.shape[1] != experts.hidden or not out_MD.is_contiguous():
        wanted = f"[{index_M.shape[0]} or more, {experts.hidden}]"
        raise ConfigError(f"{_WHO}: out must be {wanted}, contiguous; got {list(out_MD.shape)}")


def _check_targets(targets_M: Tensor, index_M: Tensor) -> None:
    if targets_M.dtype != torch.int64 or targets_M.device != index_M.device or not targets_M.is_contiguous():
        raise ConfigError(f"{_WHO}: targets must be contiguous int64 beside the index; got {targets_M.dtype}")
    if targets_M.dim() != 1 or targets_M.shape[0] < index_M.shape[0]:
        raise ConfigError(f"{_WHO}: targets {list(targets_M.shape)} for an index of {index_M.shape[0]}")


def _grid(device: torch.device, cluster: int, max_blocks: int | None) -> int:
    """Blocks to launch: one for each multiprocessor, whole clusters."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if max_blocks is not None and not cluster <= max_blocks:
        raise ConfigError(f"{_WHO}: max_blocks {max_blocks}; at least {cluster}")
    return min(sms, max_blocks or sms) // cluster * cluster


def _gate_up_map(gate_up_LGD: Tensor) -> list[int]:
    """Boxes of 64 values by 8 rows of gate, the same 8 of up, and so on: 8 times."""
    experts, rows, hidden = gate_up_LGD.shape
    inner, row = rows // 2, 2 * hidden
    sizes, strides = [hidden, 8, 2, inner // 8, experts], [row, inner * row, 8 * row, 2 * inner * row]
    return _tensor_map(gate_up_LGD, sizes, strides, [_STEP_K, 8, 2, 8, 1])


def _down_map(down_LDF: Tensor) -> list[int]:
    """Boxes of 64 values by 128 rows."""
    experts, hidden, inner = down_LDF.shape
    row, whole = 2 * inner, 2 * inner * hidden * experts
    sizes, strides = [inner, hidden, experts, 1, 1], [row, hidden * row, whole, whole]
    return _tensor_map(down_LDF, sizes, strides, [_STEP_K, 128, 1, 1, 1])


def _tensor_map(tensor: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> list[int]:
    """128 bytes that tell TMA where a tensor lies: sizes and box in values, strides in bytes without the first."""
    calls = driver()
    made = calls.cuTensorMapEncodeTiled(
        calls.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(sizes),
        tensor.data_ptr(),
        [calls.cuuint64_t(size) for size in sizes],
        [calls.cuuint64_t(stride) for stride in strides],
        [calls.cuuint32_t(size) for size in box],
        [calls.cuuint32_t(1)] * len(sizes),
        calls.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        calls.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        calls.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        calls.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return [int(word) for word in check(made, f"describing weights {sizes}", _WHO).opaque]
