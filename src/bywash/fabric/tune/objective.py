"""What a setting is worth on a case: scenarios from settings, and outcomes from results.

Words: a **case** is traffic and a seed (the seed draws ECMP's choices and ECN's dice); an **outcome** is what one
setting did on one case; a **score** sums up one setting over several cases. F flows, as in `traffic`.

Completion counts from when a message's source entered its phase, not from when the schedule let the message start:
a schedule that holds messages back must not look faster for it.

Memory: the simulator has one kind of switch, so every switch gets the packet memory of the one with the least shared
pool for its ports, after the headroom that its configuration reserves. Called by `search` and `pool`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.fabric.config.plan import FabricPlan
from bywash.fabric.config.thresholds import alpha_of, any_spread_ecn_bound, queue_at_first_pause
from bywash.fabric.profiles import profile
from bywash.fabric.result import PS_PER_US, Result
from bywash.fabric.scenario import (
    MAX_BUFFER_BYTES,
    DcqcnConfig,
    EcnConfig,
    FrameConfig,
    NicConfig,
    RoutingConfig,
    RunConfig,
    Scenario,
    SwitchConfig,
    shared_pool_bytes,
)
from bywash.fabric.sending import with_sending
from bywash.fabric.topology import Topology
from bywash.fabric.traffic import Flows
from bywash.fabric.tune.space import HYPER, Setting, Space, gain, make_space

PATIENCE = 30
"""A case may take so many times its floor; a setting that needs longer has failed it."""
SLACK_US = 2_000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Traffic and a seed."""

    name: str
    flows: Flows
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fabric:
    """What stays the same from setting to setting: the network, its memory, how it routes, where it marks."""

    topology: Topology
    buffer_bytes: int
    gbps: float
    frame: FrameConfig
    mark_at_dequeue: bool
    adaptive: bool
    out_of_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One setting on one case. Times in us, of foreground messages; infinite when the case was not completed.

    Attributes:
        p99_us, mean_us: completion of messages since their phase began at their source.
        whole_us: when the last message of all was done.
        pause_share: time that ports were kept from sending by PFC, over ports x simulated time.
        peak_queue_bytes: the largest egress queue.
        drops: packets lost.
        floor_us: what no schedule can beat as a whole, see `floor_us`.
    """

    p99_us: float
    mean_us: float
    whole_us: float
    pause_share: float
    peak_queue_bytes: int
    drops: int
    floor_us: float

    @property
    def completed(self) -> bool:
        """Whether every message arrived in time, and none was dropped on the way."""
        return math.isfinite(self.whole_us) and self.drops == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One setting over cases: geometric means of times, mean and worst of pause shares, the largest queue.

    `objective_us` is the geometric mean of p99 and whole completion: an exchange is over with its last message, and
    p99 alone would let a few stragglers hide.
    """

    objective_us: float
    p99_us: float
    mean_us: float
    whole_us: float
    floor_us: float
    pause_share: float
    worst_pause_share: float
    peak_queue_bytes: int
    completed: bool

    def rank(self, pause_budget: float) -> tuple[int, float, float]:
        """Sort key: lossless and within the pause budget in every case first, by objective; then by how much over."""
        if not self.completed:
            return 2, self.worst_pause_share, self.objective_us
        over = self.worst_pause_share > pause_budget
        return (1, self.worst_pause_share, self.objective_us) if over else (0, 0.0, self.objective_us)


def make_fabric(plan: FabricPlan) -> Fabric:
    """The network that a plan describes, as the simulator can have it."""
    values, topology = plan.values, plan.topology
    rates = [max(link.gbps for link in topology.links if host in (link.a, link.b)) for host in range(topology.hosts)]
    return Fabric(
        topology=topology,
        buffer_bytes=_buffer_bytes(plan),
        gbps=max(rates),
        frame=profile("rocev2").frame,
        mark_at_dequeue=values.mark_at == "dequeue",
        adaptive=values.adaptive_routing,
        out_of_order=values.nic.out_of_order,
    )


