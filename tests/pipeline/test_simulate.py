"""The simulated times of a schedule, and what spans amount to."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.moe.pipeline import Kind, LayerForm, Op, Span, Split, Stream, build_schedule, critical_path, simulate, usage
from tests.pipeline.test_schedule import COSTS, FORMS, SPLITS

UNIT = dict.fromkeys(Kind, 10) | {Kind.ROUTE: 0, Kind.FINISH: 0}


@settings(max_examples=100, deadline=None)
@given(forms=st.lists(FORMS, min_size=1, max_size=4), split=SPLITS, costs=COSTS)
def test_spans_keep_stream_order_and_dependencies(forms, split, costs):
    schedule = build_schedule(forms, split, cost=lambda kind, lane: costs[kind])
    spans = simulate(schedule, lambda op: costs[op.kind])
    for span in spans:
        assert span.end_ns - span.start_ns == costs[span.op.kind]
        assert all(spans[before].end_ns <= span.start_ns for before in span.op.after)
    for stream in Stream:
        mine = [span for span in spans if span.op.stream == stream]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(mine))
    total = usage(spans)
    busy = {stream: sum(costs[op.kind] for op in schedule.on(stream)) for stream in Stream}
    assert max(busy.values()) <= total.step_ns <= sum(busy.values())
    assert total.compute_ns + total.exposed_ns <= total.step_ns
    assert total.compute_ns == busy[Stream.COMPUTE] or not split.overlapped
    assert 0 <= total.exposed_ns <= total.communication_ns <= total.step_ns
    path = critical_path(spans)
    assert path[0].start_ns == 0
    assert path[-1].end_ns == total.step_ns
    assert all(a.end_ns == b.start_ns for a, b in pairwise(path))


@pytest.mark.parametrize(
    ("split", "step"),
    [(Split(overlapped=False), 320), (Split(), 320), (Split(lanes=2), 330), (Split(lanes=4), 650)],
    ids=str,
)
def test_eight_layers_with_equal_stages(split, step):
    """Each op takes 10, so n lanes carry n times the work: two of them hide all but the first and the last stage."""
    schedule = build_schedule([LayerForm()] * 8, split, cost=lambda kind, lane: UNIT[kind])
    assert usage(simulate(schedule, lambda op: UNIT[op.kind])).step_ns == step


@pytest.mark.parametrize("stages", [(10, 10, 10, 10), (5, 15, 7, 13), (3, 17, 7, 13), (15, 5, 10, 10), (2, 18, 4, 16)])
def test_three_micro_batches_come_within_5_percent_of_the_ideal(stages):
    attention, experts, dispatch, combine = stages
    cost = {Kind.ATTENTION: attention, Kind.EXPERTS: experts, Kind.DISPATCH: dispatch, Kind.COMBINE: combine}
    schedule = build_schedule([LayerForm()] * 8, Split(lanes=3), cost=lambda kind, lane: cost.get(kind, 0))
    ideal = 8 * 3 * max(attention + experts, dispatch + combine)
    assert usage(simulate(schedule, lambda op: cost.get(op.kind, 0))).step_ns <= 1.05 * ideal


def span(kind, start, end):
    stream = Stream.COMMUNICATION if kind.communicates else Stream.COMPUTE
    op = Op(number=0, kind=kind, layer=0, lane=0, chunk=0, stream=stream, after=())
    return Span(op=op, start_ns=start, end_ns=end)


def test_exposed_is_communication_that_no_compute_covers():
    spans = [
        span(Kind.ATTENTION, 100, 110),
        span(Kind.DISPATCH, 105, 120),
        span(Kind.COMBINE, 118, 125),
        span(Kind.EXPERTS, 115, 117),
        span(Kind.SHARED, 116, 119),
        span(Kind.EXPERTS, 130, 140),
    ]
    total = usage(spans)
    assert (total.step_ns, total.compute_ns, total.communication_ns, total.exposed_ns) == (40, 24, 20, 11)
    assert total.hidden_share == pytest.approx(9 / 20)
    assert total.exposed_fraction == pytest.approx(11 / 40)
    assert usage([]).hidden_share == 1
    assert (total + total).step_ns == 80
