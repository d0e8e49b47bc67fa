"""Sizes read from config.json: against the parameter counts of the models' cards; what wrong files are told."""

import json

import pytest

from bywash.errors import ConfigError
from bywash.planner.model import from_config, load_model_shape
from bywash.planner.model_presets import MODEL_PRESETS

CARDS = {
    "deepseek-v3": 671e9,
    "qwen3-235b": 235e9,
    "mixtral-8x7b": 46.7e9,
    "gpt-oss-120b": 116.8e9,
    "olmoe": 6.92e9,
    "kimi-k2": 1026e9,
}


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_those_of_the_card(name):
    assert load_model_shape(name).parameters == pytest.approx(CARDS[name], rel=0.002)


def test_deepseek_caches_one_latent_vector():
    model = load_model_shape("deepseek-v3")
    assert model.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert (model.moe_layers, model.dense_layers) == (58, 3)
    assert model.expert_bytes == pytest.approx(3 * 7168 * 2048, rel=1e-3)  # a byte a weight, and scales


def test_the_shipped_model_is_read_from_its_own_file():
    model = load_model_shape("bywash-tiny")
    assert (model.experts, model.top_k, model.moe_layers) == (32, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "model.hidden_size: must be given"),
        ({"hidden_size": "big"}, "model.hidden_size = 'big': must be a whole number"),
        ({"num_experts": 4}, "model.num_experts_per_tok = 8: there are only 4 experts"),
        ({"quantization_config": {"quant_method": "awq"}}, "model.quantization_config.quant_method = 'awq'"),
        ({"torch_dtype": "int8"}, "model.torch_dtype = 'int8'"),
        ({"mlp_only_layers": 3}, "model.mlp_only_layers = 3: must be a list"),
        ({"layer_types": 3}, "model.layer_types = 3: must be a list"),
        ({"mlp_only_layers": list(range(16)), "intermediate_size": 9}, "all of them are dense"),
    ],
)
def test_errors_name_the_field(change, message):
    with pytest.raises(ConfigError) as refused:
        from_config(MODEL_PRESETS["olmoe"] | change, "x")
    assert message in str(refused.value)


def test_files_that_are_no_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps([1]))
    for name, message in ((tmp_path, "must hold an object"), (tmp_path / "none", "no such file")):
        with pytest.raises(ConfigError) as refused:
            load_model_shape(str(name))
        assert message in str(refused.value)