def _buffer_bytes(plan: FabricPlan) -> int:
    """Memory with which no switch has a larger shared pool in the simulator than in the plan.

    The simulator takes headroom for its own frames, much less than a switch's worst case in cells, so that giving it
    the memory of the ASIC would be too kind.
    """
    one = Flows(src_F=np.array([0]), dst_F=np.array([1]), bytes_F=np.array([1]))
    probe = Scenario(
        topology=plan.topology,
        flows=one,
        switch=SwitchConfig(buffer_bytes=MAX_BUFFER_BYTES),
        frame=profile("rocev2").frame,
    )
    pools = shared_pool_bytes(probe)[plan.topology.hosts :]
    return min(switch.pool_bytes + MAX_BUFFER_BYTES - pool for switch, pool in zip(plan.switches, pools))


def space_of(plan: FabricPlan, gbps: float, *, sending: bool) -> Space:
    """The space for a plan: thresholds bounded as `thresholds` and `audit` have it, at every switch."""

    def bounds(dynamic_th: int) -> tuple[float, float]:
        alpha, priorities = alpha_of(dynamic_th), len(plan.values.priorities)
        kmins, kmaxs = [], []
        for switch in plan.switches:
            ports, fastest = len(switch.ports), max(port.gbps for port in switch.ports)
            kmin = any_spread_ecn_bound(switch.pool_bytes, ports, priorities, alpha)
            pause = queue_at_first_pause(switch.pool_bytes - priorities * (ports - 1) * kmin, alpha, 1.0)
            kmins.append(kmin * gbps / fastest)
            kmaxs.append(pause * gbps / fastest)
        return min(kmins), min(kmaxs)

    return make_space(gbps, bounds, sending=sending)


def planned(plan: FabricPlan, gbps: float) -> Setting:
    """What `bywash fabric headroom` computes for the plan, without search; of several switches the tightest."""
    markings = [(wred.marking, wred.gbps) for switch in plan.switches for wred in switch.wreds]
    marking, speed = min(markings, key=lambda pair: pair[0].kmin_bytes / pair[1])
    dcqcn = plan.values.dcqcn
    return Setting(
        kmin_bytes=round(marking.kmin_bytes * gbps / speed),
        kmax_bytes=round(marking.kmax_bytes * gbps / speed),
        pmax_percent=marking.pmax_percent,
        dynamic_th=plan.values.dynamic_th,
        cnp_interval_us=dcqcn.cnp_interval_us,
        alpha_g=dcqcn.alpha_g,
        alpha_timer_us=dcqcn.alpha_timer_us,
        increase_timer_us=dcqcn.increase_timer_us,
        byte_counter_bytes=dcqcn.byte_counter_bytes,
        fast_recovery_steps=dcqcn.fast_recovery_steps,
        increase_mbps=dcqcn.increase_for(gbps),
        active=plan.values.sending.active,
        pace_gbps=plan.values.sending.pace_gbps,
        pace_by_counts=plan.values.sending.pace_by_counts,
    )


def scenario(fabric: Fabric, setting: Setting, case: Case) -> Scenario:
    """The run of one setting on one case. DCQCN is the paper's, with notification packets: a cut for each."""
    ecn = EcnConfig(
        kmin_bytes=setting.kmin_bytes,
        kmax_bytes=setting.kmax_bytes,
        pmax=setting.pmax_percent / 100,
        reference_gbps=fabric.gbps,
        at="dequeue" if fabric.mark_at_dequeue else "enqueue",
    )
    dcqcn = DcqcnConfig(
        cnp_interval_us=float(setting.cnp_interval_us),
        g=gain(setting.alpha_g),
        alpha_us=float(setting.alpha_timer_us),
        timer_us=float(setting.increase_timer_us),
        byte_counter=setting.byte_counter_bytes,
        fast_recovery=setting.fast_recovery_steps,
        ai_mbps=float(setting.increase_mbps),
        hai_mbps=float(HYPER * setting.increase_mbps),
    )
    longest_us = PATIENCE * floor_us(fabric.topology, fabric.frame, case.flows) + SLACK_US
    return Scenario(
        name=case.name,
        topology=fabric.topology,
        flows=with_sending(
            case.flows,
            fabric.topology.gbps_H,
            active=setting.active,
            pace_gbps=setting.pace_gbps,
            pace_by_counts=setting.pace_by_counts,
        ),
        switch=SwitchConfig(buffer_bytes=fabric.buffer_bytes, alpha=alpha_of(setting.dynamic_th), ecn=ecn),
        nic=NicConfig(
            dcqcn=dcqcn,
            out_of_order=fabric.out_of_order,
            recovery="selective" if fabric.out_of_order else "go-back-n",
        ),
        routing=RoutingConfig(mode="adaptive" if fabric.adaptive else "ecmp"),
        frame=fabric.frame,
        run=RunConfig(seed=case.seed, end_us=min(8e6, longest_us)),
    )


