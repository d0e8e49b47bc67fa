"""Models by name: the fields of a Hugging Face `config.json` that decide sizes, written out from the models' cards.

Each is read by `model.from_config` like a downloaded file. Weights' dtype is that of the published checkpoint.
"""

from typing import Any

_DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}

MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-v3": _DEEPSEEK
    | {
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "num_attention_heads": 128,
        "vocab_size": 129280,
    },
    "kimi-k2": _DEEPSEEK
    | {
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 64,
        "vocab_size": 163840,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "torch_dtype": "bfloat16",
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "intermediate_size": 2880,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "olmoe": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 50304,
        "torch_dtype": "bfloat16",
    },
}
