"""Thresholds of one egress port: when ECN marks, when PFC pauses, and which of them comes first.

Pure arithmetic on numbers; the numbers of a real fabric are `plan`'s. Symbols: B' shared bytes once headroom and
reserves are taken off, alpha the dynamic threshold factor (SONiC `dynamic_th` d means 2^d), n ports, P lossless
priorities, C the port's rate, A the rate at which traffic arrives for it.

Two conditions, both needed:
- any spread: however traffic spreads, some queue marks before some ingress pauses (Zhu et al., SIGCOMM 2015, sec. 4).
- incast: with this many senders at once, what arrives in one control loop after marking starts, and until the rate
  cuts have worked, still fits under the first pause. A first burst meets no control at all; if it does not fit, it
  must be bounded at the source: `pace_gbps` per sender, or at most `rotation` senders to one receiver at a time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bywash.errors import ConfigError
from bywash.fabric.config.asic import KIB
from bywash.fabric.config.fixed_point import Dcqcn, marking_probability

KMIN_PER_GBPS_BYTES = 100_000 / 25
"""HPCC's scaling (Li et al., SIGCOMM 2019, sec. 5.1): Kmin 100 kB and Kmax 400 kB per 25 Gb/s."""
KMAX_OF_KMIN = 4
LEAST_KMIN_FRAMES = 2


def alpha_of(dynamic_th: int) -> float:
    """SONiC's `dynamic_th`, -8 to 7, as the factor it stands for."""
    return 2.0**dynamic_th


def static_pause_threshold(buffer_bytes: float, ports: int, priorities: int, headroom_bytes: float) -> float:
    """Largest static pause threshold that keeps the buffer lossless: (B - P n h) / (P n), Zhu et al. 2015 sec. 4."""
    return buffer_bytes / (priorities * ports) - headroom_bytes


def any_spread_ecn_bound(shared_bytes: float, ports: int, priorities: int, alpha: float) -> float:
    """Kmin must be below this for ECN to precede PFC under any traffic: alpha B' / (n (1 + alpha P)).

    The worst case: every one of P n queues holds Kmin, and one ingress port has sent all of its n queues. It pauses at
    alpha (B' - P n Kmin); that must exceed n Kmin. With alpha = beta / 8, P = 8 this is Zhu et al.'s formula.
    """
    return alpha * shared_bytes / (ports * (1 + alpha * priorities))


def settled_queue(shared_bytes: float, queues: int, alpha: float) -> float:
    """Where n equal queues settle under a dynamic threshold: alpha B' / (1 + n alpha) (Choudhury and Hahne 1998)."""
    return alpha * shared_bytes / (1 + queues * alpha)


def queue_at_first_pause(free_bytes: float, alpha: float, largest_share: float) -> float:
    """Egress queue at which the ingress that feeds it most pauses: share q = alpha (B'' - q)."""
    return alpha * free_bytes / (largest_share + alpha)


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressCase:
    """One egress port, its switch's memory, and the worst traffic that the topology lets reach it.

    `inputs_gbps` are the ports of this switch that routes let send to it; `senders` hosts aim at it at once.
    `loop_us` is wire and NIC time from a mark to the slower rate arriving, without the wait behind the queue.
    """

    gbps: float
    inputs_gbps: tuple[float, ...]
    senders: int
    sender_gbps: float
    shared_bytes: int
    ports: int
    priorities: int
    dynamic_th: int
    loop_us: float
    mtu_bytes: int
    mark_at_enqueue: bool = True
    message_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Marking:
    """ECN of one link speed on one switch, with the arithmetic. None means no bound is needed."""

    kmin_bytes: int
    kmax_bytes: int
    pmax_percent: int
    pace_gbps: float | None
    rotation: int | None
    first_pause_bytes: int
    peak_bytes: int
    lines: tuple[str, ...]


