"""One rank of `gpu_overlap.py`: opens variants of a step, proves them equal, times them in turn, profiles them."""

import statistics
import time
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist
from benchmarks.moe.layer_baselines import (
    dense_product,
    device_copy,
    rate,
    sample_outputs,
)
from benchmarks.pipeline.gpu_report import load_of, machine_of, table

from bywash.balance import Placement
from bywash.exchange.group import Group
from bywash.exchange.moves import GatherSteps, PeerCopies
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.staged import CHUNK_BYTES, HostMoves
from bywash.kernels.router import router_naive
from bywash.moe.device_experts import open_device_experts
from bywash.moe.device_layer import pairs_capacity
from bywash.moe.pipeline import Kind, build_schedule
from bywash.moe.pipeline.run_cuda import CudaExecutor
from bywash.moe.pipeline.stack_cuda import (
    GatherForward,
    MovementOnly,
    PeerForward,
    StackSizes,
    devices_needed,
    part_tokens,
    random_weights,
)

RANKS, TOP_K, HIDDEN, INNER = 2, 8, 7168, 2048
SAMPLE, TOLERANCE = 8, 3e-2
LESS = (0.7, 0.4)
"""The share of its tokens that each rank brings to the replay with other counts."""


class Bench:
    """One rank: its weights, its executor, and the variants so far."""

    def __init__(self, rank, store_path, options, sizes):
        torch.cuda.set_device(rank)
        self.rank, self.options, self.link_gbytes_per_s = rank, options, 386.0
        self.reserve_s = self.longest_s = 0.0
        self.group = Group(rank=rank, ranks=RANKS, store=dist.FileStore(store_path, RANKS), deadline_s=20.0)
        dense, copied = rate(*dense_product(), rounds=8), rate(*device_copy(), rounds=8)
        self.dense_flops = min(self.gathered(dense))
        self.log(
            f"{RANKS} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}; "
            f"dense {[f'{d / 1e12:.0f}' for d in self.gathered(dense)]} TFLOP/s, copy {copied / 1e12:.2f} "
            f"TB/s; {sizes}; {time.monotonic() - options.began:.1f} s to start"
        )
        self.load(sizes)
        self.executor = CudaExecutor()

    def load(self, sizes):
        self.sizes, self.local = sizes, sizes.experts // RANKS
        self.placement = Placement.equal(sizes.experts, RANKS)
        self.weights = random_weights(sizes, self.local, self.rank)
        self.variants, self._experts, self.reference = {}, {}, None
        self.inputs = [self._input(seed) for seed in range(2)]
        self.counts = (sizes.tokens, int(sizes.tokens * LESS[self.rank]))

    def _input(self, seed):
        generator = torch.Generator(device="cuda").manual_seed(10 * seed + self.rank)
        return torch.randn(self.sizes.tokens, self.sizes.hidden, generator=generator, device="cuda").bfloat16()

    def log(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def gathered(self, value):
        found = [None] * RANKS
        dist.all_gather_object(found, value)
        return found

    def has(self, seconds, what):
        """Whether this part still has that long, by the rank that has least; says what is left out otherwise."""
        left = min(self.gathered(self.options.until - time.monotonic()))
        if left < seconds:
            self.log(f"  left out, {left:.1f} s left of this part's share: {what}")
        return left >= seconds

    def meet(self):
        torch.cuda.synchronize()
        dist.barrier()

    def layout(self, split):
        sizes = self.sizes
        return PeerLayout(
            ranks=RANKS,
            experts=sizes.experts,
            top_k=sizes.top_k,
            tokens=part_tokens(sizes, split),
            hidden=sizes.hidden,
            dtype=torch.bfloat16,
            exact=False,
        )

    def experts(self, split, blocks):
        """Of every layer; splits whose parts are alike share them."""
        layout, sizes = self.layout(split), self.sizes
        key = (layout.tokens, blocks)
        if key not in self._experts:
            rows, pairs = layout.places * sizes.top_k / sizes.experts, pairs_capacity(layout, self.local)

            def open_one(gate_up, down):
                if torch.cuda.get_device_capability() != (9, 0):
                    return open_device_experts(gate_up, down, pairs=pairs, rows_per_expert=rows)
                from bywash.kernels.experts import HopperExperts

                return HopperExperts(gate_up, down, pairs=pairs, rows_per_expert=rows, max_blocks=blocks)

            self._experts[key] = [open_one(*pair) for pair in zip(self.weights.gate_up, self.weights.down, strict=True)]
        return self._experts[key]

    def schedule(self, split):
        load, machine = load_of(self.sizes, RANKS), machine_of(self)
        forms = [self.sizes.form] * self.sizes.layers
        return build_schedule(forms, split, cost=lambda kind, lane: load.stage_ns(kind, split, machine))


class Variant:
    """A forward on a schedule, captured; `times` in milliseconds, of the slower rank."""

    def __init__(self, bench, name, forward, schedule, devices):
        self.bench, self.name, self.forward, self.schedule, self.devices = bench, name, forward, schedule, devices
        self.times, self.step = [], None
        self.events = dict.fromkeys((Kind.DISPATCH, Kind.COMBINE), 1)  # copies or kernels of each, in a profile

    def glance(self):
        """A first figure, printed at once; the table's come from rounds that all variants share."""
        for _ in range(2):
            self.measure()
        self.bench.log(f"    {self.name}: about {self.median:.2f} ms a step")
        self.times.clear()

    def eager(self):
        self.forward.begin()
        self.bench.executor.run(self.schedule, self.forward)
        self.forward.end()

    def capture(self):
        self.step = self.bench.executor.capture(
            self.schedule, self.forward, before=self.forward.begin, after=self.forward.end
        )

    def check(self):
        for device in self.devices:
            device.check()

    def feed(self, which):
        self.forward.input_TD.copy_(self.bench.inputs[which])
        self.forward.set_counts(self.bench.counts[which])

    def outputs(self, launch):
        """Outputs of both inputs, only the real rows."""
        found = []
        for which in range(2):
            self.bench.meet()
            self.feed(which)
            launch()
            self.check()
            found.append(self.forward.output_TD[: self.bench.counts[which]].clone())
        self.feed(0)
        return found

    def measure(self, calls=1):
        """One warm replay lines the ranks up; then `calls` are timed."""
        self.bench.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.step.replay()
        begin.record()
        for _ in range(calls):
            self.step.replay()
        end.record()
        end.synchronize()
        self.times.append(max(self.bench.gathered(begin.elapsed_time(end) / calls)))

    @property
    def median(self):
        return statistics.median(self.times)


def add(bench, name, split, way, *, moves=PeerCopies, num_sms=0, blocks=None, counts_first=True):
    """Open, run eagerly, compare, capture, replay, compare; keep it if all went well on both ranks."""
    wanted = bench.options.variants
    if wanted and not any(word in name for word in wanted) and bench.variants:
        return None
    if not bench.has(bench.reserve_s + bench.longest_s, name):
        return None
    began, variant, error = time.monotonic(), None, ""
    try:
        bench.meet()
        variant = open_variant(bench, name, split, way, moves, num_sms, blocks, counts_first)
        outs = variant.outputs(variant.eager)
        eager_s = time.monotonic() - began
        if bench.reference is None:
            bench.reference = outs
        good = [same(out, expected) for out, expected in zip(outs, bench.reference, strict=True)]
        bench.meet()
        variant.capture()
        replayed = [same(out, expected) for out, expected in zip(variant.outputs(variant.step.replay), bench.reference)]
        text = f"eager {good}, replayed {replayed}"
    except Exception:
        error = traceback.format_exc(limit=-5)
    everyone = bench.gathered(error or (text if not error else ""))
    bench.log(f"  {name}: {everyone} ({time.monotonic() - began:.1f} s, eager {eager_s if not error else 0:.1f} s)")
    if any("Traceback" in one for one in everyone):
        return None
    bench.variants[name] = variant
    variant.glance()
    if len(bench.variants) > 1:  # the first one compiles
        bench.longest_s = max(bench.longest_s, time.monotonic() - began)
    return variant


def open_variant(bench, name, split, way, moves, num_sms, blocks, counts_first):
    layout, home = bench.layout(split), bench.placement.home_E
    experts, count = bench.experts(split, blocks), devices_needed(split)
    common = bench.sizes, split, bench.weights, experts, bench.local
    if way == "copies":
        devices = [GatherSteps(bench.group, layout, home, make_moves=moves) for _ in range(count)]
        forward = GatherForward(*common, devices)
    else:
        devices = [PeerDevice(bench.group, layout, home, combine_mode="stable", num_sms=num_sms) for _ in range(count)]
        forward = PeerForward(*common, devices, counts_first=counts_first)
    variant = Variant(bench, name, forward, bench.schedule(split), devices)
    if way == "copies" and moves in (PeerCopies, HostMoves):
        chunk = CHUNK_BYTES if moves is HostMoves else layout.places * layout.hidden * layout.dtype.itemsize
        variant.events = {
            Kind.DISPATCH: copies_in(devices[0]._rows[0], chunk, moves is HostMoves),
            Kind.COMBINE: copies_in(devices[0]._sums[0], chunk, moves is HostMoves),
        }
    return variant


def copies_in(move, chunk, fetched):
    """Copies that a move takes, in chunks; through the host every rank also fetches."""
    pieces = [piece for found in (*move.sent, *(move.got if fetched else ())) for piece in found]
    return sum(-(-piece.size // chunk) for piece in pieces)


def add_alone(bench, base, *, movement=True):
    """The same variant without movement, and its movement alone; both share its channels, so ranks meet in between."""
    if not bench.has(bench.reserve_s + bench.longest_s, f"{base.name}, compute only"):
        return
    try:
        moves = [device.moves for device in base.devices]
        for device in base.devices:
            device.moves = device.arrived()
        still = Variant(bench, f"{base.name}, compute only", base.forward, base.schedule, base.devices)
        bench.meet()
        still.capture()
        for device, way in zip(base.devices, moves, strict=True):
            device.moves = way
        found = [still, *([movement_of(bench, base)] if movement else [])]
        for variant in found:
            bench.meet()
            variant.step.replay()
            variant.check()
            variant.events = None
            bench.variants[variant.name] = variant
            variant.glance()
    except Exception:
        print(f"rank {bench.rank}: alone, {base.name}:\n{traceback.format_exc(limit=-5)}", flush=True)


def movement_of(bench, base):
    """Captured."""
    forward = MovementOnly(
        bench.sizes, base.forward.split, bench.weights, base.forward._experts, bench.local, base.devices
    )
    wire = Variant(bench, f"{base.name}, movement only", forward, base.schedule, base.devices)
    bench.meet()
    wire.capture()
    return wire


def movement_gbytes_per_s(bench, split, moves, layers=4):
    """What the way itself gives, one direction of one rank while all send: rows and sums, nothing computed."""
    sizes, layout, count = replace(bench.sizes, layers=layers), bench.layout(split), devices_needed(split)
    devices = [GatherSteps(bench.group, layout, bench.placement.home_E, make_moves=moves) for _ in range(count)]
    forward = MovementOnly(sizes, split, bench.weights, [None] * layers, bench.local, devices)
    variant = Variant(bench, "movement", forward, build_schedule([sizes.form] * layers, split), devices)
    bench.meet()
    variant.eager()
    variant.check()
    bench.meet()
    variant.capture()
    for _ in range(3):
        variant.measure()
    variant.check()
    size = layers * split.lanes * split.chunks * layout.tokens * (2 * 2 * sizes.hidden + 12 * sizes.top_k)
    return size * (RANKS - 1) / variant.median * 1e-6


def same(out, expected):
    """`equal`, or how they differ."""
    if torch.equal(out, expected):
        return "equal"
    rows = (out != expected).any(1)
    worst = (out.float() - expected.float()).abs().max()
    return f"{int(rows.sum())} of {len(rows)} rows differ, first {int(rows.nonzero()[0])}, by {float(worst):.3g}"


def check_oracle(bench, variant):
    """One layer of the variant against the float32 oracle on a few tokens of both ranks; the router against torch.

    The oracle judges what the layer adds, before the residual: in `x + added` the rounding of x would count as error.
    The residual itself must be torch's, bit for bit. For a variant in one part.
    """
    schedule = build_schedule([bench.sizes.form], variant.forward.split)
    variant.feed(0)
    bench.meet()
    variant.forward.begin()
    bench.executor.run(schedule, variant.forward)
    variant.forward.end()
    variant.check()
    x, out = bench.inputs[0], variant.forward.output_TD
    first = variant.forward.parts[0]
    ids, weights = router_naive(x, bench.weights.router[0], TOP_K)
    head = slice(0, first.count)
    alike = (first.ids_TK[head].sort(1).values == ids[head].sort(1).values).all(1).float().mean()
    nearest = (first.weights_TK[head] - weights[head]).abs().max()
    mine = [t.cpu() for t in (x[:SAMPLE], first.ids_TK[:SAMPLE], first.weights_TK[:SAMPLE])]
    inputs_R = [[t.cuda() for t in parts] for parts in bench.gathered(mine)]
    share = sample_outputs(
        inputs_R, SAMPLE, bench.weights.gate_up[0], bench.weights.down[0], bench.rank * bench.local
    ).cpu()
    dist.all_reduce(share)
    expected = share[bench.rank].cuda()
    added = first.out_TD[head]
    worst = float(((added[:SAMPLE].float() - expected).norm(dim=1) / expected.norm(dim=1)).max())
    exact = torch.equal(out, x + added)
    found = bench.gathered((worst, exact))
    verdict = "ok" if all(one < TOLERANCE and bits for one, bits in found) and alike > 0.99 else "WRONG"
    bench.log(
        f"  oracle, layer 0, {variant.name}: {verdict}; what it adds differs by "
        f"{[round(one, 5) for one, _ in found]} of its norm, residual exact {[bits for _, bits in found]}; router "
        f"picks as torch for {float(alike):.4%} of tokens, weights within {float(nearest):.2g}"
    )
    bench.meet()


def compare(bench, calls=1):
    """Rounds in which every variant takes its turn, then a table."""
    took = 0.0
    for number in range(bench.options.rounds):
        if number and not bench.has(bench.reserve_s / 2 + took, f"rounds from number {number + 1} on"):
            break
        began = time.monotonic()
        for variant in bench.variants.values():
            variant.measure(calls)
        took = time.monotonic() - began
    for variant in bench.variants.values():
        variant.check()
    table(bench)


def sizes_of(options, *, layers, experts, tokens, attention=False):
    if options.small:
        return StackSizes(layers=3, experts=16, top_k=TOP_K, hidden=512, inner=256, tokens=301, attention=attention)
    layers = options.layers or layers
    return StackSizes(
        layers=layers, experts=experts, top_k=TOP_K, hidden=HIDDEN, inner=INNER, tokens=tokens, attention=attention
    )
