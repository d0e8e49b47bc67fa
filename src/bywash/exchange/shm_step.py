"""One step of the `shm` exchange in flight, and what can be worked out of it alone: where outputs stand and belong.

Shapes: T tokens, K experts per token, D hidden, R ranks, E experts, N rows received, M pairs computed here. Knows no
flags and no peers. `shm.ShmExchange` and `inner_leg` call it.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import ConfigError
from bywash.exchange.base import Received
from bywash.exchange.rows import DTYPES, SendList
from bywash.exchange.shm_layout import RowsHeap


@dataclass(slots=True, kw_only=True)
class Step:
    """One step in flight.

    Attributes:
        number, generation: which step, and which buffers it uses.
        digest: hash of the plan it was sent under.
        x_TD, weights_TK, lists, counts_E: what this rank sends.
        output_slot_R: where in this rank's output slots each rank's outputs for it begin.
        heap: the rows heap that the step uses; None until the first one is open.
        source_slot_R: where in each source's output slots this rank's outputs begin.
        received: what arrived.
        plan, ids_TK: of the step.
        mixed: some outputs travel summed and others alone.
        alone_NK: which of the received pairs travel alone, in a mixed step.
    """

    number: int
    generation: int
    digest: int
    x_TD: Tensor
    weights_TK: Tensor
    lists: list[SendList]
    counts_E: NDArray[np.uint64]
    output_slot_R: list[int]
    heap: RowsHeap | None
    plan: StepPlan
    ids_TK: Tensor
    mixed: bool
    source_slot_R: list[int] = field(default_factory=list)
    received: Received | None = None
    alone_NK: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Hidden size, top-k and the number of the dtype: equal on all ranks."""
        return self.x_TD.shape[1], self.weights_TK.shape[1], DTYPES.index(self.x_TD.dtype)


def check_outputs(step: Step, y_MD: Tensor, pairs: int) -> None:
    """Raise `ConfigError` unless `y_MD` has a row for each of the step's `pairs`."""
    if y_MD.shape != (pairs, step.shape[0]) or y_MD.dtype != step.x_TD.dtype:
        raise ConfigError(
            f"combine: outputs are {y_MD.dtype} {list(y_MD.shape)}, this step needs {step.x_TD.dtype} "
            f"[{pairs} pairs, hidden {step.shape[0]}]"
        )


def pair_places(ids_NK: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [N, K]: the position of each pair's output in y_MD, -1 for none."""
    valid_NK = ids_NK >= 0
    return np.where(valid_NK, valid_NK.ravel().cumsum().reshape(valid_NK.shape) - 1, -1)


def pair_slots(step: Step) -> NDArray[np.int64]:
    """int64 [T, K]: the slot of each (token, expert) output, -1 for none. Each rank returns its pairs in order."""
    at_TK = np.full(step.weights_TK.shape, -1, dtype=np.int64)
    for sent, slot in zip(step.lists, step.output_slot_R, strict=True):
        rows, ks = np.nonzero(sent.ids_NK.numpy() >= 0)
        at_TK[sent.tokens_N.numpy()[rows], ks] = np.arange(slot, slot + rows.size)
    return at_TK


def partial_slots(step: Step) -> NDArray[np.int64]:
    """int64 [T, R]: the slot of each rank's partial sum for each token, -1 for none."""
    at_TR = np.full((step.x_TD.shape[0], len(step.lists)), -1, dtype=np.int64)
    for rank, (sent, slot) in enumerate(zip(step.lists, step.output_slot_R, strict=True)):
        tokens_N = sent.tokens_N.numpy()
        at_TR[tokens_N, rank] = np.arange(slot, slot + tokens_N.size)
    return at_TR
