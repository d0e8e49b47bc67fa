"""What rank processes run in the test of the way through host memory without a GPU: real files, words and rendezvous.

Where CUDA would queue a copy or a wait, `Host` does it at once, on addresses of this process.
"""

import ctypes
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np

from bywash.exchange import staged
from bywash.exchange.moves import Move, Piece

SIZES = (2500, 8, 1000, 3)


class Host:
    """The driver's calls that `HostMoves` makes, carried out by the host."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1)

    def cuMemHostRegister(self, address, size, flags):
        return (0,)

    cuMemHostUnregister = cuMemHostRegister

    def cuMemHostGetDevicePointer(self, address, flags):
        return 0, address

    def cuMemcpyDtoHAsync(self, target, source, size, stream):
        ctypes.memmove(target, source, size)
        return (0,)

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync

    def cuStreamWriteValue32(self, stream, address, value, flags):
        word = ctypes.c_uint32.from_address(address)
        assert word.value != value, "a word was raised twice, or taken down twice"
        word.value = value
        return (0,)

    def cuStreamWaitValue32(self, stream, address, value, flags):
        end = time.monotonic() + 100
        while ctypes.c_uint32.from_address(address).value != value:
            assert time.monotonic() < end, "nobody raised the word"
            time.sleep(0)
        return (0,)


class Stream:
    cuda_stream = 0

    def __init__(self, priority=0):
        pass

    def wait_stream(self, other):
        pass


@contextmanager
def without_cuda():
    cuda = SimpleNamespace(Stream=Stream, current_stream=Stream)
    host = Host()
    with mock.patch.object(staged, "driver", return_value=host), mock.patch.object(staged.torch, "cuda", cuda):
        yield


def _moves(rank, ranks, source, region):
    """Two moves; every rank sends a part of its own to each other, into a region of the sender."""

    def pieces(sender, receiver, number):
        found, at = [], 0
        for size in SIZES:
            offset = (number * ranks + sender) * region + at
            found.append(Piece(source=(sender == rank) * (source + offset + receiver * 7), offset=offset, size=size))
            at += size
        return tuple(found)

    return [
        Move(
            number=number,
            sent=tuple(pieces(rank, r, number) if r != rank else () for r in range(ranks)),
            got=tuple(pieces(r, rank, number) if r != rank else () for r in range(ranks)),
        )
        for number in range(2)
    ]


def host_moves(group, rounds, chunk_bytes):
    """Rows of every rank arrive whole, in every round; returns how many bytes were compared."""
    ranks, region, compared = group.ranks, sum(SIZES) + 7 * group.ranks, 0
    memory, source = np.zeros(2 * ranks * region, np.uint8), np.zeros(2 * ranks * region, np.uint8)
    heaps = [SimpleNamespace(address=memory.ctypes.data if r == group.rank else 0) for r in range(ranks)]
    moves = _moves(group.rank, ranks, source.ctypes.data, region)
    with without_cuda():
        way = staged.HostMoves(group, heaps, moves, chunk_bytes=chunk_bytes)
        for number in range(rounds):
            source[:] = _content(number, group.rank, source.size)
            memory[:] = 0
            group.share("ready", "filling")  # in a step, flags say this
            for move in moves:
                way(move)
            for move in moves:
                for sender in (r for r in range(ranks) if r != group.rank):
                    theirs = _content(number, sender, source.size)
                    for piece in move.got[sender]:  # what is for the next receiver lies 7 bytes further
                        part = theirs[piece.offset + group.rank * 7 :][: piece.size]
                        assert (memory[piece.offset :][: piece.size] == part).all(), (number, sender, piece)
                        compared += piece.size
            group.share("done", "comparing")
    return compared


def host_give_up(group):
    """A peer that never sends: once the host gives up, the wait ends."""
    region = sum(SIZES) + 14
    memory, source = np.zeros(4 * region, np.uint8), np.zeros(4 * region, np.uint8)
    heaps = [SimpleNamespace(address=memory.ctypes.data)] * group.ranks
    moves = _moves(group.rank, group.ranks, source.ctypes.data, region)
    with without_cuda():
        way = staged.HostMoves(group, heaps, moves)
        if group.rank == 0:
            for call in ("cuStreamWaitValue32", "cuMemcpyHtoDAsync", "cuStreamWriteValue32"):
                setattr(staged.driver(), call, lambda *arguments: (0,))  # queued, not carried out
            way(moves[0])
            waiting = sorted(way._awaited)
            before = [ctypes.c_uint32.from_address(address).value for address in waiting]
            way.give_up()
            after = [ctypes.c_uint32.from_address(address).value for address in waiting]
            group.share("done", "giving up")
            return before, after
        group.share("done", "giving up")
    return [], []


def _content(number, rank, size):
    return np.random.default_rng(1000 * number + rank).integers(1, 255, size, dtype=np.uint8)
