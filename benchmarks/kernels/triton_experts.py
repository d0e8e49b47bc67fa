"""Expert compute in Triton on one GPU: tile shapes beside each other and beside torch's grouped_mm, in one run.

    PYTHONPATH=src:. python benchmarks/kernels/triton_experts.py      # a minute; run it before the tests on a GPU:
    PYTHONPATH=src:. python -m pytest tests/kernels/test_triton_experts.py  # their kernels are compiled by then

Cases of hidden 7168 and intermediate 2048, top-8, uniform: `prefill` 128 local of 256 experts, 8,192 tokens; `wide` 32
of 64, the same; `decode` 8 of 16, 256 tokens; `few` 128 of 256, 256 tokens. TFLOP/s count the pairs that there are, not
the rows of tiles; GB/s count each weight once. Baseline: rows expanded by index, grouped_mm, SiLU * up, grouped_mm.

Each configuration's result is compared with a float32 product for the first and last rows of three experts. Times are
medians of replays of a graph of one call; what is compared takes turns, since a busy GPU lowers its clock.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch
from tests.kernels.test_triton_experts import SMALL, SMALL_FP8, SMALL_PAIR
from torch.nn import functional as F

from bywash.exchange.fp8_rows import dequantise_rows
from bywash.exchange.fp8_rows import quantise_rows as quantise_rows_torch
from bywash.kernels.experts_naive import (
    Fp8,
    dequantise_gate_up_naive,
    dequantise_weights_naive,
    quantise_gate_up_naive,
    quantise_weights_naive,
)
from bywash.kernels.triton_experts import GroupedProduct, Tiles, TritonExperts, choose_tiles
from bywash.kernels.triton_experts_fp8 import GroupedProductFp8, TritonExpertsFp8, choose_fp8_tiles, quantise_rows

HIDDEN, INNER, TOP_K = 7168, 2048, 8
CASES = {"prefill": (128, 256, 8192), "wide": (32, 64, 8192), "decode": (8, 16, 256), "few": (128, 256, 256)}
LONG, SQUARE = Tiles(rows=128, main=256, tail=32), Tiles(rows=256, main=128, tail=0)
TWO = Tiles(rows=128, main=128, tail=16, warps=4, stages=3, per_sm=2)
TWO_64 = Tiles(rows=128, main=64, tail=16, warps=4, per_sm=2)
PAIR, TWO_FP8 = choose_fp8_tiles(1000)[0], choose_fp8_tiles(1)[0]
BF16 = {"prefill": [LONG, SQUARE], "wide": [LONG, SQUARE], "decode": [SQUARE, TWO, TWO_64], "few": [TWO, TWO_64]}
FP8 = {case: [PAIR, TWO_FP8] for case in CASES}


# --- inputs and the comparison with float32 -------------------------------------------------------------------------


def bf16_weights(experts):
    gate_up = torch.empty(experts, 2 * INNER, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(std=HIDDEN**-0.5)
    down = torch.empty(experts, HIDDEN, INNER, dtype=torch.bfloat16, device="cuda").normal_(std=INNER**-0.5)
    return gate_up, down


def routed(local, experts, tokens):
    """index_M and ends_L of uniform routing, and M."""
    ids_TK = torch.rand(tokens, experts, device="cuda").topk(TOP_K).indices
    token, k = (ids_TK < local).nonzero(as_tuple=True)
    slot = ids_TK[token, k]
    order = torch.argsort(slot, stable=True)
    ends_L = torch.bincount(slot, minlength=local).cumsum(0).int()
    return token[order].int(), ends_L, len(order)


def weight_of(weights, expert, gated):
    """float32 [N, K] of one expert."""
    if not isinstance(weights, Fp8):
        return weights[expert].float()
    one = Fp8(values=weights.values[expert : expert + 1], scales=weights.scales[expert : expert + 1])
    return (dequantise_gate_up_naive(one) if gated else dequantise_weights_naive(one))[0]


def expected_rows(weights, x, index_M, ends_L, gated):
    """Some m and their results in float32."""
    ends, found = ends_L.tolist(), []
    for expert in (0, len(ends) // 2, len(ends) - 1):
        start = ends[expert - 1] if expert else 0
        m = torch.tensor(
            [i for i in range(start, ends[expert]) if i - start < 9 or ends[expert] - i < 9], device="cuda"
        )
        at = index_M[m].long() if gated else m
        rows = dequantise_rows(x.values[at], x.scales[at]) if isinstance(x, Fp8) else x[at].float()
        y = rows @ weight_of(weights, expert, gated).T
        if gated:
            gate, up = y.chunk(2, 1)
            y = F.silu(gate) * up
        found.append((m, y))
    return torch.cat([m for m, _ in found]), torch.cat([y for _, y in found])


def wrong_values(y, expected):
    """How many are off by more than bf16's step and 2e-3 of the largest (Hopper sums e4m3 products in 14 bits)."""
    m, y_32 = expected
    return int(((y[m].float() - y_32).abs() > y_32.abs() / 128 + 2e-3 * y_32.abs().max()).sum())


