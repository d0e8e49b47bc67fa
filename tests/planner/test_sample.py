"""The pool of tokens: from a trace of the model, from one of another model however skewed, from a law."""

import numpy as np
import pytest

from bywash.planner.model import load_model_shape
from bywash.planner.sample import make_sample
from bywash.routing.skew import TraceShape, zipf
from bywash.routing.trace import PREFILL, RoutingTrace


def trace_of(ids_NLK, experts):
    tokens, layers, _ = ids_NLK.shape
    return RoutingTrace(
        ids_NLK=ids_NLK.astype(np.uint8),
        step_tokens_S=np.array([tokens], np.int32),
        step_phase_S=np.array([PREFILL], np.uint8),
        token_prompt_N=np.zeros(tokens, np.int32),
        token_position_N=np.arange(tokens, dtype=np.int32),
        layers=tuple(range(layers)),
        num_experts=experts,
    )


@pytest.mark.parametrize("exponent", [1.2, 3.0])
def test_a_law_steeper_than_distinct_choices_allow_is_cut(exponent):
    trace = zipf(TraceShape(num_experts=16, top_k=1, tokens=4096), exponent=exponent, seed=0)
    sample = make_sample(load_model_shape("olmoe"), trace)
    assert sample.recorded is None
    assert 0.8 < sample.counts_LE.max() / len(sample.ids_NLK) < 1


def test_experts_that_are_all_alike_have_no_exponent():
    ids = np.arange(96)[:, None, None] % 24
    assert "exponents 0.00, fitted" in make_sample(load_model_shape("mixtral-8x7b"), trace_of(ids, 24)).note


def test_a_trace_of_other_layers_is_of_another_model():
    rng, model = np.random.default_rng(0), load_model_shape("olmoe")
    for layers in (16, 2):
        ids = np.argsort(rng.random((64, layers, model.experts)), axis=2)[:, :, : model.top_k]
        sample = make_sample(model, trace_of(ids, model.experts))
        assert (sample.recorded is not None) == (layers == model.moe_layers)
