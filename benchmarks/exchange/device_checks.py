"""Correctness of `peer` on GPUs beyond what the default tests run: one line for each check.

    PYTHONPATH=src:. python benchmarks/exchange/device_checks.py            # all, about 5 minutes on two H200
    PYTHONPATH=src:. python benchmarks/exchange/device_checks.py --only EP8 soak --budget-s 100

Random steps against an oracle on the CPU, bit for bit, every buffer poisoned (tests/exchange/peer_steps.py): many
shapes, real sizes, more ranks than GPUs, thousands of steps; faults that must be noticed; memcheck, where
compute-sanitizer is installed. With --only, in the order of its words. Ends with status 1 if a check fails or was left
out for lack of time; nothing goes on for more than a few seconds after --budget-s.
"""

import argparse
import functools
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tests.exchange import peer_steps
from tests.exchange.test_peer import CONFIGS
from tests.ranks import RankPool

REAL = {"experts": 256, "top_k": 8, "hidden": 7168, "dtype": "bfloat16", "tokens": 4096}
MANY = {"experts": 18, "top_k": 4, "hidden": 264, "dtype": "bfloat16", "tokens": 40}
LONG = {"experts": 12, "top_k": 2, "hidden": 72, "dtype": "bfloat16", "tokens": 3000}
TINY = {"experts": 5, "top_k": 2, "hidden": 24, "dtype": "bfloat16", "tokens": 12}
LONGEST_CHECK_S, LAST_CHECK_S = 90, 10  # of a check, and of one that begins when the budget ends


def steps(devices, config, count, seed=1000):
    return peer_steps.random_steps, (devices, config, count, seed)


def fine(_):
    return True


