"""Attention with a cache against one head at a time in float32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.moe.pipeline.attention_cuda import Attention, AttentionSizes, AttentionWeights, attention_naive

HIDDEN = 24


def draw(sizes, layers, generator):
    def matrix(*shape):
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    shapes = {"q": (sizes.q_size, HIDDEN), "kv": (sizes.kv_size, HIDDEN), "out": (HIDDEN, sizes.q_size)}
    return [AttentionWeights(**{name: matrix(*shape) for name, shape in shapes.items()}) for _ in range(layers)]


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    sequence=st.integers(1, 17),
    sequences=st.integers(1, 3),
    cached=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_like_one_head_at_a_time(kv_heads, groups, sequence, sequences, cached, seed):
    sequence = 1 if cached else sequence
    sizes = AttentionSizes(heads=kv_heads * groups, kv_heads=kv_heads, head_size=8, sequence=sequence, cached=cached)
    generator = torch.Generator().manual_seed(seed)
    weights = draw(sizes, 2, generator)
    attention = Attention(sizes, weights, sequences * sequence)
    attention.cache_LNPV.copy_(torch.randn(attention.cache_LNPV.shape, generator=generator))
    other, caches = attention.cache_LNPV[0].clone(), attention.cache_LNPV[1, :, :cached].clone()
    h = torch.randn(sequences * sequence, HIDDEN, generator=generator)
    out = torch.empty_like(h)
    attention(1, h, out)
    rows = h.view(sequences, sequence, HIDDEN)
    expected = torch.cat([attention_naive(sizes, weights[1], h_ND, kv) for h_ND, kv in zip(rows, caches)])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(attention.cache_LNPV[0], other)
    kv = (h @ weights[1].kv.T).view(sequences, sequence, -1)
    torch.testing.assert_close(attention.cache_LNPV[1, :, cached:], kv, rtol=1e-4, atol=1e-5)


def test_a_sequence_has_the_same_bits_in_any_lane():
    sizes = AttentionSizes(heads=4, kv_heads=2, head_size=8, sequence=13)
    weights = draw(sizes, 1, torch.Generator().manual_seed(1))
    h = torch.randn(4 * 13, HIDDEN, generator=torch.Generator().manual_seed(2))
    whole, parts = torch.empty_like(h), torch.empty_like(h)
    Attention(sizes, weights, 52)(0, h, whole)
    for lane in (slice(0, 13), slice(13, 52)):
        Attention(sizes, weights, lane.stop - lane.start)(0, h[lane], parts[lane])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"heads": 3}, "a multiple of kv_heads"), ({"cached": 4}, "needs sequence = 1"), ({"sequence": 0}, "at least 1")],
)
def test_sizes_that_do_not_fit_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        AttentionSizes(**({"heads": 4, "kv_heads": 2, "head_size": 8, "sequence": 13} | wrong))
