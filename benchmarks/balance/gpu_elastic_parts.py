"""The measured parts of `gpu_elastic.py`: time, memory, traces, copies, break-even, decode. DeepSeek-V3's sizes.

Each times plain expert parallelism and ours over the same weights, in turn, in graphs; the figure of a round is that of
the slowest rank.
"""

import json
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bywash.balance import Limits, Placement
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.kernels.driver import driver
from bywash.moe.device_experts import open_device_experts
from bywash.moe.device_layer import DeviceLayer, pairs_capacity
from bywash.moe.elastic_layer import ElasticLayers, ElasticSizes
from bywash.routing import Routing

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 4096, 8, 256, 7168, 2048
ROUNDS, CALLS = 25, 3
SIZES = ElasticSizes(
    tokens=TOKENS, top_k=TOP_K, hidden=HIDDEN, inner=INNER, layers=1, slots=6, pairs=TOKENS * TOP_K * 5 // 4
)

FEW_ROUNDS = 2
"""Of a run that only checks that all parts run."""


def roomy(ranks):
    """Buffers for all that ranks may bring, so that no launches for a second wave are needed."""
    return replace(SIZES, pairs=ranks * TOKENS * TOP_K)


class Both:
    """Plain and elastic layers over the same random weights, one layer, and graphs of both on the same inputs."""

    def __init__(self, run, sizes, limits, mode="stable", *, plain=True):
        self.run, self.sizes = run, sizes
        self.placement = Placement.equal(EXPERTS, run.ranks)
        self.layers = ElasticLayers(run.group, self.placement, limits, sizes, combine_mode=mode)
        gate_up, down = self.layers.slots.own(0)
        torch.manual_seed(run.rank)
        for target, inner in ((gate_up, HIDDEN), (down, INNER)):
            for expert in range(target.shape[0]):
                target[expert] = torch.randn(target.shape[1:], device="cuda", dtype=torch.bfloat16) * inner**-0.5
        self.elastic = self.layers.layer(0)
        self.elastic.check()
        run.meet()
        self.x = torch.zeros(sizes.tokens, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.ids = torch.zeros(sizes.tokens, TOP_K, dtype=torch.int64, device="cuda")
        self.weights = torch.rand(sizes.tokens, TOP_K, device="cuda").softmax(1)
        self.count = torch.full((1,), sizes.tokens, dtype=torch.int32, device="cuda")
        self.routing = Routing(ids_TK=self.ids, weights_TK=self.weights, num_experts=EXPERTS)
        self.x.normal_()
        self.plain = self.open_plain(mode) if plain else None

    def plain_layout(self, mode):
        return PeerLayout(
            ranks=self.run.ranks,
            experts=EXPERTS,
            top_k=TOP_K,
            tokens=self.sizes.tokens,
            hidden=HIDDEN,
            dtype=torch.bfloat16,
            exact=mode == "exact",
        )

    def open_plain(self, mode):
        layout = self.plain_layout(mode)
        device = PeerDevice(self.run.group, layout, self.placement.home_E, combine_mode=mode)
        local = EXPERTS // self.run.ranks
        rows = self.sizes.tokens * TOP_K / local
        pairs = pairs_capacity(layout, local)
        experts = open_device_experts(*self.layers.slots.own(0), pairs=pairs, rows_per_expert=rows, backend="hopper")
        return DeviceLayer(device, experts, local_experts=local)

    def route(self, ids):
        """Other routing, for the next replays."""
        self.ids.copy_(ids)

    def graph(self, layer, *, counts_first=True, calls=CALLS):
        def steps():
            for call in range(calls):
                out = layer(self.x, self.routing, tokens=self.count, generation=call % 2, counts_first=counts_first)
            return out

        for _ in range(2):
            steps()
        torch.cuda.synchronize()
        layer.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            out = steps()
        return graph, out


def timed(run, repeats, calls=CALLS, rounds=ROUNDS):
    """Microseconds of a call by name, by round: all ways in turn in each round."""
    rounds = FEW_ROUNDS if run.options.small else rounds
    times = {name: [] for name in repeats}
    for round_ in range(rounds + 2):
        for name, repeat in repeats.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            repeat()
            end.record()
            end.synchronize()
            if round_ >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: run.worst_each(values) for name, values in times.items()}


