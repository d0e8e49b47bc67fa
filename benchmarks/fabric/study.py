"""The fabric under expert parallelism, simulated: what ECN, adaptive routing and schedules do for DeepSeek-V3.

python benchmarks/fabric/study.py --out DIR                      # skew from a Zipf law, as shipped
python benchmarks/fabric/study.py --out DIR --counts DIR_OF_JSON # skew from expert counts of DeepSeek-V3

16 servers x 8 GPUs, one rank and one 400 Gb/s NIC per GPU, eight rail switches, two spines. All numbers are simulated;
the same command gives the same numbers. Writes study.json, and from it fabric-*.svg; `--draw study.json` only draws.
`docs/fabric-study.md` explains every setting and what came out.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs as a script from anywhere

from benchmarks.fabric.study_draw import draw

from bywash.balance import Placement
from bywash.fabric import NicConfig, Result, RoutingConfig, RunConfig, Scenario, SwitchConfig, rail_optimised, simulate
from bywash.fabric.profiles import profile
from bywash.planner import (
    Compute,
    LayerBytes,
    Method,
    Router,
    RowFormat,
    Schedule,
    Wire,
    drawn_choices,
    exposed_us,
    layer_bytes,
    moe_flows,
    nic_for,
    round_trip_us,
)
from bywash.routing import load_counts
from bywash.routing.skew import zipf_popularity

SERVERS, GPUS, EXPERTS = 16, 8, 256
RANKS = SERVERS * GPUS
GBPS, LATENCY_NS = 400.0, 700.0
BUFFER_BYTES = 32 << 20
ROUTER = Router(top_k=8, groups=8, top_groups=4)
ZIPF = 0.45
SAMPLE_US = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch size: `layers` are simulated in sequence; `counts` is the file that skew is taken from."""

    tokens: int
    layers: tuple[int, ...]
    compute: Compute
    counts: str
    seeds: int
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is switched on. `sent`: how rows travel; `balanced`: experts placed by their load."""

    ecn: bool = True
    adaptive: bool = True
    schedule: Schedule = "at-once"
    sent: str = "flat"
    balanced: bool = False


LADDER = ("ECMP + PFC", "+ ECN/DCQCN", "+ adaptive routing", "+ rotated schedule")
STEPS = {
    LADDER[0]: Step(ecn=False, adaptive=False),
    LADDER[1]: Step(adaptive=False),
    LADDER[2]: Step(),
    LADDER[3]: Step(schedule="rotated"),
    "staggered": Step(schedule="staggered"),
    "receiver-granted": Step(schedule="receiver-granted"),
    "paced": Step(schedule="paced"),
    "balanced placement": Step(balanced=True),
    "balanced + rotated": Step(balanced=True, schedule="rotated"),
    "per node, PFC only": Step(sent="hierarchical", ecn=False, adaptive=False),
    "per node, one rail": Step(sent="hierarchical"),
    "per node + balanced + paced": Step(sent="hierarchical", balanced=True, schedule="paced"),
}
# Rows go once per rank when flat, once per node and on the source's rail when hierarchical.
METHODS = {
    "flat": Method(gpus_per_server=GPUS, rows="per-rank", path="flat"),
    "hierarchical": Method(gpus_per_server=GPUS, rows="per-node", path="hierarchical"),
}
CASES = {
    "decode": Case(
        tokens=128,
        layers=(1, 29, 57),
        compute=Compute(attention_us=200.0, experts_us=50.0),
        counts="decode_in2000out100.json",
        seeds=5,
        steps=tuple(STEPS),
    ),
    "prefill": Case(
        tokens=4096,
        layers=(29,),
        compute=Compute(attention_us=2700.0, experts_us=2400.0),
        counts="prefill_in4096.json",
        seeds=2,
        steps=(
            *LADDER,
            "paced",
            "balanced + rotated",
            "per node, PFC only",
            "per node, one rail",
            "per node + balanced + paced",
        ),
    ),
}

Layers = tuple[LayerBytes, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for study.json and the pictures")
    parser.add_argument("--counts", type=Path, help="directory with expert counts in JSON; default: a Zipf law")
    parser.add_argument("--cases", default="decode,prefill", help="with commas between")
    parser.add_argument("--seeds", type=int, help="runs of each step; default 5 (decode) and 2 (prefill)")
    parser.add_argument("--tokens", type=int, help="tokens per rank in place of 128 and 4,096, for a shorter run")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes")
    parser.add_argument("--draw", type=Path, help="only draw, from this study.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.draw is not None:
        draw(json.loads(options.draw.read_text()), options.out)
        return
    cases = {name: _case(CASES[name], options) for name in options.cases.split(",")}
    study = {"source": source(options.counts), "network": network(), "cases": {}}
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, case in cases.items():
            study["cases"][name] = run_case(name, case, options.counts, pool)
            (options.out / "study.json").write_text(json.dumps(study, indent=1) + "\n")
    draw(study, options.out)


def _case(case: Case, options: argparse.Namespace) -> Case:
    return replace(case, tokens=options.tokens or case.tokens, seeds=options.seeds or case.seeds)


def source(counts: Path | None) -> str:
    """In words, for tables and pictures."""
    if counts is None:
        return f"a Zipf law of exponent {ZIPF}"
    return "expert counts of DeepSeek-V3 (sgl-project/sglang issue 6017)"


def network() -> dict[str, object]:
    """What all runs share, for the record."""
    fabric = wire()
    return {
        "topology": fabric.topology.describe(),
        "round_trip_us": fabric.rtt_us,
        "switch_latency_ns": LATENCY_NS,
        "buffer_bytes": BUFFER_BYTES,
    }


def wire() -> Wire:
    """The fabric: 128 NICs, 8 rail switches, 2 spines with 8 parallel links to each rail: no oversubscription."""
    fabric = rail_optimised(
        servers=SERVERS, nics_per_server=GPUS, spines=2, links_per_pair=8, gbps=GBPS, delay_ns=100.0
    )
    return Wire(topology=fabric, frame=profile("rocev2").frame, rtt_us=round_trip_us(fabric, LATENCY_NS))


def run_case(name: str, case: Case, counts: Path | None, pool: ProcessPoolExecutor) -> dict[str, object]:
    """All steps of a case over all seeds; prints a line for each step."""
    seeds = range(case.seeds)
    traffic = list(pool.map(make_traffic, [case] * case.seeds, [counts] * case.seeds, seeds))
    jobs = [(step, seed) for step in case.steps for seed in seeds]
    futures = [pool.submit(run_step, case, STEPS[step], seed, traffic[seed]) for step, seed in jobs]
    print(f"\n{name}: {case.tokens:,} tokens per rank, {len(case.layers)} layers, {source(counts)}; mean (least..most)")
    print(f"{'step':<28}{'exposed us/layer':>26}{'/ bound':>8}{'p99 us':>9}{'pause us':>11}{'peak MB':>9}{'marks':>9}")
    steps: dict[str, object] = {}
    for place, step in enumerate(case.steps):
        rows = [future.result() for future in futures[place * case.seeds : (place + 1) * case.seeds]]
        steps[step] = summed = {key: spread([row[key] for row in rows]) for key in rows[0] if key != "queue"}
        if "queue" in rows[0]:
            summed["queue"] = rows[0]["queue"]
        print(line(step, summed), flush=True)
    compute = {"attention_us": case.compute.attention_us, "experts_us": case.compute.experts_us}
    return {"tokens": case.tokens, "layers": len(case.layers), "seeds": case.seeds, "compute": compute, "steps": steps}


def line(step: str, summed: dict[str, list[float]]) -> str:
    mean, least, most = summed["exposed_us"]
    exposed = f"{mean:,.0f} ({least:,.0f}..{most:,.0f})"
    return (
        f"{step:<28}{exposed:>26}{mean / summed['bound_us'][0]:>8.2f}{summed['p99_us'][0]:>9,.0f}"
        f"{summed['pause_us'][0]:>11,.0f}{summed['peak_mb'][0]:>9.2f}{summed['marks'][0]:>9,.0f}"
    )


def spread(values: list[float]) -> list[float]:
    """Mean, least, most."""
    return [round(float(one), 3) for one in (np.mean(values), min(values), max(values))]


def load_skew(case: Case, counts: Path | None) -> np.ndarray:
    """Expert counts of the case's layers, [L, E]; from a law, hot experts lie elsewhere in each layer."""
    if counts is not None:
        return load_counts(counts / case.counts)[1][list(case.layers)]
    popularity_E = zipf_popularity(EXPERTS, ZIPF)
    return np.stack([np.random.default_rng(layer).permutation(popularity_E) for layer in case.layers])


