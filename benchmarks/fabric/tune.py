"""Tuning held against vendor defaults and the DCQCN paper on MoE traffic that the search has not seen.

    python benchmarks/fabric/tune.py [--json OUT.json] [--jobs 2] [--full 3]

The fabric is examples/fabrics/two-spine.yaml cut to 4 of its 16 leaves (32 of 128 NICs), spines and cables as they are;
thresholds stay within the bounds of the whole fabric. Traffic: one MoE layer a case, dispatch in fp8, combine in bf16,
hidden 7168, 256 experts, top-8 of 4 of 8 groups, as DeepSeek-V3; 512, 1,024 or 2,048 tokens per rank; skew drawn with
Zipf exponents of 0.43 to 0.58, or to match real counts given with --counts (JSON, see `bywash trace`). Searched on 6
layers, judged on 12 others.
`--full N` then runs N further layers on all 128 NICs, with nothing searched again.
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
from bywash.fabric.tune.session import TUNED
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
EXPONENTS = (0.43, 0.58)


def fabric_plan(leaves: int) -> FabricPlan:
    data = yaml.safe_load(VALUES.read_text())
    data["topology"] |= {"leaves": leaves, "hosts": 8 * leaves}
    return make_plan(*parse_values(data))


def counts_of(layers: int, path: Path | None, seed: int) -> np.ndarray:
    """Expert counts [L, E]: of real layers drawn without repetition, or Zipf ones on random experts."""
    rng = np.random.default_rng(seed)
    if path is not None:
        counts_LE = load_counts(path)[1]
        if layers > len(counts_LE):
            raise ConfigError(f"--counts {path}: has {len(counts_LE)} layers; --search and --heldout need {layers}")
        return counts_LE[rng.permutation(len(counts_LE))[:layers]]
    return np.stack([rng.permutation(zipf_popularity(EXPERTS, rng.uniform(*EXPONENTS))) for _ in range(layers)])


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


def whole_fabric(tuning: Tuning, counts_LE: np.ndarray, tokens: int, jobs: int) -> list[Row]:
    """The same settings on all 128 NICs: what was learnt on a quarter of the fabric, tried on all of it."""
    plan, layers = fabric_plan(16), len(counts_LE)
    cases = layer_cases(plan, counts_LE, [tokens], 3000, "whole fabric, layer")
    print(f"\nall 128 NICs, {layers} further layers, {tokens:,} tokens per rank", flush=True)
    print("receive skew {:.2f} / {:.2f} / {:.2f} (least, mean, most)".format(*skew(cases, plan.topology.hosts)))
    with Pool(make_fabric(plan), cases, jobs=jobs) as pool:
        pool.run(tuning.named.values(), range(layers))
        outcomes = {name: pool.outcomes(setting, range(layers)) for name, setting in tuning.named.items()}
    return compare(outcomes, TUNED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1024,2048,512", help="per rank, in turn from layer to layer")
    parser.add_argument("--leaves", type=int, default=4, help="of the 16, eight NICs each")
    parser.add_argument("--search", type=int, default=6, help="layers to search on")
    parser.add_argument("--heldout", type=int, default=12, help="layers to judge on")
    parser.add_argument("--budget", type=int, default=Effort().budget, help="simulations of the search")
    parser.add_argument("--sending", action="store_true", help="also choose schedule and pacing of senders")
    parser.add_argument("--counts", type=Path, help="real expert counts, JSON")
    parser.add_argument("--full", type=int, default=0, help="layers to run on the whole fabric afterwards")
    parser.add_argument("--full-tokens", type=int, default=512)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    started, load = time.time(), os.getloadavg()[0]
    plan, sizes = fabric_plan(given.leaves), [int(one) for one in given.tokens.split(",")]
    counts_LE = counts_of(given.search + given.heldout + given.full, given.counts, 1)
    searched, judged = given.search, given.search + given.heldout
    to_search = layer_cases(plan, counts_LE[:searched], sizes, 1000, "layer")
    to_judge = layer_cases(plan, counts_LE[searched:judged], sizes, 2000, "held-out layer")
    print(plan.topology.describe())
    hosts = plan.topology.hosts
    for name, cases in (("search", to_search), ("held out", to_judge)):
        print("{}: {} layers, receive skew {:.2f} / {:.2f} / {:.2f}".format(name, len(cases), *skew(cases, hosts)))
    effort = replace(Effort(), budget=given.budget, seed=given.seed, jobs=given.jobs, sending=given.sending)
    tuning = tune(plan, to_search, to_judge, effort, limits=fabric_plan(16), report=_progress)
    print("\n".join(tuning_text(tuning)))
    took = time.time() - started
    print(
        f"\n{took:,.0f} s with {given.jobs} processes, load average {load:.1f} at the start on {os.cpu_count()} cores"
    )
    data = tuning_json(tuning) | {"tokens": sizes, "seconds": round(took), "load": load}
    if given.full:
        rows = whole_fabric(tuning, counts_LE[judged:], given.full_tokens, given.jobs)
        print("\n".join(rows_text(rows)))
        data["whole_fabric"] = rows_json(rows)
    if given.json:
        given.json.write_text(json.dumps(data, indent=2) + "\n")


def _progress(done: int, wanted: int) -> None:
    if done % 20 == 0:
        print(f"  {done} simulations", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
