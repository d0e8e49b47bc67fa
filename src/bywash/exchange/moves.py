"""All-gather / reduce-scatter in steps that a schedule can place: what moves bytes apart from what computes.

`GatherSteps` is `AllGatherDevice` cut at the wire. `prepare`, `receive`, `add` and `finish` are kernels, for the
compute stream; `move_rows` and `move_sums` are for a communication stream of its own, and launch no kernel of ours:
copy engines carry the payload and, behind it, the word that says so. So they go on while an expert kernel takes every
multiprocessor. How bytes travel is a `Moves`: `PeerCopies` straight into the peer's memory (no multiprocessor),
`NcclMoves` by NCCL on whatever it finds (its kernels need multiprocessors), `staged.HostMoves` through the host's
memory (none), `Arrived` not at all, to measure the kernels alone.

Rows stay where they are: the caller's hidden states, ids and weights live in this rank's own region of the heap.

Why no barrier: within a generation a rank moves rows only after its `finish` has seen every rank's outputs flag of the
step before (so all have read its last rows), and sums only after its `receive` has seen every rank's rows flag (set
once that rank has read its last sums).

Shapes: R ranks, T tokens that every rank has room for (all travel; the real number is on the device), K experts per
token, D hidden, P = R * T places.
Knows nothing of schedules. `moe.pipeline.stack_cuda` calls it.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bywash.errors import BywashError, ConfigError
from bywash.exchange.allgather import AllGatherDevice
from bywash.exchange.peer_layout import GENERATIONS, PeerLayout
from bywash.exchange.peer_tensors import DeviceReceived, expect
from bywash.kernels.compile import THREADS
from bywash.kernels.driver import check, driver
from bywash.kernels.launch import launch
from bywash.memory.cuda_heap import CudaHeap
from bywash.memory.rendezvous import Members

_WORDS, _AT_HEADER, _AT_ROWS, _AT_OUTPUTS = 3, 0, 1, 2
_LATE, _RECEIVE_ROWS = 1, 1
_POLL_S = 0.002
_WHO = "exchange by copies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Contiguous bytes from one rank to another.

    Attributes:
        source: address on the sender; 0 where only the receiver describes it.
        offset: in the receiver's heap.
        size: bytes.
    """

    source: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One half of one step: what this rank sends to and gets from every other rank, in order; flags come last.

    Attributes:
        number: generation and half, counted together: which of the fixed places it may use on the way.
        sent, got: by rank; this rank's own are empty.
    """

    number: int
    sent: tuple[tuple[Piece, ...], ...]
    got: tuple[tuple[Piece, ...], ...]


class Moves(Protocol):
    """Carries out moves on torch's current stream, without waiting for the host. Every rank makes the same calls."""

    def __call__(self, move: Move) -> None:
        """Send and, where the way needs the receiver's help, receive."""

    def give_up(self) -> None:
        """Let every wait on the way end, after a deadline."""


MakeMoves = Callable[[Members, list[CudaHeap], Sequence[Move]], Moves]
"""(ranks, everyone's heap as mapped here, all moves that there will be) to the way they take. Every rank calls."""


class PeerCopies:
    """This device's copy engines write into the peers' heaps. The neighbour first, so that not all write to one."""

    def __init__(self, members: Members, heaps: list[CudaHeap], moves: Sequence[Move]) -> None:
        self._rank, self._heaps = members.rank, heaps

    def __call__(self, move: Move) -> None:
        """See `Moves`."""
        ranks = len(self._heaps)
        for peer in [(self._rank + 1 + i) % ranks for i in range(ranks - 1)]:
            for piece in move.sent[peer]:
                copy(self._heaps[peer].address + piece.offset, piece.source, piece.size)

    def give_up(self) -> None:
        """Copies wait for nobody."""


class Arrived:
    """Nothing moves: flags say at once that what an earlier step left in the heap has come. Measures kernels alone."""

    def __init__(self, members: Members, heaps: list[CudaHeap], moves: Sequence[Move]) -> None:
        self._own = heaps[members.rank]

    def __call__(self, move: Move) -> None:
        """Copy this rank's own flags to where the peers' would come."""
        for sent, got in zip(move.sent, move.got, strict=True):
            for mine, theirs in zip(sent, got, strict=True):
                if mine.size == 8:
                    copy(self._own.address + theirs.offset, mine.source, mine.size)

    def give_up(self) -> None:
        """Nothing waits."""


