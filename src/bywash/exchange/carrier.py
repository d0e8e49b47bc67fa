"""`RowCarrier`: rows to ranks and sums back, for engines that compute all of a rank's experts at once.

vLLM, SGLang and programs written for DeepEP hand over rows with the ranks that need them, get back one row for each
that arrived, and return one output row for each: which experts, and with what weights, is their business. So here a
*rank* takes the place of an expert in the exchanges of this package, with weight 1, and what an engine wants to send
along with a row (expert ids, weights, scales) travels inside it as bytes (`payload.RowFormat`).

A step is opened by `start` and closed by `finish_back`. Callers of the DeepEP kind may dispatch without ever combining,
or combine twice: a step that stays open is closed with an output that nobody reads when its buffers are needed, and one
that is closed already is opened again by sending rows that nobody reads. Both cost what they send; both happen on all
ranks alike, since all make the same calls.

Shapes: T tokens of this rank, J ranks of a token at most, R ranks, N rows that arrived, P places for them, W columns of
an output row, B bytes of a row on its way out.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from bywash.balance import Placement, plan_step
from bywash.errors import BywashError, ConfigError
from bywash.exchange.base import Exchange
from bywash.exchange.shm_layout import GENERATIONS
from bywash.routing import Routing

Stage = Literal["sent", "arrived", "returned", "closed"]


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One step in flight.

    Attributes:
        ranks_TJ: int64 [T, J], the ranks that get each token, ascending, -1 for none.
        generation: which of the carrier's buffers it uses.
        stage: what has been done last.
        state: private to the carrier.
    """

    ranks_TJ: Tensor
    generation: int
    stage: Stage = "sent"
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """What came in.

    Attributes:
        rows_PB: uint8 [P, B], places that hold rows, valid until outputs are returned.
        at_N: int32 [N], the places of the rows, in the order of (source rank, token); None where that is how they lie.
            Without a host sync N is all there is room for, and entries past the real ones are places of old rows.
        from_R: int32 [R], rows by source rank, where the rows are; valid as long as they.
        rows: the real number of rows; None where it is known on the device only.
    """

    rows_PB: Tensor
    at_N: Tensor | None
    from_R: Tensor
    rows: int | None


