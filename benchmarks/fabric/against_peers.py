"""Completions and speed beside other simulators' on the same work.

    python -m benchmarks.fabric.against_peers PEERS.csv PERM128.csv

PEERS.csv has the columns workload, simulator, fct_mean_us, fct_max_us, packet_hops, packet_hops_per_s; PERM128.csv the
permutation (src, dst). Their speeds were measured on another machine at another time: read them as orders of size.
"""

import csv
import sys
from dataclasses import replace

import numpy as np

from bywash.fabric import Flows, simulate
from bywash.fabric.bench import WORKLOADS, lean_scenario

ROUNDS = 3
LINE = "{:<9} {:<52} {:>10} {:>7} {:>10} {:>7} {:>12} {:>9} {:>7}"


def scenario(name: str, permutation: str):
    topology, flows = WORKLOADS[name][1]()
    if name == "perm128":
        pairs = np.loadtxt(permutation, delimiter=",", skiprows=1, dtype=np.int64)
        flows = Flows(src_F=pairs[:, 0], dst_F=pairs[:, 1], bytes_F=np.full(len(pairs), 4_000_000))
    made = lean_scenario(name, topology, flows)
    return replace(made, run=replace(made.run, seed=1))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        peers = list(csv.DictReader(file))
    head = ("workload", "simulator", "mean us", "ours/", "max us", "ours/", "packet-hops", "M hops/s", "ours x")
    print(LINE.format(*head))
    for name in dict.fromkeys(row["workload"] for row in peers):
        runs = [simulate(scenario(name, sys.argv[2])) for _ in range(ROUNDS)]
        ours = min(runs, key=lambda run: run.seconds)
        fct, rate = ours.summary()["fct_us"], ours.packet_hops / ours.seconds / 1e6
        print(
            LINE.format(
                name, "bywash, profile ns3-hpcc", fct["mean"], "", fct["max"], "", ours.packet_hops, f"{rate:.2f}", ""
            )
        )
        for row in (row for row in peers if row["workload"] == name):
            mean, worst, speed = (float(row[k]) for k in ("fct_mean_us", "fct_max_us", "packet_hops_per_s"))
            ratios = f"{fct['mean'] / mean:.3f}", f"{fct['max'] / worst:.3f}"
            print(
                LINE.format(
                    name, row["simulator"][:52], mean, ratios[0], worst, ratios[1], row["packet_hops"],
                    f"{speed / 1e6:.2f}", f"{rate * 1e6 / speed:.1f}",
                )
            )  # fmt: skip


if __name__ == "__main__":
    main()
