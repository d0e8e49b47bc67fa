"""The parts of `gpu_overlap.py`, as one rank runs them."""

import math
import time
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist
from benchmarks.pipeline.gpu_baselines import baselines
from benchmarks.pipeline.gpu_bench import (
    Bench,
    add,
    add_alone,
    compare,
    open_variant,
    sizes_of,
)
from benchmarks.pipeline.gpu_movement import movement_gbytes_per_s, movement_of
from benchmarks.pipeline.gpu_oracle import check_oracle, check_repeats
from benchmarks.pipeline.gpu_report import choose, print_decision, profile_of
from benchmarks.rank_processes import least_left_s

from bywash.exchange.group import Group
from bywash.exchange.moves import NcclMoves, PeerCopies
from bywash.exchange.staged import HostMoves
from bywash.moe.pipeline import SERIAL, Split


def part_a(rank, store_path, options):
    """NVLink, 8,192 tokens."""
    nvlink_part(rank, store_path, options, 8192)


def part_z(rank, store_path, options):
    """As A with weights of 0, so that clocks are not bound by power: what is exposed then is waiting and memory."""
    nvlink_part(rank, store_path, options, 8192, still=True)


def part_a2(rank, store_path, options):
    """NVLink, 16,384 tokens: twice the rows for each expert in a lane."""
    nvlink_part(rank, store_path, options, 16384)


def nvlink_part(rank, store_path, options, tokens, *, still=False):
    """The unsplit step by kernels and by copies, and overlapped steps by copies, each also without movement.

    `still`: with products of zeros, which no oracle can judge.
    """
    splits = Split(), Split(lanes=2)
    bench = Bench(rank, store_path, options, sizes_of(options, layers=16, experts=64, tokens=tokens, sequence=4096))
    if still:
        bench.still_products()
    bench.reserve_s = 1.0 if options.small else 16.0
    serial = add(bench, "serial, kernels", SERIAL, "kernels")
    if serial is None:
        return
    if not still:
        check_oracle(bench, serial)
    for split in splits:
        add_with_alone(bench, split, "copies", PeerCopies, movement=True)
    add(bench, "serial, copies", SERIAL, "copies")
    calls = 2 if options.small else 8 * 8192 // tokens
    compare(bench, calls=calls, warm=calls // 2)  # a second and more until clocks and power have settled
    print_decision(bench, (*splits, Split(chunks=2)))
    profile_all(bench, f"{splits[0]}, copies", f"{splits[1]}, copies")
    for split in splits:
        if f"{split}, copies, compute only" in bench.variants:
            profile_of(bench, bench.variants[f"{split}, copies, compute only"])


def add_with_alone(bench, split, way, moves, *, movement, blocks=None):
    variant = add(bench, f"{split}, {way}", split, "copies", moves=moves, blocks=blocks)
    if variant:
        add_alone(bench, variant, movement=movement_of if movement else None)


def profile_all(bench, *first):
    """`first` in detail, then the others but for those that leave something out."""
    names = [*first, *(name for name in bench.variants if name not in first and "only" not in name)]
    for name in names:
        if name in bench.variants:
            profile_of(bench, bench.variants[name], detail=name in first)


def part_b(rank, store_path, options):
    bench = Bench(rank, store_path, options, sizes_of(options, layers=4, experts=256, tokens=4096, sequence=1024))
    bench.reserve_s = 5.0
    splits = [Split(), Split(lanes=2), Split(lanes=4), Split(chunks=2), Split(chunks=4)]
    picked = choose(bench, splits).split
    add(bench, "serial, kernels", SERIAL, "kernels")
    add(bench, "serial, copies", SERIAL, "copies")
    for split in [Split(), Split(lanes=2), picked, *splits]:
        if split.overlapped and f"{split}, copies" not in bench.variants:
            add(bench, f"{split}, copies", split, "copies")
    compare(bench, calls=3)
    print_decision(bench, splits)
    profile_all(bench, "2 micro-batches, copies")


def slow_part(rank, store_path, options, way, make_moves, blocks, note):
    """Our serial schedule, splits, and each alone, over one slow way, beside the baselines over NCCL without P2P.

    The way's rate is measured first, and decides the experts' size: splitting can only hide what compute outlasts.
    12,288 tokens are 6 sequences, which 2 and 3 lanes share evenly.
    """
    sizes = sizes_of(options, layers=12, experts=64, tokens=12288, sequence=2048)
    bench = Bench(rank, store_path, options, replace(sizes, layers=1))
    nccl = dist.new_group(backend="nccl")
    moves = make_moves(nccl)
    bench.log(f"  way: {way}; {note}")
    bench.link_gbytes_per_s = guarded_rate(bench, moves)
    if not options.small:
        sizes = replace(sizes, **inner_for(bench, sizes))
    bench.load(sizes)
    bench.log(f"  intermediate size {sizes.inner}; {sizes}")
    bench.reserve_s = 14.0
    add(bench, f"serial, {way}", SERIAL, "copies", moves=moves)  # nothing runs beside it: experts may take all
    for split in (Split(lanes=2), Split(lanes=3)):
        add_with_alone(bench, split, way, moves, movement=split.lanes == 2, blocks=blocks)
    add(bench, f"{Split()}, {way}", Split(), "copies", moves=moves, blocks=blocks)
    compare(bench)
    print_decision(bench, (Split(), Split(lanes=2), Split(lanes=3)))
    profile_all(bench, f"2 micro-batches, {way}")
    ours = min((one.median for name, one in bench.variants.items() if "only" not in name), default=None)
    baselines(bench, nccl, rounds=3, ours=ours and ours / sizes.layers)
    bench.save()


def guarded_rate(bench, moves):
    try:
        found = movement_gbytes_per_s(bench, Split(lanes=2), moves)
        bench.log(f"  movement alone, in halves: {found:.1f} GB/s each way")
    except Exception:
        print(f"rank {bench.rank}: movement alone:\n{traceback.format_exc(limit=-5)}", flush=True)
        found = 24.0
    bench.forget()
    return min(bench.gathered(found))


def inner_for(bench, sizes, margin=1.18, share=0.7):
    """The smallest intermediate size of experts and shared expert for which products take `margin` times as long as
    rows and sums take to travel in halves; a multiple of 64 from 256 to 4,096. Products reach about `share` of the
    dense rate; measured, the movement takes some 5 % longer than its rate says.
    """
    move_s = 2 * 2 * sizes.hidden / (bench.link_gbytes_per_s * 1e9)
    heads = sizes.attention
    attention = 2 * heads.weights(sizes.hidden) + 4 * heads.context * heads.q_size
    left = margin * move_s * share * bench.dense_flops - attention
    inner = left / (6 * (sizes.top_k + 1) * sizes.hidden)
    inner = min(4096, max(256, 64 * math.ceil(inner / 64)))
    return {"inner": inner, "shared_inner": inner}


def part_c(rank, store_path, options):
    slow_part(rank, store_path, options, "host memory", lambda nccl: HostMoves, None, "no multiprocessor")


def part_c2(rank, store_path, options):
    slow_part(rank, store_path, options, "NCCL", NcclMoves.on, 124, "up to 8 multiprocessors, experts on 124")


def part_d(rank, store_path, options):
    bench = Bench(rank, store_path, options, sizes_of(options, layers=2, experts=64, tokens=4096, sequence=1024))
    nccl = dist.new_group(backend="nccl")
    baselines(bench, nccl, rounds=2)
    sizes, moves = bench.sizes, NcclMoves.on(nccl)
    for split, blocks in ((SERIAL, None), (Split(lanes=2), 124)):
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
                    f"MFU {bench.mfu(took / sizes.layers * 1e3):.4f}"
                )
        except Exception:
            print(f"rank {rank}: sockets, {split}:\n{traceback.format_exc(limit=-4)}", flush=True)


