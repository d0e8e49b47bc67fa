"""Synthetic MoE decoder layers for `bywash bench layer` and the pipeline's tests: real stages, random weights.

Shapes: B sequences of a batch, S positions, D hidden, H heads, T = B * S tokens, E experts, K experts per token.
Every batch has the same [B, S], so that its dense products have the same bits in whatever lane it runs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from bywash.balance import Placement
from bywash.exchange import Exchange
from bywash.moe import ExpertParallel, GatedExperts
from bywash.moe.pipeline import LayerForm
from bywash.routing import Gate, Routing, route


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """Sizes of the stack, and of one rank's batches.

    Attributes:
        layers, hidden, intermediate, experts, top_k, heads: of the model; `hidden` is a multiple of `heads`.
        sequence: positions of a sequence; a batch is one sequence.
        shared: whether every token also visits a shared expert.
        seed: of all weights.
    """

    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    sequence: int
    shared: bool = False
    seed: int = 0


@dataclass(slots=True)
class Batch:
    """One sequence on its way through the layers."""

    hidden_BSD: Tensor


class SyntheticLayer:
    """Norm, causal attention, norm, router and, if asked for, a shared expert; see `LayerStages`."""

    def __init__(self, shape: StackShape, index: int) -> None:
        generator = torch.Generator().manual_seed(shape.seed * 1_000_003 + index)
        hidden, inner = shape.hidden, shape.intermediate

        def weights(rows: int, columns: int) -> Tensor:
            drawn: Tensor = torch.randn(rows, columns, generator=generator)
            return drawn / math.sqrt(columns)

        self.form = LayerForm(shared=shape.shared)
        self._shape = shape
        self._qkv, self._out = weights(3 * hidden, hidden), weights(hidden, hidden)
        self._router = weights(shape.experts, hidden)
        self._gate = Gate(kind="softmax", top_k=shape.top_k)
        self._shared = (weights(2 * inner, hidden), weights(hidden, inner)) if shape.shared else None

    def attention(self, batch: Batch) -> None:
        """Causal self-attention over the batch's own positions."""
        x_BSD = batch.hidden_BSD
        size = (x_BSD.shape[0], x_BSD.shape[1], self._shape.heads, -1)
        q, k, v = (part.view(size).transpose(1, 2) for part in F.linear(_normed(x_BSD), self._qkv).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x_BSD.shape)
        batch.hidden_BSD = x_BSD + F.linear(mixed, self._out)

    def route(self, batch: Batch) -> tuple[Tensor, Routing]:
        """Norm and router."""
        x_TD = _normed(batch.hidden_BSD).flatten(0, 1)
        return x_TD, route(self._gate, F.linear(x_TD, self._router))

    def shared_expert(self, batch: Batch) -> Tensor | None:
        """A gated MLP on every token."""
        return None if self._shared is None else self.shared_down(batch, self.shared_up(batch))

    def shared_up(self, batch: Batch) -> Tensor:
        """The first half of the gated MLP."""
        assert self._shared is not None
        return _silu_gate(F.linear(_normed(batch.hidden_BSD), self._shared[0]))

    def shared_down(self, batch: Batch, inner: Tensor) -> Tensor:
        """The second half."""
        assert self._shared is not None
        return F.linear(inner, self._shared[1])

    def finish(self, batch: Batch, routed_TD: Tensor, shared: Tensor | None) -> None:
        """Residual."""
        moe = routed_TD.view(batch.hidden_BSD.shape)
        batch.hidden_BSD = batch.hidden_BSD + (moe if shared is None else moe + shared)


class Stack:
    """This rank's share of the stack.

    Attributes:
        layers: with the dense weights, equal on all ranks.
        forms: which stages they have.
    """

    def __init__(self, shape: StackShape, placement: Placement, rank: int) -> None:
        self.shape, self._placement = shape, placement
        self.layers = [SyntheticLayer(shape, index) for index in range(shape.layers)]
        self.forms = [layer.form for layer in self.layers]
        mine = placement.experts_of(rank)
        self._experts = [_experts(shape, index, mine) for index in range(shape.layers)]

    def on(self, exchange: Exchange) -> dict[int, ExpertParallel]:
        """Layer index to its experts, over `exchange`."""
        return {
            index: ExpertParallel(exchange=exchange, placement=self._placement, experts=experts)
            for index, experts in enumerate(self._experts)
        }

    def nothing(self, layer: int) -> tuple[Tensor, Routing]:
        """What a lane without batches brings to an exchange."""
        ids = torch.empty(0, self.shape.top_k, dtype=torch.long)
        routing = Routing(ids_TK=ids, weights_TK=torch.empty(ids.shape), num_experts=self.shape.experts)
        return torch.empty(0, self.shape.hidden), routing


def make_batches(shape: StackShape, count: int, rank: int, step: int = 0) -> list[Batch]:
    """`count` random sequences; each (rank, step) has its own."""
    generator = torch.Generator().manual_seed((shape.seed + 1) * 1_000_003 + 1000 * step + rank)
    return [Batch(torch.randn(1, shape.sequence, shape.hidden, generator=generator)) for _ in range(count)]


def split_batches(batches: Sequence[Batch], lanes: int) -> list[list[Batch]]:
    """Consecutive batches, as equal as can be; lanes beyond the number of batches get none."""
    ends = [len(batches) * lane // lanes for lane in range(lanes + 1)]
    return [list(batches[a:b]) for a, b in pairwise(ends)]


def _experts(shape: StackShape, layer: int, chosen: Sequence[int]) -> GatedExperts:
    """The chosen experts of a layer; expert e is the same on whatever rank it lives."""
    gate_up, down = [], []
    for expert in chosen:
        generator = torch.Generator().manual_seed((shape.seed * 1009 + layer) * 10_007 + expert + 1)
        gate_up.append(torch.randn(2 * shape.intermediate, shape.hidden, generator=generator) * shape.hidden**-0.5)
        down.append(torch.randn(shape.hidden, shape.intermediate, generator=generator) * shape.intermediate**-0.5)
    empty_up, empty_down = torch.empty(0, 2 * shape.intermediate, shape.hidden), torch.empty(0, shape.hidden, 1)
    return GatedExperts(
        gate_up_LGD=torch.stack(gate_up) if gate_up else empty_up,
        down_LDF=torch.stack(down) if down else empty_down,
        apply_gate=_silu_gate,
    )


def _silu_gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])
