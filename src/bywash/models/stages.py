"""A transformers MoE model cut into stages, so that our own loop decides what runs when.

Stages of a decoder layer: attention, route, (experts: `ExpertParallel`), shared expert, finish; a dense layer has
attention and dense. `moe.pipeline` schedules them. A `MicroBatch` carries one batch of prompts from stage to stage,
with its own KV cache.

Shapes: B prompts of a micro-batch, S positions of this step, C cached positions so far, D hidden, V vocabulary,
T real tokens (positions that are neither padding nor filler).
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from bywash.errors import RoutingError
from bywash.models.families import Family, family_of
from bywash.moe.pipeline import LayerForm
from bywash.routing import Routing


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One batch of prompts on its way through the layers.

    Every step of every micro-batch has the same [B, S] at any number of ranks, which keeps the dense products
    bitwise the same; padding and filler rows take part in them, but are never routed to an expert.

    Attributes:
        prompts: index of each row's prompt in the job; -1 marks a filler row.
        ids_BS: int64, the tokens of this step.
        keep_BC: bool, which cached positions hold a token (False for left padding), this step included.
        real_BS: bool, which tokens of this step are routed and reported.
        cache: KV cache of this micro-batch alone.
        hidden_BSD: the residual stream.
    """

    prompts: list[int]
    ids_BS: Tensor
    keep_BC: Tensor
    real_BS: Tensor
    cache: Any = field(default_factory=DynamicCache)
    hidden_BSD: Tensor = field(default_factory=lambda: torch.empty(0))
    position_BS: Tensor = field(default_factory=lambda: torch.empty(0))
    rope: Any = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    _rows: tuple[Tensor, Tensor] | None = None

    @property
    def real_rows(self) -> Tensor:
        """int64 [T], flat positions of the real tokens among B * S; found once a step, since a GPU is waited for."""
        if self._rows is None or self._rows[0] is not self.real_BS:
            self._rows = self.real_BS, self.real_BS.reshape(-1).nonzero().squeeze(1)
        return self._rows[1]


