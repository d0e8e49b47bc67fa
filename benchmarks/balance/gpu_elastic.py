"""Elastic capacity on GPUs of one host: the same bits, memory, balance and time, each against plain expert parallelism.

    PYTHONPATH=src:. python benchmarks/balance/gpu_elastic.py --out DIR [--parts bits layer ...] [--budget 200]

One process per rank, and a GPU for each unless there are fewer (then ranks take turns); each part runs in processes of
its own, so that one that fails costs no other. Parts: `bits` random steps with plans against oracles on the CPU;
`layer` real experts, bitwise against plain layers; and those of `gpu_elastic_parts.py`, which measure. Prints what each
part found; all figures of a line are of one run.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.balance import gpu_elastic_limits as limits
from benchmarks.balance import gpu_elastic_parts as measured
from benchmarks.rank_processes import GRACE_S, RankProcesses, least_left_s
from benchmarks.skewed_ids import counts_for
from tests.exchange import elastic_steps
from tests.moe.device_steps import draw_weights

from bywash.balance import Limits, Placement
from bywash.exchange.group import Group
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.moe.device_experts import open_device_experts
from bywash.moe.device_layer import DeviceLayer, pairs_capacity
from bywash.moe.elastic_layer import ElasticLayers, ElasticSizes
from bywash.routing import Routing

STEPS = {"experts": 12, "top_k": 3, "hidden": 136, "dtype": "bfloat16", "tokens": 60, "slots": 2, "layers": 2}
BITS = {
    "exact": ({**STEPS, "mode": "exact", "limits": Limits()}, {}),
    "stable": ({**STEPS, "mode": "stable", "limits": Limits()}, {}),
    "fast": ({**STEPS, "mode": "fast", "limits": Limits()}, {}),
    "stable, many tokens": ({**STEPS, "mode": "stable", "limits": Limits(), "tokens": 2000, "hidden": 1032}, {}),
    "stable, waves": (
        {**STEPS, "mode": "stable", "limits": Limits(fetch_rows=20, capacity=60), "layers": 1},
        {"capacity": 120},
    ),
    "exact, resize": ({**STEPS, "mode": "exact", "limits": Limits()}, {"resize": True}),
}
LAYER = ElasticSizes(tokens=700, top_k=4, hidden=1024, inner=512, layers=2, slots=3, pairs=2 * 700 * 4)
EXPERTS = 32


def part_bits(run):
    """Random and adversarial steps: every pair where `balance/pieces.py` says, every token the bits of no plan."""
    for name, (config, options) in BITS.items():
        began = time.monotonic()
        spilled, fetched, waves = elastic_steps.elastic_steps(run.group, run.gpus, config, 24, 300, **options)
        found = [int(run.total(n)) for n in (spilled, fetched, waves)]
        run.say(
            f"{name}: 24 steps right; {found[0]} pairs away from home, {found[1]} copies, {found[2]} steps in waves "
            f"({time.monotonic() - began:.1f} s)"
        )
    kind, text = elastic_steps.damaged(run.group, run.gpus, {**STEPS, "mode": "stable", "limits": Limits()})
    run.say(f"a damaged copy: {kind}: {text}")
    assert kind == "ExchangeError"


def open_pair(run, sizes, experts, limits, mode, *, seed=5):
    """Elastic layers, and plain ones over the same weights."""
    placement = Placement.equal(experts, run.ranks)
    layers = ElasticLayers(run.group, placement, limits, sizes, combine_mode=mode)
    layout = PeerLayout(
        ranks=run.ranks,
        experts=experts,
        top_k=sizes.top_k,
        tokens=sizes.tokens,
        hidden=sizes.hidden,
        dtype=sizes.dtype,
        exact=mode == "exact",
    )
    device = PeerDevice(run.group, layout, placement.home_E, combine_mode=mode)
    mine = placement.experts_of(run.group.rank)
    plain = []
    for number in range(sizes.layers):
        gate_up, down = layers.slots.own(number)
        for target, source in zip(
            (gate_up, down), draw_weights(experts, sizes.hidden, sizes.inner, sizes.dtype, seed + number)
        ):
            target.copy_(source[mine])
        here = open_device_experts(gate_up, down, pairs=pairs_capacity(layout, len(mine)), backend="hopper")
        plain.append(DeviceLayer(device, here, local_experts=len(mine)))
    elastic = [layers.layer(number) for number in range(sizes.layers)]
    torch.cuda.synchronize()
    run.meet()
    return layers, elastic, plain


def routings(run, sizes, experts):
    """Name to (x, routing): of this rank; what other ranks bring differs."""
    generator = torch.Generator().manual_seed(11 + run.group.rank)
    scores = torch.rand(sizes.tokens, experts, generator=generator)
    hot = scores.clone()
    hot[:, : sizes.top_k + 2] += torch.rand(sizes.tokens, sizes.top_k + 2, generator=generator)
    kinds = {
        "uniform": scores,
        "hot experts": hot,
        "all to the same experts": torch.cat([torch.ones(sizes.tokens, sizes.top_k), torch.zeros_like(scores)], 1)[
            :, :experts
        ],
        "all to the last rank": scores + (torch.arange(experts) >= experts - experts // run.ranks),
    }
    found = {}
    for name, values in kinds.items():
        ids = values.topk(sizes.top_k, dim=1).indices
        x = torch.randn(sizes.tokens, sizes.hidden, generator=generator).bfloat16()
        weights = torch.rand(ids.shape, generator=generator)
        found[name] = x.cuda(), Routing(ids_TK=ids.cuda(), weights_TK=weights.cuda(), num_experts=experts)
    return found


def part_layer(run):
    """Real experts: elastic layers against plain ones, bit for bit; eager, in waves, in decode in a graph, resized."""
    whole, small = (replace(LAYER, pairs=LAYER.tokens * LAYER.top_k * share // 12) for share in (12 * run.ranks, 16))
    for mode in ("stable", "exact"):
        for label, sizes in (("", whole), (", small buffers", small)):
            layers, elastic, plain = open_pair(run, sizes, EXPERTS, Limits(keep=sizes.layers), mode)
            inputs = routings(run, sizes, EXPERTS)
            for name, (x, routing) in inputs.items():
                for number in range(sizes.layers):
                    compare(run, f"{mode}{label}, {name}", elastic[number], plain[number], x, routing, number)
                    rows = [int(n) for n in layers.planner.rows_R]
                    run.say(
                        f"    rows as planned {rows}, copies so far {int(elastic[number].record.fetched[0])} on rank 0"
                    )
            if not label:
                decode(run, sizes, layers, elastic, plain, inputs, mode)
            layers.device.close()
            plain[0].device.close()


def compare(run, name, elastic, plain, x, routing, number):
    """One step of both; in `hot experts` rank 1 brings no tokens."""
    rows = 0 if name.endswith("hot experts") and run.rank == 1 else x.shape[0]
    here = Routing(ids_TK=routing.ids_TK[:rows], weights_TK=routing.weights_TK[:rows], num_experts=routing.num_experts)
    got = elastic(x[:rows], here, generation=number % 2)
    elastic.check()
    expected = plain(x[:rows], here, generation=number % 2)
    plain.check()
    same, waves = run.all(torch.equal(got, expected)), int(elastic.record.waves)
    run.say(f"{name}, layer {number}: {'same bits' if same else 'DIFFERS'}; {waves} waves")


def decode(run, sizes, layers, elastic, plain, inputs, mode):
    """Steps under the plan before, in a graph of both layers, replayed for other routings; then with fewer slots."""
    tokens = min(256, sizes.tokens * 2 // 3)
    x = torch.zeros(tokens, sizes.hidden, dtype=sizes.dtype, device="cuda")
    ids = torch.zeros(tokens, sizes.top_k, dtype=torch.int64, device="cuda")
    weights = torch.zeros(tokens, sizes.top_k, device="cuda")
    count = torch.full((1,), tokens, dtype=torch.int32, device="cuda")

    def step(chosen):
        h = x
        for number, layer in enumerate(chosen):
            routing = Routing(ids_TK=ids, weights_TK=weights, num_experts=EXPERTS)
            h = layer(h, routing, tokens=count, generation=number % 2, counts_first=False)
        return h

    graphs = []
    for chosen in (elastic, plain):
        step(chosen)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            out = step(chosen)
        graphs.append((graph, out))
    right = spilled = 0
    for replay in range(24):
        if replay in (12, 18):
            layers.resize(1 if replay == 12 else sizes.slots)
            run.meet()
        name = list(inputs)[replay // 3 % len(inputs)]
        x_all, routing = inputs[name]
        at = 37 * replay % (sizes.tokens - tokens)
        x.copy_(x_all[at : at + tokens])
        ids.copy_(routing.ids_TK[at : at + tokens])
        weights.copy_(routing.weights_TK[at : at + tokens])
        count.fill_(tokens - replay)
        for graph, _ in graphs:
            graph.replay()
        elastic[0].check()
        plain[0].check()
        right += int(torch.equal(graphs[0][1][: tokens - replay], graphs[1][1][: tokens - replay]))
        virtual, home, _ = layers.device.virtual_parts(0)
        per_rank = layers.device.layout.experts // run.ranks
        away = (virtual >= 0) & (virtual // per_rank != home)
        spilled += int(away[: tokens - replay].sum())
    copies = sum(int(layer.record.fetched[0]) for layer in elastic)
    run.say(
        f"{mode}, decode in a graph, resized under replay: {int(run.least(right))} of 24 replays same bits; "
        f"{int(run.total(spilled))} pairs away from home, {int(run.total(copies))} copies"
    )


PARTS = {"bits": part_bits, "layer": part_layer, **limits.PARTS, **measured.PARTS}


class Run:
    """What a part is given: the group, and ways to talk."""

    def __init__(self, rank, store, options):
        self.gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % self.gpus)
        self.rank, self.ranks, self.options = rank, options.ranks, options
        self.group = Group(rank=rank, ranks=self.ranks, store=dist.FileStore(store, self.ranks), deadline_s=40.0)
        self.found = {}

    def say(self, text):
        if self.rank == 0:
            print("  " + text, flush=True)

    def keep(self, name, value):
        self.found[name] = value

    def has(self, seconds, what):
        """Whether the part has that long left, by the rank that has least; says what is left out otherwise."""
        left_s, seconds = least_left_s(self.options.until), 2.0 if self.options.small else seconds
        if left_s < seconds:
            self.say(f"left out, {left_s:.0f} s left of this part's time: {what}")
        return left_s >= seconds

    def meet(self):
        self.total(0)

    def total(self, value):
        return self.sum_each([value])[0]

    def worst(self, value):
        return self.worst_each([value])[0]

    def least(self, value):
        return self._reduce_each([value], dist.ReduceOp.MIN)[0]

    def all(self, truth):
        return self.least(bool(truth)) > 0

    def worst_each(self, values):
        """Of every value the largest over ranks: the slowest rank, round by round."""
        return self._reduce_each(values, dist.ReduceOp.MAX)

    def sum_each(self, values):
        return self._reduce_each(values, dist.ReduceOp.SUM)

    def _reduce_each(self, values, operation):
        """On the CPUs, once this rank's device is done: NCCL takes no two ranks on one GPU."""
        torch.cuda.synchronize()
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=operation)
        return tensor.tolist()


