"""`local`: the exchange of a single rank. Nothing moves; the arithmetic is the same as everywhere.

It is the reference for what `exact` must give bit for bit on any number of ranks.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan
from bywash.errors import ConfigError
from bywash.exchange.base import Exchange, Handle, Received
from bywash.exchange.names import Combine
from bywash.exchange.rows import SendList, send_lists, weighted_sum
from bywash.routing import Routing


class LocalExchange(Exchange):
    """One rank that owns every expert."""

    name = "local"

    def __init__(self, *, combine_mode: Combine = "exact") -> None:
        super().__init__(rank=0, ranks=1, combine_mode=combine_mode)

    def counts(self, counts_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """See `Exchange.counts`."""
        return counts_E[None, :].copy()

    def dispatch_start(self, x_TD: Tensor, routing: Routing, plan: StepPlan) -> Handle:
        """See `Exchange.dispatch_start`."""
        if plan.rows_R.size != 1:
            raise ConfigError(f"exchange local: the plan is for {plan.rows_R.size} ranks, this exchange is one")
        handle = Handle(routing=routing, plan=plan)
        handle.state["x_TD"] = x_TD
        return handle

    def dispatch_finish(self, handle: Handle) -> Received:
        """See `Exchange.dispatch_finish`."""
        handle.advance("dispatch_finish", "combine_start")
        x_TD = handle.state["x_TD"]
        (sent,) = send_lists(handle.routing, handle.plan)
        if x_TD.device.type != "cpu":
            sent = sent.to(x_TD.device)
        handle.state["sent"] = sent
        self.traffic.steps += 1
        pairs = int((sent.ids_NK >= 0).sum())
        self.traffic.logical_bytes += 2 * pairs * x_TD.shape[1] * x_TD.element_size()
        return Received(
            rows_ND=x_TD[sent.tokens_N],
            ids_NK=sent.ids_NK,
            weights_NK=sent.weights_NK,
            rows_from_R=[sent.tokens_N.numel()],
            counts_RE=handle.routing.counts_E().cpu().numpy().astype(np.int32)[None, :],
        )

    def combine_start(self, handle: Handle, y_MD: Tensor) -> None:
        """See `Exchange.combine_start`."""
        handle.advance("combine_start", "combine_finish")
        handle.state["y_MD"] = y_MD

    def combine_finish(self, handle: Handle) -> Tensor:
        """See `Exchange.combine_finish`."""
        handle.advance("combine_finish", "done")
        x_TD: Tensor = handle.state["x_TD"]
        sent: SendList = handle.state["sent"]
        out = x_TD.new_zeros(x_TD.shape)
        out[sent.tokens_N] = weighted_sum(handle.state["y_MD"], sent.ids_NK, sent.weights_NK)
        handle.state.clear()
        return out

    def open_slots(self, slots: int, slot_bytes: int) -> Tensor:
        """See `Exchange.open_slots`. One rank owns every expert, so that no plan ever fills them."""
        return torch.empty(slots, slot_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """See `Exchange.close`."""
