"""The tables of docs/overflow.md: balance on real counts, distance to the optimum, fetches in decode, balance and cost.

    PYTHONPATH=src:. python benchmarks/balance/tables.py [quality] [exact] [decode] [cost] [--json OUT]

Plans are real; no row moves. Times are modelled from the constants below and labelled so. Public data sets that were
not downloaded are left out, and the tables say which were used.
"""

import argparse
import json
import sys

import numpy as np
from benchmarks.balance.exact import least_max_load, small_cases
from benchmarks.balance.real_counts import PUBLIC, Llama4Decode, all_layers

from bywash.balance import Limits, Placement, SlotDirectory, plan_step
from bywash.bench.overflow import OverflowBench, measure, scaled_counts

TOKENS = 4096
FLOPS, COPY_BYTES_S, HBM_BYTES_S = 650e12, 390e9, 4.3e12
"""H200, bfloat16: grouped products of large groups, copy-engine write over NVLink, copies in memory."""


def show(title, columns, rows):
    """Print one table; returns its rows as dicts."""
    print(f"\n## {title}", flush=True)
    texts = [[f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *texts]) for i in range(len(columns))]
    for line in [columns, *texts]:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
    sys.stdout.flush()
    return [dict(zip(columns, row)) for row in rows]


def quality():
    """max/mean of each data set before and after, by policy; each layer planned alone with empty slots."""
    rows = []
    for ranks, slots in ((8, 4), (32, 2)):
        for data in grouped_by_model():
            cells = [f"EP{ranks}, {slots} slots", data["name"], data["layers"]]
            for policy, alpha in (("none", 1.0), ("rearranged", 1.0), ("llep", 1.0), ("bywash", 1.0), ("bywash", 1.02)):
                results = [policy_result(layers, ranks, slots, policy, alpha) for layers in data["sets"]]
                after = np.concatenate([[row["max_over_mean_after"] for row in r["layers"]] for r in results])
                fetches = np.concatenate([[row["fetches"] for row in r["layers"]] for r in results])
                assert not any(r["dropped_rows"] for r in results)
                cells.append(f"{after.mean():.3f} ({after.max():.2f})")
                if policy in ("llep", "bywash"):
                    cells.append(f"{fetches.mean():.1f}")
            rows.append(cells)
    columns = ["case", "data", "layers", "at home", "rearranged", "llep", "f", "bywash", "f", "alpha 1.02", "f"]
    return show("max/mean, mean over layers (worst layer); f: fetches per layer; llep has no slot limit", columns, rows)


def grouped_by_model():
    """Data sets of one model together: name, number of layers, the sets."""
    models = {}
    for data in all_layers():
        models.setdefault(data.name.split()[0], []).append(data)
    return [{"name": n, "layers": sum(len(d.counts_LE) for d in s), "sets": s} for n, s in models.items()]


def policy_result(layers, ranks, slots, policy, alpha=1.0):
    """`measure` on each layer by itself: a directory for each, so that a fetch is never saved by another layer."""
    limits = Limits(alpha_1024=round(alpha * 1024))
    steps = scaled_counts(layers.counts_LE, ranks, TOKENS * layers.top_k)
    name = "none" if policy == "rearranged" else "refetch" if policy == "bywash" else policy
    bench = OverflowBench(ranks=ranks, slots=slots, limits=limits, policy=name, rearrange=policy == "rearranged")
    return measure(bench, steps, tuple(range(len(layers.counts_LE))))


