"""What rank processes run in the tests of the elastic exchange: random steps with plans, against oracles on the CPU.

An expert is a factor, and the factor is the first number of its weights, so that a slot that was not filled, or was
filled with another expert, shows in the outputs. Every rank draws all ranks' inputs from one seed.
"""

import numpy as np
import torch

from bywash.balance import Placement, SlotDirectory
from bywash.balance.pieces import ranks_of_pairs
from bywash.balance.plan import StepPlan
from bywash.exchange.peer_elastic import ElasticDevice, elastic_layout
from bywash.exchange.rows import weighted_sum
from bywash.memory.device_slots import DeviceSlots, WeightLayout
from tests.balance.plan_cases import Oracle
from tests.exchange.peer_steps import draw, same_bits
from tests.exchange.pushing import may_push, push_outputs

INNER = 8


class HostPlanner:
    """`DevicePlanner` for tests without a GPU: the same attributes, filled by the planner in plain Python."""

    def __init__(self, placement, limits, directory):
        self._plans, (ranks, slots) = Oracle(placement, limits, directory), directory.keys_RS.shape
        self.keys_RS, self.ages_RS = (torch.from_numpy(a.copy()) for a in (directory.keys_RS, directory.ages_RS))
        self.rows_ER = torch.zeros(placement.num_experts, ranks, dtype=torch.int32)
        self.rows_R, self.digest = torch.zeros(ranks, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
        self.fetch_RS = torch.full((ranks, slots), -1, dtype=torch.int32)

    def __call__(self, counts_RE, layer=0):
        self._plans._keys = self.keys_RS.tolist()  # the device may have forgotten some
        arrays = self._plans(counts_RE.numpy(), layer)
        arrays["digest"] = arrays["digest"].view(np.int32)
        for name in ("keys_RS", "ages_RS", "rows_ER", "rows_R", "fetch_RS", "digest"):
            getattr(self, name).copy_(torch.from_numpy(arrays[name]))


def open_planner(on_gpu, *arguments):
    if not on_gpu:
        return HostPlanner(*arguments)
    from bywash.kernels.plan import DevicePlanner

    return DevicePlanner(*arguments)


def open_elastic(
    group, devices, *, experts, top_k, hidden, dtype, mode, tokens, slots, layers, limits, home=None, **more
):
    torch.cuda.set_device(group.rank % devices)
    home_E = Placement.equal(experts, group.ranks).home_E if home is None else np.array(home, np.int32)
    placement = Placement(home_E=home_E, ranks=group.ranks)
    dtype = getattr(torch, dtype)
    sizes = {"ranks": group.ranks, "slots": slots, "top_k": top_k, "tokens": tokens, "hidden": hidden, "dtype": dtype}
    layout = elastic_layout(home_E, combine_mode=mode, **sizes)
    device = ElasticDevice(group, layout, home_E, combine_mode=mode, **{"fetch_blocks": 2, **more})
    weights = WeightLayout(layers=layers, own=device.own, slots=slots, hidden=hidden, inner=INNER, dtype=dtype)
    pool = DeviceSlots(group, weights)
    directory = SlotDirectory.empty(ranks=group.ranks, slots=slots, experts=experts, layers=layers)
    planner = open_planner(pool.gate_up_SGD.is_cuda, placement, limits, directory)
    return device, pool, planner, placement


def fill_weights(pool, placement, rank, layers):
    """Every expert's weights: its factor, then numbers that only matter to the checksum."""
    for layer in range(layers):
        gate, down = pool.own(layer)
        for local, expert in enumerate(placement.experts_of(rank)):
            generator = torch.Generator().manual_seed(1000 * layer + expert)
            gate[local] = torch.randn(gate.shape[1:], generator=generator).to(gate)
            down[local] = torch.randn(down.shape[1:], generator=generator).to(down)
            gate[local, 0, 0] = factor_of(expert, layer, placement.num_experts)


def factor_of(expert, layer, experts):
    return 0.5 + expert / experts + layer


def oracle(x, ids, weights, rank_TK, layer, experts, mode):
    """Sums per rank of `rank_TK` in k order, then rank order; `exact` all in k order."""
    factors = torch.tensor([factor_of(e, layer, experts) for e in range(experts)]).to(x.dtype).float()
    outputs = (x.float()[:, None, :] * factors[ids.clamp(min=0)][:, :, None]).to(x.dtype)
    if mode == "exact":
        return weighted_sum(outputs[ids >= 0], ids, weights)
    total = torch.zeros(x.shape)
    for rank in range(int(rank_TK.max()) + 1 if ids.numel() else 0):
        here = torch.where(rank_TK == rank, ids, -1)
        total += weighted_sum(outputs[here >= 0], here, weights).float()
    return total.to(x.dtype)


def compute(device, pool, received, layer, capacity):
    """Rows times the first number of the weights that the group has; NaN past the last pair."""
    groups = torch.cat([pool.own(layer)[0][:, 0, 0], pool.gate_up_SGD[:, 0, 0]]).float()
    ends_L = received.ends_L[: groups.numel()]
    at = torch.arange(capacity, device=ends_L.device, dtype=torch.int32)
    group = torch.searchsorted(ends_L, at, right=True)
    rows = received.rows_PD.view(device.layout.dtype)[received.index_M[:capacity].long()][:, : device.layout.hidden]
    y = (rows.float() * groups[group.clamp(max=groups.numel() - 1)][:, None]).to(device.layout.dtype)
    y[group >= groups.numel()] = float("nan")
    assert int(ends_L[-1]) <= capacity, f"{int(ends_L[-1])} pairs in buffers for {capacity}"
    return y


def draw_skewed(generator, tokens, layout, hot):
    """Ids of real experts, many to the hot ones; or as `peer_steps.draw` does."""
    experts, top_k = layout.real_experts, layout.top_k
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, hot] += torch.rand(tokens, len(hot), generator=generator)
    ids = scores.argsort(dim=1, descending=True)[:, :top_k]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.1, -1, ids)
    x = torch.randn(tokens, layout.hidden, generator=generator).to(layout.dtype)
    return x, ids.contiguous(), torch.rand(tokens, top_k, generator=generator)


