"""What `benchmarks/pipeline` reads out of a GPU's profile: here from made-up kernels of a schedule."""

import pytest
from benchmarks.pipeline.gpu_profile import Event, by_op, last_step, shares

from bywash.moe.pipeline import SERIAL, Kind, LayerForm, Split, build_schedule

KERNELS = {
    Kind.ATTENTION: ("nvjet", "flash", "nvjet", "add_norm(u64)"),
    Kind.ROUTE: ("route", "prepare_rows"),
    Kind.SHARED: ("experts",),
    Kind.SHARED_UP: ("experts",),
    Kind.SHARED_DOWN: ("experts",),
    Kind.EXPERTS: ("count_pairs", "experts", "sum_others", "prepare_outputs"),
    Kind.FINISH: ("sum_own", "add_norm(u64)"),
}
CLASS = {"nvjet": "attention", "flash": "attention", "add_norm(u64)": "norm", "route": "route", "sum_own": "finish"}
CLASS |= {"prepare_rows": "index", "count_pairs": "index", "experts": "experts", "sum_others": "sums"}
CLASS |= {"prepare_outputs": "sums"}


DECODE = {Kind.SHARED: ("nvjet", "silu", "mul", "nvjet"), Kind.EXPERTS: ("experts",), Kind.ROUTE: ("route",)}
CLASS |= {"silu": "attention", "mul": "attention"}


def profile(schedule, steps=2, kernels=KERNELS):
    """Events 10 us long, one after the other, and copies that begin with the kernel after them."""
    events, now = [], 0.0

    def add(kind, name, size=0):
        nonlocal now
        events.append(Event(kind=kind, name=name, begin=now, end=now + 10, size=size, stream=7))
        now += 0 if size else 10

    for _ in range(steps):
        for _ in range(schedule.split.lanes):
            add("norm", "add_norm(u64)")
        for op in schedule.ops:
            for name in kernels.get(op.kind, ()):
                add(CLASS[name], name)
            if op.kind.communicates:
                add("wire", "Memcpy PtoP", 100)
    return sorted(events, key=lambda one: one.begin)


@pytest.mark.parametrize("split", [SERIAL, Split(), Split(lanes=2), Split(lanes=3)], ids=str)
def test_kernels_are_given_to_the_ops_that_launched_them(split):
    schedule = build_schedule([LayerForm(shared=True)] * 3, split)
    events = last_step(profile(schedule), schedule, 2)
    named, spans = by_op(events, schedule, {Kind.DISPATCH: 1, Kind.COMBINE: 1}, True)
    assert sorted(span.op.number for span in spans) == list(range(len(schedule.ops)))
    for span in spans:
        length = span.end_ns - span.start_ns
        assert length == 10_000 * len(KERNELS.get(span.op.kind, ("a copy",)))
        assert span.sent_bytes == (100 if span.op.kind.communicates else 0)
    found = shares(named)
    parts = 3 * split.lanes
    assert found["count"]["shared"] == parts * (1 + split.whole)
    assert found["count"]["experts"] == parts
    assert found["count"]["attention"] == 3 * parts
    assert found["wire_bytes"] == 200 * parts
    by_experts, by_products, by_any = found["hidden"].values()
    assert 0 <= by_experts <= by_products < by_any == 1


def test_a_shared_expert_of_torch_kernels_is_told_from_attention():
    schedule, kernels = build_schedule([LayerForm(shared=True)] * 2, SERIAL), KERNELS | DECODE
    events = last_step(profile(schedule, kernels=kernels), schedule, 2)
    named, spans = by_op(events, schedule, {Kind.DISPATCH: 1, Kind.COMBINE: 1}, False)
    assert {span.op.kind: span.end_ns - span.start_ns for span in spans}[Kind.SHARED] == 40_000
    assert shares(named)["count"]["shared"] == 8


def test_numbers_that_do_not_fit_give_no_spans():
    schedule = build_schedule([LayerForm(shared=True)] * 2, Split(lanes=2))
    events = last_step(profile(schedule), schedule, 2)
    assert by_op(events[:-3], schedule, {Kind.DISPATCH: 1, Kind.COMBINE: 1}, True)[1] is None
    assert by_op(events, schedule, {Kind.DISPATCH: 2, Kind.COMBINE: 1}, True)[1] is None
    with pytest.raises(ValueError, match="0 norms"):
        last_step([], schedule, 2)
