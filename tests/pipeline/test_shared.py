"""The shared expert of a decode step: torch's products against one row at a time in float32."""

import pytest
import torch
from torch.nn import functional as F

from bywash.moe.pipeline.shared_cuda import open_shared

ROOM, HIDDEN, INNER = 5, 24, 16


@pytest.mark.parametrize("more", [0, 3])
def test_products_in_one_piece_or_two_and_rows_past_the_part_are_left_alone(more):
    generator = torch.Generator().manual_seed(more)

    def draw(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    weights = [(draw(1, 2 * INNER, HIDDEN), draw(1, HIDDEN, INNER)) for _ in range(2)]
    rows, tokens = draw(ROOM + more, HIDDEN), torch.tensor([ROOM - 1], dtype=torch.int32)
    for expert, (gate_up, down) in zip(open_shared(weights, ROOM, one_part=True), weights, strict=True):
        whole, halves = torch.full_like(rows, 7), torch.full_like(rows, 7)
        expert(rows, tokens, whole, first=0, last=1)
        for half in (0, 1):
            expert(rows, tokens, halves, first=half, last=half)
        gate, up = (rows[:ROOM].float() @ gate_up[0].float().T).chunk(2, dim=1)
        expected = (F.silu(gate) * up) @ down[0].float().T
        torch.testing.assert_close(whole[:ROOM].float(), expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))
        assert torch.equal(whole, halves)
        assert (whole[ROOM:] == 7).all()