def draw_step(seed, layout, most, alike):
    """All ranks' inputs. Steps in a row that are `alike` have the same hot experts."""
    generator = torch.Generator().manual_seed(seed)
    kind = int(torch.randint(4, (1,), generator=torch.Generator().manual_seed(alike)))
    hot = torch.randperm(layout.real_experts, generator=torch.Generator().manual_seed(alike + 7))[: layout.top_k + 1]
    hot = torch.arange(layout.top_k) if kind == 0 else hot  # all to the first rank
    sizes = torch.randint(0, most + 1, (layout.ranks,), generator=generator).tolist()
    if seed % 5 == 0:
        sizes[seed % layout.ranks] = 0
    if kind == 3:
        plain = Reals(layout)
        return [draw(generator, "one rank" if seed % 2 else "uniform", size, plain) for size in sizes]
    return [draw_skewed(generator, size, layout, hot.tolist()) for size in sizes]


class Reals:
    """A layout as `peer_steps.draw` wants it, with real experts."""

    def __init__(self, layout):
        self.experts, self.top_k, self.hidden = layout.real_experts, layout.top_k, layout.hidden
        self.ranks, self.dtype, self.groups = layout.ranks, layout.dtype, 0


def counts_of(inputs, experts):
    counts = [torch.bincount(ids[ids >= 0], minlength=experts) for _, ids, _ in inputs]
    return torch.stack(counts).int().numpy()


