"""What senders may keep to, as caps and chains of flows: messages under way, pace of a queue pair, pace by the counts.

Shapes: F flows, H hosts. A MoE exchange learns the count matrix before its rows move, so that every sender can know
what each receiver is due from everybody. `by_counts` uses it: a message gets its share of the receiver's link,

    rate(s -> r) = factor x line(r) x bytes(s, r) / sum over s' of bytes(s', r),

so that all senders together offer a receiver `factor` times its line, whatever the skew, and what it is due ends
together. A sender's own link needs no cap: its NIC shares it among its messages anyway. No schedule ends sooner than
the largest row or column sum over its line (Gonzalez and Sahni 1976, preemptive open shop; Birkhoff's decomposition
attains it), and in a fluid a receiver that is offered exactly its line needs no longer.

Knows nothing of who enforces it: no switch or NIC setting does, the exchange has to. Called by `tune` and by scenario
files (`file_traffic`).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bywash.errors import ConfigError
from bywash.fabric.traffic import LEAST_GBPS, NO_FLOW, Flows


def with_sending(
    flows: Flows, gbps_H: ArrayLike, *, active: int = 0, pace_gbps: float = 0.0, pace_by_counts: float = 0.0
) -> Flows:
    """The flows with what senders keep to; 0 for what they do not. Caps are combined: the slower one holds.

    Args:
        gbps_H: what each host can receive, Gb/s [H].
        active: the most messages of a source under way; see `in_turn`.
        pace_gbps: cap on every message.
        pace_by_counts: the factor of `by_counts`.

    Raises:
        ConfigError: a schedule, or a pace that follows from one, is asked of flows that have a schedule.
    """
    if pace_by_counts:
        flows = by_counts(flows, gbps_H, pace_by_counts)
    if pace_gbps:
        flows = _capped(flows, np.full(flows.count, pace_gbps))
    return in_turn(flows, active) if active else flows


def by_counts(flows: Flows, gbps_H: ArrayLike, factor: float) -> Flows:
    """Every message capped at `factor` times its share of its receiver's link, phase by phase; background as it is.

    No cap is below `LEAST_GBPS`.

    Example: host 0 (400 Gb/s) is due 3 MB from host 1 and 1 MB from host 2. With factor 1 they are sent at 300 and
    100 Gb/s, and both end after 80 us.

    Raises:
        ConfigError: messages of a phase do not start together, so that a share of the whole phase would be too slow.
    """
    if has_schedule(flows):
        raise ConfigError("traffic.pace_by_counts: the traffic has a schedule of its own (after, start times)")
    due_bytes_PH = np.zeros((flows.phases, np.asarray(gbps_H).size))
    front = np.flatnonzero(~flows.background_F)
    place = flows.phase_F[front], flows.dst_F[front]
    np.add.at(due_bytes_PH, place, flows.bytes_F[front])
    cap_F = np.zeros(flows.count)
    line_gbps_F = np.asarray(gbps_H, np.float64)[flows.dst_F[front]]
    cap_F[front] = np.maximum(LEAST_GBPS, factor * line_gbps_F * flows.bytes_F[front] / due_bytes_PH[place])
    return _capped(flows, cap_F)


def in_turn(flows: Flows, active: int) -> Flows:
    """The flows with at most `active` of a source's under way in each phase.

    The n-th flow of a source in a phase waits for its (n - active)-th, in the order in which the flows stand.

    Raises:
        ConfigError: the flows have a schedule.
    """
    if has_schedule(flows):
        raise ConfigError("traffic.active: the traffic has a schedule of its own (after, start times)")
    after_F = np.full(flows.count, NO_FLOW)
    front = np.flatnonzero(~flows.background_F)
    order = front[np.lexsort((front, flows.phase_F[front], flows.src_F[front]))]
    key = flows.src_F[order] * flows.phases + flows.phase_F[order]
    same = key[active:] == key[:-active]
    after_F[order[active:][same]] = order[:-active][same]
    return replace(flows, after_F=after_F)


def has_schedule(flows: Flows) -> bool:
    """Whether messages already wait for each other or for a time."""
    front_F = ~flows.background_F
    return bool((flows.after_F[front_F] >= 0).any() or flows.start_ps_F[front_F].any())


def _capped(flows: Flows, cap_gbps_F: NDArray[np.float64]) -> Flows:
    """Each flow at the slower of its own cap and this one; 0 is none."""
    own_F = flows.rate_gbps_F
    slower_F = np.where((own_F > 0) & (cap_gbps_F > 0), np.minimum(own_F, cap_gbps_F), np.maximum(own_F, cap_gbps_F))
    return replace(flows, rate_gbps_F=slower_F)
