"""Exchange, overlap and elastic layers at EP4 or EP8 on one host, checked and measured within ten minutes.

    PYTHONPATH=src:. python benchmarks/ep_tables.py --counts FILE --out DIR            # a rank on every GPU here
    PYTHONPATH=src:. python benchmarks/ep_tables.py --ranks 4 --small --budget-s 55    # does everything run?

Kernels are compiled first, all at once. Then, each in processes of its own and in a share of the budget that is left:

checks    random small steps of exchange and elastic exchange, bit for bit against oracles on the CPU
exchange  `exchange/peer_exchange.py`: 4,096 and 128 tokens per rank, uniform routing
recorded  the same with the skew of --counts
overlap   part A of `pipeline/gpu_overlap.py`: serial, shared copies, two micro-batches; 32 experts per rank
time      of `balance/gpu_elastic.py`: balanced and hot routing against plain layers
trace     of the same: 240 steps whose popular experts change; with --counts they are recorded layers'

At the end: the exchange beside what others published at EP8 and the targets. With more ranks than GPUs ranks take turns
on them, which only shows that all runs. Parts that fail or find no time say so, and the exit status is 1.
FILE is JSON as `bywash.routing.counts.load_counts` reads it, layers of 256 experts.
"""

import argparse
import json
import statistics
import tempfile
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.balance import gpu_elastic, gpu_elastic_parts
from benchmarks.exchange import peer_exchange
from benchmarks.pipeline import gpu_compile, gpu_overlap
from benchmarks.rank_processes import GRACE_S, RankProcesses, least_left_s
from benchmarks.skewed_ids import counts_for
from tests.exchange import elastic_steps, peer_steps

from bywash.balance import Limits, Placement
from bywash.exchange.group import Group
from bywash.exchange.peer_elastic import elastic_layout
from bywash.exchange.peer_layout import PeerLayout
from bywash.kernels.compile import compile_kernels
from bywash.kernels.plan import compile_plan

SHARE_S = {"checks": 40, "exchange": 55, "recorded": 55, "overlap": 120, "time": 95, "trace": 65}
"""Of the budget, relative to the others that run."""
LAST_S = 2.0
"""Kept for the summary."""
EXCHANGE = {"experts": 18, "top_k": 4, "hidden": 264, "dtype": "bfloat16", "tokens": 40}
ELASTIC = {"experts": 20, "top_k": 3, "hidden": 136, "dtype": "bfloat16", "tokens": 60, "slots": 2, "layers": 2}
CHECKS = {
    "exchange, exact": (peer_steps.random_steps, {**EXCHANGE, "mode": "exact"}),
    "exchange, stable": (peer_steps.random_steps, {**EXCHANGE, "mode": "stable"}),
    "exchange, fast, fp8": (peer_steps.random_steps, {**EXCHANGE, "mode": "fast", "fp8": "amax"}),
    "elastic, stable": (elastic_steps.elastic_steps, {**ELASTIC, "mode": "stable", "limits": Limits()}),
    "elastic, exact": (elastic_steps.elastic_steps, {**ELASTIC, "mode": "exact", "limits": Limits()}),
    "elastic, fast": (elastic_steps.elastic_steps, {**ELASTIC, "mode": "fast", "limits": Limits()}),
}
PUBLISHED = {
    ("dispatch fp8 amax", 4096): (500, 360, 360 / 0.8),
    ("combine fast/stable", 4096): (973, 698, 698 / 0.8),
    ("dispatch fp8 amax", 128): (37, 11, 40),
    ("combine fast/stable", 128): (59, 22, 40),
}
"""Microseconds at EP8 on Hopper, hidden 7168, top-8 of 256: the best published, the wire's floor at 390 GB/s, our
target (80 % of that floor at 4,096 tokens)."""


