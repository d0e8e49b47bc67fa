"""CUDA C++ to machine code with NVRTC, cached on disk.

The cache key is the source, the architecture, the compiler and the static shape: never a token count, so a longer
prompt never compiles anything. Knows nothing of devices or drivers; every module that launches kernels and the compile
check in CI call it.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from bywash.cache import cache_directory
from bywash.errors import ConfigError

SOURCES = (
    "common.cuh",
    "peer_elastic.cuh",
    "peer_push.cu",
    "peer_dispatch.cu",
    "peer_combine.cu",
    "peer_assign.cu",
    "peer_fetch.cu",
)
THREADS = 512
"""Threads of a block; the same as in common.cuh."""
MAX_EXPERTS, MAX_TOP_K, MAX_RANKS = 4095, 32, 32
"""A pair's expert has 12 bits in its message, a warp holds a token's experts, a mask of ranks has 32 bits."""
MAX_BLOCKS, WARPS = 256, THREADS // 32
"""Blocks of a grid, one for each multiprocessor, and warps of a block: peers have room for a flag of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """What is compiled in.

    Attributes:
        ranks, experts, top_k: R, E and K.
        vecs: 16-byte vectors of a row.
        dtype: `float32`, `bfloat16` or `float16`.
        exact: whether all pairs travel back unsummed.
        fp8: how dispatch sends rows: 0 as they are, 1 or 2 as in peer_push.cu.
        fault: 0; tests leave out the release of flags (1) or a wait (2, 3) to see that they are needed.
        real_experts: 0, or for an elastic layer the experts that the router names; `experts` then are virtual ones.
        guests: slots of each rank for foreign experts' weights.
        mixed: tokens of which some pair is computed away from home travel back unsummed.
    """

    ranks: int
    experts: int
    top_k: int
    vecs: int
    dtype: str
    exact: bool
    fp8: int = 0
    fault: int = 0
    real_experts: int = 0
    guests: int = 0
    mixed: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (
            ("experts", self.experts, MAX_EXPERTS),
            ("top-k", self.top_k, MAX_TOP_K),
            ("ranks", self.ranks, MAX_RANKS),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"exchange peer: {value} {name}; 1 to {most} are supported")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: counts per warp, later starts per rank."""
        return 4 * self.experts * max(WARPS, self.ranks)

    def macros(self) -> list[tuple[str, str]]:
        """The definitions that the sources expect."""
        values = {field.name.upper(): getattr(self, field.name) for field in fields(self)}
        values["DTYPE"] = ("float32", "bfloat16", "float16").index(self.dtype)
        return [(name, str(int(value))) for name, value in values.items()]


def require_cuda() -> None:
    """Check that the packages for GPUs are installed.

    Raises:
        ConfigError: they are not; says how to get them.
    """
    try:
        import cuda.bindings.driver
        import cuda.core  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"kernels for GPUs need cuda-core and cuda-bindings ({error}): pip install 'bywash[cuda]'"
        ) from error


def kernel_source(names: tuple[str, ...] = SOURCES) -> str:
    """Kernel sources as one text; by default all of the exchange's."""
    folder = files("bywash.kernels")
    return "\n".join(f'#line 1 "{name}"\n{(folder / name).read_text()}' for name in names)


def compile_kernels(shape: KernelShape, arch: str, *, cache: Path | None = None) -> bytes:
    """Machine code (a cubin) of all kernels of the exchange.

    Args:
        shape: the static shape.
        arch: such as `sm_90a`.
        cache: the directory to keep it in; by default `kernels` in `cache_directory()`.

    Raises:
        ConfigError: the packages are missing, or NVRTC refuses the architecture or the source.
    """
    return compile_source(kernel_source(), shape.macros(), arch, name="peer", what="exchange peer", cache=cache)


def compile_source(
    source: str, macros: list[tuple[str, str]], arch: str, *, name: str, what: str, cache: Path | None = None
) -> bytes:
    """Machine code (a cubin) of one text, from the cache if it is there.

    Args:
        source: CUDA C++ without headers.
        macros: definitions, in order.
        arch: such as `sm_90a`.
        name: how files in the cache begin.
        what: who asks; errors begin with it.
        cache: see `compile_kernels`.

    Raises:
        ConfigError: the packages are missing, or NVRTC refuses the architecture or the source.
    """
    require_cuda()
    key = hashlib.sha256(repr((source, arch, macros, compiler_version())).encode()).hexdigest()[:32]
    path = (cache or cache_directory() / "kernels") / f"{name}-{arch}-{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = _compile(source, macros, arch, what)
    _keep(path, code)
    return code


def _compile(source: str, macros: list[tuple[str, str]], arch: str, what: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", define_macro=macros)
    try:
        compiled: Any = Program(source, "c++", options).compile("cubin")
    except Exception as error:  # cuda-core has no common root for what NVRTC reports
        raise ConfigError(f"{what}: NVRTC could not compile the kernels for {arch}: {error}") from error
    return bytes(compiled.code)


def compiler_version() -> tuple[int, ...]:
    """Major and minor version of NVRTC.

    Raises:
        ConfigError: it is not installed.
    """
    from cuda.bindings import nvrtc

    try:
        return tuple(int(part) for part in nvrtc.nvrtcVersion()[1:])
    except Exception as error:  # cuda-pathfinder's own kind: the library is not there
        raise ConfigError(
            f"kernels for GPUs need the compiler NVRTC, which was not found ({type(error).__name__}): "
            "pip install 'bywash[cuda]', or nvidia-cuda-nvrtc"
        ) from error


def _keep(path: Path, code: bytes) -> None:
    """Write through a temporary file, since several ranks may compile at once. A cache that cannot be written is
    no error: the next process compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return
