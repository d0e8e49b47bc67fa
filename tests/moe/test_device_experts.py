"""Device backends as far as a CPU can run them: `grouped_mm` computes there too, the choice and the errors are pure."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.exchange.peer_layout import PeerLayout
from bywash.kernels.experts_naive import experts_naive
from bywash.models.loader import is_swiglu
from bywash.moe import GatedExperts, run_experts
from bywash.moe.device_experts import GroupedMmExperts, GrowingExperts, open_device_experts
from bywash.moe.device_layer import DeviceLayer, pairs_capacity
from tests.moe.common import swiglu
from tests.moe.test_experts import clamped_glu


def weights(local, hidden, inner, seed=0):
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(local, 2 * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(local, hidden, inner, generator=generator) * inner**-0.5
    return gate_up.bfloat16(), down.bfloat16()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    hidden=st.sampled_from([16, 48]),
    inner=st.sampled_from([16, 32]),
    spare=st.integers(0, 7),
    seed=st.integers(0, 99),
)
def test_grouped_mm_equals_the_oracle_for_any_counts(sizes, hidden, inner, spare, seed):
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = weights(len(sizes), hidden, inner, seed)
    pairs = sum(sizes)
    rows = torch.randn(11, hidden, generator=generator).bfloat16()
    index = torch.randint(11, (pairs + spare,), generator=generator, dtype=torch.int32)
    ends = torch.tensor(sizes).cumsum(0).int()
    y = GroupedMmExperts(gate_up, down, pairs=pairs + spare + 3)(rows, index, ends)
    expected = experts_naive(rows, index, ends, gate_up, down, round_to=torch.bfloat16)
    assert y.shape == (pairs + spare, hidden)
    torch.testing.assert_close(y[:pairs].float(), expected, rtol=3e-2, atol=3e-2)


@settings(max_examples=25, deadline=None)
@given(pairs=st.sampled_from([0, 1, 7, 256, 257, 700]), seed=st.integers(0, 99))
def test_pairs_in_any_order_equal_one_expert_at_a_time(pairs, seed):
    generator = torch.Generator().manual_seed(seed)
    gate_up, down = weights(4, 32, 16, seed)
    rows, top_k = torch.randn(pairs, 32, generator=generator).bfloat16(), 2
    ids = torch.rand(pairs, 4, generator=generator).argsort(dim=1)[:, :top_k] + 3
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    slot_of_E = torch.tensor([-1, -1, -1, 0, 1, 2, 3])
    plain = GatedExperts(gate_up_LGD=gate_up, down_LDF=down, apply_gate=swiglu, swiglu=True)
    grouped = GrowingExperts(*plain.swiglu_weights, backend="grouped_mm")
    expected = run_experts(plain, rows, ids, slot_of_E, row_tile=None)
    for _ in range(2):  # the second time there is room already
        y = run_experts(plain, rows, ids, slot_of_E, row_tile=None, grouped=grouped)
        torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


def test_only_a_plain_swiglu_goes_to_device_kernels():
    gate_up, down = weights(2, 16, 16)
    bias = torch.zeros(2, 32)
    plain = GatedExperts(gate_up_LGD=gate_up, down_LDF=down, apply_gate=swiglu, swiglu=True)
    biased = GatedExperts(gate_up_LGD=gate_up, down_LDF=down, apply_gate=swiglu, gate_up_bias_LG=bias, swiglu=True)
    other = GatedExperts(gate_up_LGD=gate_up, down_LDF=down, apply_gate=clamped_glu)
    assert plain.swiglu_weights is not None
    assert biased.swiglu_weights is None
    assert other.swiglu_weights is None


def test_swiglu_is_known_by_what_it_does():
    def geglu(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate) * up

    def swapped(gate_up):
        up, gate = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    assert is_swiglu(swiglu)
    assert not any(is_swiglu(other) for other in (geglu, swapped, clamped_glu))


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype", "backend", "message"),
    [
        (24, 16, torch.bfloat16, "grouped_mm", "hidden 24 and intermediate 16 must be multiples of 16"),
        (16, 16, torch.float32, "grouped_mm", "grouped_mm computes bfloat16, not torch.float32"),
        (16, 16, torch.float16, "hopper", "hopper computes bfloat16"),
        (16, 16, torch.bfloat16, "cublas", "backend 'cublas': choose one of auto, hopper"),
        (16, 16, torch.float32, "auto", "nothing computes them"),
    ],
)
def test_what_no_backend_computes_is_refused(hidden, inner, dtype, backend, message):
    gate_up, down = (w.to(dtype) for w in weights(1, hidden, inner))
    with pytest.raises(ConfigError, match=message):
        open_device_experts(gate_up, down, pairs=8, backend=backend)


def test_capacity_counts_every_token_to_every_expert_here_or_top_k():
    layout = PeerLayout(ranks=2, experts=256, top_k=8, tokens=4096, hidden=16, dtype=torch.bfloat16, exact=False)
    assert pairs_capacity(layout, 128) == 65_536
    assert pairs_capacity(layout, 3) == 24_576


def test_rows_as_they_are_and_e4m3_experts_do_not_mix():
    layout = PeerLayout(ranks=2, experts=4, top_k=2, tokens=8, hidden=16, dtype=torch.bfloat16, exact=False, fp8="amax")
    experts = GroupedMmExperts(*weights(2, 16, 16), pairs=32)
    with pytest.raises(ConfigError, match="opened with fp8='amax', and the experts are GroupedMmExperts"):
        DeviceLayer(SimpleNamespace(layout=layout), experts, local_experts=2)
