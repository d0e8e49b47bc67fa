"""The symmetric heap on GPUs: every rank allocates with CUDA's virtual memory calls and maps every peer's heap once.

Descriptors travel as for the CPU heap (an abstract Unix socket, see `rendezvous`), so nothing is left behind when a
rank is killed: memory lives as long as somebody maps it, also after its owner died, and peers never touch unmapped
addresses. Addresses stay the same until the heap is dropped. Several ranks may share one GPU. No NIC is needed; where
the device can, the memory is allocated fit for GPUDirect RDMA.

Where some rank's device or driver cannot share virtual memory by descriptor, all take CUDA IPC instead (`CudaHeap`s of
plain allocations, handles through the group's store). Rows move the same way, but memory dies with its owner: a
peer that is still writing when a rank is killed may get an illegal-address error and lose its context.

Knows nothing of rows or flags. `exchange.peer_device` opens heaps.
"""

import ctypes
import json
import os
import secrets
import socket
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor

from bywash.errors import ConfigError
from bywash.kernels.driver import check, driver
from bywash.memory.rendezvous import Members, check_facts, receive_from_all, send_to_all

Sharing = Literal["auto", "vmm", "ipc"]
_DURING = "opening the GPU heaps"
_IPC_HANDLE_BYTES = 64
_IPC_STEP = 2 << 20
"""CUDA packs smaller allocations together, and a handle then opens all of them: whole blocks are asked for."""


