"""`RoutingTrace`, its recorder and the merge of ranks."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import RoutingError, TraceError
from bywash.routing import DECODE, PREFILL, RoutingTrace, TraceRecorder, merge_traces
from tests.routing.trace_samples import EXPERTS, REPEATED, TOP_K, assert_same, small_trace

LAYERS = (1, 4, 5)


def test_counts_agree_with_counting_by_hand():
    trace = small_trace()
    counts_SLE = np.zeros((3, 2, EXPERTS), int)
    for token, step in enumerate([0, 0, 0, 2, 2]):
        for layer in range(2):
            for expert in trace.ids_NLK[token, layer]:
                counts_SLE[step, layer, expert] += 1
    assert np.array_equal(trace.counts_SLE(), counts_SLE)
    assert np.array_equal(trace.counts_LE(), counts_SLE.sum(axis=0))
    assert np.array_equal(trace.counts_LE(PREFILL), counts_SLE[:2].sum(axis=0))
    assert np.array_equal(trace.counts_LE(phase=DECODE), counts_SLE[2])


def test_count_matrix_of_a_step():
    trace = small_trace()
    dealt = trace.counts_RE(step=2, layer=7, ranks=4)
    assert (dealt.dtype, dealt.shape) == (np.int32, (4, EXPERTS))
    assert sorted(np.flatnonzero(dealt[1])) == sorted(trace.ids_NLK[4, 1])
    assert dealt.sum(axis=1).tolist() == [TOP_K, TOP_K, 0, 0]
    placed = trace.counts_RE(2, 7, 4, rank_of_prompt=[3, 3])
    assert placed.sum(axis=1).tolist() == [0, 0, 0, 2 * TOP_K]
    assert np.array_equal(placed.sum(axis=0), dealt.sum(axis=0))
    assert not trace.counts_RE(1, 3, 2).any()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda t: t.counts_RE(3, 7, 2), "step = 3"),
        (lambda t: t.counts_RE(0, 4, 2), "layer = 4"),
        (lambda t: t.counts_RE(0, 7, 0), "ranks = 0"),
        (lambda t: t.counts_RE(0, 7, 2, [0]), "rank_of_prompt: 1 entries"),
        (lambda t: t.counts_RE(0, 7, 2, [0, 2]), r"rank_of_prompt: .* 0\.\.1"),
    ],
)
def test_wrong_questions_are_refused(call, field):
    with pytest.raises(TraceError, match=field):
        call(small_trace())


def test_counts_by_topic_split_the_whole():
    trace = small_trace(topics=("law", "code"))
    by_topic = trace.counts_by_topic()
    assert list(by_topic) == ["law", "code"]
    assert np.array_equal(sum(by_topic.values()), trace.counts_LE())
    assert by_topic["law"].sum() == 3 * 2 * TOP_K
    assert small_trace().counts_by_topic() == {}


def test_arrays_are_read_only_and_ids_small():
    trace = small_trace()
    with pytest.raises(ValueError, match="read-only"):
        trace.ids_NLK[0, 0, 0] = 1
    assert trace.ids_NLK.dtype == small_trace(num_experts=256).ids_NLK.dtype == np.uint8
    with pytest.raises(TraceError, match="must be uint16"):
        small_trace(num_experts=257)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 5}, r"ids_NLK\[\d, \d\]"),
        ({"num_experts": 300}, "ids_NLK: is uint8"),
        ({"ids_NLK": REPEATED}, r"ids_NLK\[0, 0\] = \[0, 0, 0\]"),
        ({"layers": (7, 3)}, "layers"),
        ({"layers": (1, 2, 3)}, "ids_NLK: shape"),
        ({"step_tokens_S": np.array([3, 0, 3], np.int32)}, "step_tokens_S: sums to 6"),
        ({"step_tokens_S": np.array([6, -3, 2], np.int32)}, "step_tokens_S"),
        ({"step_phase_S": np.array([0, 0, 2], np.uint8)}, "step_phase_S: holds 2"),
        ({"step_phase_S": np.array([0, 0], np.uint8)}, "step_phase_S"),
        ({"token_prompt_N": np.zeros(4, np.int32)}, "token_prompt_N"),
        ({"token_prompt_N": np.array([0, 0, 1, 0, -1], np.int32)}, "token_prompt_N"),
        ({"token_position_N": np.zeros(5, np.int64)}, "token_position_N"),
        ({"weights_NLK": np.zeros((5, 2, 2), np.float16)}, "weights_NLK"),
        ({"weights_NLK": np.full((5, 2, TOP_K), np.nan, np.float16)}, "weights_NLK"),
        ({"topics": ("law",)}, "topics: 1 labels"),
        ({"source": "guessed"}, "source"),
        ({"source": "generated"}, "seed"),
        ({"seed": 3}, "seed"),
    ],
)
def test_a_field_that_does_not_fit_is_named(changes, field):
    with pytest.raises(TraceError, match=f"^{field}"):
        small_trace(**changes)


def _routed(tokens: list[tuple[int, int]], layer: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights that depend on the token and layer alone, as a model's would."""
    ids, weights = np.empty((len(tokens), TOP_K), np.int64), np.empty((len(tokens), TOP_K), np.float32)
    for i, (prompt, position) in enumerate(tokens):
        rng = np.random.default_rng([seed, layer, abs(prompt), position])
        ids[i], weights[i] = rng.permutation(EXPERTS)[:TOP_K], rng.random(TOP_K)
    return ids, weights