class RowCarrier(ABC):
    """One rank's end. Every rank makes the same calls in the same order.

    Attributes:
        rank, ranks: this process and how many there are.
        columns: W, of an output row.
        dtype: of output rows; sums are made in float32, in rank order, and rounded once.
        sent_bytes: B, of a row as it is sent.
        room: the most tokens of a rank in a step, on all ranks; None where it grows with them.
        extra_steps: how often a step was closed or opened only for the protocol's sake, see above.
    """

    room: int | None = None

    def __init__(self, *, rank: int, ranks: int, columns: int, dtype: torch.dtype, sent_bytes: int) -> None:
        self.rank, self.ranks, self.columns, self.dtype, self.sent_bytes = rank, ranks, columns, dtype, sent_bytes
        self.extra_steps = 0
        self._open: list[Step | None] = [None] * GENERATIONS
        self._begun = 0

    def start(self, rows_TB: Tensor, ranks_TJ: Tensor) -> Step:
        """Begin sending. `rows_TB`: uint8 [T, B], contiguous; it must stay unchanged until the step is closed."""
        step = self._next(rows_TB, ranks_TJ)
        self._start(step, rows_TB)
        self._open[step.generation] = step
        return step

    def dispatch(self, rows_TB: Tensor, ranks_TJ: Tensor, *, sync: bool = True) -> tuple[Step, Arrived]:
        """`start` and `finish` at once."""
        step = self._next(rows_TB, ranks_TJ)
        arrived = self._dispatch(step, rows_TB, sync)
        step.stage = "arrived"
        self._open[step.generation] = step
        return step, arrived

    def refuse(self, error: BywashError) -> NoReturn:
        """Instead of `start` or `dispatch`, on a rank whose rows cannot be sent: raise `error`.

        The step of the other ranks ends in an error that names this one, wherever they next wait; nothing can be sent
        afterwards.
        """
        rows_TB, ranks_TJ = self._no_rows()
        self._refuse(self._next(rows_TB, ranks_TJ), rows_TB, error)  # `_next` may close a step that others wait in

    def finish(self, step: Step, *, sync: bool = True) -> Arrived:
        """Wait for the rows of all ranks. `sync`: on the host, to know how many there are."""
        self._expect(step, "sent", "arrived")
        return self._finish(step, sync)

    def start_back(self, step: Step, y_NW: Tensor) -> None:
        """Begin returning outputs: one row [W] for each that arrived, in the same order; more rows are ignored."""
        self._expect(step, "arrived", "returned")
        self._start_back(step, y_NW)

    def finish_back(self, step: Step) -> Tensor:
        """Wait, close the step, and return [T, W]: the sum of each token's outputs; zeros for a token with no rank."""
        self._expect(step, "returned", "closed")
        self._open[step.generation] = None
        return self._finish_back(step)

    def combine(self, step: Step, y_NW: Tensor) -> Tensor:
        """`start_back` and `finish_back` at once."""
        self._expect(step, "arrived", "closed")
        self._open[step.generation] = None
        return self._combine(step, y_NW)

    def reopened(self, step: Step) -> Step:
        """`step` if outputs can be returned to it, else a new one for the same rows."""
        if step.stage == "arrived":
            return step
        rows_TB = torch.zeros((step.ranks_TJ.shape[0], self.sent_bytes), dtype=torch.uint8, device=step.ranks_TJ.device)
        again = self.start(rows_TB, step.ranks_TJ)
        self.finish(again)
        self.extra_steps += 1
        return again

    def close_step(self, step: Step) -> None:
        """Bring an open step to its end, whatever its stage."""
        if step.stage == "sent":
            self.finish(step)
        if step.stage == "arrived":
            self.start_back(step, self._nothing(step))
        if step.stage == "returned":
            self.finish_back(step)
            self.extra_steps += 1

    def check(self) -> None:  # noqa: B027  (nothing to do on CPUs)
        """Raise what went wrong on the device since the last look, if rows are on one. Waits for it."""

    def traffic(self) -> dict[str, int]:
        """What the exchange below has counted on the host; nothing where only a device could know."""
        return {}

    def use_multiprocessors(self, num_sms: int) -> None:  # noqa: B027
        """Let the next kernels take `num_sms`, the same on all ranks; 0 for the default. CPUs have none to give."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Open steps are forgotten; every rank must have stopped using them."""

    def _next(self, rows_TB: Tensor, ranks_TJ: Tensor) -> Step:
        """A step whose buffers are free."""
        if rows_TB.shape[1] != self.sent_bytes or rows_TB.shape[0] != ranks_TJ.shape[0]:
            raise ConfigError(
                f"rows {list(rows_TB.shape)} for ranks {list(ranks_TJ.shape)}; rows of {self.sent_bytes} bytes are sent"
            )
        generation = self._begun % GENERATIONS
        left_open = self._open[generation]
        if left_open is not None:
            self.close_step(left_open)
        self._begun += 1
        return Step(ranks_TJ=ranks_TJ, generation=generation)

    def _dispatch(self, step: Step, rows_TB: Tensor, sync: bool) -> Arrived:
        self._start(step, rows_TB)
        return self._finish(step, sync)

    def _combine(self, step: Step, y_NW: Tensor) -> Tensor:
        self._start_back(step, y_NW)
        return self._finish_back(step)

    @abstractmethod
    def _start(self, step: Step, rows_TB: Tensor) -> None: ...

    @abstractmethod
    def _finish(self, step: Step, sync: bool) -> Arrived: ...

    @abstractmethod
    def _start_back(self, step: Step, y_NW: Tensor) -> None: ...

    @abstractmethod
    def _finish_back(self, step: Step) -> Tensor: ...

    @abstractmethod
    def _nothing(self, step: Step) -> Tensor:
        """Outputs that nobody reads: as many rows as the step needs."""

    @abstractmethod
    def _refuse(self, step: Step, rows_TB: Tensor, error: BywashError) -> NoReturn:
        """`rows_TB` has none."""

    def _no_rows(self) -> tuple[Tensor, Tensor]:
        """Rows and ranks of a step without tokens."""
        return torch.empty((0, self.sent_bytes), dtype=torch.uint8), torch.empty((0, 1), dtype=torch.int64)

    @staticmethod
    def _expect(step: Step, stage: Stage, following: Stage) -> None:
        if step.stage != stage:
            raise ConfigError(f"a step that is {step.stage} was used where one that is {stage} is needed")
        step.stage = following


