"""In which order and at which times a rank sends to other hosts: the schedules of the node leg, as pure arithmetic.

- `together` begins everything at once: the shortest on a network that takes it.
- `rotated` goes through the other hosts in turn, in every turn one host to send to and another to receive from, so that
  no host is sent to by two at a time (no incast). Each turn ends before the next begins.
- `staggered` has the same order, but turns begin by the clock, as long apart as a mean message takes.
- `paced` begins everything at once, in pieces that leave at the rate at which all together fill the receiver's link,
  were all messages alike. Pieces of one sender go round the hosts, and the senders to one host take turns.
- `by-counts` does so at each message's share of the receiver's link, by what the receiver's host is due from everybody
  in this step (`node_due`): all senders together offer a host its line, whatever the skew, and what it is due ends
  together. `fabric.sending` has where the formula is from, docs/fabric-tune.md what the simulator says of it.

The last three need the rate of a host's link. `bywash fabric schedules` says which suits a fabric. `node_leg` calls
this.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from bywash.errors import ConfigError

Schedule = Literal["together", "rotated", "staggered", "paced", "by-counts"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
RATED = ("staggered", "paced", "by-counts")
"""Those that have to be told the rate of a host's link."""
_IN_PIECES = ("paced", "by-counts")
PIECE_S = 80e-6
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 16 << 10, 256 << 10
"""A piece of a paced message takes the link so long, between these sizes: a call for each costs little, and pieces of
several senders that meet fit into a switch's buffer."""
_LEAST_GBPS, _MOST_GBPS = 1e-6, 1e5
_LEAST_FACTOR, _MOST_FACTOR = 0.01, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSchedule:
    """A schedule; `rate_gbps` is what the link of a host carries, where the schedule needs it.

    `factor` is for `by-counts`: how many times that rate a host is offered by all its senders together.
    """

    name: Schedule = "together"
    rate_gbps: float | None = None
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "NodeSchedule":
        """From an option: `together`, `rotated`, `staggered:25`, `paced:25`, `by-counts:25` or `by-counts:25,1.05`.

        The first number is the rate in Gb/s, the second the factor.

        Raises:
            ConfigError: an unknown name, or a number that is missing, superfluous or out of range.
        """
        name, colon, numbers = text.partition(":")
        match = next((known for known in SCHEDULES if known == name), None)
        if match is None:
            raise ConfigError(f"--node-schedule {text}: choose one of {', '.join(SCHEDULES)}")
        if match not in RATED:
            if colon:
                raise ConfigError(f"--node-schedule {text}: {match} takes no rate")
            return cls(name=match)
        rate, comma, factor = numbers.partition(",") if match == "by-counts" else (numbers, "", "")
        if not _LEAST_GBPS <= (rate_gbps := _number(rate)) <= _MOST_GBPS:
            raise ConfigError(
                f"--node-schedule {text}: give the rate of a host's link in Gb/s, such as {match}:25 (the NIC's, or "
                f"what is left of it), from {_LEAST_GBPS:g} to {_MOST_GBPS:g}"
            )
        if comma and not _LEAST_FACTOR <= _number(factor) <= _MOST_FACTOR:
            raise ConfigError(
                f"--node-schedule {text}: after the comma give how many times that rate a host is to be offered, from "
                f"{_LEAST_FACTOR:g} to {_MOST_FACTOR:g}, such as {match}:25,1.05"
            )
        return cls(name=match, rate_gbps=rate_gbps, factor=_number(factor) if comma else 1.0)

    def __str__(self) -> str:
        rate = "" if self.rate_gbps is None else f":{self.rate_gbps:g}"
        return self.name + rate + ("" if self.factor == 1 else f",{self.factor:g}")

    @property
    def in_pieces(self) -> bool:
        """Whether messages leave piece by piece, at rates of their own."""
        return self.name in _IN_PIECES

    @property
    def by_counts(self) -> bool:
        """Whether it has to be known what every host is due."""
        return self.name == "by-counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sender is: of `hosts` hosts, number `index` of the `per_host` ranks that share its host's link."""

    hosts: int
    per_host: int
    index: int

    def phase(self, distance: int) -> float:
        """When in a round of all senders its piece for the host at `distance` is sent: from 0 to below 1.

        Every sender to a host has its own, and every host that a sender sends to. Example: 3 hosts of one rank each
        send to the next one at 0, and to the one after it at 1/2.
        """
        return ((distance - 1) * self.per_host + self.index) / ((self.hosts - 1) * self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes `start` to `stop` of the message for `rank`, to be sent `due_s` seconds after the beginning."""

    rank: int
    start: int
    stop: int
    due_s: float


def pieces(
    schedule: NodeSchedule,
    sizes: Mapping[int, int],
    distances: Mapping[int, int],
    place: Place,
    due_bytes: Mapping[int, int] | None = None,
) -> list[Piece]:
    """When to send what, in the order of sending.

    Example: staggered at 8 Gb/s, messages of 1 MB for hosts at distances 1 and 2, one rank a host: the second is due
    after 1 ms. Paced, each has 4 Gb/s and takes 2 ms in 13 pieces; the first of them are due at 0 and 1/26 of 2 ms.

    Args:
        schedule: which.
        sizes: bytes for each rank.
        distances: in which turn each rank's host comes, from 1.
        place: of this rank.
        due_bytes: see `rates_gbps`.
    """
    sent = {rank: size for rank, size in sizes.items() if size}
    order = sorted(sent, key=lambda rank: (distances[rank], rank))
    if schedule.in_pieces:
        rates = rates_gbps(schedule, sent, place.per_host, due_bytes or {})
        found = []
        for rank in order:
            parts, whole_s = cut(sent[rank], schedule), _seconds(sent[rank], rates[rank])
            for number, (start, stop) in enumerate(parts):
                due_s = whole_s * (number + place.phase(distances[rank])) / len(parts)
                found.append(Piece(rank=rank, start=start, stop=stop, due_s=due_s))
        return sorted(found, key=lambda piece: piece.due_s)
    turn_s = 0.0
    if schedule.name == "staggered" and sent:
        turn_s = _seconds(place.per_host * sum(sent.values()) / len(sent), schedule.rate_gbps)
    return [Piece(rank=rank, start=0, stop=sent[rank], due_s=(distances[rank] - 1) * turn_s) for rank in order]


def rates_gbps(
    schedule: NodeSchedule, sent: Mapping[int, int], per_host: int, due_bytes: Mapping[int, int]
) -> dict[int, float]:
    """How fast each message may leave, in Gb/s, by the rank it is for.

    `paced`: an equal share of the link; with as many sources a receiver's link is then just full. `by-counts`: factor x
    rate x its bytes / all that the receiver's host is due.

    Example: by-counts at 25 Gb/s, 1 MB for rank 3, whose host is due 5 MB: 5 Gb/s, so that it ends after 1.6 ms, as all
    of the 5 MB do.

    Args:
        schedule: `paced` or `by-counts`.
        sent: bytes for each rank, none of them 0.
        per_host: ranks that share a host's link.
        due_bytes: by rank, what its host gets from all other hosts' ranks in all; for `by-counts`.
    """
    assert schedule.rate_gbps is not None, "parse asks for it"
    if not schedule.by_counts:
        return dict.fromkeys(sent, schedule.rate_gbps / (per_host * max(1, len(sent))))
    offered_gbps = schedule.factor * schedule.rate_gbps
    return {rank: offered_gbps * size / due_bytes[rank] for rank, size in sent.items()}


def cut(size: int, schedule: NodeSchedule) -> list[tuple[int, int]]:
    """A message of `size` bytes as sender and receiver cut it."""
    if not schedule.in_pieces:
        return [(0, size)] if size else []
    assert schedule.rate_gbps is not None, "parse asks for it"
    length = min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, int(schedule.rate_gbps * 1e9 / 8 * PIECE_S)))
    return [(start, min(size, start + length)) for start in range(0, size, length)]


def _seconds(size: float, rate_gbps: float | None) -> float:
    assert rate_gbps is not None, "parse asks for it"
    return size * 8e-9 / rate_gbps


def _number(text: str) -> float:
    """NaN for what is none, which no range has. Not all that Python takes: `2_5` is no 25."""
    if re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text) is None:
        return math.nan
    return float(text)
