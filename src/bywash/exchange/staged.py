"""The way through the host's memory: for GPUs of one host that cannot reach each other's memory, or as a slow network.

Every rank owns a memory file that all ranks map and register with CUDA. A piece leaves in chunks: the sender's copy
engine writes a chunk to its file and raises the chunk's word; the receiver's copy engine waits for the word, fetches
the chunk, and takes the word down. Both directions run at once, on two streams; no kernel, no multiprocessor, no
thread.

The words are 0 or 1, never an epoch: values of stream waits are baked into a captured graph. A word is up only between
a chunk's arrival and its being fetched, and every chunk of every move has a place of its own, so a sender never waits:
it sends again only after the receiver's later flags have come (see `moves`), which leave behind the fetch.

Deadlock: leaving never waits, and is launched before fetching. If the driver put all of a graph's streams into one
queue, in the order of capture, each wait would stand behind what it waits for on every rank.

A stream wait has no clock. `give_up`, called by the host at its deadline, raises every word that this rank waits for
until its streams have run dry; the failure that was written before keeps kernels from using what came.

Knows nothing of rows. `moves.GatherSteps` calls it.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bywash.errors import ConfigError
from bywash.exchange.moves import Move, Piece
from bywash.kernels.driver import check, driver
from bywash.memory.cuda_heap import CudaHeap
from bywash.memory.heap import Heap
from bywash.memory.rendezvous import Members, open_heaps

CHUNK_BYTES = 4 << 20
"""Long enough for a copy engine to reach its rate, short enough that fetching begins soon."""
_ALIGN, _WORD_BYTES = 256, 64
_WHO = "exchange through host memory"


class HostMoves:
    """See the module. One for each exchange."""

    def __init__(
        self, members: Members, heaps: list[CudaHeap], moves: Sequence[Move], *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Open and register everybody's memory file. Every rank calls.

        Raises:
            ConfigError: memory that does not fit or cannot be registered, ranks that differ.
            RankLostError: a rank did not come.
        """
        self._rank, self._own, self._chunk = members.rank, heaps[members.rank], chunk_bytes
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        words, payload = self._lay_out(moves)
        self._words_bytes = -(-words * _WORD_BYTES // _ALIGN) * _ALIGN
        size = self._words_bytes + payload
        arithmetic = f"{words} chunks of up to {chunk_bytes} B in {len(moves)} moves"
        facts = {"staged chunk bytes": chunk_bytes, "staged bytes": size}
        self._files = open_heaps(members, size, arithmetic=arithmetic, facts=facts)
        self._words_of = [ctypes.c_uint32.from_buffer(file.buffer) for file in self._files]  # keeps the mapping
        self._device = [_register(file, size) for file in self._files]
        # Before the files are unmapped; not at exit, when the context may be gone.
        weakref.finalize(self, _unregister, [self._address(rank) for rank in range(len(self._files))]).atexit = False
        self._leave, self._fetch = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        self._awaited: set[int] = set()

    def __call__(self, move: Move) -> None:
        """See `Moves`."""
        main = torch.cuda.current_stream()
        for stream in (self._leave, self._fetch):
            stream.wait_stream(main)
        for peer, pieces in enumerate(move.sent):
            self._send(move.number, peer, pieces)
        for peer, pieces in enumerate(move.got):
            self._get(move.number, peer, pieces)
        for stream in (self._leave, self._fetch):
            main.wait_stream(stream)

    def give_up(self) -> None:
        """Raise every word that this rank has ever waited for, once."""
        for address in self._awaited:
            ctypes.c_uint32.from_address(address).value = 1

    def _lay_out(self, moves: Sequence[Move]) -> tuple[int, int]:
        """Give every (move, receiver) its first word and its first byte; returns the totals. Alike on every rank."""
        words = at = 0
        for move in moves:
            # The own entry is empty; another's has the sizes, and the places are kept for every receiver.
            pieces = next((pieces for pieces in move.sent if pieces), ())
            for receiver in range(len(move.sent)):
                self._places[move.number, receiver] = words, at
                for piece in pieces:
                    words += -(-piece.size // self._chunk)
                    at += -(-piece.size // _ALIGN) * _ALIGN
        return words, at

    def _chunks(self, number: int, receiver: int, pieces: Sequence[Piece]) -> list[tuple[int, int, int, Piece]]:
        """(word's offset, chunk's offset in the file, offset within its piece, piece)."""
        word, at = self._places[number, receiver]
        found = []
        for piece in pieces:
            for start in range(0, piece.size, self._chunk):
                found.append((word * _WORD_BYTES, self._words_bytes + at + start, start, piece))
                word += 1
            at += -(-piece.size // _ALIGN) * _ALIGN
        return found

    def _send(self, number: int, peer: int, pieces: Sequence[Piece]) -> None:
        cuda, stream, file = driver(), self._leave.cuda_stream, self._rank
        for word, place, start, piece in self._chunks(number, peer, pieces):
            size = min(self._chunk, piece.size - start)
            host = self._address(file) + place
            check(cuda.cuMemcpyDtoHAsync(host, piece.source + start, size, stream), "copying to the host", _WHO)
            check(cuda.cuStreamWriteValue32(stream, self._device[file] + word, 1, 0), "raising a word", _WHO)

    def _get(self, number: int, peer: int, pieces: Sequence[Piece]) -> None:
        cuda, stream = driver(), self._fetch.cuda_stream
        equal = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        for word, place, start, piece in self._chunks(number, self._rank, pieces):
            size = min(self._chunk, piece.size - start)
            self._awaited.add(self._address(peer) + word)
            check(cuda.cuStreamWaitValue32(stream, self._device[peer] + word, 1, equal), "awaiting a word", _WHO)
            target, host = self._own.address + piece.offset + start, self._address(peer) + place
            check(cuda.cuMemcpyHtoDAsync(target, host, size, stream), "copying from the host", _WHO)
            check(cuda.cuStreamWriteValue32(stream, self._device[peer] + word, 0, 0), "taking down a word", _WHO)

    def _address(self, rank: int) -> int:
        return ctypes.addressof(self._words_of[rank])


def _register(file: Heap, size: int) -> int:
    """Pin a mapping for the device; returns the address by which the device's streams reach its words."""
    cuda: Any = driver()
    host = ctypes.addressof(ctypes.c_uint32.from_buffer(file.buffer))
    flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    try:
        check(cuda.cuMemHostRegister(host, size, flags), f"registering {size:,} bytes of host memory", _WHO)
    except ConfigError as error:
        raise ConfigError(f"{error}; `ulimit -l` limits what may be locked") from error
    return int(check(cuda.cuMemHostGetDevicePointer(host, 0), "asking for the device's address", _WHO))


def _unregister(addresses: Sequence[int]) -> None:
    cuda: Any = driver()
    for address in addresses:
        cuda.cuMemHostUnregister(address)
