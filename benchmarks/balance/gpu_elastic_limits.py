"""More measured parts of `gpu_elastic.py`: memory under a cap, a trace with changing topics, break-even, the lane.

Sizes and helpers are those of `gpu_elastic_parts.py`.
"""

import gc
import statistics
from dataclasses import replace

import numpy as np
import torch
from benchmarks.balance.gpu_elastic_parts import (
    EXPERTS,
    HIDDEN,
    INNER,
    SIZES,
    TOP_K,
    Both,
    imbalance,
    popular,
    roomy,
    timed,
)
from benchmarks.skewed_ids import counts_for, draw_ids, popularity

from bywash.balance import Limits
from bywash.kernels import experts as hopper
from bywash.kernels.experts import HopperExperts
from bywash.routing.skew import zipf_popularity

SLACK_BYTES = 512 << 20
STEPS, PERIOD, EXPONENT = 240, 40, 0.9
TRACE_LIMITS = Limits(alpha_1024=1044, fetch_rows=256, use_rows=256)
"""A copy behind own experts costs a step some 14 us, about 100 rows, and reading an expert's weights as much as 150."""
WARM_STEPS = 120
"""Steps before the first that counts, some two seconds: clocks that have just met the power limit first overshoot."""


FEWER = 30
"""One step of so many, in a run that only checks that all parts run."""
TRACE_S = 15.0
"""What one mode of `part_trace` needs at least."""


