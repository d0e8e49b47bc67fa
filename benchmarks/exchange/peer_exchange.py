"""Dispatch and combine of `peer` on GPUs of one host, beside NCCL by hand, torch only and the wire, in one run.

    PYTHONPATH=src:. python benchmarks/exchange/peer_exchange.py --out DIR             # two GPUs
    PYTHONPATH=src:. python benchmarks/exchange/peer_exchange.py --out DIR --ranks 8

Prints a table of medians over rounds, with the 10th and 90th percentile and the ratios. Times are of the slower rank.
Ours are CUDA graphs of 10 calls; baselines run eagerly (by hand needs host splits), also timed by events around 10.
Inputs are random; each round starts from the same ones, and 10 calls touch more than the L2. `--tune` also tries other
numbers of multiprocessors, to choose the default of `PeerLayout.multiprocessors`.
Two floors: the nominal rate of the links (--wire-gbytes-per-s, by default NVLink 4 with 18 links), and what the copy
engines take for the same bytes in this run.
"""

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.exchange.gpu_baselines import AllGather, ByHand, PeerCopy

from bywash.balance import Placement
from bywash.errors import BywashError
from bywash.exchange.fp8_rows import quantise_rows
from bywash.exchange.group import Group
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.kernels import KernelShape, compile_kernels

EXPERTS, TOP_K, HIDDEN, CALLS = 256, 8, 7168, 10
ROW_BYTES, FP8_ROW_BYTES = 2 * HIDDEN, HIDDEN + HIDDEN // 32
SMS = {4096: (116, 132), 512: (112, 132), 128: (40, 56, 72, 132)}


class Case:
    """Inputs of one size, and the timings taken so far: name to a list of microseconds."""

    def __init__(self, group, tokens):
        self.group, self.ranks, self.tokens, self.times = group, group.ranks, tokens, {}
        generator = torch.Generator().manual_seed(17 * tokens + group.rank)
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
        self.x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().cuda()
        self.ids, self.weights = ids.cuda(), torch.rand(tokens, TOP_K, generator=generator).softmax(1).cuda()
        self.count = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
        self.y = torch.randn(self.ranks * tokens * TOP_K, HIDDEN, dtype=torch.bfloat16, device="cuda")
        computing = ids // (EXPERTS // self.ranks)
        others = [rank for rank in range(self.ranks) if rank != group.rank]
        rows = sum(int((computing == rank).any(1).sum()) for rank in others)
        pairs = int((computing != group.rank).sum())
        self.wire_bytes = {"row": ROW_BYTES * rows, "fp8 row": FP8_ROW_BYTES * rows, "pair": ROW_BYTES * pairs}

    def time(self, name, fn, rounds, calls=CALLS):
        """Record the median time of a call; `fn` makes `calls` of them."""
        for _ in range(3):
            fn()
        torch.cuda.synchronize()
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            fn()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
        self.times[name] = times


