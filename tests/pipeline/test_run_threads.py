"""The executor on threads alone: order, errors of either thread, deadlines, wrong schedules."""

import contextlib
import queue
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.errors import ConfigError, PipelineError, RankLostError
from bywash.moe.pipeline import (
    SERIAL,
    Kind,
    LayerForm,
    Schedule,
    Semaphore,
    Split,
    Stream,
    ThreadExecutor,
    build_schedule,
)
from bywash.moe.pipeline.queues import HostQueues
from tests.pipeline.common import without_semaphore
from tests.pipeline.test_schedule import FORMS, SPLITS

TWO = build_schedule([LayerForm()] * 2, Split(lanes=2))


@settings(max_examples=40, deadline=None)
@given(forms=st.lists(FORMS, min_size=1, max_size=3), split=SPLITS, seed=st.integers(0, 10**6))
def test_every_op_runs_once_after_all_that_it_depends_on(forms, split, seed):
    schedule = build_schedule(forms, split)
    pauses = (torch.rand(len(schedule.ops), generator=torch.Generator().manual_seed(seed)) * 2e-4).tolist()
    ended, threads = [], {stream: set() for stream in Stream}

    def work(op):
        assert set(op.after) <= set(ended)
        threads[op.stream].add(threading.get_ident())
        time.sleep(pauses[op.number])
        ended.append(op.number)
        return op.number

    with ThreadExecutor(deadline_s=60) as executor:
        for step in range(2):
            ended.clear()
            spans = executor.run(schedule, work)
            assert [span.op.number for span in spans] == list(range(len(schedule.ops)))
            assert sorted(ended) == list(range(len(schedule.ops)))
            assert {span.step for span in spans} == {step}
            assert [span.sent_bytes for span in spans] == list(range(len(schedule.ops)))
            assert all(spans[before].end_ns <= span.start_ns for span in spans for before in span.op.after)
    assert threads[Stream.COMPUTE] == {threading.get_ident()}
    assert len(threads[Stream.COMMUNICATION]) <= 1
    assert threading.get_ident() not in threads[Stream.COMMUNICATION]


def test_streams_run_at_the_same_time():
    """Communication of A meets compute of B: each waits for the other inside its op."""
    meeting = threading.Barrier(2, timeout=60)

    def work(op):
        if (op.layer, op.lane, op.kind) in ((0, 0, Kind.DISPATCH), (0, 1, Kind.ATTENTION)):
            meeting.wait()
        return 0

    with ThreadExecutor(deadline_s=60) as executor:
        executor.run(TWO, work)


@pytest.mark.parametrize("kind", [Kind.EXPERTS, Kind.DISPATCH, Kind.COMBINE, Kind.FINISH])
def test_an_error_of_either_thread_reaches_the_caller_and_ends_the_other(kind):
    error = RankLostError("rank 1 (pid 7) is gone", [1])
    begun = []

    def work(op):
        begun.append(op.number)
        if op.kind == kind and (op.layer, op.lane) == (0, 1):
            raise error
        return 0

    with ThreadExecutor(deadline_s=60) as executor:
        with pytest.raises(RankLostError) as caught:
            executor.run(TWO, work)
        assert caught.value is error
        with pytest.raises(PipelineError, match="an earlier step failed"):
            executor.run(TWO, work)
    assert len(begun) < len(TWO.ops)
    assert not [thread for thread in threading.enumerate() if thread.name == "bywash-communication"]


def test_a_stuck_stream_ends_the_other_at_the_deadline():
    release = threading.Event()

    def work(op):
        if op.kind == Kind.DISPATCH:
            release.wait(60)
        return 0

    with ThreadExecutor(deadline_s=1.5) as executor:
        with pytest.raises(PipelineError, match=r"waits for dispatch A0 of layer 0; .* has not moved for 1.5 s"):
            executor.run(TWO, work)
        release.set()


def test_a_slow_stream_that_moves_is_waited_for():
    """Each op is within the deadline, all of them are not."""

    def work(op):
        time.sleep(0.3 if op.kind.communicates else 0)
        return 0

    assert 0.3 * sum(op.kind.communicates for op in TWO.ops) > 2
    with ThreadExecutor(deadline_s=2) as executor:
        assert len(executor.run(TWO, work)) == len(TWO.ops)


