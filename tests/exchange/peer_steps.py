"""What rank processes run in the tests of `peer`: random steps against an oracle on the CPU.

Every rank draws all ranks' inputs from one seed, so that each can work out alone what must arrive and come out.
Experts are stand-ins (row * factor of the expert, rounded), bitwise equal on CPU and GPU.
"""

import os
import signal
import time

import numpy as np
import torch

from bywash.balance import Placement, plan_step
from bywash.balance.plan import digest32
from bywash.errors import BywashError
from bywash.exchange.fp8_rows import dequantise_rows, quantise_rows
from bywash.exchange.peer import PeerExchange
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.peer_ops import PeerLayer
from bywash.exchange.rows import send_lists, weighted_sum
from bywash.routing import Routing
from tests.exchange.pushing import may_push, push_outputs


def open_device(group, *, devices, experts, top_k, hidden, dtype, mode, tokens, fp8="off", num_sms=0, **options):
    torch.cuda.set_device(group.rank % devices)
    layout = PeerLayout(
        ranks=group.ranks,
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        hidden=hidden,
        dtype=getattr(torch, dtype),
        exact=mode == "exact",
        fp8=fp8,
    )
    placement = Placement.equal(experts, group.ranks)
    device = PeerDevice(group, layout, placement.home_E, combine_mode=mode, num_sms=num_sms, **options)
    return device, placement