def choose_marking(case: EgressCase, control: Dcqcn) -> Marking:
    """Kmin, Kmax and Pmax for a port such that ECN precedes PFC, or the bound that senders must keep.

    Raises:
        ConfigError: the buffer is too small for any marking threshold of two frames.
    """
    alpha = alpha_of(case.dynamic_th)
    scaled = KMIN_PER_GBPS_BYTES * case.gbps
    spread = any_spread_ecn_bound(case.shared_bytes, case.ports, case.priorities, alpha)
    kmin = _down(min(scaled, spread - 1, _pausable_kmin(case, alpha)))  # strictly below the bound
    least = LEAST_KMIN_FRAMES * case.mtu_bytes
    if kmin < least:
        raise ConfigError(
            f"shared buffer of {case.shared_bytes:,} B: ECN must mark below {spread:,.0f} B for PFC to come later, "
            f"less than two frames ({least:,} B); raise dynamic_th, use fewer lossless priorities, or shorter cables"
        )
    free = case.shared_bytes - case.priorities * (case.ports - 1) * kmin
    pause = _first_pause(case, alpha, free, case.senders)
    room = _largest_kmax(case, case.sender_gbps, case.senders, pause)
    kmax = min(KMAX_OF_KMIN * kmin, _down(room)) if room >= 2 * kmin else 2 * kmin
    probability = marking_probability(case.senders, case.gbps, control)
    why = (
        f"Kmin = min(HPCC 4,000 B x {case.gbps:g} Gb/s = {scaled:,.0f}, {_spread_words(case)}, "
        f"half the first pause = {_pausable_kmin(case, alpha):,.0f}) -> {kmin:,} B",
        f"Pmax: fixed point of {case.senders} flows marks {100 * probability:.2f} % -> {_percent(probability)} %",
    )
    return _marking(case, kmin, kmax, _percent(probability), why)


def given_marking(case: EgressCase, kmin_bytes: int, kmax_bytes: int, pmax_percent: int) -> Marking:
    """Thresholds that somebody else chose, such as the tuner, with the bounds on senders that they need.

    Raises:
        ConfigError: PFC could pause before ECN marks.
    """
    alpha = alpha_of(case.dynamic_th)
    spread = any_spread_ecn_bound(case.shared_bytes, case.ports, case.priorities, alpha)
    if kmin_bytes >= spread:
        raise ConfigError(
            f"marking.kmin_bytes: {kmin_bytes:,} B at {case.gbps:g} Gb/s; for ECN to mark before PFC pauses it must be "
            f"below {spread:,.0f} B; lower it, or raise dynamic_th"
        )
    free = case.shared_bytes - case.priorities * (case.ports - 1) * kmin_bytes
    pause = _first_pause(case, alpha, free, case.senders)
    if kmax_bytes >= pause:
        raise ConfigError(
            f"marking.kmax_bytes: {kmax_bytes:,} B at {case.gbps:g} Gb/s; {case.senders} senders to one pause at "
            f"{pause:,.0f} B, before every packet is marked; lower it, or raise dynamic_th"
        )
    why = (
        f"Kmin = {kmin_bytes:,} B as given, below {_spread_words(case)}",
        f"Pmax: {pmax_percent} % as given",
    )
    return _marking(case, kmin_bytes, kmax_bytes, pmax_percent, why)


def _marking(case: EgressCase, kmin: int, kmax: int, pmax_percent: int, why: tuple[str, str]) -> Marking:
    """The marking, and the bounds on senders that it needs. `why` are the lines of Kmin and of Pmax."""
    alpha = alpha_of(case.dynamic_th)
    free = case.shared_bytes - case.priorities * (case.ports - 1) * kmin
    pause = _first_pause(case, alpha, free, case.senders)
    fits = peak_bytes(case, kmax, case.sender_gbps, case.senders) <= pause
    pace = None if fits else _largest_pace(case, kmax, pause)
    rotation = None if fits else _largest_rotation(case, kmax, alpha, free)
    kmin_line, pmax_line = why
    return Marking(
        kmin_bytes=kmin,
        kmax_bytes=kmax,
        pmax_percent=pmax_percent,
        pace_gbps=pace,
        rotation=rotation,
        first_pause_bytes=int(pause),
        peak_bytes=math.ceil(peak_bytes(case, kmax, pace if pace is not None else case.sender_gbps, case.senders)),
        lines=(kmin_line, *_incast_lines(case, kmax, free, pause, pace, rotation), pmax_line),
    )


def arrival_gbps(case: EgressCase, sender_gbps: float, senders: int) -> float:
    """How fast traffic for the port reaches this switch: senders' rates, but never more than its inputs carry."""
    return min(senders * sender_gbps, sum(case.inputs_gbps))