def test_streams_that_wait_for_each_other_are_told_at_once():
    dispatch, experts = (next(op for op in TWO.ops if op.kind == kind) for kind in (Kind.DISPATCH, Kind.EXPERTS))
    circle = (Semaphore(source=experts.number, target=dispatch.number), *TWO.semaphores)

    def shifted(op):
        awaits, signals = (tuple(n + 1 for n in numbers) for numbers in (op.awaits, op.signals))
        if op is dispatch:
            awaits = (0, *awaits)
        if op is experts:
            signals = (0, *signals)
        return replace(op, awaits=awaits, signals=signals)

    wrong = Schedule(split=TWO.split, in_flight=2, ops=tuple(map(shifted, TWO.ops)), semaphores=circle)
    with ThreadExecutor(deadline_s=60) as executor, pytest.raises(PipelineError, match="no stream is left to go on"):
        executor.run(wrong, lambda op: 0)


def test_a_semaphore_that_nobody_raises_is_told_at_once():
    def silent(op):
        return replace(op, signals=()) if op.kind == Kind.COMBINE else op

    wrong = replace(TWO, ops=tuple(map(silent, TWO.ops)))
    with ThreadExecutor(deadline_s=60) as executor, pytest.raises(PipelineError, match="waits for combine"):
        executor.run(wrong, lambda op: 0)


def test_a_missing_semaphore_lets_an_op_run_too_early():
    """The fault that the soak must find is a real one: without the semaphore the order is gone."""
    number = next(n for n, s in enumerate(TWO.semaphores) if TWO.ops[s.target].kind == Kind.EXPERTS)
    source, target = TWO.semaphores[number].source, TWO.semaphores[number].target
    ended, early = [], threading.Event()

    def work(op):
        if op.number == source:
            early.wait(60)
        if op.number == target:
            assert source not in ended
            early.set()
        ended.append(op.number)
        return 0

    with ThreadExecutor(deadline_s=60) as executor:
        executor.run(without_semaphore(TWO, number), work)


@pytest.mark.parametrize("inference", [True, False])
def test_the_communication_thread_has_the_callers_autograd_mode(inference):
    seen = {}

    def work(op):
        seen[op.stream] = (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads())
        return 0

    with torch.inference_mode(inference), ThreadExecutor(deadline_s=60) as executor:
        executor.run(TWO, work)
    assert seen[Stream.COMMUNICATION] == seen[Stream.COMPUTE]
    assert seen[Stream.COMPUTE][0] == inference


def test_a_serial_schedule_needs_no_thread():
    before = threading.active_count()
    with ThreadExecutor(deadline_s=60) as executor:
        executor.run(build_schedule([LayerForm()], SERIAL), lambda op: 0)
        assert threading.active_count() == before


def test_a_deadline_must_be_positive():
    with pytest.raises(ConfigError, match="deadline_s = 0"):
        ThreadExecutor(deadline_s=0)


class LaterQueues(HostQueues):
    """As a GPU: a stream does what it was given later, on a thread of its own; marks and waits are queued too."""

    def __init__(self):
        self._lines = {stream: queue.SimpleQueue() for stream in Stream}
        self._mine = threading.local()
        self._threads = [
            threading.Thread(target=self._serve, args=[line], daemon=True) for line in self._lines.values()
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, line):
        while (job := line.get()) is not None:
            job()

    def give(self, job):
        self._mine.line.put(job)

    @contextlib.contextmanager
    def on(self, stream):
        self._mine.line = self._lines[stream]
        yield

    def mark(self):
        reached = threading.Event()
        self.give(reached.set)
        return reached

    def wait(self, mark):
        self.give(lambda: mark.wait(60))

    def end(self):
        for line, thread in zip(self._lines.values(), self._threads, strict=True):
            line.put(None)
            thread.join(60)

    def nanoseconds(self, mark):
        return int(mark.is_set())


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("split", [Split(), Split(lanes=2), Split(chunks=2), Split(lanes=3)], ids=str)
def test_what_threads_only_queue_keeps_its_order_too(split, drop):
    """Ops are launched at once and run later; without the queued waits some op runs before its input is there."""
    schedule, queues, ended, early = build_schedule([LayerForm()] * 3, split), LaterQueues(), set(), []
    if drop:
        queues.wait = lambda mark: None

    def later(op):
        time.sleep(0.01 if op.kind.communicates else 0.0)
        early.extend([op.number] if not set(op.after) <= ended else [])
        ended.add(op.number)

    def work(op):
        queues.give(lambda: later(op))
        return 0

    with ThreadExecutor(deadline_s=60) as executor:
        executor._queues = queues
        spans = executor.run(schedule, work)
    assert len(ended) == len(spans) == len(schedule.ops)
    assert bool(early) == drop