def draw(generator, kind, tokens, layout):
    """One rank's (x, ids, weights) on the CPU."""
    experts, top_k = layout.experts, layout.top_k
    x = torch.randn(tokens, layout.hidden, generator=generator)
    if layout.groups:  # groups of zeros, of tiny and of large magnitudes
        size = 10.0 ** torch.randint(-12, 4, (tokens, layout.groups), generator=generator)
        size *= torch.rand(size.shape, generator=generator) > 0.1
        x *= size.repeat_interleave(128, dim=1)[:, : layout.hidden]
    x = x.to(layout.dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
    if kind == "one rank":
        ids = torch.rand(tokens, max(1, experts // layout.ranks), generator=generator).argsort(dim=1)[:, :top_k]
        ids = torch.nn.functional.pad(ids, (0, top_k - ids.shape[1]), value=-1)
    if kind == "holes":
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.6, -1, ids)
    weights = torch.rand(tokens, top_k, generator=generator)
    return x, ids.contiguous(), weights


def draw_all(seed, layout, most):
    generator = torch.Generator().manual_seed(seed)
    kinds = ["uniform", "one rank", "holes"]
    kind = kinds[int(torch.randint(3, (1,), generator=generator))]
    sizes = torch.randint(0, most + 1, (layout.ranks,), generator=generator).tolist()
    if seed % 7 == 0:
        sizes[seed % layout.ranks] = 0
    return [draw(generator, kind, size, layout) for size in sizes]


def factors(experts):
    return 0.5 + torch.arange(experts, dtype=torch.float32) / experts


def oracle_index(inputs, placement, rank, layout):
    """(places in index order, ends per local expert) by a stable sort over (expert, source, token)."""
    triples = []
    for source, (_, ids, _) in enumerate(inputs):
        for token, k in (ids >= 0).nonzero().tolist():
            if placement.home_E[ids[token, k]] == rank:
                triples.append((int(ids[token, k]), source, token))
    triples.sort()
    local = placement.experts_of(rank)
    ends = [sum(1 for t in triples if t[0] <= e) for e in local]
    return [source * layout.tokens + token for _, source, token in triples], ends


def quantised(x, layout):
    return quantise_rows(x, power_of_two=layout.fp8 == "power-of-two")


def oracle_out(x, ids, weights, placement, layout, mode):
    if layout.groups:
        x = dequantise_rows(*quantised(x, layout))
    outputs = (x.float()[:, None, :] * factors(layout.experts)[ids.clamp(min=0)][:, :, None]).to(layout.dtype)
    if mode == "exact":
        return weighted_sum(outputs[ids >= 0], ids, weights)
    home = torch.cat([torch.from_numpy(placement.home_E), torch.tensor([-1])])[ids]
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(layout.ranks):
        here = torch.where(home == rank, ids, -1)
        total += weighted_sum(outputs[here >= 0], here, weights).float()
    return total.to(layout.dtype)


def rows_at(device, received, places):
    """Received rows [*places, D] in float32."""
    rows = received.rows_PD.view(torch.uint8 if device.layout.groups else device.layout.dtype)[places.long()]
    if received.scales_PG is None:
        return rows[..., : device.layout.hidden].float()
    rows = rows.view(torch.float8_e4m3fn)[..., : device.layout.hidden].flatten(0, -2)
    return dequantise_rows(rows, received.scales_PG[places.long()].flatten(0, -2)).unflatten(0, places.shape)


def batched_outputs(device, received, factor_L, capacity, generation):
    """The same experts over batches of `capacity` rows; what is past an expert's last row is NaN."""
    batches = device.batch(capacity, generation=generation)
    rows = rows_at(device, received, batches.index_LC.clamp(min=0))
    y = (rows * factor_L[:, None, None]).to(device.layout.dtype)
    y[batches.index_LC < 0] = float("nan")
    counts = torch.stack([(row >= 0).sum() for row in batches.index_LC])
    assert torch.equal(batches.counts_L.long(), counts)
    by_expert = batches.index_LC[batches.index_LC >= 0]
    assert torch.equal(by_expert, received.index_M[: by_expert.numel()])
    assert by_expert.numel() == int(received.starts_E[-1])
    return y.flatten(0, 1)


def expert_outputs(device, received, factor_E):
    """y for the whole capacity; rows past M are garbage, as they would be from a grouped GEMM."""
    rows = rows_at(device, received, received.index_M)
    at = torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32)
    expert = torch.searchsorted(received.starts_E[1:], at, right=True).clamp(max=device.layout.experts - 1)
    return (rows * factor_E[expert][:, None]).to(device.layout.dtype)


def check_digest(device, received, placement, generation):
    """The plan's digest as the device makes it from the counts, against the host's."""
    words = np.concatenate([received.counts_RE.cpu().numpy().ravel(), placement.home_E]).astype(np.int32)
    assert device.digest(generation) == digest32(words)


def check_received(device, received, inputs, placement, group):
    places, ends = oracle_index(inputs, placement, group.rank, device.layout)
    assert received.index_M[: len(places)].tolist() == places
    assert received.ends_L[: len(ends)].tolist() == ends
    assert int(received.starts_E[-1]) == len(places)
    assert received.tokens_R.tolist() == [x.shape[0] for x, _, _ in inputs]
    counts = [torch.bincount(ids[ids >= 0], minlength=device.layout.experts) for _, ids, _ in inputs]
    assert torch.equal(received.counts_RE.cpu(), torch.stack(counts).int())
    row_bytes = received.rows_PD.view(torch.uint8)
    for place in sorted(set(places)):
        source, token = divmod(place, device.layout.tokens)
        expected = inputs[source][0][token]
        if device.layout.groups:
            expected, scales = quantised(expected[None], device.layout)
            assert torch.equal(received.scales_PG[place].cpu(), scales[0])
            expected = expected[0]
        expected = expected.view(torch.uint8)
        got = row_bytes[place].cpu()
        assert torch.equal(got[: expected.numel()], expected), f"place {place}"
        assert not got[expected.numel() :].any(), f"place {place}: padding"


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def random_steps(group, devices, config, steps, seed):
    """Random steps on both channels, whole and in halves, counts first and not, every buffer poisoned."""
    device, placement = open_device(group, devices=devices, **config)
    layout, most, factor_E = device.layout, config["tokens"], factors(config["experts"]).cuda()
    here_L = torch.from_numpy(np.flatnonzero(placement.home_E == group.rank))
    began = time.monotonic()
    for step in range(steps):
        inputs = draw_all(seed + step, layout, most)
        x, ids, weights = inputs[group.rank]
        on_gpu, options = (x.cuda(), ids.cuda(), weights.cuda()), {}
        if layout.groups and step % 4 == 3:  # quantised by the caller
            q, scales = quantised(x, layout)
            on_gpu, options = (q.cuda(), *on_gpu[1:]), {"scales_TG": scales.cuda()}
        generation, counts_first, halves = step % 2, step % 3 != 0, step % 5 < 3
        options.update(generation=generation, counts_first=counts_first)
        device.own_slots(generation).fill_(float("nan"))
        if halves:
            device.dispatch_start(*on_gpu, **options)
            received = device.dispatch_finish(generation)
        else:
            received = device.dispatch(*on_gpu, **options)
        batched = step % 7 == 2
        pushed = not batched and may_push(received, seed + step, group.rank)
        if batched:
            y = batched_outputs(device, received, factor_E[here_L], layout.places, generation)
        else:
            y = expert_outputs(device, received, factor_E)
        device.check()
        if step < 20 or step % 10 == 0:
            check_received(device, received, inputs, placement, group)
            if counts_first:
                check_digest(device, received, placement, generation)
        if not batched:
            y[int(received.starts_E[-1]) :] = float("nan")
        if pushed:
            push_outputs(received, y)
        received.rows_PD.view(torch.uint8).fill_(0xFF)  # NaN; no peer writes again before it has these outputs
        if layout.groups:
            received.scales_PG.fill_(float("nan"))
        if halves:
            out = device.combine_start(y, generation=generation, pushed=pushed).fill_(float("nan"))
            device.combine_finish(generation)
        else:
            out = device.combine(y, generation=generation, pushed=pushed)
        device.check()
        expected = oracle_out(x, ids, weights, placement, layout, config["mode"])
        assert same_bits(out.cpu(), expected), f"step {step}: {(out.cpu() != expected).any(1).sum()} rows differ"
        for buffer in (received.index_M, received.ends_L):
            buffer.zero_()
        received.m_PK.fill_(-7)
    seconds = time.monotonic() - began
    device.close()
    return seconds


def graph_replays(group, devices, config, replays, seed):
    """One captured graph of dispatch, experts and combine on both channels, replayed with other inputs and counts."""
    device, placement = open_device(group, devices=devices, **config)
    layout, most, factor_E = device.layout, config["tokens"], factors(config["experts"]).cuda()
    x = torch.zeros(most, layout.hidden, dtype=layout.dtype, device="cuda")
    ids = torch.full((most, layout.top_k), -1, dtype=torch.int64, device="cuda")
    weights = torch.zeros(most, layout.top_k, device="cuda")
    tokens = torch.zeros(1, dtype=torch.int32, device="cuda")

    def layers():
        h = x
        for generation, counts_first in ((0, True), (1, False), (0, False)):
            received = device.dispatch(h, ids, weights, tokens=tokens, generation=generation, counts_first=counts_first)
            h = device.combine(expert_outputs(device, received, factor_E), generation=generation)
        return h

    layers()
    device.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        out = layers()
    for replay in range(replays):
        mine_x, mine_ids, mine_weights = draw_all(seed + replay, layout, most)[group.rank]
        count = mine_x.shape[0]
        for buffer, value in ((x, mine_x), (ids, mine_ids), (weights, mine_weights)):
            buffer[:count].copy_(value)
        tokens.fill_(count)
        graph.replay()
        device.check()
        expected = mine_x
        for _ in range(3):
            expected = oracle_out(expected, mine_ids, mine_weights, placement, layout, config["mode"])
        assert same_bits(out[:count].cpu(), expected), f"replay {replay} of {count} tokens"
    device.close()


def compiled_layers(group, devices, config, steps, seed, **compile_options):
    """Two layers under torch.compile, with steps of other counts, against the oracle; eager ones must agree too."""
    device, placement = open_device(group, devices=devices, **config)
    layout, most, factor_E = device.layout, config["tokens"], factors(config["experts"]).cuda()

    def experts(received):
        return expert_outputs(device, received, factor_E)

    layers = [PeerLayer(device, experts, generation=generation) for generation in range(2)]

    def model(x, ids, weights, tokens):
        for layer in layers:
            x = layer(x * 2, ids, weights, tokens) / 2
        return x

    compiled = torch.compile(model, **compile_options)
    for step in range(steps):
        mine_x, mine_ids, mine_weights = draw_all(seed + step, layout, most)[group.rank]
        count = mine_x.shape[0]
        x = torch.zeros(most, layout.hidden, dtype=layout.dtype)
        ids = torch.full((most, layout.top_k), -1)
        weights = torch.zeros(most, layout.top_k)
        for buffer, value in ((x, mine_x), (ids, mine_ids), (weights, mine_weights)):
            buffer[:count] = value
        arguments = (x.cuda(), ids.cuda(), weights.cuda(), torch.tensor([count], dtype=torch.int32).cuda())
        expected = mine_x
        for _ in layers:
            expected = oracle_out(expected * 2, mine_ids, mine_weights, placement, layout, config["mode"]) / 2
        for run in (compiled, model):
            out = run(*arguments)
            device.check()
            assert same_bits(out[:count].cpu(), expected), f"step {step} of {count} tokens"
    device.close()


def through_the_interface(group, devices, mode, steps, seed):
    """`PeerExchange` as `ExpertParallel` would use it, against send_lists and the same oracle."""
    torch.cuda.set_device(group.rank % devices)
    exchange = PeerExchange(group, combine_mode=mode, tokens=40)
    layout = PeerLayout(
        ranks=group.ranks, experts=12, top_k=3, tokens=40, hidden=20, dtype=torch.float32, exact=mode == "exact"
    )
    placement, factor_E = Placement.equal(12, group.ranks), factors(12).cuda()
    for step in range(steps):
        inputs = draw_all(seed + step, layout, 40)
        routings = [Routing(ids_TK=ids, weights_TK=weights, num_experts=12) for _, ids, weights in inputs]
        x, ids, weights = inputs[group.rank]
        counts_RE = exchange.counts(routings[group.rank].counts_E().numpy().astype(np.int32))
        plan = plan_step(counts_RE, placement)
        on_gpu = Routing(ids_TK=ids.cuda(), weights_TK=weights.cuda(), num_experts=12)
        received, handle = exchange.dispatch(x.cuda(), on_gpu, plan)
        lists = [send_lists(routing, plan)[group.rank] for routing in routings]
        assert received.rows_from_R == [sent.tokens_N.numel() for sent in lists]
        rows = torch.cat([inputs[source][0][sent.tokens_N] for source, sent in enumerate(lists)])
        assert torch.equal(received.rows_ND.cpu(), rows)
        ids_NK = torch.cat([sent.ids_NK for sent in lists])
        assert torch.equal(received.ids_NK.cpu(), ids_NK)
        here = ids_NK >= 0
        assert torch.equal(received.weights_NK.cpu()[here], torch.cat([sent.weights_NK for sent in lists])[here])
        assert np.array_equal(received.counts_RE, counts_RE)
        pair = received.ids_NK >= 0
        y = received.rows_ND[pair.nonzero()[:, 0]] * factor_E[received.ids_NK[pair]][:, None]
        out = exchange.combine(handle, y)
        assert same_bits(out.cpu(), oracle_out(x, ids, weights, placement, layout, mode))
    assert exchange.traffic.steps == steps
    exchange.close()
    exchange.close()


def lose_rank_one(group, devices):
    """Rank 1 is killed after one good step. The others get an error and their process and GPU live on."""
    config = {"experts": 8, "top_k": 2, "hidden": 64, "dtype": "bfloat16", "mode": "fast", "tokens": 16}
    device, _ = open_device(group, devices=devices, **config)
    x, ids, weights = (t.cuda() for t in draw(torch.Generator().manual_seed(1), "uniform", 16, device.layout))
    y = torch.zeros(device.layout.places * 2, 64, dtype=torch.bfloat16, device="cuda")
    device.dispatch(x, ids, weights)
    device.combine(y)
    device.check()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    device.dispatch(x, ids, weights)
    device.combine(y)  # after a failure kernels do nothing
    try:
        device.check()
    except BywashError as error:
        alive = float(torch.ones(1000, device="cuda").sum())
        return type(error).__name__, list(getattr(error, "ranks", ())), str(error), time.monotonic() - began, alive
    return "no error", [], "", time.monotonic() - began, 0.0


def fail_on_purpose(group, devices, how):
    """The error that each rank gets when rank 1 does something wrong after a good step; experts then have no rows."""
    config = {"experts": 8, "top_k": 2, "hidden": 64, "dtype": "bfloat16", "mode": "fast", "tokens": 16}
    device, placement = open_device(group, devices=devices, **config)
    x, ids, weights = (t.cuda() for t in draw(torch.Generator().manual_seed(1), "uniform", 16, device.layout))
    tokens = torch.full((1,), 16, dtype=torch.int32).cuda()
    received = device.dispatch(x, ids, weights, tokens=tokens)
    device.combine(torch.zeros(device.layout.places * 2, 64, dtype=torch.bfloat16).cuda())
    assert received.ends_L.any()
    if group.rank == 1 and how == "plan":
        device.set_plan(placement.home_E, 12345, 0)
    if group.rank == 1 and how == "tokens":
        tokens.fill_(17)
    if group.rank == 1 and how == "expert":
        ids[3, 1] = 8
    device.dispatch(x, ids, weights, tokens=tokens, counts_first=how != "plan")
    if how == "capacity":
        device.batch(0 if group.rank == 1 else 32)
        device.combine(torch.zeros(4 * 32, 64, dtype=torch.bfloat16).cuda())
    error = device.failure()
    assert how == "capacity" or not received.ends_L.any(), "experts may push to ranks that still read their slots"
    return ("no error", "") if error is None else (type(error).__name__, str(error))


def count_wrong_steps(group, devices, fault, steps):
    """How many of `steps` go wrong when the kernels leave out something; see FAULT in common.cuh."""
    config = {"experts": 64, "top_k": 4, "hidden": 4096, "dtype": "bfloat16", "mode": "exact", "tokens": 1024}
    device, placement = open_device(group, devices=devices, build={"fault": fault}, **config)
    factor_E, wrong = factors(64).cuda(), 0
    cases = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed * group.ranks + group.rank)
        case = draw(generator, "uniform", 512, device.layout)
        expected = oracle_out(*case, placement, device.layout, "exact")
        cases.append(([t.cuda() for t in case], expected.cuda()))
    for step in range(steps):
        case, expected = cases[(step + group.rank) % 4]
        if step % 2 == group.rank:
            torch.cuda._sleep(300_000)  # one rank comes late, so that the other has to wait
        received = device.dispatch(*case, generation=step % 2, counts_first=False)
        out = device.combine(expert_outputs(device, received, factor_E), generation=step % 2)
        wrong += int(not torch.equal(out, expected))
    torch.cuda.synchronize()
    return wrong, device.failure()
