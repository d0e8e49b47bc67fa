"""What a synthetic stack of decoder layers is made of: its sizes, its random weights, and how its tokens are cut.

Shapes: D hidden, F intermediate, G = 2F, E experts, L experts of this rank.
Knows nothing of streams or exchanges. `stack_cuda` runs such a stack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.moe.pipeline.attention_cuda import AttentionSizes, AttentionWeights
from bywash.moe.pipeline.schedule import LayerForm, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSizes:
    """What the stack is made of.

    Attributes:
        layers, experts, top_k, hidden, inner: of the model.
        tokens: the most of one rank.
        attention: heads and sequences; None for a stack of experts alone.
        shared_inner: intermediate size of the expert that every token visits; 0 for none.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int
    attention: AttentionSizes | None = None
    shared_inner: int = 0

    @property
    def form(self) -> LayerForm:
        """Of every layer."""
        return LayerForm(attention=self.attention is not None, shared=self.shared_inner > 0)

    def lanes(self, split: Split) -> list[slice]:
        """Tokens of each lane, whole sequences. Example: 7 sequences in 3 lanes are 2, 2, 3.

        Raises:
            ConfigError: tokens that are not whole sequences, or fewer sequences than lanes.
        """
        step = self.attention.sequence if self.attention else 1
        count = self.attention.sequences(self.tokens) if self.attention else self.tokens
        if self.attention and count < split.lanes:
            raise ConfigError(f"stack: {count} sequences of {step} tokens for {split}: at least one for each")
        return [slice(step * lane.start, step * lane.stop) for lane in _cut(0, count, split.lanes)]

    def parts(self, split: Split) -> list[slice]:
        """Tokens of each chunk, lane by lane."""
        return [part for lane in self.lanes(split) for part in _cut(lane.start, lane.stop, split.chunks)]


def _cut(start: int, stop: int, count: int) -> list[slice]:
    size = stop - start
    return [slice(start + size * i // count, start + size * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    """One rank's weights, bfloat16, by layer; those of attention and shared expert are empty where the stack has none.

    Attributes:
        gate_up, down: of the experts here, [L, G, D] and [L, D, F].
        router: [E, D].
        norm: before the experts, [D].
        attention, attention_norm: matrices, and the norm before them, [D].
        shared_gate_up, shared_down: [1, G, D] and [1, D, F] of the shared expert.
    """

    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    router: Sequence[Tensor]
    norm: Sequence[Tensor]
    attention: Sequence[AttentionWeights] = ()
    attention_norm: Sequence[Tensor] = ()
    shared_gate_up: Sequence[Tensor] = ()
    shared_down: Sequence[Tensor] = ()


_DOWN_SCALE, _NORM_SPREAD = 0.35, 0.1
_DRAWN = ("router", "norm", "q", "kv", "out", "attention_norm", "up", "down")
"""What has a seed of its own in every layer."""


def random_weights(sizes: StackSizes, local_experts: int, rank: int, seed: int = 0) -> StackWeights:
    """Random weights; all but the experts' are equal on all ranks.

    Norms keep what enters experts and attention at one size; `down` is scaled so that a layer adds about 8 % of the
    norm that it starts from: much less would drown in the rounding of the residual.
    """
    d, f, layers, attention = sizes.hidden, sizes.inner, range(sizes.layers), sizes.attention

    def draw(shape: tuple[int, ...], layer: int, own_seed: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        generator = torch.Generator(device="cuda").manual_seed(1_000_003 * seed + 1009 * layer + own_seed)
        empty = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return empty.normal_(mean, scale, generator=generator)

    def matrix(name: str, layer: int, *shape: int, scale: float = 1.0) -> Tensor:
        return draw(shape, layer, 500 + 7 * _DRAWN.index(name), scale * shape[-1] ** -0.5)

    def norm(name: str, layer: int) -> Tensor:
        return draw((d,), layer, 500 + 7 * _DRAWN.index(name), _NORM_SPREAD, 1.0)

    def of_attention(layer: int, heads: AttentionSizes) -> AttentionWeights:
        return AttentionWeights(
            q=matrix("q", layer, heads.q_size, d),
            kv=matrix("kv", layer, heads.kv_size, d),
            out=matrix("out", layer, d, heads.q_size, scale=_DOWN_SCALE),
        )

    shared = layers if sizes.shared_inner else ()
    return StackWeights(
        gate_up=[draw((local_experts, 2 * f, d), i, 10 * rank + 1, d**-0.5) for i in layers],
        down=[draw((local_experts, d, f), i, 10 * rank + 2, _DOWN_SCALE * f**-0.5) for i in layers],
        router=[matrix("router", i, sizes.experts, d) for i in layers],
        norm=[norm("norm", i) for i in layers],
        attention=[of_attention(i, attention) for i in layers] if attention else (),
        attention_norm=[norm("attention_norm", i) for i in layers] if attention else (),
        shared_gate_up=[matrix("up", i, 1, 2 * sizes.shared_inner, d) for i in shared],
        shared_down=[matrix("down", i, 1, d, sizes.shared_inner, scale=_DOWN_SCALE) for i in shared],
    )
