"""DeepEP's interface and the serving engines' exchange on GPUs: correctness, line by line, then times.

    PYTHONPATH=src:. python benchmarks/exchange/deepep_checks.py --json out.json      # under a minute on two H200

The checks are the CPU tests' own (tests/exchange/deepep_steps.py), bit for bit, then the real size, then mistakes that
must come back as errors. Times are medians over steps on two GPUs, in microseconds, with the face's cost over that of
`PeerDevice` for the same rows: packing ids and weights beside the rows, and copying rows out of the heap, as DeepEP
does. Ends with status 1 if a check fails.
"""

import argparse
import json
import statistics
import sys
import time
import traceback

import numpy as np
import torch
from tests.exchange import deepep_steps
from tests.exchange.deepep_steps import Case
from tests.exchange.test_deepep import CASES
from tests.ranks import RankPool
from tests.serving import exchange_steps

import bywash.deepep as deep_ep
from bywash.errors import BywashError
from bywash.exchange.fp8_rows import quantise_rows
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout

EXPERTS, TOP_K, HIDDEN = 256, 8, 7168
BELOW, BELOW_GRAPH = "PeerDevice: dispatch + combine of pairs", "PeerDevice in a CUDA graph"
WIRE_GBPS = 390  # copy-engine peer write of the machine that docs/benchmarks.md describes


def made(rank, tokens):
    """One rank's rows and routing, the same on every GPU."""
    generator = torch.Generator(device="cuda").manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=generator, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=generator, device="cuda").argsort(dim=1)[:, :TOP_K].contiguous()
    return x, ids, torch.rand(tokens, TOP_K, generator=generator, device="cuda")


def median_us(group, run, steps=30):
    """Median over steps; ranks meet before, streams are drained around each."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    group.share("ready", "timing")
    times = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def graph_us(group, run):
    """The same for a CUDA graph of one call."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_us(group, graph.replay)


def host_us(group, run, steps=30):
    """Time that the host needs to launch, per step: nothing waits for the device until all are launched."""
    run()
    torch.cuda.synchronize()
    group.share("ready", "timing")
    began = time.perf_counter()
    for _ in range(steps):
        run()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e6 * took / steps


