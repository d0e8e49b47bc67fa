"""Attention of a lane, on a KV cache of its own: what stands between one layer's experts and the next one's router.

Projections by torch's products, scores by torch's fused attention with grouped heads. Each sequence of a prefill goes
through products of its own, so their shape is one sequence whatever the lane holds, and a token has the same bits
however the sequences are dealt to lanes (cuBLAS picks its tiles, and may pick its order of sums, by the shape). A
decode step takes all sequences of a lane at once; its bits are those of that number of sequences. There the queries of
a key head stand as so many positions: for single queries cuDNN's kernel does not repeat its bits (H200, torch 2.11: 3
of 20 calls on one input gave those of the first), and schedules must give the same. Decode takes the flash kernel (213
us), not cuDNN's, which is faster (136 us) but makes the replay of a graph of 16 layers cost the host 43 us, not 16.

Keys and values are written by their product straight into the cache. There is no rotary embedding: it would be one
more pass over queries and keys, and moves no bytes between ranks.

Shapes: T tokens of a lane, N sequences in it, S tokens of each, C positions that the cache held before, D hidden,
Q = query heads x size, V = 2 x key heads x size.
Knows nothing of ranks or streams; runs on any device. `stack_cuda` calls it, `attention_naive` is the oracle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bywash.errors import ConfigError

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Of the fused attention, fastest first; the first that takes the shapes is used, in decode from the second on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Heads and sequences.

    Attributes:
        heads, kv_heads, head_size: queries' heads, a multiple of the keys' and values'; numbers of each.
        sequence: S, tokens of a sequence in one step; 1 in decode.
        cached: C; 0 in a prefill.
    """

    heads: int
    kv_heads: int
    head_size: int
    sequence: int
    cached: int = 0

    def __post_init__(self) -> None:
        if min(self.heads, self.kv_heads, self.head_size, self.sequence) < 1 or self.heads % self.kv_heads:
            raise ConfigError(f"attention: {self}: all at least 1, heads a multiple of kv_heads")
        if self.cached < 0 or (self.cached and self.sequence > 1):
            raise ConfigError(f"attention: {self}: a cache that holds something before the step needs sequence = 1")

    @property
    def q_size(self) -> int:
        """Q."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """V."""
        return 2 * self.kv_heads * self.head_size

    @property
    def context(self) -> int:
        """Positions that a token attends to, on average, rounded up."""
        return self.cached + (self.sequence + 2) // 2

    def weights(self, hidden: int) -> int:
        """Numbers in the matrices of one layer."""
        return hidden * (2 * self.q_size + self.kv_size)

    def sequences(self, tokens: int) -> int:
        """N.

        Raises:
            ConfigError: not whole sequences.
        """
        if tokens % self.sequence:
            raise ConfigError(f"attention: {tokens} tokens are not whole sequences of {self.sequence}")
        return tokens // self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """One layer's: queries [Q, D], keys and values [V, D], output [D, Q], all of one dtype."""

    q: Tensor
    kv: Tensor
    out: Tensor


class Attention:
    """One lane's; see the module. Fit for CUDA graphs: the cache and the queries' buffer are there from the start."""

    def __init__(
        self,
        sizes: AttentionSizes,
        weights: Sequence[AttentionWeights],
        tokens: int,
        *,
        scratch_q: Tensor | None = None,
    ) -> None:
        """Make room for the cache of every layer, zeros.

        Args:
            sizes: of heads and sequences.
            weights: by layer, not copied.
            tokens: T, whole sequences.
            scratch_q: room for the queries [at least T, Q] that lanes may share if they run in turn.

        Raises:
            ConfigError: not whole sequences.
        """
        self.sizes, self._weights, self._sequences = sizes, weights, sizes.sequences(tokens)
        like = weights[0].q
        with torch.inference_mode(False):  # outlives the model's inference mode
            length = sizes.cached + sizes.sequence
            self.cache_LNPV = like.new_zeros(len(weights), self._sequences, length, sizes.kv_size)
            self._q_TQ = like.new_empty(tokens, sizes.q_size) if scratch_q is None else scratch_q

    def __call__(self, layer: int, h_TD: Tensor, out_TD: Tensor) -> None:
        """Attend, and write the output projection (without the residual) to `out_TD`. Both [T, D], contiguous."""
        if self.sizes.sequence == 1:
            self._attend(layer, slice(0, self._sequences), h_TD, out_TD)
            return
        for number in range(self._sequences):
            rows = slice(number * self.sizes.sequence, (number + 1) * self.sizes.sequence)
            self._attend(layer, slice(number, number + 1), h_TD[rows], out_TD[rows])

    def _attend(self, layer: int, which: slice, h_TD: Tensor, out_TD: Tensor) -> None:
        """The sequences `which`, and their rows."""
        sizes, weights, tokens = self.sizes, self._weights[layer], h_TD.shape[0]
        cache_NPV = self.cache_LNPV[layer, which]
        number, positions, _ = cache_NPV.shape
        q_TQ = torch.mm(h_TD, weights.q.T, out=self._q_TQ[:tokens])
        if sizes.cached:
            cache_NPV[:, sizes.cached] = torch.mm(h_TD, weights.kv.T)
        else:
            torch.mm(h_TD, weights.kv.T, out=cache_NPV.view(tokens, sizes.kv_size))
        kv = cache_NPV.view(number, positions, 2, sizes.kv_heads, sizes.head_size)
        k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
        if sizes.cached:
            q = q_TQ.view(number, sizes.kv_heads, -1, sizes.head_size)
            mixed = _attention(q, k, v, BACKENDS[1:])
        else:
            q = q_TQ.view(number, sizes.sequence, sizes.heads, sizes.head_size).transpose(1, 2)
            mixed = _attention(q, k, v, BACKENDS, causal=True).transpose(1, 2)
        torch.mm(mixed.reshape(tokens, sizes.q_size), weights.out.T, out=out_TD)


def _attention(q: Tensor, k: Tensor, v: Tensor, backends: Sequence[SDPBackend], *, causal: bool = False) -> Tensor:
    with sdpa_kernel(list(backends), set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=causal)


def attention_naive(sizes: AttentionSizes, weights: AttentionWeights, h_ND: Tensor, cache_PV: Tensor) -> Tensor:
    """One sequence in float32, head by head: [S, D]. `cache_PV`: the C positions before, float32 [C, V]."""
    h, size = h_ND.float(), sizes.head_size
    q_SQ, kv_PV = h @ weights.q.float().T, torch.cat([cache_PV, h @ weights.kv.float().T])
    step, positions = h.shape[0], kv_PV.shape[0]
    allowed = (
        torch.arange(positions, device=h.device) <= torch.arange(step, device=h.device)[:, None] + positions - step
    )
    mixed = []
    for head in range(sizes.heads):
        shared = head * sizes.kv_heads // sizes.heads
        k = kv_PV[:, shared * size : (shared + 1) * size]
        v = kv_PV[:, (sizes.kv_heads + shared) * size : (sizes.kv_heads + shared + 1) * size]
        scores = q_SQ[:, head * size : (head + 1) * size] @ k.T * size**-0.5
        mixed.append(scores.masked_fill(~allowed, float("-inf")).softmax(1) @ v)
    return torch.cat(mixed, 1) @ weights.out.float().T
