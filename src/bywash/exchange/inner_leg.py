"""The leg of the `hierarchical` exchange inside a host: `shm` among the ranks of one host.

A gateway gives out its own tokens' rows and those that came in for it as one step of `shm`. That exchange needs neither
the job's plan nor its ranks: an id on the wire says both which rank of the host computes and which expert, so any plan
can be carried, spilled rows too.

Shapes: P rows given out, K experts per token, D hidden, L ranks of this host, E experts, N rows received, M pairs.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import BywashError, ExchangeError, PlanMismatchError, RankLostError
from bywash.exchange.base import Handle, Received
from bywash.exchange.group import Group
from bywash.exchange.names import Combine
from bywash.exchange.part import Part
from bywash.exchange.shm import ShmExchange
from bywash.exchange.shm_layout import Message
from bywash.exchange.shm_step import pair_slots
from bywash.routing import Routing


class InnerLeg(ShmExchange):
    """`shm` with ids that name the computing rank, and outputs that need not be summed."""

    def __init__(
        self, group: Group, members: Sequence[int], *, experts: int, parts: int, words: int, sums: bool
    ) -> None:
        """Join the ranks of this host.

        Args:
            group: the whole job.
            members: its ranks on this host.
            experts: E.
            parts: how many vectors `share` has to fit, at most.
            words: of how many words each, at most.
            sums: whether outputs come back summed per row (see `combine_pairs` for the other way).
        """
        part = Part(group, members)
        mode: Combine = "fast" if sums else "exact"
        super().__init__(part, combine_mode=mode)
        self._experts = experts
        self._names, self._parts = max(len(members) * experts, parts * words), parts
        self._members, self._host_name = part.members, part.peers[part.rank].host_name

    def share(self, words_SW: NDArray[np.int32]) -> NDArray[np.int32]:
        """Every rank's [S, W] words, none negative, as int32 [L, parts, W]; missing rows are 0."""
        width = words_SW.shape[1]
        padded = np.zeros(self._names, np.int32)
        padded[: words_SW.size] = words_SW.ravel()
        return self.counts(padded)[:, : self._parts * width].reshape(self.ranks, self._parts, width)

    def begin(self, rows_PD: Tensor, names_PK: Tensor, weights_PK: Tensor, digest: int) -> Handle:
        """Give rows out. `names_PK`: index of the computing rank x E + expert, -1 for none."""
        routing = Routing(ids_TK=names_PK, weights_TK=weights_PK, num_experts=self._names)
        rank_E = np.minimum(np.arange(self._names) // self._experts, self.ranks - 1).astype(np.int32)
        plan = StepPlan(
            counts_RE=np.zeros((self.ranks, self._names), np.int32),
            rank_E=rank_E,
            rows_ER=np.zeros((self._names, self.ranks), np.int32),
            rows_R=np.zeros(self.ranks, np.int64),
            fetch_RS=np.empty((self.ranks, 0), np.int32),
            digest=digest,
        )
        return self.dispatch_start(rows_PD, routing, plan)

    def arrive(self, handle: Handle) -> Received:
        """The rows for this rank, with experts' ids again."""
        received = self.dispatch_finish(handle)
        ids_NK = torch.where(received.ids_NK >= 0, received.ids_NK % self._experts, -1)
        return replace(received, ids_NK=ids_NK)

    def combine_pairs(self, handle: Handle) -> Tensor:
        """[M, D]: the outputs of all pairs that were given out, row by row in k order, unsummed."""
        handle.advance("combine_finish", "done")
        step = handle.state["step"]
        at_PK = pair_slots(step)
        self._end.await_flags(Message.OUTPUTS, step.number, "waiting for outputs")
        outputs = step.heap.outputs[self.rank][step.generation]
        y_MD: Tensor = outputs[torch.from_numpy(at_PK[at_PK >= 0])]
        self._in_flight[step.generation] = None
        handle.state.clear()
        return y_MD

    def tell(self, error: BywashError) -> None:
        """Let the other ranks of the host know that this one gives up."""
        ours = [rank for rank in getattr(error, "ranks", ()) if rank in self._members]
        local: BywashError = error
        if isinstance(error, ExchangeError):
            local = type(error)(str(error), [self._members.index(rank) for rank in ours])
        with suppress(BywashError):
            self._end.fail(local)

    def in_the_job(self, error: BywashError) -> BywashError:
        """An error of this leg in terms of the whole job."""
        numbers = ", ".join(f"{local} is rank {rank}" for local, rank in enumerate(self._members))
        text = f"inside host {self._host_name} ({numbers}): {error}"
        for kind in (RankLostError, PlanMismatchError, ExchangeError):
            if isinstance(error, kind):
                return kind(text, [self._members[rank] for rank in error.ranks])
        return type(error)(text)
