"""The whole MoE layer on GPUs of one host, each compute backend, beside NCCL by hand and torch only, in one run.

    PYTHONPATH=src:. python benchmarks/moe/layer.py --out DIR [--ranks 2]

Prints a table for each case: median over rounds of the slowest rank, 10th and 90th percentile, how many times faster
than each baseline, and the fraction of the roofline (the larger of the layer's products at the dense rate and its
weights at the copy rate, both measured in the same run, in bf16 or for `fp8` in e4m3).
Ours are CUDA graphs of several layers over both generations, counts first from 1,024 tokens on, slotted below;
baselines run eagerly (both sync with the host). Weights, tokens and routing are random; routing is uniform.
Every way is first compared with a float32 oracle on a sample of tokens; `fp8` (e4m3 rows, weights and intermediates,
outputs back in bf16) with an oracle on the same quantised values. What --budget leaves no time for is named.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.moe.layer_baselines import (
    AllGatherLayer,
    ByHandLayer,
    GroupedMlp,
    dense_product,
    dense_product_fp8,
    device_copy,
    rate,
    sample_outputs,
)

from bywash.balance import Placement
from bywash.exchange.group import Group
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.select import open_device_exchange, select
from bywash.kernels.triton_experts_fp8 import TritonExpertsFp8
from bywash.moe.device_experts import BACKENDS, open_device_experts
from bywash.moe.device_layer import DeviceLayer, pairs_capacity
from bywash.moe.fp8_weights import quantise_gate_up, quantise_weights
from bywash.routing import Routing

TOP_K, HIDDEN, INNER = 8, 7168, 2048
CASES = ((4096, 256), (4096, 64), (128, 16), (128, 256))
"""Tokens per rank and experts over all ranks."""
WAYS = ("fast", "stable", "exact", "exact-sent", "fp8", "copy")
"""Combine modes of the exchange by kernel; `exact` whose combine sends what `hopper` else pushes beside its products;
`fast` with e4m3 rows and experts; `fast` with all-gather by copy engine."""
FP8 = "triton_fp8"
SAMPLE, TOLERANCE = 12, 1.5e-2
"""Tokens of each rank that are checked; relative difference (2-norm of a token) that rounding to bf16 may make."""
COUNTS_FIRST = 1024
BASELINES = ("by hand", "all-gather")


def log(rank, text):
    if rank == 0:
        print(text, flush=True)


class Case:
    """Weights and inputs of one size, its floor, and what has been timed: name to microseconds by round."""

    def __init__(self, group, tokens, experts, options):
        self.group, self.tokens, self.experts, self.options = group, tokens, experts, options
        self.ranks, self.local = group.ranks, experts // group.ranks
        torch.manual_seed(1000 * tokens + 10 * experts + group.rank)
        self.gate_up = torch.randn(self.local, 2 * INNER, HIDDEN, dtype=torch.bfloat16, device="cuda") * HIDDEN**-0.5
        self.down = torch.randn(self.local, HIDDEN, INNER, dtype=torch.bfloat16, device="cuda") * INNER**-0.5
        self.inputs_R = [self._inputs(rank) for rank in range(self.ranks)]
        self.x, self.ids, self.weights = self.inputs_R[group.rank]
        self.calls = 4 if tokens >= COUNTS_FIRST else 10
        self.times, self.errors = {}, {}
        self.first = group.rank * self.local
        here = [int((ids // self.local == group.rank).sum()) for _, ids, _ in self.inputs_R]
        self.pairs = sum(here)
        self.expected = self.sum_over_ranks(sample_outputs(self.inputs_R, SAMPLE, self.gate_up, self.down, self.first))

    def _inputs(self, rank):
        generator = torch.Generator(device="cuda").manual_seed(77 * self.tokens + self.experts + rank)
        x = torch.randn(self.tokens, HIDDEN, generator=generator, device="cuda").bfloat16()
        scores = torch.rand(self.tokens, self.experts, generator=generator, device="cuda")
        weights = torch.rand(self.tokens, TOP_K, generator=generator, device="cuda").softmax(1)
        return x, scores.topk(TOP_K, dim=1).indices.contiguous(), weights

    def sum_over_ranks(self, tensor):
        dist.all_reduce(tensor, group=self.options.nccl)
        return tensor

    def worst(self, value):
        """The largest of all ranks' values."""
        largest = torch.tensor(float(value), device="cuda")
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.options.nccl)
        return float(largest)

    def difference(self, out_TD, expected_RSD):
        """The largest relative difference of a sampled token, over all ranks."""
        expected = expected_RSD[self.group.rank]
        difference = (out_TD[:SAMPLE].float() - expected).norm(dim=1) / expected.norm(dim=1)
        return self.worst(torch.nan_to_num(difference, nan=9e9).max())

    def check(self, name, out_TD, expected_RSD=None):
        """Compare the sampled tokens with the oracle, and keep how much they differ."""
        self.errors[name] = self.difference(out_TD, self.expected if expected_RSD is None else expected_RSD)
        if self.errors[name] > TOLERANCE:
            log(self.group.rank, f"  WRONG: {name} differs from the oracle by {self.errors[name]:.1e}")

    def has_time(self, name):
        """Whether the budget leaves time for one more way, as all ranks see it."""
        if self.worst(time.monotonic() - self.options.began) < self.options.budget:
            return True
        log(self.group.rank, f"  {name}: left out, --budget {self.options.budget:g} s is spent")
        return False

    def time(self, name, repeat, rounds):
        """Record the time of a call, of the slowest rank round by round; `repeat` makes `calls` of them."""
        for _ in range(2):
            repeat()
        torch.cuda.synchronize()
        mine = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            repeat()
            end.record()
            end.synchronize()
            mine.append(begin.elapsed_time(end) * 1e3 / self.calls)
        times = torch.tensor(mine, device="cuda")
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self.options.nccl)
        self.times[name] = times.tolist()

    def roofline_us(self, rates, item_bytes=2):
        """The least time for the experts' products and weights, in bf16 or e4m3."""
        flops, weight_bytes = 2 * self.pairs * 3 * HIDDEN * INNER, self.local * 3 * HIDDEN * INNER * item_bytes
        return max(flops / rates["dense" if item_bytes == 2 else "dense_fp8"], weight_bytes / rates["copy"]) * 1e6


