"""What each op of a schedule does to one rank's tokens: stages of layers, exchanges of `ExpertParallel`.

The state of a forward pass between its stages, so that an executor can call them in any order that the schedule allows.
A lane is a list of batches of fixed shape; its tokens travel together. Any object with the stages of `LayerStages` is a
layer: `models.stages.DecoderLayer`, or the synthetic one of `bench.layer`.

Shapes: T tokens of a lane or chunk, D hidden, K experts per token.
Knows nothing of threads, and of streams only that memory outlives all that read it. `run_threads` calls it from two
threads, never twice at once for one lane and chunk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.errors import PipelineError
from bywash.exchange import Handle, Received
from bywash.moe.layer import ExpertParallel
from bywash.moe.pipeline.schedule import Kind, LayerForm, Op
from bywash.routing import Routing

Value = TypeVar("Value")


class LayerStages(Protocol):
    """A decoder layer as stages that read and write a batch's residual stream."""

    form: LayerForm

    def attention(self, batch: Any) -> None:
        """Norm, attention, residual."""

    def route(self, batch: Any) -> tuple[Tensor, Routing]:
        """[T, D] of the tokens to route, and their routing."""

    def shared_expert(self, batch: Any) -> Tensor | None:
        """What the expert that every token visits gives."""

    def shared_up(self, batch: Any) -> Tensor:
        """The first half of `shared_expert`: its gate and up products, multiplied."""

    def shared_down(self, batch: Any, inner: Tensor) -> Tensor:
        """The second half, from what the first one gave."""

    def finish(self, batch: Any, routed_TD: Tensor, shared: Tensor | None) -> None:
        """Add what the experts gave to the residual stream."""


class DenseStages(LayerStages, Protocol):
    """A layer whose form says that it has no experts."""

    def dense(self, batch: Any) -> None:
        """The MLP instead of them, with norm and residual."""


@dataclass(slots=True)
class _Chunk:
    """One exchange step of a lane."""

    received: Received | None = None
    handle: Handle | None = None
    y_MD: Tensor | None = None
    out_TD: Tensor | None = None


@dataclass(slots=True)
class _Lane:
    """A lane between two stages of one layer."""

    batches: Sequence[Any]
    chunks: list[_Chunk]
    routed: list[tuple[Tensor, Routing]] = field(default_factory=list)
    joined: tuple[Tensor, Routing] | None = None
    shared: list[Tensor | None] = field(default_factory=list)
    rows_R: NDArray[np.int64] | None = None


Routed = Callable[[int, Routing, NDArray[np.int64]], None]
"""(layer, routing of all local tokens, expert rows that each rank computes), after each MoE layer."""


