"""Sizes of the node leg between GPUs: how many rows a rank sends to a host, in how many waves, and where they lie.

NCCL takes its sizes from the host, so rows go in *waves* of a fixed capacity: the device fills as many as it needs,
the rest travels as padding. All waves together hold a whole step, so nothing can overflow. A caller who expects few
rows to cross may launch fewer (`NodeDevice.dispatch(waves=...)`): the device says when they were too few.

Shapes: T the most tokens of a rank, H hosts, O = H - 1 other hosts, L ranks of a host, K experts per token, E experts,
W waves, C rows of a wave for one host, S = W * O * C slots, D hidden, J outputs that come back for a row.
Slots are numbered wave by wave, then by host, then by row, so that the first waves are the first slots.

Knows nothing of devices or processes. `node_device` and the tests call it.
"""

from dataclasses import dataclass
from math import comb, sqrt

import torch

from bywash.errors import ConfigError
from bywash.exchange.names import Combine
from bywash.exchange.peer_layout import PeerLayout

_STEP = 16
"""Capacities are multiples of this, so that parts of a buffer stay aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """Sizes, equal on all ranks.

    Attributes:
        hosts, per_host: H and L.
        experts, top_k, tokens, hidden, dtype: E, K, T, D and what a row is made of, as in `PeerLayout`.
        combine: see `Exchange`.
        capacity: C; `node_capacity` has a good one.
    """

    hosts: int
    per_host: int
    experts: int
    top_k: int
    tokens: int
    hidden: int
    dtype: torch.dtype
    combine: Combine
    capacity: int

    def __post_init__(self) -> None:
        if self.hosts < 2:
            raise ConfigError("exchange across hosts: all ranks are on one host; use `peer`")
        if not 1 <= self.capacity <= max(1, self.tokens):
            raise ConfigError(f"exchange across hosts: capacity {self.capacity}; 1 to {self.tokens} rows")
        if self.hidden * self.dtype.itemsize % 16:
            raise ConfigError(
                f"exchange across hosts: rows of {self.hidden} {self.dtype} are no multiple of 16 bytes; pad them"
            )

    @property
    def others(self) -> int:
        """O."""
        return self.hosts - 1

    @property
    def waves(self) -> int:
        """How many hold a whole step of T tokens, all for one host."""
        return -(-self.tokens // self.capacity)

    @property
    def pairs(self) -> bool:
        """Whether all outputs come back unsummed: `exact`, and `stable` where a host's sum is not a rank's."""
        return self.combine == "exact" or (self.combine == "stable" and self.per_host > 1)

    @property
    def outputs(self) -> int:
        """J."""
        return self.top_k if self.pairs else 1

    def slots(self, waves: int) -> int:
        """S of the first `waves`."""
        return waves * self.others * self.capacity

    def wire_bytes(self, waves: int) -> int:
        """Payload that one rank sends to other hosts in a step, padding included: rows out and outputs back."""
        row = self.hidden * self.dtype.itemsize
        return self.slots(waves) * (row * (1 + self.outputs) + 8 * self.top_k)

    def inner(self, experts_here: int) -> PeerLayout:
        """The exchange inside a host that computes `experts_here` experts: own tokens, then a row for each slot.

        Where outputs come back unsummed, each pair is a token of its own with one expert.
        """
        per_row = self.top_k if self.pairs else 1
        return PeerLayout(
            ranks=self.per_host,
            experts=max(1, experts_here),
            top_k=1 if self.pairs else self.top_k,
            tokens=(self.tokens + self.slots(self.waves)) * per_row,
            hidden=self.hidden,
            dtype=self.dtype,
            exact=self.pairs,
        )


def node_capacity(tokens: int, top_k: int, experts: int, hosts: int, *, sigmas: float = 4.0) -> tuple[int, str]:
    """Rows that one wave should hold so that one is nearly always enough under even routing, and how that comes about.

    A token needs a given host with probability 1 - C(E - e, K) / C(E, K), where the host has e = E / H experts.

    Example: 4,096 tokens, top-8 of 256 experts on 2 hosts: 0.9965, 4,096 rows; on 8 hosts 0.662, 2,832 rows.

    Raises:
        ConfigError: more experts for a token than there are.
    """
    if top_k > experts:
        raise ConfigError(f"exchange across hosts: top-{top_k} of {experts} experts")
    share = -(-experts // hosts)
    chance = 1 - comb(experts - share, top_k) / comb(experts, top_k)
    rows = tokens * chance + sigmas * sqrt(tokens * chance * (1 - chance))
    capacity = min(tokens, -(-int(rows + 1) // _STEP) * _STEP)
    why = (
        f"{tokens} tokens x {chance:.3f} need a host of {share} experts, and {sigmas:g} standard deviations: "
        f"{capacity} rows"
    )
    return max(1, capacity), why
