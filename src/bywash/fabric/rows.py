"""The engine's rows as a run begins: one function for each array of `layout` that has columns.

Knows the scenario, its routes and queue pairs; nothing of events. Called by `state.build`.
"""

import numpy as np

from bywash.fabric import layout as L
from bywash.fabric.inputs import (
    Array,
    QueuePairs,
    delay_ps,
    ecn_thresholds,
    entropy,
    node_seed,
    pace_gbps_F,
    ps_per_byte_q16,
    qp_order,
)
from bywash.fabric.routes import Routes
from bywash.fabric.scenario import Scenario, headroom_bytes, shared_pool_bytes


def port_rows(scenario: Scenario, routes: Routes, pairs: QueuePairs) -> Array:
    """Ports with their links: `po`, int64 [P, PO_COLUMNS]."""
    topology = scenario.topology
    po = aligned_rows(2 * len(topology.links), L.PO_COLUMNS)
    po4 = po.view(np.int32)
    latency = delay_ps(scenario.switch.latency_ns)
    for port in range(len(po)):
        link = topology.links[port // 2]
        peer = int(routes.peer_P[port])
        po4[port, L.PEER], po4[port, L.OWNER] = peer, routes.owner_P[port]
        po[port, L.DELAY] = delay_ps(link.delay_ns) + (latency if peer >= topology.hosts else 0)
        po[port, L.PS_PER_BYTE] = ps_per_byte_q16(link.gbps)
    po4[:, L.PIPE_HEAD] = po4[:, L.PIPE_TAIL] = -1
    po[:, L.TX_AT] = po[:, L.NIC_AT] = po[:, L.TIMER_AT] = L.NEVER
    po[:, L.DWRR] = 2
    used, first = np.unique(pairs.port, return_index=True)
    po4[used, L.HEAP_BASE] = first
    return po


def queue_rows(scenario: Scenario, routes: Routes, ports: int, queues: int) -> Array:
    """Queues of ports: `qu`, int64 [P * Q, QU_COLUMNS]."""
    qu = aligned_rows(ports * queues, L.QU_COLUMNS).reshape(ports, queues, L.QU_COLUMNS)
    qu4 = qu.view(np.int32)
    qu4[:, :, L.HEAD] = qu4[:, :, L.TAIL] = -1
    qu[:, :, L.FIRST_PAUSE] = -1
    for column in (L.UNPAUSE_AT, L.REFRESH_AT, L.WATCH_AT, L.RESTORE_AT):
        qu[:, :, column] = L.NEVER
    for port in range(ports):
        link = scenario.topology.links[port // 2]
        qu4[port, :, L.KMIN], qu4[port, :, L.KMAX] = ecn_thresholds(scenario, link.gbps)
        for c, one in enumerate(scenario.classes):
            qu[port, 2 + c, L.WEIGHT] = one.weight
            if one.lossless and scenario.switch.pfc.enabled:
                qu4[port, 2 + c, L.HEADROOM_CAP] = headroom_bytes(scenario, link)
    return qu.reshape(ports * queues, L.QU_COLUMNS)


def qp_rows(scenario: Scenario, pairs: QueuePairs) -> tuple[Array, Array]:
    """Senders' halves: `qp`, int64 [N, QP_COLUMNS], and `qc`, int64 [N, QC_COLUMNS]."""
    count = len(pairs.src)
    qp, qc = aligned_rows(count, L.QP_COLUMNS), aligned_rows(count, L.QC_COLUMNS)
    qp4, qpf, qcf = qp.view(np.int32), qp.view(np.float64), qc.view(np.float64)
    nic, frame = scenario.nic, scenario.frame
    qc[:, L.PORT], qc[:, L.QUEUE] = pairs.port, 2 + pairs.klass
    qp4[:, L.TO] = pairs.dst
    qp4[:, L.LINK] = -1
    if nic.out_of_order:
        ring = np.minimum(nic.ooo_packets, pairs.packets)
        words = 1 << np.ceil(np.log2(np.maximum(1, -(-ring // 64)))).astype(np.int64)
        qc[:, L.BIT_BASE] = np.concatenate([[0], np.cumsum(words)[:-1]])
        qc[:, L.BIT_MASK] = words * 64 - 1
    qcf[:, L.ALPHA_F] = 1.0
    qp[:, L.DUE] = qc[:, L.NEXT_INC] = qc[:, L.NEXT_ALPHA] = L.NEVER
    qc[:, L.B_LEFT] = scenario.nic.dcqcn.byte_counter
    qc[:, L.DROPPED] = qc[:, L.SACK_HIGH] = -1
    qp4[:, L.HASH] = _entropies(scenario, pairs, back=False)
    payload = frame.payload_bytes
    first_N = _first_flows(scenario, pairs)
    qpf[:, L.RATE_F] = qcf[:, L.TARGET_F] = qcf[:, L.MAX_RATE_F] = pace_gbps_F(scenario, pairs)[first_N]
    bytes_N = scenario.flows.bytes_F[first_N]
    qc[:, L.CUR_FLOW] = qc[:, L.ACK_FLOW] = qc[:, L.READY_FLOW] = first_N
    qp4[:, L.CUR_END] = qp4[:, L.ACK_END] = -(-bytes_N // payload)
    qp4[:, L.CUR_LAST] = bytes_N - (qp4[:, L.CUR_END] - 1) * payload
    return qp, qc


def _entropies(scenario: Scenario, pairs: QueuePairs, *, back: bool) -> Array:
    ends = (pairs.dst, pairs.src) if back else (pairs.src, pairs.dst)
    words = (column.astype(np.uint64) for column in (*ends, pairs.klass, pairs.channel))
    return np.asarray(entropy(scenario, *words))


def rx_rows(scenario: Scenario, pairs: QueuePairs) -> Array:
    """Receivers' halves: `rx`, int64 [N, RX_COLUMNS]."""
    rx = aligned_rows(len(pairs.src), L.RX_COLUMNS)
    rx4 = rx.view(np.int32)
    rx4[:, L.SOURCE], rx4[:, L.BACK_PORT] = pairs.src, pairs.back_port
    rx4[:, L.BACK_HASH] = _entropies(scenario, pairs, back=True)
    rx[:, L.CNP_AT] = -L.NEVER
    rx4[:, L.NACKED] = rx4[:, L.RING] = -1
    rx4[:, L.RX_FLOW] = first_N = _first_flows(scenario, pairs)
    rx4[:, L.RX_END] = -(-scenario.flows.bytes_F[first_N] // scenario.frame.payload_bytes)
    return rx


def _first_flows(scenario: Scenario, pairs: QueuePairs) -> Array:
    """Each QP's first flow: int64 [N]."""
    first_N = np.empty(len(pairs.src), np.int64)
    order = qp_order(scenario, pairs)[::-1]
    first_N[pairs.qp_F[order]] = order
    return first_N


def flow_rows(scenario: Scenario, pairs: QueuePairs) -> Array:
    """Flows, linked in the order of their QP: `fl`, int64 [F, FL_COLUMNS]."""
    flows, payload = scenario.flows, scenario.frame.payload_bytes
    fl = np.zeros((flows.count, L.FL_COLUMNS), np.int64)
    fl[:, L.F_START] = fl[:, L.F_ARRIVED] = fl[:, L.F_DONE] = -1
    packets_F = -(-flows.bytes_F // payload)
    fl[:, L.F_LAST] = flows.bytes_F - (packets_F - 1) * payload
    fl[:, L.F_NEXT] = fl[:, L.F_CHAIN] = fl[:, L.F_CHAIN_NEXT] = -1
    fl[:, L.F_QP], fl[:, L.F_BACKGROUND], fl[:, L.F_PHASE] = pairs.qp_F, flows.background_F, flows.phase_F
    fl[:, L.F_OFFSET], fl[:, L.F_SRC], fl[:, L.F_DST] = flows.start_ps_F, flows.src_F, flows.dst_F
    fl.view(np.float64)[:, L.F_PACE_F] = pace_gbps_F(scenario, pairs)
    order = qp_order(scenario, pairs)
    ends = np.cumsum(packets_F[order])
    same = np.concatenate([[False], pairs.qp_F[order][1:] == pairs.qp_F[order][:-1]])
    starts = np.concatenate([[0], ends[:-1]])
    base = np.maximum.accumulate(np.where(same, 0, starts))
    fl[order, L.F_END] = ends - base
    fl[order[:-1][same[1:]], L.F_NEXT] = order[1:][same[1:]]
    for flow in np.flatnonzero(flows.after_F >= 0)[::-1].tolist():
        before = int(flows.after_F[flow])
        fl[flow, L.F_CHAIN_NEXT] = fl[before, L.F_CHAIN]
        fl[before, L.F_CHAIN] = flow
    return fl


def switch_rows(scenario: Scenario, nodes: int) -> Array:
    """Nodes: `sw`, int64 [nodes, SW_COLUMNS]."""
    sw = np.zeros((nodes, L.SW_COLUMNS), np.int64)
    topology = scenario.topology
    sw[:, L.SHARED_CAP] = shared_pool_bytes(scenario)
    for node in range(topology.hosts, nodes):
        sw[node, L.SEED] = node_seed(scenario, node)
    return sw


def host_rows(scenario: Scenario, pairs: QueuePairs) -> tuple[Array, int]:
    """Hosts: `ho`, int64 [H, HO_COLUMNS], and the number of groups that enter phases together."""
    hosts = scenario.topology.hosts
    ho = np.zeros((hosts, L.HO_COLUMNS), np.int64)
    ho[:, L.RING_HEAD] = ho[:, L.RING_TAIL] = -1
    ho[:, L.GRANT_AT] = ho[:, L.RTO_AT] = L.NEVER
    ho[:, L.QP_FIRST] = np.searchsorted(pairs.src, np.arange(hosts), side="left")
    ho[:, L.QP_LAST] = np.searchsorted(pairs.src, np.arange(hosts), side="right")
    if scenario.flows.barrier == "host":
        ho[:, L.GROUP] = np.arange(hosts)
    elif scenario.flows.barrier == "server":
        servers = [scenario.topology.nodes[h].server for h in range(hosts)]
        ho[:, L.GROUP] = np.unique(servers, return_inverse=True)[1].ravel()
    return ho, int(ho[:, L.GROUP].max()) + 1


def phase_rows(scenario: Scenario, groups: int, ho: Array) -> dict[str, Array]:
    """Counters per (group, phase), and the flows to start when a group enters a phase."""
    flows, phases = scenario.flows, scenario.flows.phases
    left = np.zeros(groups * phases, np.int64)
    src_cell = ho[flows.src_F, L.GROUP] * phases + flows.phase_F
    dst_cell = ho[flows.dst_F, L.GROUP] * phases + flows.phase_F
    counted = ~flows.background_F
    np.add.at(left, src_cell[counted], 1)
    np.add.at(left, dst_cell[counted], 1)
    free = np.flatnonzero(flows.after_F < 0)
    order = free[np.lexsort((free, src_cell[free]))]
    first = np.searchsorted(src_cell[order], np.arange(groups * phases + 1), side="left")
    return {
        "left_GP": left,
        "entered_GP": np.full(groups * phases, -1, np.int64),
        "first_GP": first.astype(np.int64),
        "members": order.astype(np.int64) if order.size else np.zeros(1, np.int64),
        "at_G": np.full(groups, -1, np.int64),
        "gap_P": flows.gap_ps_P.copy(),
    }


def calendar_rows(scenario: Scenario, ports: int) -> tuple[Array, Array]:
    """The calendar of events: `wheel`, int32 [B * SLOTS], and `cal`. Two buckets for a port, and a first guess of
    their width: when every port is busy, three events come for two frames, and some five should share a bucket.
    """
    buckets = max(64, 1 << (2 * ports - 1).bit_length())
    wheel = aligned_rows(buckets, L.SLOTS // 2).view(np.int32).ravel()
    wheel[:] = L.LAST_PLACE
    cal = np.zeros(L.CAL_SIZE, np.int64)
    # With whole ns a tick's events are cut by source: there only the frequent ones, of links and ports, have a place.
    last = 2 * ports - 1 if scenario.frame.whole_ns else 4 * ports + 2 * scenario.topology.hosts + 1
    cal[L.C_SOURCE_BITS] = bits = last.bit_length()
    fastest = max(link.gbps for link in scenario.topology.links)
    ticks = scenario.frame_bytes * 8000 / fastest * 8 / (3 * ports) / (1000 if scenario.frame.whole_ns else 1)
    cal[L.C_SHIFT] = min(L.MOST_SHIFT, max(0, bits + round(np.log2(ticks))))
    return wheel, cal


def aligned_rows(count: int, columns: int) -> Array:
    """Zeros of int64 whose rows begin on cache lines (as far as their length allows)."""
    raw = np.zeros(count * columns * 8 + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + count * columns * 8].view(np.int64).reshape(count, columns)