class CudaHeap:
    """One rank's heap, mapped into this process and accessible from this process's device.

    Tensors made by `tensor` keep it mapped; it is unmapped with the last of them.

    Attributes:
        address: where it is mapped.
        heap_bytes: its size.
    """

    def __init__(self, address: int, heap_bytes: int, release: Callable[[], None]) -> None:
        """Hold what is mapped at `address`; `release` is called when nobody uses it any more."""
        self.address, self.heap_bytes = address, heap_bytes
        # Not at exit: the context may be gone by then, and the driver frees everything anyway.
        weakref.finalize(self, release).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """How torch sees the heap as bytes."""
        return {"shape": (self.heap_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A view of this rank's own heap, without a copy. `offset` in bytes, a multiple of the element size."""
        elements = 1
        for size in shape:
            elements *= size
        whole: Tensor = torch.as_tensor(self, device="cuda")
        return whole[offset : offset + elements * dtype.itemsize].view(dtype).view(shape)


def open_cuda_heaps(
    members: Members, heap_bytes: int, *, arithmetic: str, facts: dict[str, Any], sharing: Sharing = "auto"
) -> list[CudaHeap]:
    """Allocate this rank's heap on the current device, zeroed, map everyone's, return them by rank. Every rank calls.

    Args:
        members: the ranks, all on this host.
        heap_bytes: what is needed; the same on every rank. Rounded up to the device's granularity.
        arithmetic: how `heap_bytes` comes about, for the error when it does not fit.
        facts: JSON values that must be equal on all ranks, by option name.
        sharing: `vmm` or `ipc`; `auto` is `vmm` if every rank's device can, else `ipc`. Equal on all ranks.

    Raises:
        ConfigError: facts that differ, an allocation that does not fit (named, on every rank), no peer access, or a
            driver or device that cannot share memory between processes in the way asked for.
        RankLostError: a rank died or did not come before the deadline.
    """
    torch.cuda.init()
    torch.cuda.current_stream().synchronize()  # makes the device's primary context current
    device = torch.cuda.current_device()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name, token = f"bywash-{secrets.token_hex(16)}", secrets.token_hex(16)
        listener.bind(b"\0" + name.encode())
        listener.listen(members.ranks)
        card = {"name": name, "token": token, "uuid": _uuid(device), "vmm": has_vmm(device)}
        card["facts"] = {**facts, "heap bytes": heap_bytes, "GPU heaps shared by": sharing}
        cards = [json.loads(text) for text in members.share(json.dumps(card), _DURING)]
        check_facts(cards)
        if sharing == "ipc" or (sharing == "auto" and not all(card["vmm"] for card in cards)):
            return _open_by_ipc(members, cards, heap_bytes, device, arithmetic)
        return _open_by_descriptor(members, cards, heap_bytes, device, arithmetic, listener)


def _open_by_descriptor(
    members: Members,
    cards: list[dict[str, Any]],
    heap_bytes: int,
    device: int,
    arithmetic: str,
    listener: socket.socket,
) -> list[CudaHeap]:
    """Virtual memory, its descriptor sent to each peer's `listener`."""
    with ExitStack() as stack:
        descriptor, handle, refusal = -1, None, ""
        try:
            _check_peers(device, cards)
            heap_bytes, handle, descriptor = _allocate(device, heap_bytes, arithmetic)
            stack.callback(os.close, descriptor)
        except ConfigError as error:
            refusal = str(error)
        own: CudaHeap | None = None
        if handle is not None:
            own = _mapped(handle, heap_bytes, device)
            own.tensor(0, (heap_bytes,), torch.uint8).zero_()
            torch.cuda.current_stream().synchronize()  # zero before a peer may write a flag
        send_to_all(members, cards, descriptor, refusal)
        if own is None:
            raise ConfigError(f"rank {members.rank}: {refusal}")
        heaps = {members.rank: own}
        receive_from_all(
            members,
            listener,
            cards[members.rank]["token"],
            _DURING,
            lambda descriptor: _mapped(_import(descriptor), heap_bytes, device),
            lambda rank, reason: ConfigError(f"rank {rank}: {reason}"),
            heaps,
        )
    return [heaps[rank] for rank in range(members.ranks)]


def has_vmm(device: int) -> bool:
    """Whether the device and its driver share virtual memory by descriptor (Linux, CUDA 11.3, not every vGPU)."""
    attribute = driver().CUdevice_attribute
    return bool(
        _attribute(device, attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        and _attribute(device, attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    )


def _mapped(handle: Any, heap_bytes: int, device: int) -> CudaHeap:
    """Map an allocation; takes over `handle`.

    Raises:
        ConfigError: no address space, or this device may not access the memory.
    """
    cuda = driver()
    try:
        address = int(check(cuda.cuMemAddressReserve(heap_bytes, 0, 0, 0), "reserving addresses"))
        check(cuda.cuMemMap(address, heap_bytes, 0, handle, 0), "mapping a heap")
        access = cuda.CUmemAccessDesc()
        access.location = device_location(device)
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(
            cuda.cuMemSetAccess(address, heap_bytes, [access], 1),
            f"device {device} may not access a peer's memory (no NVLink or PCIe peer access?)",
        )
    finally:
        cuda.cuMemRelease(handle)  # the mapping keeps the memory

    def release() -> None:
        cuda.cuMemUnmap(address, heap_bytes)
        cuda.cuMemAddressFree(address, heap_bytes)

    return CudaHeap(address, heap_bytes, release)


def _open_by_ipc(
    members: Members, cards: list[dict[str, Any]], heap_bytes: int, device: int, arithmetic: str
) -> list[CudaHeap]:
    """The same through CUDA IPC: a plain allocation on each rank, its handle through the store."""
    cuda = driver()
    heap_bytes = -(-heap_bytes // _IPC_STEP) * _IPC_STEP
    answer, address = {"handle": "", "error": ""}, 0
    try:
        _check_peers(device, cards)
        status, address = cuda.cuMemAlloc(heap_bytes)
        _check_memory(status, heap_bytes, device, arithmetic)
        handle = check(cuda.cuIpcGetMemHandle(address), f"sharing the memory of device {device} by CUDA IPC")
        answer["handle"] = ctypes.string_at(handle.getPtr(), _IPC_HANDLE_BYTES).hex()
    except ConfigError as error:
        answer["error"] = str(error)
    heaps: dict[int, CudaHeap] = {}
    if address:
        own = heaps[members.rank] = CudaHeap(int(address), heap_bytes, lambda: cuda.cuMemFree(address))
        own.tensor(0, (heap_bytes,), torch.uint8).zero_()
        torch.cuda.current_stream().synchronize()  # zero before a peer may write a flag
    answers = [json.loads(text) for text in members.share(json.dumps(answer), _DURING)]
    for rank, theirs in enumerate(answers):
        if theirs["error"]:
            raise ConfigError(f"rank {rank}: {theirs['error']}")
        if rank != members.rank:
            heaps[rank] = _opened_by_ipc(bytes.fromhex(theirs["handle"]), heap_bytes, rank)
    return [heaps[rank] for rank in range(members.ranks)]


def _opened_by_ipc(shared: bytes, heap_bytes: int, rank: int) -> CudaHeap:
    cuda = driver()
    handle = cuda.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), shared, _IPC_HANDLE_BYTES)
    flag = cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    address = int(check(cuda.cuIpcOpenMemHandle(handle, flag), f"opening the heap of rank {rank}"))
    return CudaHeap(address, heap_bytes, lambda: cuda.cuIpcCloseMemHandle(address))


def _allocate(device: int, heap_bytes: int, arithmetic: str) -> tuple[int, Any, int]:
    """(rounded size, allocation handle, descriptor to share it by)."""
    cuda = driver()
    if not has_vmm(device):
        raise ConfigError(
            f"exchange peer: device {device} or its driver (CUDA {_driver_version()}) shares no virtual memory by "
            "descriptor; a Linux driver for CUDA 11.3 or newer on bare metal or with GPU passthrough does"
        )
    attribute = cuda.CUdevice_attribute
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = device_location(device)
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.requestedHandleTypes = kind
    if _attribute(device, attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED):
        properties.allocFlags.gpuDirectRDMACapable = 1
    recommended = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    granularity = int(check(cuda.cuMemGetAllocationGranularity(properties, recommended), "asking for granularity"))
    rounded = -(-heap_bytes // granularity) * granularity
    status, handle = cuda.cuMemCreate(rounded, properties, 0)
    _check_memory(status, rounded, device, arithmetic)
    descriptor = int(check(cuda.cuMemExportToShareableHandle(handle, kind, 0), "sharing the heap"))
    return rounded, handle, descriptor


def _check_memory(status: Any, heap_bytes: int, device: int, arithmetic: str) -> None:
    """Say what was needed, what there was, and why, if an allocation did not fit."""
    if status == driver().CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"exchange peer: the heap does not fit: {_mib(heap_bytes)} needed, {_mib(free)} of {_mib(total)} free on "
            f"device {device}. One heap is {arithmetic}. Give a step fewer tokens, or leave more memory free"
        )
    check((status,), f"allocating {_mib(heap_bytes)}")


def _import(descriptor: int) -> Any:
    cuda = driver()
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return check(cuda.cuMemImportFromShareableHandle(descriptor, kind), "importing a peer's heap")


def _check_peers(device: int, cards: list[dict[str, Any]]) -> None:
    """Peers on other GPUs that this process can see must be reachable; those it cannot see are tried by mapping."""
    ordinals = {_uuid(ordinal): ordinal for ordinal in range(torch.cuda.device_count())}
    for rank, card in enumerate(cards):
        other = ordinals.get(card["uuid"], device)
        if other != device and not torch.cuda.can_device_access_peer(device, other):
            raise ConfigError(
                f"exchange peer: device {device} cannot access the memory of rank {rank}'s device {other} "
                "(nvidia-smi topo -p2p r shows which can); use --exchange gloo or another pair of devices"
            )


def device_location(device: int) -> Any:
    """Where the driver should put or map memory."""
    cuda = driver()
    location = cuda.CUmemLocation()
    location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _attribute(device: int, attribute: Any) -> int:
    return int(check(driver().cuDeviceGetAttribute(attribute, device), "asking for a device attribute"))


def _driver_version() -> str:
    version = int(check(driver().cuDriverGetVersion(), "asking for the driver's version"))
    return f"{version // 1000}.{version % 1000 // 10}"


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
