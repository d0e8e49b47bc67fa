"""`ElasticLayer`: a MoE layer on GPUs whose overloaded experts are computed elsewhere too; no row is dropped.

As `DeviceLayer`, with slots for foreign experts' weights and fixed buffers. One step, counts first:

    count -> plan -> table -> assign -> dispatch -> own experts -> experts in slots -> combine
                           \\-> fetch (another stream, few multiprocessors) --/

A step whose rows exceed the buffers of some rank is done in waves, parts of at most `chunk` tokens of each rank:
launches for all waves are always there, and those not needed end at once. In decode (`counts_first=False`) a step runs
under the plan made from the counts of the layer's step before, and plans the next one beside its experts.

Shapes: T tokens of this rank, D hidden, K experts per token, E experts, L own experts of this rank, S slots, M pairs.
Knows nothing of models or processes. docs/overflow.md has the argument why no row is dropped.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from bywash.balance.limits import Limits, SlotDirectory
from bywash.balance.placement import Placement
from bywash.errors import ConfigError
from bywash.exchange import peer_tensors
from bywash.exchange.names import Combine
from bywash.exchange.peer_elastic import ElasticDevice, ElasticRecord, Planner, elastic_layout
from bywash.exchange.peer_tensors import DeviceReceived
from bywash.memory.device_slots import DeviceSlots, WeightLayout
from bywash.memory.rendezvous import Members
from bywash.routing import Routing

if TYPE_CHECKING:
    from bywash.kernels.experts import HopperExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSizes:
    """What is fixed when elastic layers are opened.

    Attributes:
        tokens: T, the most of a rank in a step.
        top_k, hidden, inner: K, D and the experts' intermediate size.
        layers: that share the slots.
        slots: S of each rank.
        pairs: (row, expert) pairs that a rank's intermediate and output buffers hold; steps with more run in waves.
        dtype: of rows and weights.
    """

    tokens: int
    top_k: int
    hidden: int
    inner: int
    layers: int
    slots: int
    pairs: int
    dtype: torch.dtype = torch.bfloat16


class ElasticLayers:
    """Layers that share an exchange, slots, a planner and buffers. One stream of steps at a time.

    Attributes:
        device: this rank's end of the exchange.
        slots: weights; write `slots.own(layer)`, then call `seal`.
        planner: makes plans; holds the slots' directory.
        closed: whether `close` was called: nothing runs any more.
    """

    def __init__(
        self,
        members: Members,
        placement: Placement,
        limits: Limits,
        sizes: ElasticSizes,
        *,
        combine_mode: Combine = "stable",
        num_sms: int = 0,
    ) -> None:
        """Open everything. Every rank calls.

        Raises:
            ConfigError: sizes that do not fit together or into memory; see `PeerDevice`, `DeviceSlots` and
                `DevicePlanner`.
            RankLostError: a rank did not come.
        """
        self.sizes, self.placement, self.closed = sizes, placement, False
        self._made: WeakSet[ElasticLayer] = WeakSet()
        layout = elastic_layout(
            placement.home_E,
            ranks=members.ranks,
            slots=sizes.slots,
            top_k=sizes.top_k,
            tokens=sizes.tokens,
            hidden=sizes.hidden,
            dtype=sizes.dtype,
            combine_mode=combine_mode,
        )
        self.device = ElasticDevice(members, layout, placement.home_E, combine_mode=combine_mode, num_sms=num_sms)
        weights = WeightLayout(
            layers=sizes.layers,
            own=self.device.own,
            slots=sizes.slots,
            hidden=sizes.hidden,
            inner=sizes.inner,
            dtype=sizes.dtype,
        )
        self.slots = DeviceSlots(members, weights)
        self.planner = _open_planner(placement, limits, sizes)
        self.fetching = torch.cuda.Stream(priority=0)  # the lowest there is
        with torch.inference_mode(False):  # outlives the model's inference mode
            self.h_MF = torch.empty(sizes.pairs, sizes.inner, dtype=sizes.dtype, device=peer_tensors.GPU)
            self.y_MD = torch.empty(sizes.pairs, sizes.hidden, dtype=sizes.dtype, device=peer_tensors.GPU)

    def layer(self, number: int) -> "ElasticLayer":
        """A layer whose weights are in place and sealed."""
        self.require_open()
        layer = ElasticLayer(self, number)
        self._made.add(layer)
        return layer

    def resize(self, slots: int) -> None:
        """Give memory of slots back, or take it again. All ranks call, between steps; captured graphs stay valid.

        Slots that go are forgotten, so that one which comes back is filled anew before it is used.

        Raises:
            ConfigError: see `DeviceSlots.resize`; or closed.
        """
        self.require_open()
        torch.cuda.synchronize()
        kept = min(slots, self.slots.usable)
        self.slots.resize(slots)
        self.planner.keys_RS[:, kept:] = -1
        self.device.set_usable(slots)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Give the memory back; layers made of this run no more, nor may graphs that captured them. Safe to call twice.

        Every rank calls, after its last step. Weights that the caller still holds stay until it drops them.
        """
        if self.closed:
            return
        torch.cuda.synchronize()
        self.closed = True
        for layer in list(self._made):
            layer.release()
        self.device.close()
        self.slots.close()
        self.h_MF, self.y_MD = self.h_MF.new_empty(0), self.y_MD.new_empty(0)

    def require_open(self) -> None:
        """Raise `ConfigError` once this is closed."""
        if self.closed:
            raise ConfigError("elastic layers: closed; open new ones")

    @property
    def arithmetic(self) -> dict[str, int]:
        """Bytes of every buffer of this rank, by name: all that a step ever uses."""
        layout = self.device.layout
        return {
            "exchange heap": layout.heap_bytes,
            "own weights": self.slots.layout.heap_bytes,
            "slots": self.slots.mapped_bytes,
            "intermediate": self.h_MF.nbytes,
            "outputs": self.y_MD.nbytes,
            "index": 2 * (3 * 4 + (8 if layout.apart else 0)) * layout.places * layout.top_k,
            "virtual ids": 2 * layout.tokens * (12 * layout.top_k + 4),
        }


