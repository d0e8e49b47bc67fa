"""What an op's work is queued on, when two threads of a host run a schedule: nothing on CPUs, CUDA streams on a GPU.

On CPUs work is done when the call returns, so a flag between the threads orders it, and the clock of the host times it.
On a GPU a call only launches: each stream of the schedule is a CUDA stream, a semaphore is an event besides the flag,
and events on the streams time the ops.
Knows nothing of schedules. `run_threads` calls it.
"""

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Protocol, TypeVar

import torch

from bywash.moe.pipeline.schedule import Stream

Mark = TypeVar("Mark")


class Queues(Protocol[Mark]):
    """One step at a time: `begin`, then both threads, then `end` and `nanoseconds`."""

    def begin(self) -> None:
        """By the caller, before either thread works."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """What the thread that runs `stream` works under."""

    def mark(self) -> Mark:
        """Now, on the calling thread's stream."""

    def wait(self, mark: Mark) -> None:
        """Let the calling thread's stream go on only behind `mark`, which may be another stream's."""

    def end(self) -> None:
        """By the caller, when both threads have ended: what it queues from now on comes behind all of the step."""

    def nanoseconds(self, mark: Mark) -> int:
        """When that was, on CLOCK_MONOTONIC. After `end`."""


class HostQueues:
    """Nothing is queued."""

    def begin(self) -> None:
        """Nothing to do."""

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Nothing to enter."""
        return nullcontext()

    def mark(self) -> int:
        """CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def wait(self, mark: int) -> None:
        """It has been."""

    def end(self) -> None:
        """Nothing to join."""

    def nanoseconds(self, mark: int) -> int:
        """The mark."""
        return mark


class CudaQueues:
    """The caller's current stream computes; communication has one of its own, of higher priority."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of everything that the step works on."""
        self._device = device
        self._communication = torch.cuda.Stream(device, priority=-1)
        self._origin = torch.cuda.current_stream(device)
        self._began_ns = 0

    def begin(self) -> None:
        """Waits for the device, so that its clock and the host's can be related."""
        self._origin = torch.cuda.current_stream(self._device)
        self._first = self.mark()
        self._first.synchronize()
        self._began_ns = time.monotonic_ns()
        self._communication.wait_stream(self._origin)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """The device and the stream: both are a thread's own, so the communication thread has to be told."""
        entered = ExitStack()
        entered.enter_context(torch.cuda.device(self._device))
        entered.enter_context(
            torch.cuda.stream(self._communication if stream == Stream.COMMUNICATION else self._origin)
        )
        return entered

    def mark(self) -> torch.cuda.Event:
        """An event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """The stream waits, not the host."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def end(self) -> None:
        """Waits for the device, whose clock is then read."""
        self._origin.wait_stream(self._communication)
        self._origin.synchronize()

    def nanoseconds(self, mark: torch.cuda.Event) -> int:
        """To about half a microsecond."""
        milliseconds: float = self._first.elapsed_time(mark)
        return self._began_ns + round(milliseconds * 1e6)
