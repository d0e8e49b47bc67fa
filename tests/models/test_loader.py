"""Loading: each rank reads only its experts, and a broken checkpoint is named, file and all."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bywash.errors import CheckpointError
from bywash.models.loader import load_model, read_config
from bywash.models.presets import preset_directory


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the Qwen3-MoE preset that a test may break."""
    return shutil.copytree(preset_directory("qwen3-moe-tiny"), tmp_path / "model")


@pytest.mark.parametrize("mine", [[0, 1, 2, 3], [5], [2, 11, 15], []])
def test_a_rank_holds_and_reads_only_its_experts(checkpoint, mine):
    model, read = load_model(checkpoint, mine, torch.float32)
    whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    weights, expected = dict(model.named_parameters()), dict(whole.named_parameters())
    assert weights.keys() == expected.keys()
    dense = 0
    for name, weight in expected.items():
        if ".experts." in name:
            assert torch.equal(weights[name], weight[mine])
        else:
            assert torch.equal(weights[name], weight)
            dense += weight.numel() * 4
    one_expert = sum(w[0].numel() * 4 for n, w in expected.items() if ".experts." in n)
    assert read == dense + len(mine) * one_expert


def test_sharded_checkpoints_load(checkpoint, tmp_path):
    whole = AutoModelForCausalLM.from_pretrained(checkpoint)
    whole.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    model, _ = load_model(tmp_path / "sharded", [1, 4], torch.float32)
    for (_, a), (_, b) in zip(
        model.named_parameters(), load_model(checkpoint, [1, 4], torch.float32)[0].named_parameters()
    ):
        assert torch.equal(a, b)


def test_stacked_experts_are_cut_before_they_are_read():
    """gpt-oss keeps all experts of a layer in one tensor."""
    directory = preset_directory("gpt-oss-tiny")
    whole = dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).named_parameters())
    model, read = load_model(directory, [3, 4, 9], torch.float32)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, whole[name][[3, 4, 9]] if ".experts." in name else whole[name])
    assert read == sum(weight.numel() * 4 for weight in model.parameters())


def rewrite(checkpoint, change):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def truncate(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def break_index(checkpoint):
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": ')


def point_index_at_nothing(checkpoint):
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))


def drop(name):
    return lambda checkpoint: rewrite(checkpoint, lambda tensors: tensors.pop(name))


def fewer_experts_in_config(checkpoint):
    change_config(checkpoint, num_experts=8, num_local_experts=8)


def fewer_layers_in_config(checkpoint):
    change_config(checkpoint, num_hidden_layers=2)


def change_config(checkpoint, **fields):
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def shrink(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "model.safetensors: cannot be read as safetensors"),
        (lambda c: (c / "model.safetensors").write_text("hello"), "model.safetensors: cannot be read as safetensors"),
        (lambda c: (c / "model.safetensors").unlink(), "model.safetensors: missing"),
        (break_index, "model.safetensors.index.json: not a safetensors index"),
        (point_index_at_nothing, "gone.safetensors: missing"),
        (drop("model.layers.2.self_attn.q_proj.weight"), "model.layers.2.self_attn.q_proj.weight"),
        (drop("model.layers.1.mlp.experts.3.down_proj.weight"), "do not fit config.json"),
        (drop("model.layers.1.mlp.experts.3.gate_proj.weight"), "do not fit config.json"),
        (shrink, "do not fit config.json"),
        (fewer_experts_in_config, "config.json has 8"),
        (fewer_layers_in_config, "have no place in the model that config.json describes"),
    ],
)
def test_broken_weights_are_named(checkpoint, damage, named):
    damage(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        load_model(checkpoint, [2, 3], torch.float32)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json: cannot be read as a model configuration"),
        ("{", "config.json: cannot be read as a model configuration"),
        ("[]", "config.json: cannot be read as a model configuration"),
        ('{"model_type": "llama"}', "'llama' is not a family that bywash runs; it runs"),
        (
            '{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}',
            "the weights are quantised (mxfp4)",
        ),
        ('{"model_type": ["a"]}', "is unknown to transformers"),
        (
            '{"model_type": "qwen3_moe", "rope_parameters": {"rope_type": "dynamic", "factor": 2, "rope_theta": 9}}',
            "rope_type 'dynamic' depends on the length",
        ),
        ('{"model_type": "nonsense"}', "'nonsense' is unknown to transformers"),
    ],
)
def test_bad_configurations_are_named(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert message in str(caught.value)
