"""Residual and RMSNorm in one pass: what stands between two stages of a decoder layer reads and writes its rows once.

Shapes: T rows, D hidden. Knows nothing of layers. `moe.pipeline.stack_cuda` calls it; `add_norm_naive` is the oracle.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.kernels.compile import compile_source, kernel_source
from bywash.kernels.launch import launch, load_functions

SOURCE, EPSILON = "add_norm.cu", 1e-6
_THREADS, _VEC = 256, 8
_WHO = "add and norm"


def compile_add_norm(hidden: int, arch: str, *, cache: Path | None = None) -> bytes:
    """Machine code for rows of one length.

    Raises:
        ConfigError: a length that is no multiple of 8, packages missing, or NVRTC refuses.
    """
    if hidden < 1 or hidden % _VEC:
        raise ConfigError(f"{_WHO}: hidden {hidden}: must be a multiple of {_VEC}, at least {_VEC}")
    macros = [("HIDDEN", str(hidden))]
    return compile_source(kernel_source((SOURCE,)), macros, arch, name="add_norm", what=_WHO, cache=cache)


class AddNorm:
    """On torch's current stream, fit for CUDA graphs; a row has the same bits whatever rows stand beside it."""

    def __init__(self, hidden: int) -> None:
        """Compile for the current device, or take from the cache, and load.

        Raises:
            ConfigError: see `compile_add_norm`.
        """
        major, minor = torch.cuda.get_device_capability()
        (self._function,) = load_functions(compile_add_norm(hidden, f"sm_{major}{minor}"), ("add_norm",), _WHO)
        self._hidden = hidden

    def __call__(
        self,
        x_TD: Tensor,
        a_TD: Tensor | None = None,
        b_TD: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        weight_D: Tensor | None = None,
        h_TD: Tensor | None = None,
    ) -> None:
        """x += a + b, rounded once; then h = x / rms(x) * weight where `h_TD` is given.

        Args:
            x_TD: bfloat16 [T, D], changed in place; a, b, h and the weight [D] likewise bfloat16, all contiguous.
            a_TD, b_TD: what to add, if anything.
            tokens: int32 [1], on the device: how many rows a and b really have; all by default.
            weight_D: of the norm; needed with `h_TD`.
            h_TD: where the norm goes; not in x, a or b.

        Raises:
            ConfigError: a tensor of another dtype, shape or layout.
        """
        _check(x_TD, self._hidden, {"a": a_TD, "b": b_TD, "h": h_TD})
        if (h_TD is None) != (weight_D is None):
            raise ConfigError(f"{_WHO}: `h_TD` and `weight_D` belong together")
        addresses = [0 if t is None else t.data_ptr() for t in (x_TD, a_TD, b_TD, tokens, weight_D, h_TD)]
        arguments = [*map(ctypes.c_uint64, addresses), ctypes.c_float(EPSILON)]
        if x_TD.shape[0]:
            launch(self._function, x_TD.shape[0], _THREADS, arguments, "add_norm", _WHO)


def _check(x_TD: Tensor, hidden: int, others: dict[str, Tensor | None]) -> None:
    for name, tensor in {"x": x_TD, **others}.items():
        if tensor is None:
            continue
        if tensor.shape != (x_TD.shape[0], hidden) or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            raise ConfigError(
                f"{_WHO}: {name} is {tensor.dtype} {list(tensor.shape)}; contiguous bfloat16 "
                f"{[x_TD.shape[0], hidden]} is needed"
            )


def add_norm_naive(
    x_TD: Tensor, a_TD: Tensor | None = None, b_TD: Tensor | None = None, *, weight_D: Tensor
) -> tuple[Tensor, Tensor]:
    """The same in torch, in float32: (x, h)."""
    zero = x_TD.new_zeros(())
    added = (zero if a_TD is None else a_TD).float() + (zero if b_TD is None else b_TD).float()
    x_TD = (x_TD.float() + added).to(x_TD.dtype)
    x = x_TD.float()
    scale = (x.square().mean(1, keepdim=True) + EPSILON).rsqrt()
    return x_TD, (x * scale * weight_D.float()).to(x_TD.dtype)
