"""Profile ns3-hpcc against completions measured with ns-3 (read from shared data where that is there)."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bywash.fabric import Flows, Scenario, alltoall, incast, leaf_spine, simulate
from bywash.fabric.profiles import profile

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "fabric"
needs_data = pytest.mark.skipif(not (DATA / "peers.csv").exists(), reason="the reference measurements are not here")


def ns3_row(workload):
    with open(DATA / "peers.csv") as file:
        return next(
            row for row in csv.DictReader(file) if row["workload"] == workload and row["simulator"].startswith("ns-3")
        )


def run(name, topology, flows):
    p = profile("ns3-hpcc")
    scenario = Scenario(
        name=name, topology=topology, flows=flows, switch=p.switch, nic=p.nic, routing=p.routing, frame=p.frame,
    )  # fmt: skip
    return simulate(scenario)


def workload(name):
    if name == "inc32":
        return leaf_spine(hosts=64, leaves=4, spines=16), incast(range(1, 33), 0, 2_000_000)
    if name == "a2a32":
        return leaf_spine(hosts=32, leaves=4, spines=8), alltoall(32, 256_000)
    pairs = np.loadtxt(DATA / "perm128.csv", delimiter=",", skiprows=1, dtype=np.int64)
    flows = Flows(src_F=pairs[:, 0], dst_F=pairs[:, 1], bytes_F=np.full(len(pairs), 4_000_000))
    return leaf_spine(hosts=128, leaves=8, spines=16), flows


@needs_data
@pytest.mark.parametrize("name", ["inc32", "a2a32", "perm128"])
def test_completions_agree_with_ns3(name):
    summary = run(name, *workload(name)).summary()
    wanted = ns3_row(name)
    assert summary["fct_us"]["mean"] == pytest.approx(float(wanted["fct_mean_us"]), rel=0.03)
    assert summary["fct_us"]["max"] == pytest.approx(float(wanted["fct_max_us"]), rel=0.05)
    assert summary["drops"] == 0


@pytest.mark.parametrize(
    ("topology", "flows", "hops"),
    [
        (leaf_spine(hosts=32, leaves=4, spines=8), alltoall(32, 256_000), 1_802_240),
        (leaf_spine(hosts=64, leaves=4, spines=16), incast(range(1, 33), 0, 2_000_000), 392_000),
    ],
    ids=["a2a32", "inc32"],
)
def test_packet_hops_are_exact(topology, flows, hops):
    assert run("hops", topology, flows).packet_hops == hops