class Ours:
    """An open exchange for a case, and its steps; `generation` is last so that `graph_of` can give it."""

    def __init__(self, case, mode="fast", fp8="off"):
        layout = layout_of(case, mode, fp8)
        self.case, self.options = case, {"tokens": case.count}
        home_E = Placement.equal(EXPERTS, case.ranks).home_E
        self.device = PeerDevice(case.group, layout, home_E, combine_mode=mode)
        self.inputs = (case.x, case.ids, case.weights)
        for generation in range(2):
            self.dispatch(generation)

    def give_quantised(self):
        q, scales = quantise_rows(self.case.x)
        self.inputs, self.options["scales_TG"] = (q, *self.inputs[1:]), scales

    def dispatch(self, generation, counts_first=True):
        self.device.dispatch(*self.inputs, **self.options, generation=generation, counts_first=counts_first)

    def slotted(self, generation):
        self.dispatch(generation, counts_first=False)

    def halves(self, generation):
        self.device.dispatch_start(*self.inputs, **self.options, generation=generation)
        self.device.dispatch_finish(generation)

    def combine(self, generation):
        self.device.combine(self.case.y, generation=generation)

    def combine_pushed(self, generation):
        self.device.combine(self.case.y, generation=generation, pushed=True)

    def combine_halves(self, generation):
        self.device.combine_start(self.case.y, generation=generation)
        self.device.combine_finish(generation)

    def both(self, generation):
        self.slotted(generation)
        self.combine(generation)

    def batch(self, generation):
        self.device.batch(self.case.ranks * self.case.tokens * TOP_K * 2 // EXPERTS + 32, generation=generation)

    def time(self, rounds, **steps):
        """Time steps by name (`_` stands for a space), each as a graph; close when something failed on the device."""
        for name, step in steps.items():
            self.case.time(name.replace("_", " "), graph_of(step), rounds)
        self.device.check()


def layout_of(case, mode, fp8="off"):
    shape = {"ranks": case.ranks, "experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "dtype": torch.bfloat16}
    return PeerLayout(**shape, tokens=case.tokens, exact=mode == "exact", fp8=fp8)


def graph_of(step, calls=CALLS):
    """`calls` steps, alternating between the generations, as one graph."""
    step(0)
    step(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            step(call % 2)
    return graph.replay


def time_ours(case, rounds):
    ours = Ours(case)
    ours.time(rounds, dispatch=ours.dispatch, dispatch_slotted=ours.slotted, dispatch_in_halves=ours.halves)
    ours.time(rounds, **{"combine fast/stable": ours.combine, "combine fast in halves": ours.combine_halves})
    ours.time(rounds, **{"slotted dispatch + combine": ours.both, "batch [expert, capacity]": ours.batch})
    ours.device.close()
    for fp8 in ("amax", "power-of-two"):
        ours = Ours(case, fp8=fp8)
        ours.time(rounds, **{f"dispatch fp8 {fp8}": ours.dispatch})
        if fp8 == "amax":
            ours.time(rounds, **{"dispatch fp8 slotted": ours.slotted})
            ours.give_quantised()
            ours.time(rounds, **{"dispatch fp8 given": ours.dispatch})
        ours.device.close()
    ours = Ours(case, "exact")
    ours.time(rounds, **{"combine exact": ours.combine, "the same, outputs pushed before": ours.combine_pushed})
    ours.device.close()
    ours = Ours(case)
    ours.device.early_launch = False
    names = [f"{what}, not early" for what in ("dispatch", "combine", "both")]
    ours.time(rounds, **dict(zip(names, (ours.dispatch, ours.combine, ours.both))))
    ours.device.close()


def time_tuning(case, rounds):
    """Other numbers of multiprocessors."""
    ours, fp8 = Ours(case), Ours(case, fp8="amax")
    for sms in SMS[case.tokens]:
        ours.device.num_sms = fp8.device.num_sms = sms
        names = [f"{what}, {sms} SMs" for what in ("dispatch", "combine", "both", "dispatch fp8")]
        ours.time(rounds, **dict(zip(names, (ours.dispatch, ours.combine, ours.both))))
        fp8.time(rounds, **{names[3]: fp8.dispatch})
    ours.device.close()
    fp8.device.close()


def time_baselines(case, nccl, rounds):
    inputs = (case.x, case.ids, case.weights)
    share = (nccl, case.group.rank, case.ranks, EXPERTS)

    def repeat(fn):
        return lambda: [fn() for _ in range(CALLS)]

    by_hand = ByHand(*share)
    got, state = by_hand.dispatch(*inputs)
    y = torch.randn_like(got)
    case.time("by hand dispatch", repeat(lambda: by_hand.dispatch(*inputs)), rounds)
    case.time("by hand combine", repeat(lambda: by_hand.combine(y, state, case.weights)), rounds)
    gather = AllGather(*share)
    _, gathered = gather.dispatch(*inputs)
    pairs = int(gathered[1][-2])
    case.time("all-gather dispatch", repeat(lambda: gather.dispatch(*inputs)), rounds)
    case.time("reduce-scatter combine", repeat(lambda: gather.combine(case.y[:pairs], gathered, pairs)), rounds)


def time_copies(case, rounds):
    for name, size in case.wire_bytes.items():
        copy = PeerCopy(case.group.rank, case.ranks, size)
        case.time(f"copy of one {name} each", lambda copy=copy: [copy() for _ in range(CALLS)], rounds)


def run_rank(rank, store_path, options):
    torch.cuda.set_device(rank)
    ranks = options.ranks
    group = Group(rank=rank, ranks=ranks, store=dist.FileStore(store_path, ranks), deadline_s=10.0)
    nccl = dist.new_group(backend="nccl")
    results = {}
    for tokens in options.tokens:
        case, rounds = Case(group, tokens), options.rounds
        try:
            time_copies(case, rounds)
            time_ours(case, rounds)
            if options.tune:
                time_tuning(case, max(3, rounds // 2))
        except BywashError as error:
            print(f"rank {rank}, {tokens} tokens: {error}", flush=True)
            os._exit(1)
        if options.baselines:
            time_baselines(case, nccl, max(3, rounds // 4))
        everyone = [None] * ranks
        dist.all_gather_object(everyone, case.times)
        # Of the slowest rank, round by round.
        times = {name: np.max([r[name] for r in everyone], axis=0).tolist() for name in case.times}
        results[tokens] = {"wire_bytes": case.wire_bytes, "us": times}
        if rank == 0:
            print_table(tokens, results[tokens], options.wire_gbytes_per_s)
    if rank == 0 and options.out:
        Path(options.out, "peer_exchange.json").write_text(json.dumps({"ranks": ranks, "tokens": results}))
    group.close()
    os._exit(0)  # NCCL's and the driver's teardown order differs between versions


BASELINES = {
    "dispatch": ("by hand dispatch", "all-gather dispatch"),
    "combine": ("by hand combine", "reduce-scatter combine"),
}


def print_table(tokens, result, wire_gbytes_per_s):
    median = {name: statistics.median(times) for name, times in result["us"].items()}
    wire_bytes = result["wire_bytes"]["row"]
    print(f"\n{tokens} tokens per rank; {wire_bytes / 1e6:.2f} MB on rank 0's wire each way as bf16 rows")
    floor_us = wire_bytes / wire_gbytes_per_s / 1e3
    copied_us = median["copy of one row each"]
    print(f"floor {floor_us:.1f} us at the nominal {wire_gbytes_per_s:g} GB/s, {copied_us:.1f} us by copy engine")
    print(f"{'':42}{'median us':>10}{'p10':>9}{'p90':>9}{'GB/s':>7}{'/ limit':>9}{'by hand x':>11}{'gather x':>10}")
    for name, times in result["us"].items():
        low, high = np.percentile(times, [10, 90])
        line = f"{name:42}{median[name]:10.1f}{low:9.1f}{high:9.1f}"
        kind = next((k for k in BASELINES if name.startswith(k) and "+" not in name), None)
        if kind:
            what = "pair" if "exact" in name else "fp8 row" if "fp8" in name else "row"
            line += f"{result['wire_bytes'][what] / median[name] / 1e3:7.0f}"
            line += f"{median[name] / median[f'copy of one {what} each']:9.2f}"
            ratios = [median[peer] / median[name] for peer in BASELINES[kind] if peer in median]
            line += "".join(f"{ratio:11.1f}" for ratio in ratios)
        print(line, flush=True)


def compile_ahead(ranks):
    """Fill the cache for all builds at once, with all cores."""
    major, minor = torch.cuda.get_device_capability()
    shape = {"ranks": ranks, "experts": EXPERTS, "top_k": TOP_K, "vecs": 2 * HIDDEN // 16, "dtype": "bfloat16"}
    shapes = [KernelShape(**shape, exact=exact) for exact in (False, True)]
    shapes += [KernelShape(**shape, exact=False, fp8=fp8) for fp8 in (1, 2)]
    with ProcessPoolExecutor(mp_context=mp.get_context("spawn")) as pool:
        list(pool.map(compile_kernels, shapes, [f"sm_{major}{minor}"] * len(shapes)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a folder for all timings as JSON")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, one rank on each")
    parser.add_argument("--wire-gbytes-per-s", type=float, default=450.0, help="nominal, of a GPU, each way")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128], choices=sorted(SMS))
    parser.add_argument("--tune", action="store_true", help="also try other numbers of multiprocessors")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false", help="leave out NCCL and torch")
    options = parser.parse_args()
    if not 2 <= options.ranks <= torch.cuda.device_count() or EXPERTS % options.ranks:
        raise SystemExit(f"--ranks {options.ranks}: {torch.cuda.device_count()} GPUs here, {EXPERTS} experts to divide")
    props = torch.cuda.get_device_properties(0)
    print(f"{options.ranks} x {props.name}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, ", end="")
    print(f"hidden {HIDDEN}, {EXPERTS} experts, top-{TOP_K}, bf16, contiguous placement, uniform routing", flush=True)
    compile_ahead(options.ranks)
    mp.spawn(run_rank, args=(tempfile.mktemp(), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
