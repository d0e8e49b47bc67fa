"""Packing an engine's rows and taking them apart, one launch each; rows.cu says what each kernel does.

Knows nothing of ranks' memory. `exchange.device_rows` calls it.
"""

import ctypes
import re
from functools import cache
from typing import Any

import torch

from bywash.kernels.compile import THREADS, compile_source, kernel_source
from bywash.kernels.launch import launch, load_functions

SOURCE = "rows.cu"
KERNELS = ("pack_rows", "read_rows", "copy_rows", "pack_outputs", "unpack_outputs")
MACROS = [("THREADS", str(THREADS))]
_WHO = "rows of an engine"
_BLOCKS_OF_SM = 4


def compile_rows(arch: str) -> bytes:
    """Machine code for an architecture, such as `sm_90`; one for all sizes of rows.

    Raises:
        ConfigError: packages missing, or NVRTC refuses.
    """
    return compile_source(kernel_source((SOURCE,)), MACROS, arch, name="rows", what=_WHO)


def parameter_names() -> tuple[str, ...]:
    """The fields of `Params`, in order."""
    text = kernel_source((SOURCE,))
    body = text[text.index("struct Params {") :]
    return tuple(re.findall(r"^  u64 (\w+);", body[: body.index("};")], re.MULTILINE))


class RowKernels:
    """The kernels on one device, on torch's current stream, fit for CUDA graphs."""

    def __init__(self) -> None:
        """Compile for the current device, or take from the cache, and load.

        Raises:
            ConfigError: see `compile_rows`.
        """
        self._at = {name: position for position, name in enumerate(parameter_names())}
        self._most_blocks = (
            _BLOCKS_OF_SM * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        )
        self._functions = self._loaded()

    def __call__(self, kernel: str, blocks: int, **values: int) -> None:
        """Launch.

        Args:
            kernel: its name.
            blocks: as many as there is work for; fewer are launched where the device holds fewer.
            values: fields of `Params`; the others are 0.
        """
        words = (ctypes.c_uint64 * len(self._at))()
        for name, value in values.items():
            words[self._at[name]] = value
        self._launch(kernel, max(1, min(blocks, self._most_blocks)), words)

    def _loaded(self) -> dict[str, Any]:
        major, minor = torch.cuda.get_device_capability()
        return dict(zip(KERNELS, load_functions(compile_rows(f"sm_{major}{minor}"), KERNELS, _WHO), strict=True))

    def _launch(self, kernel: str, blocks: int, words: "ctypes.Array[ctypes.c_uint64]") -> None:
        launch(self._functions[kernel], blocks, THREADS, (words,), kernel, _WHO)


@cache
def row_kernels(device: int) -> RowKernels:
    """The kernels of the current device, whose number is `device`."""
    return RowKernels()
