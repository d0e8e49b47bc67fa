"""`Scenario`: everything a run depends on, as frozen dataclasses with defaults that are stated, not hidden.

A scenario is a topology, traffic classes (priorities), switch, NIC and routing settings, flows, and how to run.
The same scenario and seed give the same result, bit for bit. Rates are in Gb/s, sizes in bytes, times as each name
says; packets carry `payload_bytes` of data in frames of `payload_bytes + header_bytes`.

Knows nothing of the engine. `files` reads scenarios that people write, `profiles` has named settings, `run.simulate`
and the twin in `naive` execute them, the tuner and the configuration writers read them.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from bywash.errors import ConfigError
from bywash.fabric.topology import Link, Topology
from bywash.fabric.traffic import Flows

MAX_CLASSES = 7
WINDOW_LIMIT = 1 << 40
MAX_BUFFER_BYTES = 1 << 30
"""The engine counts queues in 32 bits; real packet buffers are below 300 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficClass:
    """A data priority. Control frames (ACK, CNP, grant, PFC) always go before all classes.

    Attributes:
        name: for reports.
        lossless: PFC protects it; else it is dropped at the dynamic threshold of its egress queue.
        strict: served before every weighted class, in order; else by weight (deficit weighted round robin).
        weight: share of a weighted class.
        ecn: whether its packets may be marked.
    """

    name: str = "roce"
    lossless: bool = True
    strict: bool = False
    weight: int = 1
    ecn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EcnConfig:
    """WRED marking on the egress queue of a class: 0 below kmin, linear to pmax at kmax, 1 above.

    Attributes:
        kmin_bytes, kmax_bytes, pmax: the line.
        reference_gbps: when > 0, thresholds are for links of this rate and scale with the link's own.
        dynamic: when > 0, kmax is at most `dynamic` times the current PFC threshold of an ingress queue, and kmin
            shrinks by the same factor: marking starts before pausing however full the buffer is.
        at: mark when a packet joins the queue, or when it leaves (then by what stays behind).
    """

    enabled: bool = True
    kmin_bytes: int = 400_000
    kmax_bytes: int = 1_600_000
    pmax: float = 0.2
    reference_gbps: float = 0.0
    dynamic: float = 0.0
    at: Literal["enqueue", "dequeue"] = "dequeue"


