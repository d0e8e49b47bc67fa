"""Time of an exchange between hosts: the bound that no schedule beats, and the fabric simulator on the very bytes.

Shapes: P NIC ports of the network. Knows bytes and the topology; nothing of tokens. `wire` asks for bounds while
candidates are priced, `refine` and `settings` for simulations of what is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bywash.fabric.profiles import profile
from bywash.fabric.result import Result
from bywash.fabric.run import simulate
from bywash.fabric.scenario import RunConfig, Scenario
from bywash.fabric.topology import Topology
from bywash.fabric.traffic import Flows, join
from bywash.planner.moe_traffic import LayerBytes
from bywash.planner.schedule import Compute, Schedule, Wire, moe_flows, round_trip_us

IntArray = NDArray[np.int64]

SWITCH_NS = 700.0
"""Latency of a switch, as in docs/fabric-study.md."""
PATIENCE, SLACK_US, LONGEST_US = 30.0, 2_000.0, 8e6
"""A run may take so many times what its busiest links need, and a little, up to what a scenario may; then it counts as
endless."""
MOST_PACKETS = 200_000
"""Data packets of one simulated exchange: larger ones are simulated at a part of their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """When messages leave, and the queue pairs that each is split over, which ECMP sends on paths of their own.

    `factor` is for `by-counts`: how many times its line a receiver is offered by all its senders together.
    """

    schedule: Schedule
    qps: int = 1
    factor: float = 1.0

    def __str__(self) -> str:
        times = f" x {self.factor:g}" if self.factor != 1 else ""
        return f"{self.schedule}{times}, {self.qps} QP{'s' if self.qps > 1 else ''} a pair"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """What one group sends, layer by layer, and how. Groups have no port in common, and all as many layers."""

    layers: tuple[LayerBytes, ...]
    sending: Sending


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """One simulated exchange.

    Attributes:
        dispatch_us, combine_us: until the last message of all was acknowledged, at full size.
        scale: the share of the bytes that was simulated.
        p99_us, pauses, pause_us, marks, peak_queue_bytes, drops: of the run as simulated.
        result: the run itself, for reports; None where it came from another process.
        arithmetic: how the times come about.
    """

    dispatch_us: float
    combine_us: float
    scale: float
    p99_us: float
    pauses: int
    pause_us: float
    marks: int
    peak_queue_bytes: int
    drops: int
    arithmetic: str
    result: Result | None = None