def spread(values):
    low, high = np.percentile(values, [10, 90])
    return f"{statistics.median(values):.0f} us ({low:.0f}-{high:.0f})"


def popular(kind, *, tokens, seed, ranks, hot_at=0, hot=8, of_hot=4):
    """Ids [T, K]: `balanced` uniform; `hot` takes `of_hot` of a token's experts from `hot` neighbours at `hot_at`."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=generator, device="cuda")
    if kind == "balanced":
        return scores.topk(TOP_K, dim=1).indices
    hottest = torch.arange(hot_at, hot_at + hot, device="cuda")
    first = scores[:, hottest].topk(of_hot, dim=1).indices + hot_at
    scores[:, hottest] = -1
    return torch.cat([first, scores.topk(TOP_K - of_hot, dim=1).indices], 1)


def imbalance(run, ids):
    """max/mean over ranks of the rows at home."""
    rows = torch.bincount(ids.flatten() // (EXPERTS // run.ranks), minlength=run.ranks).tolist()
    rows = [run.total(n) for n in rows]
    return max(rows) * len(rows) / sum(rows), rows


def set_alpha(planner, alpha):
    """For graphs that are captured from now on."""
    planner._parameters[planner._names.index("alpha_1024")] = alpha


ALPHAS = (1034, 1024, 1126)
"""Load thresholds in 1024ths of the mean: 1 % above it, exactly it, and 10 % above, of which the last moves least."""
KINDS = {"balanced": (0, 0, 0), "hot": (0, 8, 4), "hot elsewhere": (128, 8, 3)}


LABEL_S = 15.0
"""What one way of `part_time` needs at least."""


def part_time(run):
    """4,096 tokens, 256 experts: balanced routing, and hot experts on one rank; steps in graphs against plain ones."""
    room = roomy(run.ranks)
    for label, mode, sizes in (
        ("stable", "stable", room),
        ("fast", "fast", room),
        ("exact", "exact", room),
        ("stable, waves possible", "stable", SIZES),
    ):
        if not run.has(LABEL_S, label):
            break
        both = Both(run, sizes, Limits(alpha_1024=1034, fetch_rows=1024), mode)
        plain = both.graph(both.plain)
        for alpha in ALPHAS if label == "stable" and not run.options.small else ALPHAS[:1]:
            set_alpha(both.layers.planner, alpha)
            ours = both.graph(both.elastic)
            for name in KINDS if label == "stable" and alpha <= 1034 else ("balanced", "hot"):
                measure_kind(run, both, f"{label}, alpha {alpha / 1024:.2f}, {name}", name, plain, ours)
            if label == "stable" and alpha == 1034:
                cold_steps(run, both)
                small_kernels(run, both)
        both.layers.device.close()
        both.plain.device.close()
        del both, plain, ours
        torch.cuda.empty_cache()


def measure_kind(run, both, label, kind, plain, ours):
    """Steps of one routing, both ways, and where their time goes."""
    at, hot, of = KINDS[kind]
    ids = popular(kind.split()[0], tokens=TOKENS, seed=7 + run.rank, ranks=run.ranks, hot_at=at, hot=hot, of_hot=of)
    both.route(ids)
    bound, rows = imbalance(run, both.ids)
    before = both.elastic.record.fetched.clone()
    times = timed(run, {"plain": plain[0].replay, "ours": ours[0].replay}, rounds=15)
    both.elastic.check()
    both.plain.check()
    same = run.all(torch.equal(plain[1], ours[1]))
    p, o = (statistics.median(times[name]) for name in ("plain", "ours"))
    copies = run.total(int((both.elastic.record.fetched - before)[0]))
    after = [int(n) for n in both.layers.planner.rows_R]
    run.say(
        f"{label}: plain {spread(times['plain'])}, ours {spread(times['ours'])}; plain / ours {p / o:.3f}, bound "
        f"max/mean {bound:.3f} ({p / o / bound:.2f} of it); rows at home {rows}, as planned {after}, "
        f"copies {copies:.0f}; {'same bits' if same else 'DIFFERENT BITS'}"
    )
    run.keep(label, {**times, "bound": bound, "rows": rows, "planned": after})
    for name, (graph, _) in (("plain", plain), ("ours", ours)):
        run.say(f"    {name}: {kernel_times(run, graph.replay, name == 'ours')}")


def kernel_times(run, replay, elastic, replays=3):
    """Microseconds a step by kernel, of this rank, and those in which none ran."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        run.meet()
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
    path = tempfile.mktemp(suffix=".json")
    recorded.export_chrome_trace(path)
    traced = json.loads(Path(path).read_text())["traceEvents"]
    os.remove(path)
    events = sorted((e["ts"], e["dur"], e["name"].split("(")[0]) for e in traced if e.get("cat") == "kernel")
    events = [event for event in events if "nccl" not in event[2]]
    sums, seen, end, idle = {}, {}, events[0][0], 0.0
    for begin, length, name in events:
        seen[name] = seen.get(name, 0) + 1
        if elastic and name == "experts":
            name += " own" if seen[name] % 2 else " slots"
        sums[name] = sums.get(name, 0.0) + length
        idle += max(0.0, min(begin - end, 200.0))
        end = max(end, begin + length)
    calls = CALLS * replays
    shown = {name: f"{total / calls:.0f}" for name, total in sums.items()}
    return ", ".join(f"{name} {text}" for name, text in shown.items()) + f", idle {idle / calls:.0f}"


