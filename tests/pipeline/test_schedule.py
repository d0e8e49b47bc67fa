"""Schedules as data: complete, ordered by the fewest semaphores that suffice, the same on every rank."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError
from bywash.moe.pipeline import (
    IN_FLIGHT,
    SERIAL,
    Kind,
    LayerForm,
    Split,
    Stream,
    build_schedule,
    check,
    simulate,
    usage,
)
from bywash.moe.pipeline.schedule import Semaphore
from tests.pipeline.common import without_semaphore

FORMS = st.builds(LayerForm, moe=st.booleans(), shared=st.booleans(), attention=st.booleans())
SPLITS = st.builds(Split, lanes=st.integers(1, 5), chunks=st.integers(1, 4), overlapped=st.booleans())
COSTS = st.fixed_dictionaries({kind: st.integers(0, 50) for kind in Kind})


@settings(max_examples=150, deadline=None)
@given(forms=st.lists(FORMS, min_size=1, max_size=5), split=SPLITS, costs=COSTS)
def test_every_stage_once_and_every_dependency_ordered(forms, split, costs):
    schedule = build_schedule(forms, split, cost=lambda kind, lane: costs[kind] + lane)
    assert schedule == build_schedule(forms, split, cost=lambda kind, lane: costs[kind] + lane)
    check(schedule)
    found = sorted((op.kind, op.layer, op.lane, op.chunk) for op in schedule.ops)
    wanted = []
    for layer, form in enumerate(forms):
        kinds = [Kind.ATTENTION] if form.attention else []
        shared = [Kind.SHARED_UP, Kind.SHARED_DOWN] if split.whole else [Kind.SHARED]
        kinds += [Kind.ROUTE, Kind.FINISH, *(shared if form.shared else [])] if form.moe else [Kind.DENSE]
        wanted += [(kind, layer, lane, 0) for kind in kinds for lane in range(split.lanes)]
        if form.moe:
            wanted += [
                (kind, layer, lane, chunk)
                for kind in (Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE)
                for lane in range(split.lanes)
                for chunk in range(split.chunks)
            ]
    assert found == sorted(wanted)
    open_steps = most = 0
    for op in schedule.ops:
        open_steps += (op.kind == Kind.DISPATCH) - (op.kind == Kind.COMBINE)
        most = max(most, open_steps)
    assert most <= (IN_FLIGHT if split.overlapped else 1)
    if not split.overlapped:
        assert not schedule.semaphores
        assert {op.stream for op in schedule.ops} == {Stream.COMPUTE}


@settings(max_examples=60, deadline=None)
@given(forms=st.lists(FORMS, min_size=1, max_size=3), split=SPLITS, costs=COSTS)
def test_no_semaphore_can_be_spared(forms, split, costs):
    schedule = build_schedule(forms, split, cost=lambda kind, lane: costs[kind])
    for number in range(len(schedule.semaphores)):
        with pytest.raises(ConfigError, match="no semaphore orders it after"):
            check(without_semaphore(schedule, number))


def test_two_micro_batches_run_as_in_the_picture():
    """Attention B while A's rows travel, experts A while B's do."""
    schedule = build_schedule([LayerForm()], Split(lanes=2))
    assert [str(op) for op in schedule.on(Stream.COMMUNICATION)] == [
        "dispatch A0 of layer 0",
        "dispatch B0 of layer 0",
        "combine A0 of layer 0",
        "combine B0 of layer 0",
    ]
    assert [str(op) for op in schedule.on(Stream.COMPUTE)] == [
        "attention A0 of layer 0",
        "route A0 of layer 0",
        "attention B0 of layer 0",
        "route B0 of layer 0",
        "experts A0 of layer 0",
        "experts B0 of layer 0",
        "finish A0 of layer 0",
        "finish B0 of layer 0",
    ]


def test_one_micro_batch_hides_both_halves_behind_its_shared_expert():
    schedule = build_schedule([LayerForm(shared=True)], Split(), cost=lambda kind, lane: 10)
    spans = {str(span.op.kind): span for span in simulate(schedule, lambda op: 10)}
    assert [str(op.kind) for op in schedule.on(Stream.COMPUTE)] == [
        "attention",
        "route",
        "shared expert up",
        "experts",
        "shared expert down",
        "finish",
    ]
    assert spans["dispatch"].start_ns == spans["shared expert up"].start_ns
    assert spans["combine"].start_ns == spans["shared expert down"].start_ns
    assert usage(list(spans.values())).exposed_ns == 0


def test_damaged_schedules_are_refused_with_their_place():
    schedule = build_schedule([LayerForm()] * 2, Split(lanes=2))
    swapped = (schedule.ops[1], schedule.ops[0], *schedule.ops[2:])
    with pytest.raises(ConfigError, match=r"schedule.ops\[0\]"):
        check(replace(schedule, ops=swapped))
    backwards = (Semaphore(source=schedule.semaphores[0].target, target=schedule.semaphores[0].source),)
    with pytest.raises(ConfigError, match=r"schedule.semaphores\[0\]"):
        check(replace(schedule, semaphores=backwards + schedule.semaphores[1:]))
    with pytest.raises(ConfigError, match="1 exchange steps may be open at once"):
        check(replace(schedule, in_flight=1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split(lanes=0), "split.lanes = 0"),
        (lambda: Split(chunks=0), "split.chunks = 0"),
        (lambda: build_schedule([], SERIAL), "no layers"),
        (lambda: build_schedule([LayerForm()], Split(lanes=2), cost=lambda kind, lane: -1), "cost of .* is -1"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_deep_model_with_uneven_lanes():
    schedule = build_schedule(
        [LayerForm(moe=layer > 2, shared=True) for layer in range(61)],
        Split(lanes=3),
        cost=lambda kind, lane: 100 * (lane + 1),
    )
    assert len(schedule.ops) == 3 * (3 * 2 + 58 * 7)
