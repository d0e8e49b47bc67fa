"""Run a schedule on a GPU: one CUDA stream for compute, one of higher priority for communication, no host in between.

The host only launches, in the order in which the schedule lists the ops; `capture` does that once, into one CUDA graph
of the whole step, and replaying it is one call. A semaphore is an event recorded by its source and waited for by its
target's stream, and in the graph an edge. Edges rather than words in memory that streams write and await
(`cuStreamWriteValue`, `cuStreamWaitValue`), because values are baked into a captured graph, so every replay would have
to take all words down again; because a wait without a clock hangs where an edge cannot be forgotten; and because the
driver may put streams of a graph into one queue, where a wait stands in front of what it waits for: `check` proves
that the schedule itself has no circle. Order between devices is the exchange's, by flags with epochs and deadlines.

Nothing can wait for ever on one device: ops are launched in an order that respects every dependency, so of all that
have not ended the first one launched can run. Kernels that wait for peers do so in the same order on every rank
(`moves`).

Knows nothing of layers or tokens: `work(op)` launches what an op is on torch's current stream. `run_threads` runs the
same schedule on threads.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from bywash.errors import ConfigError, PipelineError
from bywash.moe.pipeline.schedule import Op, Schedule, Stream

Launch = Callable[[Op], object]
"""Launches what an op is on torch's current stream and waits for nothing."""

_PRIORITY = {Stream.COMPUTE: 0, Stream.COMMUNICATION: -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaStep:
    """A captured step: `replay` launches it on torch's current stream.

    Attributes:
        graph: of all ops.
        schedule: what it runs.
    """

    graph: torch.cuda.CUDAGraph
    schedule: Schedule

    def replay(self) -> None:
        """Launch the step; inputs are read where they were captured."""
        self.graph.replay()


class CudaExecutor:
    """Launches schedules on the current device.

    Example:
        >>> executor = CudaExecutor()
        >>> executor.run(schedule, forward)  # once eagerly: compiles, fills caches
        >>> step = executor.capture(schedule, forward)
        >>> step.replay()
    """

    def __init__(self) -> None:
        """Make the streams.

        Raises:
            ConfigError: no CUDA device.
        """
        if not torch.cuda.is_available():
            raise ConfigError("pipeline: no CUDA device is visible; ThreadExecutor runs the same schedule on threads")
        self._streams = {stream: torch.cuda.Stream(priority=priority) for stream, priority in _PRIORITY.items()}

    def run(self, schedule: Schedule, work: Launch, *, leave_out: Collection[int] = ()) -> None:
        """Launch every op now, between what torch's current stream holds and what it is given afterwards.

        Args:
            schedule: from `build_schedule`.
            work: called once for each op, in the schedule's order.
            leave_out: for tests: numbers of semaphores to do without.

        Raises:
            BywashError: whatever `work` raised.
        """
        self._launch(schedule, work, leave_out)

    def capture(
        self,
        schedule: Schedule,
        work: Launch,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
        leave_out: Collection[int] = (),
    ) -> CudaStep:
        """The whole step as one CUDA graph. `work` must have run once, so that nothing is compiled or allocated anew.

        Args:
            schedule, work, leave_out: see `run`.
            before, after: launch what the step begins and ends with, such as copying its input into place.

        Raises:
            PipelineError: CUDA refused the capture; some op waited for the host or used another stream.
            BywashError: whatever `work` raised.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # NCCL's own thread asks about events, which a capture in the default mode forbids to all threads.
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                if before is not None:
                    before()
                self._launch(schedule, work, leave_out)
                if after is not None:
                    after()
        except RuntimeError as error:
            raise PipelineError(f"pipeline: the step cannot be captured in a CUDA graph: {error}") from error
        return CudaStep(graph=graph, schedule=schedule)

    def _launch(self, schedule: Schedule, work: Launch, leave_out: Collection[int]) -> None:
        origin = torch.cuda.current_stream()
        used = [self._streams[stream] for stream in Stream if schedule.on(stream)]
        for stream in used:
            stream.wait_stream(origin)
        raised: dict[int, torch.cuda.Event] = {}
        for op in schedule.ops:
            stream = self._streams[op.stream]
            with torch.cuda.stream(stream):
                for number in op.awaits:
                    if number not in leave_out:
                        stream.wait_event(raised[number])
                work(op)
                for number in op.signals:
                    raised[number] = stream.record_event()
        for stream in used:
            origin.wait_stream(stream)
