"""The generation loop on one rank: micro-batches, padding, stopping."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bywash.balance import Placement
from bywash.exchange import LocalExchange
from bywash.models.families import family_of
from bywash.models.generate import Observer, generate, make_micro_batches
from bywash.models.loader import gated_experts, load_model, read_config
from bywash.models.presets import PRESETS, preset_directory
from bywash.models.stages import LanguageModel
from bywash.moe import ExpertParallel

# The longest is longer than gpt-oss-tiny's sliding window of 16.
PROMPTS = [[1, 2, 3], [200, 7], [(7 * i) % 320 for i in range(41)], [310], [4, 5, 6, 7, 8]]


@pytest.fixture(scope="module", params=sorted(PRESETS))
def directory(request) -> Path:
    return preset_directory(request.param)


def stages_of(directory):
    config = read_config(directory)
    experts = family_of(config, str(directory)).num_experts(config)
    stages = LanguageModel(load_model(directory, list(range(experts)), torch.float32)[0], str(directory))
    layers = {
        layer.index: ExpertParallel(
            exchange=LocalExchange(), placement=Placement.equal(experts, 1), experts=gated_experts(layer.experts_module)
        )
        for layer in stages.moe_layers
    }
    return stages, layers


def test_padded_micro_batches_equal_transformers_on_each_prompt_alone(directory):
    stages, layers = stages_of(directory)
    result = generate(stages, layers, make_micro_batches(PROMPTS, 2, 0, 1), new_tokens=5, keep_logits=True)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        torch.testing.assert_close(result.prefill_logits[number], model(ids).logits[0], rtol=0, atol=1e-5)
        expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=ids * 0 + 1)
        assert result.tokens[number] == expected[0, len(prompt) :].tolist()


def test_a_stop_token_ends_its_prompt_and_its_routing(directory):
    stages, layers = stages_of(directory)
    free = generate(stages, layers, make_micro_batches(PROMPTS, 2, 0, 1), new_tokens=6).tokens
    stop = free[0][2]
    rows = []
    stopped = generate(
        stages,
        layers,
        make_micro_batches(PROMPTS, 2, 0, 1),
        new_tokens=6,
        stop_ids=frozenset([stop]),
        observer=Observer(on_layer=lambda layer, routing, _: rows.append(routing.tokens)),
    ).tokens
    for number, tokens in free.items():
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert stopped[number] == tokens[:end]
    assert rows[-1] == sum(stop not in tokens[:5] for tokens in free.values())


def test_micro_batches_have_one_shape_whatever_the_number_of_ranks():
    for ranks in (1, 2, 3, 4):
        batches = [b for rank in range(ranks) for b in make_micro_batches(PROMPTS, 2, rank, ranks)]
        assert {tuple(b.ids_BS.shape) for b in batches} == {(2, 41)}
        assert sorted(p for b in batches for p in b.prompts) == [-1, 0, 1, 2, 3, 4]
        assert sorted(tuple(b.prompts) for b in batches) == [(0, 1), (2, 3), (4, -1)]
        assert sum(int(b.real_BS.sum()) for b in batches) == sum(map(len, PROMPTS))
