"""Device kernels in CUDA C++, compiled at first use with NVRTC: no nvcc and no CUDA toolkit is needed.

`compile_kernels` makes machine code for a static shape and an architecture, on any machine (CI compile-checks this way,
without a driver); `load_kernels` also loads it into the current device. Knows nothing of ranks or processes.
"""

from bywash.kernels.compile import KernelShape, compile_kernels, require_cuda
from bywash.kernels.launch import Kernels, load_kernels

__all__ = ["KernelShape", "Kernels", "compile_kernels", "load_kernels", "require_cuda"]