class Forward:
    """One forward pass of one rank. Make a new one for every pass; call it as an executor's `work`."""

    def __init__(
        self,
        layers: Sequence[LayerStages],
        experts: Mapping[int, ExpertParallel],
        lanes: Sequence[Sequence[Any]],
        *,
        chunks: int = 1,
        nothing: Callable[[int], tuple[Tensor, Routing]],
        reuse_plan: bool = False,
        on_routed: Routed | None = None,
    ) -> None:
        """Take the batches as they stand before the first layer.

        Args:
            layers: the stages of each layer.
            experts: layer index to its expert-parallel layer.
            lanes: the batches of each lane; a lane may have none, but all ranks have the same number of lanes.
            chunks: exchanges that a lane's tokens are split into.
            nothing: layer index to the rows and routing of a lane without batches, which takes part all the same.
            reuse_plan: see `ExpertParallel`.
            on_routed: hook for traces.
        """
        self._layers, self._experts, self._chunks = layers, experts, chunks
        self._lanes = [_Lane(batches, [_Chunk() for _ in range(chunks)]) for batches in lanes]
        self._nothing, self._reuse_plan, self._on_routed = nothing, reuse_plan, on_routed
        self._routings: dict[int, list[tuple[Routing, NDArray[np.int64]] | None]] = {}
        self._do = {
            Kind.ATTENTION: self._attention,
            Kind.DENSE: self._dense,
            Kind.ROUTE: self._route,
            Kind.DISPATCH: self._dispatch,
            Kind.SHARED: self._shared,
            Kind.SHARED_UP: self._shared_up,
            Kind.SHARED_DOWN: self._shared_down,
            Kind.EXPERTS: self._compute,
            Kind.COMBINE: self._combine,
            Kind.FINISH: self._finish,
        }

    def __call__(self, op: Op) -> int:
        """Do what `op` is; returns the bytes that it sent to other ranks.

        Raises:
            PipelineError: it comes before its input is there.
            BywashError: see `ExpertParallel` and the layer's stages.
        """
        if not op.kind.communicates:
            self._do[op.kind](op, self._lanes[op.lane])
            return 0
        traffic = self._experts[op.layer].exchange.traffic
        before = traffic.wire_bytes
        self._do[op.kind](op, self._lanes[op.lane])
        return traffic.wire_bytes - before

    def _attention(self, op: Op, lane: _Lane) -> None:
        for batch in lane.batches:
            self._layers[op.layer].attention(batch)

    def _dense(self, op: Op, lane: _Lane) -> None:
        layer = cast(DenseStages, self._layers[op.layer])  # other forms have no such op
        for batch in lane.batches:
            layer.dense(batch)

    def _route(self, op: Op, lane: _Lane) -> None:
        lane.routed = [self._layers[op.layer].route(batch) for batch in lane.batches]
        lane.joined = _joined(lane.routed) if lane.routed else self._nothing(op.layer)

    def _shared(self, op: Op, lane: _Lane) -> None:
        lane.shared = [self._layers[op.layer].shared_expert(batch) for batch in lane.batches]

    def _shared_up(self, op: Op, lane: _Lane) -> None:
        lane.shared = [self._layers[op.layer].shared_up(batch) for batch in lane.batches]

    def _shared_down(self, op: Op, lane: _Lane) -> None:
        halves = zip(lane.batches, lane.shared, strict=True)
        lane.shared = [self._layers[op.layer].shared_down(batch, _given(inner, op)) for batch, inner in halves]

    def _dispatch(self, op: Op, lane: _Lane) -> None:
        x_TD, routing = self._part(op, lane)
        _used_here(x_TD, routing.ids_TK, routing.weights_TK)
        layer, number = self._experts[op.layer], op.lane * self._chunks + op.chunk
        chunk = lane.chunks[op.chunk]
        chunk.received, chunk.handle = layer.dispatch(x_TD, routing, reuse_plan=self._reuse_plan, part=number)
        rows_R = layer.loads[number]
        lane.rows_R = rows_R if lane.rows_R is None else lane.rows_R + rows_R

    def _part(self, op: Op, lane: _Lane) -> tuple[Tensor, Routing]:
        """The op's chunk of the lane's tokens: consecutive ones, as equal as can be. Example: 7 in 3 are 2, 2, 3."""
        x_TD, routing = _given(lane.joined, op)
        part = slice(*(routing.tokens * (op.chunk + i) // self._chunks for i in (0, 1)))
        return x_TD[part], Routing(
            ids_TK=routing.ids_TK[part], weights_TK=routing.weights_TK[part], num_experts=routing.num_experts
        )

    def _compute(self, op: Op, lane: _Lane) -> None:
        chunk = lane.chunks[op.chunk]
        received = _given(chunk.received, op)
        _used_here(received.rows_ND, received.ids_NK, received.weights_NK)
        chunk.y_MD = self._experts[op.layer].compute(received)
        chunk.received = None  # its rows may be overwritten once combine begins

    def _combine(self, op: Op, lane: _Lane) -> None:
        chunk, number = lane.chunks[op.chunk], op.lane * self._chunks + op.chunk
        outputs = [_given(chunk.y_MD, op)]
        _used_here(*outputs)
        chunk.y_MD = None  # the layer frees them before it computes more
        chunk.out_TD = self._experts[op.layer].combine(_given(chunk.handle, op), outputs.pop(), part=number)
        chunk.handle = None

    def _finish(self, op: Op, lane: _Lane) -> None:
        outs = [_given(chunk.out_TD, op) for chunk in lane.chunks]
        _used_here(*outs)
        for chunk in lane.chunks:
            chunk.out_TD = None
        if lane.routed:
            out_TD = outs[0] if len(outs) == 1 else torch.cat(outs)
            parts = out_TD.split([routing.tokens for _, routing in lane.routed])
            shared = lane.shared or [None] * len(parts)
            for batch, part, extra in zip(lane.batches, parts, shared, strict=True):
                self._layers[op.layer].finish(batch, part, extra)
        self._report(op, lane)
        lane.routed, lane.joined, lane.shared, lane.rows_R = [], None, [], None

    def _report(self, op: Op, lane: _Lane) -> None:
        """Once the last lane has finished a layer, tell the hook what was routed, lanes in order."""
        if self._on_routed is None:
            return
        of_lanes = self._routings.setdefault(op.layer, [None] * len(self._lanes))
        of_lanes[op.lane] = (_given(lane.joined, op)[1], _given(lane.rows_R, op))
        done = [one for one in of_lanes if one is not None]
        if len(done) == len(of_lanes):
            del self._routings[op.layer]
            rows_R = np.sum([rows_R for _, rows_R in done], axis=0)
            self._on_routed(op.layer, _joined_routing([routing for routing, _ in done]), rows_R)


def _joined(routed: Sequence[tuple[Tensor, Routing]]) -> tuple[Tensor, Routing]:
    """All batches' tokens as one."""
    if len(routed) == 1:
        return routed[0]
    return torch.cat([x_TD for x_TD, _ in routed]), _joined_routing([routing for _, routing in routed])


def _joined_routing(parts: Sequence[Routing]) -> Routing:
    return Routing(
        ids_TK=torch.cat([part.ids_TK for part in parts]),
        weights_TK=torch.cat([part.weights_TK for part in parts]),
        num_experts=parts[0].num_experts,
    )


def _used_here(*tensors: Tensor) -> None:
    """On a GPU: memory that another stream's allocation gave is not reused before this stream has read it."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _given(value: Value | None, op: Op) -> Value:
    if value is None:
        raise PipelineError(f"pipeline: {op} began before its input was there: the schedule lacks a semaphore")
    return value