class NcclMoves:
    """NCCL sends and receives every piece. Its kernels need multiprocessors: leave it some."""

    def __init__(self, group: dist.ProcessGroup, rank: int, heaps: list[CudaHeap]) -> None:
        self._group, self._rank, self._own = group, rank, heaps[rank]

    @classmethod
    def on(cls, group: dist.ProcessGroup) -> MakeMoves:
        """For `GatherSteps`, over an NCCL group of the same ranks."""
        return lambda members, heaps, moves: cls(group, members.rank, heaps)

    def __call__(self, move: Move) -> None:
        """See `Moves`. All pieces of a move are one NCCL group; they are complete when the stream goes on."""
        works = []
        for peer, (sent, got) in enumerate(zip(move.sent, move.got, strict=True)):
            for mine, theirs in zip(sent, got, strict=True):
                works.append(dist.P2POp(dist.isend, _at(mine.source, mine.size), peer, self._group))
                into = self._own.tensor(theirs.offset, (theirs.size,), torch.uint8)
                works.append(dist.P2POp(dist.irecv, into, peer, self._group))
        for work in dist.batch_isend_irecv(works):
            work.wait()

    def give_up(self) -> None:
        """NCCL has a deadline of its own."""


class GatherSteps(AllGatherDevice):
    """One rank's device end, in steps; see the module. Generations are independent; each half is called in order."""

    def __init__(
        self, members: Members, layout: PeerLayout, rank_E: NDArray[np.int32], *, make_moves: MakeMoves = PeerCopies
    ) -> None:
        """Compile, open the heaps on the current device and the way between them. Every rank calls.

        Raises:
            ConfigError, RankLostError: see `AllGatherDevice` and the `Moves`.
        """
        if layout.padded != layout.hidden:
            raise ConfigError(f"{_WHO}: rows of {layout.hidden} {layout.dtype} are no multiple of 16 bytes")
        super().__init__(members, layout, rank_E, combine_mode="stable")
        with torch.inference_mode(False):
            self._words = torch.zeros(GENERATIONS, _WORDS, dtype=torch.int64, device="cuda")
        self._rows = [self._row_move(generation) for generation in range(GENERATIONS)]
        self._sums = [self._sum_move(generation) for generation in range(GENERATIONS)]
        others = sum(1 << rank for rank in range(self.ranks) if rank != self.rank)
        self._late = torch.tensor([_LATE, others, 0, _RECEIVE_ROWS], dtype=torch.int64).pin_memory()
        self._rescue = torch.cuda.Stream()
        self.moves: Moves = make_moves(members, self._heaps, [*self._rows, *self._sums])

    def arrived(self) -> Moves:
        """A way on which nothing moves, to put in place of `moves` for a measurement."""
        return Arrived(self._members, self._heaps, [])

    def inputs(self, generation: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the caller writes its rows [T, D], int64 ids [T, K] and float32 weights [T, K] before `prepare`."""
        layout, own, at = self.layout, self._heaps[self.rank], self._channels[generation].offsets
        first = self.rank * layout.tokens
        row_bytes, pairs = layout.padded * layout.dtype.itemsize, layout.top_k
        return (
            own.tensor(at["at_rows"] + first * row_bytes, (layout.tokens, layout.padded), layout.dtype),
            own.tensor(at["at_ids"] + 8 * first * pairs, (layout.tokens, pairs), torch.int64),
            own.tensor(at["at_weights"] + 4 * first * pairs, (layout.tokens, pairs), torch.float32),
        )

    def prepare(self, tokens: Tensor, generation: int) -> None:
        """The inputs are there, `tokens` of them (int32 [1] on the device): make ready what says so to the others."""
        channel = self._channels[generation]
        channel.held = (tokens,)
        self._kernels.set(channel.parameters, tokens=tokens.data_ptr(), room=self.layout.tokens)
        self._with_words("prepare_rows", generation)

    def move_rows(self, generation: int) -> None:
        """Carry inputs to everybody. On the communication stream, ordered behind `prepare`."""
        self.moves(self._rows[generation])

    def receive(self, generation: int) -> DeviceReceived:
        """Wait, on the device, for the rows of all ranks, and build the index. Ordered behind `move_rows`."""
        return self.dispatch_finish(generation)

    def add(self, y_MD: Tensor, generation: int) -> None:
        """Add expert outputs, in the order of `index_M`, per token of other ranks: these sums are then ready to go.

        `y_MD` must stay as it is until `finish`, which adds those of own tokens.
        """
        channel, layout = self._channels[generation], self.layout
        expect("outputs", y_MD, (y_MD.shape[0], layout.hidden), layout.dtype)
        self._kernels.set(channel.parameters, y=y_MD.data_ptr())
        channel.held = (*channel.held[:1], y_MD)
        self._launch("sum_others", self._blocks, channel)
        self._with_words("prepare_outputs", generation)

    def move_sums(self, generation: int) -> None:
        """Carry sums to their tokens' sources. On the communication stream, ordered behind `add`."""
        self.moves(self._sums[generation])

    def finish(self, out_TD: Tensor, generation: int) -> None:
        """Wait, on the device, for the others' sums; add own and theirs into `out_TD`; rows past T are left alone."""
        channel, layout = self._channels[generation], self.layout
        expect("out", out_TD, (layout.tokens, layout.hidden), layout.dtype)
        self._kernels.set(channel.parameters, out=out_TD.data_ptr())
        channel.held = (*channel.held[:2], out_TD)
        self._launch("sum_own", self._blocks, channel)

    def wait_only(self, name: str, generation: int) -> None:
        """`wait_rows`, `wait_outputs` or `prepare_outputs` alone, to measure the movement without the kernels."""
        self._with_words(name, generation)

    def failure(self) -> BywashError | None:
        """See `PeerDevice.failure`. The host bounds this wait too: a way through the host has waits without a clock."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream())
        end = time.monotonic() + 2 * self._members.deadline_s
        while not done.query():
            if time.monotonic() > end:
                self._release(done)
                break
            time.sleep(_POLL_S)
        return super().failure()

    def _release(self, done: torch.cuda.Event) -> None:
        """Write a failure where kernels see it, and open every wait until the stream has run dry."""
        with torch.cuda.stream(self._rescue):
            self._failure[: self._late.numel()].copy_(self._late, non_blocking=True)
        end = time.monotonic() + 2 * self._members.deadline_s
        while not done.query() and time.monotonic() < end:
            self.moves.give_up()

    def _row_move(self, generation: int) -> Move:
        layout, at = self.layout, self._channels[generation].offsets
        sizes = {
            "at_rows": layout.tokens * layout.padded * layout.dtype.itemsize,
            "at_ids": 8 * layout.tokens * layout.top_k,
            "at_weights": 4 * layout.tokens * layout.top_k,
        }
        words = {"at_headers": _AT_HEADER, "at_row_flags": _AT_ROWS}

        def pieces(sender: int) -> tuple[Piece, ...]:
            own, heap = sender == self.rank, self._heaps[self.rank].address
            return tuple(
                Piece(source=own * (heap + at[name] + sender * size), offset=at[name] + sender * size, size=size)
                for name, size in sizes.items()
            ) + tuple(
                Piece(source=own * self._word(generation, word), offset=at[name] + 8 * sender, size=8)
                for name, word in words.items()
            )

        return self._move(2 * generation, lambda sender, receiver: pieces(sender))

    def _sum_move(self, generation: int) -> Move:
        channel, layout = self._channels[generation], self.layout
        region, partial = layout.tokens * layout.padded * layout.dtype.itemsize, channel.partial_PD.data_ptr()

        def pieces(sender: int, receiver: int) -> tuple[Piece, ...]:
            own, at = sender == self.rank, channel.offsets
            source = partial + receiver * region
            return (
                Piece(source=own * source, offset=at["at_slots"] + sender * region, size=region),
                Piece(source=own * self._word(generation, _AT_OUTPUTS), offset=at["at_out_flags"] + 8 * sender, size=8),
            )

        return self._move(2 * generation + 1, pieces)

    def _move(self, number: int, pieces: Callable[[int, int], tuple[Piece, ...]]) -> Move:
        """`pieces(sender, receiver)` for all others, in both directions."""
        others = [rank != self.rank for rank in range(self.ranks)]
        return Move(
            number=number,
            sent=tuple(pieces(self.rank, r) if other else () for r, other in enumerate(others)),
            got=tuple(pieces(r, self.rank) if other else () for r, other in enumerate(others)),
        )

    def _word(self, generation: int, word: int) -> int:
        return self._words.data_ptr() + 8 * (generation * _WORDS + word)

    def _with_words(self, name: str, generation: int) -> None:
        channel, words = self._channels[generation], ctypes.c_uint64(self._word(generation, 0))
        launch(self._kernels.function(name), 1, THREADS, (channel.parameters, channel.gather, words), name, _WHO)


def copy(target: int, source: int, size: int) -> None:
    """A copy between addresses of devices, on torch's current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    check(driver().cuMemcpyDtoDAsync(target, source, size, stream), f"copying {size} bytes", _WHO)


class _Bytes:
    """Device memory by address, as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _at(address: int, size: int) -> Tensor:
    tensor: Tensor = torch.as_tensor(_Bytes(address, size), device="cuda")
    return tensor
