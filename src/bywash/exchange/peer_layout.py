"""Addresses in a `peer` heap: what lies where, in every rank's heap alike.

Two generations of everything, so that two steps (micro-batches) can be in flight; each is a channel of its own with
its own flags, epochs and buffers. Knows nothing of devices or processes. `peer_device` and the tests call it.

Shapes: R ranks, E experts, K experts per token, T the most tokens of a rank, P = R * T places for received rows.
"""

from dataclasses import dataclass

import torch

from bywash.errors import ConfigError
from bywash.kernels.compile import MAX_CHUNKS

GENERATIONS = 2
VEC_BYTES = 16
"""Rows move in vectors of this size; narrower rows are padded."""
PAIR_BYTES = 8
MAX_PAIRS = 1 << 20
"""Pairs of one source: a pair's position among those of its expert has 20 bits in the message."""
_ALIGN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """Sizes and offsets, in bytes.

    Attributes:
        ranks, experts, top_k: R, E and K.
        tokens: T, the most that a rank may bring to a step.
        hidden: elements of a row as the model has it.
        dtype: of the rows.
        exact: whether every pair's output travels back (K slots per token) or one row per rank (R slots).
    """

    ranks: int
    experts: int
    top_k: int
    tokens: int
    hidden: int
    dtype: torch.dtype
    exact: bool

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.tokens * self.top_k > MAX_PAIRS:
            raise ConfigError(
                f"exchange peer: {self.tokens} tokens x top-{self.top_k}; a rank may bring 1 to {MAX_PAIRS} pairs"
            )
        if self.hidden < 1:
            raise ConfigError(f"exchange peer: hidden size {self.hidden}")

    @property
    def vecs(self) -> int:
        """16-byte vectors of a row."""
        return -(-self.hidden * self.dtype.itemsize // VEC_BYTES)

    @property
    def padded(self) -> int:
        """Elements of a row in the heap."""
        return self.vecs * VEC_BYTES // self.dtype.itemsize

    @property
    def places(self) -> int:
        """P, rows that can arrive: a region of T for each source."""
        return self.ranks * self.tokens

    def offsets(self, generation: int) -> dict[str, int]:
        """Offset of every part of a generation, by the name of the kernels' parameter."""
        sizes = self._sizes()
        start = _ALIGN * -(-8 * self.ranks // _ALIGN) + generation * sum(sizes.values())
        found = {"at_abort": 0}
        for name, size in sizes.items():
            found[name] = start
            start += size
        return found

    @property
    def heap_bytes(self) -> int:
        """Bytes of a whole heap."""
        return _ALIGN * -(-8 * self.ranks // _ALIGN) + GENERATIONS * sum(self._sizes().values())

    @property
    def arithmetic(self) -> str:
        """How `heap_bytes` comes about, in words."""
        sizes, row_bytes = self._sizes(), self.vecs * VEC_BYTES
        slots = f"{self.top_k} pairs" if self.exact else f"{self.ranks} ranks"
        return (
            f"{GENERATIONS} generations x ({self.ranks} sources x {self.tokens} tokens x ({row_bytes} B row + "
            f"{PAIR_BYTES * self.top_k} B index and weights) = {sizes['at_rows'] + sizes['at_pairs']:,} B, + "
            f"{self.tokens} tokens x {slots} x {row_bytes} B of outputs = {sizes['at_slots']:,} B)"
        )

    def _sizes(self) -> dict[str, int]:
        row_bytes = self.vecs * VEC_BYTES
        sizes = {
            "at_cells": 8 * self.ranks * self.experts,
            "at_headers": 8 * self.ranks,
            "at_row_flags": 8 * self.ranks,
            "at_out_flags": 8 * self.ranks * MAX_CHUNKS,
            "at_pairs": PAIR_BYTES * self.places * self.top_k,
            "at_rows": row_bytes * self.places,
            "at_slots": row_bytes * self.tokens * (self.top_k if self.exact else self.ranks),
        }
        return {name: _ALIGN * -(-size // _ALIGN) for name, size in sizes.items()}
