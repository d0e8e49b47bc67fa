"""The exchange between GPUs of several hosts (`NodeDevice`), on two GPUs that play two hosts: checks, then times.

    PYTHONPATH=src:. python benchmarks/exchange/node_exchange.py                       # all, about 100 s on two H200
    PYTHONPATH=src:. python benchmarks/exchange/node_exchange.py --only times --ways memory

Checks, each a line: random steps in every mode, CUDA graphs with counts on the device, full steps bit for bit the same
as through `PeerDevice`, mistakes, a lost host, two hosts of two ranks. Times: one dispatch and combine without experts,
eager and as a graph, beside plain `all_to_all_single` of the same bytes in the same run. The wire is what NCCL is left
with: `sockets` over the loopback interface (hosts for NCCL too), or `memory` of the host (a stand-in for one 200 Gb/s
NIC). Real: NCCL, its sends and receives, both GPUs. Not real: a second machine and its NIC.

Not NVLink: that is `peer`'s, inside a host. NCCL has other code there for registered buffers, and with it the first
step of 235 MB gave no answer within 60 s (NCCL 2.28.9; not looked into).
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.exchange.device_checks import answers_within
from tests.exchange import node_steps
from tests.ranks import RankPool

from bywash.exchange.node_layout import node_capacity

SMALL = {"experts": 12, "top_k": 3, "hidden": 512, "dtype": "bfloat16", "tokens": 200, "capacity": 64}
REAL = {"experts": 256, "top_k": 8, "hidden": 7168, "dtype": "bfloat16"}
WAYS = {"sockets": {}, "memory": {"NCCL_P2P_DISABLE": "1"}}


def real(tokens, mode, ranks=2):
    return {**REAL, "mode": mode, "tokens": tokens, "capacity": node_capacity(tokens, 8, 256, ranks)[0]}


def checks():
    """Name to (ranks' hosts, deadline in seconds, config, function, arguments, whether the answers are right)."""
    found = {}
    for mode in ("exact", "stable", "fast"):
        config = {**SMALL, "mode": mode}
        found[f"steps {mode}"] = ("ab", 5, config, node_steps.random_steps, (30, 1000), lambda a: min(a) >= 1)
        found[f"graph {mode}"] = ("ab", 5, config, node_steps.padded_steps, (20, 2000), lambda a: min(a) >= 1)
        full = real(1024 if mode == "exact" else 4096, mode)
        found[f"as peer {mode}"] = ("ab", 10, full, node_steps.same_bits_as_peer, (3000,), lambda a: a == [0, 0])
    config = {**SMALL, "mode": "fast"}
    found["too few waves"] = ("ab", 5, config, node_steps.too_few_waves, (), lambda a: a == [[4, 4]] * 2)
    for how in ("plan", "expert", "tokens"):
        found[f"mistake {how}"] = ("ab", 3, config, node_steps.fail_on_purpose, (how,), lambda a: all(a) and named(a))
    for mode in ("exact", "fast"):
        config = {**SMALL, "mode": mode, "tokens": 20, "capacity": 8}
        found[f"2 x 2 {mode}"] = ("aabb", 60, config, node_steps.random_steps, (5, 4000), lambda a: min(a) >= 1)
    return found


def named(answers):
    print(f"  {answers}", flush=True)
    return answers[1][0] != "no error" and answers[0][2] == [1]


def run_check(name, names, deadline_s, config, function, arguments, judge, pools):
    """One line; pools of rank processes are kept while nothing goes wrong in them."""
    key = (len(names), deadline_s)
    if key not in pools or not pools[key].healthy:
        pools[key] = RankPool(len(names), deadline_s=deadline_s)
    began, good, why = time.monotonic(), False, ""
    try:
        answers = answers_within(pools[key], node_steps.on_gpus, (names, config, function, *arguments), 45)
        good, why = judge(answers), "" if "mistake" in name else f"{answers}"[:200]
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if not good or "mistake" in name:
        pools[key].close()
    print(f"{'ok  ' if good else 'FAIL'} {name:20} {time.monotonic() - began:6.1f} s {why}", flush=True)
    return good


def lost_host():
    pool = RankPool(2, deadline_s=3.0)
    began = time.monotonic()
    try:
        pool.send(node_steps.on_gpus, [("ab", {**SMALL, "mode": "fast"}, node_steps.lose_the_other_host)] * 2)
        answer = pool.receive(0, 45)
        good = not isinstance(answer, Exception) and (answer[0], answer[1], answer[4]) == ("RankLostError", [1], 1000.0)
    except Exception as error:
        answer, good = error, False
    pool.close()
    print(f"{'ok  ' if good else 'FAIL'} {'lost host':20} {time.monotonic() - began:6.1f} s {answer}", flush=True)
    return good


class Plain:
    """`all_to_all_single` of the bytes that one step of `NodeDevice` puts on the wire: rows out, outputs back."""

    def __init__(self, device, group):
        layout, self.group = device.node, group
        slots, row = layout.slots(layout.waves), layout.hidden * layout.dtype.itemsize
        sizes = (slots * (row + 8 * layout.top_k), slots * row * layout.outputs)
        where = {"dtype": torch.uint8, "device": device.wire.device}
        self.parts = [tuple(torch.zeros(size, **where) for _ in range(2)) for size in sizes]
        self.splits = [[0 if rank == device.rank else size for rank in range(device.ranks)] for size in sizes]

    def __call__(self):
        for (sent, got), splits in zip(self.parts, self.splits, strict=True):
            dist.all_to_all_single(got, sent, splits, splits, group=self.group)


def time_steps(group, way, tokens, mode, rounds, register):
    """What `in_turn` says of ours and of plain all-to-all, eager and as graphs; and facts about the run."""
    if way == "sockets":
        node_steps.play_host(group.rank)
    os.environ.update(WAYS[way])
    device, _, _ = node_steps.open_device(group, "ab", real(tokens, mode), register=register)
    layout, wire = device.node, device.wire
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(tokens, layout.hidden, generator=generator).bfloat16().cuda()
    ids = torch.rand(tokens, layout.experts, generator=generator).topk(layout.top_k).indices.contiguous().cuda()
    weights = torch.rand(tokens, layout.top_k, generator=generator).cuda()
    count = torch.full((1,), tokens, dtype=torch.int32).cuda()
    y = torch.randn(1024, layout.hidden, generator=generator).bfloat16().cuda()
    y = y.repeat(-(-device.layout.places * device.layout.top_k // 1024), 1)  # as many as could ever be computed here

    def step():
        device.dispatch(x, ids, weights, tokens=count)
        device.combine(y)

    plain = Plain(device, wire.group)
    ways = {"plain": plain, "ours, eager": step}
    facts = {"registered": wire.registered, "MB each way": layout.wire_bytes(layout.waves) / 1e6}
    step()
    device.check()
    times = in_turn(group, ways, rounds)
    if group.rank == 0:  # said now: capturing may fail in ways that end the process
        medians = {name: round(statistics.median(us)) for name, us in times.items()}
        print(f"  before capturing, us: {medians}", flush=True)
    try:
        for name, call in (("ours, graph", step), ("plain, graph", plain)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                call()
            ways[name] = graph.replay
        times = in_turn(group, ways, rounds)
    except RuntimeError as error:
        facts["graph"] = f"{type(error).__name__}: {error}"[:500]
    device.check()
    device.close()
    return times, facts


def in_turn(group, ways, rounds):
    """Microseconds of a call of the slower rank, by name, round by round."""
    times = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, call in ways.items():
            group.share("ready", "timing")
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                call()
            end.record()
            end.synchronize()
            everyone = [json.loads(text) for text in group.share(str(begin.elapsed_time(end) / 3 * 1e3), "timing")]
            times[name].append(max(everyone))
    return {name: values[2:] for name, values in times.items()}


def run_times(way, options, found):
    """A line for each way to make the step, by size; names of those that failed."""
    bad, pool = [], RankPool(2, deadline_s=20.0)
    for tokens, mode in ((4096, "fast"), (128, "fast"), (512, "exact")):
        name = f"{way} {tokens} {mode}"
        try:
            arguments = (way, tokens, mode, options.rounds, options.register)
            times, facts = answers_within(pool, time_steps, arguments, 60)[0]
        except Exception:
            print(f"FAIL times {name}:\n{traceback.format_exc(limit=-3)}"[:2500], flush=True)
            bad.append(name)
            pool.close()
            pool = RankPool(2, deadline_s=20.0)
            continue
        found[name] = {"us": times, **facts}
        print(f"{name}: {facts}")
        base = statistics.median(times["plain"])
        for what, values in times.items():
            middle, spread = statistics.median(values), f"({min(values):.1f} to {max(values):.1f})"
            rate = facts["MB each way"] / middle * 1e3
            print(f"  {what:14} {middle:10.1f} us {spread}, {rate:.2f} GB/s each way, {middle / base:.2f} of plain")
        sys.stdout.flush()
    pool.close()
    return bad


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of what to run")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--no-register", dest="register", action="store_false", help="leave buffers unregistered")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin nothing later than this")
    parser.add_argument("--out", help="a folder for all timings as JSON")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("needs two CUDA devices")
    ends = time.monotonic() + options.budget_s
    versions = f"torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}"
    print(f"2 x {torch.cuda.get_device_name()}, {versions}", flush=True)
    bad, pools, found = [], {}, {}
    stages = [(name, functools.partial(run_check, name, *check, pools)) for name, check in checks().items()]
    times = [(f"times {way}", functools.partial(run_times, way, options, found)) for way in options.ways]
    first = [stage for stage in stages if not stage[0].startswith(("graph", "mistake", "2 x 2"))]
    for name, stage in (*first, *times, ("lost host", lost_host), *(s for s in stages if s not in first)):
        if options.only and not any(part in name for part in options.only):
            continue
        if time.monotonic() > ends:
            print(f"left out for lack of time: {name}")
            bad.append(name)
            continue
        answer = stage()
        bad += answer if isinstance(answer, list) else [] if answer else [name]
    for pool in pools.values():
        pool.close()
    if options.out:
        Path(options.out, "node_exchange.json").write_text(json.dumps(found))
    print(f"{len(bad)} failed: {bad}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
