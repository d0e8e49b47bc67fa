"""From the engine's rows, after a run, to a `Result`. The inverse of `state`; called by `run` only."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bywash.fabric import layout as L
from bywash.fabric.inputs import delay_ps, ps_per_byte_q16
from bywash.fabric.result import Result, Verdict
from bywash.fabric.routes import Routes
from bywash.fabric.scenario import Scenario
from bywash.fabric.state import State

IntArray = NDArray[np.int64]


def collect(state: State, verdict: Verdict, cycle: tuple[str, ...], seconds: float, compile_s: float) -> Result:
    """Read everything back; queues 0 (PFC frames) and 1 (control) become priority 0."""
    arrays = state.arrays
    sim, fl, po4 = arrays["sim"], arrays["fl"], arrays["po4"]
    qu = arrays["qu"].reshape(state.ports_count, state.queues, L.QU_COLUMNS)
    qu4 = qu.view(np.int32).astype(np.int64)
    now = int(sim[L.S_NOW])
    paused = qu[:, :, L.PAUSED_TOTAL].copy()
    still = (po4[:, L.PAUSED, None] >> np.arange(state.queues)) & 1
    paused += still * (now - qu[:, :, L.PAUSED_SINCE])
    burst, longest = qu[:, :, L.BURST_TOTAL].copy(), qu[:, :, L.BURST_MAX].copy()
    open_burst = np.where(qu[:, :, L.BURST_SINCE] > 0, now + 1 - qu[:, :, L.BURST_SINCE], 0)
    samples = arrays["samples"][: int(sim[L.S_SAMPLES])]
    return Result(
        scenario=state.scenario,
        verdict=verdict,
        cycle=cycle,
        end_ps=now,
        start_ps_F=fl[:, L.F_START].copy(),
        arrived_ps_F=fl[:, L.F_ARRIVED].copy(),
        done_ps_F=fl[:, L.F_DONE].copy(),
        base_ps_F=base_ps(state.scenario, state.routes),
        sent_bytes_PQ=_merge(qu[:, :, L.TX_BYTES], np.add),
        sent_packets_PQ=_merge(qu[:, :, L.TX_PACKETS], np.add),
        peak_bytes_PQ=_merge(qu4[:, :, L.PEAK], np.maximum),
        ingress_peak_bytes_PQ=_merge(qu4[:, :, L.INGRESS_PEAK], np.maximum),
        paused_ps_PQ=_merge(paused, np.add),
        pauses_PQ=_merge(qu[:, :, L.PAUSES], np.add),
        first_pause_ps_PQ=_merge(qu[:, :, L.FIRST_PAUSE], np.maximum),
        marks_PQ=_merge(qu4[:, :, L.MARKS], np.add),
        drops_PQ=_merge(qu[:, :, L.DROPS], np.add),
        bursts_PQ=_merge(qu[:, :, L.BURSTS] + (open_burst > 0), np.add),
        burst_ps_PQ=_merge(burst + open_burst, np.add),
        burst_longest_ps_PQ=_merge(np.maximum(longest, open_burst), np.maximum),
        paused_by=pause_tree(arrays["log"][: int(sim[L.S_LOG])], po4),
        cnps=int(sim[L.S_CNPS]),
        retransmitted=int(sim[L.S_RETX]),
        timeouts=int(sim[L.S_TIMEOUTS]),
        ooo_packets=int(sim[L.S_EARLY]),
        ooo_distance=int(sim[L.S_EARLY_MAX]),
        sample_ps_T=samples[:, -1].copy(),
        queue_bytes_TP=samples[:, :-1].copy(),
        packet_hops=int(sim[L.S_HOPS]),
        events=int(sim[L.S_EVENTS]),
        seconds=seconds,
        compile_s=compile_s,
        memory_bytes=state.memory_bytes(),
        scaled_watchdog=bool(sim[L.S_STORMS] > 0),
    )


def _merge(values_PQ: IntArray, how: Any) -> IntArray:
    first = how(values_PQ[:, 0], values_PQ[:, 1])
    return np.column_stack([first, values_PQ[:, 2:]])


def pause_tree(log: IntArray, po4: IntArray) -> dict[int, tuple[int, ...]]:
    """Who passed pauses on: port -> ports of the next switch that were paused when that switch paused it."""
    paused: dict[int, set[tuple[int, int]]] = {}  # node -> its paused (port, queue)
    tree: dict[int, set[int]] = {}
    for _, port, queue, what in log.tolist():
        owner = int(po4[port, L.OWNER])
        if what == L.LOG_PAUSED:
            paused.setdefault(owner, set()).add((port, queue))
        elif what == L.LOG_RESUMED:
            paused.setdefault(owner, set()).discard((port, queue))
        elif what == L.LOG_SENT_PAUSE:
            parents = {p for p, q in paused.get(owner, ()) if q == queue}
            tree.setdefault(port ^ 1, set()).update(parents)
    return {port: tuple(sorted(parents)) for port, parents in sorted(tree.items())}


def base_ps(scenario: Scenario, routes: Routes) -> IntArray:
    """Each flow's time alone on its path: packets in a pipeline behind the slowest link, and the last ACK back."""
    flows, frame, links = scenario.flows, scenario.frame, scenario.topology.links
    nic_H = [(links[ports[0] // 2].gbps, links[ports[0] // 2].delay_ns) for ports in routes.ports_H]
    kinds = {one: number for number, one in enumerate(sorted(set(nic_H)))}
    kind_H = np.array([kinds[one] for one in nic_H])
    # Flows between the same switches with the same NICs take the same time: one path each.
    end_H = routes.group_H * len(kinds) + kind_H
    keys_F = end_H[flows.src_F] << 31 | end_H[flows.dst_F]
    _, first, path_F = np.unique(keys_F, return_index=True, return_inverse=True)
    paths = [_path(scenario, routes, int(flows.src_F[flow]), int(flows.dst_F[flow])) for flow in first.tolist()]
    wire, per_byte, slowest, ack = (np.array(column)[path_F.ravel()] for column in zip(*paths))
    packets = -(-flows.bytes_F // frame.payload_bytes)
    last = flows.bytes_F - (packets - 1) * frame.payload_bytes + frame.header_bytes
    full = scenario.frame_bytes
    leading = np.where(packets > 1, full, last) * per_byte
    pipeline = np.where(packets > 1, (packets - 2) * full * slowest + last * slowest, 0.0)
    return np.asarray(wire + leading + pipeline + ack, np.int64)


def _path(scenario: Scenario, routes: Routes, src: int, dst: int) -> tuple[float, float, float, float]:
    """Along the first candidates: delays, ps per byte summed, of the slowest link, and the ACK's way back."""
    links = scenario.topology.links
    port = routes.ports_H[src][0]
    wire = per_byte = slowest = back = 0.0
    for _ in range(len(scenario.topology.nodes) + 1):
        link = links[port // 2]
        peer = int(routes.peer_P[port])
        latency = delay_ps(scenario.switch.latency_ns) if peer >= scenario.topology.hosts else 0
        byte = ps_per_byte_q16(link.gbps) / 65536
        wire += delay_ps(link.delay_ns) + latency
        back += delay_ps(link.delay_ns) + delay_ps(scenario.switch.latency_ns) * (
            routes.owner_P[port] >= scenario.topology.hosts
        )
        per_byte += byte
        slowest = max(slowest, byte)
        if peer == dst:
            break
        port = routes.candidates(peer, dst)[0]
    return wire, per_byte, slowest, back + per_byte * scenario.frame.ack_bytes
