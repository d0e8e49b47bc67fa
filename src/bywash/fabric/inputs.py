"""What the engine and its twin are both given: times on the wire, hashes, thresholds, queue pairs and their order.

Everything else in `naive` is written twice on purpose; these are inputs, computed once from the scenario. Knows nothing
of rows and events. Called by `state`, `rows`, `settings`, `collect` and `naive`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.fabric.routes import Routes
from bywash.fabric.scenario import MAX_CLASSES, Scenario

Array = NDArray[Any]
_M32 = 0xFFFFFFFF


def ps_per_byte_q16(gbps: float) -> int:
    """Time of one byte on the wire in 1/65536 ps; exact for all usual rates."""
    return round(8000 / gbps * 65536)


def delay_ps(delay_ns: float) -> int:
    """A propagation delay in whole picoseconds."""
    return round(delay_ns * 1000)


def mix32(*words: Any) -> Any:
    """A 32-bit hash of small integers, or of each row of uint64 arrays (MurmurHash3's finaliser, chained)."""
    h: Any = 0x2545F491
    for word in words:
        h = (h ^ (word & _M32)) & _M32
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _M32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _M32
        h ^= h >> 16
    return h


def first_rng(seed: int) -> int:
    """The first state of the engine's xorshift64 generator; never 0."""
    return int(mix32(seed, 1)) << 32 | int(mix32(seed, 2)) | 1


def entropy(scenario: Scenario, sender: Any, receiver: Any, klass: Any, channel: Any) -> Any:
    """What switches hash, 31 bits: for `mix` a hash of the QP and the run's seed, for `murmur-ns3` its fields.

    Of one QP, or of each in arrays of uint64.
    """
    if scenario.routing.hash == "murmur-ns3":
        return sender | channel << 17
    return mix32(sender, receiver, klass, channel, scenario.run.seed) & 0x7FFFFFFF


def node_seed(scenario: Scenario, node: int) -> int:
    """The hash seed of a switch."""
    if scenario.routing.hash == "murmur-ns3":
        return node
    return int(mix32(0x5EED) if scenario.routing.polarised else mix32(node, scenario.run.seed, 7))


def ecn_thresholds(scenario: Scenario, gbps: float) -> tuple[int, int]:
    """Kmin and Kmax of a link, in bytes."""
    ecn = scenario.switch.ecn
    scale = gbps / ecn.reference_gbps if ecn.reference_gbps > 0 else 1.0
    return round(ecn.kmin_bytes * scale), round(ecn.kmax_bytes * scale)


def window_packets(scenario: Scenario) -> int:
    """The most packets of a QP that may be on their way."""
    nic = scenario.nic
    most = 1 << 40
    if nic.window_bytes and nic.control != "receiver":
        most = max(1, nic.window_bytes // scenario.frame.payload_bytes)
    return min(most, nic.ooo_packets) if nic.out_of_order else most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueuePairs:
    """Queue pairs, numbered by source host and port, then by (destination, class, qp).

    Attributes:
        qp_F: int64 [F], the queue pair of each flow.
        src, dst, klass, channel, port, back_port: int64 [N], per queue pair; `channel` is the flows' `qp_F`.
        packets: int64 [N], data packets of all its flows.
    """

    qp_F: Array
    src: Array
    dst: Array
    klass: Array
    channel: Array
    port: Array
    back_port: Array
    packets: Array


def queue_pairs(scenario: Scenario, routes: Routes) -> QueuePairs:
    """Group flows into queue pairs and choose the NIC ports of hosts that have several."""
    flows = scenario.flows
    hosts = scenario.topology.hosts
    key_F = (
        ((flows.src_F * hosts + flows.dst_F) * MAX_CLASSES + flows.class_F) << 17 | flows.qp_F << 1 | flows.background_F
    )
    keys, inverse = np.unique(key_F, return_inverse=True)
    pair = keys >> 17
    src, dst, klass, channel = (
        pair // MAX_CLASSES // hosts,
        pair // MAX_CLASSES % hosts,
        pair % MAX_CLASSES,
        keys >> 1 & 0xFFFF,
    )
    port, back = _nic_ports(routes, src, dst, klass, channel), _nic_ports(routes, dst, src, klass, channel)
    order = np.lexsort((np.arange(keys.size), port, src))
    place = np.empty(keys.size, np.int64)
    place[order] = np.arange(keys.size)
    qp_F = place[inverse.ravel()]
    packets = np.bincount(qp_F, -(-flows.bytes_F // scenario.frame.payload_bytes), keys.size).astype(np.int64)
    if packets.max() >= 1 << 31:
        raise ConfigError(f"traffic: {int(packets.max()):,} packets on one queue pair; at most 2^31 - 1 are supported")
    return QueuePairs(
        qp_F=qp_F,
        src=src[order],
        dst=dst[order],
        klass=klass[order],
        channel=channel[order],
        port=port[order],
        back_port=back[order],
        packets=packets,
    )


def _nic_ports(routes: Routes, near: Array, far: Array, klass: Array, channel: Array) -> Array:
    """The port of each QP at its `near` end: by hash where a host has several."""
    count_H = np.array([len(ports) for ports in routes.ports_H])
    table = np.zeros((count_H.size, int(count_H.max())), np.int64)
    for host, ports in enumerate(routes.ports_H):
        table[host, : len(ports)] = ports
    words = (column.astype(np.uint64) for column in (near, far, klass, channel))
    return np.asarray(table[near, (mix32(*words).astype(np.int64) * count_H[near]) >> 32])


def pace_gbps_F(scenario: Scenario, pairs: QueuePairs) -> Array:
    """The fastest that each flow may be sent: its own cap, or the rate of its port; float64 [F]."""
    line_F = np.array([link.gbps for link in scenario.topology.links])[pairs.port[pairs.qp_F] // 2]
    cap_F = scenario.flows.rate_gbps_F
    return np.asarray(np.where(cap_F > 0, np.minimum(cap_F, line_F), line_F))


def qp_order(scenario: Scenario, pairs: QueuePairs) -> Array:
    """Flows with those of one QP side by side, in the order in which they are sent: by phase, start, index.

    A flow that waits for another counts as starting no sooner than that one.
    """
    flows = scenario.flows
    start_F = flows.start_ps_F.copy()
    for flow in np.flatnonzero(flows.after_F >= 0).tolist():
        start_F[flow] = max(start_F[flow], start_F[flows.after_F[flow]])
    return np.lexsort((np.arange(flows.count), start_F, flows.phase_F, pairs.qp_F))
