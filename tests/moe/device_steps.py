"""What rank processes run in the tests of the layer on GPUs. Every rank draws everybody's inputs and all weights."""

import torch
from torch.nn import functional as F

from bywash.balance import Placement
from bywash.exchange import LocalExchange, open_exchange
from bywash.exchange.fp8_rows import dequantise_rows, quantise_rows
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.select import open_device_exchange
from bywash.kernels.experts_naive import dequantise_gate_up_naive, dequantise_weights_naive
from bywash.kernels.triton_experts_fp8 import TritonExpertsFp8
from bywash.moe import ExpertParallel, GatedExperts, quantise_gate_up, quantise_weights
from bywash.moe.device_experts import open_device_experts
from bywash.moe.device_layer import DeviceLayer, pairs_capacity
from bywash.routing import Routing
from tests.exchange.peer_steps import draw_all, open_device
from tests.moe.common import random_batch, swiglu

TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5}
"""Relative to the largest output: roundings of x W, of the intermediate, and of the sums."""


def draw_weights(experts, hidden, inner, dtype, seed):
    """(gate_up [E, G, D], down [E, D, F]) on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(experts, 2 * inner, hidden, generator=generator) * hidden**-0.5
    down = torch.randn(experts, hidden, inner, generator=generator) * inner**-0.5
    return gate_up.to(dtype), down.to(dtype)


def oracle(x, ids, weights, gate_up, down):
    """One expert at a time on the CPU, in float32 but for the intermediate."""
    total = torch.zeros(x.shape)
    for expert in range(gate_up.shape[0]):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ gate_up[expert].float().T).chunk(2, dim=1)
        h = (F.silu(gate) * up).to(x.dtype).float()
        total.index_add_(0, token, h @ down[expert].float().T * weights[token, k, None])
    return total


def oracle_fp8(x, ids, weights, gate_up, down):
    """The same with rows, weights and intermediates as they come back from e4m3."""
    x = dequantise_rows(*quantise_rows(x))
    gate_up, down = (
        dequantise_gate_up_naive(quantise_gate_up(gate_up)),
        dequantise_weights_naive(quantise_weights(down)),
    )
    total = torch.zeros(x.shape)
    for expert in range(gate_up.shape[0]):
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, dim=1)
        h = dequantise_rows(*quantise_rows((F.silu(gate) * up).bfloat16()))
        total.index_add_(0, token, h @ down[expert].T * weights[token, k, None])
    return total


def assert_close(out, expected, dtype, what):
    scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
    worst = float((out.float().cpu() - expected).abs().max()) / scale if expected.numel() else 0.0
    assert worst <= TOLERANCE[dtype], f"{what}: {worst:.2e} of the largest output"


def open_layer(group, devices, backend, config, seed):
    """(layer, placement, all weights) as a rank holds them."""
    config = dict(config)
    inner = config.pop("inner")
    device, placement = open_device(group, devices=devices, **config)
    all_weights = draw_weights(config["experts"], config["hidden"], inner, getattr(torch, config["dtype"]), seed)
    mine = placement.experts_of(group.rank)
    here = [w[mine].contiguous().cuda() for w in all_weights]
    experts = open_device_experts(*here, pairs=pairs_capacity(device.layout, len(mine)), backend=backend)
    return DeviceLayer(device, experts, local_experts=len(mine)), all_weights


def layer_steps(group, devices, backend, config, steps, seed):
    """Random steps, counts first and slotted, on both generations."""
    layer, all_weights = open_layer(group, devices, backend, config, seed)
    for step in range(steps):
        inputs = draw_all(seed + step, layer.device.layout, config["tokens"])
        x, ids, weights = inputs[group.rank]
        routing = Routing(ids_TK=ids.cuda(), weights_TK=weights.cuda(), num_experts=config["experts"])
        out = layer(x.cuda(), routing, generation=step % 2, counts_first=step % 3 != 0)
        layer.check()
        expected = oracle(x, ids, weights, *all_weights)
        assert_close(out, expected, config["dtype"], f"step {step}, {x.shape[0]} tokens")
    layer.device.close()


def fp8_layer_steps(group, devices, config, steps, seed):
    """Random steps of e4m3 rows through e4m3 experts."""
    config = dict(config)
    inner = config.pop("inner")
    device, placement = open_device(group, devices=devices, dtype="bfloat16", mode="fast", fp8="amax", **config)
    all_weights = draw_weights(config["experts"], config["hidden"], inner, torch.bfloat16, seed)
    mine = placement.experts_of(group.rank)
    gate_up, down = (w[mine].contiguous().cuda() for w in all_weights)
    experts = TritonExpertsFp8(
        quantise_gate_up(gate_up), quantise_weights(down), pairs=pairs_capacity(device.layout, len(mine))
    )
    layer = DeviceLayer(device, experts, local_experts=len(mine))
    generator = torch.Generator().manual_seed(seed + group.rank)
    for step in range(steps):
        tokens = int(torch.randint(config["tokens"] + 1, (1,), generator=generator))
        x = torch.randn(tokens, config["hidden"], generator=generator).bfloat16()
        ids = torch.rand(tokens, config["experts"], generator=generator).argsort(dim=1)[:, : config["top_k"]]
        weights = torch.rand(ids.shape, generator=generator)
        routing = Routing(ids_TK=ids.cuda(), weights_TK=weights.cuda(), num_experts=config["experts"])
        out = layer(x.cuda(), routing, generation=step % 2, counts_first=step % 3 != 0)
        layer.check()
        assert_close(out, oracle_fp8(x, ids, weights, *all_weights), "bfloat16", f"step {step}, {tokens} tokens")
    device.close()


def gather_layer_steps(group, devices, config, steps, seed):
    """Random steps through the all-gather, chosen by name; rows are padded to the same number, tokens are not."""
    config = dict(config)
    inner = config.pop("inner")
    torch.cuda.set_device(group.rank % devices)
    placement, most = Placement.equal(config["experts"], group.ranks), config["tokens"]
    layout = PeerLayout(ranks=group.ranks, dtype=torch.bfloat16, exact=False, **config)
    device, selection = open_device_exchange(
        group, layout, placement.home_E, combine_mode="stable", algorithm="all-gather", equal_rows=True
    )
    assert selection.algorithm == "all-gather"
    all_weights = draw_weights(config["experts"], config["hidden"], inner, torch.bfloat16, seed)
    mine = placement.experts_of(group.rank)
    here = [w[mine].contiguous().cuda() for w in all_weights]
    experts = open_device_experts(*here, pairs=pairs_capacity(layout, len(mine)))
    layer = DeviceLayer(device, experts, local_experts=len(mine))
    for step in range(steps):
        x, ids, weights = draw_all(seed + step, layout, most)[group.rank]
        missing = (0, 0, 0, most - x.shape[0])
        routing = Routing(
            ids_TK=F.pad(ids, missing).cuda(),
            weights_TK=F.pad(weights, missing).cuda(),
            num_experts=config["experts"],
        )
        count = torch.tensor([x.shape[0]], dtype=torch.int32, device="cuda")
        out = layer(F.pad(x, missing).cuda(), routing, tokens=count, generation=step % 2)[: x.shape[0]]
        layer.check()
        assert_close(out, oracle(x, ids, weights, *all_weights), "bfloat16", f"step {step}, {x.shape[0]} tokens")
    device.close()


def layer_replays(group, devices, backend, config, replays, seed):
    """One graph of router, dispatch, experts and combine, twice, replayed for other token counts and routings."""
    layer, all_weights = open_layer(group, devices, backend, config, seed)
    layout, most = layer.device.layout, config["tokens"]
    router = torch.randn(config["experts"], config["hidden"], generator=torch.Generator().manual_seed(seed)).cuda()

    def route(x):
        scores = (x.float() @ router.T).softmax(1).topk(layout.top_k)
        return Routing(ids_TK=scores.indices, weights_TK=scores.values, num_experts=config["experts"])

    layer = DeviceLayer(layer.device, layer._experts, local_experts=layer._local_experts, router=route)
    x = torch.zeros(most, layout.hidden, dtype=layout.dtype, device="cuda")
    tokens = torch.zeros(1, dtype=torch.int32, device="cuda")

    def two_layers():
        h = layer(x, tokens=tokens, generation=0)
        return h, layer(h, tokens=tokens, generation=1, counts_first=False)

    two_layers()
    layer.device.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        first, second = two_layers()
    for replay in range(replays):
        mine = draw_all(seed + replay, layout, most)[group.rank][0]
        count = mine.shape[0]
        x[:count].copy_(mine)
        tokens.fill_(count)
        graph.replay()
        layer.device.check()
        for number, (given, out) in enumerate([(x, first), (first, second)]):
            routing = route(given[:count])
            inputs = given[:count].cpu(), routing.ids_TK.cpu(), routing.weights_TK.cpu()
            what = f"replay {replay}, layer {number}, {count} tokens"
            assert_close(out[:count], oracle(*inputs, *all_weights), config["dtype"], what)
    layer.device.close()


def expert_parallel_step(group, devices, case):
    """`ExpertParallel` over `peer` against the oracle, and in `exact` bitwise against one rank on the same GPU."""
    torch.cuda.set_device(group.rank % devices)
    all_weights = draw_weights(case.experts, case.hidden, case.inner, case.dtype, case.seed)
    placement = Placement.equal(case.experts, group.ranks)

    def layer_of(exchange, placement):
        gate_up, down = (w[placement.experts_of(exchange.rank)].contiguous().cuda() for w in all_weights)
        experts = GatedExperts(gate_up_LGD=gate_up, down_LDF=down, apply_gate=swiglu, swiglu=True)
        return ExpertParallel(exchange=exchange, placement=placement, experts=experts)

    exchange = open_exchange("auto", group, combine_mode=case.combine, device="cuda")
    layer = layer_of(exchange, placement)
    x, routing = random_batch(case, group.rank)
    on_gpu = Routing(
        ids_TK=routing.ids_TK.cuda(), weights_TK=routing.weights_TK.cuda(), num_experts=routing.num_experts
    )
    out = layer(x.cuda(), on_gpu)
    again = layer(x.cuda(), on_gpu, reuse_plan=True)
    name = str(case.dtype).removeprefix("torch.")
    assert_close(out, oracle(x, routing.ids_TK, routing.weights_TK, *all_weights), name, f"{case}")
    assert_close(again, oracle(x, routing.ids_TK, routing.weights_TK, *all_weights), name, f"again, {case}")
    if case.combine == "exact":
        alone = layer_of(LocalExchange(combine_mode="exact"), Placement.equal(case.experts, 1))
        assert torch.equal(out, again)
        assert torch.equal(out, alone(x.cuda(), on_gpu)), f"{case}: bits differ from one rank"
    exchange.close()
    return layer.backend


def model_job(group, options):
    from bywash.models.job import run_job  # late: it needs transformers, the other steps do not

    return run_job(options, group)
