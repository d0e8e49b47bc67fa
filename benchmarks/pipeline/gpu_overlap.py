"""Overlap on two GPUs: every split of the step, on NVLink, through the host's memory and over NCCL, beside baselines.

    PYTHONPATH=src:. python benchmarks/pipeline/gpu_overlap.py --budget-s 185 --out DIR

A  NVLink, 64 experts, 8,192 tokens per rank, 16 layers     C   through host memory, 12 layers
A2 the same with 16,384 tokens                              C2  NCCL with P2P off, 12 layers
B  NVLink, 256 experts, 4,096 tokens: does splitting pay?   D   NCCL over sockets (P2P, SHM, IB off), eager
E  decode: 128 tokens, 16 experts, host time per replay     S   soak with random sizes and delays
Z  as A, with weights of 0: not bound by power

A layer is norm, attention (64 heads over 8 of keys, size 128), norm, router, routed experts, shared expert; baselines
have the same stages in plain torch around an exchange by NCCL. S, A2 and Z run only when asked for.

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
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

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
GRACE_S = 8.0
"""How long a part may overrun its share to print what it has."""


def run_rank(rank, part, store_path, options, start):
    """One rank of one part. Torch is imported here, after the environment is set, and then `start` awaited."""
    os.environ.update(ENVIRONMENT[part])
    try:
        from benchmarks.pipeline import gpu_parts

        options.until = start.get(timeout=600.0)
        options.began = time.monotonic()
        gpu_parts.run(part, rank, store_path, options)
    except BaseException:
        print(f"part {part}, rank {rank} failed:\n{traceback.format_exc(limit=-6)}", flush=True)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # NCCL's and the driver's teardown order differs between versions


class Part:
    """Two rank processes, which wait for `run`."""

    def __init__(self, name, options):
        context, store_path = multiprocessing.get_context("spawn"), tempfile.mktemp()
        self.name, self._starts = name, [context.Queue() for _ in range(2)]
        self._ranks = [
            context.Process(target=run_rank, args=(rank, name, store_path, options, start), daemon=True)
            for rank, start in enumerate(self._starts)
        ]
        for process in self._ranks:
            process.start()

    def run(self, until, end):
        """Let it begin nothing new after `until`; end what is left at `end`. Monotonic clock. Whether both ranks ended
        well."""
        began = time.monotonic()
        print(f"\n===== part {self.name} {ENVIRONMENT[self.name] or ''}, share {until - began:.0f} s", flush=True)
        for start in self._starts:
            start.put(until)
        for process in self._ranks:
            process.join(max(0.1, end - time.monotonic()))
        for process in self._ranks:
            if process.is_alive():
                print(f"part {self.name}: a rank is not done after {end - began:.0f} s; ended", flush=True)
                process.kill()
                process.join()
        exits = [process.exitcode for process in self._ranks]
        print(f"===== part {self.name}: {time.monotonic() - began:.0f} s, exits {exits}", flush=True)
        return exits == [0, 0]


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
    waiting = Part(parts[0], options)
    compile_all(options)
    unit = (last - time.monotonic()) / sum(SHARE_S[part] for part in parts)
    until = time.monotonic()
    for number, part in enumerate(parts):
        current, more = waiting, parts[number + 1 :]
        waiting = Part(more[0], options) if more else None
        until += unit * SHARE_S[part]
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

    began, names = time.monotonic(), names_for(options.parts)
    with ProcessPoolExecutor(len(names), mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_one, name) for name in names]:
            try:
                print("compiled", future.result(timeout=60.0), flush=True)
            except Exception as error:
                print(f"not compiled: {type(error).__name__}: {error}", flush=True)
    print(f"kernels after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
