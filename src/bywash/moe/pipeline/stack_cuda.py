"""A synthetic stack of MoE layers on a GPU: what each op of a schedule launches, for each way the exchange can go.

A layer is router, experts, residual (and, if asked for, a dense product with residual in attention's place). Everything
is real but the weights, which are random. A lane's chunks are *parts*: each has its tokens, its hidden states, its own
exchange channel, and its own token count on the device, so that one captured graph replays with other inputs and
counts.

Where each stage runs its halves:

| op | `GatherForward` (copies) | `PeerForward` (kernels) |
|---|---|---|
| route | router; ready the flags | router |
| dispatch | copies | `dispatch_start` on `num_sms` |
| experts | await rows and index; experts; add per token | await rows and index; experts |
| combine | copies | `combine_start` on `num_sms` |
| finish | await sums and add; residual | `combine_finish`; residual |

So on the communication stream nothing waits for another rank, and with copies nothing runs on a multiprocessor.
All of it is row-independent: a token's hidden state has the same bits whatever the split, the way, or its neighbours.

Shapes: T tokens of a part, D hidden, F intermediate, G = 2F, E experts, L experts of this rank, K experts per token,
M pairs computed here.
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
from bywash.kernels.router import Router
from bywash.moe.device_experts import DeviceExperts
from bywash.moe.device_layer import pairs_capacity
from bywash.moe.pipeline.schedule import Kind, LayerForm, Op, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSizes:
    """What the stack is made of.

    Attributes:
        layers, experts, top_k, hidden, inner: of the model.
        tokens: the most of one rank.
        attention: whether a D x D product stands in attention's place. It is not row-independent: cuBLAS picks its
            tiles by the number of rows.
    """

    layers: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    tokens: int
    attention: bool = False

    @property
    def form(self) -> LayerForm:
        """Of every layer."""
        return LayerForm(attention=self.attention)

    def parts(self, split: Split) -> list[slice]:
        """Tokens of each part, lane by lane. Example: 7 tokens in 3 lanes are 2, 2, 3."""
        lanes = _cut(0, self.tokens, split.lanes)
        return [part for lane in lanes for part in _cut(lane.start, lane.stop, split.chunks)]


def _cut(start: int, stop: int, count: int) -> list[slice]:
    size = stop - start
    return [slice(start + size * i // count, start + size * (i + 1) // count) for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackWeights:
    """One rank's weights, bfloat16: gate and up [L, G, D], down [L, D, F], router [E, D], dense [D, D] by layer."""

    gate_up: Sequence[Tensor]
    down: Sequence[Tensor]
    router: Sequence[Tensor]
    dense: Sequence[Tensor]


_DOWN_SCALE, _DENSE_SCALE = 0.35, 0.25


