"""The simulator's own speed: four workloads that other simulators were measured on, and growth from 32 to 512 hosts.

All links 100 Gb/s and 1 us, 1000 B payload, leaf-spine without oversubscription, PFC with dynamic thresholds, ECN,
DCQCN and an ACK for each packet. CPU time of the event loop's thread, best of several runs, compile time apart.
A packet-hop is one data or ACK packet on one link. Called by `bywash fabric bench` and `benchmarks/fabric`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from bywash.fabric.builders import leaf_spine
from bywash.fabric.heaps import replace_top
from bywash.fabric.layout import NO_EVENT
from bywash.fabric.profiles import profile
from bywash.fabric.result import Result
from bywash.fabric.run import simulate, thread_seconds
from bywash.fabric.scenario import NicConfig, PfcConfig, RoutingConfig, RunConfig, Scenario, TrafficClass
from bywash.fabric.topology import Topology
from bywash.fabric.traffic import Flows, alltoall, incast, permutation

HOSTS_GROWTH = (32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One measurement; `result` is the fastest run's."""

    workload: str
    features: str
    description: str
    result: Result

    def as_json(self) -> dict[str, Any]:
        """Plain numbers."""
        result = self.result
        return {
            "workload": self.workload,
            "features": self.features,
            "description": self.description,
            "packet_hops": result.packet_hops,
            "events": result.events,
            "seconds": round(result.seconds, 5),
            "packet_hops_per_s": round(result.packet_hops / result.seconds),
            "events_per_s": round(result.events / result.seconds),
            "ns_per_packet_hop": round(result.seconds / result.packet_hops * 1e9, 2),
            "memory_mb": round(result.memory_bytes / 1e6, 2),
            "compile_s": round(result.compile_s, 3),
            "fct_us_mean": result.summary()["fct_us"]["mean"],
            "verdict": result.verdict,
        }


WORKLOADS: dict[str, tuple[str, Callable[[], tuple[Topology, Flows]]]] = {
    "inc32": (
        "64 hosts, 4 x 16, 32 -> 1, 2 MB each",
        lambda: (leaf_spine(hosts=64, leaves=4, spines=16), incast(range(1, 33), 0, 2_000_000)),
    ),
    "a2a32": (
        "32 hosts, 4 x 8, all pairs, 256 kB each",
        lambda: (leaf_spine(hosts=32, leaves=4, spines=8), alltoall(32, 256_000)),
    ),
    "perm128": (
        "128 hosts, 8 x 16, a random permutation, 4 MB each",
        lambda: (leaf_spine(hosts=128, leaves=8, spines=16), permutation(128, 4_000_000, seed=1)),
    ),
    "a2a128": (
        "128 hosts, 8 x 16, all pairs, 64 kB each",
        lambda: (leaf_spine(hosts=128, leaves=8, spines=16), alltoall(128, 64_000)),
    ),
}


