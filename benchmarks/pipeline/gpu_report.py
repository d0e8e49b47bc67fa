"""What the parts of `gpu_overlap.py` print: a table of variants, shares of a profile, and the cost model's choice."""

import json
import statistics
import traceback
import zipfile
from dataclasses import replace
from pathlib import Path

from benchmarks.pipeline import gpu_profile
from benchmarks.pipeline.gpu_clocks import within

from bywash.moe.pipeline import SERIAL, Load, decide
from bywash.moe.pipeline.cost import H200_NVLINK
from bywash.report.timeline import chrome_trace, tracks_of


def table(bench, clocks):
    """Every variant of the part; the first one is the baseline. `clocks`: samples of `gpu_clocks`."""
    sizes, layers, baseline = bench.sizes, bench.sizes.layers, next(iter(bench.variants.values()))
    floor_ms = bench.flops * layers / bench.dense_flops * 1e3
    bench.log(
        f"\n{sizes.tokens} tokens per rank, {sizes.experts} experts, {layers} layers; floor {floor_ms:.2f} ms at the "
        f"dense rate {bench.dense_flops / 1e12:.0f} TFLOP/s"
    )
    columns = {"step ms": 9, "least": 9, "most": 9, "layer us": 10, "MFU": 7, "x first": 9, "exposed": 17}
    columns |= {"MHz": 7, "W": 5, "J": 8}
    bench.log(f"{'':50}" + "".join(f"{name:>{width}}" for name, width in columns.items()))
    rows = {}
    for name, variant in bench.variants.items():
        ms, alone = variant.median, bench.variants.get(f"{name}, compute only")
        exposed = f"{ms - alone.median:9.2f} {(ms - alone.median) / ms:6.2%}" if alone else ""
        found = within(clocks, variant.windows)
        speed = f"{found[0]:7.0f}{found[1]:5.0f}" if found else ""
        joules = statistics.median(variant.joules) if variant.joules else None
        if joules is not None:
            speed += f"{joules:8.2f}"
        bench.log(
            f"{name:50}{ms:9.2f}{min(variant.times):9.2f}{max(variant.times):9.2f}{ms / layers * 1e3:10.1f}"
            f"{bench.mfu(ms / layers):7.3f}{baseline.median / ms:9.3f}{exposed:>17}{speed}"
        )
        rows[name] = {"ms": variant.times, "compute only ms": alone.times if alone else None, "MHz, W, samples": found}
        rows[name] |= {"J a rank": variant.joules}
    bench.results["steps"] = rows
    bench.save()


def profile_of(bench, variant, *, detail=False):
    """Shares of one replay, printed for every rank; the timeline goes to `timelines.zip` in --out."""
    if not bench.has(2.5, f"profile of {variant.name}"):
        return
    found, events, spans = None, [], None
    try:
        events = gpu_profile.record(variant.step.replay, bench.meet, variant.schedule)
        events, spans = gpu_profile.by_op(events, variant.schedule, variant.events, variant.by_copies)
        found = gpu_profile.shares(events)
    except Exception:
        print(f"rank {bench.rank}: profile of {variant.name}:\n{traceback.format_exc(limit=-4)}", flush=True)
    everyone = bench.gathered((found, spans))
    for rank, (one, _) in enumerate(everyone):
        if one:
            hidden = ", ".join(f"{what} {share:.1%}" for what, share in one["hidden"].items())
            bench.log(
                f"  profile, {variant.name}, rank {rank}: step {one['step_us']:.0f} us, kernels {one['busy_us']:.0f}, "
                f"none for {1 - one['busy_us'] / one['step_us']:.2%}; hidden behind {hidden}; "
                f"us {one['us']}, number {one['count']}, copied {one['wire_bytes'] / 1e6:.0f} MB"
            )
    bench.results[f"profile, {variant.name}"] = [one for one, _ in everyone]
    bench.save()
    if detail and bench.rank == 0:
        print("\n".join("    " + line for line in gpu_profile.names(events)), flush=True)
    if bench.rank == 0 and bench.options.out and all(spans for _, spans in everyone):
        trace = chrome_trace(tracks_of([spans for _, spans in everyone]), {"what": f"{variant.name}, profiled replay"})
        slug = variant.name.replace(" ", "-").replace(",", "")
        with zipfile.ZipFile(Path(bench.options.out, "timelines.zip"), "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"timeline-{bench.options.part}-{slug}.json", json.dumps(trace))
    elif bench.rank == 0 and events:
        print("    no timeline: the profile's kernels and copies do not match the schedule's ops", flush=True)


def load_of(sizes, ranks):
    heads = sizes.attention
    return Load(
        ranks=ranks,
        tokens=sizes.tokens,
        hidden=sizes.hidden,
        item_bytes=2,
        top_k=sizes.top_k,
        experts=sizes.experts,
        combine="stable",
        intermediate=sizes.inner,
        shared_intermediate=sizes.shared_inner,
        attention_weights=heads.weights(sizes.hidden) if heads else 0,
        attention_size=heads.q_size if heads else 0,
        context=heads.context if heads else 0,
        passes=True,
    )


def machine_of(bench):
    """As fitted, with the link and the dense rate of this run; products inside a step reach about 0.83 of that."""
    return replace(
        H200_NVLINK,
        tflops=0.83 * bench.dense_flops / 1e12,
        link_gbytes_per_s=bench.link_gbytes_per_s,
        source="this run",
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