# --- compiling ahead ------------------------------------------------------------------------------------------------


def compile_one(fp8, gated, tiles, hidden, inner, dtype):
    """In a process of its own: fills Triton's cache on disk."""
    n, k = (2 * inner, hidden) if gated else (hidden, inner)
    weights = torch.zeros(1, n, k, device="cuda", dtype=dtype)
    if not fp8:
        GroupedProduct(weights, gated=gated, tiles=tiles)
        return
    weights = quantise_gate_up_naive(weights) if gated else quantise_weights_naive(weights)
    product = GroupedProductFp8(weights, gated=gated, tiles=tiles)
    nothing = torch.zeros(1, dtype=torch.int32, device="cuda")
    x, y = Fp8(values=weights.values[0], scales=weights.scales[0]), torch.empty(1, product.columns, device="cuda")
    product(x, nothing, nothing, y.to(dtype))


def compile_all(workers):
    jobs = {(fp8, gated, tiles, HIDDEN, INNER, torch.bfloat16)
            for fp8, lists in ((False, BF16), (True, FP8)) for case in lists.values() for tiles in case
            for gated in (True, False)}  # fmt: skip
    jobs |= {(False, g, SMALL, *s, d) for g in (True, False) for s in ((48, 32), (128, 64))
             for d in (torch.bfloat16, torch.float16)}  # fmt: skip
    jobs |= {(True, g, t, *s, torch.float32) for g in (True, False) for t in (SMALL_FP8, SMALL_PAIR)
             for s in ((144, 160), (128, 256))}  # fmt: skip
    began = time.time()
    with ProcessPoolExecutor(workers, mp_context=mp.get_context("spawn")) as pool:
        futures = {pool.submit(compile_one, *job): job for job in jobs}
        for future in as_completed(futures):
            if future.exception():
                fp8, gated, tiles, *_ = futures[future]
                print(f"FAIL compiling {'fp8' if fp8 else '16-bit'} {'gate_up' if gated else 'down'} {named(tiles)}: "
                      f"{str(future.exception()).strip()[:300]!r}", flush=True)  # fmt: skip
    print(f"compiled {len(jobs)} kernels in {time.time() - began:.0f} s", flush=True)


# --- times ----------------------------------------------------------------------------------------------------------


def captured(call):
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def take_turns(graphs, rounds=9):
    """Median microseconds of each graph's replay; the first two rounds do not count."""
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: statistics.median(t[2:]) for name, t in times.items()}


def named(tiles):
    text = f"{tiles.rows}x{tiles.main}+{tiles.tail} k{tiles.depth} w{tiles.warps} s{tiles.stages}"
    return text + (f" x{tiles.per_sm}" if tiles.per_sm > 1 else "")


def grouped_mm_experts(x_PD, index_M, ends_L, gate_up, down):
    gate, up = F.grouped_mm(x_PD[index_M], gate_up.transpose(1, 2), offs=ends_L).chunk(2, dim=1)
    return F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends_L)


def sweep(kind, case, gated, weights, x, y, configs, index_M, ends_L):
    """One product under each configuration; prints and returns the fastest."""
    values = weights.values if kind == "fp8" else weights
    flop = 2 * len(index_M) * INNER * HIDDEN * (2 if gated else 1)
    expected, graphs, kept, wrong = expected_rows(weights, x, index_M, ends_L, gated), {}, [], {}
    for tiles in configs:
        try:
            product = (GroupedProductFp8 if kind == "fp8" else GroupedProduct)(weights, gated=gated, tiles=tiles)
            y.fill_(7)
            graphs[tiles] = captured(lambda: product(x, index_M, ends_L, y))  # noqa: B023
            wrong[tiles] = wrong_values(y, expected)
            kept.append(product)
        except Exception as error:
            print(f"FAIL {kind} {case} {named(tiles)}: {type(error).__name__} {str(error)[:200]!r}", flush=True)
            if "CUDA" in str(error):
                raise
    times = take_turns(graphs)
    for tiles, us in sorted(times.items(), key=lambda item: item[1]):
        print(f"{kind:5}{case:9}{'gate_up' if gated else 'down':9}{named(tiles):28}{us:9.1f}{flop / us / 1e6:9.0f}"
              f"{values.nbytes / us / 1e3:9.0f}   {'ok' if not wrong[tiles] else f'FAIL {wrong[tiles]} wrong'}",
              flush=True)  # fmt: skip
    return min(times, key=times.get) if times else configs[0]


