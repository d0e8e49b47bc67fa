"""The exchange across two hosts (network namespaces of this machine, two ranks each) behind a link of a known rate.

    PYTHONPATH=src:. python benchmarks/exchange/hosts.py            # needs root

The link is a veth pair limited by `tc tbf`: its rate is real, all else is this machine. For each rate the first table
has one dispatch and combine by `hierarchical`, by the flat deduplicated `gloo` and by hand (every pair a row), medians
of interleaved rounds, beside the bytes that crossed and the time that the link needs for them. The second has the
shipped model's prefill, serial and with --overlap microbatch, beside the larger of its compute and its wire time.
"""

import argparse
import tempfile

from tests.hosts.cluster import Cluster
from tests.hosts.network import skip_without_hosts


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
    parser.add_argument("--rates-mbps", type=int, nargs="+", default=[200, 1000])
    parser.add_argument("--overlap-rates-mbps", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args()
    skip_without_hosts()
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(directory)
        try:
            exchange_table(cluster, options.rates_mbps, options.tokens, options.steps)
            overlap_table(cluster, options.overlap_rates_mbps, options.prompts, options.length)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
