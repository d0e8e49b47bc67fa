"""All-gather / reduce-scatter by copy engine: the other algorithm of the GPU exchange, with the same calls and results.

Every rank's rows, ids and weights are copied to every rank; each makes the index of its own experts' pairs; each adds
its outputs per token and copies the sums to the token's source, which adds them in rank order. The copies take no
multiprocessor and need no counts, nothing can overflow, and the result has the bits of `stable` and `fast`: sums in k
order on the computing rank, rounded once, then added in rank order. `exact` has no such sums.

Here every rank brings the same number of rows to a step (with fewer real tokens if it likes), since the copies' sizes
are the host's to know. `exchange.cost` says when this pays. Protocol, flags and failures are those of `peer_device`.

Shapes: T tokens of this rank, K experts per token, D hidden, R ranks, E experts, L experts of this rank, P places for
received rows (place = source * most tokens + token), M pairs (row, expert) computed here, C chunks of pairs.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.errors import BywashError, ConfigError
from bywash.exchange.names import Combine
from bywash.exchange.peer_errors import Code, bad_expert, read_failure
from bywash.exchange.peer_layout import DEADLINE_WORD, FAILURE_WORDS, GENERATIONS, STATE_WORDS, PeerLayout
from bywash.exchange.peer_tensors import Channels, DeviceReceived, expect, padded
from bywash.kernels.compile import THREADS, WARPS, KernelShape, compile_source, kernel_source
from bywash.kernels.driver import check, driver
from bywash.kernels.launch import Kernels, launch
from bywash.memory.cuda_heap import open_cuda_heaps
from bywash.memory.rendezvous import Members

SOURCES = ("common.cuh", "gather.cu", "gather_words.cu")
CHUNK = 1024
"""Pairs of one block; the same as in gather.cu."""
_BLOCKS_PER_SM = 3
"""Of the kernels that add rows; as fast as any (benchmarks/exchange/gpu_sums.py)."""
_ALIGN = 256
_WHO = "exchange by copy engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherLayout:
    """What lies where in every rank's heap, in bytes. `sizes` are those of the exchange by kernel."""

    sizes: PeerLayout

    def offsets(self, generation: int) -> dict[str, int]:
        """Offset of every part of a generation, by the name of the kernels' parameter."""
        start = _ALIGN * -(-8 * self.sizes.ranks // _ALIGN) + generation * sum(self._parts().values())
        found = {"at_abort": 0}
        for name, size in self._parts().items():
            found[name] = start
            start += size
        return found

    @property
    def heap_bytes(self) -> int:
        """Bytes of a whole heap."""
        return self.offsets(GENERATIONS)["at_headers"]

    @property
    def arithmetic(self) -> str:
        """How `heap_bytes` comes about, in words."""
        sizes, row_bytes = self.sizes, self._row_bytes
        return (
            f"{GENERATIONS} generations x {sizes.ranks} ranks x {sizes.tokens} tokens x (2 x {row_bytes} B of rows and "
            f"sums + {12 * sizes.top_k} B of ids and weights)"
        )

    @property
    def _row_bytes(self) -> int:
        return self.sizes.padded * self.sizes.dtype.itemsize

    def _parts(self) -> dict[str, int]:
        sizes = self.sizes
        parts = {
            "at_headers": 8 * sizes.ranks,
            "at_row_flags": 8 * sizes.ranks,
            "at_out_flags": 8 * sizes.ranks,
            "at_ids": 8 * sizes.places * sizes.top_k,
            "at_weights": 4 * sizes.places * sizes.top_k,
            "at_rows": self._row_bytes * sizes.places,
            "at_slots": self._row_bytes * sizes.places,
        }
        return {name: _ALIGN * -(-size // _ALIGN) for name, size in parts.items()}


def compile_gather(shape: KernelShape, arch: str) -> bytes:
    """Machine code of the kernels around the copies.

    Raises:
        ConfigError: see `compile_source`.
    """
    return compile_source(kernel_source(SOURCES), shape.macros(), arch, name="gather", what=_WHO)


@dataclass(slots=True, kw_only=True)
class _Channel:
    """One generation: offsets, parameters, and what it keeps alive while a step is in flight."""

    offsets: dict[str, int]
    parameters: ctypes.Array[ctypes.c_uint64]
    gather: ctypes.Array[ctypes.c_uint64]
    received: DeviceReceived
    partial_PD: Tensor
    tokens: Tensor
    kept: tuple[Tensor, ...]
    held: tuple[Tensor, ...] = ()


class AllGatherDevice:
    """One rank's device end; the calls are those of `PeerDevice`, which see."""

    def __init__(
        self, members: Members, layout: PeerLayout, rank_E: NDArray[np.int32], *, combine_mode: Combine = "fast"
    ) -> None:
        """Compile, open the heaps on the current device, and be ready. Every rank calls.

        Raises:
            ConfigError: `exact`, fp8 rows, no GPU, memory that does not fit, no peer access, ranks that differ.
            RankLostError: a rank did not come.
        """
        if combine_mode == "exact" or layout.exact or layout.fp8 != "off":
            raise ConfigError(f"{_WHO}: only `fast` and `stable`, and rows as they are; use all-to-all")
        if not torch.cuda.is_available():
            raise ConfigError(f"{_WHO}: no CUDA device is visible; use --exchange shm or gloo on CPUs")
        self.rank, self.ranks, self.layout, self._members = members.rank, members.ranks, layout, members
        layout.check_use(members.ranks, combine_mode)
        layout.check_home(rank_E)
        shape = layout.kernel_shape()
        torch.cuda.synchronize()  # makes the device's context, if nothing has yet
        major, minor = torch.cuda.get_device_capability()
        self._kernels = Kernels(compile_gather(shape, f"sm_{major}{minor}"), shape)
        self._places = GatherLayout(sizes=layout)
        facts = {"heap layout": self._places.arithmetic, "experts": layout.experts}
        self._heaps = open_cuda_heaps(members, self._places.heap_bytes, arithmetic=self._places.arithmetic, facts=facts)
        self._blocks = (
            _BLOCKS_PER_SM * torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        )
        self._local = int((rank_E == self.rank).sum())
        self._copies = torch.cuda.Stream()
        with torch.inference_mode(False):  # buffers outlive the model's inference mode
            self._failure = torch.zeros(FAILURE_WORDS, dtype=torch.int64, device="cuda")
            self._failure[DEADLINE_WORD] = int(members.deadline_s * 1e9)
            channels = [self._open_channel(generation, rank_E) for generation in range(GENERATIONS)]
        self._channels = Channels(_WHO, channels)
        torch.cuda.synchronize()

    def dispatch(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> DeviceReceived:
        """Both halves; see `PeerDevice.dispatch_start`. `counts_first` changes nothing: there is nothing to plan."""
        self.dispatch_start(x_TD, ids_TK, weights_TK, tokens=tokens, generation=generation, counts_first=counts_first)
        return self.dispatch_finish(generation)

    def dispatch_start(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        tokens: Tensor | None = None,
        generation: int = 0,
        counts_first: bool = True,
    ) -> None:
        """Copy rows, ids and weights to everybody, and say so when they are there."""
        channel, layout, rows = self._channels[generation], self.layout, x_TD.shape[0]
        expect("x", x_TD, (rows, layout.hidden), layout.dtype)
        expect("ids", ids_TK, (rows, layout.top_k), torch.int64)
        expect("weights", weights_TK, (rows, layout.top_k), torch.float32)
        if rows > layout.tokens:
            raise ConfigError(f"{_WHO}: a step of {rows} tokens, the heap was opened for {layout.tokens}")
        if tokens is None:
            channel.tokens.fill_(rows)
            tokens = channel.tokens
        expect("tokens", tokens, (1,), torch.int32)
        given = padded(x_TD, layout.padded), ids_TK.contiguous(), weights_TK.contiguous()
        channel.held = (*given, tokens)
        self._kernels.set(channel.parameters, tokens=tokens.data_ptr(), room=rows)
        parts = [
            (channel.offsets[name] + self.rank * layout.tokens * tensor.shape[1] * tensor.element_size(), tensor)
            for name, tensor in zip(("at_rows", "at_ids", "at_weights"), given, strict=True)
        ]
        self._copy_to_all(
            [(peer, offset, tensor.data_ptr(), tensor.nbytes) for peer in self._in_turn() for offset, tensor in parts]
        )
        self._launch("announce_rows", 1, channel)

    def dispatch_finish(self, generation: int = 0) -> DeviceReceived:
        """Wait, on the device, for the rows of all ranks, and build the index."""
        channel = self._channels[generation]
        chunks = -(-self.layout.places * self.layout.top_k // CHUNK)
        self._launch("count_pairs", chunks, channel)
        self._launch("scan_counts", 1, channel)
        self._launch("place_pairs", chunks, channel)
        return channel.received

    def combine(self, y_MD: Tensor, *, generation: int = 0, pushed: bool = False) -> Tensor:
        """Both halves. `y_MD`: expert outputs in the order of `index_M`; none can be `pushed`."""
        if pushed:
            raise ConfigError(f"{_WHO}: outputs that were pushed, but all travel summed")
        out = self.combine_start(y_MD, generation=generation)
        self.combine_finish(generation)
        return out

    def combine_start(self, y_MD: Tensor, *, generation: int = 0) -> Tensor:
        """Add up outputs and copy the sums to their sources; returns the tensor that `combine_finish` will fill."""
        channel, layout = self._channels[generation], self.layout
        if not channel.held:
            raise ConfigError(f"{_WHO}: combine before any dispatch in generation {generation}")
        expect("outputs", y_MD, (y_MD.shape[0], layout.hidden), layout.dtype)
        rows, y_MD = channel.held[0].shape[0], padded(y_MD, layout.padded)
        out = torch.empty((rows, layout.padded), dtype=layout.dtype, device=y_MD.device)
        self._kernels.set(channel.parameters, y=y_MD.data_ptr(), out=out.data_ptr())
        channel.held = (*channel.held[:4], y_MD, out)
        self._launch("sum_partial", self._blocks, channel)
        region = layout.tokens * layout.padded * layout.dtype.itemsize
        own = channel.offsets["at_slots"] + self.rank * region
        size, partial = rows * layout.padded * layout.dtype.itemsize, channel.partial_PD.data_ptr()
        others = [peer for peer in self._in_turn() if peer != self.rank]
        self._copy_to_all([(peer, own, partial + peer * region, size) for peer in others])
        self._launch("announce_outputs", 1, channel)
        return out[:, : layout.hidden]

    def combine_finish(self, generation: int = 0) -> None:
        """Wait, on the device, and add into the tensor that `combine_start` returned. Rows past T are not written."""
        self._launch("sum_outputs", self._blocks, self._channels[generation])

    def check(self) -> None:
        """Wait for the device and raise what went wrong on it, if anything did. See `PeerDevice.check`."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> BywashError | None:
        """What `check` would raise, or None."""
        torch.cuda.current_stream().synchronize()
        return read_gather_failure(self._failure.tolist(), self._members)

    def close(self) -> None:
        """Drop the heaps; they are unmapped with the last tensor in them. Safe to call twice."""
        torch.cuda.synchronize()
        self._channels, self._heaps = Channels(_WHO), []

    def _in_turn(self) -> list[int]:
        """All ranks, the neighbour first, so that not everybody copies to the same rank at once; this rank last."""
        return [(self.rank + 1 + i) % self.ranks for i in range(self.ranks)]

    def _copy_to_all(self, copies: list[tuple[int, int, int, int]]) -> None:
        """Copies (rank, offset in its heap, source address, bytes): others' beside this stream, own ones on it."""
        main, beside, cuda = torch.cuda.current_stream(), self._copies, driver()
        beside.wait_stream(main)
        for rank, offset, source, size in copies:
            stream = main if rank == self.rank else beside
            if size:
                status = cuda.cuMemcpyDtoDAsync(self._heaps[rank].address + offset, source, size, stream.cuda_stream)
                check(status, f"copying to rank {rank}", _WHO)
        main.wait_stream(beside)

    def _open_channel(self, generation: int, rank_E: NDArray[np.int32]) -> _Channel:
        layout, own, offsets = self.layout, self._heaps[self.rank], self._places.offsets(generation)
        chunks = -(-layout.places * layout.top_k // CHUNK)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        received = DeviceReceived(
            rows_PD=own.tensor(offsets["at_rows"], (layout.places, layout.padded), layout.dtype),
            scales_PG=None,
            index_M=zeros(layout.places * layout.top_k),
            ends_L=zeros(layout.experts),
            starts_E=zeros(layout.experts + 1),
            m_PK=zeros(layout.places, layout.top_k),
            counts_RE=zeros(layout.ranks, layout.experts),
            tokens_R=zeros(layout.ranks),
        )
        mine = rank_E == self.rank
        slot_E = torch.from_numpy(np.where(mine, np.cumsum(mine) - 1, -1).astype(np.int32)).cuda()
        state, counts_CL, tokens = zeros(STATE_WORDS), zeros(chunks, max(1, self._local)), zeros(1)
        partial_PD = torch.empty((layout.places, layout.padded), dtype=layout.dtype, device="cuda")
        tensors = {"failure": self._failure, "state": state, "slot_E": slot_E}
        for name in ("index_M", "ends_L", "starts_E", "m_PK", "counts_RE", "tokens_R"):
            tensors[name] = getattr(received, name)
        values = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        values.update(offsets, rank=self.rank, max_tokens=layout.tokens)
        gather = (self._local, chunks, counts_CL.data_ptr(), partial_PD.data_ptr())
        return _Channel(
            offsets=offsets,
            parameters=self._kernels.parameters(values, [heap.address for heap in self._heaps]),
            gather=(ctypes.c_uint64 * 6)(*gather, offsets["at_ids"], offsets["at_weights"]),
            received=received,
            partial_PD=partial_PD,
            tokens=tokens,
            kept=(state, slot_E, counts_CL),
        )

    def _launch(self, name: str, blocks: int, channel: _Channel) -> None:
        arguments, shared_bytes = (channel.parameters, channel.gather), 4 * WARPS * self._local
        launch(self._kernels.function(name), blocks, THREADS, arguments, name, _WHO, shared_bytes=shared_bytes)


def read_gather_failure(words: list[int], members: Members) -> BywashError | None:
    """As `read_failure`; mistakes that only this algorithm can make, or finds elsewhere, in their own words."""
    ranks = [rank for rank in range(members.ranks) if words[1] >> rank & 1]
    if words[0] == Code.MISMATCH:
        theirs, own = words[2] >> 32 & 0xFFFFFFFF, words[2] & 0xFFFFFFFF
        return ConfigError(
            f"{_WHO}: rank {ranks[0]} brought {theirs} rows to a step, rank {members.rank} brought {own}; pad them to "
            "the same number and give the real one as `tokens`, or use all-to-all"
        )
    if words[0] == Code.BAD_EXPERT:
        return bad_expert(_WHO, ranks[0], words[2])
    return read_failure(words, members)
