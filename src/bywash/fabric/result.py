"""`Result`: what a run showed, as arrays, and its summary as plain numbers.

Shapes: F flows, P ports (port 2i and 2i + 1 are the two directions of link i), Q priorities (0 is control, class c
is c + 1), T samples. Times are picoseconds, NEVER (-1) where a thing did not happen.
Knows nothing of how it was made; `simulate` and the twin fill it, reports and the planner read it.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bywash.fabric.scenario import Scenario

NEVER = -1
PS_PER_US = 1e6

Verdict = Literal["completed", "deadlock", "partial deadlock", "stalled", "time limit"]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """One run.

    Attributes:
        verdict: `completed`; `deadlock` (nothing can move), `partial deadlock` (`cycle` cannot, others did);
            `stalled` (nothing is left to happen but flows are unfinished, without a cycle); `time limit`.
        cycle: the queues of the deadlock, each waiting for the next, as `leaf0->spine1/roce`.
        end_ps: when the last thing happened.
        start_ps_F, arrived_ps_F, done_ps_F: int64 [F], flow begun; last byte at the receiver; last ACK at the sender.
        base_ps_F: int64 [F], what the flow would take alone at its bottleneck's rate: slow-down is over this.
        sent_bytes_PQ, sent_packets_PQ: int64 [P, Q], transmitted, headers included.
        peak_bytes_PQ: int64 [P, Q], largest egress queue.
        ingress_peak_bytes_PQ: int64 [P, Q], largest ingress queue of the switch that the port belongs to.
        paused_ps_PQ: int64 [P, Q], how long the port was kept from sending by its peer's PFC.
        pauses_PQ: int64 [P, Q], PFC pause frames that the port's owner sent out of that port.
        first_pause_ps_PQ: int64 [P, Q], when the first of them was sent.
        marks_PQ, drops_PQ: int64 [P, Q], packets marked in, and dropped at, the egress queue.
        bursts_PQ, burst_ps_PQ, burst_longest_ps_PQ: micro-bursts (queue above `run.burst_bytes`): how many, total,
            longest.
        paused_by: dict port -> the ports whose pauses it passed on: the pause tree's edges (child -> parents).
        cnps, retransmitted, timeouts: packets and events, totals.
        ooo_packets, ooo_distance: packets that came early, and the largest number of packets by which one did.
        sample_ps_T, queue_bytes_TP: samples of every egress queue (all classes together).
        packet_hops: data and ACK packets times the links they crossed.
        events: events handled. seconds: CPU time of the event loop. compile_s: spent compiling or loading it before.
        memory_bytes: of the engine's arrays.
        scaled_watchdog: whether a PFC watchdog faster than an operator's acted in this run.
    """

    scenario: Scenario
    verdict: Verdict
    cycle: tuple[str, ...]
    end_ps: int
    start_ps_F: IntArray
    arrived_ps_F: IntArray
    done_ps_F: IntArray
    base_ps_F: IntArray
    sent_bytes_PQ: IntArray
    sent_packets_PQ: IntArray
    peak_bytes_PQ: IntArray
    ingress_peak_bytes_PQ: IntArray
    paused_ps_PQ: IntArray
    pauses_PQ: IntArray
    first_pause_ps_PQ: IntArray
    marks_PQ: IntArray
    drops_PQ: IntArray
    bursts_PQ: IntArray
    burst_ps_PQ: IntArray
    burst_longest_ps_PQ: IntArray
    paused_by: dict[int, tuple[int, ...]]
    cnps: int
    retransmitted: int
    timeouts: int
    ooo_packets: int
    ooo_distance: int
    sample_ps_T: IntArray
    queue_bytes_TP: IntArray
    packet_hops: int
    events: int
    seconds: float
    compile_s: float
    memory_bytes: int
    scaled_watchdog: bool

    @property
    def fct_us_F(self) -> NDArray[np.float64]:
        """Flow completion times (start to last ACK) in us; NaN for flows that did not finish."""
        took = (self.done_ps_F - self.start_ps_F) / PS_PER_US
        return np.where(self.done_ps_F >= 0, took, np.nan)

    @property
    def slowdown_F(self) -> NDArray[np.float64]:
        """Completion time over the time alone in the network; NaN for flows that did not finish."""
        return self.fct_us_F * PS_PER_US / np.maximum(self.base_ps_F, 1)

    def link_use_P(self) -> NDArray[np.float64]:
        """Share of the run that each port spent transmitting, 0..1."""
        links = self.scenario.topology.links
        gbps_P = np.repeat([link.gbps for link in links], 2)
        busy_ps_P = self.sent_bytes_PQ.sum(axis=1) * 8000 / gbps_P
        return np.asarray(busy_ps_P / max(1, self.end_ps))

    def summary(self) -> dict[str, Any]:
        """Plain numbers for JSON: what an operator asks first."""
        counted = ~self.scenario.flows.background_F
        fct_us = self.fct_us_F[counted]
        done = fct_us[~np.isnan(fct_us)]
        slow = self.slowdown_F[counted]
        last = self.done_ps_F[counted].max(initial=0)
        out: dict[str, Any] = {
            "scenario": self.scenario.name,
            "topology": self.scenario.topology.describe(),
            "verdict": self.verdict,
            "deadlock": self.verdict in ("deadlock", "partial deadlock"),
            "deadlock_cycle": list(self.cycle),
            "flows": int(counted.sum()),
            "flows_finished": int(done.size),
            "fct_us": _spread(done),
            "slowdown": _spread(slow[~np.isnan(slow)]),
            "completion_us": round(float(last) / PS_PER_US, 3) if done.size else None,
            "simulated_us": round(self.end_ps / PS_PER_US, 3),
            "pause_us": round(float(self.paused_ps_PQ.sum()) / PS_PER_US, 3),
            "pauses": int(self.pauses_PQ.sum()),
            "drops": int(self.drops_PQ.sum()),
            "ecn_marks": int(self.marks_PQ.sum()),
            "cnps": self.cnps,
            "retransmitted": self.retransmitted,
            "timeouts": self.timeouts,
            "ooo_packets": self.ooo_packets,
            "ooo_distance": self.ooo_distance,
            "peak_queue_bytes": int(self.peak_bytes_PQ.max(initial=0)),
            "packet_hops": self.packet_hops,
            "events": self.events,
            "seconds": round(self.seconds, 4),
            "packet_hops_per_s": round(self.packet_hops / self.seconds) if self.seconds > 0 else None,
            "compile_s": round(self.compile_s, 3),
            "memory_bytes": self.memory_bytes,
        }
        if self.scaled_watchdog:
            out["watchdog"] = "scaled: real ones work in steps of 100 ms"
        return out


def _spread(values: NDArray[np.float64]) -> dict[str, float] | None:
    if not values.size:
        return None
    p50, p99 = np.percentile(values, [50, 99])
    named = {"mean": values.mean(), "p50": p50, "p99": p99, "max": values.max()}
    return {name: round(float(value), 3) for name, value in named.items()}
