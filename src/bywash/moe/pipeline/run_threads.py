"""Run a schedule on two threads of the host: the caller's computes, a second one drives the exchange.

torch, numpy's large copies and every wait of the exchanges release the interpreter lock, so communication goes on while
the caller computes. Semaphores are flags under one condition; on a GPU the streams behind the threads are ordered too
(`queues`). What goes wrong on either thread ends both, and the caller gets that error itself; a wait for a thread that
makes no progress ends at a deadline.

Knows nothing of layers or tokens: `work(op)` does what an op is (`forward.Forward`). `run_cuda` runs the same schedule
on streams alone.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch

from bywash.errors import ConfigError, PipelineError
from bywash.moe.pipeline.queues import CudaQueues, HostQueues, Queues
from bywash.moe.pipeline.schedule import Op, Schedule, Stream
from bywash.moe.pipeline.simulate import Span

Work = Callable[[Op], int]
"""Does what an op is; returns the bytes that it sent to other ranks."""

_JOIN_S = 2.0
"""How long `close` waits for a communication thread that is still in a wait of its own; that wait has a deadline."""


class ThreadExecutor:
    """Runs schedules one after the other. A context manager: it owns a thread, started when first needed.

    Example:
        >>> with ThreadExecutor(deadline_s=60.0) as executor:
        ...     spans = executor.run(schedule, Forward(...))
    """

    def __init__(self, *, deadline_s: float, device: torch.device | None = None) -> None:
        """Prepare.

        Args:
            deadline_s: the most seconds that one stream waits for the other without its making progress. An exchange
                has deadlines of its own and the better error: give it several times as long as those.
            device: where the tensors are; by default on the CPU.
        """
        if deadline_s <= 0:
            raise ConfigError(f"pipeline: deadline_s = {deadline_s}: must be more than 0 seconds")
        self._deadline_s = deadline_s
        self._queues: Queues[Any] = HostQueues()
        if device is not None and device.type == "cuda":
            self._queues = CudaQueues(device)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._steps = 0
        self._broken = False

    def run(self, schedule: Schedule, work: Work) -> list[Span]:
        """Run every op of the schedule; returns when all have ended.

        Args:
            schedule: from `build_schedule`.
            work: called once for each op, from the thread of its stream.

        Returns:
            When each op ran, by number, on CLOCK_MONOTONIC (which ranks of one host share); on a GPU, when the device
            did what the op had launched.

        Raises:
            PipelineError: a stream waited past the deadline, or both wait for each other; or an earlier run failed.
            BywashError: whatever `work` raised, on either thread.
        """
        if self._broken:
            raise PipelineError("pipeline: an earlier step failed; make a new executor and a new exchange")
        step = _Step(schedule, work, self._deadline_s, self._steps, self._queues)
        self._steps += 1
        communication = schedule.on(Stream.COMMUNICATION)
        self._queues.begin()
        if communication:
            self._start_thread()
            grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._jobs.put(lambda: step.run_beside(communication, grad=grad, inference=inference))
        try:
            step.run(schedule.on(Stream.COMPUTE))
            if communication:
                step.await_other()
        except BaseException as error:
            self._broken = True
            step.fail(error)
            raise
        self._queues.end()
        return step.spans()

    def close(self) -> None:
        """End the thread. Safe to call twice, and after an error."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_JOIN_S)
            self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="bywash-communication", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


@dataclass(slots=True)
class _Step:
    """One run: the semaphores that are up, the spans, and the first error."""

    schedule: Schedule
    work: Work
    deadline_s: float
    step: int
    queues: Queues[Any]
    _ran: list[tuple[Op, Any, Any, int]] = field(default_factory=list)
    _streams: set[Stream] = field(init=False)
    _raised: dict[int, Any] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _error: BaseException | None = None
    _waiting: dict[Stream, int] = field(default_factory=dict)
    _ended: set[Stream] = field(default_factory=set)
    _progress_ns: int = 0

    def __post_init__(self) -> None:
        self._streams = {op.stream for op in self.schedule.ops}

    def run(self, ops: Sequence[Op]) -> None:
        """Run one stream's ops on this thread. Raises what failed here or there."""
        with self.queues.on(ops[0].stream):
            for op in ops:
                for number in op.awaits:
                    self._await(op, number)
                start = self.queues.mark()
                sent_bytes = self.work(op)
                end = self.queues.mark()
                self._ran.append((op, start, end, sent_bytes))
                if op.signals:
                    self._raise(op.signals, end)
        self._end(ops[0].stream)

    def spans(self) -> list[Span]:
        """When each op ran, by number. Once all have and the queues have ended."""
        at, step = self.queues.nanoseconds, self.step
        ran = sorted(self._ran, key=lambda one: one[0].number)
        return [Span(op=op, start_ns=at(a), end_ns=at(b), sent_bytes=sent, step=step) for op, a, b, sent in ran]

    def run_beside(self, ops: Sequence[Op], *, grad: bool, inference: bool) -> None:
        """`run` on the communication thread, in the caller's autograd mode; an error goes to the caller."""
        with suppress(BaseException), torch.set_grad_enabled(grad), torch.inference_mode(inference):
            try:
                self.run(ops)
            except BaseException as error:
                self.fail(error)

    def await_other(self) -> None:
        """Wait until the communication stream has run all its ops."""
        with self._changed:
            self._wait(lambda: Stream.COMMUNICATION in self._ended, "the caller waits for the communication stream")

    def fail(self, error: BaseException) -> None:
        """End both streams; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _await(self, op: Op, number: int) -> None:
        with self._changed:
            self._waiting[op.stream] = number
            self._wait(lambda: number in self._raised, self._what(number))
            del self._waiting[op.stream]
        self.queues.wait(self._raised[number])

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        begun_ns = time.monotonic_ns()
        while not reached():
            if self._error is not None:
                raise self._error
            if self._stuck():
                waits = ", ".join(self._what(number) for number in self._waiting.values())
                raise PipelineError(f"pipeline: {waits}, and no stream is left to go on: the schedule is wrong")
            left_s = self.deadline_s - (time.monotonic_ns() - max(begun_ns, self._progress_ns)) * 1e-9
            if left_s <= 0:
                raise PipelineError(f"pipeline: {what}; the other stream has not moved for {self.deadline_s:g} s")
            self._changed.wait(left_s)
        if self._error is not None:
            raise self._error

    def _stuck(self) -> bool:
        """Whether every stream has ended, or waits for a semaphore that is down."""
        down = {stream for stream, number in self._waiting.items() if number not in self._raised}
        return bool(down) and all(stream in down or stream in self._ended for stream in self._streams)

    def _what(self, number: int) -> str:
        semaphore, ops = self.schedule.semaphores[number], self.schedule.ops
        return f"{ops[semaphore.target]} waits for {ops[semaphore.source]}"

    def _raise(self, numbers: Sequence[int], mark: object) -> None:
        with self._changed:
            self._raised.update(dict.fromkeys(numbers, mark))
            self._progress_ns = time.monotonic_ns()
            self._changed.notify_all()

    def _end(self, stream: Stream) -> None:
        with self._changed:
            self._ended.add(stream)
            self._changed.notify_all()