class DecoderLayer:
    """One decoder layer as stages. All of them read and write the micro-batch's residual stream.

    Attributes:
        index, is_moe, form: which layer, whether it has experts, and its stages.
        check_router: whether `route` also asks the model's own router.
        router_mismatches: tokens for which that one differed; None if it was never asked.
    """

    def __init__(self, layer: Any, family: Family, config: Any, index: int) -> None:
        self._layer, self._family, self.index = layer, family, index
        self.is_moe = hasattr(layer.mlp, "experts")
        self._gate = family.gate(config) if self.is_moe else None
        # A layer's own window where the family sets one per layer; Mixtral leaves it in the config.
        self._window = getattr(layer.self_attn, "sliding_window", getattr(config, "sliding_window", None))
        accepted = inspect.signature(layer.self_attn.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self.form = LayerForm(moe=self.is_moe, shared=getattr(layer.mlp, "shared_experts", None) is not None)
        self._inner = int(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)
        self.check_router = False
        self.router_mismatches: int | None = None

    @property
    def experts_module(self) -> Any:
        """The transformers module that holds this rank's expert weights."""
        return self._layer.mlp.experts

    def shape(self) -> dict[str, int]:
        """Sizes of a MoE layer: bytes of a number, intermediate sizes, numbers in the attention's weights."""
        down, shared = self.experts_module.down_proj, getattr(self._layer.mlp, "shared_experts", None)
        return {
            "item_bytes": down.element_size(),
            "intermediate": self._inner,
            "shared_intermediate": 0 if shared is None else shared.down_proj.weight.shape[1],
            "attention_weights": sum(weight.numel() for weight in self._layer.self_attn.parameters()),
        }

    def attention(self, batch: MicroBatch) -> None:
        """Norm, self-attention over the micro-batch's cache, residual."""
        normed = self._layer.input_layernorm(batch.hidden_BSD)
        out, _ = self._layer.self_attn(
            hidden_states=normed,
            position_embeddings=batch.rope,
            attention_mask=_causal_mask(batch, self._window),
            position_ids=batch.position_BS,
            **{self._cache_name: batch.cache},
        )
        batch.hidden_BSD = batch.hidden_BSD + out

    def route(self, batch: MicroBatch) -> tuple[Tensor, Routing]:
        """Norm and router: ([T, D] of the real tokens, their routing).

        The router runs on all B * S rows, so that its product has one shape; only real tokens are returned.

        Raises:
            RoutingError: the router gave NaN.
        """
        assert self._gate is not None
        normed = self._normed(batch)
        try:
            routing = self._family.route(self._layer.mlp, normed, self._gate)
        except RoutingError as error:
            raise RoutingError(f"layer {self.index}: {error}") from None
        real = batch.real_rows
        if self.check_router:
            self._compare_routers(normed, routing, real)
        real_routing = Routing(
            ids_TK=routing.ids_TK[real], weights_TK=routing.weights_TK[real], num_experts=routing.num_experts
        )
        return normed[real], real_routing

    def shared_expert(self, batch: MicroBatch) -> Tensor | None:
        """[B, S, D] of the expert that every token visits, or None where the family has none."""
        shared = getattr(self._layer.mlp, "shared_experts", None)
        return None if shared is None else shared(self._layer.post_attention_layernorm(batch.hidden_BSD))

    def shared_up(self, batch: MicroBatch) -> Tensor:
        """[B, S, F]: the first half of the shared expert."""
        shared = self._layer.mlp.shared_experts
        normed = self._layer.post_attention_layernorm(batch.hidden_BSD)
        gated: Tensor = shared.act_fn(shared.gate_proj(normed)) * shared.up_proj(normed)
        return gated

    def shared_down(self, batch: MicroBatch, inner_BSF: Tensor) -> Tensor:
        """[B, S, D]: the second half."""
        down: Tensor = self._layer.mlp.shared_experts.down_proj(inner_BSF)
        return down

    def finish(self, batch: MicroBatch, routed_TD: Tensor, shared_BSD: Tensor | None) -> None:
        """Add what the experts gave to the residual stream."""
        moe = torch.zeros_like(batch.hidden_BSD)
        moe.view(-1, moe.shape[-1])[batch.real_rows] = routed_TD
        batch.hidden_BSD = batch.hidden_BSD + (moe if shared_BSD is None else moe + shared_BSD)

    def dense(self, batch: MicroBatch) -> None:
        """The MLP of a layer without experts, with norm and residual."""
        batch.hidden_BSD = batch.hidden_BSD + self._layer.mlp(self._layer.post_attention_layernorm(batch.hidden_BSD))

    def _normed(self, batch: MicroBatch) -> Tensor:
        normed: Tensor = self._layer.post_attention_layernorm(batch.hidden_BSD)
        return normed.reshape(-1, normed.shape[-1])

    def _compare_routers(self, normed: Tensor, routing: Routing, real: Tensor) -> None:
        ids, weights = self._family.own_routing(self._layer.mlp, normed)
        differs = (ids != routing.ids_TK) | (weights.float() != routing.weights_TK)
        self.router_mismatches = (self.router_mismatches or 0) + int(differs[real].any(dim=1).sum())


class LanguageModel:
    """A transformers causal LM as embed, layers, head.

    Attributes:
        layers: the decoder layers, in order.
        num_experts, top_k: of its MoE layers.
        vocab: V.
        device: where its weights are.
    """

    def __init__(self, model: Any, where: str) -> None:
        self._model = model
        self.device: torch.device = model.device
        config = model.config
        family = family_of(config, where)
        self.layers = [DecoderLayer(la, family, config, i) for i, la in enumerate(model.model.layers)]
        self.num_experts = family.num_experts(config)
        self.top_k = family.gate(config).top_k
        self.hidden = int(config.hidden_size)
        self.vocab = int(config.vocab_size)

    @property
    def moe_layers(self) -> list[DecoderLayer]:
        """Those layers that have experts."""
        return [layer for layer in self.layers if layer.is_moe]

    def check_routers(self, check: bool) -> None:
        """Whether every layer's `route` also asks the model's own router and counts tokens for which it differs."""
        for layer in self.moe_layers:
            layer.check_router = check

    def layer_shape(self) -> dict[str, int]:
        """Sizes of the first MoE layer, under the names of `moe.pipeline.cost.Load`."""
        return self.moe_layers[0].shape()

    def nothing(self, layer: int) -> tuple[Tensor, Routing]:
        """What a rank or lane without prompts brings to the exchange of a layer: no rows, in the layer's dtype."""
        rows = self.layers[layer].experts_module.down_proj.new_empty(0, self.hidden)
        ids, weights = rows.new_empty(0, self.top_k, dtype=torch.long), rows.new_empty(0, self.top_k).float()
        return rows, Routing(ids_TK=ids, weights_TK=weights, num_experts=self.num_experts)

    def embed(self, batch: MicroBatch) -> None:
        """Token embeddings and rotary positions of this step; position 0 is a prompt's first real token."""
        model = self._model.model
        batch.hidden_BSD = model.embed_tokens(batch.ids_BS)
        positions_BC = (batch.keep_BC.long().cumsum(1) - 1).clamp(min=0)
        batch.position_BS = positions_BC[:, -batch.ids_BS.shape[1] :]
        batch.rope = model.rotary_emb(batch.hidden_BSD, position_ids=batch.position_BS)
        batch.masks.clear()

    def head(self, batch: MicroBatch, *, last_only: bool) -> Tensor:
        """Logits [B, S, V], or [B, 1, V] of the last position: a long prefill's logits may not fit into memory."""
        hidden = batch.hidden_BSD[:, -1:] if last_only else batch.hidden_BSD
        logits: Tensor = self._model.lm_head(self._model.model.norm(hidden))
        return logits


def _causal_mask(batch: MicroBatch, window: int | None) -> Tensor:
    """Additive mask [B, 1, S, C]: 0 where a query may look, the dtype's lowest value elsewhere.

    A row with nothing to look at (left padding) gets a uniform softmax, so it stays finite; nobody reads it.
    """
    if window not in batch.masks:
        seq, cached = batch.ids_BS.shape[1], batch.keep_BC.shape[1]
        query = torch.arange(cached - seq, cached, device=batch.keep_BC.device)[:, None]
        key = torch.arange(cached, device=batch.keep_BC.device)[None, :]
        visible = key <= query
        if window is not None:
            visible &= key > query - window
        allowed = visible[None, None] & batch.keep_BC[:, None, None, :]
        dtype = batch.hidden_BSD.dtype
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        batch.masks[window] = mask.masked_fill_(~allowed, torch.finfo(dtype).min)
    return batch.masks[window]
