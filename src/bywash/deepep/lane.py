"""The stream that DeepEP calls run on beside the caller's, and who waits for whom.

On GPUs one stream per buffer for calls that are asynchronous; others, and all on CPUs, run where they are called. Knows
nothing of rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bywash.deepep.event import EventHandle, EventOverlap


@dataclass(slots=True)
class Call:
    """One call under way. `gives` collects its results; `event` is there when the block has ended."""

    gives: list[Tensor | None] = field(default_factory=list)
    event: EventOverlap = field(default_factory=EventOverlap)


class Lane:
    """Where calls of one buffer run: a call that its caller waits for on the caller's stream, others on a stream of
    their own. Each follows the one before it, since they share buffers."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Stream | None = None

    @property
    def stream(self) -> torch.cuda.Stream:
        """The communication stream, made when it is first asked for."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream

    @contextmanager
    def call(
        self, takes: Sequence[Tensor | None], after: Sequence[EventHandle | None], *, is_async: bool
    ) -> Iterator[Call]:
        """Run the block.

        Args:
            takes: tensors that the block reads, made on the caller's stream.
            after: points to wait for; without any, all that the caller's stream was given so far.
            is_async: leave the waiting for results to whoever uses the event; else the caller's stream waits.
        """
        call = Call()
        if not any(tensor is not None and tensor.is_cuda for tensor in takes):
            yield call
            return
        caller = torch.cuda.current_stream()
        events = [event for event in after if event is not None]
        if not is_async:
            self._follow(caller)
            for event in events:
                event.current_stream_wait()
            yield call
            return
        own = self.stream
        if not events:
            own.wait_stream(caller)
        with torch.cuda.stream(own):
            self._follow(own)
            for event in events:
                event.current_stream_wait()
            yield call
            call.event = EventOverlap(EventHandle())
        # The allocator must not give memory away that the other stream still uses.
        for tensors, user in ((takes, own), (call.gives, caller)):
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(user)

    def settle(self) -> None:
        """Let the host wait for the last call, on whichever stream it ran."""
        if self._last is not None:
            self._last.synchronize()

    def _follow(self, stream: torch.cuda.Stream) -> None:
        """Let `stream`, the current one, wait for the call before this. A capture begins when that one has ended."""
        last, self._last = self._last, stream
        if last is None or last == stream:
            return
        if torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(last):
                if not torch.cuda.is_current_stream_capturing():
                    return
        stream.wait_stream(last)