def random_weights(sizes: StackSizes, local_experts: int, rank: int, seed: int = 0) -> StackWeights:
    """Random weights; the router's and the dense ones are equal on all ranks.

    The stack has no norms and SwiGLU squares its input, so states that grow a little soon overflow: `down` is scaled
    so that a layer adds about 8 % of a state's norm, which 16 layers raise by 6 %. Much less would drown in the
    rounding of the residual.
    """

    def draw(shape: tuple[int, ...], fan_in: int, own_seed: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator(device="cuda").manual_seed(own_seed)
        empty = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return empty.normal_(0, scale * fan_in**-0.5, generator=generator)

    d, f, layers = sizes.hidden, sizes.inner, range(sizes.layers)
    base = 1_000_003 * seed
    return StackWeights(
        gate_up=[draw((local_experts, 2 * f, d), d, base + 101 * i + 10 * rank + 1) for i in layers],
        down=[draw((local_experts, d, f), f, base + 101 * i + 10 * rank + 2, _DOWN_SCALE) for i in layers],
        router=[draw((sizes.experts, d), d, base + 101 * i + 99) for i in layers],
        dense=[draw((d, d), d, base + 101 * i + 98, _DENSE_SCALE) for i in layers if sizes.attention],
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
    """One chunk of one lane. Rows past `count` are padding; `tokens` holds the real number on the device."""

    number: int
    span: slice
    hidden_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    out_TD: Tensor
    tokens: Tensor
    y_MD: Tensor
    received: DeviceReceived | None = None

    @property
    def count(self) -> int:
        """Tokens that the split gives it."""
        return int(self.span.stop - self.span.start)

    @property
    def generation(self) -> int:
        """Its channel of the exchange `number // GENERATIONS`."""
        return self.number % GENERATIONS


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
        """
        self.sizes, self.split, self.local = sizes, split, local
        self._weights, self._experts = weights, experts
        self._route = Router(sizes.experts, sizes.top_k, sizes.hidden)
        with torch.inference_mode(False):
            self.input_TD = torch.zeros(sizes.tokens, sizes.hidden, dtype=torch.bfloat16, device="cuda")
            self.output_TD = torch.zeros_like(self.input_TD)
        self.parts: list[_Part] = []

    def begin(self) -> None:
        """Launch the copy of `input_TD` into the parts. Before the schedule, on the stream it starts from."""
        for part in self.parts:
            part.hidden_TD[: part.count].copy_(self.input_TD[part.span])

    def end(self) -> None:
        """Launch the copy of the parts into `output_TD`. After the schedule, on the stream that it joins."""
        for part in self.parts:
            self.output_TD[part.span].copy_(part.hidden_TD[: part.count])

    def set_counts(self, tokens: int) -> None:
        """Let only the first `tokens` of the input be real; parts past them have none, but take part."""
        for part in self.parts:
            part.tokens.fill_(min(max(tokens - part.span.start, 0), part.count))

    def __call__(self, op: Op) -> None:
        """Launch the op on torch's current stream."""
        parts = [self._part(op)] if op.kind in _OF_CHUNK else self._lane(op)
        for part in parts:
            getattr(self, _METHOD[op.kind])(op, part)

    def _part(self, op: Op) -> _Part:
        return self.parts[op.lane * self.split.chunks + op.chunk]

    def _lane(self, op: Op) -> list[_Part]:
        return self.parts[op.lane * self.split.chunks : (op.lane + 1) * self.split.chunks]

    def attention(self, op: Op, part: _Part) -> None:
        """A dense product and residual."""
        part.hidden_TD.add_(part.hidden_TD @ self._weights.dense[op.layer].T)

    def route(self, op: Op, part: _Part) -> None:
        """Router."""
        self._route(part.hidden_TD, self._weights.router[op.layer], part.ids_TK, part.weights_TK)

    def _compute(self, op: Op, part: _Part, received: DeviceReceived) -> None:
        pairs = part.y_MD.shape[0]
        self._experts[op.layer](received.rows_PD, received.index_M[:pairs], received.ends_L[: self.local], part.y_MD)


_OF_CHUNK = (Kind.DISPATCH, Kind.EXPERTS, Kind.COMBINE)
_METHOD = {
    Kind.ATTENTION: "attention",
    Kind.ROUTE: "route",
    Kind.DISPATCH: "dispatch",
    Kind.EXPERTS: "compute",
    Kind.COMBINE: "combine",
    Kind.FINISH: "finish",
}


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
        layout = devices[0].layout
        with torch.inference_mode(False):
            # Outputs are read on the compute stream alone, which runs one part after the other: they share one buffer.
            y_MD = torch.zeros(pairs_capacity(layout, local), sizes.hidden, dtype=torch.bfloat16, device="cuda")
            for number, span in enumerate(sizes.parts(split)):
                x_TD, ids_TK, weights_TK = devices[number // GENERATIONS].inputs(number % GENERATIONS)
                part = _Part(
                    number=number,
                    span=span,
                    hidden_TD=x_TD,
                    ids_TK=ids_TK,
                    weights_TK=weights_TK,
                    out_TD=torch.zeros_like(x_TD),
                    tokens=torch.full((1,), span.stop - span.start, dtype=torch.int32, device="cuda"),
                    y_MD=y_MD,
                )
                self.parts.append(part)

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
        """Await rows, index, experts, sums."""
        device = self._device(part)
        self._compute(op, part, device.receive(part.generation))
        device.add(part.y_MD, part.generation)

    def combine(self, op: Op, part: _Part) -> None:
        """Copies only."""
        self._device(part).move_sums(part.generation)

    def finish(self, op: Op, part: _Part) -> None:
        """Await sums, add, residual."""
        self._device(part).finish(part.out_TD, part.generation)
        part.hidden_TD.add_(part.out_TD)


class MovementOnly(GatherForward):
    """The same steps without router, experts and sums: what the wire takes alone."""

    def attention(self, op: Op, part: _Part) -> None:
        """Nothing."""

    def route(self, op: Op, part: _Part) -> None:
        """Flags ready to go."""
        self._device(part).prepare(part.tokens, part.generation)

    def compute(self, op: Op, part: _Part) -> None:
        """Await rows; flags of the sums ready to go."""
        for name in ("wait_rows", "prepare_outputs"):
            self._device(part).wait_only(name, part.generation)

    def finish(self, op: Op, part: _Part) -> None:
        """Await sums."""
        self._device(part).wait_only("wait_outputs", part.generation)


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
            for number, span in enumerate(sizes.parts(split)):
                hidden_TD = torch.zeros(room, sizes.hidden, dtype=torch.bfloat16, device="cuda")
                part = _Part(
                    number=number,
                    span=span,
                    hidden_TD=hidden_TD,
                    ids_TK=torch.zeros(room, sizes.top_k, dtype=torch.int64, device="cuda"),
                    weights_TK=torch.zeros(room, sizes.top_k, dtype=torch.float32, device="cuda"),
                    out_TD=hidden_TD,
                    tokens=torch.full((1,), span.stop - span.start, dtype=torch.int32, device="cuda"),
                    y_MD=torch.zeros(pairs, sizes.hidden, dtype=torch.bfloat16, device="cuda"),
                )
                self.parts.append(part)

    def _device(self, part: _Part) -> PeerDevice:
        return self._devices[part.number // GENERATIONS]

    def dispatch(self, op: Op, part: _Part) -> None:
        """Send rows; without overlap also receive them."""
        device = self._device(part)
        call = device.dispatch_start if self.split.overlapped else device.dispatch
        part.received = call(
            part.hidden_TD,
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
        """Await sums, residual."""
        if self.split.overlapped:
            self._device(part).combine_finish(part.generation)
        part.hidden_TD.add_(part.out_TD)


Device = TypeVar("Device", GatherSteps, PeerDevice)


def _checked(devices: Sequence[Device], sizes: StackSizes, split: Split) -> list[Device]:
    if len(devices) != devices_needed(split) or devices[0].layout.tokens < part_tokens(sizes, split):
        raise ConfigError(
            f"stack: {len(devices)} exchanges for {devices[0].layout.tokens} tokens; {split} needs "
            f"{devices_needed(split)} for {part_tokens(sizes, split)}"
        )
    return list(devices)