def part_memory(run):
    """A cap on memory at which plain expert parallelism fails and ours runs every step, with the same bits."""
    tokens = 8192
    sizes = replace(SIZES, tokens=tokens, slots=4, pairs=tokens * TOP_K * 11 // 10)
    inputs = {
        "balanced": popular("balanced", tokens=tokens, seed=3 + run.rank, ranks=run.ranks),
        "hot": popular("hot", tokens=tokens, seed=3 + run.rank, ranks=run.ranks),
        "all to rank 0": popular("balanced", tokens=tokens, seed=5 + run.rank, ranks=run.ranks) % (EXPERTS // 32)
        + 8 * torch.arange(TOP_K, device="cuda"),
    }
    run.meet()
    before = torch.cuda.mem_get_info()[0]
    both = Both(run, sizes, Limits(alpha_1024=1044, fetch_rows=1024), "exact", plain=False)
    for ids in inputs.values():
        both.route(ids)
        both.elastic(both.x, both.routing)
        both.elastic.check()
    torch.cuda.empty_cache()
    arithmetic = both.layers.arithmetic
    used, planned = before - torch.cuda.mem_get_info()[0], sum(arithmetic.values())
    for name, size in arithmetic.items():
        run.say(f"{name}: {size:,} B")
    run.say(f"in all {planned:,} B as computed; {used:,} B less free on the device, with inputs, code and page sizes")
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - SLACK_BYTES, dtype=torch.uint8, device="cuda")
    run.say(f"cap: {SLACK_BYTES >> 20} MiB left beside ours, for a step's result")
    kept, least = {}, torch.cuda.mem_get_info()[0]
    for name, ids in inputs.items():
        both.route(ids)
        _, rows = imbalance(run, both.ids)
        out = both.elastic(both.x, both.routing)
        both.elastic.check()
        least = min(least, torch.cuda.mem_get_info()[0])
        kept[name] = out.cpu()
        planned_rows = [int(n) for n in both.layers.planner.rows_R]
        waves = int(both.elastic.record.waves)
        run.say(
            f"ours, {name}: rows at home {rows}, planned {planned_rows}, {waves} waves, buffers {sizes.pairs} pairs; "
            f"dropped {int(sum(rows)) - sum(planned_rows)}"
        )
        assert int(sum(rows)) == sum(planned_rows)
        del out
    run.say(f"ours ran every step; least free memory {run.least(least) / 2**20:.0f} MiB")
    run.keep("memory", {"arithmetic": arithmetic, "used": used, "least": least})
    slots, device = both.layers.slots, both.layers.device
    both.elastic = None
    both.layers.h_MF = both.layers.y_MD = None
    device.close()
    del device
    slots.resize(0)
    del both.layers.device
    release()
    run.say(f"ours released but for weights: {torch.cuda.mem_get_info()[0] / 2**20:.0f} MiB free under the same cap")
    worst_fails(run, both, tokens)
    rows_fail(run, both, inputs)
    release()
    del ballast
    release()
    both.plain = both.open_plain("exact")
    for name, ids in inputs.items():
        both.route(ids)
        out = both.plain(both.x, both.routing)
        both.plain.check()
        run.say(
            f"without the cap, plain against ours, {name}: {run.all(torch.equal(out.cpu(), kept[name]))} (same bits)"
        )
        del out


def release():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def worst_fails(run, both, tokens):
    """Plain buffers for whatever may come."""
    pairs, error, made = run.ranks * tokens * TOP_K, "", []
    try:
        both.plain = both.open_plain("exact")
        made.append(torch.empty(pairs, HIDDEN, dtype=torch.bfloat16, device="cuda"))
    except torch.OutOfMemoryError as caught:
        error = str(caught).split(". ")[0]
    failed = run.total(bool(error))
    run.say(f"plain, buffers for all that may come ({pairs} pairs): {f'fails: {error}' if failed else 'FITS'}")
    if both.plain is not None:
        both.plain.device.close()
    both.plain, made = None, None
    release()


def rows_fail(run, both, inputs):
    """Plain buffers as large as each step's rows, allocated anew."""
    from bywash.exchange.peer_device import PeerDevice

    device = PeerDevice(run.group, both.plain_layout("exact"), both.placement.home_E, combine_mode="exact")
    local = EXPERTS // run.ranks
    for name, ids in inputs.items():
        both.route(ids)
        got = device.dispatch(both.x, both.routing.ids_TK, both.routing.weights_TK)
        rows, error, y = int(got.ends_L[local - 1]), "", None
        try:
            experts = HopperExperts(*both.layers.slots.own(0), pairs=max(rows, 1))
            y = experts(got.rows_PD, got.index_M[: max(rows, 1)], got.ends_L[:local])
            out = torch.empty_like(both.x)
        except torch.OutOfMemoryError as caught:
            error = f"rank {run.rank}: " + str(caught).split(". ")[0]
        failed, most = run.total(bool(error)), run.worst(rows)
        if failed:
            print(f"  {error}\n" if error else "", end="", flush=True)
        run.say(
            f"plain, buffers by the step, {name}: {'fails with OutOfMemoryError' if failed else 'fits'}; "
            f"most rows {most:.0f}"
        )
        if failed:
            break
        del out
        out = device.combine(y)
        device.check()
        del out, y, experts, got
    device.close()


def topic_weights(options, topic):
    """Popularity of every expert [E] in a topic: of a recorded layer of `--counts`, or Zipf, experts in new places."""
    if options.counts:
        counts_LE = counts_for(options.counts, EXPERTS)
        return popularity(counts_LE[topic * len(counts_LE) // (STEPS // PERIOD)])
    places = torch.Generator().manual_seed(100 + topic)
    return torch.from_numpy(zipf_popularity(EXPERTS, EXPONENT)).float()[torch.randperm(EXPERTS, generator=places)]


def trace_ids(step, run):
    """Ids [T, K] of a step, by Gumbel top-k."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * step + run.rank)
    return draw_ids(topic_weights(run.options, step // PERIOD), SIZES.tokens, TOP_K, generator)


def part_trace(run):
    """240 steps, 4,096 tokens, 256 experts, other hot experts every 40 steps: p99/p50 of a step.

    Beside them in the same rounds `even`, the plain layer with uniform routing: what clocks alone make of equal work.
    """
    steps = [trace_ids(step, run) for step in range(0, STEPS, FEWER if run.options.small else 1)]
    even = popular("balanced", tokens=SIZES.tokens, seed=1 + run.rank, ranks=run.ranks)
    for mode in ("stable", "fast"):
        if not run.has(TRACE_S, mode):
            break
        both = Both(run, replace(roomy(run.ranks), slots=16), TRACE_LIMITS, mode)
        graphs = {"plain": both.graph(both.plain, calls=1)[0], "ours": both.graph(both.elastic, calls=1)[0]}
        for ids in steps[-WARM_STEPS:]:
            timed_step(run, both, ids, even, graphs)
        before, seen = both.elastic.record.fetched[0].clone(), []
        for ids in steps:
            seen.append(timed_step(run, both, ids, even, graphs))
        both.elastic.check()
        both.plain.check()
        report_trace(run, mode, seen, run.total(int(before)))
        both.layers.device.close()
        both.plain.device.close()
        del both, graphs
        release()


def timed_step(run, both, ids, even, graphs):
    """One step each way: microseconds by name, rows of each rank at home and as planned, copies so far."""
    found = {"rows": torch.bincount(ids.flatten() // (EXPERTS // run.ranks), minlength=run.ranks)}
    for name, routed in (("plain", ids), ("ours", ids), ("even", even)):
        both.route(routed)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs["plain" if name == "even" else name].replay()
        end.record()
        found[name] = begin, end
        if name == "ours":
            found["planned"] = both.layers.planner.rows_R.clone()
            found["copies"] = both.elastic.record.fetched[0].clone()
    torch.cuda.synchronize()
    return {name: v[0].elapsed_time(v[1]) * 1e3 if isinstance(v, tuple) else v.tolist() for name, v in found.items()}


def report_trace(run, mode, seen, copies_before):
    times = {name: np.array(run.worst_each([one[name] for one in seen])) for name in ("plain", "ours", "even")}
    rows, planned = np.array(run.sum_each([one["rows"] for one in seen])), np.array([one["planned"] for one in seen])
    copies = np.array(run.sum_each([one["copies"] for one in seen])) - copies_before
    bounds, after = (each.max(1) / each.mean(1) for each in (rows, planned))
    for name, values in times.items():
        p50, p99 = np.percentile(values, [50, 99])
        run.say(f"{mode}, {name}: p50 {p50:.0f} us, p99 {p99:.0f}, p99/p50 {p99 / p50:.3f}, mean {values.mean():.0f}")
    speedup, bound = times["plain"].sum() / times["ours"].sum(), rows.max(1).sum() / rows.mean(1).sum()
    run.say(
        f"{mode}: max/mean {bounds.min():.2f} to {bounds.max():.2f}, mean {bounds.mean():.3f}; speed-up {speedup:.3f}, "
        f"bound {bound:.3f} ({speedup / bound:.2f} of it); {copies[-1]:.0f} copies in {len(seen)} steps"
    )
    for at in np.argsort(times["ours"])[::-1][:8]:
        shown = ", ".join(f"{name} {values[at]:.0f} us" for name, values in times.items())
        run.say(f"    step {at}: {shown}; max/mean {bounds[at]:.3f}, planned {after[at]:.3f}; copies {copies[at]:.0f}")
    kept = {"bounds": bounds, "planned": after, "copies": copies, **times}
    run.keep(mode, {name: values.tolist() for name, values in kept.items()})


class At:
    """Weights at an address that this process does not own: what a tensor map needs."""

    def __init__(self, address, shape):
        self.shape, self._address = shape, address

    def data_ptr(self):
        return self._address


def part_breakeven(run):
    """One expert's rows against time: copied and computed, resident, by reference (read from the peer as computed)."""
    both = Both(run, replace(SIZES, tokens=128, slots=2, pairs=8192), Limits(), plain=False)
    device, planner, pool = both.layers.device, both.layers.planner, both.layers.slots
    device.begin(both.elastic.record, planner, both.x, both.ids, both.weights, counts_first=False)
    other = (run.rank + 1) % run.ranks
    planner.keys_RS[run.rank, 0] = other * (EXPERTS // run.ranks)
    x = torch.randn(4096, HIDDEN, device="cuda").bfloat16()
    index, out = torch.arange(4096, dtype=torch.int32, device="cuda"), torch.empty_like(x)
    ends = torch.zeros(1, dtype=torch.int32, device="cuda")
    at = pool.layout.offsets(0)
    run.meet()
    seen = {}

    def fetch():
        device._missing_S[:1] = other
        device.fetch()

    for rows in (16, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096):
        tuning = hopper.Tuning.choose(rows)
        resident = HopperExperts(pool.gate_up_SGD[:1], pool.down_SDF[:1], pairs=4096, tuning=tuning)
        reference = HopperExperts(pool.gate_up_SGD[:1], pool.down_SDF[:1], pairs=4096, tuning=tuning)
        home = pool.homes[other]
        words = [
            *hopper._gate_up_map(At(home + at["gate_at"], (1, 2 * INNER, HIDDEN))),
            *hopper._down_map(At(home + at["down_at"], (1, HIDDEN, INNER))),
        ]
        for place, word in enumerate(words):
            reference._parameters[place] = word
        ends.fill_(rows)
        fetch()
        wanted = resident(x, index, ends, out)[:rows].clone()
        same = torch.equal(reference(x, index, ends, out)[:rows], wanted)
        ways = {
            "copied": lambda f=fetch, e=resident: (f(), e(x, index, ends, out)),
            "resident": lambda e=resident: e(x, index, ends, out),
            "by reference": lambda e=reference: e(x, index, ends, out),
            "copy alone": fetch,
        }
        times = timed(run, ways, calls=1, rounds=9)
        seen[rows] = {name: statistics.median(values) for name, values in times.items()}
        run.say(
            f"{rows} rows: "
            + ", ".join(f"{name} {value:.0f} us" for name, value in seen[rows].items())
            + ("" if run.all(same) else "; DIFFERENT BITS")
        )
    device.check()
    per_row = (seen[4096]["resident"] - seen[1024]["resident"]) / 3072
    copy = statistics.median(each["copy alone"] for each in seen.values())
    run.say(f"formula: copy {copy:.0f} us / {per_row:.3f} us a row = break-even {copy / per_row:.0f} rows")
    run.keep("curve", seen)


def part_lane(run):
    """Spilled rows in one launch with home rows, in a launch of their own behind it, and on a low-priority stream."""
    both = Both(run, replace(SIZES, slots=1), Limits(), plain=False)
    gate, down = both.layers.slots.own(0)
    local, guests = gate.shape[0], 4
    low, main = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    for guest_rows, home_rows in ((0, 256), (1024, 223), (3072, 157)):
        counts = torch.full((local,), home_rows, dtype=torch.int32)
        counts[-guests:] = guest_rows
        ends = counts.cumsum(0).int().cuda()
        pairs = int(counts.sum())
        x = both.x
        index = torch.randint(x.shape[0], (pairs,), dtype=torch.int32, device="cuda")
        h = torch.empty(pairs, INNER, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(pairs, HIDDEN, dtype=torch.bfloat16, device="cuda")
        more = {"pairs": pairs, "rows_per_expert": 256, "intermediate": h}
        first = local - guests
        one = HopperExperts(gate, down, **more)
        home = HopperExperts(gate[:first], down[:first], **more)
        guest = HopperExperts(gate[first:], down[first:], first=first, **more)

        def two(x=x, index=index, ends=ends, out=out, home=home, guest=guest, first=first):
            home(x, index, ends[:first], out)
            guest(x, index, ends, out)

        def lane(x=x, index=index, ends=ends, out=out, home=home, guest=guest, first=first):
            current = torch.cuda.current_stream()
            for stream in (low, main):
                stream.wait_stream(current)
            with torch.cuda.stream(main):
                home(x, index, ends[:first], out)
            with torch.cuda.stream(low):
                guest(x, index, ends, out)
            for stream in (low, main):
                current.wait_stream(stream)

        ways = {
            "one launch": lambda one=one, a=(x, index, ends, out): one(*a),
            "two in turn": two,
            "low-priority lane": lane,
        }
        ways["one launch"]()
        wanted, same = out.clone(), True
        for way in (two, lane):
            out.zero_()
            way()
            same &= torch.equal(out, wanted)
        times = timed(run, ways, calls=1, rounds=11)
        run.say(
            f"{guests} guests x {guest_rows} rows beside {first} x {home_rows}: "
            + ", ".join(f"{name} {statistics.median(values):.0f} us" for name, values in times.items())
            + f"; {'same bits' if run.all(same) else 'DIFFERENT BITS'}"
        )
        run.keep(str(guest_rows), times)


PARTS = {"memory": part_memory, "trace": part_trace, "breakeven": part_breakeven, "lane": part_lane}
