"""What rank processes run in the tests of the all-gather by copy engine: the oracle is that of `peer`."""

import os
import signal

import torch
from torch.nn import functional as F

from bywash.balance import Placement
from bywash.errors import BywashError
from bywash.exchange.allgather import AllGatherDevice
from bywash.exchange.peer_layout import PeerLayout
from tests.exchange.peer_steps import check_received, draw, draw_all, expert_outputs, factors, oracle_out, same_bits


def open_gather(group, *, devices, experts, top_k, hidden, dtype, tokens):
    torch.cuda.set_device(group.rank % devices)
    layout = PeerLayout(
        ranks=group.ranks,
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        hidden=hidden,
        dtype=getattr(torch, dtype),
        exact=False,
    )
    placement = Placement.equal(experts, group.ranks)
    return AllGatherDevice(group, layout, placement.home_E, combine_mode="stable"), placement


def on_gpu(inputs, rows):
    """Padded to `rows`, with the real number of tokens; padding names experts, which must not matter."""
    x, ids, weights = inputs
    missing = (0, 0, 0, rows - x.shape[0])
    count = torch.tensor([x.shape[0]], dtype=torch.int32, device="cuda")
    return F.pad(x, missing).cuda(), F.pad(ids, missing).cuda(), F.pad(weights, missing, value=9.0).cuda(), count


def gather_steps(group, devices, config, steps, seed):
    """Random steps on both channels, whole and in halves, with other token counts on every rank."""
    device, placement = open_gather(group, devices=devices, **config)
    layout, most, factor_E = device.layout, config["tokens"], factors(config["experts"]).cuda()
    for step in range(steps):
        inputs = draw_all(seed + step, layout, most)
        rows, generation = max(x.shape[0] for x, _, _ in inputs), step % 2
        x, ids, weights, count = on_gpu(inputs[group.rank], rows)
        if step % 3:
            received = device.dispatch(x, ids, weights, tokens=count, generation=generation)
        else:
            device.dispatch_start(x, ids, weights, tokens=count, generation=generation)
            received = device.dispatch_finish(generation)
        y = expert_outputs(device, received, factor_E)
        device.check()
        check_received(device, received, inputs, placement, group)
        y[int(received.starts_E[-1]) :] = float("nan")
        out = device.combine(y, generation=generation)
        device.check()
        real = inputs[group.rank][0].shape[0]
        expected = oracle_out(*inputs[group.rank], placement, layout, "stable")
        assert same_bits(out[:real].cpu(), expected), f"step {step}: {(out[:real].cpu() != expected).any(1).sum()} rows"
        received.index_M.zero_()
        received.m_PK.fill_(-7)
    device.close()


def gather_replays(group, devices, config, replays, seed):
    """One captured graph of two layers, replayed with other inputs and counts."""
    device, placement = open_gather(group, devices=devices, **config)
    layout, most, factor_E = device.layout, config["tokens"], factors(config["experts"]).cuda()
    x, ids, weights, tokens = on_gpu(draw_all(seed, layout, most)[group.rank], most)

    def layers():
        h = x
        for generation in range(2):
            received = device.dispatch(h, ids, weights, tokens=tokens, generation=generation)
            h = device.combine(expert_outputs(device, received, factor_E), generation=generation)
        return h

    layers()
    device.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = layers()
    for replay in range(replays):
        mine = draw_all(seed + replay, layout, most)[group.rank]
        for buffer, value in zip((x, ids, weights, tokens), on_gpu(mine, most), strict=True):
            buffer.copy_(value)
        graph.replay()
        device.check()
        expected = mine[0]
        for _ in range(2):
            expected = oracle_out(expected, *mine[1:], placement, layout, "stable")
        assert same_bits(out[: mine[0].shape[0]].cpu(), expected), f"replay {replay}"
    device.close()


def gather_mistakes(group, devices, how):
    """The error of each rank when rank 1 errs or dies."""
    config = {"experts": 8, "top_k": 2, "hidden": 64, "dtype": "bfloat16", "tokens": 16}
    device, _ = open_gather(group, devices=devices, **config)
    x, ids, weights = (t.cuda() for t in draw(torch.Generator().manual_seed(1), "uniform", 16, device.layout))
    device.dispatch(x, ids, weights)
    device.combine(torch.zeros(device.layout.places * 2, 64, dtype=torch.bfloat16, device="cuda"))
    device.check()
    if group.rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 1 and how == "rows":
        x, ids, weights = x[:9], ids[:9], weights[:9]
    if group.rank == 1 and how == "expert":
        ids[3, 1] = 8
    device.dispatch(x, ids, weights)
    try:
        device.check()
    except BywashError as error:
        return type(error).__name__, str(error), float(torch.ones(1000, device="cuda").sum())
    return "no error", "", 0.0