def run_checks(rank, store_path, start, options):
    """As many kinds of `CHECKS` as there is time for; a step that is wrong ends the part."""
    until, gpus = start.get(timeout=600.0), torch.cuda.device_count()
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, options.ranks)
    group = Group(rank=rank, ranks=options.ranks, store=store, deadline_s=10.0)
    longest_s = 2.0
    for name, (function, config) in CHECKS.items():
        if least_left_s(until) < longest_s:
            if rank == 0:
                print(f"  left out for lack of time: {name}", flush=True)
            continue
        began = time.monotonic()
        function(group, gpus, config, options.steps, 500)
        longest_s = max(longest_s, time.monotonic() - began)
        dist.barrier()
        if rank == 0:
            print(f"  {name}: {options.steps} steps right ({time.monotonic() - began:.1f} s)", flush=True)


def parts_of(options):
    """Name to (function, its arguments), in order; `RankProcesses` gives them rank, store and start before."""
    small, common = options.small, {"ranks": options.ranks, "out": options.out, "small": options.small}
    exchange = {**common, "brief": True, "tune": False, "wire_gbytes_per_s": 390.0}
    exchange |= {
        "rounds": 1 if small else 20,
        "calls": 4 if small else 10,
        "tokens": [512, 128] if small else [4096, 128],
    }
    exchange["baselines"] = not small and options.ranks <= torch.cuda.device_count()
    overlap = Namespace(**common, rounds=1 if small else 4, layers=options.layers, variants=[])
    elastic = Namespace(**common, counts=options.counts)
    return {
        "checks": (run_checks, Namespace(**common, steps=6 if small else 40)),
        "exchange": (peer_exchange.run_rank, Namespace(**exchange, counts=None)),
        "recorded": (peer_exchange.run_rank, Namespace(**exchange, counts=options.counts)),
        "overlap": (gpu_overlap.run_rank, "A", overlap),
        "time": (gpu_elastic.run_rank, elastic, "time"),
        "trace": (gpu_elastic.run_rank, elastic, "trace"),
    }


def jobs_of(options, arch):
    """What to compile: name to a function of no arguments, the longest first."""
    ranks, experts, slots = options.ranks, peer_exchange.EXPERTS, gpu_elastic_parts.SIZES.slots
    overlap = gpu_compile.names_for(["A"], ranks, small=options.small)
    jobs = {name: partial(gpu_compile.compile_job, name) for name in overlap}
    shapes = [*peer_exchange.shapes_for(ranks), *check_shapes(ranks)]
    large = {"top_k": 8, "tokens": 4096, "hidden": peer_exchange.HIDDEN, "dtype": torch.bfloat16}
    home_E = Placement.equal(experts, ranks).home_E
    for mode, room in [*((mode, slots) for mode in ("stable", "fast", "exact")), ("stable", 16), ("fast", 16)]:
        shapes.append(elastic_layout(home_E, ranks=ranks, slots=room, combine_mode=mode, **large).kernel_shape())
    jobs |= {f"{shape}": partial(compile_kernels, shape, arch) for shape in shapes}
    plans = [(experts, slots), (experts, 16), (ELASTIC["experts"], ELASTIC["slots"])]
    return jobs | {f"plan {e} {s}": partial(compile_plan, ranks, e, s, arch) for e, s in plans}


def check_shapes(ranks):
    """Of `CHECKS`."""
    found = []
    for _, config in CHECKS.values():
        mode, experts = config["mode"], config["experts"]
        sizes = {"ranks": ranks, "top_k": config["top_k"], "tokens": config["tokens"], "hidden": config["hidden"]}
        sizes["dtype"] = getattr(torch, config["dtype"])
        if "slots" in config:
            home_E = Placement.equal(experts, ranks).home_E
            layout = elastic_layout(home_E, slots=config["slots"], combine_mode=mode, **sizes)
        else:
            layout = PeerLayout(experts=experts, exact=mode == "exact", fp8=config.get("fp8", "off"), **sizes)
        found.append(layout.kernel_shape())
    return found


def compile_all(jobs):
    """All into the cache; what fails here fails again, and says so, in the part that needs it."""
    began, last = time.monotonic(), ""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(job): name for name, job in jobs.items()}
        for done in as_completed(waiting):
            last = waiting[done]
            if done.exception():
                print(f"not compiled: {last}: {done.exception()}", flush=True)
    print(f"{len(jobs)} kernels after {time.monotonic() - began:.0f} s, the last {last}", flush=True)


