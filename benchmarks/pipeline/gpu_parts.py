"""The parts of `gpu_overlap.py`, as one rank runs them."""

import gc
import math
import statistics
import time
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist
from benchmarks.moe.layer_baselines import (
    AllGatherLayer,
    ByHandLayer,
    GroupedMlp,
)
from benchmarks.pipeline.gpu_bench import (
    RANKS,
    TOP_K,
    Bench,
    add,
    add_alone,
    check_oracle,
    compare,
    movement_gbytes_per_s,
    open_variant,
    sizes_of,
)
from benchmarks.pipeline.gpu_report import choose, print_decision, profile_of

from bywash.exchange.group import Group
from bywash.exchange.moves import NcclMoves, PeerCopies
from bywash.exchange.staged import HostMoves
from bywash.kernels.router import router_naive
from bywash.moe.pipeline import SERIAL, Split


def part_a(rank, store_path, options):
    bench = Bench(rank, store_path, options, sizes_of(options, layers=16, experts=64, tokens=8192))
    bench.reserve_s = 14.0
    serial = add(bench, "serial, kernels", SERIAL, "kernels")
    if serial is None:
        return
    check_oracle(bench, serial)
    add(bench, "serial, copies", SERIAL, "copies")
    splits = (Split(lanes=2), Split(lanes=3), Split(lanes=4))
    for split in splits:
        add_with_alone(bench, split, "copies", PeerCopies, movement=split.lanes == 3)
    add(bench, "3 micro-batches, kernels on 32", Split(lanes=3), "kernels", num_sms=32, blocks=132 - 32)
    compare(bench)
    print_decision(bench, (*splits, Split(lanes=2, chunks=2), Split(chunks=4)))
    profile_all(bench, "3 micro-batches, copies")


def add_with_alone(bench, split, way, moves, *, movement, blocks=None):
    variant = add(bench, f"{split}, {way}", split, "copies", moves=moves, blocks=blocks)
    if variant:
        add_alone(bench, variant, movement=movement)


def profile_all(bench, *first):
    """`first` in detail, then the others but for those that leave something out."""
    names = [*first, *(name for name in bench.variants if name not in first and "only" not in name)]
    for name in names:
        if name in bench.variants:
            profile_of(bench, bench.variants[name], detail=name in first)


def part_b(rank, store_path, options):
    sizes = sizes_of(options, layers=4, experts=256, tokens=4096)
    bench = Bench(rank, store_path, options, sizes)
    bench.reserve_s = 5.0
    splits = [Split(lanes=2), Split(lanes=3), Split(chunks=2), Split(chunks=4)]
    picked = choose(bench, splits).split
    add(bench, "serial, kernels", SERIAL, "kernels")
    add(bench, "serial, copies", SERIAL, "copies")
    for split in [Split(lanes=2), picked, *splits]:
        if split.overlapped and f"{split}, copies" not in bench.variants:
            add(bench, f"{split}, copies", split, "copies")
    compare(bench, calls=3)
    print_decision(bench, splits)
    profile_all(bench, "2 micro-batches, copies")


def slow_part(rank, store_path, options, way, make_moves, blocks, note):
    """Our serial schedule, splits, and each alone, over one slow way, beside the baselines over NCCL without P2P.

    The way's rate is measured first, and decides the experts' size: splitting can only hide what compute outlasts.
    """
    sizes = sizes_of(options, layers=12, experts=64, tokens=8192)
    bench = Bench(rank, store_path, options, replace(sizes, layers=1))
    nccl = dist.new_group(backend="nccl")
    moves = make_moves(nccl)
    bench.log(f"  way: {way}; {note}")
    bench.link_gbytes_per_s = guarded_rate(bench, moves)
    inner = sizes.inner if options.small else inner_for(bench, sizes)
    bench.load(replace(sizes, inner=inner))
    bench.log(f"  intermediate size {inner}")
    bench.reserve_s = 9.0
    add(bench, f"serial, {way}", SERIAL, "copies", moves=moves)  # nothing runs beside it: experts may take all
    for split in (Split(lanes=3), Split(lanes=2, chunks=2), Split(lanes=2), Split(lanes=4)):
        add_with_alone(bench, split, way, moves, movement=split.lanes == 3, blocks=blocks)
    compare(bench)
    if f"3 micro-batches, {way}" in bench.variants:
        profile_of(bench, bench.variants[f"3 micro-batches, {way}"], detail=True)
    baselines(bench, nccl, rounds=4)