def elastic_steps(group, devices, config, steps, seed, *, capacity=0, resize=False):
    """Random steps of several layers, counts first and under the plan before; each pair's rank, each token's bits."""
    config = dict(config)
    device, pool, planner, placement = open_elastic(group, devices, **config)
    layout, mode, layers = device.layout, config["mode"], config["layers"]
    fill_weights(pool, placement, group.rank, layers)
    most_pairs = layout.places * layout.top_k
    capacity = capacity or most_pairs
    records = [device.record(layer, pool, planner, capacity=capacity) for layer in range(layers)]
    for record in records:
        device.seal(record)
    device.check()
    group.threads.barrier.wait(200) if hasattr(group, "threads") else group.share("sealed", "sealing")
    last = [None] * layers
    spilled = waves = fetched = 0
    for step in range(steps):
        layer, counts_first = step % layers, step < layers or (step // layers) % 3 != 2 or capacity < most_pairs
        if resize and step in (steps // 3, 2 * steps // 3):
            slots = 1 if step == steps // 3 else config["slots"]
            resize_slots(device, pool, planner, slots)
            last = [None] * layers
        inputs = draw_step(seed + step, layout, config["tokens"], seed + step // (3 * layers) * 100 + layer)
        x, ids, weights = inputs[group.rank]
        counts_RE, record, generation = counts_of(inputs, placement.num_experts), records[layer], step % 2
        counts_first = counts_first or last[layer] is None
        device.own_slots(generation).fill_(float("nan"))
        on_gpu = x.cuda(), ids.cuda(), weights.cuda()
        device.begin(record, planner, *on_gpu, generation=generation, counts_first=counts_first)
        if counts_first:
            last[layer] = made_plan(planner, placement, counts_RE)
        plan, there = last[layer][0], still_there(last[layer], planner)
        device.fetch(generation)
        device.assign(generation)
        out = torch.full((x.shape[0], layout.padded), float("nan"), dtype=layout.dtype, device=on_gpu[0].device)
        for wave in range(record.most_waves if counts_first else 1):
            received = device.dispatch_wave(record, wave, generation)
            if not counts_first:
                device.plan_next(record, planner, generation)
                last[layer] = made_plan(planner, placement, counts_RE)
            device.check()
            y, pushed = compute(device, pool, received, layer, capacity), may_push(received, seed + step, group.rank)
            if pushed:
                push_outputs(received, y)
            device.combine_wave(record, y, out, wave, generation, pushed=pushed)
        device.check()
        home_TK = torch.from_numpy(np.append(placement.home_E, -1).astype(np.int64))[ids]
        virtual, _, _ = device.virtual_parts(generation)
        per_rank = layout.experts // layout.ranks
        rank_TK = torch.where(virtual[: x.shape[0]].cpu() >= 0, virtual[: x.shape[0]].cpu() // per_rank, -1)
        if pool.usable == config["slots"]:
            expected = torch.from_numpy(ranks_of_pairs(plan, group.rank, ids.numpy())) if there else home_TK
            assert torch.equal(rank_TK, expected), f"step {step}: pairs go elsewhere than balance/pieces.py says"
        summed_by = rank_TK if mode == "fast" else home_TK
        wanted = oracle(x, ids, weights, summed_by, layer, placement.num_experts, mode)
        got = out[:, : layout.hidden].cpu()
        assert same_bits(got, wanted), f"step {step}: {int((got != wanted).any(1).sum())} of {x.shape[0]} rows differ"
        spilled += int(((rank_TK != home_TK) & (ids >= 0)).sum())
        waves += int(record.waves) > 1
    fetched = sum(int(record.fetched[0]) for record in records)
    device.close()
    return spilled, fetched, waves


def still_there(planned, planner):
    """Whether the slots that a plan computes with still hold what it thinks; else all pairs go home."""
    _, keys_RS, used_RS = planned
    return torch.equal(planner.keys_RS.cpu()[used_RS], keys_RS[used_RS])


def made_plan(planner, placement, counts_RE):
    """The plan just made, and what it computes with: (plan, keys, used). tests/balance compares plans themselves."""
    rows_ER = planner.rows_ER.cpu().numpy().copy()
    at_home = int(rows_ER[np.arange(placement.num_experts), placement.home_E].sum())
    assert np.array_equal(rows_ER.sum(1), counts_RE.sum(0)), "the plan was made from other counts"
    plan = StepPlan(
        counts_RE=counts_RE,
        rank_E=placement.home_E,
        rows_ER=rows_ER,
        rows_R=planner.rows_R.cpu().numpy().copy(),
        fetch_RS=planner.fetch_RS.cpu().numpy().copy(),
        spilled=int(rows_ER.sum()) - at_home,
        digest=int(planner.digest),
    )
    return plan, planner.keys_RS.cpu().clone(), planner.ages_RS.cpu() == 0


def resize_slots(device, pool, planner, slots):
    kept = min(slots, pool.usable)
    pool.resize(slots)
    device.set_usable(slots)
    planner.keys_RS[:, kept:] = -1
    torch.cuda.synchronize()


def damaged(group, devices, config):
    """A home's checksum that does not fit its weights: an error on every rank that names the home."""
    device, pool, planner, placement = open_elastic(group, devices, **config)
    fill_weights(pool, placement, group.rank, 1)
    record = device.record(0, pool, planner, capacity=device.layout.places * device.layout.top_k)
    device.seal(record)
    device.check()
    pool.sums(0).add_(1)
    group.threads.barrier.wait(200) if hasattr(group, "threads") else group.share("sealed", "sealing")
    x, ids, weights = draw(torch.Generator().manual_seed(3), "one rank", config["tokens"], Reals(device.layout))
    device.begin(record, planner, x.cuda(), ids.cuda(), weights.cuda())
    device.fetch()
    device.assign()
    received = device.dispatch_wave(record)
    error = device.failure()
    del received
    return type(error).__name__, str(error)
