"""`Exchange`: one step of dispatch and combine, whatever carries the bytes.

Shapes: T tokens of this rank, K experts per token, D hidden size, R ranks, E experts, N rows received here,
M outputs computed here (one per (row, expert) pair whose expert runs here).

An exchange moves what it is told to move and decides nothing: the plan says which rank computes which expert.
Each half can be started and finished apart, so that other work runs in between:

    handle = exchange.dispatch_start(x_TD, routing, plan)
    received = exchange.dispatch_finish(handle)         # rows to compute on
    exchange.combine_start(handle, y_MD)                # one output per received (row, expert) pair
    out_TD = exchange.combine_finish(handle)

`ExpertParallel` is the ordinary caller; the halves are public for engines that order them differently.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import BywashError, ConfigError
from bywash.exchange.names import COMBINES, Combine
from bywash.routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What arrived for this rank's experts, rows in the order of (source rank, token).

    Attributes:
        rows_ND: [N, D] in the model's dtype, each token once however many local experts it goes to.
        ids_NK: int64 [N, K], the expert where the pair is computed here, -1 elsewhere.
        weights_NK: float32 [N, K], gate weights; they count only where ids_NK >= 0.
        rows_from_R: N split by source rank.
        counts_RE: int32 [R, E], this step's rows from each source rank to each expert. The counts travel with the
            rows, so a step sent under an earlier plan (no count round trip) still yields the counts for the next.
    """

    rows_ND: Tensor
    ids_NK: Tensor
    weights_NK: Tensor
    rows_from_R: list[int]
    counts_RE: NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes and rows this rank has sent since the exchange was opened; sums over ranks give the job's total.

    Attributes:
        steps: dispatches finished.
        rows_sent: rows dispatched to *other* ranks, each token once per destination.
        rows_returned: rows sent back to other ranks by combine.
        wire_bytes: everything sent to other ranks: rows, index, weights, counts, headers.
        logical_bytes: bytes of one hidden row per (token, expert) pair, out and back, rank-local ones included:
            what an exchange without deduplication would be asked to carry.
        weight_bytes: weights copied from here into other ranks' slots; not in `wire_bytes`.
        host_bytes: what of `wire_bytes` left this host; None where the exchange does not tell it apart.
    """

    steps: int = 0
    rows_sent: int = 0
    rows_returned: int = 0
    wire_bytes: int = 0
    logical_bytes: int = 0
    weight_bytes: int = 0
    host_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class Handle:
    """One step in flight, from `dispatch_start` to `combine_finish`. Opaque to callers.

    Attributes:
        routing: the step's routing on this rank.
        plan: the plan that all ranks agreed on.
        stage: which call comes next; calling out of order raises.
        state: private to the exchange that made the handle.
    """

    routing: Routing
    plan: StepPlan
    stage: str = "dispatch_finish"
    state: dict[str, Any] = field(default_factory=dict)

    def advance(self, expected: str, following: str) -> None:
        """Check that `expected` is the call whose turn it is, then make it `following`'s turn."""
        if self.stage != expected:
            raise ConfigError(f"exchange: {expected} was called where {self.stage} is next for this handle")
        self.stage = following


class Exchange(ABC):
    """One rank's end of the exchange. Every rank of the group makes the same calls in the same order.

    Attributes:
        rank, ranks: this process and how many there are.
        combine_mode: `exact` (all k outputs travel; summed at the source in k order in float32: bitwise the
            same for any number of ranks and any placement), `stable` (summed in float32 in k order per home
            rank, rounded once to the model's dtype for the way back, then added in rank order: bitwise the same for
            one number of ranks, whoever computes) or `fast` (the same per computing rank; experts may pick any
            shape of product, so no bits are promised).
        emulated: what is not real about the timing, in words that any report must print; None if all of it is.
        traffic: what this rank has sent so far.
    """

    name: str
    emulated: str | None = None

    def __init__(self, *, rank: int, ranks: int, combine_mode: Combine) -> None:
        if combine_mode not in COMBINES:
            raise ConfigError(f"combine = {combine_mode!r}: choose one of {', '.join(COMBINES)}")
        self.rank, self.ranks, self.combine_mode = rank, ranks, combine_mode
        self.traffic = Traffic()

    @abstractmethod
    def counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """Gather every rank's rows per expert: int32 [E] to int32 [R, E], the same on all ranks."""

    @abstractmethod
    def dispatch_start(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> Handle:
        """Check that all ranks hold `plan`, then begin sending each token once to each rank that needs it.

        `plan` is this step's (made from `counts`), or on all ranks an earlier step's: it only has to say where each
        expert is computed. The second saves the count round trip; the result is the same.

        Raises:
            PlanMismatchError: another rank planned differently; no row has been read.
            RankLostError: a rank died or was later than the deadline.
        """

    @abstractmethod
    def dispatch_finish(self, handle: Handle) -> Received:
        """Wait for the rows of all ranks."""

    @abstractmethod
    def combine_start(self, handle: Handle, y_MD: Tensor) -> None:
        """Begin returning outputs: `y_MD` has one row per pair with ids_NK >= 0, row by row in k order."""

    @abstractmethod
    def combine_finish(self, handle: Handle) -> Tensor:
        """Wait, and return [T, D]: each token's weighted sum over its experts, in the dtype of x_TD."""

    def open_slots(self, slots: int, slot_bytes: int) -> Tensor:
        """Room for the weights of foreign experts: this rank's, uint8 [slots, slot_bytes]. Every rank calls alike.

        Raises:
            ConfigError: this exchange copies no weights, or there is no memory for them.
        """
        raise ConfigError(f"exchange {self.name} copies no weights between ranks: use gloo or shm, or no slots")

    def fetch(self, donor_RS: NDArray[np.int32], digest: int, read: Callable[[int, int], Tensor]) -> None:
        """Copy weights into slots. Every rank calls, with the same arguments but for `read`.

        Args:
            donor_RS: int32 [R, S], the rank that has what each slot is to hold; -1 leaves the slot alone. Nobody
                computes from the slots that are filled.
            digest: of the plan that this is for.
            read: (rank, slot) to uint8 [slot_bytes], what this rank has to put into that slot.

        Raises:
            PlanMismatchError, RankLostError: see `dispatch_start`.
        """
        raise ConfigError(f"exchange {self.name} copies no weights between ranks: use gloo or shm, or no slots")

    def refuse(self, plan: StepPlan, error: BywashError) -> NoReturn:
        """Instead of `dispatch_start`, on a rank that has rows which it cannot send: raise `error`.

        The others' step ends in an error that names this rank, at once in `gloo` and `shm`, else at their deadline.
        """
        raise error

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Safe to call twice, and after an error."""

    def dispatch(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> tuple[Received, Handle]:
        """Both halves of dispatch at once."""
        handle = self.dispatch_start(x_TD, routing, plan)
        return self.dispatch_finish(handle), handle

    def combine(self, handle: Handle, y_MD: Tensor) -> Tensor:
        """Both halves of combine at once."""
        self.combine_start(handle, y_MD)
        return self.combine_finish(handle)
