"""`ModelShape`: what of a model decides compute, memory and traffic, read from a Hugging Face `config.json`.

Knows nothing of weights, devices or transformers. Numbers are counts of weights unless named bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.planner.model_presets import MODEL_PRESETS

_EXPERT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "mxfp4": 0.5 + 1 / 32}
"""Bytes of a weight: fp8 with a float32 scale for each 128 x 128 block, mxfp4 with a byte for each 32."""
_DENSE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "mxfp4": 2.0}
_WIRE_DTYPES = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "mxfp4": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of one layer. `latent` (MLA) caches one vector per token for all heads, else keys and values per group.

    Attributes:
        weights: numbers in its matrices.
        cached: numbers that a token leaves in the cache.
        score_width: multiply-adds per (query, cached token) in decode: of scores and of values, over all heads.
        prefill_score_width: the same in prefill, where MLA multiplies out its latent vectors first.
        kv_heads: how many ways the cache can be split over ranks without copies; 1 for MLA.
        heads: how many ways the work can be split.
        window: positions that a token sees at most on average over layers; 0 for all.
    """

    weights: int
    cached: int
    score_width: int
    prefill_score_width: int
    kv_heads: int
    heads: int
    latent: bool
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        layers, dense_layers: all, and those of them without experts.
        hidden, intermediate: of the stream, and of one expert.
        dense_intermediate, shared_intermediate: of a dense layer and of the expert that every token visits; 0 for none.
        experts, top_k, groups, top_groups: E, K, and the router's limit on groups.
        attention: of each layer.
        vocab: rows of the embedding and of the output matrix.
        dtype: of expert weights: fp32, bf16, fp8 or mxfp4.
        note: where the sizes come from.
    """

    name: str
    layers: int
    dense_layers: int
    hidden: int
    intermediate: int
    dense_intermediate: int
    shared_intermediate: int
    experts: int
    top_k: int
    groups: int
    top_groups: int
    attention: Attention
    vocab: int
    dtype: str
    note: str

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def expert_weights(self) -> int:
        """Numbers of one expert: gate, up, down."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_bytes(self) -> int:
        """Of one expert as it lies in memory."""
        return round(self.expert_weights * _EXPERT_BYTES[self.dtype])

    @property
    def dense_item_bytes(self) -> float:
        """Bytes of a weight outside experts."""
        return _DENSE_BYTES[self.dtype]

    @property
    def shared_weights(self) -> int:
        """Numbers of one layer that every token visits besides attention: shared expert and router."""
        return 3 * self.hidden * self.shared_intermediate + self.hidden * self.experts

    @property
    def dense_bytes(self) -> int:
        """All weights outside routed experts; embedding and output matrix in bf16."""
        layers = self.layers * self.attention.weights + self.moe_layers * self.shared_weights
        layers += self.dense_layers * 3 * self.hidden * self.dense_intermediate
        return round(layers * self.dense_item_bytes + 2 * self.vocab * self.hidden * 2.0)

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache that one token takes over all layers, in bf16 (fp32 for a float32 model)."""
        return self.layers * self.attention.cached * self.item_bytes

    @property
    def item_bytes(self) -> int:
        """Of an element of the stream and the cache."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def dispatch_dtype(self) -> str:
        """In which rows are sent out."""
        return _WIRE_DTYPES[self.dtype]

    @property
    def combine_dtype(self) -> str:
        """In which rows come back."""
        return "fp32" if self.dtype == "fp32" else "bf16"

    @property
    def parameters(self) -> int:
        """All weights, embedding and output matrix included."""
        layers = self.layers * self.attention.weights + self.moe_layers * self.shared_weights
        layers += self.dense_layers * 3 * self.hidden * self.dense_intermediate
        return layers + self.moe_layers * self.experts * self.expert_weights + 2 * self.vocab * self.hidden


def load_model_shape(name: str) -> ModelShape:
    """A preset's name, the name of a model that ships with bywash, a `config.json`, or a directory that has one.

    Raises:
        ConfigError: none of these, or a field that is missing or wrong.
    """
    if name in MODEL_PRESETS:
        return from_config(MODEL_PRESETS[name], name, note=f"preset {name}")
    file = Path(name)
    if name == "bywash-tiny" and not file.exists():
        file = Path(__file__).parent.parent / "models" / "shipped" / name
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(
            f"--model {name}: no such file or directory, and no preset; known are {', '.join(MODEL_PRESETS)}"
        )
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--model {file}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--model {file}: must hold an object")
    return from_config(data, file.parent.name or "model", note=str(file.name))


