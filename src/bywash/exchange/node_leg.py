"""The leg of the `hierarchical` exchange between hosts: messages to and from ranks of other hosts.

torch.distributed carries them, gloo between CPU hosts. Messages of one kind between two ranks arrive in the order they
were sent. `node_schedule` says what leaves when. Knows nothing of what is in the messages, nor of ranks of this host.

Shapes: H hosts.
"""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from bywash.errors import ConfigError
from bywash.exchange.group import Group
from bywash.exchange.host_map import HostMap
from bywash.exchange.node_schedule import NodeSchedule, Piece, Place, cut, pieces


class Message(IntEnum):
    """Kinds of messages, as torch.distributed's tags."""

    HEADER = 1
    ROWS = 2
    OUTPUTS = 3
    COUNTS = 4


@dataclass(slots=True, kw_only=True)
class Transfer:
    """Messages of one kind under way, out and in; `NodeLeg.finish` sees them through.

    Attributes:
        message: their kind.
        parts: what goes to which rank, contiguous; empty ones are not sent.
        into: where what comes from which rank is put.
        schedule: of the sends.
        began: when, on the monotonic clock; or when its turn came, if an earlier one of its kind was being sent.
        later: what has still to be sent.
        works: what has begun, by rank.
    """

    message: Message
    parts: dict[int, Tensor]
    into: dict[int, Tensor]
    schedule: NodeSchedule
    began: float = field(default_factory=time.monotonic)
    later: list[Piece] = field(default_factory=list)
    works: list[tuple[int, dist.Work]] = field(default_factory=list)


