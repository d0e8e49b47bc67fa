"""Prepare and finalize for vLLM's modular MoE kernel, by bywash's exchange.

`prepare` sends each token once to every rank that owns one of its experts and hands the kernel what arrived; `finalize`
returns one row for each, already weighted and summed over this rank's experts, and adds them up at the source. Both
also in halves, with a hook that only waits, for shared experts and dual-batch overlap. Written for vLLM 0.32's
`FusedMoEPrepareAndFinalizeModular`; imports vLLM, so only the plugin imports this, late.

Shapes: T tokens of this rank, K experts per token, D hidden, G scales of a row, E experts, N rows received.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from bywash import metrics
from bywash.errors import ConfigError
from bywash.exchange.borrowed import BorrowedGroup
from bywash.serving.exchange import InFlight, ServingExchange

logger = init_logger(__name__)

DEADLINE_S = 300.0
"""For every wait on other ranks: a rank may be compiling kernels meanwhile."""
_DEFAULT_BACKEND = "allgather_reducescatter"
_MICRO_BATCHES = 2
_shared: ServingExchange | None = None
_publisher: metrics.Publisher | None = None


def make_halves(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What vLLM asks for a layer's prepare/finalize: bywash's where experts are spread over ranks, else vLLM's own.

    Args:
        original: vLLM's maker.
        args, options: what it is called with.

    Raises:
        ConfigError: a configuration in which bywash was switched on but cannot serve, by name.
    """
    call = signature(original).bind(*args, **options)
    call.apply_defaults()
    moe = call.arguments["moe"]
    parallel = moe.moe_parallel_config
    if not parallel.use_all2all_kernels or not call.arguments["allow_new_interface"]:
        return original(*args, **options)
    if parallel.all2all_backend != _DEFAULT_BACKEND:
        raise ConfigError(
            f"BYWASH_VLLM=1 with --all2all-backend {parallel.all2all_backend}: bywash takes the place of the default, "
            f"{_DEFAULT_BACKEND}; leave one of the two out"
        )
    if call.arguments["use_monolithic"]:
        raise ConfigError("BYWASH_VLLM=1: the chosen MoE kernel routes by itself; choose another --moe-backend")
    config = get_current_vllm_config_or_none()
    require_micro_batches(1 if config is None else config.parallel_config.num_ubatches)
    eager = config is None or config.model_config is None or config.model_config.enforce_eager
    return BywashPrepareAndFinalize(
        shared_exchange(),
        linear_owners(moe.num_experts, parallel.ep_size),
        out_dtype=moe.in_dtype,
        most_tokens=moe.max_num_tokens if config is None else max_tokens(moe.max_num_tokens, config),
        sync=eager,
    )


def shared_exchange() -> ServingExchange:
    """The one exchange of this process, over vLLM's expert-parallel group; opened when it is first asked for."""
    global _shared, _publisher
    if _shared is None:
        _shared = ServingExchange(group=BorrowedGroup(get_ep_group().cpu_group, deadline_s=DEADLINE_S))
        _publisher = metrics.inside_engine(_shared.group.rank)
        logger.info("bywash: MoE rows of rank %d travel by bywash's exchange", _shared.group.rank)
    return _shared


def require_micro_batches(number: int) -> None:
    """Raise `ConfigError` for more micro-batches than there are buffers for."""
    if number > _MICRO_BATCHES:
        raise ConfigError(
            f"BYWASH_VLLM=1 with --ubatch-size {number}: bywash keeps {_MICRO_BATCHES} micro-batches in flight; use "
            f"--enable-dbo, or --ubatch-size {_MICRO_BATCHES} or less"
        )


def max_tokens(layer: int, config: Any) -> int:
    """The most tokens that a rank brings to a step: the scheduler's limit, where it is the larger one."""
    return max(layer, int(config.scheduler_config.max_num_batched_tokens))


def linear_owners(experts: int, ranks: int) -> Tensor:
    """int64 [E]: vLLM's linear placement, in which the first E % R ranks own one expert more."""
    each, more = divmod(experts, ranks)
    counts = torch.tensor([each + (rank < more) for rank in range(ranks)])
    return torch.arange(ranks).repeat_interleave(counts)


@dataclass(slots=True)
class _Quantised:
    """Rows as they travel, and what is left to do with them when they have arrived."""

    x_TD: Tensor
    scales_TG: Tensor | None
    later: bool


class BywashPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """One layer's two halves. Layers share the exchange; each micro-batch has a step of its own."""

    def __init__(
        self,
        exchange: ServingExchange,
        rank_E: Tensor,
        *,
        out_dtype: torch.dtype,
        most_tokens: int,
        sync: bool,
    ) -> None:
        """Prepare nothing yet; buffers are opened by the first step.

        Args:
            exchange: see the class.
            rank_E: int64 [E], the rank that owns each expert.
            out_dtype: of the layer's output.
            most_tokens: the most tokens of a rank, the same on all ranks.
            sync: learn on the host how many rows came. Off for CUDA graphs: the kernel then gets as many rows as there
                may be.
        """
        super().__init__()
        self._exchange, self._rank_E, self._sync = exchange, rank_E, sync
        self._out_dtype, self._most_tokens, self._checked = out_dtype, most_tokens, False
        self._steps: list[InFlight | None] = [None] * _MICRO_BATCHES

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Rows as they come, [N, D], not batched by expert."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Any."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """None: rows are not batched."""
        return None

    def num_dispatchers(self) -> int:
        """Ranks that send here."""
        return self._exchange.group.ranks

    def output_is_reduced(self) -> bool:
        """Yes: `finalize` gives each token's whole sum to the rank that it came from."""
        return True

    def supports_async(self) -> bool:
        """Yes: both halves can be begun and finished apart."""
        return True

    def prepare_async(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> tuple[Callable[[], None], mk.ReceiverType]:
        """See vLLM. The hook waits for the rows, the receiver returns them."""
        self._check_placement(num_experts, expert_map)
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise ConfigError("bywash in vLLM: router weights on the input need top-1 routing")
            a1 = a1 * topk_weights.to(a1.dtype)
        sent = _quantised(a1, quant_config, defer_input_quant)
        if self._rank_E.device != topk_ids.device:
            self._rank_E = self._rank_E.to(topk_ids.device)
        flight = self._exchange.start(
            sent.x_TD,
            topk_ids,
            topk_weights,
            self._rank_E,
            out_dtype=self._out_dtype,
            most_tokens=self._most_tokens,
            step_tokens=_tokens_of_step(self._most_tokens),
            scales_TG=sent.scales_TG,
            sync=self._sync,
        )
        self._steps[dbo_current_ubatch_id()] = flight

        def receive() -> mk.PrepareResultType:
            got = flight.dispatched()
            x_ND, scales = got.x_ND, got.scales_NG
            if sent.later and x_ND.shape[0]:
                x_ND, scales = _quantise(x_ND, quant_config)
            return x_ND, scales, None, got.ids_NK.to(topk_ids.dtype), got.weights_NK.to(topk_weights.dtype)

        return flight.wait, receive

    def prepare(self, *args: Any, **options: Any) -> mk.PrepareResultType:
        """See vLLM: `prepare_async` without a break."""
        _, receive = self.prepare_async(*args, **options)
        return receive()

    def finalize_async(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: mk.TopKWeightAndReduce,
    ) -> Callable[[], None]:
        """See vLLM. The receiver waits and fills `output`."""
        batch = dbo_current_ubatch_id()
        flight, self._steps[batch] = self._steps[batch], None
        if flight is None:
            raise ConfigError("bywash in vLLM: finalize without a prepare before it")
        y_ND = fused_expert_output
        if y_ND.numel():
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            y_ND = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=y_ND,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        flight.give_back(y_ND)
        if _publisher is not None:
            _publisher.keep_up(self._exchange.steps)

        def receive() -> None:
            output.copy_(flight.result()[:, : output.shape[1]])

        return receive

    def finalize(self, *args: Any, **options: Any) -> None:
        """See vLLM: `finalize_async` without a break."""
        self.finalize_async(*args, **options)()

    def _check_placement(self, num_experts: int, expert_map: Tensor | None) -> None:
        """Rows go where the linear placement says; the kernel must agree. Looked at once, on the host."""
        if self._checked:
            return
        rank = self._exchange.group.rank
        if num_experts != self._rank_E.numel():
            raise ConfigError(f"bywash in vLLM: {num_experts} experts in a layer made for {self._rank_E.numel()}")
        if expert_map is not None:
            mine = (expert_map[: self._rank_E.numel()] >= 0).cpu()
            if not torch.equal(mine, self._rank_E.cpu() == rank):
                raise ConfigError(
                    "bywash in vLLM: experts are not placed in contiguous blocks; "
                    "use --expert-placement-strategy linear"
                )
        self._checked = True


def _tokens_of_step(most: int) -> int:
    """The most tokens that any rank brings to this step, as vLLM has told all of them; else `most`."""
    if is_forward_context_available():
        metadata = get_forward_context().dp_metadata
        if metadata is not None:
            return min(most, int(metadata.num_tokens_across_dp_cpu.max()))
    return most


def _quantised(a1: Tensor, quant_config: Any, defer: bool) -> _Quantised:
    """fp8 rows with a scale for each block or row travel quantised; other rows as they are.

    Raises:
        ConfigError: a format whose rows bywash does not carry, by name.
    """
    kind = quant_config.quant_dtype
    if kind is None or defer:
        return _Quantised(a1, None, later=False)
    if kind != torch.float8_e4m3fn:
        raise ConfigError(f"bywash in vLLM: activations of {kind} are not supported; bf16, fp16 and float8_e4m3fn are")
    if not (quant_config.is_block_quantized or quant_config.per_act_token_quant):
        return _Quantised(a1, None, later=True)  # one scale for all rows: nothing to send along
    x_TD, scales = _quantise(a1, quant_config)
    return _Quantised(x_TD, scales, later=False)


def _quantise(x_ND: Tensor, quant_config: Any) -> tuple[Tensor, Tensor | None]:
    found: tuple[Tensor, Tensor | None] = moe_kernel_quantize_input(
        x_ND,
        quant_config.a1_scale,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
        is_scale_swizzled=False,
    )
    return found
