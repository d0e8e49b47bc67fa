"""Giving every rank a mapping of every other rank's heap, with nothing left on disk or in a name space.

Each rank listens on an abstract Unix socket (the kernel drops it with the process), sends its heap's descriptor to
every peer, and maps what it is sent. Names and a secret travel through the group's store. A rank whose allocation
failed sends the reason instead, so that everybody can name it. Knows nothing of what the heaps hold.
"""

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol, TypeVar

from bywash.errors import ConfigError
from bywash.memory.heap import Heap, available_bytes

_HELLO_BYTES = 2048
_POLL_S = 0.05
_LEFT_ALONE = 10
"""One part in so many of the available memory is not taken: without any, the kernel starts killing."""

AnyHeap = TypeVar("AnyHeap")


class Members(Protocol):
    """What the rendezvous needs of a group of ranks."""

    rank: int
    ranks: int
    deadline_s: float

    def share(self, value: str, during: str) -> list[str]:
        """Every rank's `value`, by rank."""

    def raise_if_gone(self, during: str) -> None:
        """Raise an error that names ranks whose process is gone or stopped."""

    def late(self, ranks: list[int], during: str) -> Exception:
        """The error that says that `ranks` did not answer in time."""


def open_heaps(members: Members, heap_bytes: int, *, arithmetic: str, facts: dict[str, Any]) -> list[Heap]:
    """Create this rank's heap of `heap_bytes`, map everyone's, and return them by rank. Every rank calls.

    Args:
        members: the ranks, all on this host.
        heap_bytes: the same on every rank.
        arithmetic: how `heap_bytes` comes about, for the error when it does not fit.
        facts: JSON values that must be equal on all ranks, by option name.

    Raises:
        ConfigError: heaps that do not fit into memory (before any is allocated, on all ranks alike), an allocation
            that failed on some rank (named), or facts that differ (named).
        RankLostError: a rank died or did not come before the deadline.
    """
    during = "opening the shared-memory heaps"
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        name, token = f"bywash-{secrets.token_hex(16)}", secrets.token_hex(16)
        listener.bind(b"\0" + name.encode())
        listener.listen(members.ranks)
        mine = {"name": name, "token": token, "facts": facts, "bytes": heap_bytes, "available": available_bytes()}
        cards = [json.loads(text) for text in members.share(json.dumps(mine), during)]
        check_facts(cards)
        _check_fit(cards, heap_bytes, arithmetic)
        error = ""
        descriptor = -1
        try:
            descriptor = Heap.create(heap_bytes)
            stack.callback(os.close, descriptor)
        except OSError as reason:
            error = f"{reason.strerror or reason}"
        send_to_all(members, cards, descriptor, error)
        if error:
            raise _refused(members.rank, heap_bytes, error, arithmetic)
        try:
            heaps = {members.rank: Heap(descriptor, heap_bytes)}
            receive_from_all(
                members,
                listener,
                token,
                "opening the shared-memory heaps",
                lambda descriptor: Heap(descriptor, heap_bytes),
                lambda rank, reason: _refused(rank, heap_bytes, reason, arithmetic),
                heaps,
            )
        except OSError as reason:
            text = f"--exchange shm: rank {members.rank} could not map the heaps: {reason.strerror or reason}"
            raise ConfigError(f"{text}. One heap is {arithmetic}") from reason
    return [heaps[rank] for rank in range(members.ranks)]


def check_facts(cards: list[dict[str, Any]]) -> None:
    """Raise `ConfigError` naming the first fact that a rank holds differently from rank 0."""
    for name, expected in cards[0]["facts"].items():
        for rank, card in enumerate(cards):
            if card["facts"].get(name) != expected:
                raise ConfigError(
                    f"{name}: rank {rank} has {card['facts'].get(name)!r}, rank 0 has {expected!r}; "
                    "every rank must open the exchange alike"
                )


def _check_fit(cards: list[dict[str, Any]], heap_bytes: int, arithmetic: str) -> None:
    """All ranks see the same numbers, taken before anyone allocates, and so all decide alike."""
    total, available = heap_bytes * len(cards), min(card["available"] for card in cards)
    if total > available - available // _LEFT_ALONE:
        raise ConfigError(
            f"--exchange shm: the heaps do not fit: {len(cards)} ranks x {_mib(heap_bytes)} = {_mib(total)}, and "
            f"{_mib(available)} of memory are available on this host (a tenth of it is left alone). "
            f"One heap is {arithmetic}. "
            "Give a step fewer tokens (smaller prompts or micro-batches), or use --exchange gloo"
        )


def _refused(rank: int, heap_bytes: int, error: str, arithmetic: str) -> ConfigError:
    return ConfigError(
        f"--exchange shm: rank {rank} could not allocate its heap of {_mib(heap_bytes)}: {error}. "
        f"One heap is {arithmetic}"
    )


def send_to_all(members: Members, cards: list[dict[str, Any]], descriptor: int, error: str) -> None:
    """One packet to each peer. It waits in the peer's socket, so nobody has to accept first.

    A peer that listens no more has died or given up because somebody's allocation failed: what arrives here, or the
    process table, will say which.
    """
    for rank, card in enumerate(cards):
        if rank == members.rank:
            continue
        hello = json.dumps({"rank": members.rank, "token": card["token"], "error": error[:500]}).encode()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(members.deadline_s)
            peer.connect(b"\0" + card["name"].encode())
            socket.send_fds(peer, [hello], [descriptor] if descriptor >= 0 else [])


def receive_from_all(
    members: Members,
    listener: socket.socket,
    token: str,
    during: str,
    mapped: Callable[[int], AnyHeap],
    refused: Callable[[int, str], ConfigError],
    heaps: dict[int, AnyHeap],
) -> None:
    """Accept one packet from each peer and map what it brings into `heaps`, up to the deadline.

    Args:
        members: the ranks.
        listener, token: where peers knock, and the secret they must bring.
        during: what is going on, for errors.
        mapped: makes a heap of a descriptor, which is closed afterwards.
        refused: makes the error for a rank that sends its reason instead of a descriptor.
        heaps: by rank; holds this rank's own at first, everybody's in the end.
    """
    end = time.monotonic() + members.deadline_s
    listener.settimeout(_POLL_S)
    while missing := [rank for rank in range(members.ranks) if rank not in heaps]:
        if time.monotonic() > end:
            raise members.late(missing, during)
        try:
            peer = listener.accept()[0]
        except TimeoutError:
            members.raise_if_gone(during)
            continue
        with peer:
            hello, descriptors = _read_hello(peer, token)
            try:
                if hello is None or hello["rank"] not in missing:
                    continue
                if not descriptors:
                    raise refused(hello["rank"], hello["error"])
                heaps[hello["rank"]] = mapped(descriptors[0])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)


def _read_hello(peer: socket.socket, token: str) -> tuple[dict[str, Any] | None, list[int]]:
    """One packet, or None if it is not from a rank of this job: anybody may knock at an abstract socket."""
    peer.settimeout(_POLL_S)
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.getuid():
        return None, []
    with suppress(OSError, ValueError, KeyError):
        text, descriptors, _, _ = socket.recv_fds(peer, _HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        hello = json.loads(text)
        if secrets.compare_digest(hello["token"], token):
            return hello, list(descriptors)
        return None, list(descriptors)
    return None, []


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
