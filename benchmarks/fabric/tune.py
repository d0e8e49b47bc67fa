"""Tuning held against vendor defaults and the DCQCN paper on MoE traffic that the search has not seen.

    python benchmarks/fabric/tune.py --leaves 16 --tokens 512 --search 3 --heldout 6 --budget 60 \\
        --heldout-counts COUNTS.json OTHER.json                  # all 128 NICs
    python benchmarks/fabric/tune.py --full 3              # search on a quarter of the fabric, then try it on all of it

The fabric is examples/fabrics/two-spine.yaml, by default cut to 4 of its 16 leaves (32 of 128 NICs), spines and cables
as they are; thresholds stay within the bounds of the whole fabric. Traffic: one MoE layer a case, dispatch in fp8,
combine in bf16, hidden 7168, 256 experts, top-8 of 4 of 8 groups, as DeepSeek-V3; 512, 1,024 or 2,048 tokens per rank.

Skew is drawn with Zipf exponents of 0.43 to 0.58, or to match real counts given with --counts (JSON, see `bywash
trace`). Held-out layers are of another kind: exponents of 0.35 to 0.65, drawn from a seed of their own that nothing
was designed on. `--heldout-counts FILE ...` judges on layers of such counts as well, `--full N` on N further layers on
all 128 NICs, both with nothing searched again. At the end one table has all sets.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from bywash.balance import Placement
from bywash.errors import ConfigError
from bywash.fabric.config.plan import FabricPlan, make_plan
from bywash.fabric.config.values import parse_values
from bywash.fabric.profiles import profile
from bywash.fabric.tune import Case, Effort, Pool, Tuning, compare, make_fabric, tune
from bywash.fabric.tune.heldout import Row
from bywash.fabric.tune.report import rows_json, rows_text, tuning_json, tuning_text
from bywash.fabric.tune.session import TUNED, VENDOR
from bywash.fabric.tune.space import vendor
from bywash.planner import (
    Compute,
    Method,
    Router,
    RowFormat,
    Wire,
    drawn_choices,
    layer_bytes,
    moe_flows,
    round_trip_us,
)
from bywash.routing import load_counts
from bywash.routing.skew import zipf_popularity

VALUES = Path(__file__).parents[2] / "examples" / "fabrics" / "two-spine.yaml"
EXPERTS, ROUTER = 256, Router(top_k=8, groups=8, top_groups=4)
EXPONENTS, HELDOUT_EXPONENTS = (0.43, 0.58), (0.35, 0.65)
SEARCH_SEED, COUNTS_SEED = 1, 20_261_203
UNIFORM_SHARE = 64  # of the line for every QP: what an earlier search without counts chose


def fabric_plan(leaves: int) -> FabricPlan:
    data = yaml.safe_load(VALUES.read_text())
    data["topology"] |= {"leaves": leaves, "hosts": 8 * leaves}
    return make_plan(*parse_values(data))


def counts_of(layers: int, path: Path | None, seed: int, exponents: tuple[float, float] = EXPONENTS) -> np.ndarray:
    """Expert counts [L, E]: of real layers drawn without repetition, or Zipf ones on random experts."""
    rng = np.random.default_rng(seed)
    if path is not None:
        counts_LE = load_counts(path)[1]
        if layers > len(counts_LE):
            raise ConfigError(f"--counts {path}: has {len(counts_LE)} layers; --search and --heldout need {layers}")
        return counts_LE[rng.permutation(len(counts_LE))[:layers]]
    return np.stack([rng.permutation(zipf_popularity(EXPERTS, rng.uniform(*exponents))) for _ in range(layers)])


def layer_cases(plan: FabricPlan, counts_LE: np.ndarray, sizes: list[int], seed: int, name: str) -> list[Case]:
    """A case for each layer: its dispatch, and its combine when a rank has what it was due.

    `sizes` are tokens per rank, taken in turn.
    """
    topology = plan.topology
    wire = Wire(topology=topology, frame=profile("rocev2").frame, rtt_us=round_trip_us(topology, 0.0))
    placement = [Placement.equal(counts_LE.shape[1], topology.hosts)]
    made = []
    for layer, counts_E in enumerate(counts_LE):
        tokens = sizes[layer % len(sizes)]
        choices = drawn_choices(
            counts_E[None], ROUTER, ranks=topology.hosts, tokens=tokens, seed=seed + layer, note="counts"
        )
        exchange = layer_bytes(choices, placement, Method(gpus_per_server=8), RowFormat())
        flows = moe_flows(exchange, wire, schedule="at-once", compute=Compute())
        made.append(Case(name=f"{name} {layer}, {tokens} tokens", flows=flows, seed=seed + layer))
    return made


def skew(cases: list[Case], hosts: int) -> tuple[float, float, float]:
    """Least, mean and largest max/mean of bytes received in the dispatch."""
    ratios = []
    for case in cases:
        chosen = case.flows.phase_F == 0
        bytes_H = np.bincount(case.flows.dst_F[chosen], case.flows.bytes_F[chosen], hosts)
        ratios.append(bytes_H.max() / bytes_H.mean())
    return min(ratios), float(np.mean(ratios)), max(ratios)


def judge_again(tuning: Tuning, plan: FabricPlan, cases: list[Case], what: str, jobs: int) -> list[Row]:
    """The same settings on other cases of a fabric, perhaps a larger one; nothing is searched again."""
    print(f"\n{what}: {len(cases)} layers, receive skew {_skew_text(cases, plan.topology.hosts)}", flush=True)
    with Pool(make_fabric(plan), cases, jobs=jobs) as pool:
        pool.run(tuning.named.values(), range(len(cases)))
        outcomes = {name: pool.outcomes(setting, range(len(cases))) for name, setting in tuning.named.items()}
    rows = compare(outcomes, TUNED)
    print("\n".join(rows_text(rows)), flush=True)
    return rows


def summary(judged: dict[str, list[Row]]) -> list[str]:
    """Tuned against the defaults and the paper on every held-out set: shorter p99 and whole, pauses, the bound."""
    width = max(map(len, judged))
    lines = [
        f"{'':<{width}} {'against':<27} {'p99 over tuned':>18} {'whole over tuned':>18} {'paused, theirs':>15}"
        f" {'tuned':>8} {'whole / bound':>14} {'tuned':>6}"
    ]
    for name, rows in judged.items():
        known = {row.name: row for row in rows}
        mine = known[TUNED].score
        for other in (VENDOR, "DCQCN paper", "defaults, uniform pace", "PFC alone, no ECN"):
            row = known[other]
            ratios = [
                "{0.value:.3f} ({0.low:.3f}-{0.high:.3f})".format(row.ratios[key]) for key in ("p99_us", "whole_us")
            ]
            lines.append(
                f"{name:<{width}} {other:<27} {ratios[0]:>18} {ratios[1]:>18} {row.score.worst_pause_share:>15.3%} "
                f"{mine.worst_pause_share:>8.3%} {row.score.whole_us / row.score.floor_us:>14.2f} "
                f"{mine.whole_us / mine.floor_us:>6.2f}"
            )
    return lines


def _skew_text(cases: list[Case], hosts: int) -> str:
    return "{:.2f} / {:.2f} / {:.2f} (least, mean, most)".format(*skew(cases, hosts))


def main() -> None:
    given = _options()
    started, load = time.time(), os.getloadavg()[0]
    plan, sizes = fabric_plan(given.leaves), [int(one) for one in given.tokens.split(",")]
    searched_LE = counts_of(given.search, given.counts, SEARCH_SEED)
    judged_LE = counts_of(given.heldout, None, given.heldout_seed, HELDOUT_EXPONENTS)
    to_search = layer_cases(plan, searched_LE, sizes, 1000, "layer")
    to_judge = layer_cases(plan, judged_LE, sizes, 2000, "held-out layer")
    print(plan.topology.describe())
    for name, cases in (("search", to_search), ("held out", to_judge)):
        print(f"{name}: {len(cases)} layers, receive skew {_skew_text(cases, plan.topology.hosts)}")
    effort = replace(Effort(), budget=given.budget, seed=given.seed, jobs=given.jobs, sending=given.sending)
    gbps = make_fabric(plan).gbps
    uniform = {"defaults, uniform pace": replace(vendor(gbps), pace_gbps=gbps / UNIFORM_SHARE)}
    tuning = tune(plan, to_search, to_judge, effort, limits=fabric_plan(16), also=uniform, report=_progress)
    print("\n".join(tuning_text(tuning)))
    took = time.time() - started
    print(
        f"\n{took:,.0f} s with {given.jobs} processes, load average {load:.1f} at the start on {os.cpu_count()} cores",
        flush=True,
    )
    data = tuning_json(tuning) | {"tokens": sizes, "seconds": round(took), "load": load}
    judged = {"drawn, blind": list(tuning.rows)}
    for path in given.heldout_counts:
        counts_LE = counts_of(given.heldout_layers, path, COUNTS_SEED)
        cases = layer_cases(plan, counts_LE, sizes, 4000, f"{path.stem}, layer")
        judged[path.stem] = judge_again(tuning, plan, cases, path.stem, given.jobs)
    if given.full:
        whole = fabric_plan(16)
        counts_LE = counts_of(given.full, None, given.heldout_seed + 1, HELDOUT_EXPONENTS)
        cases = layer_cases(whole, counts_LE, [given.full_tokens], 3000, "whole fabric, layer")
        judged["all 128 NICs"] = judge_again(tuning, whole, cases, "all 128 NICs", given.jobs)
    print("\n" + "\n".join(summary(judged)))
    if given.json:
        data["judged"] = {name: rows_json(rows) for name, rows in judged.items()}
        given.json.write_text(json.dumps(data, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1024,2048,512", help="per rank, in turn from layer to layer")
    parser.add_argument("--leaves", type=int, default=4, help="of the 16, eight NICs each")
    parser.add_argument("--search", type=int, default=6, help="layers to search on")
    parser.add_argument("--heldout", type=int, default=12, help="layers to judge on")
    parser.add_argument("--budget", type=int, default=Effort().budget, help="simulations of the search")
    parser.add_argument(
        "--sending", action=argparse.BooleanOptionalAction, default=True, help="schedule and pacing of senders, too"
    )
    parser.add_argument("--counts", type=Path, help="real expert counts to search on, JSON")
    parser.add_argument("--heldout-seed", type=int, default=20_261_202, help="of the layers to judge on")
    parser.add_argument(
        "--heldout-counts", type=Path, nargs="+", default=[], help="real expert counts to judge on as well, JSON"
    )
    parser.add_argument("--heldout-layers", type=int, default=5, help="layers of each such file")
    parser.add_argument("--full", type=int, default=0, help="layers to run on the whole fabric afterwards")
    parser.add_argument("--full-tokens", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _progress(done: int, wanted: int) -> None:
    if done % 20 == 0:
        print(f"  {done} simulations", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