def _open_planner(placement: Placement, limits: Limits, sizes: ElasticSizes) -> Planner:
    from bywash.kernels.plan import DevicePlanner  # late: needs the driver's bindings

    directory = SlotDirectory.empty(
        ranks=placement.ranks, slots=sizes.slots, experts=placement.num_experts, layers=sizes.layers
    )
    return DevicePlanner(placement, limits, directory)


class ElasticLayer:
    """One layer of `ElasticLayers`.

    Example:
        >>> layers = ElasticLayers(group, placement, Limits(alpha_1024=1044), sizes)
        >>> for number in range(sizes.layers):
        ...     load(number, *layers.slots.own(number))
        >>> layer = layers.layer(0)
        >>> out_TD = layer(x_TD, routing)
        >>> layer.check()
    """

    def __init__(self, layers: ElasticLayers, number: int) -> None:
        """Describe the layer to the device and make the checksums of its own weights."""
        self._layers = layers
        record = layers.device.record(number, layers.slots, layers.planner, capacity=layers.sizes.pairs)
        layers.device.seal(record)
        self._parts: tuple[ElasticRecord, ElasticExperts] | None = (record, ElasticExperts(layers, number))

    def __call__(
        self,
        x_TD: Tensor,
        routing: Routing,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> Tensor:
        """Each token's weighted sum over its experts. Only launches; every rank calls, also without tokens.

        Args:
            x_TD: [T or more, D] on the device; unchanged until the layer has run.
            routing: of the same rows, on the device.
            tokens, generation: see `PeerDevice.dispatch_start`.
            counts_first: plan from this step's counts (prefill); else run under the plan of the layer's step before.

        Returns:
            [T or more, D]; rows past `tokens` are undefined.

        Raises:
            ConfigError: shapes that do not fit; a step under the last plan that may need waves; or closed.
        """
        device, planner, (record, experts) = self._layers.device, self._layers.planner, self._open()
        layout, main = device.layout, torch.cuda.current_stream()
        if not counts_first and x_TD.shape[0] * layout.ranks * layout.top_k > self._layers.sizes.pairs:
            raise ConfigError(
                f"elastic layer: {x_TD.shape[0]} tokens under the plan before may bring more pairs than the buffers' "
                f"{self._layers.sizes.pairs}; count first, or open the layers with more pairs"
            )
        arguments = (x_TD, routing.ids_TK, routing.weights_TK)
        device.begin(record, planner, *arguments, tokens=tokens, generation=generation, counts_first=counts_first)
        filled = self._fetch(main, generation)
        device.assign(generation)
        out_TD = torch.empty((x_TD.shape[0], layout.padded), dtype=layout.dtype, device=x_TD.device)
        for wave in range(record.most_waves if counts_first else 1):
            received = device.dispatch_wave(record, wave, generation)
            if not counts_first:
                self._plan_next(main, generation)
            y_MD = experts.own_outputs(received, self._layers.y_MD)
            if filled is not None:
                main.wait_event(filled)
                experts.guest_outputs(received, y_MD)
            pushed = received.target_M is not None
            device.combine_wave(record, y_MD, out_TD, wave, generation, pushed=pushed)
        main.wait_stream(self._layers.fetching)
        return out_TD[:, : layout.hidden]

    def check(self) -> None:
        """Wait for the device and raise what went wrong in the exchange, a copy or the experts, if anything did.

        Raises:
            BywashError: see `PeerDevice.check`; weights arrived damaged; experts were given an index that cannot be; or
                closed.
        """
        _, experts = self._open()
        self._layers.device.check()
        experts.check()

    @property
    def record(self) -> ElasticRecord:
        """What the kernels know of the layer."""
        return self._open()[0]

    def release(self) -> None:
        """Drop what holds memory; `ElasticLayers.close` calls it."""
        self._parts = None

    def _open(self) -> tuple[ElasticRecord, "ElasticExperts"]:
        if self._parts is None:
            raise ConfigError("elastic layer: its layers are closed; open new ones")
        return self._parts

    def _fetch(self, main: torch.cuda.Stream, generation: int) -> torch.cuda.Event | None:
        """Copy weights beside what needs none of them: slots were last read by steps that came before on `main`."""
        if not self._layers.device.layout.guests:
            return None
        side = self._layers.fetching
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._layers.device.fetch(generation)
            filled: torch.cuda.Event = side.record_event()
        return filled

    def _plan_next(self, main: torch.cuda.Stream, generation: int) -> None:
        """Plan the next step from what came, beside this one's experts."""
        side = self._layers.fetching
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._layers.device.plan_next(self.record, self._layers.planner, generation)


class ElasticExperts:
    """Own experts and those in slots, as two launches over one index, intermediate and output.

    Own ones do not wait for copies of weights. Outputs that travel unsummed go straight to their sources.
    """

    def __init__(self, layers: ElasticLayers, number: int) -> None:
        """Open both. Raises `ConfigError` where no kernel for this GPU computes a range of groups."""
        from bywash.kernels.experts import HopperExperts  # late: compiles, and needs the driver's bindings

        sizes, slots, device = layers.sizes, layers.slots, layers.device
        rows = sizes.tokens * sizes.top_k * device.ranks / layers.placement.num_experts
        self._first, self._groups, self._pairs = device.own, device.own + sizes.slots, sizes.pairs

        def opened(gate_up_LGD: Tensor, down_LDF: Tensor, first: int) -> HopperExperts:
            return HopperExperts(
                gate_up_LGD,
                down_LDF,
                pairs=sizes.pairs,
                rows_per_expert=rows,
                first=first,
                intermediate=layers.h_MF,
            )

        self._home = opened(*slots.own(number), 0)
        self._guests = opened(slots.gate_up_SGD, slots.down_SDF, device.own) if sizes.slots else None

    def own_outputs(self, received: DeviceReceived, out_MD: Tensor) -> Tensor:
        """Pairs of this rank's own experts. Places past the last pair are left alone."""
        self._launch(self._home, received, self._first, out_MD)
        return out_MD

    def guest_outputs(self, received: DeviceReceived, out_MD: Tensor) -> None:
        """Pairs of experts in slots."""
        if self._guests is not None:
            self._launch(self._guests, received, self._groups, out_MD)

    def _launch(self, experts: "HopperExperts", received: DeviceReceived, groups: int, out_MD: Tensor) -> None:
        index_M, ends_L = received.index_M[: self._pairs], received.ends_L[:groups]
        targets_M = None if received.target_M is None else received.target_M[: self._pairs]
        experts(received.rows_PD, index_M, ends_L, out_MD, targets_M=targets_M)

    def check(self) -> None:
        """See `HopperExperts.check`."""
        self._home.check()
        if self._guests is not None:
            self._guests.check()
