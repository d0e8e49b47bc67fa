"""vLLM's own modular MoE kernel on CPU ranks, with bywash's prepare and finalize in it. Imports vLLM where it runs.

Every rank knows the whole layer, so that each can compute its tokens by vLLM's own path in one process beside it.
"""

import os
from types import SimpleNamespace

import torch

EXPERTS, HIDDEN, WIDE, TOP_K, MOST = 8, 64, 96, 3, 24


def layer_weights(dtype):
    made = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * WIDE, HIDDEN, generator=made) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, WIDE, generator=made) / WIDE**0.5
    return w13.to(dtype), w2.to(dtype)


def tokens_of(rank, step, dtype, tokens=None):
    made = torch.Generator().manual_seed(100 * step + rank)
    count = [MOST, 7, 0, 1][(rank + step) % 4] if tokens is None else tokens
    x = torch.randn(count, HIDDEN, generator=made).to(dtype)
    scores = torch.rand(count, EXPERTS, generator=made)
    weights, ids = scores.topk(TOP_K, dim=1)
    return x, (weights / weights.sum(dim=1, keepdim=True)).float(), ids.int()


def moe_config(ranks, rank, dtype, backend="allgather_reducescatter"):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    parallel = FusedMoEParallelConfig(
        tp_size=1,
        pcp_size=1,
        dp_size=ranks,
        ep_size=ranks,
        tp_rank=0,
        pcp_rank=0,
        dp_rank=rank,
        ep_rank=rank,
        sp_size=1,
        use_ep=ranks > 1,
        all2all_backend=backend,
        enable_eplb=False,
    )
    return FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size=WIDE,
        num_local_experts=EXPERTS // ranks,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=dtype,
        max_num_tokens=MOST,
    )


def local_experts_class():
    """vLLM's CPU experts; its CPU kernel takes local ids only, so ids of other ranks' experts get the weight 0."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    class LocalExperts(CPUUnquantizedExperts):
        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, expert_map=None, **options):
            if expert_map is not None:
                local = expert_map[topk_ids.long()]
                topk_weights = torch.where(local >= 0, topk_weights, 0.0)
                topk_ids = local.clamp(min=0).to(topk_ids.dtype)
            super().apply(
                output, hidden_states, w1, w2, topk_weights, topk_ids, *args, expert_map=expert_map, **options
            )

    return LocalExperts


def kernel_and_weights(config, first, dtype, prepare_finalize=None):
    """A kernel made by vLLM's own function, and its experts' weights as its experts class lays them out."""
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    w13, w2 = layer_weights(dtype)
    mine = slice(first, first + config.num_local_experts)
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(w13[mine].clone(), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2[mine].clone(), requires_grad=False)
    if prepare_finalize is None:
        backend = next(iter(unquantized.UnquantizedMoeBackend))
        kernel = unquantized.make_unquantized_moe_kernel(
            FUSED_MOE_UNQUANTIZED_CONFIG, config, backend, local_experts_class()
        )
    else:
        experts = local_experts_class()(config, FUSED_MOE_UNQUANTIZED_CONFIG)
        kernel = mk.FusedMoEKernel(prepare_finalize, experts)
    kernel.fused_experts.process_weights_after_loading(layer)
    return kernel, layer


def apply(kernel, layer, x, weights, ids, expert_map=None):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return kernel.apply(
        hidden_states=x,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation.SILU,
        global_num_experts=EXPERTS,
        expert_map=expert_map,
        apply_router_weight_on_input=False,
    )


def expert_map_of(rank, ranks):
    local = EXPERTS // ranks
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[rank * local : (rank + 1) * local] = torch.arange(local, dtype=torch.int32)
    return expert_map


def with_vllm_group(group):
    """vLLM's expert-parallel group over the ranks, made by its own class, as its workers have it."""
    from vllm.distributed import parallel_state

    if parallel_state._EP is None:
        parallel_state._EP = parallel_state.init_model_parallel_group(
            [list(range(group.ranks))], 0, "gloo", group_name="ep", use_device_communicator=False
        )


def switched_on():
    os.environ["BYWASH_VLLM"] = "1"
    from bywash.serving import vllm_plugin

    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may call it again


def layer_on_ranks(group, dtype_name, steps):
    """Two layers' kernels by way of the plugin, several steps, against vLLM's one-rank path. Worst error in eps."""
    from vllm.config import VllmConfig, set_current_vllm_config

    dtype = getattr(torch, dtype_name)
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        with_vllm_group(group)
        switched_on()
        config = moe_config(group.ranks, group.rank, dtype)
        local = EXPERTS // group.ranks
        layers = [kernel_and_weights(config, group.rank * local, dtype) for _ in range(2)]
        alone, alone_layer = kernel_and_weights(moe_config(1, 0, dtype), 0, dtype)
        names = {type(kernel.prepare_finalize).__name__ for kernel, _ in layers}
        assert names == {"BywashPrepareAndFinalize"}
        assert type(alone.prepare_finalize).__name__ == "MoEPrepareAndFinalizeNoDPEPModular"
        worst = 0.0
        for step in range(steps):
            x, weights, ids = tokens_of(group.rank, step, dtype)
            for kernel, layer in layers:
                got = apply(kernel, layer, x.clone(), weights, ids, expert_map_of(group.rank, group.ranks))
                want = apply(alone, alone_layer, x.clone(), weights, ids)
                assert got.shape == x.shape
                if x.shape[0]:
                    worst = max(worst, ((got - want).abs() / want.abs().clamp(min=1.0)).max().item())
                x = got
        from bywash.serving import vllm_halves

        return worst / torch.finfo(dtype).eps, vllm_halves.shared_exchange().counters()