def _recorder(**options) -> TraceRecorder:
    return TraceRecorder(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, **options)


def _record(steps: list[list[tuple[int, int]]], seed: int, as_tensor: bool = False) -> RoutingTrace:
    recorder = _recorder(keep_weights=True, model="tiny")
    for number, tokens in enumerate(steps):
        phase = DECODE if number else PREFILL
        recorder.begin_step(phase, [p for p, _ in tokens], [at for _, at in tokens])
        for layer in reversed(LAYERS):
            ids, weights = _routed(tokens, layer, seed)
            if as_tensor:
                recorder.add(layer, torch.from_numpy(ids), torch.from_numpy(weights).to(torch.bfloat16))
            else:
                recorder.add(layer, ids, weights)
    return recorder.finish()


def test_recorder_keeps_what_it_was_given():
    tokens = [(1, 0), (0, 0), (0, 1)]
    trace = _record([tokens, [(0, 2), (1, 1)]], seed=3)
    assert trace.token_prompt_N.tolist() == [0, 0, 1, 0, 1]
    assert trace.token_position_N.tolist() == [0, 1, 0, 2, 1]
    assert (trace.steps, trace.tokens, trace.prompts, trace.layers) == (2, 5, 2, LAYERS)
    ids, weights = _routed([(1, 1)], layer=4, seed=3)
    assert np.array_equal(trace.ids_NLK[4, 1], ids[0])
    assert np.array_equal(trace.weights_NLK[4, 1], weights[0].astype(np.float16))
    assert trace.source == "recorded"


def test_recorder_takes_tensors_of_any_float_dtype():
    steps = [[(0, 0), (2, 0)], [(0, 1)]]
    from_tensor, from_array = _record(steps, seed=1, as_tensor=True), _record(steps, seed=1)
    assert np.array_equal(from_tensor.ids_NLK, from_array.ids_NLK)
    assert np.allclose(from_tensor.weights_NLK, from_array.weights_NLK, atol=2**-8)


def test_padding_leaves_no_mark():
    plain = _record([[(0, 0), (1, 0)], []], seed=2)
    padded = _record([[(0, 0), (-1, 9), (1, 0)], [(-1, 0)]], seed=2)
    assert_same(plain, padded)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(0, 1000))
def test_many_ranks_record_what_one_rank_records(data, ranks, seed):
    steps = []
    for _ in range(data.draw(st.integers(0, 4))):
        tokens = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=8))
        steps.append(data.draw(st.permutations(sorted(tokens))))
    parts = [_record([[t for t in tokens if t[0] % ranks == r] for tokens in steps], seed) for r in range(ranks)]
    whole = _record(steps, seed)
    parts = [pickle.loads(pickle.dumps(part)) for part in data.draw(st.permutations(parts))]
    assert_same(merge_traces(parts), whole)


def test_merging_needs_ranks_of_one_run():
    one = small_trace()
    with pytest.raises(TraceError, match="nothing to merge"):
        merge_traces([])
    with pytest.raises(TraceError, match=r"step 0 holds prompt 0, position 0 twice"):
        merge_traces([one, one])
    with pytest.raises(TraceError, match=r"^model: part 0 has '', part 1 has 'other'"):
        merge_traces([one, small_trace(model="other")])
    with pytest.raises(TraceError, match=r"^step_phase_S"):
        merge_traces([one, small_trace(step_phase_S=np.array([1, 1, 1], np.uint8))])
    with pytest.raises(TraceError, match=r"^weights_NLK"):
        merge_traces([one, small_trace(weights_NLK=np.ones((5, 2, TOP_K), np.float16))])


def test_recorder_refuses_misuse():
    ids, weights = _routed([(0, 0)], 1, 0)
    with pytest.raises(TraceError, match="begin_step first"):
        _recorder().add(1, ids)
    recorder = _recorder()
    with pytest.raises(TraceError, match="phase = 2"):
        recorder.begin_step(2, [0], [0])
    with pytest.raises(TraceError, match="token_prompt_T"):
        recorder.begin_step(DECODE, [0, 1], [0])
    recorder.begin_step(DECODE, [0], [0])
    with pytest.raises(TraceError, match="layer = 2"):
        recorder.add(2, ids)
    recorder.add(1, ids)
    with pytest.raises(TraceError, match="layer = 1: added twice in step 0"):
        recorder.add(1, ids)
    with pytest.raises(TraceError, match=r"step 0: layers \[4, 5\] were not recorded"):
        recorder.finish()
    with pytest.raises(TraceError, match=r"step 0: layers \[4, 5\]"):
        recorder.begin_step(DECODE, [0], [1])
    with pytest.raises(RoutingError, match=r"layer 4: ids \[1, 2\]"):
        recorder.add(4, ids[:, :2])
    with pytest.raises(RoutingError, match=r"layer 4: ids must be 0\.\.11"):
        recorder.add(4, ids - EXPERTS)
    keeper = _recorder(keep_weights=True)
    keeper.begin_step(DECODE, [0], [0])
    with pytest.raises(TraceError, match="pass weights_TK"):
        keeper.add(1, ids)
    with pytest.raises(RoutingError, match=r"layer 1: weights \[1, 2\]"):
        keeper.add(1, ids, weights[:, :2])
