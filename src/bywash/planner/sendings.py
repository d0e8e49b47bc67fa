"""Ways of sending between hosts: which the search tries for a group, which of them its runtime can keep to, and what
the runtime calls them.

GPUs of several hosts send through NCCL (`exchange.node_device`), in an order but at no rate; CPU ranks through gloo
(`exchange.hierarchical`), one TCP connection between two ranks. What the runtime cannot keep to is simulated and shown
with its price, never chosen.

**The rate of `by-counts`** is that of one host's link in payload. The exchange gives each message its share of what the
receiver's *host* is due from all ranks, so that ranks that share a NIC must not divide it again; a host of several NICs
counts with its first, since gloo has one interface per process, by default the same for all. So it is that NIC's rate
times what TCP leaves of it. The factor is how many times its line a host is offered, headers included, as simulated.

Knows groups and the exchange's options; nothing of times. `refine` tries and chooses, `output` writes the names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bywash.exchange.node_schedule import NodeSchedule
from bywash.planner.candidate import Outcome
from bywash.planner.group import Group
from bywash.planner.network import Sending, Simulated
from bywash.planner.node_schedules import NODE_SCHEDULES

FACTOR = 1.05
"""Of its line that a receiver is offered: what tuning chose (docs/fabric-tune.md)."""
WORTH = 1.01
"""`by-counts` needs a rate that somebody keeps right: it must give so many times the tokens of what needs none."""
TCP_PAYLOAD = 1448 / (1538 + 84 / 2)
"""Of an Ethernet link with an MTU of 1,500: payload of a full frame over its time on the wire, and over that of an
acknowledgement for every second frame of the other direction."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TriedSending:
    """One way of sending, simulated for a group alone.

    Attributes:
        sending: the way.
        outcome: the group's price with it.
        runs: the exchange of `decode` and of `prefill`.
        refused: why the group's runtime cannot keep to it; "" where it can.
    """

    sending: Sending
    outcome: Outcome
    runs: dict[str, Simulated]
    refused: str


def sendings_of(group: Group, best: Sending | None = None) -> tuple[Sending, ...]:
    """What a group is simulated with, the plainest first: at once; when the best of that is known, the other ways.

    A group's rails have few messages, and ECMP puts a queue pair on one path: split over several, they spread. TCP has
    one connection.
    """
    if best is None:
        return tuple(Sending(schedule="at-once", qps=qps) for qps in ((1,) if _on_cpu(group) else (1, 8)))
    by_counts = Sending(schedule="by-counts", qps=best.qps, factor=FACTOR)
    if _on_cpu(group):
        return (Sending(schedule="rotated"), by_counts)
    return (Sending(schedule="at-once", qps=4), Sending(schedule="rotated", qps=8), by_counts)


def refusal(sending: Sending, group: Group) -> str:
    """Why the group's runtime cannot send so; "" where it can."""
    if sending.schedule != "by-counts":
        return ""
    if not _on_cpu(group):
        return "NCCL sends between GPUs, and takes no rate"
    rates = _link_rates(group)
    if min(rates) < max(rates):
        return f"its hosts' links have {min(rates):g} to {max(rates):g} Gb/s, and the exchange keeps to one rate"
    return ""


def node_schedule(sending: Sending, group: Group) -> str:
    """What `bywash run --node-schedule` is given. Example: CPU hosts with NICs of 25 Gb/s, by-counts:22.9,1.05."""
    name = next(name for name, schedule in NODE_SCHEDULES.items() if schedule == sending.schedule)
    if name != "by-counts":
        return name
    rate_gbps = float(f"{min(_link_rates(group)) * TCP_PAYLOAD:.3g}")
    return str(NodeSchedule(name="by-counts", rate_gbps=rate_gbps, factor=sending.factor))


def best_first(tried: Sequence[TriedSending]) -> tuple[TriedSending, ...]:
    """The one to take in front: most tokens per second of those that can be kept to, an earlier one among equals."""
    best = next(one for one in tried if not one.refused)
    for one in tried:
        if not one.refused and _better(one, best):
            best = one
    return (best, *(one for one in tried if one is not best))


def _better(one: TriedSending, best: TriedSending) -> bool:
    if one.outcome.feasible != best.outcome.feasible:
        return one.outcome.feasible
    worth = WORTH if one.sending.schedule == "by-counts" else 1.0
    return one.outcome.tokens_per_s > worth * best.outcome.tokens_per_s


def _on_cpu(group: Group) -> bool:
    return group.device_R[0].is_cpu


def _link_rates(group: Group) -> list[float]:
    """Of each host: the NIC that its CPU ranks send through (`Group.port_R`)."""
    return [host.nic_gbps[0] for host in group.members]
