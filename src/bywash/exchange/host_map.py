"""Which ranks share a host, and through which rank a host gets rows from elsewhere.

Shapes: R ranks, H hosts. Pure arithmetic on the ranks' host names; knows nothing of processes, rows or transports.
The `hierarchical` exchange, the start-up check of `launch.hosts` and error messages use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMap:
    """Ranks by host.

    Attributes:
        members: the ranks of each host, ascending; hosts in the order of their lowest rank.
        host_R: the number of each rank's host.
        index_R: each rank's place among the ranks of its host.
    """

    members: tuple[tuple[int, ...], ...]
    host_R: tuple[int, ...]
    index_R: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[object]) -> Self:
        """From the name of each rank's host; equal names are one host.

        Example: ["a", "b", "a"] gives members ((0, 2), (1,)), host_R (0, 1, 0) and index_R (0, 0, 1).
        """
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        members = [[rank for rank, name in enumerate(names) if name == host] for host in numbers]
        host_R = tuple(numbers[name] for name in names)
        return cls(
            members=tuple(tuple(ranks) for ranks in members),
            host_R=host_R,
            index_R=tuple(members[host].index(rank) for rank, host in enumerate(host_R)),
        )

    @property
    def hosts(self) -> int:
        """H."""
        return len(self.members)

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """The ranks of `rank`'s host, itself included."""
        return self.members[self.host_R[rank]]

    def gateway(self, source: int, host: int) -> int:
        """The rank of `host` that takes the rows of `source`: the one with its index, counted round on smaller hosts.

        Example: hosts of 3 and 2 ranks; rows of ranks 0, 1, 2 enter the second host through ranks 3, 4, 3.
        """
        ranks = self.members[host]
        return ranks[self.index_R[source] % len(ranks)]

    def sources(self, rank: int) -> list[int]:
        """The ranks of other hosts whose rows enter through `rank`, ascending."""
        here = self.host_R[rank]
        return [
            source for source, host in enumerate(self.host_R) if host != here and self.gateway(source, here) == rank
        ]

    def gateways(self, rank: int) -> list[int]:
        """The rank of every other host that takes `rank`'s rows, by host."""
        return [self.gateway(rank, host) for host in range(self.hosts) if host != self.host_R[rank]]
