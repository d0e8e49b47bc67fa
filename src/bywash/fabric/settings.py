"""A scenario's settings as the numbers that the hot loop reads: `par` (int64) and `parf` (float64) of `layout`.

Times in picoseconds, sizes in bytes, rates in Gb/s, sets of queues as bits. Called by `state.build`.
"""

import numpy as np

from bywash.fabric import layout as L
from bywash.fabric.inputs import Array, window_packets
from bywash.fabric.scenario import Scenario

CONTROLS = ("none", "dcqcn", "window", "receiver")
MODES = ("ecmp", "flowlet", "adaptive", "spray")


def settings(scenario: Scenario, *, repaces: bool) -> Array:
    """`par`, int64 [PAR_SIZE]; `repaces` says whether the pace of a QP changes from flow to flow."""
    switch, nic, frame, run, routing = scenario.switch, scenario.nic, scenario.frame, scenario.run, scenario.routing
    end = round(run.end_us * 1e6) if run.end_us else L.LAST_PS
    reorder = nic.reorder_packets if routing.mode == "ecmp" else max(nic.reorder_packets, nic.ooo_packets)
    values = {
        L.P_PAYLOAD: frame.payload_bytes,
        L.P_HEADER: frame.header_bytes,
        L.P_ACK: frame.ack_bytes,
        L.P_WHOLE_NS: frame.whole_ns,
        L.P_END: end,
        L.P_RESERVE: switch.reserve_bytes,
        L.P_ALPHA_Q16: round(switch.alpha * 65536),
        L.P_LOSSY_ALPHA_Q16: round(switch.lossy_alpha * 65536),
        L.P_XON: switch.xon_offset_bytes,
        L.P_STATIC_XOFF: switch.static_xoff_bytes,
        L.P_PFC: sum(4 << c for c, one in enumerate(scenario.classes) if one.lossless and switch.pfc.enabled),
        L.P_QUANTA: switch.pfc.quanta if switch.pfc.mode == "quanta" else 0,
        L.P_WATCH: round(switch.pfc.watchdog_us * 1e6),
        L.P_RESTORE: round(switch.pfc.watchdog_restore_us * 1e6),
        L.P_LOSSY_MASK: sum(4 << c for c, one in enumerate(scenario.classes) if not one.lossless),
        L.P_ECN_MASK: sum(4 << c for c, one in enumerate(scenario.classes) if one.ecn and switch.ecn.enabled),
        L.P_ECN_AT_DEQUEUE: switch.ecn.at == "dequeue",
        L.P_CONTROL: CONTROLS.index(nic.control),
        L.P_CNP_IN_ACK: nic.dcqcn.cnp == "ack-bit",
        L.P_CNP_INTERVAL: round(nic.dcqcn.cnp_interval_us * 1e6),
        L.P_VARIANT_NS3: nic.dcqcn.variant == "ns3",
        L.P_ALPHA_PS: round(nic.dcqcn.alpha_us * 1e6),
        L.P_TIMER_PS: round(nic.dcqcn.timer_us * 1e6),
        L.P_DECREASE_PS: round(nic.dcqcn.decrease_us * 1e6),
        L.P_BYTES: nic.dcqcn.byte_counter if nic.dcqcn.variant == "paper" else 0,
        L.P_FAST: nic.dcqcn.fast_recovery,
        L.P_MURMUR: routing.hash == "murmur-ns3",
        L.P_MODE: MODES.index(routing.mode),
        L.P_FLOWLET_GAP: round(routing.flowlet_gap_us * 1e6),
        L.P_SELECTIVE: nic.recovery == "selective",
        L.P_OUT_OF_ORDER: nic.out_of_order,
        L.P_REORDER: reorder,
        L.P_RTO: round(nic.rto_us * 1e6),
        L.P_ACK_EVERY: nic.ack_every,
        L.P_SAMPLE: round(run.sample_us * 1e6),
        L.P_BURST: run.burst_bytes,
        L.P_STRICT_MASK: sum(4 << c for c, one in enumerate(scenario.classes) if one.strict),
        L.P_QUANTUM: scenario.frame_bytes,
        L.P_WINDOW: window_packets(scenario),
        L.P_UNASKED: nic.window_bytes // frame.payload_bytes,
        L.P_REPACE: repaces,
    }
    par = np.zeros(L.PAR_SIZE, np.int64)
    for place, value in values.items():
        par[place] = int(value)
    return par


def rates(scenario: Scenario) -> Array:
    """`parf`, float64 [PARF_SIZE]."""
    parf = np.zeros(L.PARF_SIZE)
    dcqcn = scenario.nic.dcqcn
    parf[L.R_G] = dcqcn.g
    parf[L.R_AI], parf[L.R_HAI], parf[L.R_MIN] = dcqcn.ai_mbps / 1e3, dcqcn.hai_mbps / 1e3, dcqcn.min_mbps / 1e3
    parf[L.R_PMAX] = scenario.switch.ecn.pmax
    parf[L.R_ECN_DYNAMIC] = scenario.switch.ecn.dynamic
    return parf
