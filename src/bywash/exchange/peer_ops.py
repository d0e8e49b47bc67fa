"""The `peer` exchange inside `torch.compile`: dispatch, experts and combine of a layer as one operator.

One, since what dispatch receives lies in the heap: as results of an operator of its own those buffers would alias
state that the compiler knows nothing of, and it may copy, merge or move what it takes for values. The whole layer is
a function of its inputs with a fresh result, the same bits each time, so merging or dropping a call does no harm as
long as all ranks compile the same graph. Two layers with no data between them may run in either order, alike on all
ranks; the operator is no collective that torch knows, so nothing else may reorder it.

The experts are not traced; they run as they are given. Knows nothing of models. Users of `PeerDevice` call it.

Shapes: T tokens of this rank, K experts per token, D hidden, M pairs (row, expert) computed here.
"""

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_tensors import DeviceReceived

__all__ = ["PeerLayer"]

_numbers = itertools.count()
_layers: "WeakValueDictionary[int, PeerLayer]" = WeakValueDictionary()


class PeerLayer:
    """The experts of one layer behind an exchange, to be called in compiled code. Every rank makes the same ones."""

    def __init__(
        self,
        device: PeerDevice,
        experts: Callable[[DeviceReceived], Tensor],
        *,
        generation: int = 0,
        counts_first: bool = True,
    ) -> None:
        """Name the parts; nothing is launched.

        Args:
            device: the open exchange.
            experts: outputs [M or more, D] in the order of `index_M`, on the current stream.
            generation: which channel; layers that may be in flight at once, on two streams, need different ones.
            counts_first: see `PeerDevice.dispatch_start`.
        """
        self.device, self.experts = device, experts
        self.generation, self.counts_first = generation, counts_first
        self.number = next(_numbers)
        _layers[self.number] = self

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The layer's output [T, D], contiguous. Arguments as for `PeerDevice.dispatch`; failures wait for `check`."""
        out: Tensor = _moe(x_TD, ids_TK, weights_TK, self.number, tokens)
        return out

    def run(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, tokens: Tensor | None) -> Tensor:
        """What the operator does; not for callers."""
        device, generation = self.device, self.generation
        options = {"tokens": tokens, "generation": generation, "counts_first": self.counts_first}
        received = device.dispatch(x_TD, ids_TK, weights_TK, **options)  # type: ignore[arg-type]
        out = device.combine(self.experts(received), generation=generation).contiguous()
        device.let_go(generation)
        return out


@torch.library.custom_op("bywash::peer_moe", mutates_args=())
def _moe(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, layer: int, tokens: Tensor | None = None) -> Tensor:
    found = _layers.get(layer)
    if found is None:
        raise ConfigError(f"exchange peer: layer {layer} of this compiled code is gone; keep its PeerLayer alive")
    return found.run(x_TD, ids_TK, weights_TK, tokens)


@_moe.register_fake
def _(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, layer: int, tokens: Tensor | None = None) -> Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)
