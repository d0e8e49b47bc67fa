"""`ExpertParallel`: one MoE layer whose experts live on several ranks.

route (caller) -> count -> plan -> dispatch -> experts -> combine. The layer orders the steps; the plan decides,
the exchange moves, the experts compute. Models call it through their adapter, the pipeline its halves; `naive.py` is
its oracle.
"""

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import Placement, StepPlan, plan_step
from bywash.errors import ConfigError
from bywash.exchange import Exchange, Handle, Received
from bywash.moe.device_experts import grouped_experts
from bywash.moe.experts import ROW_TILE, Experts, GatedExperts, GroupedExperts, run_experts
from bywash.moe.slots import SlotPool
from bywash.routing import Routing

Wave: TypeAlias = tuple[Tensor, Routing]
"""Some of a step's tokens, [t, D], and their routing."""


def waves(x_TD: Tensor, routing: Routing, counts_RE: NDArray[np.int32], most_pairs: int) -> list[Wave]:
    """A step's tokens in order, as many waves on every rank, none of which brings more than `most_pairs` to any rank.

    Example: with most_pairs = 8, 2 ranks and top-2, a wave ends when a rank's pairs would reach 4: two full tokens.

    Raises:
        ConfigError: fewer pairs than one token of each rank may bring.
    """
    ranks, top_k = counts_RE.shape[0], routing.ids_TK.shape[1]
    own = most_pairs // ranks - (top_k - 1)
    if own < 1:
        raise ConfigError(f"slots: room for {most_pairs} pairs; one token of each rank may bring {ranks * top_k}")
    number = -(-int(counts_RE.sum(axis=1, dtype=np.int64).max()) // own)
    pairs_T = (routing.ids_TK >= 0).sum(dim=1)
    wave_T = ((pairs_T.cumsum(0) - pairs_T) // own).clamp(max=number - 1)
    ends = torch.searchsorted(wave_T, torch.arange(number), right=True).tolist()
    made = []
    for begin, end in zip([0, *ends], ends, strict=False):
        ids_TK, weights_TK = routing.ids_TK[begin:end], routing.weights_TK[begin:end]
        made.append((x_TD[begin:end], Routing(ids_TK=ids_TK, weights_TK=weights_TK, num_experts=routing.num_experts)))
    return made


class ExpertParallel:
    """The experts of one layer, spread over the ranks of an exchange.

    Example:
        >>> layer = ExpertParallel(exchange=exchange, placement=Placement.equal(64, exchange.ranks), experts=mine)
        >>> out_TD = layer(x_TD, Routing(ids_TK=ids, weights_TK=weights, num_experts=64))

    Attributes:
        exchange: this rank's end of the exchange; layers share one.
        placement: the home of every expert.
        backend: how experts are computed: a backend of `device_experts`, or `one by one`.
        pool: slots for rows that leave home, with the limits that say when; None computes every row at home.
        plans: for each part, the plan made from its last counts: what a report shows and a step with `reuse_plan`
            sends under. A caller that sends a step's tokens in several parts numbers them; else there is only part 0.
        loads: for each part, int64 [R], the expert rows that each rank computes in the last step.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        placement: Placement,
        experts: Experts,
        pool: SlotPool | None = None,
        layer: int = 0,
    ) -> None:
        """One layer.

        Args:
            exchange: see the class.
            placement: see the class; for as many ranks as the exchange has.
            experts: this rank's, in the order of `placement.experts_of`.
            pool: slots that layers share; the output keeps its bits in `exact` and `stable`.
            layer: which of the pool's layers this is.

        Raises:
            ConfigError: parts that do not fit together.
        """
        if placement.ranks != exchange.ranks:
            raise ConfigError(f"placement is for {placement.ranks} ranks, the exchange has {exchange.ranks}")
        self.exchange, self.placement, self.experts = exchange, placement, experts
        self.plans: dict[int, StepPlan] = {}
        self.loads: dict[int, NDArray[np.int64]] = {}
        self.pool, self._layer = pool, layer
        self.backend = "one by one"
        self._slot_of_E = torch.full((placement.num_experts,), -1)
        mine = placement.experts_of(exchange.rank)
        self._slot_of_E[mine] = torch.arange(len(mine))
        self._home_place_E = self._slot_of_E.numpy().copy()
        self._waiting: dict[int, list[Wave]] = {}
        self._computing = self._with_guests()
        # `fast` promises no bits, so it may use one product per expert, however many rows came.
        self._row_tile = None if exchange.combine_mode == "fast" else ROW_TILE
        self._grouped: GroupedExperts | None = None
        weights = getattr(experts, "swiglu_weights", None)
        if weights is not None and weights[0].is_cuda:
            self._use_device(*weights)

    def __call__(self, x_TD: Tensor, routing: Routing, *, reuse_plan: bool = False) -> Tensor:
        """Each token's weighted sum over its experts.

        Every rank calls, also with T = 0.

        Args:
            x_TD: [T, D] in float32, bfloat16 or float16, where the exchange moves rows (CPU or GPU), as are the routing
                and the weights; T may differ between ranks and steps.
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
        received, handle = self.dispatch(x_TD, routing, reuse_plan=reuse_plan)
        return self.combine(handle, self.compute(received))

    def dispatch(
        self, x_TD: Tensor, routing: Routing, *, reuse_plan: bool = False, part: int = 0
    ) -> tuple[Received, Handle]:
        """Count, plan, send and receive: the first part of a call, which see. `part` says whose plan to use.

        Of a step with more pairs than the pool allows on some rank, only the first tokens; `combine` does the rest.
        """
        self._check_shapes(x_TD, routing)
        self._waiting.pop(part, None)  # of a step that ended in an error
        plan = self.plans.get(part) if reuse_plan else None
        if plan is None or (self.pool is not None and not self.pool.may_reuse(plan)):
            plan = self._counted(routing, part, ahead=reuse_plan)
            if self.pool is not None and int(plan.rows_R.max()) > self.pool.most_pairs:
                (x_TD, routing), *self._waiting[part] = waves(x_TD, routing, plan.counts_RE, self.pool.most_pairs)
                first = self._sent(x_TD, routing, self._counted(routing, part), part)
                self.loads[part] = plan.rows_R  # near what all waves come to
                return first
        return self._sent(x_TD, routing, plan, part, ahead=reuse_plan)

    def combine(self, handle: Handle, y_MD: Tensor, *, part: int = 0) -> Tensor:
        """Return outputs and sum them, [T, D]: the last part of a call. Every rank calls."""
        outs, loads_R = [self.exchange.combine(handle, y_MD)], self.loads[part]
        del y_MD  # a wave's outputs go before the next one's come
        for wave, (x_TD, routing) in enumerate(self._waiting.pop(part, ()), start=1):
            received, handle = self._sent(x_TD, routing, self._counted(routing, part), part, wave=wave)
            outs.append(self.exchange.combine(handle, self.compute(received)))
        self.loads[part] = loads_R
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _counted(self, routing: Routing, part: int, *, ahead: bool = False) -> StepPlan:
        counts_RE = self.exchange.counts(routing.counts_E().cpu().numpy().astype(np.int32))
        plan = self.plans[part] = self._plan(counts_RE, part, ahead=ahead)
        return plan

    def _sent(
        self, x_TD: Tensor, routing: Routing, plan: StepPlan, part: int, *, ahead: bool = False, wave: int = 0
    ) -> tuple[Received, Handle]:
        self._open_slots_for(plan)
        received, handle = self.exchange.dispatch(x_TD, routing, plan)
        if ahead:
            self.plans[part] = self._plan(received.counts_RE, part, ahead=True)
        # With all rows at home any plan from these counts has the step's loads.
        self.loads[part] = (
            self.plans[part].rows_R
            if self.pool is None
            else self.pool.counters[self._layer].add_step(plan, received.counts_RE, wave=wave)
        )
        return received, handle

    def compute(self, received: Received) -> Tensor:
        """This rank's experts on what arrived: [M, D], as `Exchange.combine_start` takes it."""
        if self._slot_of_E.device != received.ids_NK.device:
            self._slot_of_E = self._slot_of_E.to(received.ids_NK.device)
        return run_experts(
            self._computing,
            received.rows_ND,
            received.ids_NK,
            self._slot_of_E,
            row_tile=self._row_tile,
            wave_rows=self.pool.limits.capacity if self.pool is not None else None,
            grouped=self._grouped,
        )

    def _plan(self, counts_RE: NDArray[np.int32], part: int, *, ahead: bool) -> StepPlan:
        if self.pool is None:
            return plan_step(counts_RE, self.placement)
        if part:
            raise ConfigError("layer: a step in several parts needs a plan for each; slots hold those of one")
        return self.pool.plan(counts_RE, self.placement, self._layer, ahead=ahead)

    def _open_slots_for(self, plan: StepPlan) -> None:
        """Get the weights that the plan's step computes with here, and note where they are."""
        if self.pool is None or plan.directory is None:
            return
        assert isinstance(self.experts, GatedExperts), "checked by the constructor"
        self.pool.fill(self._layer, plan.digest, self.experts, self._home_place_E)
        place_E, own = self._home_place_E.copy(), self.experts.parts[0].shape[0]
        for expert, slot in plan.directory.held(self.exchange.rank, self._layer).items():
            place_E[expert] = own + slot
        self._slot_of_E = torch.from_numpy(place_E)

    def _with_guests(self) -> Experts:
        if self.pool is None:
            return self.experts
        if not isinstance(self.experts, GatedExperts):
            raise ConfigError("layer: slots hold the weights of GatedExperts, not of other experts")
        if self.experts.parts[0].is_cuda:
            raise ConfigError("layer: slots are filled on the CPU only so far; leave out the pool on GPUs")
        return self.pool.with_guests(self.experts)

    def _use_device(self, gate_up_LGD: Tensor, down_LDF: Tensor) -> None:
        found = grouped_experts(gate_up_LGD, down_LDF, row_independent=self._row_tile is not None)
        if found is not None:
            self._grouped, self.backend = found, found.backend

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
