"""The exchange across two hosts (network namespaces of this machine, two ranks each) behind a link of a known rate.

    PYTHONPATH=src:. python benchmarks/exchange/hosts.py            # needs root

The link is a veth pair limited by `tc tbf`: its rate is real, all else is this machine. For each rate the first table
has one dispatch and combine by `hierarchical`, by the flat deduplicated `gloo` and by hand (every pair a row), medians
of interleaved rounds, beside the bytes that crossed and the time that the link needs for them. The second has steps
of a stack of MoE layers, serial and in lanes, beside the larger of compute, wire, and the CPU seconds of all ranks over
the cores of this machine: ranks of both hosts share them, and sending takes CPU. The third has the shipped model's
prefill, serial and with --overlap microbatch.
"""

import argparse
import os
import tempfile

from tests.hosts.cluster import Cluster
from tests.hosts.network import skip_without_hosts

STACK = {"layers": 4, "intermediate": 64, "experts": 16, "top_k": 4, "heads": 4}
SPLITS = {"off": {"lanes": 1}, "2 lanes": {"lanes": 2}, "4 lanes": {"lanes": 4}}
BATCHES = 8


def exchange_table(cluster, rates_mbps, tokens, steps):
    print(f"\n{tokens} tokens per rank, hidden 1024, float32, 32 experts, top-4, combine fast, {steps} rounds")
    print(
        f"{'rate Mb/s':>9} {'way':>13} {'ms':>8} {'MB crossed':>11} {'wire ms':>8} {'ms/wire':>8} {'by hand/ours':>13}"
    )
    for rate_mbps in rates_mbps:
        cluster.network.limit(rate_mbps)
        results = cluster.run("time_steps", tokens=tokens, steps=steps, deadline_s=60)
        for way in results[0]:
            ms = max(result[way]["ms"] for result in results)
            crossed = max(results[rank][way]["bytes"] for rank in (0, 2))
            wire_ms = crossed * 8 / rate_mbps / 1e3
            by_hand = max(result["by hand"]["ms"] for result in results)
            print(
                f"{rate_mbps:>9} {way:>13} {ms:>8.1f} {crossed / 1e6:>11.2f} {wire_ms:>8.1f} {ms / wire_ms:>8.2f} "
                f"{by_hand / ms:>13.2f}"
            )


def stack_table(cluster, rates_mbps, hidden, sequence, rounds):
    cores = len(os.sched_getaffinity(0))
    shape = {**STACK, "hidden": hidden, "sequence": sequence}
    print(
        f"\n{BATCHES} sequences of {sequence} per rank, {shape}, float32, combine fast, {rounds} rounds, {cores} cores"
    )
    print(
        f"{'rate Mb/s':>9} {'overlap':>8} {'step s':>7} {'compute s':>10} {'wire s':>7} {'CPU s/cores':>12} "
        f"{'of it moving':>13} {'step/(compute, wire)':>21} {'step/all three':>15}"
    )
    for rate_mbps in rates_mbps:
        cluster.network.limit(rate_mbps)
        options = {"shape": shape, "batches": BATCHES, "splits": SPLITS, "rounds": rounds}
        results = cluster.run("stack_steps", deadline_s=60, **options)
        for split in SPLITS:
            each = [result[split] for result in results]
            step_s, compute_s = (max(one[key] for one in each) for key in ("step_s", "compute_s"))
            wire_s = max(each[rank]["bytes"] for rank in (0, 2)) * 8 / rate_mbps / 1e6
            larger_s = max(compute_s, wire_s)
            cpu_s, moving_s = (sum(one[key] for one in each) / cores for key in ("cpu_s", "moving_cpu_s"))
            print(
                f"{rate_mbps:>9} {split:>8} {step_s:>7.2f} {compute_s:>10.2f} {wire_s:>7.2f} {cpu_s:>12.2f} "
                f"{moving_s:>13.2f} {step_s / larger_s:>21.2f} {step_s / max(larger_s, cpu_s):>15.2f}"
            )


def overlap_table(cluster, rates_mbps, prompts, length):
    print(f"\nprefill of bywash-tiny, {prompts} prompts of {length} tokens, micro-batches of 2, combine fast")
    print(f"{'rate Mb/s':>9} {'overlap':>11} {'step s':>7} {'compute s':>10} {'wire s':>7} {'step/larger':>12}")
    for rate_mbps in rates_mbps:
        cluster.network.limit(rate_mbps)
        runs = {}
        for mode in ("off", "microbatch"):
            runs[mode] = cluster.run("prefill", mode=mode, prompts=prompts, length=length, deadline_s=60)
        # Compute alone is that of the serial run: with overlap, its stages share cores with the exchange.
        compute_s = max(result["compute_s"] for result in runs["off"])
        for mode, results in runs.items():
            step_s = max(result["layers_s"] for result in results)
            crossed = max(results[2 * host]["bytes"] + results[2 * host + 1]["bytes"] for host in range(2))
            wire_s = crossed * 8 / rate_mbps / 1e6
            print(
                f"{rate_mbps:>9} {mode:>11} {step_s:>7.2f} {compute_s:>10.2f} {wire_s:>7.2f} "
                f"{step_s / max(compute_s, wire_s):>12.2f}"
            )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates-mbps", type=int, nargs="*", default=[200, 1000])
    parser.add_argument("--stack-rates-mbps", type=int, nargs="*", default=[100, 200, 500, 1000])
    parser.add_argument("--hidden", type=int, default=256, help="of the stack")
    parser.add_argument("--sequence", type=int, default=256, help="of the stack")
    parser.add_argument("--rounds", type=int, default=3, help="of the stack")
    parser.add_argument("--overlap-rates-mbps", type=int, nargs="*", default=[50, 100])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    skip_without_hosts()
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(directory)
        try:
            if options.rates_mbps:
                exchange_table(cluster, options.rates_mbps, options.tokens, options.steps)
            if options.stack_rates_mbps:
                stack_table(cluster, options.stack_rates_mbps, options.hidden, options.sequence, options.rounds)
            if options.overlap_rates_mbps:
                overlap_table(cluster, options.overlap_rates_mbps, options.prompts, options.length)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