def cold_steps(run, both):
    """A step whose hot experts are in no slot yet, so that weights are copied beside home work, against later ones."""
    (graph, _), (plain, _) = both.graph(both.elastic, calls=1), both.graph(both.plain, calls=1)
    both.route(popular("hot", tokens=TOKENS, seed=7 + run.rank, ranks=run.ranks))
    keys, found = both.layers.planner.keys_RS, {"cold": [], "warm": [], "plain": []}
    for _ in range(8):
        keys.fill_(-1)
        for name, replay in (("cold", graph.replay), ("warm", graph.replay), ("plain", plain.replay)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e3)
    both.elastic.check()
    found = {name: run.worst_each(values[1:]) for name, values in found.items()}
    run.say("hot, one step: " + ", ".join(f"{name} {spread(values)}" for name, values in found.items()))
    run.keep("cold", found)


def small_kernels(run, both):
    """What each launch around the exchange costs by itself, in a graph of twenty."""
    device, record, planner = both.layers.device, both.elastic.record, both.layers.planner
    both.route(popular("hot", tokens=TOKENS, seed=7 + run.rank, ranks=run.ranks))
    device.begin(record, planner, both.x, both.ids, both.weights, tokens=both.count)
    device.fetch()
    torch.cuda.synchronize()
    ways = {
        "plan": lambda: planner(record.counts_RE, 0),
        "table": lambda: device._launch_small("elastic_table", 0, 1),
        "assign": device.assign,
        "fetch of nothing": device.fetch,
    }
    for kind in ("hot", "balanced"):
        both.route(popular(kind, tokens=TOKENS, seed=7 + run.rank, ranks=run.ranks))
        run.meet()  # counts of one step are read before those of the next are sent
        device.begin(record, planner, both.x, both.ids, both.weights, tokens=both.count)
        device.fetch()
        found = []
        for name, launch in ways.items():
            launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                for _ in range(20):
                    launch()
            times = timed(run, {name: graph.replay}, calls=20, rounds=9)
            found.append(f"{name} {statistics.median(times[name]):.1f}")
        run.say(f"{kind}, us a launch: {', '.join(found)}")
        run.meet()