def make_traffic(case: Case, counts: Path | None, seed: int) -> dict[str, Layers]:
    """Bytes between hosts for each combination of method and placement that a step uses."""
    skew_LE = load_skew(case, counts)
    choices = drawn_choices(skew_LE, ROUTER, ranks=RANKS, tokens=case.tokens, seed=seed, note=source(counts))
    whole_LE = np.round(skew_LE / skew_LE.sum(axis=1, keepdims=True) * 1e9).astype(np.int64)
    placements = {
        False: [Placement.equal(EXPERTS, RANKS)],
        True: [Placement.from_counts(counts_E, RANKS) for counts_E in whole_LE],
    }
    wanted = {(STEPS[step].sent, STEPS[step].balanced) for step in case.steps}
    return {
        _key(sent, balanced): layer_bytes(choices, placements[balanced], METHODS[sent], RowFormat())
        for sent, balanced in sorted(wanted)
    }


def _key(sent: str, balanced: bool) -> str:
    return f"{sent}{' balanced' if balanced else ''}"


def run_step(case: Case, step: Step, seed: int, traffic: dict[str, Layers]) -> dict[str, object]:
    """One simulation, as plain numbers."""
    layers, fabric = traffic[_key(step.sent, step.balanced)], wire()
    result = simulate(scenario(case, step, seed, layers, fabric))
    bound = sum(fabric.bound_us(matrix) for layer in layers for matrix in (layer.dispatch_HH, layer.combine_HH))
    total = sum(int((layer.dispatch_HH + layer.combine_HH).sum()) for layer in layers)
    exposed = exposed_us(result, len(layers), case.compute)
    numbers = result.summary()
    row: dict[str, object] = {
        "completion_us": numbers["completion_us"],
        "exposed_us": exposed,
        "overlapped_us": max(0.0, exposed - case.compute.layer_us),
        "bound_us": bound / len(layers),
        "even_us": fabric.wire_us(total / RANKS, GBPS) / len(layers),
        "p99_us": p99_us(result),
        "pause_us": numbers["pause_us"],
        "pauses": numbers["pauses"],
        "peak_mb": numbers["peak_queue_bytes"] / 1e6,
        "marks": numbers["ecn_marks"],
        "cnps": numbers["cnps"],
        "drops": numbers["drops"],
        "network_mb": total / 1e6 / len(layers),
        "packet_hops": numbers["packet_hops"],
        "cpu_s": numbers["seconds"],
    }
    if result.sample_ps_T.size:
        row["queue"] = (result.queue_bytes_TP.max(axis=1) / 1e6).round(3).tolist()
    return row


