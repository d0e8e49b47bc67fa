"""Schedules of the node leg where several hosts send to one: real TCP through one switch with a shallow buffer.

    PYTHONPATH=src:. python benchmarks/exchange/incast.py            # needs root

Hosts are network namespaces of this machine (`tests.hosts.star`), with one rank each. Experts of host 0 are drawn more
often, so that its link bounds the step. For each schedule: medians of interleaved rounds, over the time that the
busiest link needs for the rows and then for the outputs, and over `together`; and segments that TCP had to send again,
which over RoCE with PFC would have been pauses instead.
"""

import argparse
import statistics
import tempfile

from tests.hosts.cluster import Cluster
from tests.hosts.jobs import SHAPE
from tests.hosts.network import skip_without_hosts
from tests.hosts.star import Star

ROW_BYTES = 4 * SHAPE["hidden"]
RECORD_BYTES = ROW_BYTES + 8 * SHAPE["top_k"]


def table(cluster, options, schedules):
    results = cluster.run(
        "schedule_steps", deadline_s=60, tokens=options.tokens, last_tokens=options.last_tokens, hot=options.hot,
        schedules=schedules, rounds=options.rounds, timeout_s=600,
    )  # fmt: skip
    busiest = max(max(one[schedules[0]][0]["out"], one[schedules[0]][0]["into"]) for one in results)
    mean = statistics.mean(one[schedules[0]][0]["into"] for one in results)
    bound_ms = busiest * (RECORD_BYTES + ROW_BYTES) * 8 / options.rate_mbps / 1e3
    print(f"busiest host: {busiest} rows, mean {mean:.0f}; bound {bound_ms:.0f} ms")
    print(f"{'schedule':>18} {'ms':>8} {'range':>15} {'/ bound':>8} {'/ together':>11} {'sent again':>11}")
    together = None
    for text in schedules:
        ms = [max(one[text][n]["ms"] for one in results) for n in range(options.rounds)]
        again = [sum(one[text][n]["again"] for one in results) for n in range(options.rounds)]
        median = statistics.median(ms)
        together = together or median
        print(
            f"{text:>18} {median:>8.0f} {f'{min(ms):.0f} to {max(ms):.0f}':>15} {median / bound_ms:>8.2f} "
            f"{median / together:>11.2f} {statistics.median(again):>11.0f}"
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate-mbps", type=int, default=20, help="more, and two cores cannot send on time")
    parser.add_argument("--queue-kb", type=int, default=128, help="of the switch, towards each host")
    parser.add_argument("--tokens", type=int, default=128, help="per rank")
    parser.add_argument("--last-tokens", type=int, default=128, help="of the last rank")
    parser.add_argument("--hot", type=float, default=4.0, help="weight of host 0's experts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--control", nargs="*", default=["reno", "bbr"], help="TCP's congestion control; of those allowed"
    )
    options = parser.parse_args()
    skip_without_hosts()
    gbps = options.rate_mbps / 1e3
    schedules = ["together", "rotated", f"paced:{gbps:g}", f"by-counts:{gbps:g}", f"by-counts:{gbps:g},0.9"]
    with tempfile.TemporaryDirectory() as directory:
        network = Star(options.hosts, options.rate_mbps, options.queue_kb)
        cluster = Cluster(directory, network, per_host=1)
        try:
            for control in options.control:
                network.congestion_control(control)
                print(
                    f"\n{options.hosts} hosts at {options.rate_mbps} Mb/s, {options.queue_kb} kB a port, {control}, "
                    f"{options.tokens} tokens per rank, of the last {options.last_tokens}, {SHAPE}, float32, combine "
                    f"fast, {options.rounds} rounds"
                )
                table(cluster, options, schedules)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
