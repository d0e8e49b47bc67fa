"""Overlap on GPUs of one host: every split of the step, on NVLink, through host memory and over NCCL, beside baselines.

    PYTHONPATH=src:. python benchmarks/pipeline/gpu_overlap.py --budget-s 185 --out DIR

A  NVLink, 64 experts, 8,192 tokens per rank, 16 layers     C   through host memory, 12 layers
A2 the same with 16,384 tokens                              C2  NCCL with P2P off, 12 layers
B  NVLink, 256 experts, 4,096 tokens: does splitting pay?   D   NCCL over sockets (P2P, SHM, IB off), eager
E  decode: 128 tokens, 16 experts, host time per replay     S   soak with random sizes and delays
Z  as A, with weights of 0: not bound by power

A layer is norm, attention (64 heads over 8 of keys, size 128), norm, router, routed experts, shared expert; baselines
have the same stages in plain torch around an exchange by NCCL. S, A2 and Z run only when asked for.
Experts are for two ranks; with --ranks N there are N / 2 times as many, so that a rank holds as many as here.

Definitions. *Compute-only*: the same graph with nothing moved: kernels run on rows that an earlier step left.
*Exposed*: step less compute-only. *Hidden*, from the profile of one replay: the share of the time in which rows or
sums travel during which a kernel runs: of routed experts, of experts or attention or shared expert, or any at all.
*MFU*: all products (experts, shared expert, attention) over the dense rate, both measured in this run. Times
are the slower rank's, medians over rounds that take turns between all variants. Each part runs in processes of its own
and cannot spoil another; it has a share of the budget, what earlier parts left over included, begins with what matters
most, and says what it leaves out. While a part runs, the next one's processes import torch.
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

from benchmarks.rank_processes import GRACE_S, RankProcesses

P2P_OFF = {"NCCL_P2P_DISABLE": "1"}
ENVIRONMENT = {
    "A": {},
    "Z": {},
    "A2": {},
    "C": P2P_OFF,
    "E": {},
    "C2": P2P_OFF | {"NCCL_MAX_NCHANNELS": "8"},
    "B": {},
    "D": P2P_OFF | {"NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
    "S": {},
}
SHARE_S = {"A": 65, "Z": 65, "A2": 60, "C": 45, "E": 32, "C2": 50, "B": 25, "D": 20, "S": 20}
"""Of the budget, relative to the others that run."""


def run_rank(rank, store_path, start, part, options):
    """One rank of one part. Torch is imported here, after the environment is set, and then `start` awaited."""
    os.environ.update(ENVIRONMENT[part])
    from benchmarks.pipeline import gpu_parts

    options.until = start.get(timeout=600.0)
    options.began = time.monotonic()
    gpu_parts.run(part, rank, store_path, options)


def compile_one(job):
    """In a process of its own: one kernel into the cache, so that no part waits for several in turn."""
    began = time.monotonic()
    from benchmarks.pipeline.gpu_compile import compile_job

    compile_job(job)
    return f"{job} {time.monotonic() - began:.0f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts", nargs="+", default=[p for p in ENVIRONMENT if p not in ("S", "A2", "Z")], choices=list(ENVIRONMENT)
    )
    parser.add_argument("--out", help="a folder for results and timelines")
    parser.add_argument("--ranks", type=int, default=2, help="one on each GPU; with fewer GPUs they take turns")
    parser.add_argument("--budget-s", type=float, default=240.0, help="of the whole script, seconds")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--layers", type=int, default=0, help="instead of each part's own number")
    parser.add_argument("--soak", type=int, default=60, help="steps of each round")
    parser.add_argument("--small", action="store_true", help="tiny sizes: does everything run?")
    parser.add_argument("--variants", nargs="*", default=[], help="only those whose name contains one of these")
    options = parser.parse_args()
    run_all(options, time.monotonic())


def run_all(options, began):
    parts, last = options.parts, began + options.budget_s
    waiting = RankProcesses(parts[0], options.ranks, run_rank, parts[0], options)
    compile_all(options)
    unit = (last - time.monotonic()) / sum(SHARE_S[part] for part in parts)
    until = time.monotonic()
    for number, part in enumerate(parts):
        current, more = waiting, parts[number + 1 :]
        waiting = RankProcesses(more[0], options.ranks, run_rank, more[0], options) if more else None
        until += unit * SHARE_S[part]
        print(f"\n===== part {part} {ENVIRONMENT[part] or ''}, share {until - time.monotonic():.0f} s", flush=True)
        good = current.run(min(until, last - 2.0), min(until + GRACE_S, last))
        if part == "S" and not good:
            print("the soak failed: times of what is wrong are of no use; stopped", flush=True)
            break
    print(f"whole script {time.monotonic() - began:.0f} s of {options.budget_s:.0f} s", flush=True)


def compile_all(options):
    """The kernels of all parts at once; what fails here fails again, and says so, in the part that needs it."""
    if options.small:
        return
    from benchmarks.pipeline.gpu_compile import names_for

    began, names = time.monotonic(), names_for(options.parts, options.ranks)
    with ProcessPoolExecutor(len(names), mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_one, name) for name in names]:
            try:
                print("compiled", future.result(timeout=60.0), flush=True)
            except Exception as error:
                print(f"not compiled: {type(error).__name__}: {error}", flush=True)
    print(f"kernels after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
