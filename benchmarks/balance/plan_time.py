"""Time of a plan: the kernel where there is a GPU, equal to the naive planner first; numba on the CPU elsewhere.

    PYTHONPATH=src:. python benchmarks/balance/plan_time.py [--cpu] [--json OUT] [--plans 200]

Counts are drawn per expert from a lognormal law, a new law for each plan, so that what spills differs; in the case
"steady" it is the same law for all, with few rows, as in decode. The GPU runs graphs of plans on matrices that are
already there: "empty" starts each plan from empty slots, "resident" from what the plan before left (on the CPU "cpu"
and "kept"); "floor" is a kernel that only clears the slots. The case "home" has nothing to move (alpha 4). With a GPU,
numba is timed only on request: it compiles for many seconds on a new machine.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np
import torch
from tests.balance.plan_cases import Oracle, draw_counts

from bywash.balance import Limits, Placement, SlotDirectory, plan_step

CASES = [(8, 256, 4), (8, 128, 24), (32, 256, 2), (64, 256, 2)]
ODD = [(3, 7, 2), (5, 13, 0), (2, 8, 40), (33, 70, 3)]
TOKENS, DECODE_TOKENS, TOP_K, GRAPH, COMPARED = 4096, 64, 8, 20, 6
COLUMNS = ("ranks", "experts", "slots", "case", "fetches", "max/mean", "cpu", "p99", "kept", "p99")
COLUMNS += ("empty", "resident", "floor")
KEYS = ("fetches", "max_over_mean", "cpu_us", "cpu_p99_us", "cpu_kept_us", "cpu_kept_p99_us")
KEYS += ("gpu_empty_us", "gpu_resident_us", "gpu_floor_us")
LINE = "{:>5} {:>7} {:>5} {:>6}" + " {:>8}" * len(KEYS)
STARTED = time.perf_counter()


def matrices(ranks, experts, number, *, steady=False, seed=0):
    """int32 [number, R, E]: every rank's rows, experts drawn from one law per matrix, or from one for all."""
    rng, tokens = np.random.default_rng(seed), DECODE_TOKENS if steady else TOKENS
    weights = rng.lognormal(0, 0.8, size=(number, experts))
    weights[1:] = weights[0] if steady else weights[1:]
    return np.stack([rng.multinomial(tokens * TOP_K, w / w.sum(), size=ranks) for w in weights]).astype(np.int32)


def time_cpu(counts, placement, limits, empty):
    """Median and 99th percentile from empty slots, and from those of the plan before; what the latter are like."""
    plan_step(counts[0], placement, limits, empty)
    found = {}
    for name, kept in (("cpu", False), ("cpu_kept", True)):
        times, plans, directory = [], [], empty
        for counts_RE in counts:
            begin = time.perf_counter()
            plans.append(plan_step(counts_RE, placement, limits, directory))
            times.append((time.perf_counter() - begin) * 1e6)
            directory = plans[-1].directory if kept else empty
        found |= {f"{name}_us": statistics.median(times), f"{name}_p99_us": float(np.quantile(times, 0.99))}
    found["fetches"] = statistics.mean(plan.fetches for plan in plans)
    return found | {"max_over_mean": statistics.mean(plan.imbalance for plan in plans)}


def make_planner(placement, limits, directory):
    """The kernel, and a line that says how long it took to compile and load."""
    from bywash.kernels.plan import DevicePlanner

    begin = time.perf_counter()
    planner = DevicePlanner(placement, limits, directory)
    shape = (placement.ranks, placement.num_experts, directory.keys_RS.shape[1])
    print(f"# {shape}: compiled and loaded in {time.perf_counter() - begin:.1f} s, at {since_start()}", flush=True)
    return planner


def since_start():
    return f"{time.perf_counter() - STARTED:.1f} s"


def compare(planner, oracle, counts, what):
    """Plan after plan on one directory; returns (plans with a difference, what the oracle's plans were like)."""
    different, fetches, imbalances = 0, [], []
    for number, counts_RE in enumerate(counts):
        planner(torch.from_numpy(counts_RE).cuda())
        expected = oracle(counts_RE)
        found = {name: getattr(planner, name).cpu().numpy().view(value.dtype) for name, value in expected.items()}
        lines = [describe(name, found[name], value) for name, value in expected.items()]
        lines = [line for line in lines if line]
        different += bool(lines)
        if lines and different == 1:
            print(f"# DIFFERS: {what} plan {number}, GPU != oracle: " + "; ".join(lines), flush=True)
        fetches.append(int((expected["fetch_RS"] >= 0).sum()))
        rows_R = expected["rows_R"]
        imbalances.append(rows_R.max() * rows_R.size / max(1, rows_R.sum()))
    return different, {"fetches": statistics.mean(fetches), "max_over_mean": float(statistics.mean(imbalances))}


