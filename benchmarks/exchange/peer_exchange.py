"""Dispatch and combine of `peer` on two GPUs, beside NCCL by hand, torch only and the copy ceiling, in one run.

    PYTHONPATH=src:. python benchmarks/exchange/peer_exchange.py --out DIR

Prints a table of medians over rounds, with the 10th and 90th percentile and the ratios. Times are of the slower rank.
Ours are CUDA graphs of 10 calls; baselines run eagerly (by hand needs host splits), also timed by events around 10.
Inputs are random; each round starts from the same ones, and 10 calls touch more than the L2.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.exchange.gpu_baselines import AllGather, ByHand, PeerCopy

from bywash.balance import Placement
from bywash.exchange.group import Group
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout

RANKS, EXPERTS, TOP_K, HIDDEN, CALLS = 2, 256, 8, 7168, 10
ROW_BYTES = 2 * HIDDEN
BUILDS = [(1, 8, 1), (2, 8, 1), (4, 8, 1), (8, 8, 2)]
"""Chunks, sending warps of 16, chunks that all warps sum: tried with --tune."""


class Case:
    """Inputs of one size, and the timings taken so far: name to a list of microseconds."""

    def __init__(self, group, tokens):
        self.group, self.tokens, self.times = group, tokens, {}
        generator = torch.Generator().manual_seed(17 * tokens + group.rank)
        ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
        self.x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16().cuda()
        self.ids, self.weights = ids.cuda(), torch.rand(tokens, TOP_K, generator=generator).softmax(1).cuda()
        self.count = torch.full((1,), tokens, dtype=torch.int32, device="cuda")
        self.y = torch.randn(RANKS * tokens * TOP_K, HIDDEN, dtype=torch.bfloat16, device="cuda")
        self.wire_rows = int((ids // (EXPERTS // RANKS) == 1 - group.rank).any(1).sum())

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


def open_device(group, tokens, mode, build=None):
    layout = PeerLayout(
        ranks=RANKS,
        experts=EXPERTS,
        top_k=TOP_K,
        tokens=tokens,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        exact=mode == "exact",
    )
    home_E = Placement.equal(EXPERTS, RANKS).home_E
    return PeerDevice(group, layout, home_E, combine_mode=mode, build=build)


def time_builds(case, rounds, builds):
    """The combine cut into other numbers of chunks, to choose the defaults of `KernelShape`."""
    for mode in ("fast", "exact"):
        for chunks, senders, tail in builds:
            build = {"chunks": chunks, "senders": senders, "tail": tail}
            device = open_device(case.group, case.tokens, mode, build)
            for generation in range(2):
                device.dispatch(case.x, case.ids, case.weights, tokens=case.count, generation=generation)

            def combine(generation, device=device):
                device.combine(case.y, generation=generation)

            case.time(f"combine {mode}, {chunks}/{senders}/{tail}", graph_of(combine), rounds)
            device.check()
            device.close()


def time_ours(case, rounds, sms):
    inputs = (case.x, case.ids, case.weights)
    for mode in ("fast", "exact"):
        device = open_device(case.group, case.tokens, mode)
        for generation in range(2):
            device.dispatch(*inputs, tokens=case.count, generation=generation)

        def dispatch(generation, counts_first=True, device=device):
            device.dispatch(*inputs, tokens=case.count, generation=generation, counts_first=counts_first)

        def combine(generation, device=device):
            device.combine(case.y, generation=generation)

        def both(generation, counts_first=False, dispatch=dispatch, combine=combine):
            dispatch(generation, counts_first)
            combine(generation)

        def halves(generation, device=device):
            device.dispatch_start(*inputs, tokens=case.count, generation=generation)
            device.dispatch_finish(generation)

        def combine_halves(generation, device=device):
            device.combine_start(case.y, generation=generation)
            device.combine_finish(generation)

        if mode == "fast":
            case.time("dispatch", graph_of(dispatch), rounds)
            case.time("dispatch in halves", graph_of(halves), rounds)
            case.time("dispatch slotted", graph_of(lambda g, d=dispatch: d(g, False)), rounds)
            case.time("combine fast/stable", graph_of(combine), rounds)
            case.time("combine fast in halves", graph_of(combine_halves), rounds)
            case.time("slotted dispatch + combine", graph_of(both), rounds)
            for num_sms in sms:
                device.num_sms = num_sms
                case.time(f"dispatch, {num_sms} SMs", graph_of(dispatch), rounds)
                case.time(f"combine, {num_sms} SMs", graph_of(combine), rounds)
        else:
            case.time("combine exact", graph_of(combine), rounds)
        device.check()
        device.close()


def time_baselines(case, nccl, rounds):
    inputs = (case.x, case.ids, case.weights)
    rank = case.group.rank

    def repeat(fn):
        return lambda: [fn() for _ in range(CALLS)]

    by_hand = ByHand(nccl, rank, RANKS, EXPERTS)
    got, state = by_hand.dispatch(*inputs)
    y = torch.randn_like(got)
    case.time("by hand dispatch", repeat(lambda: by_hand.dispatch(*inputs)), rounds)
    case.time("by hand combine", repeat(lambda: by_hand.combine(y, state, case.weights)), rounds)
    gather = AllGather(nccl, rank, RANKS, EXPERTS)
    _, gathered = gather.dispatch(*inputs)
    pairs = int(gathered[1][-2])
    case.time("all-gather dispatch", repeat(lambda: gather.dispatch(*inputs)), rounds)
    case.time("reduce-scatter combine", repeat(lambda: gather.combine(case.y[:pairs], gathered, pairs)), rounds)
    for name, rows in (("row", case.wire_rows), ("pair", case.tokens * TOP_K // RANKS)):
        copy = PeerCopy(rank, rows * ROW_BYTES)
        case.time(f"copy of one {name} each", repeat(copy), rounds)


def run_rank(rank, store_path, out, rounds, tune):
    torch.cuda.set_device(rank)
    group = Group(rank=rank, ranks=RANKS, store=dist.FileStore(store_path, RANKS), deadline_s=30.0)
    nccl = dist.new_group(backend="nccl")
    results = {}
    for tokens in (4096, 128):
        case = Case(group, tokens)
        time_ours(case, rounds, (32, 64, 100) if tokens == 4096 else (16, 32, 64))
        if tune and tokens == 4096:
            time_builds(case, rounds, BUILDS)
        time_baselines(case, nccl, max(3, rounds // 4))
        everyone = [None] * RANKS
        dist.all_gather_object(everyone, case.times)
        # Of the slower rank, round by round.
        times = {name: np.maximum(*(r[name] for r in everyone)).tolist() for name in case.times}
        results[tokens] = {"wire_rows": case.wire_rows, "us": times}
    if rank == 0:
        print_table(results)
        if out:
            Path(out, "peer_exchange.json").write_text(json.dumps(results))
    group.close()
    os._exit(0)  # NCCL's and the driver's teardown order differs between versions


BASELINES = {
    "dispatch": ("by hand dispatch", "all-gather dispatch"),
    "combine": ("by hand combine", "reduce-scatter combine"),
}


def print_table(results):
    props = torch.cuda.get_device_properties(0)
    print(f"{RANKS} x {props.name}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}, ", end="")
    print(f"hidden {HIDDEN}, {EXPERTS} experts, top-{TOP_K}, bf16, contiguous placement, uniform routing")
    for tokens, result in results.items():
        median = {name: statistics.median(times) for name, times in result["us"].items()}
        gb = result["wire_rows"] * ROW_BYTES / 1e9
        print(f"\n{tokens} tokens per rank; {gb * 1e3:.2f} MB on the wire each way when every row travels once")
        print(f"{'':30}{'median us':>10}{'p10':>9}{'p90':>9}{'GB/s':>7}{'/ limit':>9}{'by hand x':>11}{'gather x':>10}")
        for name, times in result["us"].items():
            low, high = np.percentile(times, [10, 90])
            line = f"{name:30}{median[name]:10.1f}{low:9.1f}{high:9.1f}"
            kind = next((k for k in BASELINES if name.startswith(k) and "+" not in name), None)
            if kind:
                limit = median["copy of one pair each" if "exact" in name else "copy of one row each"]
                ratios = [median[peer] / median[name] for peer in BASELINES[kind]]
                line += f"{gb / median[name] * 1e6:7.0f}{median[name] / limit:9.2f}{ratios[0]:11.1f}{ratios[1]:10.1f}"
            print(line)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a folder for all timings as JSON")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tune", action="store_true", help="also try other numbers of chunks")
    options = parser.parse_args()
    store = tempfile.mktemp()
    mp.spawn(run_rank, args=(store, options.out, options.rounds, options.tune), nprocs=RANKS)


if __name__ == "__main__":
    main()
