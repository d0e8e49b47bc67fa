"""`ExpertParallel`: one MoE layer whose experts live on several ranks.

route (caller) -> count -> plan -> dispatch -> experts -> combine. The layer orders the steps; the plan decides,
the exchange moves, the experts compute. Models call it through their adapter; `naive.py` is its oracle.
"""

import numpy as np
import torch
from torch import Tensor

from bywash.balance import Placement, StepPlan, plan_step
from bywash.errors import ConfigError
from bywash.exchange import Exchange
from bywash.moe.experts import ROW_TILE, Experts, run_experts
from bywash.routing import Routing


class ExpertParallel:
    """The experts of one layer, spread over the ranks of an exchange.

    Example:
        >>> layer = ExpertParallel(exchange=exchange, placement=Placement.equal(64, exchange.ranks), experts=mine)
        >>> out_TD = layer(x_TD, Routing(ids_TK=ids, weights_TK=weights, num_experts=64))

    Attributes:
        exchange: this rank's end of the exchange; layers share one.
        placement: the home of every expert.
        plan: the plan made from the last step's counts: what a report shows and a step with `reuse_plan` sends under.
    """

    def __init__(self, *, exchange: Exchange, placement: Placement, experts: Experts) -> None:
        if placement.ranks != exchange.ranks:
            raise ConfigError(f"placement is for {placement.ranks} ranks, the exchange has {exchange.ranks}")
        self.exchange, self.placement, self.experts = exchange, placement, experts
        self.plan: StepPlan | None = None
        self._slot_of_E = torch.full((placement.num_experts,), -1)
        mine = placement.experts_of(exchange.rank)
        self._slot_of_E[mine] = torch.arange(len(mine))
        # `fast` promises no bits, so it may use one product per expert, however many rows came.
        self._row_tile = None if exchange.combine_mode == "fast" else ROW_TILE

    def __call__(self, x_TD: Tensor, routing: Routing, *, reuse_plan: bool = False) -> Tensor:
        """Each token's weighted sum over its experts.

        Every rank calls, also with T = 0.

        Args:
            x_TD: [T, D] in float32, bfloat16 or float16; T may differ between ranks and steps.
            routing: this rank's routing of the same T tokens.
            reuse_plan: send under the plan that the layer's last step left behind, without waiting for this step's
                counts (they travel with the rows and make the next plan). For decode, where the round trip is a
                large part of the step. All ranks pass the same; the first step of a layer counts first anyway.

        Returns:
            [T, D] in the dtype of x_TD; a token with no expert gets zeros.

        Raises:
            ConfigError: shapes that do not fit the layer.
            RankLostError, PlanMismatchError: see `Exchange.dispatch_start`.
            RoutingError: ids or weights that no router may produce (checked on CPU tensors, where it is cheap).
        """
        self._check_shapes(x_TD, routing)
        if self.plan is None or not reuse_plan:
            counts_RE = self.exchange.counts(routing.counts_E().numpy().astype(np.int32))
            self.plan = plan_step(counts_RE, self.placement)
        received, handle = self.exchange.dispatch(x_TD, routing, self.plan)
        if reuse_plan:
            self.plan = plan_step(received.counts_RE, self.placement)
        y_MD = run_experts(self.experts, received.rows_ND, received.ids_NK, self._slot_of_E, row_tile=self._row_tile)
        return self.exchange.combine(handle, y_MD)

    def _check_shapes(self, x_TD: Tensor, routing: Routing) -> None:
        if x_TD.dim() != 2 or x_TD.shape[0] != routing.tokens or x_TD.shape[1] != self.experts.hidden:
            raise ConfigError(
                f"layer input {list(x_TD.shape)} must be [{routing.tokens} routed tokens, hidden {self.experts.hidden}]"
            )
        if routing.num_experts != self.placement.num_experts:
            raise ConfigError(
                f"routing is over {routing.num_experts} experts, the layer has {self.placement.num_experts}"
            )
        if x_TD.device.type == "cpu":
            routing.check()
