"""`Plan`: everything that was decided, and what it rests on. Data for output, report and validation.

`make_plan` runs the search, chooses switch settings on the winner's traffic, places every layer's experts, and replays
the trace where it is of the planned model. Knows no file format.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.balance.limits import Limits
from bywash.balance.placement import Placement
from bywash.planner.candidate import Outcome, Problem
from bywash.planner.cluster import Cluster
from bywash.planner.common_home import common_placement
from bywash.planner.cost import GroupCost
from bywash.planner.group import placements
from bywash.planner.model import ModelShape
from bywash.planner.network import Simulated
from bywash.planner.refine import sent_of
from bywash.planner.replay import Replay, replay
from bywash.planner.sample import Sample, make_sample
from bywash.planner.search import SearchResult, search
from bywash.planner.sendings import TriedSending, node_schedule
from bywash.planner.settings import FabricChoice, choose_settings, make_network
from bywash.planner.target import Target, Workload
from bywash.planner.tasks import Progress
from bywash.routing.trace import RoutingTrace

MICRO_BATCH = 2
"""Prompts that `bywash run` computes together by default; a replay holds for runs with the same."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedGroup:
    """One group of the winner.

    Attributes:
        name: `g0`, `g1`, ...
        outcome: its choices and their price, simulated where there is a network.
        cost: what the price was made from: traffic, placement of the sampled layers, speeds.
        experts_R: int64 [R], experts at home on each rank, of each layer.
        homes: a placement for each recorded layer; one for all without a trace of this model.
        common_home: one for all layers, as even as swapping makes them: what `bywash run --plan` takes.
        replay: the trace under `common_home` and the chosen slots; None without a trace of this model.
        simulated: `decode` and `prefill`: the exchange behind the price.
        sendings: ways of sending between hosts that were tried for it alone, the one taken first; () inside one host.
    """

    name: str
    outcome: Outcome
    cost: GroupCost
    experts_R: NDArray[np.int64]
    homes: tuple[Placement, ...]
    common_home: Placement
    replay: Replay | None
    simulated: dict[str, Simulated]
    sendings: tuple[TriedSending, ...]

    @property
    def node_schedule(self) -> str:
        """What `bywash run --node-schedule` is given for it; the default inside one host."""
        chosen = self.outcome.candidate
        return node_schedule(chosen.sending, chosen.group) if chosen.sending is not None else "together"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """All of it.

    Attributes:
        cluster, model, sample, workload, target: what was planned for what.
        result: the search: winner, ranking, Pareto front; without a winner the binding constraint.
        groups: of the winner; () where nothing is feasible.
        fabric: switch and NIC settings, with the runs that chose them (their `result` has queues over time); None for
            one host.
    """

    cluster: Cluster
    model: ModelShape
    sample: Sample
    workload: Workload
    target: Target
    result: SearchResult
    groups: tuple[PlannedGroup, ...]
    fabric: FabricChoice | None

    @property
    def feasible(self) -> bool:
        """Whether there is a winner."""
        return self.result.winner is not None


def make_plan(
    cluster: Cluster,
    model: ModelShape,
    trace: RoutingTrace | None,
    workload: Workload,
    target: Target,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Plan:
    """Plan a deployment.

    Raises:
        ConfigError: no group can be formed at all, or the trace has no tokens. An infeasible target is no error: the
            plan says what binds.
    """
    sample = make_sample(model, trace)
    network = make_network(cluster)
    ports = cluster.topology.hosts if cluster.topology is not None else 0
    problem = Problem(model=model, sample=sample, workload=workload, target=target, network=network, ports=ports)
    result = search(cluster, problem, jobs=jobs, progress=progress)
    groups = _groups(problem, result)
    fabric = _fabric(cluster, groups, progress) if network is not None and groups else None
    return Plan(
        cluster=cluster,
        model=model,
        sample=sample,
        workload=workload,
        target=target,
        result=result,
        groups=groups,
        fabric=fabric,
    )


def _fabric(cluster: Cluster, groups: Sequence[PlannedGroup], progress: Progress | None) -> FabricChoice:
    """Switch settings on one layer of prefill of all groups that leave their hosts."""
    if progress is not None:
        progress("switch settings", 0, 1)
    leaving = [one for one in groups if one.cost.traffic is not None and one.outcome.candidate.sending is not None]
    sent = [sent_of(one.cost, "prefill", one.outcome) for one in leaving]
    chosen = choose_settings(cluster, sent)
    if progress is not None:
        progress("switch settings", 1, 1)
    return chosen


def _groups(problem: Problem, result: SearchResult) -> tuple[PlannedGroup, ...]:
    if result.winner is None:
        return ()
    made = []
    for number, outcome in enumerate(result.winner.outcomes):
        chosen = outcome.candidate
        cost = GroupCost.of(problem, chosen.group, chosen.way)
        assert cost.own_R is not None
        trace = problem.sample.recorded
        counts = trace.counts_LE() if trace is not None else None
        experts = problem.model.experts
        homes = placements(counts, cost.own_R, len(trace.layers) if trace is not None else 1, experts)
        common = homes[0] if counts is None else common_placement(counts, cost.own_R, cost.speeds)
        phases = ("decode", "prefill")
        simulated = {
            phase: result.simulated[chosen.group.hosts, phase]
            for phase in phases
            if (chosen.group.hosts, phase) in result.simulated
        }
        made.append(
            PlannedGroup(
                name=f"g{number}",
                outcome=outcome,
                cost=cost,
                experts_R=cost.own_R,
                homes=homes,
                common_home=common,
                replay=replay_of(trace, common, outcome, cost) if trace is not None else None,
                simulated=simulated,
                sendings=result.sendings.get(chosen.group.hosts, ()),
            )
        )
    return tuple(made)


def replay_of(trace: RoutingTrace, home: Placement, outcome: Outcome, cost: GroupCost) -> Replay:
    """The trace under the plan, as `bywash run --plan` will run it: with the chosen slots, without their cap."""
    rule = outcome.candidate.rule
    if not rule.slots:
        return replay(trace, home, micro_batch=MICRO_BATCH)
    limits = Limits(alpha_1024=rule.alpha_1024, fetch_rows=rule.break_even, speeds=run_speeds(cost))
    return replay(trace, home, micro_batch=MICRO_BATCH, limits=limits, slots=rule.slots)


def run_speeds(cost: GroupCost) -> tuple[int, ...]:
    """Speeds that the runtime's plan is given: () for equal ranks."""
    return tuple(int(s) for s in cost.speeds) if len(set(cost.speeds.tolist())) > 1 else ()