def exact(number=48):
    """Our max load over the least possible one, on small skewed layers."""
    gaps = {}
    for rows_E, home_E, ranks, slots in small_cases(number):
        bound, best = least_max_load(rows_E, home_E, ranks, slots)
        directory = SlotDirectory.empty(ranks=ranks, slots=slots, experts=rows_E.size)
        counts_RE = np.zeros((ranks, rows_E.size), np.int32)
        counts_RE[0] = rows_E
        plan = plan_step(counts_RE, Placement(home_E=home_E, ranks=ranks), Limits(), directory)
        before = np.bincount(home_E, weights=rows_E, minlength=ranks).max()
        mean = rows_E.sum() / ranks
        gap = float(plan.rows_R.max()) / max(bound, mean) - 1
        gaps.setdefault((ranks, rows_E.size, slots), []).append((before / mean, best / mean, plan.imbalance, gap))
    rows = []
    for (ranks, experts, slots), values in gaps.items():
        before, best, ours, gap = np.array(values).T
        rows.append(
            [ranks, experts, slots, len(values), before.mean(), best.mean(), ours.mean(), gap.mean(), gap.max()]
        )
    every = np.concatenate([np.array(values)[:, 3] for values in gaps.values()])
    rows.append(["all", "", "", every.size, "", "", "", float(every.mean()), float(every.max())])
    columns = ["ranks", "experts", "slots", "cases", "before", "HiGHS", "bywash", "gap mean", "gap worst"]
    return show("max/mean against the optimum (mixed-integer program); gap is to its lower bound", columns, rows)


def decode(steps=160, warm=20, ranks=8, slots=24):
    """Fetches per step of all 24 layers on the Llama-4 decode trace, slots kept and slots forgotten."""
    if not PUBLIC.exists():
        return []
    rows = []
    for batch in (128, 387, 1024):
        for topic_every in (0, 40):
            for alpha in (1.0, 1.1, 1.25):
                cells = [batch, topic_every or "mixed", alpha]
                results = [
                    run_decode(batch, topic_every, alpha, kept, steps, warm, ranks, slots) for kept in (False, True)
                ]
                for imbalance, fetches in results:
                    cells += [imbalance, round(float(fetches), 2)]
                cells.append(f"{100 * results[1][1] / max(results[0][1], 1e-9):.1f} %")
                rows.append(cells)
    columns = [
        "sequences",
        "topic every",
        "alpha",
        "refetch max/mean",
        "fetches",
        "kept max/mean",
        "fetches",
        "of refetch",
    ]
    return show(f"Llama-4 decode, EP{ranks}, {slots} slots per rank for 24 layers, steps {warm}-{steps}", columns, rows)


def run_decode(batch, topic_every, alpha, kept, steps, warm, ranks, slots):
    """(mean max/mean, fetches per step) after `warm` steps."""
    trace = Llama4Decode(batch, topic_every=topic_every)
    placement, limits = Placement.equal(trace.experts, ranks), Limits(alpha_1024=round(alpha * 1024))
    empty = SlotDirectory.empty(ranks=ranks, slots=slots, experts=trace.experts, layers=trace.layers)
    rank_B, directory = np.arange(batch) % ranks, empty
    imbalance, fetches = [], 0
    for step, ids_LB in enumerate(trace.steps(steps)):
        for layer, ids_B in enumerate(ids_LB):
            keys = rank_B * trace.experts + ids_B
            counts_RE = np.bincount(keys, minlength=ranks * trace.experts).reshape(ranks, -1).astype(np.int32)
            plan = plan_step(counts_RE, placement, limits, directory if kept else empty, layer=layer)
            directory = plan.directory
            if step >= warm:
                imbalance.append(plan.imbalance)
                fetches += plan.fetches
    return float(np.mean(imbalance)), fetches / (steps - warm)


