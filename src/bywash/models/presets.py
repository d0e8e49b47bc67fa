"""Models by name: the trained one that ships with bywash, and tiny random ones, one per family.

The random ones are written with `save_pretrained` into a cache directory on first use and then loaded like any
downloaded checkpoint; they run every code path of a family, and their text is noise.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bywash.cache import cache_directory
from bywash.errors import ConfigError

_COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Wide enough that logits of different tokens are far apart: greedy ids must not hang on the last bit.
    "initializer_range": 0.1,
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-moe-tiny": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    "mixtral-tiny": {
        "model_type": "mixtral",
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe-tiny": {
        "model_type": "olmoe",
        "intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    "deepseek-v3-tiny": {
        "model_type": "deepseek_v3",
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        # A multiple of 32: torch's sigmoid on CPU gives the tail of a tensor other last bits (see gates.py).
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "gpt-oss-tiny": {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "intermediate_size": 48,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

SHIPPED = {"bywash-tiny": Path(__file__).parent / "shipped" / "bywash-tiny"}

SEED = 20


def model_directory(name: str) -> Path:
    """The checkpoint directory of a shipped model, a preset, or a path; whether it is one is checked on reading."""
    if name in SHIPPED:
        return SHIPPED[name]
    return preset_directory(name) if name in PRESETS else Path(name).resolve()


def preset_directory(name: str) -> Path:
    """The checkpoint directory of a preset, made on first use (seeded, so everywhere the same).

    It lies in `cache_directory()`. Several processes may call at once.

    Raises:
        ConfigError: it cannot be written there.
    """
    spec = {**_COMMON, **PRESETS[name]}
    stamp = hashlib.sha256(json.dumps([spec, SEED], sort_keys=True).encode()).hexdigest()[:10]
    final = cache_directory() / f"{name}-{stamp}"
    if not (final / "config.json").exists():
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
        except OSError as error:
            raise ConfigError(
                f"--model {name}: cannot be made in {final.parent}: {error.strerror or error}; set BYWASH_CACHE to a "
                "directory that can be written"
            ) from error
        try:
            _make(spec, scratch)
            scratch.rename(final)
        except OSError:
            if not (final / "config.json").exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return final


def _make(spec: dict[str, Any], directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(directory)