def many_ranks(gpus):
    """More ranks than GPUs, on one GPU where there are not enough: there they take turns by time slice."""
    found = {}
    for ranks, count in ((4, 100), (8, 50)):
        devices = ranks if gpus >= ranks else 1
        for mode in ("exact", "stable"):
            config = {**MANY, "mode": mode, "num_sms": 64 // ranks}
            found[f"EP{ranks} {mode}, GPUs: {devices}"] = (ranks, 60, *steps(devices, config, count), fine)
    return found


def checks(gpus):
    """Name to (ranks, deadline in seconds, function, arguments, whether the answer is right)."""
    devices = min(2, gpus)
    found = {name: (2, 10, *steps(devices, config, 30), fine) for name, config in CONFIGS.items()}
    for mode in ("exact", "stable"):
        for sms in (0, 1, 60):
            config = {**LONG, "mode": mode, "num_sms": sms}
            found[f"long {mode}, {sms or 'default'} SMs"] = (2, 10, *steps(devices, config, 12), fine)
        found[f"real size {mode}"] = (2, 20, *steps(devices, {**REAL, "mode": mode}, 2), fine)
        found[f"EP3 {mode}"] = (3, 20, *steps(devices, {**MANY, "mode": mode}, 30), fine)
        found[f"graph {mode}"] = (2, 10, peer_steps.graph_replays, (devices, {**LONG, "mode": mode}, 60, 7000), fine)
    found.update(many_ranks(gpus))
    for options in ({}, {"mode": "reduce-overhead"}):
        run_compiled = functools.partial(peer_steps.compiled_layers, **options)
        found[f"compiled {options}"] = (2, 60, run_compiled, (devices, {**MANY, "mode": "stable"}, 8, 8000), fine)
    found["real size fp8"] = (2, 20, *steps(devices, {**REAL, "mode": "fast", "fp8": "amax"}, 2), fine)
    for how in ("plan", "tokens", "expert", "capacity"):
        arguments = (peer_steps.fail_on_purpose, (devices, how))
        found[f"mistake {how}"] = (2, 5, *arguments, lambda answers: all(kind != "no error" for kind, _ in answers))
    for fault, what in ((0, "none"), (1, "release"), (2, "wait for outputs"), (3, "wait for rows")):
        arguments = (peer_steps.count_wrong_steps, (devices, fault, 400))
        found[f"left out: {what}"] = (2, 5, *arguments, wrong_if(fault))
    watched = {**TINY, "mode": "stable", "fp8": "amax", "num_sms": 4}
    found["watched by memcheck"] = (2, 60, *steps(devices, watched, 8), fine)
    found["soak stable"] = (2, 20, *steps(devices, {**TINY, "mode": "stable"}, 5000, 100_000), fine)
    found["soak exact fp8"] = (2, 20, *steps(devices, {**TINY, "mode": "exact", "fp8": "amax"}, 5000, 200_000), fine)
    return found


def wrong_if(fault):
    def judge(answers):
        most = max(wrong for wrong, _ in answers)
        print(f"  {most} of 400 steps wrong, {[str(failure)[:60] for _, failure in answers]}")
        return most == 0 if fault == 0 else most > 0

    return judge


def answers_within(pool, function, arguments, seconds):
    """As `RankPool.run`, within a time; with an error come all that ranks have said by then."""
    pool.send(function, [arguments] * pool.ranks)
    ends, said = time.monotonic() + seconds, []
    for rank in range(pool.ranks):
        try:
            said.append(pool.receive(rank, max(1.0, ends - time.monotonic())))
        except TimeoutError as late:
            said.append(late)
        except (EOFError, OSError):
            said.append(RuntimeError("its process is gone"))
    wrong = [f"rank {r}: {type(a).__name__}: {str(a)[-700:]}" for r, a in enumerate(said) if isinstance(a, Exception)]
    if wrong:
        raise RuntimeError("\n  ".join(wrong))
    return said


def run(name, ranks, deadline_s, function, arguments, judge, pools, seconds):
    """One line; pools of rank processes are kept while nothing goes wrong in them."""
    pool = pools.get((ranks, deadline_s))
    if pool is None or not pool.healthy:
        pool = pools[ranks, deadline_s] = RankPool(ranks, deadline_s=deadline_s)
    began, good, why = time.monotonic(), False, ""
    try:
        good = judge(answers_within(pool, function, arguments, seconds))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if not good or "mistake" in name or "left out" in name:
        pool.close()
    print(f"{'ok  ' if good else 'FAIL'} {name:28} {time.monotonic() - began:6.1f} s {why}", flush=True)
    return good


def memcheck(left_s):
    """A small check again under compute-sanitizer, within `left_s` seconds."""
    places = [shutil.which("compute-sanitizer"), *glob.glob("/usr/local/cuda*/bin/compute-sanitizer")]
    tool = next((place for place in places if place), None)
    if tool is None:
        print("skip memcheck: compute-sanitizer is not installed")
        return True
    if left_s < 30:
        print("left out for lack of time: memcheck")
        return False
    # cuda-bindings asks the driver for functions that it may not have: errors of the API are not what is looked for.
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--target-processes", "all"]
    command += ["--error-exitcode", "7", sys.executable]
    command += [__file__, "--only", "watched", "--no-memcheck"]
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("w") as output:
        # A session of its own: ranks that the tool started end with it, and none keeps a pipe open.
        done = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = done.wait(min(left_s, LONGEST_CHECK_S))
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, signal.SIGKILL)
            code = "none: out of time"
        lines = Path(output.name).read_text(errors="replace").splitlines()
    print(f"{'ok  ' if code == 0 else 'FAIL'} memcheck (exit {code}), {time.monotonic() - began:.0f} s")
    faults = dict.fromkeys(line for line in lines if line.startswith("========= ") and "Frame" not in line)
    print("\n".join(line for line in faults if code != 0 or "ERROR SUMMARY" in line)[:3000])
    return code == 0


def chosen(found, only, skip):
    """Names of the checks to run, in the order of `only`."""
    names = [name for part in only for name in found if part in name] if only else list(found)
    return [name for name in dict.fromkeys(names) if not any(part in name for part in skip)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of the checks to run")
    parser.add_argument("--skip", nargs="+", default=[], help="parts of the names of those to leave out")
    parser.add_argument("--no-memcheck", action="store_true")
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no check later than this")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        raise SystemExit("needs a CUDA device")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # two small kernels: no crowd of compilers
    pools, bad, ends = {}, [], time.monotonic() + options.budget_s
    found = checks(gpus)
    for name in chosen(found, options.only, options.skip):
        left_s = ends - time.monotonic()
        if left_s < 0:
            print(f"left out for lack of time: {name}")
            bad.append(name)
        elif not run(name, *found[name], pools, min(LONGEST_CHECK_S, left_s + LAST_CHECK_S)):
            bad.append(name)
    for pool in pools.values():
        pool.close()
    if not options.no_memcheck and not memcheck(ends - time.monotonic()):
        bad.append("memcheck")
    print(f"{len(bad)} failed: {bad}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