def kernels_of(run, steps=10):
    """Device time of each kernel, microseconds a step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    times = [(event.key[:40], event.device_time_total / steps) for event in profile.key_averages()]
    return "  ".join(f"{name} {us:.1f}" for name, us in sorted(times, key=lambda item: -item[1])[:9])


def real_size(group, tokens, fp8):
    """Rows of the real size: what arrives is what was sent, what returns is the sum; then times."""
    torch.cuda.set_device(group.rank)
    with torch.inference_mode():
        return _real_size(group, tokens, fp8)


def _real_size(group, tokens, fp8):
    x, ids, weights = made(group.rank, tokens)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=tokens, hidden=HIDDEN, num_topk=TOP_K)
    sent = quantise_rows(x) if fp8 else x
    call = {"topk_idx": ids, "topk_weights": weights, "num_experts": EXPERTS}
    recv, idx, recv_weights, handle, _ = buffer.dispatch(sent, **call)
    source = handle.recv_src_metadata[:, 0].long()
    everyone = [made(rank, tokens) for rank in range(group.ranks)]
    all_x = torch.cat([quantise_rows(other[0])[0].view(torch.uint8) if fp8 else other[0] for other in everyone])
    rows = recv[0].view(torch.uint8) if fp8 else recv
    local = EXPERTS // group.ranks
    all_ids = torch.cat([other[1] for other in everyone])[source] - group.rank * local
    all_ids = torch.where((all_ids >= 0) & (all_ids < local), all_ids, -1)
    right = bool((rows == all_x[source]).all()) and bool((idx == all_ids).all())
    want_weights = torch.cat([other[2] for other in everyone])[source].masked_fill(all_ids < 0, 0)
    right = right and bool((recv_weights == want_weights).all())
    y = x.new_ones(handle.num_recv_tokens, HIDDEN)
    y = y * (source % 251)[:, None].to(y.dtype) if fp8 else recv
    out, out_weights, _ = buffer.combine(y, handle, topk_weights=recv_weights)
    ranks_of = torch.stack([((ids // local) == rank).any(dim=1) for rank in range(group.ranks)]).sum(dim=0)
    own = ((torch.arange(tokens, device="cuda") + group.rank * tokens) % 251)[:, None].to(y.dtype) if fp8 else x
    want = (own.float() * ranks_of[:, None]).bfloat16().expand(tokens, HIDDEN)
    right = right and bool((out == want).all()) and bool((out_weights == weights).all())
    if not right:
        raise AssertionError("what arrived or returned is wrong")
    buffer.check()
    return _times(group, buffer, sent, call, handle, y, fp8)


def _times(group, buffer, sent, call, handle, y, fp8):
    tokens = call["topk_idx"].shape[0]
    found = {}

    def both(**options):
        *_, new, _ = buffer.dispatch(sent, **call, **options)
        buffer.combine(empty if options else y, new)

    empty = y.new_zeros(group.ranks * tokens, HIDDEN)
    found["dispatch + combine, host sync"] = median_us(group, both)

    def unsynced():
        both(do_cpu_sync=False)

    found["dispatch + combine, no host sync"] = median_us(group, unsynced)
    found["the same in a CUDA graph"] = graph_us(group, unsynced)
    found["host time to launch the same"] = host_us(group, unsynced)

    def cached():
        buffer.dispatch(sent, handle=handle)
        buffer.combine(y, handle)

    found["dispatch + combine, cached handle"] = median_us(group, cached)
    buffer.check()
    profile = kernels_of(unsynced)
    layout = PeerLayout(
        ranks=group.ranks,
        experts=EXPERTS,
        top_k=TOP_K,
        tokens=tokens,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        exact=False,
        fp8="amax" if fp8 else "off",
    )
    home = (np.arange(EXPERTS) * group.ranks // EXPERTS).astype(np.int32)
    device = PeerDevice(group, layout, home, combine_mode="stable")
    x, scales = sent if fp8 else (sent, None)
    got = device.dispatch(x, call["topk_idx"], call["topk_weights"], scales_TG=scales)
    pairs = int(got.starts_E[-1])
    outputs = torch.zeros(pairs, HIDDEN, dtype=torch.bfloat16, device="cuda")
    device.combine(outputs)

    def below():
        device.dispatch(x, call["topk_idx"], call["topk_weights"], scales_TG=scales)
        device.combine(outputs)

    found[BELOW] = median_us(group, below)
    found[BELOW_GRAPH] = graph_us(group, below)
    found["host time to launch the same of PeerDevice"] = host_us(group, below)
    device.check()
    away = (call["topk_idx"] // (EXPERTS // group.ranks) != group.rank).any(dim=1).sum().item()
    row_bytes = HIDDEN * (1 if fp8 else 2) + HIDDEN * 2
    found["wire floor"] = away * row_bytes / WIRE_GBPS / 1e3
    return found, profile


def mistake(group, wrong):
    """An id that is no expert, or a rank that stays away: every rank gets an error, and its process lives."""
    torch.cuda.set_device(group.rank)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8)
    x, ids = torch.ones(8, 64, dtype=torch.bfloat16, device="cuda"), torch.zeros(8, 2, dtype=torch.int64, device="cuda")
    ids[:, 1] = 1
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, num_experts=4)
    buffer.combine(x.new_ones(handle.num_recv_tokens, 64), handle)
    if group.rank == 1 and wrong == "late":
        time.sleep(9)
        return "stayed away"
    if group.rank == 1:
        ids[3, 1] = 4 if wrong == "next" else 400
    try:
        for _ in range(2):
            *_, handle, _ = buffer.dispatch(x, topk_idx=ids, num_experts=4)
            buffer.combine(x.new_ones(handle.num_recv_tokens, 64), handle)
        buffer.check()
    except BywashError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="", help="where to write the times")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    pool, bad, report = RankPool(options.ranks, deadline_s=20), [], {}

    def check(name, function, *arguments):
        nonlocal pool
        began = time.monotonic()
        try:
            answers = pool.run(function, *arguments)
            print(f"ok   {name}, {time.monotonic() - began:.1f} s", flush=True)
            return answers
        except Exception:
            bad.append(name)
            print(f"FAIL {name}\n{traceback.format_exc()[-3000:]}", flush=True)
            pool = RankPool(options.ranks, deadline_s=20)
            return None

    for name, case in CASES.items():
        check(name, deepep_steps.run, case, 1, 4, "cuda")
    check("repeated calls", deepep_steps.repeated_calls, Case(), 7, "cuda")
    for sync in (True, False):
        check(f"serving exchange, sync {sync}", exchange_steps.steps, 20, 20, 72, sync, "cuda")
    check("serving exchange in a CUDA graph", exchange_steps.graph_replays, 20)
    for tokens in (4096, 128):
        for fp8 in (False, True):
            name = f"{tokens} tokens, {'e4m3' if fp8 else 'bf16'}"
            answers = check(name, real_size, tokens, fp8)
            if answers:
                times_R, profiles = zip(*answers, strict=True)
                print(f"       kernels, us: {profiles[0]}")
                report[name] = {what: max(times[what] for times in times_R) for what in times_R[0]}
                for what, us in report[name].items():
                    below = report[name][BELOW_GRAPH if "graph" in what else BELOW]
                    print(f"       {what:42} {us:9.1f} us   {us / below:5.2f} x PeerDevice")
    pool.close()
    pool = RankPool(options.ranks, deadline_s=6)
    for wrong in ("next", "far", "late"):
        for answer in check(f"mistake {wrong}", mistake, wrong) or []:
            print(f"       {answer}")
    pool.close()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    print(f"{len(bad)} failed: {bad}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
