"""One rank of `gpu_overlap.py`: opens variants of a step, proves them equal, times them in turn."""

import gc
import json
import statistics
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.moe.layer_baselines import dense_product, device_copy, rate
from benchmarks.pipeline.gpu_clocks import Clocks, Energy
from benchmarks.pipeline.gpu_report import load_of, machine_of, table

from bywash.balance import Placement
from bywash.exchange.group import Group
from bywash.exchange.moves import GatherSteps, PeerCopies
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.exchange.staged import CHUNK_BYTES, HostMoves
from bywash.moe.device_experts import open_device_experts
from bywash.moe.device_layer import pairs_capacity
from bywash.moe.pipeline import Kind, build_schedule
from bywash.moe.pipeline.attention_cuda import AttentionSizes
from bywash.moe.pipeline.run_cuda import CudaExecutor
from bywash.moe.pipeline.stack_cuda import GatherForward, PeerForward, devices_needed, part_tokens
from bywash.moe.pipeline.stack_sizes import StackSizes, random_weights

TOP_K, HIDDEN, INNER = 8, 7168, 2048
HEADS = {"heads": 64, "kv_heads": 8, "head_size": 128}
LESS = (0.7, 0.4)
"""The share of its tokens that ranks bring, in turn, to the replay with other counts."""


