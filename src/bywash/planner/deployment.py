"""`Deployment`: groups of hosts that serve side by side; all of them ranked, from what each group can do alone.

Knows groups' outcomes and hosts; nothing of how they were found. `search` calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bywash.planner.candidate import Binding, Outcome, Problem
from bywash.planner.cluster import Cluster
from bywash.planner.group import make_group


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Groups of hosts that serve side by side.

    Attributes:
        label: how the cluster was cut, in words.
        outcomes: of the groups that serve, each feasible on its own.
        idle: hosts without work, and why: (host numbers, reason).
        binding: bounds that the whole breaks.
        missed: outcomes of groups that went idle when their exchange was simulated.
    """

    label: str
    outcomes: tuple[Outcome, ...]
    idle: tuple[tuple[tuple[int, ...], str], ...] = ()
    binding: tuple[Binding, ...] = ()
    missed: tuple[Outcome, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        """Of all groups."""
        return sum(one.tokens_per_s for one in self.outcomes)

    @property
    def devices(self) -> int:
        """That serve."""
        return sum(one.candidate.group.ranks for one in self.outcomes)

    @property
    def tpot_ms(self) -> float:
        """Of the slowest group."""
        return max((one.tpot_ms for one in self.outcomes), default=float("inf"))

    @property
    def ttft_ms(self) -> float:
        """Of the slowest group."""
        return max((one.ttft_ms for one in self.outcomes), default=float("inf"))

    @property
    def feasible(self) -> bool:
        """Whether it serves at all, and keeps every bound."""
        return bool(self.outcomes) and not self.binding


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSearch:
    """One group, searched.

    Attributes:
        best: the feasible outcome with most tokens per second; None where there is none.
        nearest: the outcome that comes closest to being feasible, where `best` is None.
        pareto: outcomes that none beats in both tokens per second and time between tokens, by the latter.
        priced: how many candidates were priced.
    """

    best: Outcome | None
    nearest: Outcome | None
    pareto: tuple[Outcome, ...]
    priced: int


Cut = tuple[str, list[tuple[int, ...]]]
"""A way to cut hosts into groups: its label, and the host numbers of each group."""


def kind_of(cluster: Cluster, hosts: Sequence[int]) -> tuple[Any, ...]:
    """What a group's price depends on: its devices, NICs, how they share switches, and those switches' uplinks."""
    members = [cluster.hosts[number] for number in hosts]
    names = list(dict.fromkeys(switch for host in members for switch in host.switches))
    parts = tuple(
        (host.device, host.gpus, host.nic_gbps, tuple(names.index(switch) for switch in host.switches))
        for host in members
    )
    return parts, tuple(_uplinks(cluster, name) for name in names) if len(members) > 1 else ()


def _uplinks(cluster: Cluster, switch: str) -> tuple[float, ...]:
    topology = cluster.topology
    if topology is None:
        return ()
    here = topology.index(switch)
    return tuple(
        link.gbps
        for link in topology.links
        if here in (link.a, link.b) and min(link.a, link.b) >= topology.hosts and not link.failed
    )


def rank_deployments(
    cluster: Cluster,
    problem: Problem,
    cuts: Sequence[tuple[str, list[tuple[int, ...]]]],
    found: dict[tuple[Any, ...], GroupSearch],
) -> list[Deployment]:
    """Deployments by tokens per second: every cut of all hosts, and the best two cuts of each generation combined. A
    cluster of one generation keeps every cut: these are priced with bounds, and the third may be the best in truth."""
    made: dict[str, list[Deployment]] = {}
    for label, groups in cuts:
        outcomes, idle = [], []
        for hosts in groups:
            one = found[kind_of(cluster, hosts)]
            if one.best is not None:
                outcomes.append(moved(one.best, cluster, hosts))
            else:
                idle.append((hosts, _why_idle(one)))
        made.setdefault(label.split(":")[0], []).append(
            Deployment(label=label, outcomes=tuple(outcomes), idle=tuple(idle))
        )
    everything = made.pop("all", [])
    combined = [Deployment(label="", outcomes=())]
    for alternatives in made.values():
        best = sorted(alternatives, key=lambda one: -one.tokens_per_s)[: 2 if len(made) > 1 else None]
        combined = [_joined(a, b) for a in combined for b in best]
    distinct = {tuple(one.candidate.group.hosts for one in made.outcomes): made for made in everything + combined}
    checked = [within_target(one, problem) for one in distinct.values()]
    return sorted(checked, key=lambda one: (not one.feasible, -one.tokens_per_s))


def _joined(a: Deployment, b: Deployment) -> Deployment:
    label = f"{a.label}; {b.label}" if a.label else b.label
    return Deployment(label=label, outcomes=a.outcomes + b.outcomes, idle=a.idle + b.idle)


def _why_idle(one: GroupSearch) -> str:
    return str(one.nearest.binding[0]) if one.nearest is not None else "more devices than experts"


def moved(outcome: Outcome, cluster: Cluster, hosts: Sequence[int]) -> Outcome:
    """The same choices for other hosts of the same kind."""
    group = make_group(cluster, hosts, outcome.candidate.group.tp)
    return replace(outcome, candidate=replace(outcome.candidate, group=group))


def within_target(one: Deployment, problem: Problem) -> Deployment:
    """With the bound on tokens per second checked; those on times were checked group by group."""
    bound = problem.target.tokens_per_s
    if bound is None or one.tokens_per_s >= bound:
        return replace(one, binding=())
    short = Binding(name="tokens per second", need=bound, have=one.tokens_per_s, unit="tokens/s")
    return replace(one, binding=(short,))
