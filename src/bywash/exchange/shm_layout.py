"""Where everything lies in the heaps of the `shm` exchange.

Two heaps per rank. The *control* heap is small and fixed: flags, counts, headers, and what is needed when a rank is
lost. The *rows* heap is sized by the largest step seen so far. Both have the same layout on every rank, so an address
in a peer's heap needs no asking. docs/shm.md has the picture.

Shapes: R ranks, E experts, K experts per token, D hidden, S source slots (tokens one rank may send in a step),
P output slots. Two generations (step parity) of everything that steps reuse.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.memory import Heap

GENERATIONS = 2
ABORT_WORDS = 64
ABORT_TEXT_BYTES = (ABORT_WORDS - 3) * 8
_CACHE_LINE = 64


class Message(IntEnum):
    """The kinds of message that have their own flags."""

    COUNTS = 0
    ROWS = 1
    ROWS_AGAIN = 2
    OUTPUTS = 3
    WEIGHTS = 4


class Header(IntEnum):
    """Words of the header that travels with a step's rows."""

    TOKENS = 0
    ROWS = 1
    OUTPUT_SLOT = 2
    HIDDEN = 3
    TOP_K = 4
    DTYPE = 5
    WIDTH = 8


class ControlLayout:
    """Offsets, in 64-bit words, of one rank's control heap. Regions start on a cache line."""

    def __init__(self, ranks: int, experts: int) -> None:
        self._ranks, self._experts = ranks, experts
        self._next = 0
        self._flags = self._region(len(Message) * GENERATIONS * ranks)
        self._dues = self._region(len(Message) * GENERATIONS * ranks)
        self._headers = self._region(GENERATIONS * ranks * Header.WIDTH)
        self._counts = self._region(GENERATIONS * ranks * experts)
        self._step_counts = self._region(GENERATIONS * ranks * experts)
        self._aborts = self._region(ranks * ABORT_WORDS)
        self.waiting = self._region(1)
        self.heap_bytes = self._next * 8
        self.arithmetic = f"flags, headers and counts of {ranks} ranks and {experts} experts"

    def _region(self, words: int) -> int:
        start = self._next
        self._next += -(-words * 8 // _CACHE_LINE) * (_CACHE_LINE // 8)
        return start

    def flags(self, message: Message, generation: int) -> int:
        """First of R flag words, one per source."""
        return self._flags + (message * GENERATIONS + generation) * self._ranks

    def dues(self, message: Message, generation: int) -> int:
        """First of R words with the emulated delivery time, ns; 0 for none. Written before the flag."""
        return self._dues + (message * GENERATIONS + generation) * self._ranks

    def header(self, generation: int, source: int) -> int:
        """First of `Header.WIDTH` words."""
        return self._headers + (generation * self._ranks + source) * Header.WIDTH

    def count_cells(self, generation: int, source: int) -> slice:
        """E words `{epoch | count}`."""
        return self._per_expert(self._counts, generation, source, 1)

    def count_cells_of_all(self, generation: int) -> slice:
        """R x E words, by source."""
        return self._per_expert(self._counts, generation, 0, self._ranks)

    def step_counts(self, generation: int, source: int) -> slice:
        """E plain words: the counts that travel with a step's rows."""
        return self._per_expert(self._step_counts, generation, source, 1)

    def step_counts_of_all(self, generation: int) -> slice:
        """R x E plain words, by source."""
        return self._per_expert(self._step_counts, generation, 0, self._ranks)

    def _per_expert(self, region: int, generation: int, source: int, sources: int) -> slice:
        start = region + (generation * self._ranks + source) * self._experts
        return slice(start, start + sources * self._experts)

    def abort(self, source: int) -> int:
        """First of `ABORT_WORDS`: kind, culprits as a bit mask, text length, text."""
        return self._aborts + source * ABORT_WORDS


class Control:
    """The control heaps of all ranks, as words.

    Attributes:
        words: by rank, for single words.
        arrays: the same memory by rank as uint64, for regions.
    """

    def __init__(self, heaps: list[Heap], layout: ControlLayout) -> None:
        self.layout = layout
        self.words = [memoryview(heap.buffer).cast("Q") for heap in heaps]
        self.arrays: list[NDArray[np.uint64]] = [np.frombuffer(heap.buffer, dtype=np.uint64) for heap in heaps]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsLayout:
    """Sizes of one rank's rows heap.

    Attributes:
        ranks, tokens, hidden, top_k: R, S, D, K.
        dtype: of the rows and of the outputs.
        outputs_per_token: output slots for each token of the source: K where all k outputs travel, at most R
            partial sums where they are summed first.
    """

    ranks: int
    tokens: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    outputs_per_token: int

    @property
    def row_bytes(self) -> int:
        """One hidden vector."""
        return self.hidden * int(self.dtype.itemsize)

    @property
    def heap_bytes(self) -> int:
        """Everything, both generations."""
        return GENERATIONS * sum(self.parts())

    @property
    def arithmetic(self) -> str:
        """How `heap_bytes` comes about, in words."""
        rows, ids, weights, outputs = self.parts()
        return (
            f"{GENERATIONS} generations x ({self.ranks} sources x {self.tokens} tokens x ({self.row_bytes} B row + "
            f"{8 * self.top_k} B index and weights) = {rows + ids + weights:,} B, + {self.tokens} tokens x "
            f"{self.outputs_per_token} outputs x {self.row_bytes} B = {outputs:,} B)"
        )

    def parts(self) -> tuple[int, int, int, int]:
        """Bytes of rows, ids, weights and outputs of one generation."""
        places = self.ranks * self.tokens
        numbers = _up(places * 4 * self.top_k)
        outputs = self.tokens * self.outputs_per_token * self.row_bytes
        return _up(places * self.row_bytes), numbers, numbers, _up(outputs)


def round_up_tokens(tokens: int) -> int:
    """Capacity for a step of `tokens`: up to the next eighth of its power of two, so that growth is rare.

    Example: 1, 16, 1000, 1025 give 16, 16, 1024, 1280.
    """
    step = max(16, 1 << max(0, tokens.bit_length() - 3))
    return max(1, math.ceil(tokens / step)) * step


def _up(size: int) -> int:
    return -(-size // _CACHE_LINE) * _CACHE_LINE


class RowsHeap:
    """The rows heaps of all ranks, as tensors, each indexed [rank][generation].

    Attributes:
        layout: their sizes.
        rows: [R * S, D], source r's rows from r * S on.
        ids, weights: int32 and float32 [R * S, K], beside the rows.
        outputs: [P, D], slots of the rank's own tokens, for others to write.
    """

    def __init__(self, heaps: list[Heap], layout: RowsLayout) -> None:
        self.layout = layout
        self.rows: list[list[Tensor]] = []
        self.ids: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []
        self.outputs: list[list[Tensor]] = []
        places, sizes = layout.ranks * layout.tokens, layout.parts()
        shapes = (
            (self.rows, layout.dtype, (places, layout.hidden)),
            (self.ids, torch.int32, (places, layout.top_k)),
            (self.weights, torch.float32, (places, layout.top_k)),
            (self.outputs, layout.dtype, (layout.tokens * layout.outputs_per_token, layout.hidden)),
        )
        # Ordinary tensors even when a model runs in inference mode: they outlive it.
        with torch.inference_mode(False):
            for heap in heaps:
                offset = 0
                for by_rank, _, _ in shapes:
                    by_rank.append([])
                for _ in range(GENERATIONS):
                    for (by_rank, dtype, shape), size in zip(shapes, sizes, strict=True):
                        flat = torch.frombuffer(heap.buffer, dtype=dtype, count=math.prod(shape), offset=offset)
                        by_rank[-1].append(flat.view(shape))
                        offset += size