class Bench:
    """One rank: its weights, its executor, and the variants so far."""

    def __init__(self, rank, store_path, options, sizes):
        torch.cuda.set_device(rank % torch.cuda.device_count())
        self.ranks = ranks = options.ranks
        self.rank, self.options, self.link_gbytes_per_s = rank, options, 386.0
        self.reserve_s = self.longest_s = 0.0
        self.group = Group(rank=rank, ranks=ranks, store=dist.FileStore(store_path, ranks), deadline_s=20.0)
        dense, copied = rate(*dense_product(), rounds=8), rate(*device_copy(), rounds=8)
        self.dense_flops = min(self.gathered(dense))
        self.log(
            f"{ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {torch.cuda.nccl.version()}; "
            f"dense {[f'{d / 1e12:.0f}' for d in self.gathered(dense)]} TFLOP/s, copy {copied / 1e12:.2f} "
            f"TB/s; {sizes}; {time.monotonic() - options.began:.1f} s to start"
        )
        self.results = {"part": options.part, "dense TFLOP/s": self.dense_flops / 1e12, "copy TB/s": copied / 1e12}
        self.load(sizes)
        self.executor, self.energy = CudaExecutor(), Energy()

    def load(self, sizes):
        self.sizes, self.local = sizes, sizes.experts // self.ranks
        self.placement = Placement.equal(sizes.experts, self.ranks)
        self.weights = random_weights(sizes, self.local, self.rank)
        self.variants, self._experts, self.reference = {}, {}, None
        self.inputs = [self._input(seed) for seed in range(2)]
        self.counts = (sizes.tokens, int(sizes.tokens * LESS[self.rank % len(LESS)]))

    def still_products(self):
        """Make all products' weights 0 but the router's: the same kernels, routing and copies for less power."""
        weights = self.weights
        for tensor in (*weights.gate_up, *weights.down, *weights.shared_gate_up, *weights.shared_down):
            tensor.zero_()
        for one in weights.attention:
            for tensor in (one.q, one.kv, one.out):
                tensor.zero_()

    def forget(self):
        """Give the variants' memory back."""
        self.variants.clear()
        self._experts.clear()
        gc.collect()  # pinned memory too, now and not in the middle of a capture
        torch.cuda.empty_cache()

    @property
    def flops(self):
        """Of one layer's products on one rank: experts, shared expert, projections, and causal scores."""
        sizes, heads = self.sizes, self.sizes.attention
        a_token = 6 * sizes.hidden * (sizes.top_k * sizes.inner + sizes.shared_inner)
        if heads:
            a_token += 2 * heads.weights(sizes.hidden) + 4 * heads.context * heads.q_size
        return sizes.tokens * a_token

    def mfu(self, layer_ms):
        """Those products over the dense rate of this run."""
        return self.flops / (layer_ms * 1e-3) / self.dense_flops

    def save(self):
        """Results of this part so far, to --out."""
        if self.rank == 0 and self.options.out:
            self.results["sizes"] = repr(self.sizes)
            path = Path(self.options.out, f"results-{self.options.part}.json")
            path.write_text(json.dumps(self.results, indent=1))

    def _input(self, seed):
        generator = torch.Generator(device="cuda").manual_seed(10 * seed + self.rank)
        return torch.randn(self.sizes.tokens, self.sizes.hidden, generator=generator, device="cuda").bfloat16()

    def log(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def gathered(self, value):
        found = [None] * self.ranks
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
            ranks=self.ranks,
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
            between = torch.empty(pairs, sizes.inner, dtype=torch.bfloat16, device="cuda")  # layers run in turn

            def open_one(gate_up, down):
                if torch.cuda.get_device_capability() != (9, 0):
                    return open_device_experts(gate_up, down, pairs=pairs, rows_per_expert=rows)
                from bywash.kernels.experts import HopperExperts

                return HopperExperts(
                    gate_up, down, pairs=pairs, rows_per_expert=rows, max_blocks=blocks, intermediate=between
                )

            self._experts[key] = [open_one(*pair) for pair in zip(self.weights.gate_up, self.weights.down, strict=True)]
        return self._experts[key]

    def schedule(self, split):
        load, machine = load_of(self.sizes, self.ranks), machine_of(self)
        forms = [self.sizes.form] * self.sizes.layers
        return build_schedule(forms, split, cost=lambda kind, lane: load.stage_ns(kind, split, machine))


class Variant:
    """A forward on a schedule, captured; `times` in milliseconds, of the slower rank."""

    def __init__(self, bench, name, forward, schedule, devices):
        self.bench, self.name, self.forward, self.schedule, self.devices = bench, name, forward, schedule, devices
        self.executor = bench.executor
        self.times, self.windows, self.joules = [], [], []
        self.step, self.by_copies = None, isinstance(forward, GatherForward)
        self.events = dict.fromkeys((Kind.DISPATCH, Kind.COMBINE), 1)  # copies or kernels of each, in a profile

    def glance(self):
        """A first figure, printed at once; the table's come from rounds that all variants share."""
        for _ in range(2):
            self.measure()
        self.bench.log(f"    {self.name}: about {self.median:.2f} ms a step")
        for found in (self.times, self.windows, self.joules):
            found.clear()

    def eager(self):
        self.forward.begin()
        self.executor.run(self.schedule, self.forward)
        self.forward.end()

    def capture(self):
        self.step = self.executor.capture(
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

    def measure(self, calls=1, warm=1):
        """`warm` replays settle the clocks if they last, one more lines the ranks up; then `calls` are timed."""
        self.bench.meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(warm - 1):
            self.step.replay()
        torch.cuda.synchronize()  # launches run ahead, and the counter is read by the host
        began, joules = time.time(), self.bench.energy.joules()
        self.step.replay()
        begin.record()
        for _ in range(calls):
            self.step.replay()
        end.record()
        end.synchronize()
        self.windows.append((began, time.time()))
        self._add_energy(joules, calls + 1)
        self.times.append(max(self.bench.gathered(begin.elapsed_time(end) / calls)))

    def _add_energy(self, joules_before, calls):
        """Of a call, mean over ranks; the counter is slow, so only where it had half a second."""
        began, ended = self.windows[-1]
        if joules_before is not None and min(self.bench.gathered(ended - began)) > 0.5:
            mine = (self.bench.energy.joules() - joules_before) / calls / self.bench.ranks
            self.joules.append(sum(self.bench.gathered(mine)))

    @property
    def median(self):
        return statistics.median(self.times)


def add(bench, name, split, way, *, moves=PeerCopies, num_sms=0, blocks=None, counts_first=True):
    """Open, run eagerly, compare, capture, replay, compare; keep it if all went well on every rank."""
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
    fill_caches(forward)
    variant = Variant(bench, name, forward, bench.schedule(split), devices)
    if way == "copies" and moves in (PeerCopies, HostMoves):
        chunk = CHUNK_BYTES if moves is HostMoves else layout.places * layout.hidden * layout.dtype.itemsize
        variant.events = {
            Kind.DISPATCH: copies_in(devices[0]._rows[0], chunk, moves is HostMoves),
            Kind.COMBINE: copies_in(devices[0]._sums[0], chunk, moves is HostMoves),
        }
    return variant


def fill_caches(forward):
    """What a decode step attends to, alike in every variant."""
    for lane in forward.lanes:
        if lane.attention and lane.attention.sizes.cached:
            generator = torch.Generator(device="cuda").manual_seed(lane.span.start)
            lane.attention.cache_LNPV.normal_(generator=generator)


def copies_in(move, chunk, fetched):
    """Copies that a move takes, in chunks; through the host every rank also fetches."""
    pieces = [piece for found in (*move.sent, *(move.got if fetched else ())) for piece in found]
    return sum(-(-piece.size // chunk) for piece in pieces)


def add_alone(bench, base, *, movement=None):
    """The same variant without movement, and with `movement` (`movement_of`) its movement alone; all share channels."""
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
        found = [still, *([movement(bench, base)] if movement else [])]
        for variant in found:
            bench.meet()
            variant.step.replay()
            variant.check()
            variant.events = None
            bench.variants[variant.name] = variant
            variant.glance()
    except Exception:
        print(f"rank {bench.rank}: alone, {base.name}:\n{traceback.format_exc(limit=-5)}", flush=True)


def same(out, expected):
    """`equal`, or how they differ."""
    if torch.equal(out, expected):
        return "equal"
    rows = (out != expected).any(1)
    worst = (out.float() - expected.float()).abs().max()
    return f"{int(rows.sum())} of {len(rows)} rows differ, first {int(rows.nonzero()[0])}, by {float(worst):.3g}"


def compare(bench, calls=1, warm=1):
    """Rounds in which every variant takes its turn, then a table."""
    took = 0.0
    clocks = Clocks() if bench.rank == 0 else None
    for number in range(bench.options.rounds):
        if number and not bench.has(bench.reserve_s / 2 + took, f"rounds from number {number + 1} on"):
            break
        began = time.monotonic()
        for variant in bench.variants.values():
            variant.measure(calls, warm)
        took = time.monotonic() - began
    for variant in bench.variants.values():
        variant.check()
    table(bench, clocks.close() if clocks else [])


def sizes_of(options, *, layers, experts, tokens, sequence, cached=0, attention=True):
    """Of a part: heads and shared expert as in `HEADS` and `INNER`, unless it goes without both.

    `experts` are for two ranks; each rank of more holds as many.
    """
    heads = AttentionSizes(**HEADS, sequence=sequence, cached=cached) if attention else None
    if options.small:
        sequence = 1 if cached else 43
        heads = heads and AttentionSizes(heads=4, kv_heads=2, head_size=64, sequence=sequence, cached=min(cached, 50))
        sizes = {"layers": 3, "experts": 8 * options.ranks, "hidden": 512, "inner": 256, "tokens": 12 * 43}
    else:
        layers = options.layers or layers
        sizes = {"layers": layers, "experts": experts * options.ranks // 2, "tokens": tokens}
        sizes |= {"hidden": HIDDEN, "inner": INNER}
    return StackSizes(top_k=TOP_K, attention=heads, shared_inner=sizes["inner"] * attention, **sizes)
