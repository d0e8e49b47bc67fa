"""DCQCN's fixed point: how often a switch must mark so that N flows share a link. Nothing of switches or buffers.

Model and symbols: Zhu et al., "ECN or Delay: Lessons Learnt from Analysis of DCQCN and TIMELY", CoNEXT 2016. Rates
there are in packets; here bytes over a packet size. Called by `thresholds` to choose a marking slope.
"""

import math
from dataclasses import dataclass

from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dcqcn:
    """Parameters of the reaction point, in the units that NICs take."""

    packet_bytes: int = 1000
    alpha_timer_us: float = 55.0
    cut_interval_us: float = 50.0
    increase_timer_us: float = 55.0
    byte_counter_bytes: int = 10_000_000
    fast_recovery_steps: int = 5
    increase_mbps: float = 40.0


PAPER = Dcqcn()
"""The parameters of Zhu et al., SIGCOMM 2015, for 40 Gb/s."""


def marking_probability(flows: int, gbps: float, control: Dcqcn = PAPER) -> float:
    """The marking probability at which `flows` equal flows fill a link of `gbps` exactly, in (0, 1).

    At the fixed point the target rate neither rises nor falls, and neither does the current rate:
    (R_T - R_C) a / tau = R_AI R_C (c + e) and R_C alpha a / tau = (R_T - R_C) R_C (b + d), with a = 1 - (1-p)^(tau R_C)
    and so on; the two gaps R_T - R_C are equal at one p only, found by bisection.

    Raises:
        ConfigError: flows or rate below what the model knows.
    """
    if flows < 1 or not gbps > 0:
        raise ConfigError(f"{flows} flows at {gbps} Gb/s: the fixed point needs one flow and some rate at least")
    rate = gbps * 1e9 / 8 / control.packet_bytes / flows  # packets per second of one flow
    low, high = 1e-9, 0.999
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _gap_of_target(middle, rate, control) > 0 else (low, middle)
    return low


def _gap_of_target(p: float, rate: float, control: Dcqcn) -> float:
    """Gap R_T - R_C that holds the target still, less the gap that holds the current rate still. Falls with p."""
    log_unmarked = math.log1p(-p)

    def reached(events: float) -> float:
        """Probability that at least one of so many packets is marked."""
        return -math.expm1(events * log_unmarked)

    cut_s, timer_s = control.cut_interval_us * 1e-6, control.increase_timer_us * 1e-6
    counter = control.byte_counter_bytes / control.packet_bytes
    cuts = reached(cut_s * rate)
    alpha = reached(control.alpha_timer_us * 1e-6 * rate)
    by_bytes = p / math.expm1(-counter * log_unmarked) if counter * -log_unmarked < 700 else 0.0
    by_timer = p / math.expm1(-timer_s * rate * log_unmarked) if timer_s * rate * -log_unmarked < 700 else 0.0
    active_bytes = math.exp(control.fast_recovery_steps * counter * log_unmarked) * by_bytes
    active_timer = math.exp(control.fast_recovery_steps * timer_s * rate * log_unmarked) * by_timer
    increase = control.increase_mbps * 1e6 / 8 / control.packet_bytes
    target_gap = increase * rate * (active_bytes + active_timer) * cut_s / cuts
    current_gap = alpha * cuts / cut_s / max(by_bytes + by_timer, 1e-300)
    return target_gap - current_gap