class NodeLeg:
    """One rank's messages to other hosts.

    Attributes:
        sent_bytes: what has been sent, without headers of gloo, TCP or below.
    """

    def __init__(self, group: Group, hosts: HostMap, schedule: NodeSchedule) -> None:
        self._group, self._hosts = group, hosts
        self._schedule = schedule if hosts.hosts > 2 or schedule.in_pieces else NodeSchedule()
        per_host = len(hosts.neighbours(group.rank))
        self._unsent: dict[Message, list[Transfer]] = {kind: [] for kind in Message}  # begun, not all sent; in order
        self._place = Place(hosts=hosts.hosts, per_host=per_host, index=hosts.index_R[group.rank])
        self.sent_bytes = 0

    def begin(
        self,
        message: Message,
        parts: dict[int, Tensor],
        into: dict[int, Tensor],
        during: str,
        due_bytes_H: NDArray[np.int64] | None = None,
    ) -> Transfer:
        """Begin to send `parts` and to fill `into`, by rank. Small kinds go at once, whatever the schedule.

        Args:
            message: the kind.
            parts, into: see `Transfer`.
            during: what it is for, for errors.
            due_bytes_H: what each host gets of this kind from all others; a schedule `by-counts` needs it.

        Raises:
            RankLostError: a rank is lost.
            ConfigError: at the schedule's rate it would take longer than the deadline.
        """
        large = message in (Message.ROWS, Message.OUTPUTS)
        schedule = self._schedule if large else NodeSchedule()
        transfer = Transfer(message=message, parts=parts, into=into, schedule=schedule)
        self.sent_bytes += sum(part.nbytes for part in parts.values())
        transfer.later = self._pieces(transfer, due_bytes_H)
        if schedule.name == "rotated":
            self._begin_turn(transfer, 1, during)
        else:  # a receiver tells the sender that it is ready, and that word must not queue behind rows
            self._receive(transfer, list(into), during)
            if transfer.later:
                self._unsent[message].append(transfer)
                self._send_what_is_due(message, during)
        return transfer

    def finish(self, transfer: Transfer, during: str) -> None:
        """Wait until everything has come and gone.

        Raises:
            RankLostError: a rank is lost, or later than the deadline.
        """
        while transfer.later and transfer.schedule.name != "rotated":
            first = self._unsent[transfer.message][0]
            time.sleep(max(0.0, first.began + first.later[0].due_s - time.monotonic()))
            self._send_what_is_due(transfer.message, during)
        self._wait(transfer, during)
        if transfer.schedule.name == "rotated":
            for turn in range(2, self._hosts.hosts):
                self._begin_turn(transfer, turn, during)
                self._wait(transfer, during)

    def trade(
        self,
        message: Message,
        parts: dict[int, Tensor],
        into: dict[int, Tensor],
        during: str,
        due_bytes_H: NDArray[np.int64] | None = None,
    ) -> None:
        """`begin` and `finish`."""
        self.finish(self.begin(message, parts, into, during, due_bytes_H), during)

    def _pieces(self, transfer: Transfer, due_bytes_H: NDArray[np.int64] | None) -> list[Piece]:
        distances = {rank: self._distance(self._group.rank, rank) for rank in transfer.parts}
        sizes = {rank: part.nbytes for rank, part in transfer.parts.items()}
        due_bytes = None
        if due_bytes_H is not None:
            due_bytes = {rank: int(due_bytes_H[self._hosts.host_R[rank]]) for rank in sizes}
        found = pieces(transfer.schedule, sizes, distances, self._place, due_bytes)
        if found and found[-1].due_s > self._group.deadline_s:
            raise ConfigError(
                f"--node-schedule {transfer.schedule}: at this rate a step takes {found[-1].due_s:.3g} s to send, the "
                f"deadline is {self._group.deadline_s:g} s; the rate is in Gb/s"
            )
        return found

    def _begin_turn(self, transfer: Transfer, turn: int, during: str) -> None:
        """What goes to the host `turn` ahead of this one, and comes from the one as far behind."""
        me = self._group.rank
        self._receive(transfer, [rank for rank in transfer.into if self._distance(rank, me) == turn], during)
        for piece in [piece for piece in transfer.later if self._distance(me, piece.rank) == turn]:
            self._send(transfer, piece, during)

    def _send_what_is_due(self, message: Message, during: str) -> None:
        """Of the first transfer of a kind: receivers take it for what comes next, and the link is not for two."""
        transfer = self._unsent[message][0]
        now = time.monotonic()
        due = [piece for piece in transfer.later if piece.due_s <= now - transfer.began]
        transfer.later = transfer.later[len(due) :]  # pieces are in the order of their times
        for piece in due:
            self._send(transfer, piece, during)
        if not transfer.later:
            del self._unsent[message][0]
            for following in self._unsent[message][:1]:
                following.began = now

    def _send(self, transfer: Transfer, piece: Piece, during: str) -> None:
        part = _bytes(transfer.parts[piece.rank])[piece.start : piece.stop]
        with self._blame(piece.rank, during):
            work = dist.isend(part, piece.rank, tag=int(transfer.message))
        assert work is not None, "None is for ranks outside the group"
        transfer.works.append((piece.rank, work))

    def _receive(self, transfer: Transfer, ranks: list[int], during: str) -> None:
        for rank in ranks:
            part = transfer.into[rank]
            for start, stop in cut(part.nbytes, transfer.schedule):
                with self._blame(rank, during):
                    work = dist.irecv(_bytes(part)[start:stop], rank, tag=int(transfer.message))
                assert work is not None, "None is for ranks outside the group"
                transfer.works.append((rank, work))

    def _wait(self, transfer: Transfer, during: str) -> None:
        for rank, work in transfer.works:
            with self._blame(rank, during):
                work.wait()
        transfer.works.clear()

    def _distance(self, source: int, target: int) -> int:
        """The turn in which the host of `source` sends to that of `target`."""
        return (self._hosts.host_R[target] - self._hosts.host_R[source]) % self._hosts.hosts

    def _blame(self, rank: int, during: str) -> AbstractContextManager[None]:
        return self._group.blame(f"{during}, between ranks {self._group.rank} and {rank}")


def _bytes(part: Tensor) -> Tensor:
    """The same memory as bytes."""
    return part.reshape(-1).view(torch.uint8)