@dataclass(frozen=True, slots=True, kw_only=True)
class PfcConfig:
    """Priority flow control (IEEE 802.1Qbb).

    Attributes:
        mode: `on-off` pauses until resumed; `quanta` pauses for `quanta` x 512 bit times and refreshes at half of it.
        watchdog_us: 0 for none; else a queue paused for so long with packets waiting is a storm: its packets are
            dropped until it has been unpaused for `watchdog_restore_us`. Operators' watchdogs work in steps of
            100 ms, far above these runs: any other value is a **scaled** watchdog and is labelled so in reports.
    """

    enabled: bool = True
    mode: Literal["on-off", "quanta"] = "on-off"
    quanta: int = 65_535
    watchdog_us: float = 0.0
    watchdog_restore_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchConfig:
    """Shared-buffer switch, all switches alike.

    Ingress accounting per (port, class): a reserve, then the shared pool up to alpha * (pool left), then (lossless)
    headroom, whose use pauses the sender. Lossy classes are limited on the egress queue by the same threshold.

    Attributes:
        buffer_bytes: all packet memory of a switch: reserves, headrooms and shared pool.
        alpha: dynamic threshold factor (Choudhury and Hahne); SONiC `dynamic_th` d means 2^d.
        lossy_alpha: the same for the egress queues of lossy classes.
        reserve_bytes: guaranteed to each (port, class).
        xon_offset_bytes: a paused sender resumes when its ingress queue is so far below the threshold.
        headroom_bytes: for each (port, lossless class); None computes it from the link (see `headroom_bytes`).
        static_xoff_bytes: when > 0, a fixed PFC threshold in place of the dynamic one.
        latency_ns: from arrival to the egress queue.
    """

    buffer_bytes: int = 32 << 20
    alpha: float = 0.125
    lossy_alpha: float = 1.0
    reserve_bytes: int = 4096
    xon_offset_bytes: int = 3072
    headroom_bytes: int | None = None
    static_xoff_bytes: int = 0
    latency_ns: float = 0.0
    ecn: EcnConfig = field(default_factory=EcnConfig)
    pfc: PfcConfig = field(default_factory=PfcConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DcqcnConfig:
    """DCQCN (Zhu et al., SIGCOMM 2015). Defaults are the paper's.

    Attributes:
        variant: `paper` cuts on each CNP and restarts all timers; `ns3` follows the HPCC simulator: alpha and
            decrease on fixed ticks that start with the first CNP, no byte counter.
        cnp: `packet` sends CNP frames, at most one per QP and `cnp_interval_us`; `ack-bit` echoes each mark in its ACK.
        g: gain of alpha.
        alpha_us, timer_us: alpha timer and rate timer.
        decrease_us: `ns3` only, the tick of decreases.
        byte_counter: bytes between increases; 0 for none.
        fast_recovery: F, increases that only halve the gap.
        ai_mbps, hai_mbps, min_mbps: additive and hyper increase, floor.
    """

    variant: Literal["paper", "ns3"] = "paper"
    cnp: Literal["packet", "ack-bit"] = "packet"
    cnp_interval_us: float = 50.0
    g: float = 1 / 256
    alpha_us: float = 55.0
    timer_us: float = 55.0
    decrease_us: float = 50.0
    byte_counter: int = 10_000_000
    fast_recovery: int = 5
    ai_mbps: float = 40.0
    hai_mbps: float = 400.0
    min_mbps: float = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NicConfig:
    """NICs, all alike but for the rates of their links.

    Attributes:
        control: `none`, `dcqcn`, `window` (fixed), or `receiver` (idealised: the receiver grants packets at its own
            link rate, round robin over senders).
        window_bytes: with `window`, bytes in flight per QP; with `receiver`, bytes a flow sends unasked; with
            others a cap on bytes in flight, 0 for none.
        recovery: `go-back-n`, or `selective` (only what was lost is sent again).
        out_of_order: the receiver keeps packets that come early; needed by adaptive routing and spraying.
        reorder_packets: `selective`: a gap counts as loss when so many later packets are acknowledged.
        ooo_packets: how far beyond the first gap a QP may send when `out_of_order`.
        rto_us: retransmission timeout. It is armed when the simulator knows that a packet was dropped, so a long
            pause alone never causes one.
        ack_every: packets to an ACK (the last of a flow is always acknowledged).
    """

    control: Literal["none", "dcqcn", "window", "receiver"] = "dcqcn"
    dcqcn: DcqcnConfig = field(default_factory=DcqcnConfig)
    window_bytes: int = 0
    recovery: Literal["go-back-n", "selective"] = "go-back-n"
    out_of_order: bool = False
    reorder_packets: int = 1
    ooo_packets: int = 4096
    rto_us: float = 500.0
    ack_every: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How a switch chooses among equal next hops.

    Attributes:
        mode: `ecmp` by hash of the QP; `flowlet` re-chooses the least loaded after `flowlet_gap_us` of silence;
            `adaptive` takes the least loaded for each packet; `spray` a pseudo-random one for each packet.
        paths: `shortest`; `up-down` never climbs after descending (no cycle of buffers); `clockwise` goes round a ring.
        polarised: all switches hash with one seed, so that tiers repeat each other's choice.
        hash: `mix`, or `murmur-ns3` (the HPCC simulator's).
    """

    mode: Literal["ecmp", "flowlet", "adaptive", "spray"] = "ecmp"
    paths: Literal["shortest", "up-down", "clockwise"] = "shortest"
    polarised: bool = False
    flowlet_gap_us: float = 50.0
    hash: Literal["mix", "murmur-ns3"] = "mix"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameConfig:
    """Sizes on the wire, in bytes; a flow's last packet may be shorter. `whole_ns` truncates serialisation times."""

    payload_bytes: int = 1000
    header_bytes: int = 48
    ack_bytes: int = 64
    whole_ns: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How to run: `seed`; `end_us` of simulated time (0: until done); `sample_us` between samples of every egress
    queue (0: none); `burst_bytes`: a queue above it is in a micro-burst, whose length is recorded (0: not).
    `packets` is the most that may be in flight, a bound on memory (32 B each).
    """

    seed: int = 0
    end_us: float = 0.0
    sample_us: float = 0.0
    burst_bytes: int = 0
    packets: int = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scenario:
    """A run, checked: every field on its own and against the others. Raises `ConfigError` with the field's path."""

    topology: Topology
    flows: Flows
    classes: tuple[TrafficClass, ...] = (TrafficClass(),)
    switch: SwitchConfig = field(default_factory=SwitchConfig)
    nic: NicConfig = field(default_factory=NicConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    frame: FrameConfig = field(default_factory=FrameConfig)
    run: RunConfig = field(default_factory=RunConfig)
    name: str = "scenario"

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_choices(self)
        _check_together(self)
        _check_buffer(self)

    @property
    def frame_bytes(self) -> int:
        """A full data frame."""
        return self.frame.payload_bytes + self.frame.header_bytes


def headroom_bytes(scenario: Scenario, link: Link) -> int:
    """What can still arrive on a lossless queue after its pause was decided, in bytes (times not truncated to ns).

    The packet that crossed the threshold; then, at line rate, what is sent while the pause frame waits for a frame in
    transmission, is sent itself and propagates; the frame that the sender had begun; and what is on the wire:
    2 x delay x rate + 4 frames + two control frames for each class and one more.
    """
    if scenario.switch.headroom_bytes is not None:
        return scenario.switch.headroom_bytes
    one_way_ns = link.delay_ns + scenario.switch.latency_ns
    flight = 2 * one_way_ns * link.gbps / 8
    return int(flight) + 4 * scenario.frame_bytes + (len(scenario.classes) + 1) * 2 * scenario.frame.ack_bytes


def shared_pool_bytes(scenario: Scenario) -> list[int]:
    """Per node what its buffer holds beyond reserves and headrooms; may be negative, and means nothing for hosts."""
    switch, topology = scenario.switch, scenario.topology
    lossless = sum(one.lossless for one in scenario.classes) if switch.pfc.enabled else 0
    pool = [switch.buffer_bytes] * len(topology.nodes)
    for link in topology.links:
        if not link.failed:
            taken = switch.reserve_bytes * len(scenario.classes) + lossless * headroom_bytes(scenario, link)
            pool[link.a] -= taken
            pool[link.b] -= taken
    return pool


_US = (0.0, 1e9)
_RANGES: dict[str, tuple[float, float]] = {
    "frame.payload_bytes": (1, 9216),
    "frame.header_bytes": (0, 512),
    "frame.ack_bytes": (1, 512),
    "switch.buffer_bytes": (1, MAX_BUFFER_BYTES),
    "switch.alpha": (1 / 1024, 1024),
    "switch.lossy_alpha": (1 / 1024, 1024),
    "switch.reserve_bytes": (0, 1 << 30),
    "switch.xon_offset_bytes": (0, 1 << 30),
    "switch.static_xoff_bytes": (0, 1 << 36),
    "switch.latency_ns": (0, 100_000),
    "switch.ecn.kmin_bytes": (0, MAX_BUFFER_BYTES),
    "switch.ecn.kmax_bytes": (0, MAX_BUFFER_BYTES),
    "switch.ecn.pmax": (0, 1),
    "switch.ecn.reference_gbps": (0, 10_000),
    "switch.ecn.dynamic": (0, 1),
    "switch.pfc.quanta": (2, 65_535),
    "switch.pfc.watchdog_us": _US,
    "switch.pfc.watchdog_restore_us": _US,
    "nic.window_bytes": (0, WINDOW_LIMIT),
    "nic.reorder_packets": (1, 1 << 20),
    "nic.ooo_packets": (64, 1 << 20),
    "nic.rto_us": (1, 1e7),
    "nic.ack_every": (1, 1 << 16),
    "nic.dcqcn.g": (1e-6, 1),
    "nic.dcqcn.cnp_interval_us": _US,
    "nic.dcqcn.alpha_us": (0.1, 1e7),
    "nic.dcqcn.timer_us": (0.1, 1e7),
    "nic.dcqcn.decrease_us": (0.1, 1e7),
    "nic.dcqcn.byte_counter": (0, 1 << 40),
    "nic.dcqcn.fast_recovery": (0, 1000),
    "nic.dcqcn.ai_mbps": (0, 1e6),
    "nic.dcqcn.hai_mbps": (0, 1e6),
    "nic.dcqcn.min_mbps": (1, 1e6),
    "routing.flowlet_gap_us": _US,
    "run.end_us": (0, 8e6),
    "run.sample_us": _US,
    "run.burst_bytes": (0, 1 << 36),
    "run.packets": (1024, 1 << 30),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "switch.ecn.at": ("enqueue", "dequeue"),
    "switch.pfc.mode": ("on-off", "quanta"),
    "nic.control": ("none", "dcqcn", "window", "receiver"),
    "nic.recovery": ("go-back-n", "selective"),
    "nic.dcqcn.variant": ("paper", "ns3"),
    "nic.dcqcn.cnp": ("packet", "ack-bit"),
    "routing.mode": ("ecmp", "flowlet", "adaptive", "spray"),
    "routing.paths": ("shortest", "up-down", "clockwise"),
    "routing.hash": ("mix", "murmur-ns3"),
}


def _value(scenario: Scenario, path: str) -> object:
    value: object = scenario
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _check_numbers(scenario: Scenario) -> None:
    for path, (low, high) in _RANGES.items():
        value = _value(scenario, path)
        number = float(value) if isinstance(value, int | float) else math.nan
        if not low <= number <= high:
            raise ConfigError(f"{path} = {value}: must be from {low:g} to {high:g}")
    headroom = scenario.switch.headroom_bytes
    if headroom is not None and not 0 <= headroom <= 1 << 30:
        raise ConfigError(f"switch.headroom_bytes = {headroom}: must be 0 or more")


def _check_choices(scenario: Scenario) -> None:
    for path, known in _CHOICES.items():
        value = _value(scenario, path)
        if value not in known:
            raise ConfigError(f"{path} = {value!r}: must be one of {', '.join(known)}")
    if not 1 <= len(scenario.classes) <= MAX_CLASSES:
        raise ConfigError(f"classes: {len(scenario.classes)} given; must be 1 to {MAX_CLASSES}")
    for i, one in enumerate(scenario.classes):
        if not 1 <= one.weight <= 1000:
            raise ConfigError(f"classes[{i}].weight = {one.weight}: must be from 1 to 1000")


def _check_buffer(scenario: Scenario) -> None:
    topology, buffer = scenario.topology, scenario.switch.buffer_bytes
    for node, pool in enumerate(shared_pool_bytes(scenario)):
        if node >= topology.hosts and pool < scenario.frame_bytes:
            raise ConfigError(
                f"switch.buffer_bytes = {buffer:,}: reserves and headrooms of {topology.nodes[node].name} take "
                f"{buffer - pool:,} of it and leave no shared pool"
            )


def _check_together(scenario: Scenario) -> None:
    flows, ecn, nic, run = scenario.flows, scenario.switch.ecn, scenario.nic, scenario.run
    if flows.count == 0:
        raise ConfigError("traffic: nothing to send")
    for name, limit, what in (
        ("src_F", scenario.topology.hosts, "hosts"),
        ("dst_F", scenario.topology.hosts, "hosts"),
        ("class_F", len(scenario.classes), "classes"),
    ):
        wrong = getattr(flows, name) >= limit
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ConfigError(f"traffic.{name}[{at}] = {getattr(flows, name)[at]}: there are {limit} {what}")
    if flows.background_F.all():
        raise ConfigError("traffic: all of it is background; there is nothing to wait for")
    if ecn.kmin_bytes > ecn.kmax_bytes:
        raise ConfigError(f"switch.ecn.kmin_bytes = {ecn.kmin_bytes}: must not exceed kmax_bytes = {ecn.kmax_bytes}")
    if nic.control == "window" and nic.window_bytes < scenario.frame.payload_bytes:
        raise ConfigError(f"nic.window_bytes = {nic.window_bytes}: control window needs at least one packet")
    if 0 < nic.window_bytes < nic.ack_every * scenario.frame.payload_bytes:
        raise ConfigError(
            f"nic.window_bytes = {nic.window_bytes}: holds fewer packets than nic.ack_every = {nic.ack_every}, so that "
            "the sender would wait for an ACK that is not due"
        )
    if scenario.routing.mode in ("adaptive", "spray") and not nic.out_of_order:
        raise ConfigError(
            f"routing.mode = {scenario.routing.mode}: reorders packets; set nic.out_of_order (a go-back-N NIC would "
            "take every reordering for loss)"
        )
    if nic.recovery == "selective" and not nic.out_of_order:
        raise ConfigError("nic.recovery = selective: needs nic.out_of_order")
    if nic.dcqcn.variant == "ns3" and nic.dcqcn.cnp != "ack-bit":
        raise ConfigError("nic.dcqcn.variant = ns3: has its CNP in the ACK; set nic.dcqcn.cnp to ack-bit")
    if scenario.switch.pfc.watchdog_us > 0 and not scenario.switch.pfc.enabled:
        raise ConfigError("switch.pfc.watchdog_us: there is no PFC to watch; set switch.pfc.enabled")
    if run.sample_us and run.sample_us < 0.01:
        raise ConfigError(f"run.sample_us = {run.sample_us:g}: must be at least 0.01")