def graph_of(step, calls):
    """`calls` steps, alternating between the generations, as one graph."""
    for generation in range(2):
        step(generation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread asks about events meanwhile.
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
        for call in range(calls):
            step(call % 2)
    return graph.replay


def open_experts(case, backend, layout):
    """(experts, the outputs that they should give if not those of the case)."""
    sizes = {"pairs": pairs_capacity(layout, case.local), "rows_per_expert": case.tokens * TOP_K / case.local}
    if backend != FP8:
        return open_device_experts(case.gate_up, case.down, backend=backend, **sizes), None
    gate_up, down = quantise_gate_up(case.gate_up), quantise_weights(case.down)
    expected = case.sum_over_ranks(sample_outputs(case.inputs_R, SAMPLE, gate_up, down, case.first))
    return TritonExpertsFp8(gate_up, down, **sizes), expected


def measure_ours(case, backend, way, device):
    experts, expected = open_experts(case, backend, device.layout)
    layer = DeviceLayer(device, experts, local_experts=case.local, push=way != "exact-sent")
    routing = Routing(ids_TK=case.ids, weights_TK=case.weights, num_experts=case.experts)
    count = torch.full((1,), case.tokens, dtype=torch.int32, device="cuda")
    counts_first, name = case.tokens >= COUNTS_FIRST, f"ours, {backend}, {way}"
    began = time.monotonic()
    out = layer(case.x, routing, counts_first=counts_first)
    layer.check()
    log(case.group.rank, f"  {name}: first call {time.monotonic() - began:.1f} s")
    case.check(name, out, expected)
    if expected is not None:
        error = case.difference(out, case.expected)
        log(case.group.rank, f"  {name}: {error:.1e} from the oracle on what was not quantised")

    def step(generation):
        layer(case.x, routing, tokens=count, generation=generation, counts_first=counts_first)

    case.time(name, graph_of(step, case.calls), case.options.rounds)
    layer.check()
    received = device.dispatch(case.x, case.ids, case.weights, tokens=count, counts_first=counts_first)
    device.combine(layer.compute(received, push=layer.pushes), pushed=layer.pushes)
    layer.check()
    # Those that push write the same rows again, which no step reads.
    name = f"experts, {backend}" + (", pushing" if layer.pushes else "")
    case.time(name, graph_of(lambda _: layer.compute(received, push=layer.pushes), case.calls), case.options.rounds)


def open_device(case, way):
    """The exchange for a way. `copy` is the other algorithm, by name; what `auto` would say is printed."""
    layout = PeerLayout(
        ranks=case.ranks,
        experts=case.experts,
        top_k=TOP_K,
        tokens=case.tokens,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        exact=way in ("exact", "exact-sent"),
        fp8="amax" if way == "fp8" else "off",
    )
    mode = "exact" if layout.exact else "stable" if way == "stable" else "fast"
    auto = select(layout, combine_mode=mode, equal_rows=True)
    log(case.group.rank, f"  {way}: auto takes {auto.algorithm}: {auto.why}")
    algorithm = "all-gather" if way == "copy" else "all-to-all"
    home_E = Placement.equal(case.experts, case.ranks).home_E
    return open_device_exchange(case.group, layout, home_E, combine_mode=mode, algorithm=algorithm, equal_rows=True)[0]


def measure_all_ours(case):
    for way in case.options.ways:
        if way == "fp8" and case.tokens < COUNTS_FIRST:
            continue
        backends = case.options.backends[:1] if way == "copy" else [FP8] if way == "fp8" else case.options.backends
        if way == "exact-sent":  # the other backends never push
            backends = [backend for backend in backends if backend == "hopper"]
        if not case.has_time(f"ours, {way}"):
            continue
        device = open_device(case, way)
        for backend in backends:
            if not case.has_time(f"ours, {backend}, {way}"):
                continue
            try:
                measure_ours(case, backend, way, device)
            except Exception:  # the other ways are still worth measuring
                log(case.group.rank, f"  {backend}, {way} failed:\n{traceback.format_exc(limit=-3)}")
            torch.cuda.empty_cache()
        device.close()


def measure_baselines(case):
    nccl, rank = case.options.nccl, case.group.rank
    mlp = GroupedMlp(case.gate_up, case.down)
    for name, kind in zip(BASELINES, (ByHandLayer, AllGatherLayer), strict=True):
        layer = kind(nccl, rank, case.ranks, case.experts, mlp)
        case.check(name, layer(case.x, case.ids, case.weights))

        def repeat(layer=layer):
            for _ in range(case.calls):
                layer(case.x, case.ids, case.weights)

        case.time(name, repeat, max(4, case.options.rounds // 3))
        torch.cuda.empty_cache()


def print_case(case, rates):
    rooflines = {size: case.roofline_us(rates, size) for size in (2, 1)}
    print(
        f"\n{case.tokens} tokens per rank, {case.experts} experts; roofline {rooflines[2]:.0f} us in bf16, "
        f"{rooflines[1]:.0f} us in e4m3 ({case.pairs} pairs, {case.local} experts on rank 0)"
    )
    columns = ("median us", "p10", "p90", "roofline", "by hand x", "gather x", "error")
    print(f"{'':26}" + "".join(f"{column:>11}" for column in columns))
    median = {name: statistics.median(times) for name, times in case.times.items()}
    for name, times in case.times.items():
        low, high = np.percentile(times, [10, 90])
        roofline = rooflines[1 if FP8 in name else 2] / median[name]
        line = f"{name:26}{median[name]:11.1f}{low:11.1f}{high:11.1f}{roofline:11.2f}"
        for peer in BASELINES:
            line += f"{median[peer] / median[name]:11.2f}" if name.startswith("ours") else " " * 11
        print(line + (f"{case.errors[name]:11.1e}" if name in case.errors else ""), flush=True)
    return {
        "tokens": case.tokens,
        "experts": case.experts,
        "ranks": case.ranks,
        "roofline_us": {"bf16": rooflines[2], "e4m3": rooflines[1]},
        "us": case.times,
        "error": case.errors,
    }


def measure_rates():
    """What the device reaches in this run: floating-point operations and bytes per second."""
    rates = {"dense": rate(*dense_product()), "dense_fp8": rate(*dense_product_fp8()), "copy": rate(*device_copy())}
    torch.cuda.empty_cache()
    return rates


def run_rank(rank, store_path, options):
    options.began = time.monotonic()
    torch.cuda.set_device(rank)
    ranks = options.ranks
    group = Group(rank=rank, ranks=ranks, store=dist.FileStore(store_path, ranks), deadline_s=90.0)
    options.nccl = dist.new_group(backend="nccl", timeout=timedelta(seconds=60))
    rates = measure_rates()
    props = torch.cuda.get_device_properties(rank)
    log(
        rank,
        f"{ranks} x {props.name}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}; hidden {HIDDEN}, "
        f"intermediate {INNER}, top-{TOP_K}, bf16; dense {rates['dense'] / 1e12:.0f} TFLOP/s, in e4m3 "
        f"{rates['dense_fp8'] / 1e12:.0f}; copy {rates['copy'] / 1e12:.2f} TB/s (read + write)",
    )
    results = []
    for tokens, experts in options.cases:
        began = time.monotonic()
        case = Case(group, tokens, experts, options)
        if case.has_time(f"{tokens} x {experts}"):
            measure_baselines(case)
            measure_all_ours(case)
            if rank == 0:
                results.append(print_case(case, rates))
            log(rank, f"  ({time.monotonic() - began:.0f} s for this case)")
        del case
        torch.cuda.empty_cache()
        if rank == 0 and options.out:  # after each case: a time limit may end the run
            Path(options.out, "layer.json").write_text(json.dumps({"rates_per_s": rates, "cases": results}))
    group.close()
    os._exit(0)  # NCCL's and the driver's teardown order differs between versions


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a folder for all timings as JSON")
    parser.add_argument("--ranks", type=int, default=2, help="one on each GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", nargs="+", default=[f"{t}x{e}" for t, e in CASES], help="tokens x experts")
    parser.add_argument("--backends", nargs="+", default=["hopper", "triton", "grouped_mm"], choices=BACKENDS)
    parser.add_argument("--ways", nargs="+", default=["fast", "fp8", "copy"], choices=WAYS)
    parser.add_argument("--budget", type=float, default=130.0, help="seconds after which no further way is begun")
    options = parser.parse_args()
    options.cases = [tuple(int(n) for n in case.split("x")) for case in options.cases]
    if options.ranks > torch.cuda.device_count():
        raise SystemExit(f"--ranks {options.ranks}: there are {torch.cuda.device_count()} GPUs")
    if any(experts % options.ranks or experts < TOP_K for _, experts in options.cases):
        raise SystemExit(f"--cases: experts must be {TOP_K} or more, and a multiple of --ranks {options.ranks}")
    mp.spawn(run_rank, args=(tempfile.mktemp(), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