def part_e(rank, store_path, options):
    """Decode: experts alone, then with attention over 1,024 positions and shared expert."""
    sizes = sizes_of(options, layers=16, experts=16, tokens=128, sequence=1, cached=1023)
    alone = replace(sizes, attention=None, shared_inner=0)
    bench = Bench(rank, store_path, options, alone)
    nccl = dist.new_group(backend="nccl")
    bench.options.part = "E-experts"
    decode(bench, nccl, "slotted, kernels")
    bench.options.part = "E"
    bench.load(sizes)
    bench.log("  with attention and shared expert:")
    check_repeats(bench)
    decode(bench, nccl, "slotted, kernels")


def decode(bench, nccl, first):
    """Every exchange in turn, host time, a profile, baselines."""
    bench.reserve_s = 4.0
    add(bench, first, SERIAL, "kernels", counts_first=False)
    if first not in bench.variants:
        return
    check_oracle(bench, bench.variants[first])
    if "experts" not in bench.options.part:
        add(bench, "counts first, kernels", SERIAL, "kernels")
        add(bench, "copies", SERIAL, "copies")
    compare(bench, calls=10)
    if bench.has(3.0, f"host time of {first}"):
        host_time(bench, bench.variants[first])
    if bench.sizes.attention:  # a profiler, once attached, makes every later replay dearer for the host
        profile_of(bench, bench.variants[first], detail=True)
    ours = bench.variants[first].median / bench.sizes.layers
    baselines(bench, nccl, rounds=5, ours=ours)
    bench.save()


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
    bench.results[f"host us per replay, {variant.name}"] = found
    bench.log(
        f"  host time per replay of {bench.sizes.layers} layers, {variant.name}: thread, process, wall us {found}"
    )


AFTER_SOAK_S = 10.0
"""What the steps that must fail may take, deadlines included."""


def part_s(rank, store_path, options):
    """Random sizes, ways, counts and delays for as long as there is time; then without one semaphore: must fail."""
    from tests.pipeline import cuda_steps

    torch.cuda.set_device(rank % torch.cuda.device_count())
    ranks, gpus = options.ranks, torch.cuda.device_count()
    group = Group(rank=rank, ranks=ranks, store=dist.FileStore(store_path, ranks), deadline_s=20.0)
    done, seed, longest = dict.fromkeys(cuda_steps.WAYS, 0), 5, 0.0
    while least_left_s(options.until) > longest + AFTER_SOAK_S:
        way, began = cuda_steps.WAYS[seed % len(cuda_steps.WAYS)], time.monotonic()
        done[way] += cuda_steps.soak(group, gpus, way, options.soak, seed)
        seed, longest = seed + 1, max(longest, time.monotonic() - began)
    if rank == 0:
        print(f"  soak: {done} steps, {sum(done.values())} in all, every one equal to serial", flush=True)
    for kinds in cuda_steps.NEEDED:
        try:
            text = cuda_steps.soak_without(group, gpus, kinds, 40)
        except Exception:
            text = traceback.format_exc(limit=-4)
        print(f"  without {' before '.join(kinds)}, rank {rank}: {text}", flush=True)


PARTS = {
    "S": part_s,
    "A": part_a,
    "Z": part_z,
    "A2": part_a2,
    "B": part_b,
    "C": part_c,
    "C2": part_c2,
    "D": part_d,
    "E": part_e,
}


def run(part, rank, store_path, options):
    options.part, options.calls = part, {"E": 10, "D": 1}.get(part, 2)
    PARTS[part](rank, store_path, options)
