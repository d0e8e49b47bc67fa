"""Elastic capacity on GPUs of one host: the same bits, memory, balance and time, each against plain expert parallelism.

    PYTHONPATH=src:. python benchmarks/balance/gpu_elastic.py --out DIR [--parts bits layer ...] [--budget 200]

One process per GPU; each part runs in processes of its own, so that one that fails costs no other. Parts: `bits` random
steps with plans against oracles on the CPU; `layer` real experts, bitwise against plain layers; and those of
`gpu_elastic_parts.py`, which measure. Prints what each part found; all figures of a line are of one run.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.balance import gpu_elastic_limits as limits
from benchmarks.balance import gpu_elastic_parts as measured
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
    small = replace(LAYER, pairs=LAYER.tokens * LAYER.top_k * 4 // 3)
    for mode in ("stable", "exact"):
        for label, sizes in (("", LAYER), (", small buffers", small)):
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

    def __init__(self, rank, ranks, store, options):
        torch.cuda.set_device(rank)
        self.ranks, self.gpus, self.options = ranks, ranks, options
        self.group = Group(rank=rank, ranks=ranks, store=dist.FileStore(store, ranks), deadline_s=40.0)
        self.nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=60))
        self.rank, self.found = rank, {}

    def say(self, text):
        if self.rank == 0:
            print("  " + text, flush=True)

    def keep(self, name, value):
        self.found[name] = value

    def meet(self):
        self.total(0)

    def _reduce(self, value, op):
        tensor = torch.tensor(float(value), device="cuda", dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self.nccl)
        return float(tensor)

    def total(self, value):
        return self._reduce(value, dist.ReduceOp.SUM)

    def worst(self, value):
        return self._reduce(value, dist.ReduceOp.MAX)

    def least(self, value):
        return self._reduce(value, dist.ReduceOp.MIN)

    def all(self, truth):
        return self.least(bool(truth)) > 0

    def worst_each(self, values):
        """Of every value the largest over ranks: the slowest rank, round by round."""
        return self._reduce_each(values, dist.ReduceOp.MAX)

    def sum_each(self, values):
        return self._reduce_each(values, dist.ReduceOp.SUM)

    def _reduce_each(self, values, operation):
        tensor = torch.tensor(values, device="cuda", dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self.nccl)
        return tensor.tolist()


def run_rank(rank, ranks, store, options, name):
    code = 0
    try:
        run = Run(rank, ranks, store, options)
        PARTS[name](run)
        if rank == 0 and options.out:
            Path(options.out, f"elastic-{name}.json").write_text(json.dumps(run.found))
    except BaseException:
        print(f"rank {rank}, part {name}:\n{traceback.format_exc()}", flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # NCCL's and the driver's teardown order differs between versions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a folder for figures as JSON")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--counts", help="recorded counts whose layers are the trace's topics; see `load_counts`")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no further part is begun")
    parser.add_argument("--part-s", type=float, default=120.0, help="seconds after which a part is ended")
    options = parser.parse_args()
    if options.ranks > torch.cuda.device_count():
        raise SystemExit(f"--ranks {options.ranks}: there are {torch.cuda.device_count()} GPUs")
    began, failed = time.monotonic(), []
    for name in options.parts:
        if time.monotonic() - began > options.budget:
            print(f"{name}: left out, --budget {options.budget:g} s is spent")
            continue
        print(f"{name}: {PARTS[name].__doc__.splitlines()[0]}", flush=True)
        started = time.monotonic()
        if not run_part(name, options):
            failed.append(name)
        print(f"  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{'failed: ' + ' '.join(failed) if failed else 'all parts ran'}; {time.monotonic() - began:.0f} s")
    raise SystemExit(bool(failed))


def run_part(name, options):
    """Whether all ranks of a part ended well in time."""
    context = mp.get_context("spawn")
    store = tempfile.mktemp()
    ranks = [
        context.Process(target=run_rank, args=(rank, options.ranks, store, options, name))
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + options.part_s
    for process in ranks:
        process.join(max(1.0, end - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    return not late and all(process.exitcode == 0 for process in ranks)


if __name__ == "__main__":
    main()
