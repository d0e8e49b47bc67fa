"""A dispatcher for SGLang's MoE layers, by bywash's exchange.

`dispatch` sends each token once to every rank that owns one of its experts and hands the layer what arrived, with
local expert ids, -1 for experts elsewhere, as SGLang's standard runners take them; `combine` returns one row for each
and adds them up at the source. The halves `_a` and `_b` begin and finish, for two-batch overlap. Written after SGLang's
`BaseDispatcher` and `StandardDispatchOutput`; imports SGLang, so only the plugin imports this, late.

Shapes: T tokens of this rank, K experts per token, E experts, N rows received.
"""

from typing import Any

import torch
from sglang.srt.distributed import get_moe_ep_group
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from torch import Tensor

from bywash import metrics
from bywash.errors import ConfigError
from bywash.exchange.borrowed import BorrowedGroup
from bywash.serving.exchange import InFlight, ServingExchange
from bywash.serving.sglang_plugin import most_tokens

DEADLINE_S = 300.0
"""For every wait on other ranks: a rank may be compiling kernels meanwhile."""
_shared: ServingExchange | None = None
_publisher: metrics.Publisher | None = None


def make_dispatcher(runner_config: Any) -> "BywashDispatcher":
    """For a layer as SGLang describes it."""
    return BywashDispatcher(
        shared_exchange(),
        experts=runner_config.num_experts,
        local_experts=runner_config.num_local_experts,
        shared_experts=getattr(runner_config, "num_fused_shared_experts", 0),
        most_tokens=most_tokens(),
    )


def shared_exchange() -> ServingExchange:
    """The one exchange of this process, over SGLang's expert-parallel group; opened when it is first asked for."""
    global _shared, _publisher
    if _shared is None:
        _shared = ServingExchange(group=BorrowedGroup(get_moe_ep_group().cpu_group, deadline_s=DEADLINE_S))
        _publisher = metrics.inside_engine(_shared.group.rank)
    return _shared


class BywashDispatcher(BaseDispatcher):  # type: ignore[misc]
    """One layer's dispatcher. Layers share the exchange; each sub-batch has a step of its own."""

    def __init__(
        self, exchange: ServingExchange, *, experts: int, local_experts: int, shared_experts: int, most_tokens: int
    ) -> None:
        """Check the layer; buffers are opened by its first step.

        Raises:
            ConfigError: experts that are not spread evenly, or shared experts fused into them.
        """
        super().__init__()
        ranks = exchange.group.ranks
        if shared_experts:
            raise ConfigError("bywash in SGLang: fused shared experts; use --disable-shared-experts-fusion")
        if experts != local_experts * ranks:
            raise ConfigError(f"bywash in SGLang: {experts} experts, {local_experts} on each of {ranks} ranks")
        self._exchange, self._most_tokens, self._local = exchange, most_tokens, local_experts
        self._rank_E = torch.arange(ranks).repeat_interleave(local_experts)
        self._sent: dict[int, tuple[InFlight, Any]] = {}
        self._computed: dict[int, tuple[InFlight, Tensor]] = {}

    def dispatch(self, hidden_states: Tensor, topk_output: Any, **_: Any) -> StandardDispatchOutput:
        """Both halves at once."""
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def combine(self, combine_input: Any, **_: Any) -> Tensor:
        """Both halves at once."""
        self.combine_a(combine_input)
        return self.combine_b()

    def dispatch_a(self, hidden_states: Tensor, topk_output: Any, tbo_subbatch_index: int | None = None) -> None:
        """Begin sending.

        Raises:
            ConfigError: a routing format without ids, or a sub-batch that is under way already.
        """
        batch = tbo_subbatch_index or 0
        if batch in self._sent or batch in self._computed:
            raise ConfigError(f"bywash in SGLang: dispatch of sub-batch {batch}, whose combine has not finished")
        ids_TK = getattr(topk_output, "topk_ids", None)
        if ids_TK is None:
            raise ConfigError(
                f"bywash in SGLang: {type(topk_output).__name__} has no expert ids; choose a --moe-runner-backend that "
                "takes standard top-k output (triton, deep_gemm)"
            )
        if self._rank_E.device != ids_TK.device:
            self._rank_E = self._rank_E.to(ids_TK.device)
        flight = self._exchange.start(
            hidden_states,
            ids_TK,
            topk_output.topk_weights,
            self._rank_E,
            out_dtype=hidden_states.dtype,
            most_tokens=self._most_tokens,
        )
        self._sent[batch] = (flight, topk_output)

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> StandardDispatchOutput:
        """Wait, and hand over the rows with this rank's expert ids."""
        batch = tbo_subbatch_index or 0
        flight, topk_output = self._taken(self._sent, batch, "dispatch_b")
        got = flight.dispatched()
        first = self._exchange.group.rank * self._local
        here_NK = (got.ids_NK >= first) & (got.ids_NK < first + self._local)
        local_NK = torch.where(here_NK, got.ids_NK - first, -1)
        self._computed[batch] = (flight, got.x_ND)
        routing = topk_output._replace(
            topk_weights=got.weights_NK.to(topk_output.topk_weights.dtype),
            topk_ids=local_NK.to(topk_output.topk_ids.dtype),
            router_logits=None,
        )
        return StandardDispatchOutput(hidden_states=got.x_ND, hidden_states_scale=None, topk_output=routing)

    def combine_a(self, combine_input: Any, tbo_subbatch_index: int | None = None) -> None:
        """Begin returning outputs, weighted and summed over this rank's experts."""
        batch = tbo_subbatch_index or 0
        flight, x_ND = self._taken(self._computed, batch, "combine_a")
        y_ND = combine_input.hidden_states
        if y_ND.shape != x_ND.shape:
            raise ConfigError(f"bywash in SGLang: outputs {list(y_ND.shape)} for rows {list(x_ND.shape)}")
        flight.give_back(y_ND)
        self._computed[batch] = (flight, x_ND)
        if _publisher is not None:
            _publisher.keep_up(self._exchange.steps)

    def combine_b(self, tbo_subbatch_index: int | None = None) -> Tensor:
        """Wait, and return the sum for each of this rank's tokens."""
        flight, x_ND = self._taken(self._computed, tbo_subbatch_index or 0, "combine_b")
        return flight.result()[:, : x_ND.shape[1]]

    @staticmethod
    def _taken(steps: dict[int, tuple[InFlight, Any]], batch: int, call: str) -> tuple[InFlight, Any]:
        if batch not in steps:
            raise ConfigError(f"bywash in SGLang: {call} of sub-batch {batch} without what comes before it")
        return steps.pop(batch)
