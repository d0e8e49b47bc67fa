import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.kernels.experts_naive import dequantise_weights_naive, quantise_gate_up_naive, quantise_weights_naive
from bywash.moe import quantise_gate_up, quantise_weights


def same(ours, naive):
    assert torch.equal(ours.values.view(torch.uint8), naive.values.view(torch.uint8))
    assert torch.equal(ours.scales, naive.scales)
    assert ours.values.is_contiguous()
    assert ours.scales.is_contiguous()


@settings(max_examples=30, deadline=None)
@given(
    experts=st.integers(1, 3),
    n=st.sampled_from([1, 16, 127, 128, 129, 272]),
    d=st.sampled_from([1, 48, 128, 200]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 99),
)
def test_weights_equal_the_oracle_bit_for_bit(experts, n, d, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, n, d, generator=generator)
    weight *= 10.0 ** torch.randint(-6, 5, (experts, 1, d), generator=generator)
    weight[:, : n // 2, d // 3 :] = 0  # whole blocks of zeros where there are several
    weight = weight.to(dtype)
    same(quantise_weights(weight), quantise_weights_naive(weight))
    if n % 2 == 0:
        same(quantise_gate_up(weight), quantise_gate_up_naive(weight))


def test_a_transposed_weight_is_read_right():
    weight = torch.randn(2, 96, 160, generator=torch.Generator().manual_seed(3)).transpose(1, 2)
    same(quantise_weights(weight), quantise_weights_naive(weight.contiguous()))


@pytest.mark.parametrize("n", [128, 200])
def test_quantised_weights_are_close(n):
    weight = torch.randn(2, n, 256, generator=torch.Generator().manual_seed(5))
    error = (dequantise_weights_naive(quantise_weights(weight)) - weight).norm() / weight.norm()
    assert 0.01 < float(error) < 0.04  # e4m3 keeps 4 bits: relative steps of 1/8 to 1/16, evenly hit
