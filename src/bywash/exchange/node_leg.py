"""The leg of the `hierarchical` exchange between hosts: messages to and from ranks of other hosts.

torch.distributed carries them, gloo between CPU hosts. Messages of one kind between two ranks arrive in the order they
were sent. Knows nothing of what is in them, nor of ranks of this host.

Schedules: `together` begins everything at once, which is shortest on a network that takes it. `rotated` goes through
the other hosts in turn, in every phase one host to send to and another to receive from, so that no host is sent to by
two at a time (no incast); each phase ends before the next begins.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from bywash.exchange.group import Group
from bywash.exchange.host_map import HostMap

Schedule = Literal["together", "rotated"]
SCHEDULES: tuple[Schedule, ...] = ("together", "rotated")


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
        parts: what goes to which rank; empty ones are not sent.
        into: where what comes from which rank is put.
        rotate: whether phases wait for each other.
        works: what has begun, by rank.
    """

    message: Message
    parts: dict[int, Tensor]
    into: dict[int, Tensor]
    rotate: bool
    works: list[tuple[int, dist.Work]] = field(default_factory=list)


class NodeLeg:
    """One rank's messages to other hosts.

    Attributes:
        sent_bytes: what has been sent, without headers of gloo, TCP or below.
    """

    def __init__(self, group: Group, hosts: HostMap, schedule: Schedule) -> None:
        self._group, self._hosts = group, hosts
        self._rotate = schedule == "rotated" and hosts.hosts > 2
        self.sent_bytes = 0

    def begin(self, message: Message, parts: dict[int, Tensor], into: dict[int, Tensor], during: str) -> Transfer:
        """Begin to send contiguous `parts` and to fill `into`, by rank. Small kinds go at once, whatever the schedule.

        Raises:
            RankLostError: a rank is lost.
        """
        rotate = self._rotate and message in (Message.ROWS, Message.OUTPUTS)
        transfer = Transfer(message=message, parts=parts, into=into, rotate=rotate)
        self.sent_bytes += sum(part.nbytes for part in parts.values())
        self._post(transfer, 1, during)
        return transfer

    def finish(self, transfer: Transfer, during: str) -> None:
        """Wait until everything has come and gone.

        Raises:
            RankLostError: a rank is lost, or later than the deadline.
        """
        for phase in range(1, self._hosts.hosts) if transfer.rotate else (1,):
            if phase > 1:
                self._post(transfer, phase, during)
            for rank, work in transfer.works:
                with self._blame(rank, during):
                    work.wait()
            transfer.works.clear()

    def trade(self, message: Message, parts: dict[int, Tensor], into: dict[int, Tensor], during: str) -> None:
        """`begin` and `finish`."""
        self.finish(self.begin(message, parts, into, during), during)

    def _post(self, transfer: Transfer, phase: int, during: str) -> None:
        """Receives first: a receiver tells the sender that it is ready, and that word must not queue behind rows."""
        me = self._group.rank
        for call, messages, ours in ((dist.irecv, transfer.into, False), (dist.isend, transfer.parts, True)):
            for rank, part in messages.items():
                distance = self._distance(me, rank) if ours else self._distance(rank, me)
                if part.numel() and (not transfer.rotate or distance == phase):
                    with self._blame(rank, during):
                        work = call(part, rank, tag=int(transfer.message))
                    assert work is not None, "None is for ranks outside the group"
                    transfer.works.append((rank, work))

    def _distance(self, source: int, target: int) -> int:
        """The phase in which the host of `source` sends to that of `target`."""
        return (self._hosts.host_R[target] - self._hosts.host_R[source]) % self._hosts.hosts

    def _blame(self, rank: int, during: str) -> AbstractContextManager[None]:
        return self._group.blame(f"{during}, between ranks {self._group.rank} and {rank}")
