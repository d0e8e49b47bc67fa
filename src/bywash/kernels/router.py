"""A router on the device: logits, top-k and softmax of the chosen in one kernel, whatever tokens stand beside a token.

torch's products pick their tiles by the number of rows, so a step in micro-batches could route a near-tie otherwise
than the whole step. Shapes: T tokens, D hidden, E experts, K experts per token.
Knows nothing of ranks. `moe.pipeline.stack_cuda` calls it; `router_naive` is the oracle.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.kernels.compile import compile_source, kernel_source
from bywash.kernels.launch import launch, load_functions

SOURCE = "router.cu"
NOT_FINITE = -2
"""The id that a token gets whose logits are not all finite. No expert, so every exchange refuses it and says why."""

_K_STEP, _MOST_EXPERTS = 8, 256
_WHO = "router"


def _block(experts: int) -> dict[str, int]:
    """Static choices. Few experts leave registers for more warps and loads in flight, which short steps need, or for
    two tiles of tokens, so that weights are read half as often; the bits of a result depend on WARPS only."""
    if experts <= 32:
        return {"TOKENS": 16, "WARPS": 16, "UNROLL": 7}
    return {"TOKENS": 32 if experts <= 64 else 16, "WARPS": 8, "UNROLL": 2}


def compile_router(experts: int, top_k: int, hidden: int, arch: str, *, cache: Path | None = None) -> bytes:
    """Machine code for one shape of router.

    Raises:
        ConfigError: sizes that it does not compute, packages missing, or NVRTC refuses.
    """
    if hidden % _K_STEP or not 1 <= top_k <= experts <= _MOST_EXPERTS:
        raise ConfigError(
            f"{_WHO}: hidden {hidden}, {experts} experts, top-{top_k}; hidden a multiple of {_K_STEP}, "
            f"1 <= top-k <= experts <= {_MOST_EXPERTS}"
        )
    macros = [
        *((name, str(value)) for name, value in _block(experts).items()),
        ("EXPERTS", str(experts)),
        ("TOP_K", str(top_k)),
        ("HIDDEN", str(hidden)),
        ("NOT_FINITE", f"({NOT_FINITE})"),
    ]
    return compile_source(kernel_source((SOURCE,)), macros, arch, name="router", what=_WHO, cache=cache)


class Router:
    """ids and weights of bfloat16 rows, on torch's current stream, fit for CUDA graphs."""

    def __init__(self, experts: int, top_k: int, hidden: int) -> None:
        """Compile for the current device, or take from the cache, and load.

        Raises:
            ConfigError: see `compile_router`.
        """
        major, minor = torch.cuda.get_device_capability()
        code = compile_router(experts, top_k, hidden, f"sm_{major}{minor}")
        (self._function,) = load_functions(code, ("route",), _WHO)
        block, self._shape = _block(experts), (experts, top_k, hidden)
        self._tokens, self._threads = block["TOKENS"], 32 * block["WARPS"]

    def __call__(self, x_TD: Tensor, weights_ED: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """Fill int64 `ids_TK`, best first, and float32 `weights_TK`.

        A token with a logit that is not finite (or past 1e30) gets `NOT_FINITE` ids and zero weights.

        Args:
            x_TD, weights_ED: bfloat16, contiguous, at multiples of 16 bytes.
            ids_TK, weights_TK: contiguous.

        Raises:
            ConfigError: a tensor of another dtype, shape or layout.
        """
        tokens = x_TD.shape[0]
        _check(x_TD, weights_ED, ids_TK, weights_TK, *self._shape)
        tensors = (x_TD, weights_ED, ids_TK, weights_TK)
        values = [ctypes.c_uint64(tensor.data_ptr()) for tensor in tensors] + [ctypes.c_uint64(tokens)]
        if tokens:
            launch(self._function, -(-tokens // self._tokens), self._threads, values, "route", _WHO)


def _check(
    x_TD: Tensor, weights_ED: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int, top_k: int, hidden: int
) -> None:
    tokens = x_TD.shape[0]
    for name, tensor, shape, dtype, step in (
        ("x", x_TD, (tokens, hidden), torch.bfloat16, 16),
        ("weights", weights_ED, (experts, hidden), torch.bfloat16, 16),
        ("ids", ids_TK, (tokens, top_k), torch.int64, 8),
        ("their weights", weights_TK, (tokens, top_k), torch.float32, 4),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() % step:
            raise ConfigError(
                f"{_WHO}: {name}: {tensor.dtype} {list(tensor.shape)} at {tensor.data_ptr():#x}; contiguous {dtype} "
                f"{list(shape)} at a multiple of {step} bytes is needed"
            )


def router_naive(x_TD: Tensor, weights_ED: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The same in torch, in float32: (ids [T, K], weights [T, K]), best first."""
    best = (x_TD.float() @ weights_ED.float().T).topk(top_k, dim=1)
    return best.indices, best.values.softmax(dim=1)
