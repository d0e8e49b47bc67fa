"""Gathering rows and SwiGLU up to a number of pairs that only the device knows, around torch's grouped product.

Shapes: P places for received rows, M pairs, D hidden, F intermediate, G = 2F.
Knows nothing of experts or ranks. `moe.device_experts` calls it.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.kernels.compile import compile_source, kernel_source
from bywash.kernels.launch import launch, load_functions

SOURCE = "expand.cu"
_DTYPES = {torch.bfloat16: 1, torch.float16: 2}
_THREADS, _BLOCKS_OF_SM = 256, 8
_VEC_BYTES = 16


def compile_expand(dtype: torch.dtype, arch: str) -> bytes:
    """Machine code for rows of `dtype` (bfloat16 or float16), such as for arch `sm_90`.

    Raises:
        ConfigError: another dtype, packages missing, or NVRTC refuses.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"experts: rows of {dtype}; bfloat16 or float16")
    macros = [("DTYPE", str(_DTYPES[dtype]))]
    return compile_source(kernel_source((SOURCE,)), macros, arch, name="expand", what="experts")


class Expand:
    """Both kernels on the current device."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Compile, or take from the cache, and load.

        Raises:
            ConfigError: see `compile_expand`.
        """
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        code = compile_expand(dtype, f"sm_{properties.major}{properties.minor}")
        self._blocks = _BLOCKS_OF_SM * properties.multi_processor_count
        self._gather, self._multiply = load_functions(code, ("gather_rows", "multiply_gate"), "experts")

    def gather_rows(self, rows_PD: Tensor, index_M: Tensor, pairs: Tensor, out_MD: Tensor) -> None:
        """out[m] = rows[index[m]] for m below `pairs`, int32 on the device; all contiguous, rows multiples of 16 B."""
        vecs = rows_PD.shape[1] * rows_PD.element_size() // _VEC_BYTES
        self._launch(self._gather, (rows_PD, index_M, pairs, out_MD), vecs)

    def multiply_gate(self, gate_up_MG: Tensor, pairs: Tensor, h_MF: Tensor) -> None:
        """h[m] = silu(first half of gate_up[m]) * second half, for m below `pairs`, in float32, rounded once."""
        vecs = h_MF.shape[1] * h_MF.element_size() // _VEC_BYTES
        self._launch(self._multiply, (gate_up_MG, pairs, h_MF), vecs)

    def _launch(self, function: Any, tensors: tuple[Tensor, ...], vecs: int) -> None:
        values = [ctypes.c_uint64(tensor.data_ptr()) for tensor in tensors] + [ctypes.c_uint64(vecs)]
        launch(function, self._blocks, _THREADS, values, "the kernels around the product", "experts")