def from_config(data: Mapping[str, Any], name: str, note: str = "") -> ModelShape:
    """Read the fields. Raises `ConfigError` with `model.` and the name of the field."""
    layers = _whole(data, "num_hidden_layers")
    hidden = _whole(data, "hidden_size")
    experts = _whole(data, "n_routed_experts", "num_experts", "num_local_experts")
    top_k = _whole(data, "num_experts_per_tok", "experts_per_token")
    if top_k > experts:
        raise ConfigError(f"model.num_experts_per_tok = {top_k}: there are only {experts} experts")
    dense = _dense_layers(data, layers)
    intermediate = _whole(data, "moe_intermediate_size", "intermediate_size")
    shared = _whole(data, "shared_expert_intermediate_size", least=0, default=0)
    shared = shared or _whole(data, "n_shared_experts", least=0, default=0) * intermediate
    groups = _whole(data, "n_group", default=1)
    return ModelShape(
        name=name,
        layers=layers,
        dense_layers=dense,
        hidden=hidden,
        intermediate=intermediate,
        dense_intermediate=_whole(data, "intermediate_size") if dense else 0,
        shared_intermediate=shared,
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=_whole(data, "topk_group", default=1) if groups > 1 else 1,
        attention=_attention(data, layers, hidden),
        vocab=_whole(data, "vocab_size"),
        dtype=_dtype(data),
        note=note,
    )


def _dense_layers(data: Mapping[str, Any], layers: int) -> int:
    only = _list(data, "mlp_only_layers")
    first = _whole(data, "first_k_dense_replace", least=0, default=0)
    step = _whole(data, "decoder_sparse_step", "moe_layer_freq", default=1)
    dense = sum(i < first or i in only or (i + 1) % step != 0 for i in range(layers))
    if dense >= layers:
        raise ConfigError(f"model.num_hidden_layers = {layers}: all of them are dense; there are no experts to place")
    return dense


def _attention(data: Mapping[str, Any], layers: int, hidden: int) -> Attention:
    heads = _whole(data, "num_attention_heads")
    if data.get("kv_lora_rank"):
        latent, rope = _whole(data, "kv_lora_rank"), _whole(data, "qk_rope_head_dim")
        nope, value = _whole(data, "qk_nope_head_dim"), _whole(data, "v_head_dim")
        query = _whole(data, "q_lora_rank", least=0, default=0)
        wide = heads * (nope + rope)
        weights = hidden * query + query * wide if query else hidden * wide
        weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return Attention(
            weights=weights,
            cached=latent + rope,
            score_width=heads * (2 * latent + rope),
            prefill_score_width=heads * (nope + rope + value),
            kv_heads=1,
            heads=heads,
            latent=True,
        )
    kv_heads = _whole(data, "num_key_value_heads", default=heads)
    width = _whole(data, "head_dim", default=max(1, hidden // heads))
    return Attention(
        weights=hidden * width * (2 * heads + 2 * kv_heads),
        cached=2 * kv_heads * width,
        score_width=2 * heads * width,
        prefill_score_width=2 * heads * width,
        kv_heads=kv_heads,
        heads=heads,
        latent=False,
        window=_window(data, layers),
    )


def _window(data: Mapping[str, Any], layers: int) -> int:
    """The sliding window if every layer has one; models that mix kinds are costed with full attention everywhere."""
    kinds = _list(data, "layer_types")
    if kinds and all(kind == "sliding_attention" for kind in kinds):
        return _whole(data, "sliding_window", default=0, least=0)
    return 0


def _dtype(data: Mapping[str, Any]) -> str:
    quantised = data.get("quantization_config")
    if isinstance(quantised, Mapping):
        method = str(quantised.get("quant_method", ""))
        if method in ("fp8", "mxfp4"):
            return method
        raise ConfigError(f"model.quantization_config.quant_method = {method!r}: must be fp8 or mxfp4")
    name = str(data.get("dtype") or data.get("torch_dtype") or "bfloat16")
    known = {"bfloat16": "bf16", "float16": "bf16", "float32": "fp32"}
    if name not in known:
        raise ConfigError(f"model.torch_dtype = {name!r}: must be one of {', '.join(known)}")
    return known[name]


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name)
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"model.{name} = {value!r}: must be a list")
    return value or []


def _whole(data: Mapping[str, Any], *names: str, least: int = 1, default: int | None = None) -> int:
    """The first of the fields that is there, as a whole number."""
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise ConfigError(f"model.{name} = {value!r}: must be a whole number, {least} or more")
        return value
    if default is None:
        raise ConfigError(f"model.{names[0]}: must be given")
    return default