def run_rank(rank, store, start, options, name):
    options.until = start.get(timeout=600.0)
    run = Run(rank, store, options)
    PARTS[name](run)
    if rank == 0 and options.out:
        Path(options.out, f"elastic-{name}.json").write_text(json.dumps(run.found))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a folder for figures as JSON")
    parser.add_argument("--ranks", type=int, default=2, help="one on each GPU; with fewer GPUs they take turns")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--counts", help="recorded counts whose layers are the trace's topics; see `load_counts`")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further part is begun")
    parser.add_argument("--part-s", type=float, default=120.0, help="seconds after which a part is ended")
    parser.add_argument("--small", action="store_true", help="few rounds and steps: does everything run?")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if options.ranks < 2 or measured.EXPERTS % options.ranks or not gpus:
        raise SystemExit(f"--ranks {options.ranks}: there are {gpus} GPUs, and {measured.EXPERTS} experts to divide")
    if options.ranks > gpus:
        print(f"{options.ranks} ranks take turns on {gpus} GPU(s): this checks that all runs; no time below means much")
    if options.counts:
        counts_for(options.counts, measured.EXPERTS)
    began, failed = time.monotonic(), []
    for name in options.parts:
        if time.monotonic() - began > options.budget:
            print(f"{name}: left out, --budget {options.budget:g} s is spent")
            continue
        print(f"{name}: {PARTS[name].__doc__.splitlines()[0]}", flush=True)
        end = time.monotonic() + options.part_s
        if not RankProcesses(name, options.ranks, run_rank, options, name).run(end - GRACE_S, end):
            failed.append(name)
    print(f"{'failed: ' + ' '.join(failed) if failed else 'all parts ran'}; {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
