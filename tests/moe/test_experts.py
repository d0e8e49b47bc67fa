import pytest
import torch
from torch.nn import functional as F

from bywash.errors import ConfigError
from bywash.moe import GatedExperts, run_experts
from bywash.moe.experts import ROW_TILE
from tests.moe.common import random_experts


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 48), (7, 5), (33, 17)])
def test_gated_experts_equal_plain_matrix_products(hidden, inner, bias):
    torch.manual_seed(0)
    gate_up, down = torch.randn(3, 2 * inner, hidden), torch.randn(3, hidden, inner)
    b1, b2 = (torch.randn(3, 2 * inner), torch.randn(3, hidden)) if bias else (None, None)
    experts = GatedExperts(gate_up_LGD=gate_up, down_LDF=down, apply_gate=swiglu, gate_up_bias_LG=b1, down_bias_LD=b2)
    x = torch.randn(5, hidden)
    for e in range(3):
        h = x @ gate_up[e].T + (b1[e] if bias else 0)
        expected = swiglu(h) @ down[e].T + (b2[e] if bias else 0)
        torch.testing.assert_close(experts.forward(e, x), expected, rtol=1e-5, atol=1e-4)


def clamped_glu(gate_up):
    """gpt-oss's activation: interleaved, and with a sigmoid, whose last bits depend on torch's vector width."""
    gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


@pytest.mark.parametrize("gate", [swiglu, clamped_glu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 48), (7, 5), (31, 3), (130, 66), (32, 47)])
def test_a_tiled_row_has_the_same_bits_wherever_it_stands(hidden, inner, dtype, gate):
    """What `exact` rests on: a row's result depends on neither its place, its neighbours nor its expert's slot."""
    one = random_experts(1, hidden, inner, dtype, seed=1, gate=gate)
    two = random_experts(3, hidden, inner, dtype, seed=1, gate=gate)
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(1, hidden, generator=generator).to(dtype)
    ids = torch.zeros(1, 1, dtype=torch.long)
    alone = run_experts(one, row, ids, torch.tensor([0]), row_tile=ROW_TILE)
    for n in (2, 3, ROW_TILE, ROW_TILE + 1, 3 * ROW_TILE - 1):
        for place in {0, n // 2, n - 1}:
            rows = torch.randn(n, hidden, generator=generator).to(dtype)
            rows[place] = row[0]
            y = run_experts(two, rows, torch.zeros(n, 1, dtype=torch.long), torch.tensor([0]), row_tile=ROW_TILE)
            assert torch.equal(y[place], alone[0]), (n, place)


def test_run_experts_returns_pairs_in_row_major_order():
    experts = random_experts(2, 8, 4, torch.float32, seed=0)
    rows = torch.randn(2, 8)
    ids = torch.tensor([[4, -1], [4, 7]])
    slots = torch.full((9,), -1)
    slots[4], slots[7] = 0, 1
    y = run_experts(experts, rows, ids, slots, row_tile=None)
    expected = [experts.forward(0, rows[:1]), experts.forward(0, rows[1:]), experts.forward(1, rows[1:])]
    torch.testing.assert_close(y, torch.cat(expected))


def test_rows_for_a_foreign_expert_are_refused():
    experts = random_experts(1, 8, 4, torch.float32, seed=0)
    with pytest.raises(ConfigError, match="rows for expert 3"):
        run_experts(experts, torch.randn(1, 8), torch.tensor([[3]]), torch.tensor([0, -1, -1, -1]), row_tile=None)


def test_no_rows_give_no_outputs():
    experts = random_experts(1, 8, 4, torch.float32, seed=0)
    y = run_experts(experts, torch.empty(0, 8), torch.empty(0, 2).long(), torch.tensor([0]), row_tile=ROW_TILE)
    assert y.shape == (0, 8)
