"""Tiny models with random weights, one per family, made on first use: enough to run every code path anywhere.

They are written with `save_pretrained` into a cache directory and then loaded like any downloaded checkpoint.
Their text is noise; the shipped trained model is the one to read.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

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
}

SEED = 20


def preset_directory(name: str) -> Path:
    """The checkpoint directory of a preset, made on first use (seeded, so everywhere the same).

    It lies in $BYWASH_CACHE, or $XDG_CACHE_HOME/bywash, or ~/.cache/bywash. Several processes may call at once.
    """
    spec = {**_COMMON, **PRESETS[name]}
    stamp = hashlib.sha256(json.dumps([spec, SEED], sort_keys=True).encode()).hexdigest()[:10]
    final = _cache() / f"{name}-{stamp}"
    if not (final / "config.json").exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=final.parent))
        try:
            _make(spec, scratch)
            scratch.rename(final)
        except OSError:
            if not (final / "config.json").exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return final


def _cache() -> Path:
    if "BYWASH_CACHE" in os.environ:
        return Path(os.environ["BYWASH_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bywash"


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