def describe(name, found, expected):
    wrong = np.argwhere(found != expected)
    if not len(wrong):
        return ""
    places = [f"{at.tolist()}: {found[tuple(at)]} != {expected[tuple(at)]}" for at in wrong[:3]]
    return f"{name} {len(wrong)} of {expected.size}, {', '.join(places)}"


def compare_odd_cases(plans=8):
    """Odd shapes on the GPU with caps, break-even and speeds; returns (plans, plans with a difference)."""
    rng, compared, different = np.random.default_rng(7), 0, 0
    for ranks, experts, slots in ODD:
        for capacity in (3, 30, 10**6):
            limits = Limits(
                capacity=capacity,
                alpha_1024=int(rng.choice([1024, 1100, 1500])),
                fetch_rows=min(capacity, int(rng.choice([1, 2, 9]))),
                use_rows=min(capacity, int(rng.choice([1, 2, 5]))),
                speeds=(1, *(int(s) for s in rng.integers(0, 5, ranks - 1))),
            )
            placement = Placement(home_E=rng.integers(0, ranks, experts).astype(np.int32), ranks=ranks)
            directory = SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts)
            shapes = ("random", "one expert", "one donor", "top-1", "equal", "nothing", "random", "one source")
            counts = [draw_counts(rng, ranks, experts, shape) for shape in shapes[:plans]]
            planner = make_planner(placement, limits, directory)
            what = f"{(ranks, experts, slots)} {limits}"
            different += compare(planner, Oracle(placement, limits, directory), counts, what)[0]
            compared += len(counts)
    return compared, different


def time_gpu(planner, counts):
    """Median microseconds of a plan in a graph of GRAPH, over rounds."""
    device = [torch.from_numpy(counts_RE).cuda() for counts_RE in counts[:GRAPH]]

    def steps(clear, plan):
        for counts_RE in device:
            if clear:
                planner.keys_RS.fill_(-1)
            if plan:
                planner(counts_RE)

    times = {}
    for name, clear, plan in (("both", True, True), ("resident", False, True), ("floor", True, False)):
        steps(clear, plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            steps(clear, plan)
        times[name] = replay_us(graph, len(device))
    return {
        "gpu_empty_us": times["both"] - times["floor"],
        "gpu_resident_us": times["resident"],
        "gpu_floor_us": times["floor"],
    }


def replay_us(graph, plans, rounds=50):
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / plans)
    return statistics.median(times)


def measure(ranks, experts, slots, name, limits, arguments):
    """One line of the table, and how many plans differed."""
    counts = matrices(ranks, experts, arguments.plans, steady=name == "steady")
    placement = Placement.equal(experts, ranks)
    empty = SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts)
    row, different = {"ranks": ranks, "experts": experts, "slots": slots, "case": name}, 0
    if arguments.cpu:
        row |= time_cpu(counts, placement, limits, empty)
    if torch.cuda.is_available():
        planner = make_planner(placement, limits, empty)
        oracle = Oracle(placement, limits, empty)
        different, plans = compare(planner, oracle, counts[:COMPARED], f"{(ranks, experts, slots)} {name}")
        row |= plans | time_gpu(planner, counts)
    cells = [row.get(key) for key in KEYS]
    texts = ["-" if cell is None else f"{cell:.4f}" if cell < 9 else f"{cell:.1f}" for cell in cells]
    print(LINE.format(ranks, experts, slots, name, *texts), flush=True)
    return row, different


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="time numba although there is a GPU")
    parser.add_argument("--json")
    parser.add_argument("--plans", type=int, default=200)
    arguments = parser.parse_args()
    gpu, compared, different = torch.cuda.is_available(), 0, 0
    arguments.cpu |= not gpu
    print(f"# {torch.cuda.get_device_name() if gpu else 'no GPU: numba only'}; times in us, median", flush=True)
    if gpu:
        compared, different = compare_odd_cases()
        print(f"# {compared - different} of {compared} plans of odd shapes equal, at {since_start()}", flush=True)
    print(LINE.format(*COLUMNS), flush=True)
    rows = []
    for case in CASES:
        for name, alpha_1024 in (("home", 4096), ("spill", 1024), ("steady", 1126)):
            row, wrong = measure(*case, name, Limits(alpha_1024=alpha_1024), arguments)
            rows.append(row)
            different += wrong
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=2)
    print(f"# {'plans equal to the oracle on the GPU' if gpu else 'done'}, at {since_start()}")
    return f"{different} plans differ between the GPU and the oracle" if different else 0


if __name__ == "__main__":
    sys.exit(main())
