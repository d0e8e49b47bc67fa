import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.exchange import ordered_sum
from bywash.exchange.ordered_sum import OrderedSum
from bywash.exchange.rows import weighted_sum


@settings(max_examples=150, deadline=None)
@given(
    results=st.integers(0, 40),
    terms=st.integers(1, 9),
    hidden=st.integers(1, 33),
    block=st.integers(1, 50),
    missing=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 10**6),
)
def test_the_bits_are_those_of_weighted_sum(results, terms, hidden, block, missing, dtype, seed):
    """Whatever the block size and the gaps; rows are picked in any order."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(results * terms + 1, hidden, generator=generator).to(dtype)
    ids = torch.where(torch.rand(results, terms, generator=generator) < missing, -1, 0)
    weights = torch.rand(results, terms, generator=generator)
    weights[ids < 0] = float("nan")  # the weight of no expert is ignored
    at = torch.where(ids >= 0, torch.randint(rows.shape[0], ids.shape, generator=generator), -1)
    out = torch.full((results, hidden), float("nan"), dtype=dtype)
    add = OrderedSum(hidden, dtype, block=block)
    add(rows, at.numpy(), weights.numpy(), out)
    expected = weighted_sum(rows[at[ids >= 0]], ids, weights)
    assert torch.equal(out, expected)
    ones = torch.ones_like(weights)
    add(rows, at.numpy(), None, out)
    assert torch.equal(out, weighted_sum(rows[at[ids >= 0]], ids, ones))


def test_the_docstring_example():
    rows = torch.tensor([[1.0], [10.0], [100.0]])
    out = torch.empty(2, 1)
    OrderedSum(1, torch.float32)(rows, np.array([[2, -1], [0, 2]]), np.array([[1, 9], [2, 3]], dtype=np.float32), out)
    assert out.tolist() == [[100.0], [302.0]]


@pytest.mark.parametrize(("hidden", "rows"), [(2048, 128), (1, 262144), (10**7, 1)])
def test_a_block_is_a_fixed_size_in_bytes_and_never_empty(hidden, rows):
    assert ordered_sum.block_rows(hidden) == rows
