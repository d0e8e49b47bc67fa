"""Addresses in a `peer` heap: what lies where, in every rank's heap alike.

Two generations of everything, so that two steps (micro-batches) can be in flight; each is a channel of its own with
its own flags, epochs and buffers. Knows nothing of devices or processes. `peer_device` and the tests call it.

Shapes: R ranks, E experts, K experts per token, T the most tokens of a rank, P = R * T places for received rows.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.exchange.names import Combine
from bywash.kernels.compile import MAX_BLOCKS, WARPS, KernelShape

GENERATIONS = 2
VEC_BYTES = 16
"""Rows move in vectors of this size; narrower rows are padded."""
PAIR_BYTES = 8
Fp8 = Literal["off", "amax", "power-of-two"]
GROUP_COLUMNS = 128
"""Columns of a row that share a scale when rows are sent as e4m3."""
MAX_PAIRS = 1 << 20
"""Pairs of one source: a pair's position among those of its expert has 20 bits in the message."""
FAILURE_WORDS, DEADLINE_WORD = 5, 4
STATE_WORDS, DIGEST_WORD = 7, 2
"""Of the kernels' records `Failure` and `State`, and where in them Python writes."""
_ALIGN = 256
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SCALINGS: tuple[Fp8, ...] = get_args(Fp8)
_SM_BYTES = 32 << 10
"""What the warps of one multiprocessor load in one round: 16 warps x 4 loads x 512 bytes."""
_FEWEST_SMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """Sizes and offsets, in bytes.

    Attributes:
        ranks, experts, top_k: R, E and K.
        tokens: T, the most that a rank may bring to a step.
        hidden: elements of a row as the model has it.
        dtype: of the rows.
        exact: whether every pair's output travels back (K slots per token) or one row per rank (R slots).
        fp8: whether dispatch sends e4m3 rows with a float32 scale for each 128 columns, and which scales; see
            `fp8_rows.quantise_rows`. Outputs travel in `dtype` all the same.
        real_experts: 0, or for an elastic layer the experts that the router names; E then are R x (own + guests)
            groups.
        guests: slots of each rank for foreign experts' weights.
        mixed: whether tokens of which some pair is computed away from home travel back unsummed (elastic `stable`).
    """

    ranks: int
    experts: int
    top_k: int
    tokens: int
    hidden: int
    dtype: torch.dtype
    exact: bool
    fp8: Fp8 = "off"
    real_experts: int = 0
    guests: int = 0
    mixed: bool = False

    def __post_init__(self) -> None:
        most = MAX_PAIRS // 2 if self.mixed else MAX_PAIRS
        if self.tokens < 1 or self.tokens * self.top_k > most:
            raise ConfigError(
                f"exchange peer: {self.tokens} tokens x top-{self.top_k}; a rank may bring 1 to {most} pairs"
            )
        if self.real_experts and self.experts % self.ranks:
            raise ConfigError(f"exchange peer: {self.experts} groups on {self.ranks} ranks; as many on each are needed")
        if self.hidden < 1:
            raise ConfigError(f"exchange peer: hidden size {self.hidden}")
        if self.dtype not in _DTYPES:
            raise ConfigError(f"exchange peer: rows of {self.dtype}; float32, bfloat16 or float16")
        if self.fp8 not in _SCALINGS:
            raise ConfigError(f"exchange peer: fp8 {self.fp8!r}: choose one of {', '.join(_SCALINGS)}")
        if self.fp8 != "off" and self.dtype.itemsize != 2:
            raise ConfigError(f"exchange peer: fp8 rows are made from bfloat16 or float16, not from {self.dtype}")

    def kernel_shape(self, **build: int) -> KernelShape:
        """What is compiled in for this layout; `build` has other fields, for tests.

        Raises:
            ConfigError: more ranks, experts or experts per token than the kernels have room for.
        """
        return KernelShape(
            ranks=self.ranks,
            experts=self.experts,
            top_k=self.top_k,
            vecs=self.vecs,
            dtype=_DTYPES[self.dtype],
            exact=self.exact,
            fp8=_SCALINGS.index(self.fp8),
            real_experts=self.real_experts,
            guests=self.guests,
            mixed=self.mixed,
            **build,
        )

    def check_use(self, ranks: int, combine_mode: Combine) -> None:
        """Check what an exchange is opened with beside this layout.

        Raises:
            ConfigError: another number of ranks, or slots for another way to combine.
        """
        if ranks != self.ranks:
            raise ConfigError(f"exchange peer: a layout for {self.ranks} ranks in a group of {ranks}")
        if (combine_mode == "exact") != self.exact:
            raise ConfigError(f"exchange peer: combine {combine_mode!r} in a layout with exact={self.exact}")

    def check_home(self, rank_E: NDArray[np.int32]) -> None:
        """Check who computes each expert.

        Raises:
            ConfigError: not one rank for each expert.
        """
        if rank_E.shape != (self.experts,) or not ((rank_E >= 0) & (rank_E < self.ranks)).all():
            raise ConfigError(
                f"exchange peer: experts are placed by {list(rank_E.shape)} ranks; {self.experts} of 0 to "
                f"{self.ranks - 1} are needed"
            )

    @property
    def vecs(self) -> int:
        """16-byte vectors of a row."""
        return -(-self.hidden * self.dtype.itemsize // VEC_BYTES)

    @property
    def padded(self) -> int:
        """Elements of a row in the heap."""
        return self.vecs * VEC_BYTES // self.dtype.itemsize

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row as dispatch sends it, without its scales."""
        return VEC_BYTES * (self.vecs if self.fp8 == "off" else -(-self.vecs // 2))

    @property
    def groups(self) -> int:
        """G, scales of a row; 0 without fp8."""
        return 0 if self.fp8 == "off" else -(-self.hidden // GROUP_COLUMNS)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales in the heap."""
        return VEC_BYTES * -(-4 * self.groups // VEC_BYTES)

    def multiprocessors(self, available: int) -> int:
        """How many a kernel should take: as many as a full step gives one round of loads, so that no warp is idle.

        Fewer leave the wire idle when rows are many, more only cost their start when rows are few; docs/benchmarks.md
        has the measurements. Example: 56 of 132 for 128 rows of 14,336 bytes, all for 4,096.
        """
        rounds = -(-self.tokens * self.vecs * VEC_BYTES // _SM_BYTES)
        return min(available, MAX_BLOCKS, max(_FEWEST_SMS, -(-rounds // 8) * 8))

    @property
    def apart(self) -> bool:
        """Whether some outputs travel back unsummed: then experts may write them straight into their source's slots."""
        return self.exact or self.mixed

    @property
    def slots_of_token(self) -> int:
        """Rows that a source has room for, for the outputs of one of its tokens."""
        if self.exact:
            return self.top_k
        return max(self.top_k, self.ranks) if self.mixed else self.ranks

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
        sent = f"{self.sent_bytes} B row + {self.scale_bytes} B scales" if self.groups else f"{row_bytes} B row"
        arriving = sizes["at_rows"] + sizes["at_scales"] + sizes["at_pairs"]
        slots = f"{self.slots_of_token} {'pairs' if self.exact else 'pairs or ranks' if self.mixed else 'ranks'}"
        return (
            f"{GENERATIONS} generations x ({self.ranks} sources x {self.tokens} tokens x ({sent} + "
            f"{PAIR_BYTES * self.top_k} B index and weights) = {arriving:,} B, + "
            f"{self.tokens} tokens x {slots} x {row_bytes} B of outputs = {sizes['at_slots']:,} B)"
        )

    def _sizes(self) -> dict[str, int]:
        row_bytes = self.vecs * VEC_BYTES
        sizes = {
            "at_cells": 8 * self.ranks * self.experts,
            "at_headers": 8 * self.ranks,
            "at_row_flags": 8 * self.ranks * MAX_BLOCKS,
            "at_out_flags": 8 * self.ranks * MAX_BLOCKS * WARPS,
            "at_pairs": PAIR_BYTES * self.places * self.top_k,
            "at_rows": self.sent_bytes * self.places,
            "at_scales": self.scale_bytes * self.places,
            "at_slots": row_bytes * self.tokens * self.slots_of_token,
            "at_real_cells": 8 * self.ranks * self.real_experts,
        }
        return {name: _ALIGN * -(-size // _ALIGN) for name, size in sizes.items()}
