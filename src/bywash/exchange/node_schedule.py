"""In which order and at which times a rank sends to other hosts: the schedules of the node leg, as pure arithmetic.

- `together` begins everything at once: the shortest on a network that takes it.
- `rotated` goes through the other hosts in turn, in every turn one host to send to and another to receive from, so that
  no host is sent to by two at a time (no incast). Each turn ends before the next begins.
- `staggered` has the same order, but turns begin by the clock, as long apart as a mean message takes.
- `paced` begins everything at once, in pieces that leave at the rate at which all together fill the receiver's link.

The last two need the rate of a host's link. `bywash fabric schedules` says which suits a fabric. `node_leg` calls this.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from bywash.errors import ConfigError

Schedule = Literal["together", "rotated", "staggered", "paced"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
_TIMED = ("staggered", "paced")
PIECE_BYTES = 256 << 10
"""Of a paced message: long enough to cost little per call, short enough for a switch's buffer."""
_MOST_GBPS = 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSchedule:
    """A schedule; `rate_gbps` is what the link of a host carries, where the schedule needs it."""

    name: Schedule = "together"
    rate_gbps: float | None = None

    @classmethod
    def parse(cls, text: str) -> "NodeSchedule":
        """From an option: `together`, `rotated`, `staggered:25`, `paced:25`, the rate in Gb/s.

        Raises:
            ConfigError: an unknown name, or a rate that is missing, superfluous or no rate.
        """
        name, colon, rate = text.partition(":")
        match = next((known for known in SCHEDULES if known == name), None)
        if match is None:
            raise ConfigError(f"--node-schedule {text}: choose one of {', '.join(SCHEDULES)}")
        if match not in _TIMED:
            if colon:
                raise ConfigError(f"--node-schedule {text}: {match} takes no rate")
            return cls(name=match)
        try:
            rate_gbps = float(rate)
        except ValueError:
            rate_gbps = math.nan
        if not 0 < rate_gbps <= _MOST_GBPS:
            raise ConfigError(
                f"--node-schedule {text}: give the rate of a host's link in Gb/s, such as {match}:25 (the NIC's, or "
                "what is left of it)"
            )
        return cls(name=match, rate_gbps=rate_gbps)

    def __str__(self) -> str:
        return self.name if self.rate_gbps is None else f"{self.name}:{self.rate_gbps:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes `start` to `stop` of the message for `rank`, to be sent `due_s` seconds after the beginning."""

    rank: int
    start: int
    stop: int
    due_s: float


def pieces(
    schedule: NodeSchedule, sizes: Mapping[int, int], distances: Mapping[int, int], per_host: int
) -> list[Piece]:
    """When to send what, in the order of sending.

    Example: staggered at 8 Gb/s, messages of 1 MB for hosts at distances 1 and 2, one rank a host: the second is due
    after 1 ms.

    Args:
        schedule: which.
        sizes: bytes for each rank.
        distances: in which turn each rank's host comes, from 1.
        per_host: ranks that share a host's link.
    """
    sent = {rank: size for rank, size in sizes.items() if size}
    order = sorted(sent, key=lambda rank: (distances[rank], rank))
    if schedule.name == "paced":
        return _paced(schedule, sent, order, per_host)
    turn_s = 0.0
    if schedule.name == "staggered" and sent:
        turn_s = _seconds(per_host * sum(sent.values()) / len(sent), schedule)
    return [Piece(rank=rank, start=0, stop=sent[rank], due_s=(distances[rank] - 1) * turn_s) for rank in order]


def cut(size: int, schedule: NodeSchedule) -> list[tuple[int, int]]:
    """A message of `size` bytes as sender and receiver cut it."""
    if schedule.name != "paced":
        return [(0, size)] if size else []
    return [(start, min(size, start + PIECE_BYTES)) for start in range(0, size, PIECE_BYTES)]


def _paced(schedule: NodeSchedule, sent: Mapping[int, int], order: list[int], per_host: int) -> list[Piece]:
    """Every message at an equal share of the link; with as many sources a receiver's link is then just full."""
    flows = per_host * len(sent)
    found = [
        Piece(rank=rank, start=start, stop=stop, due_s=_seconds(flows * start, schedule))
        for rank in order
        for start, stop in cut(sent[rank], schedule)
    ]
    return sorted(found, key=lambda piece: piece.due_s)


def _seconds(size: float, schedule: NodeSchedule) -> float:
    assert schedule.rate_gbps is not None, "parse asks for it"
    return size * 8e-9 / schedule.rate_gbps
