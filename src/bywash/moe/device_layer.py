"""`DeviceLayer`: one MoE layer on GPUs with no host in the loop: route, dispatch, experts, combine on one stream.

Counts, plan, token count and failures stay on the device, so the whole layer can be captured in a CUDA graph, which
then replays with other tokens, other routings and other token counts. `ExpertParallel` is the same layer for any
exchange; this one is for GPUs of one host, through `PeerDevice`, and several layers share one.

Shapes: T tokens of this rank, D hidden, K experts per token, E experts, L experts of this rank, M pairs computed here.
Knows nothing of models or processes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.peer_tensors import DeviceReceived
from bywash.exchange.select import DeviceExchange
from bywash.kernels.triton_experts_fp8 import TritonExpertsFp8
from bywash.moe.device_experts import DeviceExperts, PushingExperts
from bywash.routing import Routing

Router = Callable[[Tensor], Routing]
"""x [T, D] to the routing of its tokens, on the device and without waiting for it."""


def pairs_capacity(layout: PeerLayout, local_experts: int) -> int:
    """The most (row, expert) pairs that a rank can be given: every token of every rank to all its experts, or top-k.

    Example: 2 ranks x 4,096 tokens x top-8 with 128 experts here is 65,536 pairs, twice what uniform routing brings.
    """
    return layout.places * min(layout.top_k, local_experts)


class DeviceLayer:
    """One layer's experts behind a `PeerDevice` or an `AllGatherDevice`.

    Example:
        >>> device, selection = open_device_exchange(group, layout, placement.home_E, combine_mode="fast")
        >>> experts = open_device_experts(gate_up_LGD, down_LDF, pairs=pairs_capacity(layout, gate_up_LGD.shape[0]))
        >>> layer = DeviceLayer(device, experts, local_experts=gate_up_LGD.shape[0])
        >>> out_TD = layer(x_TD, routing)
        >>> layer.check()  # waits; raises what went wrong, if anything did
    """

    def __init__(
        self,
        device: DeviceExchange,
        experts: DeviceExperts | TritonExpertsFp8,
        *,
        local_experts: int,
        router: Router | None = None,
        push: bool = True,
    ) -> None:
        """Put the parts together; nothing is allocated.

        Args:
            device: this rank's end of the exchange, by either algorithm; layers share it.
            experts: this rank's experts, ascending by id, with room for `pairs_capacity` pairs: of
                `open_device_experts`, or for an exchange opened with fp8 a `TritonExpertsFp8`.
            local_experts: L.
            router: makes the routing where the caller gives none.
            push: let experts that can write outputs which travel unsummed (`exact`) straight to their source, beside
                their products; otherwise combine sends them. The same bits; ranks may differ.

        Raises:
            ConfigError: rows would arrive as e4m3 for experts that do not read it, or the other way round.
        """
        if local_experts and (device.layout.fp8 != "off") != isinstance(experts, TritonExpertsFp8):
            raise ConfigError(
                f"layer: the exchange was opened with fp8={device.layout.fp8!r}, and the experts are "
                f"{type(experts).__name__}; TritonExpertsFp8 is for fp8 rows, all others for rows as they are"
            )
        self.device, self._experts, self._router = device, experts, router
        self._local_experts = local_experts
        self._pairs = pairs_capacity(device.layout, local_experts)
        self._pushing = experts if isinstance(experts, PushingExperts) and push and device.layout.apart else None

    def __call__(
        self,
        x_TD: Tensor,
        routing: Routing | None = None,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> Tensor:
        """Each token's weighted sum over its experts. Only launches; every rank calls, also without tokens.

        Args:
            x_TD: [T or more, D] on the device; unchanged until the layer has run.
            routing: of the same rows, on the device; by default the router's.
            tokens, generation, counts_first: see `PeerDevice.dispatch_start`.

        Returns:
            [T or more, D]; rows past `tokens` are undefined.

        Raises:
            ConfigError: shapes that do not fit, or no routing and no router.
        """
        if routing is None:
            if self._router is None:
                raise ConfigError("layer: give it a routing, or a router when it is made")
            routing = self._router(x_TD)
        received = self.device.dispatch(
            x_TD,
            routing.ids_TK,
            routing.weights_TK,
            tokens=tokens,
            generation=generation,
            counts_first=counts_first,
        )
        y_MD = self.compute(received, push=self.pushes)
        return self.device.combine(y_MD, generation=generation, pushed=self.pushes)

    @property
    def pushes(self) -> bool:
        """Whether a call of the layer lets its experts write outputs to their sources."""
        return self._pushing is not None

    def compute(self, received: DeviceReceived, *, push: bool = False) -> Tensor:
        """This rank's experts on what arrived, in the order of `index_M`. Only launches.

        Args:
            received: of the dispatch before.
            push: write outputs that have a target there and nowhere else; combine must then be told `pushed`. Once
                between a dispatch and its combine.

        Raises:
            ConfigError: push, where the layer does not.
        """
        if push and self._pushing is None:
            raise ConfigError("layer: outputs to push, but these experts cannot, or in this exchange all travel summed")
        if not self._local_experts:  # a rank without experts still takes part
            return torch.empty(0, self.device.layout.hidden, dtype=self.device.layout.dtype, device="cuda")
        index_M, ends_L = received.index_M[: self._pairs], received.ends_L[: self._local_experts]
        if isinstance(self._experts, TritonExpertsFp8):
            assert received.scales_PG is not None, "checked when the layer was made"
            return self._experts(received.rows_PD, received.scales_PG, index_M, ends_L)
        if push and self._pushing is not None:
            assert received.target_M is not None, "the layout says that there are some"
            return self._pushing(received.rows_PD, index_M, ends_L, targets_M=received.target_M[: self._pairs])
        return self._experts(received.rows_PD, index_M, ends_L)

    def check(self) -> None:
        """Wait for the device and raise what went wrong in the exchange or the experts, if anything did.

        Raises:
            BywashError: see `PeerDevice.check`; or experts were given an index that cannot be.
        """
        self.device.check()
        check_experts = getattr(self._experts, "check", None)
        if check_experts is not None:
            check_experts()
