"""The CUDA driver's calls, imported late and checked. Knows nothing of kernels or heaps; both call it."""

from typing import Any

from bywash.errors import ConfigError
from bywash.kernels.compile import require_cuda


def driver() -> Any:
    """The driver's module: the package must import on machines without it.

    Raises:
        ConfigError: cuda-bindings is not installed.
    """
    require_cuda()
    from cuda.bindings import driver as module

    return module


def check(result: tuple[Any, ...], what: str, who: str = "exchange peer") -> Any:
    """The value of a driver call, or a ConfigError with who tried what and the driver's reason."""
    status, *values = result
    if int(status) != 0:
        text = driver().cuGetErrorString(status)[1]
        reason = text.decode() if isinstance(text, bytes) else str(text)
        raise ConfigError(f"{who}: {what}: {reason} ({status.name})")
    return values[0] if len(values) == 1 else tuple(values)
