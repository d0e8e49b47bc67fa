"""The shared expert of every layer of a GPU stack: one expert for every row of a part, in one piece or in two.

In prefill it is computed by the routed experts' kernel, as one expert, so that a row has the same bits whatever part it
is in. A decode step is one part, so its shape never changes, and torch's products repeat their bits; they are also what
is fast there: with one expert the kernel has work for 16 to 28 of an H200's 132 multiprocessors, and took 111 us for
weights that take 21 to read.

Shapes: T rows of a part, D hidden, F intermediate, G = 2F (first F rows gate, next F up).
Knows nothing of parts or exchanges. `stack_cuda` calls it.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.moe.device_experts import open_device_experts


class SharedExpert(Protocol):
    """Of one layer; `rows_TD` has room for the largest part, the first `tokens` (int32 [1], on the device) are real."""

    def __call__(self, rows_TD: Tensor, tokens: Tensor, out_TD: Tensor, *, first: int, last: int) -> None:
        """Launch products `first` to `last`: 0 makes the intermediate, 1 the outputs from it."""


def row_independent_backend() -> Literal["hopper", "triton"]:
    """The experts' backend on this device that gives a row the same bits whatever rows stand beside it."""
    return "hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton"


def open_shared(weights: Sequence[tuple[Tensor, Tensor]], room: int, *, one_part: bool) -> list[SharedExpert]:
    """Of every layer.

    Args:
        weights: gate_up [1, G, D] and down [1, D, F] of each layer, of at least one, bfloat16; not copied.
        room: the most rows of a part.
        one_part: every step is one part of that many rows, some of which may not be real: decode.
    """
    if one_part:
        with torch.inference_mode(False):  # outlives the model's inference mode
            scratch_TF = weights[0][1].new_empty(room, weights[0][1].shape[2])
        return [_Products(gate_up[0], down[0], scratch_TF) for gate_up, down in weights]
    with torch.inference_mode(False):
        all_T = torch.arange(room, dtype=torch.int32, device="cuda")
    opened = [open_device_experts(*pair, pairs=room, backend=row_independent_backend()) for pair in weights]
    return [_AsExpert(cast(_StagedExperts, one), all_T) for one in opened]  # both backends are staged


class _StagedExperts(Protocol):
    """Device experts whose products can be launched apart."""

    def __call__(
        self, rows_PD: Tensor, index_M: Tensor, ends_L: Tensor, out_MD: Tensor, *, first: int, last: int
    ) -> Tensor:
        """See `HopperExperts`."""


class _AsExpert:
    """By the routed experts' kernel."""

    def __init__(self, expert: _StagedExperts, all_T: Tensor) -> None:
        self._expert, self._all_T = expert, all_T

    def __call__(self, rows_TD: Tensor, tokens: Tensor, out_TD: Tensor, *, first: int, last: int) -> None:
        self._expert(rows_TD, self._all_T, tokens, out_TD, first=first, last=last)


class _Products:
    """By torch's products, over all rows of the part; layers share the intermediate, since they run in turn."""

    def __init__(self, gate_up_GD: Tensor, down_DF: Tensor, scratch_TF: Tensor) -> None:
        self._gate_up_GD, self._down_DF, self._inner_TF = gate_up_GD, down_DF, scratch_TF

    def __call__(self, rows_TD: Tensor, tokens: Tensor, out_TD: Tensor, *, first: int, last: int) -> None:
        room = self._inner_TF.shape[0]  # an exchange may have been opened for more
        if first == 0:
            gate_TF, up_TF = F.linear(rows_TD[:room], self._gate_up_GD).chunk(2, dim=1)
            torch.mul(F.silu(gate_TF), up_TF, out=self._inner_TF)
        if last == 1:
            torch.mm(self._inner_TF, self._down_DF.T, out=out_TD[:room])