def guarded_rate(bench, moves):
    try:
        found = movement_gbytes_per_s(bench, Split(lanes=3), moves)
        bench.log(f"  movement alone, in thirds: {found:.1f} GB/s each way")
    except Exception:
        print(f"rank {bench.rank}: movement alone:\n{traceback.format_exc(limit=-5)}", flush=True)
        found = 24.0
    gc.collect()  # pinned memory is given back now, not in the middle of a capture
    torch.cuda.empty_cache()
    return min(bench.gathered(found))


def inner_for(bench, sizes, margin=1.1, expert_share=0.72):
    """The smallest intermediate size whose products take `margin` times as long as rows and sums take to travel.

    A multiple of 256 from 768 to 4,096: what models have. Experts reach about `expert_share` of the dense rate.
    """
    move_s = 2 * 2 * sizes.hidden / (bench.link_gbytes_per_s * 1e9)
    fitting = margin * move_s * expert_share * bench.dense_flops / (6 * sizes.top_k * sizes.hidden)
    return min(4096, max(768, 256 * math.ceil(fitting / 256)))


def part_c(rank, store_path, options):
    slow_part(rank, store_path, options, "host memory", lambda nccl: HostMoves, None, "no multiprocessor")


def part_c2(rank, store_path, options):
    slow_part(rank, store_path, options, "NCCL", NcclMoves.on, 124, "up to 8 multiprocessors, experts on 124")


def part_d(rank, store_path, options):
    bench = Bench(rank, store_path, options, sizes_of(options, layers=2, experts=64, tokens=4096))
    nccl = dist.new_group(backend="nccl")
    baselines(bench, nccl, rounds=2)
    sizes, moves = bench.sizes, NcclMoves.on(nccl)
    flops = 6 * sizes.tokens * sizes.top_k * sizes.hidden * sizes.inner * sizes.layers
    for split, blocks in ((SERIAL, None), (Split(lanes=3), 124)):
        if not bench.has(5.0, f"sockets, ours, {split}"):
            return
        try:
            variant = open_variant(bench, str(split), split, "copies", moves, 0, blocks, True)
            variant.feed(0)
            for number in range(3):
                bench.meet()
                began = time.monotonic()
                variant.eager()
                variant.check()
                took = max(bench.gathered(time.monotonic() - began))
                bench.log(
                    f"  sockets, ours, {split}, eager {number}: {took / sizes.layers * 1e3:.1f} ms a layer, "
                    f"MFU {flops / took / bench.dense_flops:.4f}"
                )
        except Exception:
            print(f"rank {rank}: sockets, {split}:\n{traceback.format_exc(limit=-4)}", flush=True)