def peak_bytes(case: EgressCase, kmax_bytes: float, sender_gbps: float, senders: int) -> float:
    """Highest queue of an incast: certain marking at Kmax, one control loop at full rate, then a cut per interval.

    Every mark halves a rate at most (alpha = 1 at first), so log2(A / C) rounds pass before the queue stops growing.
    A mark set at enqueue waits behind the queue. No queue exceeds the messages themselves.
    """
    arrives = arrival_gbps(case, sender_gbps, senders)
    excess = max(0.0, arrives - case.gbps)
    waits_us = kmax_bytes * 8 / (case.gbps * 1e3) if case.mark_at_enqueue else 0.0
    grown = excess * 1e3 / 8 * (case.loop_us + waits_us)
    rate = arrives / 2
    while rate > case.gbps:
        grown += (rate - case.gbps) * 1e3 / 8 * case.loop_us
        rate /= 2
    peak = kmax_bytes + grown
    if case.message_bytes is None or arrives <= 0:
        return peak
    return min(peak, senders * case.message_bytes * excess / arrives)


def _pausable_kmin(case: EgressCase, alpha: float) -> float:
    """Kmin at which Kmax = 2 Kmin is just the first pause, with every other queue at Kmin: (share + alpha) 2 K =
    alpha (B' - P (n - 1) K). Above it no rate of the senders, however slow, would keep ECN first."""
    share = _largest_share(case, case.senders)
    return alpha * case.shared_bytes / (2 * (share + alpha) + alpha * case.priorities * (case.ports - 1))


def _largest_share(case: EgressCase, senders: int) -> float:
    """Share of an incast that the input with most of it carries: senders use the fewest, fastest inputs they can."""
    needed = min(senders * case.sender_gbps, sum(case.inputs_gbps))
    return min(1.0, max(case.inputs_gbps) / needed) if needed else 1.0


def _first_pause(case: EgressCase, alpha: float, free_bytes: float, senders: int) -> float:
    """Queue at which an incast of `senders` first pauses an input."""
    return queue_at_first_pause(free_bytes, alpha, _largest_share(case, senders))


def _largest_kmax(case: EgressCase, sender_gbps: float, senders: int, pause: float) -> float:
    return _largest(lambda kmax: peak_bytes(case, kmax, sender_gbps, senders) <= pause, pause)


def _largest_pace(case: EgressCase, kmax: int, pause: float) -> float:
    """Rate per sender, in Gb/s with one decimal, at which the design incast fits."""
    fitting = _largest(lambda rate: peak_bytes(case, kmax, rate, case.senders) <= pause, case.sender_gbps)
    return math.floor(fitting * 10) / 10


def _largest_rotation(case: EgressCase, kmax: int, alpha: float, free_bytes: float) -> int:
    """Most senders at full rate that fit; at least one, which can never fill the port."""
    for senders in range(case.senders, 1, -1):
        if peak_bytes(case, kmax, case.sender_gbps, senders) <= _first_pause(case, alpha, free_bytes, senders):
            return senders
    return 1


def _largest(holds: Callable[[float], bool], high: float) -> float:
    """The largest value up to `high` for which a condition, true at 0 and once false false ever after, holds."""
    if holds(high):
        return high
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _down(value: float) -> int:
    return int(value // KIB) * KIB


def _percent(probability: float) -> int:
    return min(100, max(1, math.ceil(100 * probability)))


def _spread_words(case: EgressCase) -> str:
    alpha = alpha_of(case.dynamic_th)
    spread = any_spread_ecn_bound(case.shared_bytes, case.ports, case.priorities, alpha)
    return (
        f"any spread alpha B' / (n (1 + alpha P)) = {alpha:g} x {case.shared_bytes:,} / ({case.ports} x "
        f"(1 + {alpha:g} x {case.priorities})) = {spread:,.0f}"
    )


def _incast_lines(
    case: EgressCase, kmax: int, free: float, pause: float, pace: float | None, rotation: int | None
) -> tuple[str, str]:
    arrives = arrival_gbps(case, case.sender_gbps, case.senders)
    peak = peak_bytes(case, kmax, case.sender_gbps, case.senders)
    bound = (
        f"peak {peak:,.0f} B <= {pause:,.0f} B: no bound on senders is needed"
        if pace is None
        else f"peak {peak:,.0f} B > {pause:,.0f} B: pace each sender to {pace:g} Gb/s, "
        f"or let at most {rotation} send to one receiver at a time"
    )
    return (
        f"first pause of {case.senders} to 1: alpha B'' / (share + alpha), B'' = {free:,.0f} B with every other queue "
        f"at Kmin -> {pause:,.0f} B",
        f"incast: {arrives:g} Gb/s arrive at {case.gbps:g} Gb/s; loop {case.loop_us:.1f} us"
        + (" + wait behind Kmax" if case.mark_at_enqueue else "")
        + f"; Kmax {kmax:,} B -> {bound}",
    )
