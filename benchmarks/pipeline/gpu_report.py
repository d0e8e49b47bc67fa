"""What the parts of `gpu_overlap.py` print: a table of variants, shares of a profile, and the cost model's choice."""

import json
import traceback
from pathlib import Path

from benchmarks.pipeline import gpu_profile

from bywash.moe.pipeline import SERIAL, Load, Machine, decide
from bywash.report.timeline import chrome_trace, tracks_of


def table(bench):
    sizes = bench.sizes
    flops = 6 * sizes.tokens * sizes.top_k * sizes.hidden * sizes.inner * sizes.layers
    baseline = next(iter(bench.variants.values()))
    bench.log(
        f"\n{sizes.tokens} tokens per rank, {sizes.experts} experts, {sizes.layers} layers; floor "
        f"{flops / bench.dense_flops * 1e3:.2f} ms at the dense rate {bench.dense_flops / 1e12:.0f} TFLOP/s"
    )
    bench.log(f"{'':44}{'step ms':>9}{'least':>9}{'most':>9}{'layer us':>10}{'MFU':>7}{'x first':>9}{'exposed':>17}")
    for name, variant in bench.variants.items():
        ms, alone = variant.median, bench.variants.get(f"{name}, compute only")
        exposed = f"{ms - alone.median:9.2f} {(ms - alone.median) / ms:6.2%}" if alone else ""
        bench.log(
            f"{name:44}{ms:9.2f}{min(variant.times):9.2f}{max(variant.times):9.2f}{ms / sizes.layers * 1e3:10.1f}"
            f"{flops / (ms * 1e-3) / bench.dense_flops:7.3f}{baseline.median / ms:9.3f}{exposed:>17}"
        )


def profile_of(bench, variant, *, detail=False):
    """Shares of one replay, printed for both ranks; the timeline goes to --out."""
    if not bench.has(2.5, f"profile of {variant.name}"):
        return
    try:
        events = gpu_profile.record(variant.step.replay, bench.meet)
        found = gpu_profile.shares(events)
        spans = gpu_profile.spans_of(events, variant.schedule, variant.events.get) if variant.events else None
    except Exception:
        print(f"rank {bench.rank}: profile of {variant.name}:\n{traceback.format_exc(limit=-4)}", flush=True)
        found, events, spans = None, [], None
    everyone = bench.gathered((found, spans))
    for rank, (one, _) in enumerate(everyone):
        if one:
            bench.log(
                f"  profile, {variant.name}, rank {rank}: step {one['step_us']:.0f} us, kernels {one['busy_us']:.0f}; "
                f"hidden behind experts {one['hidden_by_experts']:.1%}, any kernel {one['hidden_by_kernels']:.1%}; "
                f"us {one['us']}, number {one['count']}, copied {one['wire_bytes'] / 1e6:.0f} MB"
            )
    if detail and bench.rank == 0:
        print("\n".join("    " + line for line in gpu_profile.names(events)), flush=True)
    if bench.rank == 0 and bench.options.out and all(spans for _, spans in everyone):
        trace = chrome_trace(tracks_of([spans for _, spans in everyone]), {"what": f"{variant.name}, profiled replay"})
        slug = variant.name.replace(" ", "-").replace(",", "")
        Path(bench.options.out, f"timeline-{bench.options.part}-{slug}.json").write_text(json.dumps(trace))
    elif bench.rank == 0 and events and variant.events:
        print("    no timeline: the profile's kernels and copies do not match the schedule's ops", flush=True)


def load_of(sizes, ranks):
    return Load(
        ranks=ranks,
        tokens=sizes.tokens,
        hidden=sizes.hidden,
        item_bytes=2,
        top_k=sizes.top_k,
        experts=sizes.experts,
        combine="stable",
        intermediate=sizes.inner,
        attention_weights=sizes.hidden**2 if sizes.attention else 0,
    )


def machine_of(bench):
    return Machine(
        tflops=0.72 * bench.dense_flops / 1e12,
        memory_gbytes_per_s=4000.0,
        link_gbytes_per_s=bench.link_gbytes_per_s,
        exchange_start_us=10.0,
        stage_start_us=30.0,
        source="dense rate of this run; the experts' kernel reaches about 0.72 of it",
    )


def choose(bench, splits):
    """The cost model's decision among the serial step and `splits`."""
    return decide(load_of(bench.sizes, bench.group.ranks), machine_of(bench), [SERIAL, *splits])


def print_decision(bench, splits):
    """What the cost model takes, beside what was fastest."""
    decision = choose(bench, splits)
    bench.log(f"  cost model: {decision.split}: {decision.why}")
    for one in decision.candidates:
        bench.log(f"    {one}; hides {one.usage.hidden_share:.0%}")
    real = [one for name, one in bench.variants.items() if "only" not in name]
    bench.log(f"  measured fastest: {min(real, key=lambda one: one.median).name}")
