"""From the bytes of MoE layers to the fabric's flows: when each message may leave, and how fast.

Shapes: H hosts, F flows. Layer l's dispatch is phase 2 l of the traffic, its combine phase 2 l + 1; attention runs
before each dispatch and the experts before each combine, as gaps, the same for all ranks. A rank (with a hierarchical
exchange: a server) goes on when all that it sent is acknowledged and all that it was due has come; nobody waits for
the others.

Knows bytes between hosts, a topology's rates and the NIC settings that a schedule needs; nothing of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.fabric.result import Result
from bywash.fabric.scenario import FrameConfig, NicConfig
from bywash.fabric.sending import by_counts
from bywash.fabric.topology import Topology
from bywash.fabric.traffic import Barrier, Flows, from_matrix, join
from bywash.planner.moe_traffic import LayerBytes

IntArray = NDArray[np.int64]

Schedule = Literal["at-once", "rotated", "staggered", "paced", "by-counts", "receiver-granted"]
"""When a rank sends to its peers.

`at-once`: to all together, as one all-to-all. `rotated`: to rank + 1, rank + 2, ... in turn, as many at a time as fill
the pipe. `staggered`: the same order, but started by the clock. `paced`: to all together, each message slowed so that
all end when the busiest link does (rates from the count matrix, which every rank knows before it sends; Varys' MADD).
`by-counts`: to all together, each message at its share of the receiver's link, so that all to one receiver end together
(see `fabric.sending`).
`receiver-granted`: as at-once, but receivers grant packets at their own rate (an idealised NIC)."""

SCHEDULES: tuple[Schedule, ...] = ("at-once", "rotated", "staggered", "paced", "by-counts", "receiver-granted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What a rank computes in each layer, in us: `attention_us` (with router and shared expert), `experts_us`."""

    attention_us: float = 0.0
    experts_us: float = 0.0

    def __post_init__(self) -> None:
        for name in ("attention_us", "experts_us"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be from 0 to 1e6")

    @property
    def layer_us(self) -> float:
        """Of one layer."""
        return self.attention_us + self.experts_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The network as a schedule sees it: `topology`, `frame` sizes, and `rtt_us` without queues."""

    topology: Topology
    frame: FrameConfig
    rtt_us: float

    def wire_us(self, size: float, gbps: float) -> float:
        """Time of `size` payload bytes on a link, headers included."""
        return size * (1 + self.frame.header_bytes / self.frame.payload_bytes) * 8 / (gbps * 1e3)

    def bound_us(self, bytes_HH: IntArray) -> float:
        """The least time that any schedule needs: the busiest host link or set of uplinks, and one round trip.

        Uplinks count as one pipe for each switch of tier 1 and direction, as if load spread over them perfectly.
        """
        hosts = self.topology.hosts
        out_H, in_H = bytes_HH.sum(axis=1), bytes_HH.sum(axis=0)
        busiest = max(
            self.wire_us(max(out_H[host], in_H[host]), self.topology.host_gbps(host)) for host in range(hosts)
        )
        leaf_H, up_gbps = _leaves(self.topology)
        away_HH = np.where(leaf_H[:, None] != leaf_H, bytes_HH, 0)
        for leaf, gbps in up_gbps.items():
            here = leaf_H == leaf
            most = max(away_HH[here].sum(), away_HH[:, here].sum())
            busiest = max(busiest, self.wire_us(most, gbps))
        return busiest + self.rtt_us


def round_trip_us(topology: Topology, latency_ns: float) -> float:
    """There and back without queues, between host 0 and the host farthest from it; `latency_ns` for each switch."""
    import networkx as nx

    graph = nx.Graph()
    for link in topology.links:
        if not link.failed:  # half of the latency of each switch at an end; hosts have none
            switches = (link.a >= topology.hosts) + (link.b >= topology.hosts)
            graph.add_edge(link.a, link.b, weight=link.delay_ns + switches * latency_ns / 2)
    far_ns = nx.single_source_dijkstra_path_length(graph, 0)
    return float(2 * max(far_ns[host] for host in range(topology.hosts)) / 1e3)


def _leaves(topology: Topology) -> tuple[IntArray, dict[int, float]]:
    """The switch of each host (of its first link), and the rate of each such switch towards other switches."""
    leaf_H = np.full(topology.hosts, -1)
    up_gbps: dict[int, float] = {}
    for link in topology.links:
        if link.failed:
            continue
        for near, far in ((link.a, link.b), (link.b, link.a)):
            if near < topology.hosts:
                leaf_H[near] = far if leaf_H[near] < 0 else leaf_H[near]
            elif far >= topology.hosts and topology.nodes[near].tier == 1:
                up_gbps[near] = up_gbps.get(near, 0.0) + link.gbps
    return leaf_H, up_gbps


def moe_flows(
    layers: Sequence[LayerBytes],
    wire: Wire,
    *,
    schedule: Schedule,
    compute: Compute,
    barrier: Barrier = "host",
    qps_per_pair: int = 1,
    factor: float = 1.0,
) -> Flows:
    """Dispatch and combine of all layers in sequence, as the fabric's traffic.

    Queue pairs, and with them their rate state, persist over layers; except with `paced`, where every exchange has its
    own, so that a cut ends with the exchange. A message is split evenly over `qps_per_pair`, which ECMP hashes apart.
    `factor` is that of `by-counts`: how many times its line a receiver is offered.

    Raises:
        ConfigError: hosts of the topology and of the matrices differ, an unknown schedule, or nothing to send.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule = {schedule!r}: must be one of {', '.join(SCHEDULES)}")
    parts = []
    for phase, bytes_HH in enumerate(m for layer in layers for m in (layer.dispatch_HH, layer.combine_HH)):
        if bytes_HH.shape[0] != wire.topology.hosts:
            raise ConfigError(
                f"ranks = {bytes_HH.shape[0]}: the topology has {wire.topology.hosts} hosts; they must agree"
            )
        gap_us = compute.experts_us if phase % 2 else compute.attention_us
        parts.append(_exchange(bytes_HH, wire, schedule, phase, gap_us, qps_per_pair, factor))
    flows = join(parts, barrier)
    if not flows.count:
        raise ConfigError("traffic: no row leaves its server; there is nothing to simulate")
    return flows


def _exchange(
    bytes_HH: IntArray, wire: Wire, schedule: Schedule, phase: int, gap_us: float, qps: int, factor: float
) -> Flows:
    gbps = min(wire.topology.host_gbps(host) for host in range(wire.topology.hosts))
    sizes = bytes_HH[bytes_HH > 0]
    mean_us = wire.wire_us(float(sizes.mean()), gbps) if sizes.size else 0.0
    if schedule == "rotated":
        active = active_flows(mean_us, wire.rtt_us)
        return from_matrix(bytes_HH, schedule="rotated", active=active, phase=phase, gap_us=gap_us, qps_per_pair=qps)
    if schedule == "staggered":
        return from_matrix(
            bytes_HH, schedule="staggered", step_us=mean_us, phase=phase, gap_us=gap_us, qps_per_pair=qps
        )
    flows = from_matrix(bytes_HH, phase=phase, gap_us=gap_us, qps_per_pair=qps)
    if schedule == "by-counts":
        return by_counts(flows, wire.topology.gbps_H, factor)
    if schedule != "paced" or not flows.count:
        return flows
    # Each message at the rate at which it ends with the busiest link. Wire rates, as the NIC paces frames.
    span_us = wire.bound_us(bytes_HH) - wire.rtt_us
    rate_gbps_F = np.array([wire.wire_us(size, 1.0) for size in flows.bytes_F.tolist()]) / span_us
    return replace(flows, rate_gbps_F=rate_gbps_F, qp_F=flows.qp_F + phase * qps)


def active_flows(mean_us: float, rtt_us: float) -> int:
    """Messages that a rotating source keeps under way: the next one begins when one is acknowledged, so that a round
    trip must be filled by the others. Example: 1.2 us each and a round trip of 5 us take 1 + 5 = 6."""
    return 1 + int(np.ceil(rtt_us / mean_us)) if mean_us > 0 else 1


def nic_for(schedule: Schedule, nic: NicConfig) -> NicConfig:
    """The NIC settings that a schedule asks for: receiver-driven control with nothing unasked, or those given."""
    return replace(nic, control="receiver", window_bytes=0) if schedule == "receiver-granted" else nic


def exposed_us(result: Result, layers: int, compute: Compute) -> float:
    """Time per layer in which nothing is computed when nothing overlaps: (completion - compute) / layers.

    Raises:
        ConfigError: the run did not finish, so that there is no such time.
    """
    if result.verdict != "completed":
        raise ConfigError(f"result: {result.verdict}; only a completed run has an exposed time")
    return float(result.done_ps_F.max()) / 1e6 / layers - compute.layer_us
