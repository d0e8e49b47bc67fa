"""Events, as DeepEP hands them out: when a dispatch or combine on the communication stream is done.

On CPUs a call returns when it is done, so its event has nothing to wait for. Knows nothing of rows.
"""

from typing import Any, Self

import torch


class EventHandle:
    """A point on the current stream, recorded when this is made."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Let the current stream wait for the point; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class EventOverlap:
    """What a call returns last. `with event: ...` waits at the end of the block.

    Attributes:
        event: the point to wait for; None where nothing has to be waited for.
    """

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait until the call's results are there."""
        if self.event is not None:
            self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def wait(self) -> None:
        """The same as `current_stream_wait`."""
        self.current_stream_wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.current_stream_wait()