def run_parts(options, last):
    """Each in its share, what earlier ones left included. Returns the names of those that failed."""
    found = parts_of(options)
    names, failed = [name for name in options.parts if name in found], []
    waiting = RankProcesses(names[0], options.ranks, *found[names[0]])
    compile_all(jobs_of(options, "sm_{}{}".format(*torch.cuda.get_device_capability())))
    until = time.monotonic()
    unit = max(0.0, last - GRACE_S - until) / sum(SHARE_S[name] for name in names)
    for number, name in enumerate(names):
        current, following = waiting, names[number + 1 : number + 2]
        waiting = RankProcesses(following[0], options.ranks, *found[following[0]]) if following else None
        until += unit * SHARE_S[name]
        print(f"\n===== {name}, share {until - time.monotonic():.0f} s", flush=True)
        if not current.run(until, min(until + GRACE_S, last)):
            failed.append(name)
    return failed


def summary(options):
    """The exchange beside what was published, the floor and the targets; the other parts' tables are above."""
    print(f"\n===== EP{options.ranks} beside EP8 as published (Hopper, hidden 7168, top-8 of 256), microseconds")
    heads = ("routing", "median", "published", "x", "floor here", "of it", "floor EP8", "target", "")
    print(f"{'':34}" + "".join(f"{head:>11}" for head in heads))
    for routing in ("uniform", "recorded"):
        path = Path(options.out, f"exchange-{routing}.json")
        results = json.loads(path.read_text())["tokens"] if path.exists() else {}
        for (name, tokens), (published_us, floor_us, target_us) in PUBLISHED.items():
            result = results.get(str(tokens), {"us": {}})
            if name in result["us"]:
                us = statistics.median(result["us"][name])
                here_us = result["wire_bytes"][peer_exchange.limit_of(name)] / 390e3
                verdict = "met" if us <= target_us else "missed"
                if options.ranks != 8:
                    verdict = "not EP8"
                cells = (routing, f"{us:.1f}", published_us, f"{published_us / us:.2f}", f"{here_us:.1f}")
                cells += (f"{here_us / us:.2f}", floor_us, f"{target_us:.0f}", verdict)
                print(f"{name + f', {tokens} tokens':34}" + "".join(f"{cell:>11}" for cell in cells))
            else:
                print(f"{name + f', {tokens} tokens':34}{routing:>11}  not measured")


def choose_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=0, help="by default one on every GPU")
    parser.add_argument("--counts", help="recorded counts of layers of 256 experts")
    parser.add_argument("--out", help="a folder for figures as JSON")
    parser.add_argument("--budget-s", type=float, default=570.0, help="of the whole script, seconds")
    parser.add_argument("--layers", type=int, default=8, help="of the overlap's stack (gpu_overlap has 16)")
    parser.add_argument("--parts", nargs="+", default=list(SHARE_S), choices=SHARE_S)
    parser.add_argument("--small", action="store_true", help="few steps and rounds: does everything run?")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    options.ranks = options.ranks or gpus
    options.out = options.out or tempfile.mkdtemp()
    if not options.counts and "recorded" in options.parts:
        options.parts.remove("recorded")
        print("no --counts: recorded skew is left out, and the trace's topics are drawn from Zipf's law", flush=True)
    if options.counts:
        counts_for(options.counts, peer_exchange.EXPERTS)
    if not options.parts:
        raise SystemExit("--parts: nothing to run; 'recorded' needs --counts")
    peer_exchange.check_ranks(options.ranks, gpus)
    return options


def main():
    began, options = time.monotonic(), choose_options()
    name = torch.cuda.get_device_name()
    print(f"EP{options.ranks} on {torch.cuda.device_count()} x {name}, torch {torch.__version__}", flush=True)
    failed = run_parts(options, began + options.budget_s - LAST_S)
    summary(options)
    print(
        f"{'failed: ' + ', '.join(failed) if failed else 'all parts ran'}; {time.monotonic() - began:.0f} s of ", end=""
    )
    print(f"{options.budget_s:.0f}", flush=True)
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