def baselines(bench, nccl, rounds):
    """One layer by hand and by all-gather, eagerly, milliseconds; MFU as in the table."""
    sizes, mlp = bench.sizes, GroupedMlp(bench.weights.gate_up[0], bench.weights.down[0])
    bench.variants.clear()
    bench._experts.clear()
    torch.cuda.empty_cache()
    flops = 6 * sizes.tokens * sizes.top_k * sizes.hidden * sizes.inner
    ids, weights = router_naive(bench.inputs[0], bench.weights.router[0], TOP_K)
    ids = ids.contiguous()
    for name, kind in (("by hand", ByHandLayer), ("all-gather", AllGatherLayer)):
        if not bench.has(1.5, f"baseline {name}"):
            return
        try:
            layer = kind(nccl, bench.rank, RANKS, sizes.experts, mlp)
            times = []
            for _ in range(rounds + 1):
                bench.meet()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(bench.options.calls):
                    layer(bench.inputs[0], ids, weights)
                end.record()
                end.synchronize()
                times.append(max(bench.gathered(begin.elapsed_time(end) / bench.options.calls)))
            ms = statistics.median(times[1:])
            bench.log(
                f"  baseline {name}: {ms:.3f} ms a layer ({min(times[1:]):.3f} to {max(times[1:]):.3f}), "
                f"MFU {flops / (ms * 1e-3) / bench.dense_flops:.4f}"
            )
        except Exception:
            print(f"rank {bench.rank}: baseline {name}:\n{traceback.format_exc(limit=-4)}", flush=True)
        torch.cuda.empty_cache()


def part_e(rank, store_path, options):
    sizes = sizes_of(options, layers=16, experts=16, tokens=128)
    bench = Bench(rank, store_path, options, sizes)
    bench.reserve_s = 6.0
    add(bench, "slotted, kernels", SERIAL, "kernels", counts_first=False)
    add(bench, "counts first, kernels", SERIAL, "kernels")
    add(bench, "copies", SERIAL, "copies")
    compare(bench, calls=10)
    for variant in bench.variants.values():
        if bench.has(5.0, f"host time of {variant.name}"):
            host_time(bench, variant)
    if "slotted, kernels" in bench.variants:
        profile_of(bench, bench.variants["slotted, kernels"], detail=True)
    baselines(bench, dist.new_group(backend="nccl"), rounds=5)


def host_time(bench, variant, replays=1000, batch=10):
    """CPU time of this thread and of the process for each replay; waits between batches are not counted, and sleep."""
    bench.meet()
    thread = process = wall = 0.0
    for _ in range(replays // batch):
        marks = time.thread_time(), time.process_time(), time.perf_counter()
        for _ in range(batch):
            variant.step.replay()
        ends = time.thread_time(), time.process_time(), time.perf_counter()
        thread, process, wall = (
            total + b - a for total, a, b in zip((thread, process, wall), marks, ends, strict=True)
        )
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            time.sleep(0.001)
    variant.check()
    found = bench.gathered([round(value / replays * 1e6, 2) for value in (thread, process, wall)])
    bench.log(
        f"  host time per replay of {bench.sizes.layers} layers, {variant.name}: thread, process, wall us {found}"
    )


def part_s(rank, store_path, options):
    """Random sizes, ways, counts and delays; then the same with one semaphore left out, which must fail."""
    from tests.pipeline import cuda_steps

    torch.cuda.set_device(rank)
    group = Group(rank=rank, ranks=RANKS, store=dist.FileStore(store_path, RANKS), deadline_s=20.0)
    for way in cuda_steps.WAYS:
        began = time.monotonic()
        try:
            text = f"{cuda_steps.soak(group, RANKS, way, options.soak, 5)} steps, all equal to serial"
        except Exception:
            text = traceback.format_exc(limit=-4)
        if rank == 0 or "Traceback" in text:
            print(f"  soak, {way}, rank {rank}: {text} ({time.monotonic() - began:.1f} s)", flush=True)
    for kinds in cuda_steps.NEEDED:
        try:
            text = cuda_steps.soak_without(group, RANKS, kinds, 40)
        except Exception:
            text = traceback.format_exc(limit=-4)
        print(f"  without {' before '.join(kinds)}, rank {rank}: {text}", flush=True)


PARTS = {"S": part_s, "A": part_a, "B": part_b, "C": part_c, "C2": part_c2, "D": part_d, "E": part_e}


def run(part, rank, store_path, options):
    options.part, options.calls = part, {"E": 10, "D": 1}.get(part, 2)
    PARTS[part](rank, store_path, options)
