"""Residual and norm in one kernel: its own source compiled as C++ with one thread a block, and on a GPU."""

import ctypes
import re
import subprocess

import pytest
import torch

from bywash.errors import ConfigError
from bywash.kernels.add_norm import EPSILON, AddNorm, add_norm_naive, compile_add_norm
from bywash.kernels.compile import kernel_source
from tests.kernels import emulator

HIDDEN, ROWS = 72, 5
CASES = {"both, some rows": (True, True, True, 3), "one": (True, False, True, 9), "norm alone": (False, False, True, 0)}
CASES["no norm"] = (True, True, False, 5)
BEFORE = """
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__
#define __align__(n) alignas(n)
#define __launch_bounds__(n)
#define __shared__ static
#define __syncthreads()
struct Index { unsigned x; };
static Index blockIdx, threadIdx;
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned bits(float f) { unsigned u; memcpy(&u, &f, 4); return (u + 0x7fff + (u >> 16 & 1)) >> 16; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
"""
AFTER = """
extern "C" void run(int rows, u64 x, u64 a, u64 b, u64 tokens, u64 weight, u64 h, float epsilon) {
  for (int i = 0; i < rows; ++i) blockIdx.x = i, add_norm(x, a, b, tokens, weight, h, epsilon);
}
"""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    source = kernel_source(("add_norm.cu",)).replace("THREADS 256", "THREADS 1").replace("(THREADS / 32)", "1")
    source = re.sub(r'asm\("cvt.*?\);', "v.w[i] = bits(f[2 * i + 1]) << 16 | bits(f[2 * i]);", source)
    source = re.sub(r"value \+= __shfl.*?;|#line.*", "", source)
    folder = tmp_path_factory.mktemp("add_norm")
    (folder / "add_norm.cpp").write_text(BEFORE + source + AFTER)
    library = folder / "add_norm.so"
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-DHIDDEN={HIDDEN}"]
    subprocess.run([emulator.COMPILER, *flags, folder / "add_norm.cpp", "-o", library], check=True)
    run = ctypes.CDLL(str(library)).run

    def call(x, a, b, *, tokens, weight_D=None, h_TD=None):
        addresses = [ctypes.c_uint64(0 if t is None else t.data_ptr()) for t in (x, a, b, tokens, weight_D, h_TD)]
        run(len(x), *addresses, ctypes.c_float(EPSILON))

    return call


def compare(call, case, device, rows=ROWS, hidden=HIDDEN):
    has_a, has_b, has_h, count = case
    generator = torch.Generator().manual_seed(rows + count)
    x, a, b, h = (torch.randn(rows, hidden, generator=generator).bfloat16().to(device) for _ in range(4))
    weight, tokens = x[0].clone(), torch.tensor([count], dtype=torch.int32, device=device)
    before, real = h.clone(), [torch.cat([t[:count], torch.zeros_like(t[count:])]) for t in (a, b)]
    a[count:], b[count:] = float("nan"), float("nan")
    expected = add_norm_naive(x, real[0] if has_a else None, real[1] if has_b else None, weight_D=weight)
    norm = {"weight_D": weight, "h_TD": h} if has_h else {}
    call(x, a if has_a else None, b if has_b else None, tokens=tokens, **norm)
    assert torch.equal(x, expected[0])
    torch.testing.assert_close(h, expected[1] if has_h else before, rtol=1e-2, atol=1e-6)


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++ to compile the kernel for the CPU")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_the_cpu(on_cpu, case):
    compare(on_cpu, case, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("rows", "hidden"), [(5, 72), (300, 7168), (1, 2056)])
def test_on_a_gpu(case, rows, hidden):
    compare(AddNorm(hidden), case, "cuda", rows, hidden)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_compiles(arch, tmp_path):
    pytest.importorskip("cuda.core")
    assert compile_add_norm(7168, arch, cache=tmp_path)


@pytest.mark.parametrize("hidden", [0, 12])
def test_lengths_that_do_not_fit_are_refused(hidden):
    with pytest.raises(ConfigError, match="multiple of 8"):
        compile_add_norm(hidden, "sm_90a")