def part_copies(run):
    """Weights of one expert from a peer: our kernel on few multiprocessors against a copy engine, at the same bytes."""
    both = Both(run, replace(SIZES, tokens=128, pairs=128 * TOP_K * run.ranks), Limits(), plain=False)
    device, record, planner = both.layers.device, both.elastic.record, both.layers.planner
    device.begin(record, planner, both.x, both.ids, both.weights, counts_first=False)
    other = (run.rank + 1) % run.ranks
    first = other * (EXPERTS // run.ranks)
    slots, bytes_ = 4, 4 * both.layers.slots.layout.slot_bytes
    planner.keys_RS[run.rank, :slots] = torch.arange(first, first + slots, dtype=torch.int32, device="cuda")
    missing = device._missing_S
    for blocks in (4, 8, 12, 16, 24, 32, 64):
        device.fetch_blocks = blocks

        def fetch():
            missing[:slots] = other
            device.fetch()

        times = timed(run, {"kernel": fetch}, calls=1, rounds=9)["kernel"]
        device.check()
        run.say(
            f"kernel, {blocks} multiprocessors: {bytes_ / statistics.median(times) / 1e3:.0f} GB/s ({spread(times)})"
        )
        run.keep(f"blocks-{blocks}", times)
    pool, cuda, stream = both.layers.slots, driver(), torch.cuda.current_stream().cuda_stream
    got = pool.gate_up_SGD[:slots].clone(), pool.down_SDF[:slots].clone()
    at, home = pool.layout.offsets(0), pool.homes[other]

    def engine():
        cuda.cuMemcpyAsync(pool.gate_up_SGD.data_ptr(), home + at["gate_at"], slots * pool.layout.gate_bytes, stream)
        cuda.cuMemcpyAsync(pool.down_SDF.data_ptr(), home + at["down_at"], slots * pool.layout.down_bytes, stream)

    pool.gate_up_SGD[:slots].zero_()
    times = timed(run, {"engine": engine}, calls=1, rounds=9)["engine"]
    same = torch.equal(got[0], pool.gate_up_SGD[:slots]) and torch.equal(got[1], pool.down_SDF[:slots])
    run.say(
        f"cuMemcpyAsync of the same addresses: {bytes_ / statistics.median(times) / 1e3:.0f} GB/s ({spread(times)}); "
        f"{'same bits' if run.all(same) else 'DIFFERENT BITS'}"
    )
    run.keep("engine", times)


def part_decode(run):
    """128 tokens, 256 experts, under the plan before, in graphs of ten steps, against plain slotted steps."""
    sizes = replace(SIZES, tokens=128, pairs=128 * TOP_K * run.ranks)
    both = Both(run, sizes, Limits(alpha_1024=1126, fetch_rows=150, keep=1))
    plain, plain_out = both.graph(both.plain, counts_first=False, calls=10)
    ours, ours_out = both.graph(both.elastic, counts_first=False, calls=10)
    for kind in ("balanced", "hot"):
        both.route(popular(kind, tokens=128, seed=7 + run.rank, ranks=run.ranks))
        bound, _ = imbalance(run, both.ids)
        times = timed(run, {"plain": plain.replay, "ours": ours.replay}, calls=10)
        both.elastic.check()
        both.plain.check()
        same = run.all(torch.equal(plain_out, ours_out))
        p, o = (statistics.median(times[name]) for name in ("plain", "ours"))
        run.say(
            f"{kind}: plain {spread(times['plain'])}, ours {spread(times['ours'])}; plain / ours {p / o:.3f}; max/mean "
            f"{bound:.2f}; rows as planned {[int(n) for n in both.layers.planner.rows_R]}; "
            f"{'same bits' if same else 'DIFFERENT BITS'}"
        )
        run.keep(kind, times)


PARTS = {"time": part_time, "copies": part_copies, "decode": part_decode}