def time_case(case, out):
    """In a process of its own."""
    torch.manual_seed(0)
    local, experts, tokens = CASES[case]
    index_M, ends_L, pairs = routed(local, experts, tokens)
    counts = torch.diff(ends_L, prepend=ends_L.new_zeros(1))
    print(f"\n{case}: {local} experts, {pairs} pairs, {int(counts.min())} to {int(counts.max())} rows each")
    print(f"{'':23}{'tiles (weights x tokens)':28}{'us':>9}{'TFLOP/s':>9}{'GB/s':>9}")
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    h, y = torch.randn(pairs, INNER, device="cuda").bfloat16(), x.new_empty(pairs, HIDDEN)
    x8, h8 = (Fp8(values=v, scales=s) for v, s in (quantise_rows_torch(x), quantise_rows_torch(h)))
    weights = bf16_weights(local)
    weights8 = quantise_gate_up_naive(weights[0]), quantise_weights_naive(weights[1])
    scratch, given, rows = torch.empty_like(h), (index_M, ends_L), pairs / local
    best = {}
    for kind, (gate_up, down), (rows_in, h_in), configs in (
        ("bf16", weights, (x, h), BF16[case]),
        ("fp8", weights8, (x8, h8), FP8[case]),
    ):
        best[kind] = (
            sweep(kind, case, True, gate_up, rows_in, scratch, configs, *given),
            sweep(kind, case, False, down, h_in, y, configs, *given),
        )
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16 = {name: TritonExperts(*weights, pairs=pairs, tiles=tiles, rows_per_expert=rows)
            for name, tiles in (("bf16 best", best["bf16"]), ("bf16 chosen", choose_tiles(rows)))}  # fmt: skip
    fp8 = {name: TritonExpertsFp8(*weights8, pairs=pairs, tiles=tiles, rows_per_expert=rows)
           for name, tiles in (("fp8 best", best["fp8"]), ("fp8 chosen", choose_fp8_tiles(rows)))}  # fmt: skip
    calls = {"torch bf16": lambda: grouped_mm_experts(x, *given, *weights), "dense 8192^3": lambda: a @ b}
    calls |= {name: lambda e=e: e(x, *given, y) for name, e in bf16.items()}
    calls |= {name: lambda e=e: e(x8.values, x8.scales, *given, y) for name, e in fp8.items()}
    calls["fp8 quantise h"] = lambda: quantise_rows(h, ends_L[-1:], h8)
    times = take_turns({name: captured(call) for name, call in calls.items()})
    flop, dense = 6 * pairs * INNER * HIDDEN, 2 * 8192**3 / times["dense 8192^3"] / 1e6
    for name, us in times.items():
        rate = flop / us / 1e6 if name.split()[0] in ("bf16", "fp8", "torch") else 0
        print(f"==== {case:8} {name:15}{us:9.1f} us {rate:6.0f} TFLOP/s, {rate / dense:.2f} of a dense bf16 product "
              f"({dense:.0f}), {times['torch bf16'] / us:.2f} x torch", flush=True)  # fmt: skip
    print(f"     best: bf16 {named(best['bf16'][0])}, {named(best['bf16'][1])}; fp8 {named(best['fp8'][0])}, "
          f"{named(best['fp8'][1])}", flush=True)  # fmt: skip
    if out:
        with open(f"{out}-{case}.json", "w") as file:
            json.dump({"times_us": times, "best": {k: [named(t) for t in v] for k, v in best.items()}}, file)


def alone(function, *arguments, limit_s):
    """In a process of its own, so that neither a fault on the device nor a hang ends the run."""
    process = mp.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join(limit_s)
    if process.is_alive():
        print(f"FAIL {function.__name__}: not done after {limit_s} s", flush=True)
        process.kill()
        process.join()
    elif process.exitcode:
        print(f"FAIL {function.__name__}: exit code {process.exitcode}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", help="a file name's beginning, for timings as JSON")
    options = parser.parse_args()
    import triton

    props = torch.cuda.get_device_properties(0)
    print(f"{props.name}, {props.multi_processor_count} SMs, torch {torch.__version__}, Triton {triton.__version__}")
    compile_all(options.workers)
    for case in options.cases:
        alone(time_case, case, options.out, limit_s=60)


if __name__ == "__main__":
    main()
