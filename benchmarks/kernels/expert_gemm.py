"""The Hopper expert kernel on one GPU beside torch's grouped_mm, in one run.

    PYTHONPATH=src:. python benchmarks/kernels/expert_gemm.py [--tune] [--cases prefill,decode]

Cases of hidden 7168 and intermediate 2048, top-8, uniform routing unless said: `prefill` 128 local of 256 experts,
8,192 tokens; `wide` 32 of 64, the same; `decode` 8 of 16, 256 tokens; `skewed` as prefill with Zipf popularity and half
of the experts empty. TFLOP/s count the pairs that there are; GB/s count the weights of experts that have rows, once.
Baseline: rows expanded by index, grouped_mm, SiLU * up, grouped_mm. `of bound` is the larger of time at the TFLOP/s of
a dense 8192^3 product and time of the weights at a copy's GB/s, both measured here, over the time taken.
Each time is the median of 9 replays of a graph of several calls. `--tune` tries other static choices, and each stage
alone, and rows expanded beforehand.
"""

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch.nn import functional as F

from bywash.kernels.experts import HopperExperts, Tuning, compile_experts

HIDDEN, INNER, TOP_K, REPLAYS = 7168, 2048, 8, 9
CASES = {"prefill": (128, 256, 8192), "wide": (32, 64, 8192), "decode": (8, 16, 256), "skewed": (128, 256, 8192)}
TUNINGS = [Tuning(cluster=2), Tuning(cluster=1), Tuning(cluster=2, max_n=128)]


class Case:
    """Weights, rows and routing of one case."""

    def __init__(self, name):
        local, experts, tokens = CASES[name]
        torch.manual_seed(17)
        popularity_E = torch.ones(experts, device="cuda")
        if name == "skewed":
            popularity_E = torch.arange(1, experts + 1, device="cuda").float().pow(-0.6)[torch.randperm(experts)]
            popularity_E[::2] = 1e-30
        ids_TK = (torch.rand(tokens, experts, device="cuda").log() / popularity_E).topk(TOP_K).indices
        token, k = (ids_TK < local).nonzero(as_tuple=True)
        slots = ids_TK[token, k]
        order = torch.argsort(slots, stable=True)
        self.index_M = token[order].int()
        self.counts_L = torch.bincount(slots, minlength=local)
        self.ends_L = self.counts_L.cumsum(0).int()
        self.rows_PD = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.gate_up_LGD = torch.empty(local, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.down_LDF = torch.empty(local, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16)
        self.gate_up_LGD.normal_(std=HIDDEN**-0.5)
        self.down_LDF.normal_(std=INNER**-0.5)
        self.pairs = self.index_M.shape[0]
        self.flops = 2 * self.pairs * 3 * HIDDEN * INNER
        self.weight_bytes = int((self.counts_L > 0).sum()) * 3 * HIDDEN * INNER * 2

    def baseline(self):
        """The layer's experts with torch alone: expanded, then the rest."""
        x_MD = self.rows_PD.index_select(0, self.index_M)
        gate_up_MG = F.grouped_mm(x_MD, self.gate_up_LGD.transpose(1, 2), offs=self.ends_L)
        h_MF = F.silu(gate_up_MG[:, :INNER]) * gate_up_MG[:, INNER:]
        return F.grouped_mm(h_MF, self.down_LDF.transpose(1, 2), offs=self.ends_L)


def time_us(fn, calls):
    """Median microseconds of a call inside a graph, and the spread."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # else fn may read what the caller has not finished writing
    with torch.cuda.stream(stream):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            fn()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times), min(times), max(times)


def bounds():
    """TFLOP/s of a dense product, GB/s read and written by a copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tflops = 2 * 8192**3 / time_us(lambda: a @ b, 20)[0] / 1e6
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    gbps = 2 * source.numel() / time_us(lambda: target.copy_(source), 5)[0] / 1e3
    return tflops, gbps


def show(case, name, times, base_us, limits):
    middle, low, high = times
    bound_us = max(case.flops / limits[0] / 1e6, case.weight_bytes / limits[1] / 1e3)
    print(
        f"  {name:<44} {middle:>8.1f} {low:>8.1f} {high:>8.1f} {case.flops / middle / 1e6:>8.0f} "
        f"{case.weight_bytes / middle / 1e3:>7.0f} {base_us / middle:>8.2f} {bound_us / middle:>8.2f}",
        flush=True,
    )


def compare(case, name, limits, tunings, *, tune):
    calls = 20 if name == "decode" else 3
    print(f"\n{name}: {case.pairs} pairs, {int(case.counts_L.min())} to {int(case.counts_L.max())} an expert")
    print(f"  {'':<44} {'us':>8} {'least':>8} {'most':>8} {'TFLOP/s':>8} {'GB/s':>7} {'x base':>8} {'of bound':>8}")
    wanted_MD = case.baseline()
    base = time_us(case.baseline, calls)
    show(case, "torch grouped_mm", base, base[0], limits)
    usual = Tuning.choose(case.pairs / case.ends_L.shape[0])
    for tuning in [usual, *(tuning for tuning in tunings if tuning != usual)]:
        try:
            measure(case, tuning, wanted_MD, base[0], calls, limits, parts=tune and tuning == usual)
        except Exception as error:  # one choice that fails must not cost the others
            print(f"  {label(tuning)}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def measure(case, tuning, wanted_MD, base_us, calls, limits, *, parts):
    experts = HopperExperts(case.gate_up_LGD, case.down_LDF, pairs=case.pairs, tuning=tuning)
    out_MD = torch.empty_like(wanted_MD)
    inputs = (case.rows_PD, case.index_M, case.ends_L, out_MD)
    experts(*inputs)
    error = ((out_MD - wanted_MD).float().abs().max() / wanted_MD.float().square().mean().sqrt()).item()
    if not error < 0.1:
        print(f"  {label(tuning)}: WRONG, differs by {error:.3g} of the mean size", flush=True)
        return
    show(case, label(tuning), time_us(lambda: experts(*inputs), calls), base_us, limits)
    if not parts:
        return
    for stage, what in ((0, "  gate, up and SwiGLU alone"), (1, "  down alone")):
        stage_us = time_us(lambda stage=stage: experts(*inputs, first=stage, last=stage), calls)
        show(case, what, stage_us, base_us, limits)
    x_MD = case.rows_PD.index_select(0, case.index_M)
    in_order_M = torch.arange(case.pairs, device="cuda", dtype=torch.int32)
    expanded = (x_MD, in_order_M, case.ends_L, out_MD)
    show(case, "  rows expanded beforehand", time_us(lambda: experts(*expanded), calls), base_us, limits)
    expand = time_us(lambda: torch.index_select(case.rows_PD, 0, case.index_M, out=x_MD), calls)
    show(case, "  expanding them", expand, base_us, limits)


def label(tuning):
    return f"bywash, cluster {tuning.cluster}, n {tuning.max_n}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="other static choices and parts")
    parser.add_argument("--cases", default=",".join(CASES), help="some of them, with commas")
    options = parser.parse_args()
    tunings = TUNINGS if options.tune else []
    with ProcessPoolExecutor(len(TUNINGS), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_experts, TUNINGS if options.tune else TUNINGS[:2]))
    limits = bounds()
    print(
        f"{torch.cuda.get_device_name()}: dense 8192^3 {limits[0]:.0f} TFLOP/s, copy {limits[1]:.0f} GB/s", flush=True
    )
    for name in options.cases.split(","):
        case = Case(name)
        compare(case, name, limits, tunings, tune=options.tune)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