def interleaved_halves(group):
    """Two micro-batches as dual-batch overlap orders them: both are sent before either is waited for."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    from bywash.serving import vllm_halves

    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        with_vllm_group(group)
        halves = vllm_halves.BywashPrepareAndFinalize(
            vllm_halves.shared_exchange(),
            vllm_halves.linear_owners(EXPERTS, group.ranks),
            out_dtype=torch.bfloat16,
            most_tokens=MOST,
            sync=True,
        )
        batch = [0]
        vllm_halves.dbo_current_ubatch_id, before = (lambda: batch[0]), vllm_halves.dbo_current_ubatch_id
        expert_map = expert_map_of(group.rank, group.ranks)
        try:
            for step in range(3):
                given = [tokens_of(group.rank, 10 * step + b, torch.bfloat16) for b in range(2)]
                flights, outputs = [], [torch.empty_like(x) for x, _, _ in given]
                for batch[0], (x, weights, ids) in enumerate(given):
                    call = (x, weights, ids, EXPERTS, expert_map, False, FUSED_MOE_UNQUANTIZED_CONFIG, False)
                    flights.append(halves.prepare_async(*call))
                for batch[0], (hook, receive) in enumerate(flights):
                    hook()
                    rows, _, _, ids, _ = receive()
                    # Each rank returns the row once for each of its experts, so that the sum is TOP_K rows.
                    here = (expert_map[ids.long()] >= 0).sum(dim=1, keepdim=True)
                    flights[batch[0]] = halves.finalize_async(
                        outputs[batch[0]], rows * here, None, None, False, TopKWeightAndReduceNoOP()
                    )
                for finish in flights:
                    finish()
                for (x, _, _), out in zip(given, outputs, strict=True):
                    torch.testing.assert_close(out.float(), TOP_K * x.float(), rtol=0.01, atol=0)
        finally:
            vllm_halves.dbo_current_ubatch_id = before
    return True


def fp8_rows(group, per_token):
    """e4m3 rows and their scales arrive as they were quantised where the token came from."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    from bywash.exchange.fp8_rows import quantise_rows
    from bywash.serving import vllm_halves

    def quantise(x, scale, **options):
        assert options["per_act_token_quant"] == per_token
        q, scales = quantise_rows(x)
        return q, scales[:, :1].contiguous() if per_token else scales

    quant = SimpleNamespace(
        quant_dtype=torch.float8_e4m3fn,
        is_block_quantized=not per_token,
        per_act_token_quant=per_token,
        block_shape=None if per_token else [128, 128],
        a1_scale=None,
    )
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        with_vllm_group(group)
        vllm_halves.moe_kernel_quantize_input, before = quantise, vllm_halves.moe_kernel_quantize_input
        try:
            halves = vllm_halves.BywashPrepareAndFinalize(
                vllm_halves.shared_exchange(),
                vllm_halves.linear_owners(EXPERTS, group.ranks),
                out_dtype=torch.bfloat16,
                most_tokens=MOST,
                sync=True,
            )
            x, weights, ids = tokens_of(group.rank, 1, torch.bfloat16)
            rows, scales, _, _, _ = halves.prepare(x, weights, ids, EXPERTS, None, False, quant, False)
            want, want_scales, rank_E = [], [], vllm_halves.linear_owners(EXPERTS, group.ranks)
            for source in range(group.ranks):
                other, _, other_ids = tokens_of(source, 1, torch.bfloat16)
                q, s = quantise(other, None, per_act_token_quant=per_token)
                here = (rank_E[other_ids.long()] == group.rank).any(dim=1)
                want.append(q.view(torch.uint8)[here])
                want_scales.append(s[here])
            assert torch.equal(rows.view(torch.uint8), torch.cat(want))
            assert torch.equal(scales, torch.cat(want_scales))
            output = torch.empty_like(x)
            y = torch.ones(rows.shape[0], HIDDEN, dtype=torch.bfloat16)
            halves.finalize(output, y, None, None, False, TopKWeightAndReduceNoOP())
            counts = torch.stack([(rank_E[ids.long()] == r).any(dim=1) for r in range(group.ranks)]).sum(dim=0)
            assert torch.equal(output, counts[:, None].expand_as(x).to(x.dtype))
            return rows.shape[0]
        finally:
            vllm_halves.moe_kernel_quantize_input = before