class ExchangeCarrier(RowCarrier):
    """Over any `Exchange` in `exact` mode: CPU processes, or a single rank on any device."""

    def __init__(self, exchange: Exchange, *, columns: int, dtype: torch.dtype, sent_bytes: int) -> None:
        """Use `exchange`, which is closed with this.

        Args:
            exchange: of no other step.
            columns: the fewest that an output row has.
            dtype: of output rows.
            sent_bytes: the fewest that a row on its way out has.
        """
        if exchange.combine_mode != "exact":
            raise ConfigError(f"rows are carried by an exchange in exact mode, not in {exchange.combine_mode}")
        self._exchange = exchange
        # One width both ways, since exchanges are opened for one.
        columns = max(columns, -(-sent_bytes // dtype.itemsize))
        super().__init__(
            rank=exchange.rank, ranks=exchange.ranks, columns=columns, dtype=dtype, sent_bytes=columns * dtype.itemsize
        )
        # Whoever computes a rank's rows is that rank, at every step: one plan serves for all.
        ranks = exchange.ranks
        self._plan = plan_step(np.zeros((ranks, ranks), np.int32), Placement.equal(ranks, ranks))

    def _start(self, step: Step, rows_TB: Tensor) -> None:
        weights_TJ = torch.ones(step.ranks_TJ.shape, dtype=torch.float32, device=rows_TB.device)
        routing = Routing(ids_TK=step.ranks_TJ, weights_TK=weights_TJ, num_experts=self.ranks)
        step.state["handle"] = self._exchange.dispatch_start(rows_TB.view(self.dtype), routing, self._plan)

    def _finish(self, step: Step, sync: bool) -> Arrived:
        received = self._exchange.dispatch_finish(step.state["handle"])
        rows_NB = received.rows_ND.view(torch.uint8)
        step.state["rows"] = rows_NB.shape[0]
        from_R = torch.tensor(received.rows_from_R, dtype=torch.int32, device=rows_NB.device)
        return Arrived(rows_PB=rows_NB, at_N=None, from_R=from_R, rows=rows_NB.shape[0])

    def _start_back(self, step: Step, y_NW: Tensor) -> None:
        self._exchange.combine_start(step.state["handle"], y_NW[: step.state["rows"]])

    def _finish_back(self, step: Step) -> Tensor:
        return self._exchange.combine_finish(step.state.pop("handle"))

    def _nothing(self, step: Step) -> Tensor:
        device = step.ranks_TJ.device
        return torch.zeros((step.state["rows"], self.columns), dtype=self.dtype, device=device)

    def _refuse(self, step: Step, rows_TB: Tensor, error: BywashError) -> NoReturn:
        self._exchange.refuse(self._plan, error)

    def traffic(self) -> dict[str, int]:
        """See `RowCarrier.traffic`."""
        sums = self._exchange.traffic
        return {
            "exchange_rows_sent": sums.rows_sent,
            "exchange_rows_returned": sums.rows_returned,
            "exchange_wire_bytes": sums.wire_bytes,
        }

    def close(self) -> None:
        """See `RowCarrier.close`."""
        self._exchange.close()


def distinct_ranks(rank_TK: Tensor, ranks: int) -> Tensor:
    """Each token's ranks, each once: int64 [T, J], ascending, -1 for none; J = min(K, R).

    Example: rank_TK [[2, 0, 2], [-1, 0, -1]] of 3 ranks gives [[0, 2, -1], [0, -1, -1]].
    """
    none = torch.iinfo(torch.int64).max
    ordered_TK = torch.where(rank_TK >= 0, rank_TK.long(), none).sort(dim=1).values
    repeated_TK = torch.zeros_like(ordered_TK, dtype=torch.bool)
    repeated_TK[:, 1:] = ordered_TK[:, 1:] == ordered_TK[:, :-1]
    ordered_TJ = ordered_TK.masked_fill(repeated_TK, none).sort(dim=1).values[:, : min(rank_TK.shape[1], ranks)]
    return torch.where(ordered_TJ == none, -1, ordered_TJ).contiguous()


def ranks_of_experts(ids_TK: Tensor, experts_per_rank: int, ranks: int) -> Tensor:
    """The ranks that own a token's experts, as `distinct_ranks` gives them.

    Rank r owns experts r x `experts_per_rank` onwards. Ids below 0 stand for no expert; those past the last rank's give
    ranks that do not exist, which exchanges refuse.
    Example: ids [[5, 1, 4], [-1, 0, -1]] with 2 experts on each of 3 ranks gives [[0, 2, -1], [0, -1, -1]].
    """
    return distinct_ranks(ids_TK.long().div(experts_per_rank, rounding_mode="floor"), ranks)