def floor_us(topology: Topology, frame: FrameConfig, flows: Flows) -> float:
    """No schedule is faster: what the busiest host sends or receives at its own rate, phase after phase, and the gaps.

    Frames with their headers; no propagation, no other link.
    """
    wire_bytes_F = flows.bytes_F + frame.header_bytes * -(-flows.bytes_F // frame.payload_bytes)
    busy_us_H = np.zeros(topology.hosts)
    for phase in range(flows.phases):
        chosen = ~flows.background_F & (flows.phase_F == phase)
        sent_H, received_H = (
            np.bincount(end_F[chosen], weights=wire_bytes_F[chosen], minlength=topology.hosts)
            for end_F in (flows.src_F, flows.dst_F)
        )
        busy_us_H += np.maximum(sent_H, received_H) * 8e-3 / topology.gbps_H
    return float(busy_us_H.max()) + float(flows.gap_ps_P.sum()) / PS_PER_US


def message_us_F(result: Result) -> NDArray[np.float64]:
    """Per foreground flow, from when its source entered the phase to the last ACK: us; infinite when not finished."""
    flows = result.scenario.flows
    key_F = flows.src_F * flows.phases + flows.phase_F
    entered = np.full(int(key_F.max()) + 1, np.iinfo(np.int64).max)
    begun_F = result.start_ps_F >= 0
    np.minimum.at(entered, key_F[begun_F], (result.start_ps_F - flows.start_ps_F)[begun_F])
    took_F = (result.done_ps_F - entered[key_F]) / PS_PER_US
    return np.where(result.done_ps_F >= 0, took_F, np.inf)[~flows.background_F]


def outcome(result: Result) -> Outcome:
    """The numbers of a run that count here."""
    took_F = message_us_F(result)
    finished = bool(np.isfinite(took_F).all()) and result.verdict == "completed"
    ports, run = result.paused_ps_PQ.shape[0], result.scenario
    front_F = ~run.flows.background_F
    return Outcome(
        p99_us=float(np.percentile(took_F, 99)) if finished else math.inf,
        mean_us=float(took_F.mean()) if finished else math.inf,
        whole_us=float(result.done_ps_F[front_F].max()) / PS_PER_US if finished else math.inf,
        pause_share=float(result.paused_ps_PQ.sum()) / max(1, ports * result.end_ps),
        peak_queue_bytes=int(result.peak_bytes_PQ.max(initial=0)),
        drops=int(result.drops_PQ.sum()),
        floor_us=floor_us(run.topology, run.frame, run.flows),
    )


def score(outcomes: Sequence[Outcome]) -> Score:
    """One setting over the cases that it was run on."""
    p99, mean, whole, floor = (
        _geometric([getattr(one, name) for one in outcomes]) for name in ("p99_us", "mean_us", "whole_us", "floor_us")
    )
    return Score(
        objective_us=math.sqrt(p99 * whole),
        p99_us=p99,
        mean_us=mean,
        whole_us=whole,
        floor_us=floor,
        pause_share=sum(one.pause_share for one in outcomes) / len(outcomes),
        worst_pause_share=max(one.pause_share for one in outcomes),
        peak_queue_bytes=max(one.peak_queue_bytes for one in outcomes),
        completed=all(one.completed for one in outcomes),
    )


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))
