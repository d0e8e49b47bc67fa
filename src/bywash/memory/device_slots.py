"""Weights of elastic layers on GPUs: every rank's own experts, mapped at all peers, and slots for foreign ones.

Own weights lie in a heap that every peer maps once, so that any rank can copy any expert without its home taking part.
Slots are read by their own GPU only. Their addresses are reserved for as many as there may ever be; `resize` maps and
unmaps memory behind them, so captured graphs stay valid and a KV cache can have what slots give up.

Shapes: L own experts of a rank (the most of any), S slots, G = 2 x intermediate, D hidden, F intermediate.
Knows nothing of plans or tokens. `moe.elastic_layer` opens it; whoever loads weights writes into `own`.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.kernels.driver import check, driver
from bywash.memory.cuda_heap import CudaHeap, device_location, open_cuda_heaps
from bywash.memory.rendezvous import Members

_ALIGN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLayout:
    """Where weights lie in a rank's heap: per layer L gate-and-up, L down, L checksums. Bytes.

    Attributes:
        layers: that share the slots.
        own: L.
        slots: S, the most there may be.
        hidden, inner: D and F.
        dtype: of the weights.
    """

    layers: int
    own: int
    slots: int
    hidden: int
    inner: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, value, least in (("layers", self.layers, 1), ("own experts", self.own, 1), ("slots", self.slots, 0)):
            if value < least:
                raise ConfigError(f"device slots: {value} {name}; at least {least}")
        if self.gate_bytes % 16 or self.down_bytes % 16:
            raise ConfigError(
                f"device slots: experts of {self.hidden} x {self.inner} {self.dtype}: no multiple of 16 B"
            )

    @property
    def gate_bytes(self) -> int:
        """Of one expert's first weight, [G, D]."""
        return 2 * self.inner * self.hidden * self.dtype.itemsize

    @property
    def down_bytes(self) -> int:
        """Of one expert's second weight, [D, F]."""
        return self.inner * self.hidden * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        """Of one expert."""
        return self.gate_bytes + self.down_bytes

    def offsets(self, layer: int) -> dict[str, int]:
        """Where a layer's parts begin."""
        parts = {"gate_at": self.own * self.gate_bytes, "down_at": self.own * self.down_bytes, "sums_at": 8 * self.own}
        rounded = {name: -(-size // _ALIGN) * _ALIGN for name, size in parts.items()}
        found, at = {}, layer * sum(rounded.values())
        for name, size in rounded.items():
            found[name] = at
            at += size
        return found

    @property
    def heap_bytes(self) -> int:
        """Of a rank's heap."""
        return self.offsets(self.layers)["gate_at"]

    @property
    def arithmetic(self) -> str:
        """How the sizes come about, in words."""
        return (
            f"{self.layers} layers x {self.own} own experts x ({self.gate_bytes:,} + {self.down_bytes:,} B) = "
            f"{self.heap_bytes:,} B, and {self.slots} slots x {self.slot_bytes:,} B = "
            f"{self.slots * self.slot_bytes:,} B"
        )


class DeviceSlots:
    """This rank's own weights, its slots, and the peers' own weights as mapped here.

    Attributes:
        layout: sizes.
        gate_up_SGD, down_SDF: the slots. Those without memory must not be touched.
        usable: slots that have memory.
    """

    def __init__(self, members: Members, layout: WeightLayout) -> None:
        """Allocate, zeroed, and map everyone's. Every rank calls.

        Raises:
            ConfigError, RankLostError: see `open_cuda_heaps`; or the slots do not fit.
        """
        self.layout, self.rank = layout, members.rank
        facts = {"weights": layout.arithmetic}
        self._heaps = open_cuda_heaps(members, layout.heap_bytes, arithmetic=layout.arithmetic, facts=facts)
        self.gate_pages = PagedRange(layout.gate_bytes, layout.slots)
        self.down_pages = PagedRange(layout.down_bytes, layout.slots)
        self.usable = layout.slots
        hidden, inner = layout.hidden, layout.inner
        self.gate_up_SGD = self.gate_pages.tensor((layout.slots, 2 * inner, hidden), layout.dtype)
        self.down_SDF = self.down_pages.tensor((layout.slots, hidden, inner), layout.dtype)

    def own(self, layer: int) -> tuple[Tensor, Tensor]:
        """This rank's own experts of a layer, [L, G, D] and [L, D, F], to be written once and then left alone."""
        layout, at = self.layout, self.layout.offsets(layer)
        gate_shape, down_shape = (
            (layout.own, 2 * layout.inner, layout.hidden),
            (layout.own, layout.hidden, layout.inner),
        )
        heap = self._own_heap()
        return heap.tensor(at["gate_at"], gate_shape, layout.dtype), heap.tensor(
            at["down_at"], down_shape, layout.dtype
        )

    def sums(self, layer: int) -> Tensor:
        """int64 [L]: checksums of the own experts of a layer, as peers read them."""
        return self._own_heap().tensor(self.layout.offsets(layer)["sums_at"], (self.layout.own,), torch.int64)

    @property
    def homes(self) -> list[int]:
        """Addresses of every rank's weights."""
        return [heap.address for heap in self._heaps]

    def resize(self, slots: int) -> None:
        """Map or unmap memory so that the first `slots` slots have it; addresses stay.

        Waits for the device first. All ranks must tell their layers, see `ElasticLayers.resize`, which calls this.

        Raises:
            ConfigError: more than the layout has addresses for, no memory for them, or closed.
        """
        self._own_heap()
        if not 0 <= slots <= self.layout.slots:
            raise ConfigError(f"device slots: resize to {slots} slots; addresses are reserved for {self.layout.slots}")
        torch.cuda.synchronize()
        self.gate_pages.resize(slots)
        self.down_pages.resize(slots)
        self.usable = slots

    def close(self) -> None:
        """Give the slots' memory back; weights go with the last tensor in them. Every rank calls. Safe to repeat."""
        if not self._heaps:
            return
        self.resize(0)
        self._heaps = []
        self.gate_up_SGD, self.down_SDF = self.gate_up_SGD.new_empty(0), self.down_SDF.new_empty(0)

    def _own_heap(self) -> CudaHeap:
        if not self._heaps:
            raise ConfigError("device slots: closed; open new ones")
        return self._heaps[self.rank]

    @property
    def mapped_bytes(self) -> int:
        """Memory behind the slots."""
        return self.gate_pages.mapped_bytes + self.down_pages.mapped_bytes


class PagedRange:
    """Addresses for S equal parts, with memory behind the first of them, on the current device."""

    def __init__(self, part_bytes: int, parts: int) -> None:
        """Reserve addresses and map memory for all parts, zeroed."""
        self._part_bytes, self._device = part_bytes, torch.cuda.current_device()
        cuda = driver()
        torch.cuda.synchronize()  # makes the device's primary context current
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = device_location(self._device)
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._page_bytes = int(
            check(cuda.cuMemGetAllocationGranularity(self._properties, minimum), "asking for granularity")
        )
        self.range_bytes = max(1, -(-part_bytes * parts // self._page_bytes)) * self._page_bytes
        self.address = int(check(cuda.cuMemAddressReserve(self.range_bytes, 0, 0, 0), "reserving addresses for slots"))
        self._chunks: list[tuple[int, int]] = []
        weakref.finalize(self, _release, self.address, self.range_bytes, self._chunks).atexit = False
        self.resize(parts)

    @property
    def mapped_bytes(self) -> int:
        """Bytes that have memory: always the first ones."""
        return sum(self._chunks[-1]) if self._chunks else 0

    def resize(self, parts: int) -> None:
        """Have memory for the first `parts`, one chunk for each where pages allow it."""
        wanted = -(-self._part_bytes * parts // self._page_bytes) * self._page_bytes
        cuda = driver()
        while self._chunks and self._chunks[-1][0] >= wanted:
            offset, size = self._chunks.pop()
            check(cuda.cuMemUnmap(self.address + offset, size), "unmapping a slot")
        done = -(-self.mapped_bytes // self._part_bytes) if self._part_bytes else parts
        for part in range(min(done, parts), parts + 1):
            end = -(-self._part_bytes * part // self._page_bytes) * self._page_bytes
            if end > self.mapped_bytes:
                self._map(self.mapped_bytes, end - self.mapped_bytes)

    def _map(self, offset: int, size: int) -> None:
        cuda = driver()
        status, handle = cuda.cuMemCreate(size, self._properties, 0)
        if status == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self._device)
            raise ConfigError(
                f"device slots: no memory for a slot of {size:,} B: {free:,} of {total:,} B free on device "
                f"{self._device}; ask for fewer slots"
            )
        check((status,), f"allocating a slot of {size:,} B")
        try:
            check(cuda.cuMemMap(self.address + offset, size, 0, handle, 0), "mapping a slot")
        finally:
            cuda.cuMemRelease(handle)  # the mapping keeps the memory
        self._chunks.append((offset, size))
        access = cuda.CUmemAccessDesc()
        access.location = device_location(self._device)
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(cuda.cuMemSetAccess(self.address + offset, size, [access], 1), "allowing access to a slot")

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of the whole range; only parts with memory may be touched. Keeps the range alive."""
        if 0 in shape:
            return torch.empty(shape, dtype=dtype, device="cuda")
        whole: Tensor = torch.as_tensor(_Bytes(self), device="cuda")
        return whole[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


class _Bytes:
    """How torch sees a range."""

    def __init__(self, pages: PagedRange) -> None:
        self.pages = pages

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.pages.range_bytes,),
            "typestr": "|u1",
            "data": (self.pages.address, False),
            "version": 3,
        }


def _release(address: int, size: int, chunks: list[tuple[int, int]]) -> None:
    cuda = driver()
    for offset, length in chunks:
        cuda.cuMemUnmap(address + offset, length)
    cuda.cuMemAddressFree(address, size)
