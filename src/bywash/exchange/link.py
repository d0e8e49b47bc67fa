"""An emulated link between two ranks: shared memory that shows its data only when a real link would have.

For developing overlap on a machine without a network. It models one thing: a message occupies the link for
bytes / rate and arrives a latency later; messages of one ordered pair queue behind each other. No congestion, no
packets, no loss: that is the fabric simulator's work. Whatever uses a link says so: `ShmExchange.emulated`.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Rate and latency of the emulated link from one rank to another.

    Attributes:
        rate_gbps: gigabits per second, above 0. Bytes counted are what the exchange sends, without packet headers.
        latency_us: microseconds from the last bit sent until the message is visible, 0 or more.
    """

    rate_gbps: float
    latency_us: float

    def __post_init__(self) -> None:
        if not 0 < self.rate_gbps < float("inf"):
            raise ConfigError(f"link.rate_gbps = {self.rate_gbps}: must be more than 0")
        if not 0 <= self.latency_us < float("inf"):
            raise ConfigError(f"link.latency_us = {self.latency_us}: must be 0 or more")

    def __str__(self) -> str:
        return f"{self.rate_gbps:g} Gb/s, {self.latency_us:g} us"


Links = Link | Mapping[tuple[int, int], Link]
"""One link for every pair of ranks, or one for each (source, destination); pairs left out are not slowed down."""


class LinkClocks:
    """When this rank's messages are due at each peer."""

    def __init__(self, links: Links | None, rank: int, ranks: int) -> None:
        self._links: dict[int, Link] = {}
        if isinstance(links, Link):
            self._links = {peer: links for peer in range(ranks) if peer != rank}
        elif links:
            for source, destination in links:
                if not (0 <= source < ranks and 0 <= destination < ranks and source != destination):
                    raise ConfigError(f"link {source} -> {destination}: not a pair of the ranks 0..{ranks - 1}")
            self._links = {to: link for (source, to), link in links.items() if source == rank}
        self._free_ns = dict.fromkeys(self._links, 0)

    def due_ns(self, peer: int, size_bytes: int, now_ns: int | None = None) -> int:
        """Queue a message of `size_bytes` to `peer` and return when it is visible there; 0 without a link.

        Example: at 8 Gb/s and 5 us, 1000 bytes queued at 0 and again at 0 are due at 6,000 and 7,000 ns.

        Args:
            peer: the destination rank.
            size_bytes: everything the message carries.
            now_ns: when it was handed over, CLOCK_MONOTONIC; None for now.
        """
        link = self._links.get(peer)
        if link is None:
            return 0
        start = max(time.monotonic_ns() if now_ns is None else now_ns, self._free_ns[peer])
        self._free_ns[peer] = start + round(size_bytes * 8 / link.rate_gbps)
        return self._free_ns[peer] + round(link.latency_us * 1000)


def describe(links: Links | None) -> str | None:
    """What is emulated, in words for a report; None when nothing is."""
    if not links:
        return None
    if isinstance(links, Link):
        return f"emulated link: {links}"
    distinct = sorted({str(link) for link in links.values()})
    return f"emulated links: {'; '.join(distinct)}"
