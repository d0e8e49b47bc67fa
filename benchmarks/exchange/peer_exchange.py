"""Dispatch and combine of `peer` on GPUs of one host, beside NCCL by hand, torch only and the wire, in one run.

    PYTHONPATH=src:. python benchmarks/exchange/peer_exchange.py --out DIR             # two GPUs
    PYTHONPATH=src:. python benchmarks/exchange/peer_exchange.py --out DIR --ranks 8

Prints a table of medians over rounds, with the 10th and 90th percentile and the ratios. Times are of the slower rank.
Ours are CUDA graphs of 10 calls; baselines run eagerly (by hand needs host splits), also timed by events around 10.
Inputs are random; each round starts from the same ones, and 10 calls touch more than the L2. `--tune` also tries other
numbers of multiprocessors, to choose the default of `PeerLayout.multiprocessors`.
Two floors: the nominal rate of the links (--wire-gbytes-per-s, by default NVLink 4 with 18 links) for the bytes of the
GPU that sends or receives most, and what the copy engines of all GPUs take for the same bytes in this run.
With --counts experts are as popular as in the recorded layer whose busiest rank is the median of all layers'.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.exchange.gpu_baselines import AllGather, ByHand, PeerCopies
from benchmarks.rank_processes import RankProcesses, least_left_s
from benchmarks.skewed_ids import counts_for, draw_ids, middle_layer, popularity

from bywash.balance import Placement
from bywash.exchange.fp8_rows import quantise_rows
from bywash.exchange.group import Group
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.kernels import KernelShape, compile_kernels

EXPERTS, TOP_K, HIDDEN, CALLS = 256, 8, 7168, 10
ROW_BYTES, FP8_ROW_BYTES = 2 * HIDDEN, HIDDEN + HIDDEN // 32
SMS = {4096: (116, 132), 512: (112, 132), 128: (40, 56, 72, 132)}


class Case:
    """Inputs of one size, and the timings taken so far: name to a list of microseconds.

    `sent_RR` has the bytes from rank to rank by what travels: bf16 rows out, fp8 rows out, sums and outputs back.
    """

    def __init__(self, group, tokens, options):
        self.group, self.ranks, self.tokens, self.times, self.options = group, group.ranks, tokens, {}, options
        generator = torch.Generator().manual_seed(17 * tokens + group.rank)
        self.skew, ids = draw_routing(options.counts, group.ranks, tokens, generator)
        self.x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().cuda()
        self.ids, self.weights = ids.cuda(), torch.rand(tokens, TOP_K, generator=generator).softmax(1).cuda()
        self.count = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
        self.y = torch.randn(self.ranks * tokens * TOP_K, HIDDEN, dtype=torch.bfloat16, device="cuda")
        computing = ids // (EXPERTS // self.ranks)
        others = [rank for rank in range(self.ranks) if rank != group.rank]
        mine = [[0, 0] for _ in range(self.ranks)]
        for rank in others:
            mine[rank] = [int((computing == rank).any(1).sum()), int((computing == rank).sum())]
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, mine)
        rows_RR, pairs_RR = np.moveaxis(np.array(everyone), 2, 0)
        self.sent_RR = {"row": ROW_BYTES * rows_RR, "fp8 row": FP8_ROW_BYTES * rows_RR}
        self.sent_RR |= {"sum": ROW_BYTES * rows_RR.T, "output": ROW_BYTES * pairs_RR.T}
        self.wire_bytes = {name: int(max(b.sum(0).max(), b.sum(1).max())) for name, b in self.sent_RR.items()}

    def has(self, seconds, what):
        """Whether there is that long left, by the rank that has least; says what is left out otherwise."""
        left_s, seconds = least_left_s(self.options.until), 1.0 if self.options.small else seconds
        if left_s < seconds and self.group.rank == 0:
            print(f"left out, {left_s:.0f} s left: {self.tokens} tokens, {what}", flush=True)
        return left_s >= seconds

    def time(self, name, fn, rounds, calls, *, together=False):
        """Record the median time of a call; `fn` makes `calls` of them. `together`: ranks begin at once."""
        for _ in range(min(3, rounds)):
            fn()
        torch.cuda.synchronize()
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if together:
                dist.barrier()
            begin.record()
            fn()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
        self.times[name] = times


def draw_routing(counts, ranks, tokens, generator):
    """(what the routing is, ids [T, K])."""
    if not counts:
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
        return "uniform routing", ids
    counts_LE = counts_for(counts, EXPERTS)
    layer, busiest = middle_layer(counts_LE, ranks)
    ids = draw_ids(popularity(counts_LE[layer]), tokens, TOP_K, generator)
    return f"experts as popular as in recorded layer {layer}, max/mean over ranks {busiest:.2f}", ids


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
        calls = self.case.options.calls
        for name, step in steps.items():
            self.case.time(name.replace("_", " "), graph_of(step, calls), rounds, calls)
        self.device.check()


def layout_of(case, mode, fp8="off"):
    shape = {"ranks": case.ranks, "experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "dtype": torch.bfloat16}
    return PeerLayout(**shape, tokens=case.tokens, exact=mode == "exact", fp8=fp8)


def graph_of(step, calls):
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
    """What a layer calls: dispatch in bf16 and fp8, combine in every mode."""
    if not case.has(6.0, "dispatch and combine in bf16"):
        return
    ours = Ours(case)
    ours.time(rounds, dispatch=ours.dispatch, dispatch_slotted=ours.slotted)
    ours.time(rounds, **{"combine fast/stable": ours.combine, "slotted dispatch + combine": ours.both})
    ours.device.close()
    if not case.has(6.0, "dispatch in fp8"):
        return
    ours = Ours(case, fp8="amax")
    ours.time(rounds, **{"dispatch fp8 amax": ours.dispatch, "dispatch fp8 slotted": ours.slotted})
    ours.device.close()
    if not case.has(6.0, "combine exact"):
        return
    ours = Ours(case, "exact")
    ours.time(rounds, **{"combine exact": ours.combine, "the same, outputs pushed before": ours.combine_pushed})
    ours.device.close()


def time_more_of_ours(case, rounds):
    """Halves, batches, other scalings, and without early launch."""
    if not case.has(15.0, "halves, batches, other scalings, no early launch"):
        return
    ours = Ours(case)
    ours.time(rounds, **{"dispatch in halves": ours.halves, "combine fast in halves": ours.combine_halves})
    if not case.options.counts:  # a hot expert's rows would exceed the capacity
        ours.time(rounds, **{"batch [expert, capacity]": ours.batch})
    ours.device.early_launch = False
    names = [f"{what}, not early" for what in ("dispatch", "combine", "both")]
    ours.time(rounds, **dict(zip(names, (ours.dispatch, ours.combine, ours.both))))
    ours.device.close()
    for fp8 in ("amax", "power-of-two"):
        ours = Ours(case, fp8=fp8)
        if fp8 == "amax":
            ours.give_quantised()
        ours.time(rounds, **{"dispatch fp8 " + ("given" if fp8 == "amax" else fp8): ours.dispatch})
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

    def time(name, fn):
        case.time(name, lambda: [fn() for _ in range(CALLS)], rounds, CALLS)

    if not case.has(8.0, "baselines"):
        return
    by_hand = ByHand(*share)
    got, state = by_hand.dispatch(*inputs)
    y = torch.randn_like(got)
    time("by hand dispatch", lambda: by_hand.dispatch(*inputs))
    time("by hand combine", lambda: by_hand.combine(y, state, case.weights))
    gather = AllGather(*share)
    _, gathered = gather.dispatch(*inputs)
    pairs = int(gathered[1][-2])
    time("all-gather dispatch", lambda: gather.dispatch(*inputs))
    time("reduce-scatter combine", lambda: gather.combine(case.y[:pairs], gathered, pairs))


def time_copies(case, rounds):
    """Graphs as ours, three in a row, so that what ranks begin apart is little of the time."""
    most_bytes = max(int(sent_RR.sum(0).max()) for sent_RR in case.sent_RR.values())
    copies, calls, replays = PeerCopies(case.group, most_bytes), case.options.calls, 3
    for name, sent_RR in case.sent_RR.items():
        write = copies.of(sent_RR)
        replay = graph_of(lambda generation, write=write: write(), calls)

        def thrice(replay=replay):
            for _ in range(replays):
                replay()

        case.time(f"copy of the same {name}s", thrice, rounds, replays * calls, together=True)
    dist.barrier()  # nobody gives its heap back while others write to it


def run_rank(rank, store_path, start, options):
    options.until = start.get(timeout=600.0)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    ranks = options.ranks
    group = Group(rank=rank, ranks=ranks, store=dist.FileStore(store_path, ranks), deadline_s=10.0)
    nccl = dist.new_group(backend="nccl") if options.baselines else None
    results = {}
    for tokens in options.tokens:
        case, rounds = Case(group, tokens, options), options.rounds
        time_copies(case, rounds)
        time_ours(case, rounds)
        if not options.brief:
            time_more_of_ours(case, rounds)
        if options.tune:
            time_tuning(case, max(3, rounds // 2))
        if options.baselines:
            time_baselines(case, nccl, max(3, rounds // 4))
        everyone = [None] * ranks
        dist.all_gather_object(everyone, case.times)
        # Of the slowest rank, round by round.
        times = {name: np.max([r[name] for r in everyone], axis=0).tolist() for name in case.times}
        results[tokens] = {"wire_bytes": case.wire_bytes, "us": times, "routing": case.skew}
        if rank == 0:
            print_table(case, results[tokens], options.wire_gbytes_per_s)
    if rank == 0 and options.out:
        name = "exchange-recorded.json" if options.counts else "exchange-uniform.json"
        Path(options.out, name).write_text(json.dumps({"ranks": ranks, "tokens": results}))
    group.close()


BASELINES = {
    "dispatch": ("by hand dispatch", "all-gather dispatch"),
    "combine": ("by hand combine", "reduce-scatter combine"),
}


def limit_of(name):
    """What travels in a call of ours, by its name; None for two halves, or for none."""
    if "+" in name or not name.startswith(tuple(BASELINES)):
        return None
    if name.startswith("dispatch"):
        return "fp8 row" if "fp8" in name else "row"
    return "output" if "exact" in name else "sum"


def print_table(case, result, wire_gbytes_per_s):
    median = {name: statistics.median(times) for name, times in result["us"].items()}
    print(f"\n{case.tokens} tokens per rank, {case.skew}")
    floors = [
        f"{name}s {size / 1e6:.2f} MB, {size / wire_gbytes_per_s / 1e3:.1f} us"
        for name, size in case.wire_bytes.items()
    ]
    print(f"most bytes of a GPU one way, at the nominal {wire_gbytes_per_s:g} GB/s: {'; '.join(floors)}")
    print(f"{'':42}{'median us':>10}{'p10':>9}{'p90':>9}{'GB/s':>7}{'/ limit':>9}{'by hand x':>11}{'gather x':>10}")
    for name, times in result["us"].items():
        low, high = np.percentile(times, [10, 90])
        line = f"{name:42}{median[name]:10.1f}{low:9.1f}{high:9.1f}"
        what = limit_of(name)
        if what:
            line += f"{result['wire_bytes'][what] / median[name] / 1e3:7.0f}"
            line += f"{median[name] / median[f'copy of the same {what}s']:9.2f}"
            peers = BASELINES[name.split()[0].rstrip(",")]
            line += "".join(f"{median[peer] / median[name]:11.1f}" for peer in peers if peer in median)
        print(line, flush=True)


def shapes_for(ranks):
    """Of all builds."""
    shape = {"ranks": ranks, "experts": EXPERTS, "top_k": TOP_K, "vecs": 2 * HIDDEN // 16, "dtype": "bfloat16"}
    shapes = [KernelShape(**shape, exact=exact) for exact in (False, True)]
    return shapes + [KernelShape(**shape, exact=False, fp8=fp8) for fp8 in (1, 2)]


def compile_ahead(ranks):
    """Fill the cache for all builds at once, with all cores."""
    major, minor = torch.cuda.get_device_capability()
    shapes = shapes_for(ranks)
    with ProcessPoolExecutor(mp_context=mp.get_context("spawn")) as pool:
        list(pool.map(compile_kernels, shapes, [f"sm_{major}{minor}"] * len(shapes)))


def check_ranks(ranks, gpus):
    """Ends the program for numbers that cannot run; says it if ranks share GPUs."""
    if ranks < 2 or EXPERTS % ranks:
        raise SystemExit(f"--ranks {ranks}: at least 2, and {EXPERTS} experts are to be divided")
    if not gpus:
        raise SystemExit("needs a CUDA device")
    if ranks > gpus:
        print(f"{ranks} ranks take turns on {gpus} GPU(s): this checks that all runs; no time below means anything")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a folder for all timings as JSON")
    parser.add_argument("--ranks", type=int, default=2, help="one on each GPU; with fewer GPUs they take turns")
    parser.add_argument("--counts", help="recorded counts of layers of 256 experts; see `load_counts`")
    parser.add_argument("--wire-gbytes-per-s", type=float, default=450.0, help="nominal, of a GPU, each way")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=CALLS, help="of ours in a graph")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 128], choices=sorted(SMS))
    parser.add_argument("--brief", action="store_true", help="leave out halves, batches and other scalings")
    parser.add_argument("--tune", action="store_true", help="also try other numbers of multiprocessors")
    parser.add_argument("--no-baselines", dest="baselines", action="store_false", help="leave out NCCL and torch")
    parser.add_argument("--budget-s", type=float, default=600.0, help="begin nothing new later than this")
    parser.add_argument("--small", action="store_true", help="one round of few calls: does everything run?")
    options = parser.parse_args()
    if options.small:
        options.rounds, options.calls = 1, 4
    gpus, began = torch.cuda.device_count(), time.monotonic()
    check_ranks(options.ranks, gpus)
    if options.counts:
        counts_for(options.counts, EXPERTS)
    options.baselines &= options.ranks <= gpus  # NCCL takes no two ranks on one GPU
    props = torch.cuda.get_device_properties(0)
    print(f"{options.ranks} x {props.name}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, ", end="")
    print(f"hidden {HIDDEN}, {EXPERTS} experts, top-{TOP_K}, bf16, contiguous placement", flush=True)
    compile_ahead(options.ranks)
    until = began + options.budget_s
    raise SystemExit(not RankProcesses("exchange", options.ranks, run_rank, options).run(until, until + 60.0))


if __name__ == "__main__":
    main()
