"""One forward pass, recorded, and then its compute or its communication repeated alone.

Compute alone runs the same kernels in the same order on copies of the rows that had arrived; communication alone sends
and returns the same rows without computing anything. `bench.layer` times both beside the pass itself.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from bywash.exchange import Handle, Received
from bywash.moe import ExpertParallel
from bywash.moe.pipeline import Forward, Kind, Op
from bywash.routing import Routing

_Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a pass moved, by (layer, lane, chunk): rows sent and arrived, outputs sent and arrived."""

    sent: dict[_Key, tuple[Tensor, Routing]] = field(default_factory=dict)
    arrived: dict[_Key, Received] = field(default_factory=dict)
    computed: dict[_Key, Tensor] = field(default_factory=dict)
    returned: dict[_Key, Tensor] = field(default_factory=dict)


class RecordingForward(Forward):
    """A pass that keeps what it moves in `recorded`."""

    def __init__(self, *args: Any, recorded: Recorded, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorded = recorded

    def _dispatch(self, op: Op, lane: Any) -> None:
        super()._dispatch(op, lane)
        received = lane.chunks[op.chunk].received
        self._recorded.sent[_key(op)] = self._part(op, lane)
        self._recorded.arrived[_key(op)] = replace(received, rows_ND=received.rows_ND.clone())

    def _combine(self, op: Op, lane: Any) -> None:
        self._recorded.computed[_key(op)] = lane.chunks[op.chunk].y_MD
        super()._combine(op, lane)
        self._recorded.returned[_key(op)] = lane.chunks[op.chunk].out_TD


class ComputeAlone(Forward):
    """A pass that finds everything already arrived. Its compute ops are those of the real one."""

    def __init__(self, *args: Any, recorded: Recorded, **options: Any) -> None:
        super().__init__(*args, **options)
        self._recorded = recorded

    def _dispatch(self, op: Op, lane: Any) -> None:
        lane.chunks[op.chunk].received = self._recorded.arrived[_key(op)]

    def _combine(self, op: Op, lane: Any) -> None:
        lane.chunks[op.chunk].out_TD = self._recorded.returned[_key(op)]


class CommunicationAlone:
    """A pass that only moves: call it for the communication ops of the schedule."""

    def __init__(self, experts: dict[int, ExpertParallel], *, chunks: int, recorded: Recorded) -> None:
        self._experts, self._chunks, self._recorded = experts, chunks, recorded
        self._handles: dict[_Key, Handle] = {}

    def __call__(self, op: Op) -> int:
        """Dispatch the recorded rows, or return the recorded outputs."""
        layer, key = self._experts[op.layer], _key(op)
        if op.kind == Kind.DISPATCH:
            part = op.lane * self._chunks + op.chunk
            _, self._handles[key] = layer.dispatch(*self._recorded.sent[key], part=part)
        else:
            layer.exchange.combine(self._handles.pop(key), self._recorded.computed[key])
        return 0


def _key(op: Op) -> _Key:
    return op.layer, op.lane, op.chunk
