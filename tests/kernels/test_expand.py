"""The kernels around a grouped product: compiled everywhere, run where there is a GPU."""

import pytest
import torch
from torch.nn import functional as F

from bywash.errors import ConfigError
from bywash.kernels.expand import Expand, compile_expand

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiles_without_a_gpu(arch, dtype):
    pytest.importorskip("cuda.core")
    assert compile_expand(dtype, arch).startswith(b"\x7fELF")


def test_other_rows_are_refused():
    with pytest.raises(ConfigError, match=r"torch\.float32; bfloat16 or float16"):
        compile_expand(torch.float32, "sm_90")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("hidden", "inner", "pairs", "room"), [(7168, 2048, 999, 1500), (16, 8, 1, 7), (264, 40, 0, 5)]
)
def test_equal_torch_up_to_the_last_pair_and_leave_the_rest(dtype, hidden, inner, pairs, room):
    torch.manual_seed(0)
    rows = torch.randn(77, hidden, device="cuda").to(dtype)
    index = torch.randint(77, (room,), device="cuda", dtype=torch.int32)
    count = torch.tensor([pairs], dtype=torch.int32, device="cuda")
    gate_up = torch.randn(room, 2 * inner, device="cuda").to(dtype)
    x, h = (
        torch.full((room, hidden), 7.0, device="cuda").to(dtype),
        torch.full((room, inner), 7.0, device="cuda").to(dtype),
    )
    expand = Expand(dtype)
    expand.gather_rows(rows, index, count, x)
    expand.multiply_gate(gate_up, count, h)
    assert torch.equal(x[:pairs], rows[index[:pairs].long()])
    gate, up = gate_up[:pairs].float().chunk(2, dim=1)
    torch.testing.assert_close(h[:pairs].float(), F.silu(gate) * up, rtol=1e-2, atol=1e-3)
    assert bool((x[pairs:] == 7).all())
    assert bool((h[pairs:] == 7).all())
