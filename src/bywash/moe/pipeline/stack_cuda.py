"""A synthetic stack of decoder layers on a GPU: what each op of a schedule launches, for each way the exchange can go.

A layer is norm, attention with a KV cache, residual, norm, router, experts, shared expert, residual; attention and
shared expert can be left out. Everything is real but the weights, which are random, and there is no rotary embedding. A
lane holds whole sequences; its chunks are *parts*: each has its tokens, its own exchange channel, and its own token
count on the device, so that one captured graph replays with other inputs and counts.

Where each stage runs its halves:

| op | `GatherForward` (copies) | `PeerForward` (kernels) |
|---|---|---|
| attention | attention; residual and norm into the rows that are sent | same |
| route | router; ready the flags | router |
| dispatch | copies | `dispatch_start` on `num_sms` |
| shared expert | one expert over the lane's own rows; or its two products, as two ops | same |
| experts | await rows and index; experts; add per token of other ranks | await rows and index; experts |
| combine | copies | `combine_start` on `num_sms` |
| finish | await sums, add them and own; residual and next norm | `combine_finish`; residual and next norm |

So on the communication stream nothing waits for another rank, and with copies nothing runs on a multiprocessor.
All of it gives a token the same bits whatever the split, the way, or its neighbours (see `attention_cuda` for decode).

Shapes: T tokens of a part, D hidden, E experts, L experts of this rank, K experts per token, M pairs computed here.
Knows nothing of streams. `run_cuda` calls it; `benchmarks/pipeline/gpu_overlap.py` builds it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.exchange.moves import GatherSteps
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import GENERATIONS
from bywash.exchange.peer_tensors import DeviceReceived
from bywash.kernels.add_norm import AddNorm
from bywash.kernels.router import Router
from bywash.moe.device_experts import DeviceExperts
from bywash.moe.device_layer import pairs_capacity
from bywash.moe.pipeline.attention_cuda import Attention
from bywash.moe.pipeline.schedule import Kind, Op, Split
from bywash.moe.pipeline.shared_cuda import SharedExpert, open_shared
from bywash.moe.pipeline.stack_sizes import StackSizes, StackWeights


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
    """One chunk of one lane. Rows past `count` are padding; `tokens` holds the real number on the device.

    Attributes:
        number: among all parts.
        span: its tokens.
        x_TD: hidden states, [count, D], a part of the lane's.
        rows_TD: their norms, which router, experts and shared expert read, with room for the largest part.
        ids_TK, weights_TK, out_TD, shared_TD: routing, what the experts and the shared one make of the rows.
        tokens: int32 [1].
        y_MD: the experts' outputs.
    """

    number: int
    span: slice
    x_TD: Tensor
    rows_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    out_TD: Tensor
    tokens: Tensor
    y_MD: Tensor
    shared_TD: Tensor | None = None
    received: DeviceReceived | None = None

    @property
    def count(self) -> int:
        """Tokens that the split gives it."""
        return int(self.span.stop - self.span.start)

    @property
    def generation(self) -> int:
        """Its channel of the exchange `number // GENERATIONS`."""
        return self.number % GENERATIONS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Lane:
    """One micro-batch: hidden states [tokens, D], their norms for attention likewise, and attention with its cache."""

    span: slice
    x_TD: Tensor
    h_TD: Tensor | None = None
    attention: Attention | None = None

    def of(self, tensor_TD: Tensor, part: _Part) -> Tensor:
        """The part's rows of a tensor that has the lane's."""
        return tensor_TD[part.span.start - self.span.start : part.span.stop - self.span.start]


class CudaForward:
    """The stages that do not depend on the way of the exchange. Call it as an executor's `work`."""

    def __init__(
        self, sizes: StackSizes, split: Split, weights: StackWeights, experts: Sequence[DeviceExperts], local: int
    ) -> None:
        """Hold the weights and experts of every layer; ways add their parts.

        Args:
            sizes, split: of the stack, and how its step is cut.
            weights: of this rank.
            experts: of each layer, with room for `pairs_capacity` of a part.
            local: L.

        Raises:
            ConfigError: lanes that cannot hold whole sequences.
        """
        self.sizes, self.split, self.local, self.weights = sizes, split, local, weights
        self._experts = experts
        self._route = Router(sizes.experts, sizes.top_k, sizes.hidden)
        self._add_norm = AddNorm(sizes.hidden)
        with torch.inference_mode(False):
            self.input_TD = torch.zeros(sizes.tokens, sizes.hidden, dtype=torch.bfloat16, device="cuda")
            self.output_TD = torch.zeros_like(self.input_TD)
        self.lanes, self._mixed_TD = self._open_lanes()
        self._shared = self._open_shared()
        self.parts: list[_Part] = []

    def _open_lanes(self) -> tuple[list[_Lane], Tensor | None]:
        """Lanes, and a buffer for attention's output that they share, since they compute in turn."""
        sizes, spans, heads = self.sizes, self.sizes.lanes(self.split), self.sizes.attention
        counts = [span.stop - span.start for span in spans]

        def zeros(rows: int, columns: int) -> Tensor:
            return torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")

        with torch.inference_mode(False):
            states = [zeros(count, sizes.hidden) for count in counts]
            if heads is None:
                return [_Lane(span=span, x_TD=x_TD) for span, x_TD in zip(spans, states, strict=True)], None
            scratch_q, weights = zeros(max(counts), heads.q_size), self.weights.attention
            lanes = [
                _Lane(
                    span=span,
                    x_TD=x_TD,
                    h_TD=torch.zeros_like(x_TD),
                    attention=Attention(heads, weights, x_TD.shape[0], scratch_q=scratch_q),
                )
                for span, x_TD in zip(spans, states, strict=True)
            ]
            return lanes, zeros(max(counts), sizes.hidden)

    def _open_shared(self) -> list[SharedExpert]:
        """The shared expert of every layer, if there is one."""
        sizes, weights = self.sizes, self.weights
        if not sizes.shared_inner:
            return []
        decode = sizes.attention is not None and sizes.attention.cached > 0 and len(sizes.parts(self.split)) == 1
        pairs = list(zip(weights.shared_gate_up, weights.shared_down, strict=True))
        return open_shared(pairs, part_tokens(sizes, self.split), one_part=decode)

    def _add_part(
        self, number: int, rows_TD: Tensor, out_TD: Tensor, y_MD: Tensor, ids: Tensor, weights: Tensor
    ) -> None:
        """Hold what the way has made of a part, and whatever all ways need."""
        span, lane = self.sizes.parts(self.split)[number], self.lanes[number // self.split.chunks]
        part = _Part(
            number=number,
            span=span,
            x_TD=lane.x_TD[span.start - lane.span.start : span.stop - lane.span.start],
            rows_TD=rows_TD,
            ids_TK=ids,
            weights_TK=weights,
            out_TD=out_TD,
            tokens=torch.full((1,), span.stop - span.start, dtype=torch.int32, device="cuda"),
            y_MD=y_MD,
            shared_TD=torch.zeros_like(rows_TD) if self.sizes.shared_inner else None,
        )
        self.parts.append(part)

    def begin(self) -> None:
        """Launch the copy of `input_TD` into the lanes and the first norm. Before the schedule, on its first stream."""
        for lane in self.lanes:
            lane.x_TD.copy_(self.input_TD[lane.span])
        for part in self.parts:
            self._norm_for(0, part)

    def end(self) -> None:
        """Launch the copy of the lanes into `output_TD`. After the schedule, on the stream that it joins."""
        for lane in self.lanes:
            self.output_TD[lane.span].copy_(lane.x_TD)

    def set_counts(self, tokens: int) -> None:
        """Let only the first `tokens` of the input be real; parts past them have none, but take part."""
        for part in self.parts:
            part.tokens.fill_(min(max(tokens - part.span.start, 0), part.count))

    def __call__(self, op: Op) -> None:
        """Launch the op on torch's current stream."""
        if op.kind == Kind.ATTENTION:
            self.attention(op, self.lanes[op.lane])
            return
        for part in [self._part(op)] if op.kind in _OF_CHUNK else self._lane(op):
            getattr(self, _METHOD[op.kind])(op, part)

    def _part(self, op: Op) -> _Part:
        return self.parts[op.lane * self.split.chunks + op.chunk]

    def _lane(self, op: Op) -> list[_Part]:
        return self.parts[op.lane * self.split.chunks : (op.lane + 1) * self.split.chunks]

    def attention(self, op: Op, lane: _Lane) -> None:
        """Attention of the lane; residual and the norm before the experts."""
        assert lane.attention is not None
        assert lane.h_TD is not None
        assert self._mixed_TD is not None
        mixed_TD = self._mixed_TD[: lane.x_TD.shape[0]]
        lane.attention(op.layer, lane.h_TD, mixed_TD)
        for part in self._lane(op):
            weight_D, rows_TD = self.weights.norm[op.layer], part.rows_TD[: part.count]
            self._add_norm(part.x_TD, lane.of(mixed_TD, part), weight_D=weight_D, h_TD=rows_TD)

    def route(self, op: Op, part: _Part) -> None:
        """Router."""
        self._route(part.rows_TD, self.weights.router[op.layer], part.ids_TK, part.weights_TK)

    def shared(self, op: Op, part: _Part) -> None:
        """The shared expert or one of its products, over the rows that are real."""
        assert part.shared_TD is not None
        first, last = _SHARED_STAGES[op.kind]
        self._shared[op.layer](part.rows_TD, part.tokens, part.shared_TD, first=first, last=last)

    def _compute(self, op: Op, part: _Part, received: DeviceReceived) -> None:
        pairs = part.y_MD.shape[0]
        self._experts[op.layer](received.rows_PD, received.index_M[:pairs], received.ends_L[: self.local], part.y_MD)

    def _norm_for(self, layer: int, part: _Part, *added_TD: Tensor | None) -> None:
        """Add to the hidden states, and make the norm that `layer` begins with; after the last one, none."""
        weights, lane = self.weights, self.lanes[part.number // self.split.chunks]
        norm: dict[str, Tensor] = {}
        if layer < self.sizes.layers and lane.h_TD is None:
            norm = {"weight_D": weights.norm[layer], "h_TD": part.rows_TD[: part.count]}
        elif layer < self.sizes.layers and lane.h_TD is not None:
            norm = {"weight_D": weights.attention_norm[layer], "h_TD": lane.of(lane.h_TD, part)}
        added = [None if one is None else one[: part.count] for one in added_TD]
        self._add_norm(part.x_TD, *added, tokens=part.tokens, **norm)


_OF_CHUNK = (Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE)
_METHOD = {
    Kind.ROUTE: "route",
    Kind.DISPATCH: "dispatch",
    Kind.SHARED: "shared",
    Kind.SHARED_UP: "shared",
    Kind.SHARED_DOWN: "shared",
    Kind.EXPERTS: "compute",
    Kind.COMBINE: "combine",
    Kind.FINISH: "finish",
}
_SHARED_STAGES = {Kind.SHARED: (0, 1), Kind.SHARED_UP: (0, 0), Kind.SHARED_DOWN: (1, 1)}
"""First and last of the two products."""


def devices_needed(split: Split) -> int:
    """Exchanges to open: each has a channel for `GENERATIONS` parts."""
    return -(-split.lanes * split.chunks // GENERATIONS)


def part_tokens(sizes: StackSizes, split: Split) -> int:
    """Tokens that the exchange of a part needs room for."""
    return max(int(part.stop - part.start) for part in sizes.parts(split))


class GatherForward(CudaForward):
    """All-gather and reduce-scatter by copies, whatever way they take (`exchange.moves`)."""

    def __init__(
        self,
        sizes: StackSizes,
        split: Split,
        weights: StackWeights,
        experts: Sequence[DeviceExperts],
        local: int,
        devices: Sequence[GatherSteps],
    ) -> None:
        """As `CudaForward`; `devices` are `devices_needed`, opened for `part_tokens`."""
        super().__init__(sizes, split, weights, experts, local)
        self._devices = _checked(devices, sizes, split)
        pairs = pairs_capacity(devices[0].layout, local)
        with torch.inference_mode(False):
            for number in range(split.lanes * split.chunks):
                rows_TD, ids_TK, weights_TK = devices[number // GENERATIONS].inputs(number % GENERATIONS)
                y_MD = torch.zeros(pairs, sizes.hidden, dtype=torch.bfloat16, device="cuda")
                self._add_part(number, rows_TD, torch.zeros_like(rows_TD), y_MD, ids_TK, weights_TK)

    def _device(self, part: _Part) -> GatherSteps:
        return self._devices[part.number // GENERATIONS]

    def route(self, op: Op, part: _Part) -> None:
        """Router, straight into the heap; flags ready to go."""
        super().route(op, part)
        self._device(part).prepare(part.tokens, part.generation)

    def dispatch(self, op: Op, part: _Part) -> None:
        """Copies only."""
        self._device(part).move_rows(part.generation)

    def compute(self, op: Op, part: _Part) -> None:
        """Await rows, index, experts, sums for others."""
        device = self._device(part)
        self._compute(op, part, device.receive(part.generation))
        device.add(part.y_MD, part.generation)

    def combine(self, op: Op, part: _Part) -> None:
        """Copies only."""
        self._device(part).move_sums(part.generation)

    def finish(self, op: Op, part: _Part) -> None:
        """Await sums, add, residual and norm."""
        self._device(part).finish(part.out_TD, part.generation)
        self._norm_for(op.layer + 1, part, part.out_TD, part.shared_TD)


class PeerForward(CudaForward):
    """Deduplicated all-to-all by kernels (`PeerDevice`). Without overlap both halves are one kernel each."""

    def __init__(
        self,
        sizes: StackSizes,
        split: Split,
        weights: StackWeights,
        experts: Sequence[DeviceExperts],
        local: int,
        devices: Sequence[PeerDevice],
        *,
        counts_first: bool = True,
    ) -> None:
        """As `CudaForward`; `devices` are `devices_needed`, opened for `part_tokens`."""
        super().__init__(sizes, split, weights, experts, local)
        self._devices, self._counts_first = _checked(devices, sizes, split), counts_first
        room, pairs = devices[0].layout.tokens, pairs_capacity(devices[0].layout, local)
        with torch.inference_mode(False):
            for number in range(split.lanes * split.chunks):
                rows_TD = torch.zeros(room, sizes.hidden, dtype=torch.bfloat16, device="cuda")
                ids_TK = torch.zeros(room, sizes.top_k, dtype=torch.int64, device="cuda")
                weights_TK = torch.zeros(room, sizes.top_k, dtype=torch.float32, device="cuda")
                y_MD = torch.zeros(pairs, sizes.hidden, dtype=torch.bfloat16, device="cuda")
                self._add_part(number, rows_TD, rows_TD, y_MD, ids_TK, weights_TK)

    def _device(self, part: _Part) -> PeerDevice:
        return self._devices[part.number // GENERATIONS]

    def dispatch(self, op: Op, part: _Part) -> None:
        """Send rows; without overlap also receive them."""
        device = self._device(part)
        call = device.dispatch_start if self.split.overlapped else device.dispatch
        part.received = call(
            part.rows_TD,
            part.ids_TK,
            part.weights_TK,
            tokens=part.tokens,
            generation=part.generation,
            counts_first=self._counts_first,
        )

    def compute(self, op: Op, part: _Part) -> None:
        """Await rows, index, experts."""
        received = part.received or self._device(part).dispatch_finish(part.generation)
        part.received = None
        self._compute(op, part, received)

    def combine(self, op: Op, part: _Part) -> None:
        """Send sums; without overlap also add them."""
        device = self._device(part)
        call = device.combine_start if self.split.overlapped else device.combine
        part.out_TD = call(part.y_MD, generation=part.generation)

    def finish(self, op: Op, part: _Part) -> None:
        """Await sums, residual and norm."""
        if self.split.overlapped:
            self._device(part).combine_finish(part.generation)
        self._norm_for(op.layer + 1, part, part.out_TD, part.shared_TD)


Device = TypeVar("Device", GatherSteps, PeerDevice)


def _checked(devices: Sequence[Device], sizes: StackSizes, split: Split) -> list[Device]:
    if len(devices) != devices_needed(split) or devices[0].layout.tokens < part_tokens(sizes, split):
        raise ConfigError(
            f"stack: {len(devices)} exchanges for {devices[0].layout.tokens} tokens; {split} needs "
            f"{devices_needed(split)} for {part_tokens(sizes, split)}"
        )
    return list(devices)