@dataclass(slots=True, eq=False)
class Network:
    """A topology, prepared for many questions."""

    topology: Topology
    scenario: Scenario | None = None
    """Switch, NIC and routing settings to simulate with; None takes the profile `rocev2`."""
    wire: Wire = field(init=False)
    _gbps_P: NDArray[np.float64] = field(init=False)
    _leaf_P: IntArray = field(init=False)
    _up_gbps: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        ports = self.topology.hosts
        self._gbps_P, self._leaf_P = np.zeros(ports), np.full(ports, -1)
        self._up_gbps = {}
        for link in self.topology.links:
            if link.failed:
                continue
            for near, far in ((link.a, link.b), (link.b, link.a)):
                if near < ports:
                    self._gbps_P[near] += link.gbps
                    self._leaf_P[near] = far if self._leaf_P[near] < 0 else self._leaf_P[near]
                elif far >= ports and self.topology.nodes[near].tier == 1:
                    self._up_gbps[near] = self._up_gbps.get(near, 0.0) + link.gbps
        frame = profile("rocev2").frame
        self.wire = Wire(topology=self.topology, frame=frame, rtt_us=round_trip_us(self.topology, SWITCH_NS))

    @property
    def rtt_us(self) -> float:
        """Without queues, of the farthest pair."""
        return self.wire.rtt_us

    def busiest_us(self, bytes_PP: NDArray[np.number]) -> float:
        """Time of the busiest NIC or set of uplinks, without the round trip: `Wire.bound_us` for many calls."""
        used_P = np.maximum(bytes_PP.sum(axis=1), bytes_PP.sum(axis=0))
        busiest = float((self._frames(used_P) / self._gbps_P).max(initial=0.0))
        away_PP = np.where(self._leaf_P[:, None] != self._leaf_P, bytes_PP, 0)
        out_P, in_P = away_PP.sum(axis=1), away_PP.sum(axis=0)
        for leaf, gbps in self._up_gbps.items():
            here = self._leaf_P == leaf
            most = max(out_P[here].sum(), in_P[here].sum())
            busiest = max(busiest, float(self._frames(most)) / gbps)
        return busiest

    def _frames(self, size: NDArray[np.number] | float) -> NDArray[np.float64]:
        """Payload bytes to microseconds at 1 Gb/s, headers included."""
        frame = self.wire.frame
        return np.asarray(size) * (1 + frame.header_bytes / frame.payload_bytes) * 8e-3

    def scale_for(self, groups: Sequence[Sent]) -> float:
        """The share of the bytes to simulate."""
        packets = sum(int(bytes_PP.sum()) for bytes_PP in _all_at_once(groups)) / 4096
        return min(1.0, MOST_PACKETS / packets) if packets else 1.0

    def simulate(self, groups: Sequence[Sent], *, keep: bool = False) -> Simulated:
        """Dispatch and combine of the layers, one phase after the other, all ports waiting for all.

        Where only a part of the bytes is simulated, what exceeds a round trip is scaled up: an exchange is bound by
        bytes once it is long. Means over the layers, until the last group is done.
        """
        scale = self.scale_for(groups)
        run = RunConfig(sample_us=5.0 if keep else 0.0)
        return self._read(self._run(groups, scale, run), groups, scale, keep)

    def simulate_together(self, groups: Sequence[Sent]) -> list[tuple[float, float]]:
        """Several groups' exchanges at once: (dispatch, combine) us of each, means over layers.

        Slower than alone where they share links between switches.
        """
        scale, phases = self.scale_for(groups), 2 * len(groups[0].layers)
        result = self._run(groups, scale, RunConfig())
        flows, ends_F = result.scenario.flows, result.done_ps_F / 1e6
        found, begun = [], 0.0
        times = np.zeros((len(groups), phases))
        for phase in range(phases):
            in_F = flows.phase_F == phase
            for g, group in enumerate(groups):
                layer = group.layers[phase // 2]
                sends_P = layer.dispatch_HH.sum(axis=1) + layer.combine_HH.sum(axis=1) > 0
                took = float(ends_F[in_F & sends_P[flows.src_F]].max(initial=begun)) - begun
                times[g, phase] = max(self.rtt_us, self.rtt_us + (took - self.rtt_us) / scale)
            begun = max(begun, float(ends_F[in_F].max(initial=begun)))
        if result.verdict != "completed":
            times[:] = result.end_ps / 1e6
        for row in times:
            found.append((float(row[0::2].mean()), float(row[1::2].mean())))
        return found

    def _run(self, groups: Sequence[Sent], scale: float, run: RunConfig) -> Result:
        small = [_scaled(group, scale) for group in groups]
        flows = join([self._flows(group) for group in small], "global")
        phases = _all_at_once(small)
        least = sum(self.busiest_us(bytes_PP) for bytes_PP in phases)
        end_us = min(LONGEST_US, PATIENCE * (least + len(phases) * self.rtt_us) + SLACK_US)
        run = replace(run, end_us=end_us)
        if self.scenario is not None:
            return simulate(replace(self.scenario, flows=flows, run=run))
        named = profile("rocev2")
        return simulate(
            Scenario(
                name="plan",
                topology=self.topology,
                flows=flows,
                classes=named.classes,
                switch=replace(named.switch, latency_ns=SWITCH_NS),
                nic=named.nic,
                routing=named.routing,
                frame=named.frame,
                run=run,
            )
        )

    def _flows(self, group: Sent) -> Flows:
        return moe_flows(
            group.layers,
            self.wire,
            schedule=group.sending.schedule,
            compute=Compute(),
            barrier="global",
            qps_per_pair=group.sending.qps,
            factor=group.sending.factor,
        )

    def _read(self, result: Result, groups: Sequence[Sent], scale: float, keep: bool) -> Simulated:
        phase_F, layers = result.scenario.flows.phase_F, len(groups[0].layers)
        sending = "; ".join(dict.fromkeys(str(group.sending) for group in groups))
        ends = [float(result.done_ps_F[phase_F == p].max(initial=0)) / 1e6 for p in range(2 * layers)]
        for p in range(1, len(ends)):
            ends[p] = max(ends[p], ends[p - 1])
        times = np.diff([0.0, *ends])
        if result.verdict != "completed":  # at least so long
            times = np.full(times.size, result.end_ps / 1e6)
        full = np.maximum(self.rtt_us, self.rtt_us + (times - self.rtt_us) / scale)
        took = result.fct_us_F
        ended = "" if result.verdict == "completed" else f"; NOT COMPLETED: {result.verdict}"
        part = "" if scale == 1 else f" at {scale:.3g} of the bytes, {self.rtt_us:.1f} us + the rest / {scale:.3g}"
        return Simulated(
            dispatch_us=float(full[0::2].mean()),
            combine_us=float(full[1::2].mean()),
            scale=scale,
            p99_us=float(np.percentile(took, 99)) if np.isfinite(took).all() else float("inf"),
            pauses=int(result.pauses_PQ.sum()),
            pause_us=float(result.paused_ps_PQ.sum()) / 1e6,
            marks=int(result.marks_PQ.sum()),
            peak_queue_bytes=int(result.peak_bytes_PQ.max(initial=0)),
            drops=int(result.drops_PQ.sum()),
            arithmetic=f"{layers} layers, {result.packet_hops:,} packet-hops, {sending}{part}{ended}",
            result=result if keep else None,
        )


def _scaled(group: Sent, scale: float) -> Sent:
    """At least a byte where there is one."""
    if scale == 1:
        return group
    made = []
    for one in group.layers:
        dispatch_HH, combine_HH = (np.ceil(m * scale).astype(np.int64) for m in (one.dispatch_HH, one.combine_HH))
        made.append(replace(one, dispatch_HH=dispatch_HH, combine_HH=combine_HH))
    return replace(group, layers=tuple(made))


def _all_at_once(groups: Sequence[Sent]) -> list[IntArray]:
    """Bytes between ports [P, P] of all groups, phase by phase: dispatch, combine of the first layer, of the next."""
    halves = zip(*([m for one in g.layers for m in (one.dispatch_HH, one.combine_HH)] for g in groups), strict=True)
    return [np.sum(matrices, axis=0) for matrices in halves]