def growth_workload(hosts: int) -> tuple[Topology, Flows]:
    """An all-to-all of 16 kB a pair at any size: 16 hosts a leaf, as many uplinks."""
    topology = leaf_spine(hosts=hosts, leaves=max(2, hosts // 16), spines=16 if hosts >= 32 else hosts // 2)
    return topology, alltoall(hosts, 16_000)


def lean_scenario(name: str, topology: Topology, flows: Flows) -> Scenario:
    """One lossless class, ECMP: what the lean kernel runs."""
    base = profile("ns3-hpcc")
    return Scenario(
        name=name,
        topology=topology,
        flows=flows,
        switch=base.switch,
        nic=base.nic,
        routing=base.routing,
        frame=base.frame,
    )


def full_scenario(name: str, topology: Topology, flows: Flows) -> Scenario:
    """Every feature that can be on together: flows dealt in turn to two lossless classes and a lossy one under DWRR,
    CNP packets, adaptive routing with out-of-order acceptance and selective recovery, PFC watchdog (scaled), queue
    samples, micro-bursts, pause log.

    The lossy class may take most of the shared pool, so that nothing is dropped and packet-hops are those of `lean`.
    """
    base = profile("default")
    switch = replace(base.switch, pfc=PfcConfig(watchdog_us=5_000.0, watchdog_restore_us=100.0))
    classes = (
        TrafficClass(name="roce"),
        TrafficClass(name="roce2", weight=2),
        TrafficClass(name="bulk", lossless=False),
    )
    return Scenario(
        name=name,
        topology=topology,
        flows=replace(flows, class_F=np.arange(flows.count) % len(classes)),
        classes=classes,
        switch=replace(switch, lossy_alpha=8.0, ecn=replace(switch.ecn, dynamic=0.5)),
        nic=NicConfig(out_of_order=True, recovery="selective"),
        routing=RoutingConfig(mode="adaptive"),
        run=RunConfig(sample_us=5.0, burst_bytes=200_000),
    )


def measure(names: tuple[str, ...], *, rounds: int, features: tuple[str, ...]) -> Iterator[BenchRow]:
    """Best of `rounds` for each workload and set of features."""
    for feature in features:
        make = lean_scenario if feature == "lean" else full_scenario
        for name in names:
            description, build = WORKLOADS[name]
            yield best(name, feature, description, make(name, *build()), rounds)


def growth(sizes: tuple[int, ...], *, rounds: int) -> Iterator[BenchRow]:
    """The cost per packet-hop as the fabric grows."""
    for hosts in sizes:
        topology, flows = growth_workload(hosts)
        yield best(f"a2a-{hosts}", "lean", topology.describe(), lean_scenario(f"a2a-{hosts}", topology, flows), rounds)


def machine() -> dict[str, float]:
    """What this machine gives at this moment: a bare event loop, and the latency of memory near and far.

    `bare_events_per_s` is a loop that does nothing but take the earliest of 512 events off a heap and put it back; the
    simulator handles 1.4 to 2 events for each packet-hop. Loads are dependent ones, at random within 256 kB
    (second-level cache) and 8 MB (third level, shared with whatever else runs).
    """
    heap = np.arange(1, 513 + 8, dtype=np.int64) << 20
    heap[512:] = NO_EVENT
    spins = 2_000_000
    _spin(heap, 1)
    near, far = _ring(256 << 10), _ring(8 << 20)
    _chase(near, 1)
    return {
        "bare_events_per_s": round(spins / min(thread_seconds(lambda: _spin(heap, spins)) for _ in range(3))),
        "load_256kb_ns": round(min(thread_seconds(lambda: _chase(near, 10**6)) for _ in range(3)) * 1e3, 2),
        "load_8mb_ns": round(min(thread_seconds(lambda: _chase(far, 10**6)) for _ in range(3)) * 1e3, 2),
    }


def _ring(size_bytes: int) -> NDArray[np.int64]:
    """One cycle through all cache lines of an array, in random order."""
    lines = np.random.default_rng(0).permutation(size_bytes // 64) * 8
    ring = np.zeros(size_bytes // 8, np.int64)
    ring[lines] = np.roll(lines, -1)
    return ring


@numba.njit(cache=True)
def _chase(ring, steps):  # type: ignore[no-untyped-def]
    at = 0
    for _ in range(steps):
        at = ring[at]
    return at


@numba.njit  # no cache, which would not see changes of `replace_top`
def _spin(heap, steps):  # type: ignore[no-untyped-def]
    step = 1
    for _ in range(steps):
        step = (step * 1103515245 + 12345) & 0x7FFFFFFF
        replace_top(heap, 512, heap[0] + (step << 4))


def best(name: str, features: str, description: str, scenario: Scenario, rounds: int) -> BenchRow:
    """The fastest of `rounds` runs by the loop's CPU time; compile seconds are the first run's."""
    runs = [simulate(scenario, full=features == "full") for _ in range(rounds)]
    fastest = min(runs, key=lambda one: one.seconds)
    fastest = replace(fastest, compile_s=runs[0].compile_s)
    return BenchRow(workload=name, features=features, description=description, result=fastest)
