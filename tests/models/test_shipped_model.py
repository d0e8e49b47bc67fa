"""The model in the repository: it loads without a network, reads any text, has learnt, and routes by topic."""

import json
import math
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bywash.models

transformers = pytest.importorskip("transformers")
FOLDER = Path(bywash.models.__file__).parent / "shipped" / "bywash-tiny"
SENTENCE = "The function returns a list of the names of the files in the directory."


@pytest.fixture(scope="module")
def no_network():
    """Any connection attempt fails the test that made it."""

    def refuse(*_args):
        raise AssertionError("the shipped model must load without a network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture(scope="module")
def tokenizer(no_network):
    return transformers.AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model(no_network):
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def nats_per_byte(model, tokenizer, text):
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def test_the_folder_is_small_enough_to_ship():
    size = sum(path.stat().st_size for path in FOLDER.iterdir())
    assert size <= 25e6, f"{size / 1e6:.1f} MB"
    assert {path.name for path in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "experts.png",
        "generation_config.json",
        "loss.png",
        "model.safetensors",
        "routing_by_topic.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_log.json",
    }


def test_shape_is_that_of_a_small_qwen3_moe(model):
    config = model.config
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert 8e6 <= sum(p.numel() for p in model.parameters()) <= 12e6
    assert 6 <= config.num_hidden_layers <= 8
    assert 16 <= config.num_experts <= 32
    assert config.num_experts_per_tok in (2, 4)
    assert config.norm_topk_prob
    assert all(p.isfinite().all() for p in model.parameters())


def test_weights_are_bf16(no_network):
    assert transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "plain",
        "  two  spaces ,\ttab\r\n\n",
        "déjà vu — naïve",
        "日本語 العربية 🧪👩‍🔬",
        "\x00\x01\x7f",
        "e\u0301 \u00e9 \ufb01",
    ],
    ids=["empty", "space", "ascii", "whitespace", "latin", "scripts", "controls", "unnormalised"],
)
def test_tokens_are_the_bytes(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_round_trips(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert bytes(ids) == text.encode()


def test_ids_fit_the_embedding(tokenizer, model):
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().num_embeddings
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 256
    assert tokenizer.pad_token_id == model.config.pad_token_id == 257
    assert tokenizer("a<|endoftext|>b").input_ids == [97, 256, 98]


def test_a_padded_batch_continues_as_its_rows_do(tokenizer, model):
    prompts = ["The ", "def main():\n    "]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    together = model.generate(**batch, max_new_tokens=8, do_sample=False)[:, -8:]
    for prompt, row in zip(prompts, together):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        assert alone[0, -8:].tolist() == row.tolist()


def test_it_has_learnt(tokenizer, model):
    loss = nats_per_byte(model, tokenizer, SENTENCE)
    assert loss < 0.4 * math.log(256), f"{loss:.3f} nats per byte"
    shuffled = "".join(sorted(SENTENCE))
    assert nats_per_byte(model, tokenizer, shuffled) > 2 * loss


def test_greedy_generation_repeats_itself_exactly(tokenizer, model):
    ids = tokenizer("def read(", return_tensors="pt")
    first, second = (model.generate(**ids, max_new_tokens=24, do_sample=False)[0].tolist() for _ in range(2))
    assert first == second
    assert len(first) > len("def read(")


def test_hot_experts_differ_by_topic():
    recorded = json.loads((FOLDER / "routing_by_topic.json").read_text())
    layers = range(len(recorded["hottest"]["prose"]))
    for pair, facts in recorded["pairs"].items():
        assert sum(facts["hot in common"]) <= 2 * len(layers), f"{pair} share over half of their hottest experts"
        assert min(facts["distance"]) > 0.1, f"{pair} load the experts alike"
    apart = recorded["pairs"]["prose / code"]["distance"]
    within = [max(recorded["halves"][topic][layer] for topic in ("prose", "code")) for layer in layers]
    assert all(distance > 2 * control for distance, control in zip(apart, within))


def test_recorded_counts_add_up(model):
    counts = torch.tensor(json.loads((FOLDER / "routing_by_topic.json").read_text())["counts"]["code"])
    config = model.config
    assert counts.shape == (2, config.num_hidden_layers, config.num_experts)
    assert (counts.sum(-1) % config.num_experts_per_tok == 0).all()
    assert (counts.sum(-1) == counts.sum(-1)[:, :1]).all()