def cost(hidden=7168, intermediate=2048, top_k=8):
    """DeepSeek-V3: slots with their bytes, break-even on and off, balance, fetches and bytes, modelled layer time."""
    sets = [data for data in all_layers() if data.name.startswith("deepseek")]
    if not sets:
        return []
    expert_bytes = 3 * hidden * intermediate * 2
    row_us, weights_us = 6 * hidden * intermediate / FLOPS * 1e6, expert_bytes / HBM_BYTES_S * 1e6
    fetch_us = expert_bytes / COPY_BYTES_S * 1e6
    break_even = round(fetch_us / row_us)
    rows = []
    for phase, tokens, alpha in (("prefill", TOKENS, 1.02), ("decode", 128, 1.1)):
        chosen = [data for data in sets if phase in data.name]
        layers = len(chosen[0].counts_LE)
        for ranks in (8, 32):
            # one step for each recorded workload, in turn: what a change of workload does to kept slots
            steps = np.concatenate([scaled_counts(d.counts_LE, ranks, tokens * top_k) for d in chosen])
            for slots in (0, 2, 4, layers, 2 * layers, 4 * layers):
                for least in (1, break_even) if slots else (1,):
                    limits = Limits(alpha_1024=round(alpha * 1024), fetch_rows=least, use_rows=max(1, least // 10))
                    r = run_cost(steps, ranks, slots, limits, row_us, weights_us, fetch_us)
                    cells = [phase, ranks, slots, f"{slots * expert_bytes / 1e9:.1f}", "on" if least > 1 else "off"]
                    moved = f"{r['fetches'] * expert_bytes / ranks / 1e9:.2f}"
                    times = [f"{r['plain_us']:.0f}", f"{r['ours_us']:.0f}", f"{r['plain_us'] / r['ours_us']:.2f}"]
                    rows.append([*cells, r["before"], r["after"], round(r["fetches"], 1), moved, *times])
    columns = ["phase", "ranks", "slots", "GB/rank", "break-even", "before", "after", "fetches/step", "GB/step/rank",
               "plain us*", "ours us*", "gain*"]  # fmt: skip
    title = (
        f"DeepSeek-V3, {layers} MoE layers, one workload after another; slots per rank are shared by all layers. "
        f"Break-even {break_even} rows.\n# * modelled expert time of a layer, not measured: an expert costs the longer "
        f"of rows x {row_us:.3f} us and weights {weights_us:.1f} us;\n# fetches, {fetch_us:.0f} us, run beside home"
    )
    return show(title, columns, rows)


def run_cost(steps, ranks, slots, limits, row_us, weights_us, fetch_us):
    """Means over steps and layers; fetches per step over all layers and ranks."""
    layers, experts = steps.shape[1], steps.shape[3]
    placement = Placement.equal(experts, ranks)
    directory = SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts, layers=layers)
    sums = {"before": [], "after": [], "plain_us": [], "ours_us": []}
    fetches = 0
    for counts_LRE in steps:
        for layer, counts_RE in enumerate(counts_LRE):
            plan = plan_step(counts_RE, placement, limits, directory, layer=layer)
            directory = plan.directory
            rows_E = counts_RE.sum(axis=0)
            home_ER = np.zeros((experts, ranks))
            home_ER[np.arange(experts), placement.home_E] = rows_E
            sums["before"].append(home_ER.sum(axis=0).max() * ranks / rows_E.sum())
            sums["after"].append(plan.imbalance)
            group_us = lambda rows: np.where(rows > 0, np.maximum(rows * row_us, weights_us), 0)  # noqa: E731
            sums["plain_us"].append(group_us(home_ER).sum(axis=0).max())
            sums["ours_us"].append(modelled_us(plan, group_us, fetch_us))
            fetches += plan.fetches
    return {name: float(np.mean(values)) for name, values in sums.items()} | {"fetches": fetches / len(steps)}


def modelled_us(plan, group_us, fetch_us):
    """Slowest rank: home work while its fetches come in and its weights go out, then the spilled groups."""
    away_ER = plan.rows_ER.copy()
    away_ER[np.arange(plan.rank_E.size), plan.rank_E] = 0
    home_us = group_us(plan.rows_ER - away_ER).sum(axis=0)
    fetched_R = (plan.fetch_RS >= 0).sum(axis=1)
    sent_R = np.bincount(plan.fetch_RS[plan.fetch_RS >= 0], minlength=plan.rows_R.size)
    ready_us = np.where(fetched_R > 0, np.maximum(fetched_R, sent_R.max()) * fetch_us, 0)
    return float((np.maximum(home_us, ready_us) + group_us(away_ER).sum(axis=0)).max())


TABLES = {"quality": quality, "exact": exact, "decode": decode, "cost": cost}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"of {', '.join(TABLES)}; all by default")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - set(TABLES):
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    print("# data:", ", ".join(f"{m['name']} ({m['layers']} layers)" for m in grouped_by_model()))
    found = {name: TABLES[name]() for name in arguments.tables or TABLES}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
