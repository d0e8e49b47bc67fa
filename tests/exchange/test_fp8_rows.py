"""The quantiser in torch, against one that works element by element on Python floats."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.exchange.fp8_rows import dequantise_rows, quantise_rows

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FINITE = sorted({value for value in E4M3.tolist() if math.isfinite(value)})


def test_worked_example():
    x = torch.zeros(1, 130)
    x[0, 0], x[0, 1], x[0, 129] = 3, -448, 2.0**-130
    q, scales = quantise_rows(x, power_of_two=True)
    assert q.view(torch.uint8)[0, :3].tolist() == [0x44, 0xFE, 0]
    assert scales.tolist() == [[1.0, 2.0**-118]]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 3),
    columns=st.integers(1, 300),
    exponent=st.integers(-30, 30),
    power_of_two=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_value_is_the_nearest_that_its_group_can_say(rows, columns, exponent, power_of_two, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, columns, generator=generator) * 2.0**exponent).bfloat16()
    q, scales = quantise_rows(x, power_of_two=power_of_two)
    assert (q.shape, scales.shape) == (x.shape, (rows, -(-columns // 128)))
    back = dequantise_rows(q, scales)
    for row in range(rows):
        for group in range(scales.shape[1]):
            part = slice(128 * group, min(columns, 128 * group + 128))
            values, scale = x[row, part].float().tolist(), float(scales[row, group])
            amax = max(abs(value) for value in values)
            assert amax / 448 * (1 - 1e-6) <= scale <= max(amax / 448, 2.0**-119) * (2 if power_of_two else 1.000001)
            if power_of_two:
                assert math.frexp(scale)[0] == 0.5
            for value, got in zip(values, back[row, part].tolist(), strict=True):
                best = min(abs(value - scale * candidate) for candidate in FINITE)
                assert abs(value - got) <= best * (1 + 1e-5) + 1e-6 * abs(value)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_not_finite_stays_visible(power_of_two):
    x = torch.ones(1, 256)
    x[0, 3], x[0, 200] = torch.nan, -torch.inf
    q, scales = quantise_rows(x, power_of_two=power_of_two)
    assert q.view(torch.uint8)[0, 3] == q.view(torch.uint8)[0, 200] == 0x7F
    back = dequantise_rows(q, scales)
    assert back[0, :128].isnan().sum() == 1
    assert back[0, 128:].isnan().all()


def test_zeros_stay_zeros():
    q, scales = quantise_rows(torch.zeros(2, 128))
    assert not q.view(torch.uint8).any()
    assert (scales > 0).all()
