"""`Flows`: who sends how many bytes to whom, when, and after what; and the usual patterns.

Shapes: F flows, H hosts (NIC ports). A flow is one RDMA message: a run of bytes on a queue pair (QP). QPs are keyed
(source, destination, class, qp, background) and live for the whole run, so that their rate state persists from flow to
flow; flows of one QP are sent in order of (phase, start, index), each after the one before it.

Phases put layers in sequence: a flow of phase p starts `start_ps` after its source entered that phase, which happens
`gap_ps_P[p]` (compute time) after the source has finished its part of phase p - 1: all it sent is acknowledged and all
it was due has arrived. `barrier` says whether a host, its whole server, or everybody must have finished.
`after_F` chains flows within a phase: the flow starts when that other one (of the same source) is acknowledged.

Knows nothing of topologies beyond host numbers. `study` and callers build traffic, `Scenario` checks it against the
topology, the engine runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bywash.errors import ConfigError

Barrier = Literal["host", "server", "global"]
Schedule = Literal["at-once", "rotated", "staggered"]
IntArray = NDArray[np.int64]

PS_PER_US = 1_000_000
NO_FLOW = -1
MAX_FLOW_BYTES = 1 << 40
LEAST_GBPS = 1e-3
"""Of a pace: packets that are seconds apart lie beyond the time that the engine can tell."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """Messages, one entry a flow. The constructor fills defaults and raises `ConfigError` naming the entry at fault.

    Attributes:
        src_F, dst_F: int64 [F], host numbers; never equal.
        bytes_F: int64 [F], payload bytes, at least 1.
        start_ps_F: int64 [F], picoseconds after the phase begins at the source (phase 0 begins at 0).
        class_F: int64 [F], index into `Scenario.classes`.
        qp_F: int64 [F], which queue pair of the (source, destination, class) triple: also its ECMP entropy.
        phase_F: int64 [F], phase number.
        after_F: int64 [F], index of the flow that must be acknowledged first, or -1; same source, earlier index.
        rate_gbps_F: float64 [F], pacing cap in Gb/s; 0 for none. A QP takes that of the flow it sends.
        background_F: bool [F], load that is neither waited for nor counted in completion statistics.
        gap_ps_P: int64 [P], compute time before each phase; as many as there are phases.
        barrier: what must be done with phase p - 1 before phase p may begin.
    """

    src_F: IntArray
    dst_F: IntArray
    bytes_F: IntArray
    start_ps_F: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    class_F: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    qp_F: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    phase_F: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    after_F: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    rate_gbps_F: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    background_F: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    gap_ps_P: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    barrier: Barrier = "host"

    def __post_init__(self) -> None:
        count = np.asarray(self.src_F).size
        for name, default, dtype in _FIELDS:
            given = np.asarray(getattr(self, name))
            value = np.full(count, default, dtype) if given.size == 0 and count else given.astype(dtype).ravel()
            if value.size != count:
                raise ConfigError(f"traffic.{name}: {value.size} entries for {count} flows")
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        phases = int(self.phase_F.max()) + 1 if count else 1
        gaps = np.zeros(phases, np.int64)
        given = np.asarray(self.gap_ps_P, np.int64).ravel()[:phases]
        gaps[: given.size] = given
        object.__setattr__(self, "gap_ps_P", gaps)
        _check(self)

    @property
    def count(self) -> int:
        """F, the number of flows."""
        return int(self.src_F.size)

    @property
    def phases(self) -> int:
        """P, the number of phases."""
        return int(self.gap_ps_P.size)

    def bytes_HH(self, hosts: int) -> IntArray:
        """Bytes from each host to each host: int64 [H, H]."""
        total = np.zeros((hosts, hosts), np.int64)
        np.add.at(total, (self.src_F, self.dst_F), self.bytes_F)
        return total


_FIELDS: tuple[tuple[str, Any, Any], ...] = (
    ("src_F", 0, np.int64),
    ("dst_F", 0, np.int64),
    ("bytes_F", 0, np.int64),
    ("start_ps_F", 0, np.int64),
    ("class_F", 0, np.int64),
    ("qp_F", 0, np.int64),
    ("phase_F", 0, np.int64),
    ("after_F", NO_FLOW, np.int64),
    ("rate_gbps_F", 0.0, np.float64),
    ("background_F", False, np.bool_),
)


def _check(flows: Flows) -> None:
    index_F = np.arange(flows.count)
    laws = (
        ("src_F", flows.src_F < 0, "must be a host number"),
        ("dst_F", flows.dst_F < 0, "must be a host number"),
        ("dst_F", flows.dst_F == flows.src_F, "is the source itself; such bytes never leave the host"),
        ("bytes_F", (flows.bytes_F < 1) | (flows.bytes_F > MAX_FLOW_BYTES), f"must be from 1 to {MAX_FLOW_BYTES}"),
        ("start_ps_F", flows.start_ps_F < 0, "must be 0 or more"),
        ("class_F", flows.class_F < 0, "must be a class number"),
        ("qp_F", (flows.qp_F < 0) | (flows.qp_F >= 1 << 16), "must be from 0 to 65535"),
        ("phase_F", flows.phase_F < 0, "must be 0 or more"),
        ("after_F", (flows.after_F < NO_FLOW) | (flows.after_F >= index_F), "must be an earlier flow, or -1"),
        ("rate_gbps_F", ~_can_pace(flows.rate_gbps_F), f"must be 0 for none, or from {LEAST_GBPS:g}"),
    )
    for name, wrong, law in laws:
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ConfigError(f"traffic.{name}[{at}] = {getattr(flows, name)[at]}: {law}")
    chained = np.flatnonzero(flows.after_F >= 0)
    before = flows.after_F[chained]
    for name in ("src_F", "phase_F"):
        values = getattr(flows, name)
        wrong = values[chained] != values[before]
        if wrong.any():
            at = int(chained[np.argmax(wrong)])
            raise ConfigError(f"traffic.after_F[{at}] = {flows.after_F[at]}: that flow has another {name}")
    if (flows.gap_ps_P < 0).any():
        raise ConfigError("traffic.gap_ps_P: must be 0 or more")
    if flows.barrier not in ("host", "server", "global"):
        raise ConfigError(f"traffic.barrier = {flows.barrier!r}: must be host, server or global")


def _can_pace(gbps_F: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.asarray((gbps_F == 0) | ((gbps_F >= LEAST_GBPS) & np.isfinite(gbps_F)))


def join(parts: Sequence[Flows], barrier: Barrier | None = None) -> Flows:
    """All flows of several patterns together; gaps are the largest of each phase."""
    if not parts:
        raise ConfigError("traffic: nothing to send")
    offsets = np.cumsum([0] + [part.count for part in parts[:-1]])
    columns: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name, _, _ in _FIELDS}
    columns["after_F"] = np.concatenate(
        [np.where(p.after_F >= 0, p.after_F + o, NO_FLOW) for p, o in zip(parts, offsets)]
    )
    gaps = np.zeros(max(part.phases for part in parts), np.int64)
    for part in parts:
        gaps[: part.phases] = np.maximum(gaps[: part.phases], part.gap_ps_P)
    return Flows(**columns, gap_ps_P=gaps, barrier=barrier or parts[0].barrier)


def from_matrix(
    bytes_HH: ArrayLike,
    *,
    schedule: Schedule = "at-once",
    active: int = 1,
    step_us: float = 0.0,
    qps_per_pair: int = 1,
    rate_gbps: float = 0.0,
    traffic_class: int = 0,
    phase: int = 0,
    gap_us: float = 0.0,
    barrier: Barrier = "host",
) -> Flows:
    """One exchange: a flow for each non-zero entry off the diagonal, split evenly over `qps_per_pair` QPs.

    Each source sends in rotated order: to source + 1, source + 2, ... modulo H. The schedules:
    `at-once` starts everything together (the NIC shares its link between QPs); `rotated` keeps `active` flows of a
    source under way, each next one starting when an earlier one is acknowledged; `staggered` starts the n-th flow of
    each source at n * `step_us`. `rate_gbps` paces every QP.
    """
    matrix = np.asarray(bytes_HH, np.int64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ConfigError(f"traffic.matrix: shape {list(matrix.shape)}; must be hosts x hosts")
    if qps_per_pair < 1 or active < 1:
        raise ConfigError(f"traffic: qps_per_pair = {qps_per_pair}, active = {active}: must be at least 1")
    if schedule not in ("at-once", "rotated", "staggered"):
        raise ConfigError(f"traffic.schedule = {schedule!r}: must be at-once, rotated or staggered")
    hosts = matrix.shape[0]
    rows: list[tuple[int, int, int, int, int, int]] = []  # src, dst, bytes, qp, place in the source's order, after
    for src in range(hosts):
        chain: list[list[int]] = []
        place = 0
        for turn in range(1, hosts):
            dst = (src + turn) % hosts
            amount = int(matrix[src, dst])
            if amount < 0:
                raise ConfigError(f"traffic.matrix[{src}][{dst}] = {amount}: must be 0 or more")
            if amount == 0:
                continue
            group = []
            for qp in range(min(qps_per_pair, amount)):
                share = amount // qps_per_pair + (qp < amount % qps_per_pair)
                waits = schedule == "rotated" and place >= active
                earlier = chain[place - active] if waits else []
                after = earlier[qp % len(earlier)] if earlier else NO_FLOW
                group.append(len(rows))
                rows.append((src, dst, share, qp, place, after))
            chain.append(group)
            place += 1
    table = np.array(rows, np.int64).reshape(-1, 6)
    start = table[:, 4] * round(step_us * PS_PER_US) if schedule == "staggered" else np.zeros(len(rows), np.int64)
    gaps = np.zeros(phase + 1, np.int64)
    gaps[phase] = round(gap_us * PS_PER_US)
    return Flows(
        src_F=table[:, 0],
        dst_F=table[:, 1],
        bytes_F=table[:, 2],
        qp_F=table[:, 3],
        after_F=table[:, 5],
        start_ps_F=start,
        class_F=np.full(len(rows), traffic_class),
        phase_F=np.full(len(rows), phase),
        rate_gbps_F=np.full(len(rows), rate_gbps),
        gap_ps_P=gaps,
        barrier=barrier,
    )


def alltoall(hosts: int, bytes_per_pair: int, **options: Any) -> Flows:
    """Every ordered pair of hosts exchanges the same amount; options as for `from_matrix`."""
    matrix = np.full((hosts, hosts), bytes_per_pair, np.int64)
    return from_matrix(matrix, **options)


def incast(
    senders: Sequence[int], receiver: int, bytes_per_flow: int, *, start_us: float = 0.0, traffic_class: int = 0
) -> Flows:
    """Each sender sends one flow to the receiver."""
    count = len(senders)
    return Flows(
        src_F=np.asarray(senders, np.int64),
        dst_F=np.full(count, receiver),
        bytes_F=np.full(count, bytes_per_flow),
        start_ps_F=np.full(count, round(start_us * PS_PER_US)),
        class_F=np.full(count, traffic_class),
    )


def permutation(
    hosts: int,
    bytes_per_flow: int,
    *,
    seed: int = 0,
    start_us: float = 0.0,
    qps_per_pair: int = 1,
    traffic_class: int = 0,
) -> Flows:
    """Each host sends to one other and receives from one other: a random permutation without fixed points."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(hosts)
    dst = np.empty(hosts, np.int64)
    dst[order] = np.roll(order, 1)  # one cycle: nobody sends to itself
    src = np.repeat(np.arange(hosts), qps_per_pair)
    return Flows(
        src_F=src,
        dst_F=dst[src],
        bytes_F=np.full(src.size, max(1, bytes_per_flow // qps_per_pair)),
        qp_F=np.tile(np.arange(qps_per_pair), hosts),
        start_ps_F=np.full(src.size, round(start_us * PS_PER_US)),
        class_F=np.full(src.size, traffic_class),
    )


def poisson(
    hosts: int,
    *,
    load: float,
    gbps: float,
    bytes_per_flow: int,
    end_us: float,
    seed: int = 0,
    traffic_class: int = 0,
    qps_per_pair: int = 1,
    background: bool = True,
) -> Flows:
    """Background load: flows of one size between random pairs, Poisson arrivals, `load` of each host's `gbps`."""
    if not 0 < load < 1:
        raise ConfigError(f"traffic.load = {load:g}: must be between 0 and 1")
    if bytes_per_flow < 1:
        raise ConfigError(f"traffic.bytes = {bytes_per_flow}: must be at least 1")
    per_us = load * gbps * 1e3 / 8 / bytes_per_flow * hosts
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(per_us * end_us))
    src = rng.integers(0, hosts, count)
    return Flows(
        src_F=src,
        dst_F=(src + rng.integers(1, hosts, count)) % hosts,
        bytes_F=np.full(count, bytes_per_flow),
        start_ps_F=np.sort(rng.uniform(0, end_us * PS_PER_US, count)).astype(np.int64),
        class_F=np.full(count, traffic_class),
        qp_F=rng.integers(0, qps_per_pair, count),
        background_F=np.full(count, background),
    )