def scenario(case: Case, step: Step, seed: int, layers: Layers, fabric: Wire) -> Scenario:
    """The step's switches and NICs. Adaptive routing needs NICs that take packets out of order."""
    base = profile("rocev2")
    switch: SwitchConfig = replace(base.switch, buffer_bytes=BUFFER_BYTES, latency_ns=LATENCY_NS)
    nic: NicConfig = replace(base.nic, out_of_order=step.adaptive)
    if not step.ecn:
        switch, nic = replace(switch, ecn=replace(switch.ecn, enabled=False)), replace(nic, control="none")
    barrier = "server" if step.sent == "hierarchical" else "host"
    sample_us = SAMPLE_US if seed == 0 and case.compute.layer_us < 1000 else 0.0
    return Scenario(
        name=step.schedule,
        topology=fabric.topology,
        flows=moe_flows(layers, fabric, schedule=step.schedule, compute=case.compute, barrier=barrier),
        switch=switch,
        nic=nic_for(step.schedule, nic),
        routing=RoutingConfig(mode="adaptive" if step.adaptive else "ecmp"),
        frame=base.frame,
        run=RunConfig(seed=seed, sample_us=sample_us),
    )


def p99_us(result: Result) -> float:
    """99th percentile over messages: from when its rank began the exchange until the message is acknowledged.

    Unlike completion from a message's own start, it counts the time that a schedule lets it wait.
    """
    flows = result.scenario.flows
    key_F = flows.src_F * flows.phases + flows.phase_F
    begun = np.full(key_F.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(begun, key_F, result.start_ps_F - flows.start_ps_F)
    return float(np.percentile(result.done_ps_F - begun[key_F], 99)) / 1e6


if __name__ == "__main__":
    main()
