"""The search: every way to cut a cluster into groups, every choice for each group, the best deployment of all.

Two rounds. In the first every candidate is priced in closed form, with the busiest link as the time between hosts. In
the second the exchanges of the best deployments are simulated packet by packet, and everything is priced again with
what came out. Groups do not share hosts, so each is searched alone; groups that are alike are searched once.
Deterministic: ties go to the candidate that comes first. Knows nothing of files or output.

`deployment` has the data, `refine` the second round, `tasks` the processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bywash.errors import ConfigError
from bywash.planner.candidate import Binding, Outcome, Problem, batches
from bywash.planner.cluster import Cluster
from bywash.planner.compute import rates_of
from bywash.planner.cost import GroupCost
from bywash.planner.deployment import Cut, Deployment, GroupSearch, kind_of, rank_deployments
from bywash.planner.group import Group, make_group
from bywash.planner.network import Simulated
from bywash.planner.overflow import SlotRule, break_even_rows, capacity_factor_of
from bywash.planner.refine import refine
from bywash.planner.sendings import TriedSending
from bywash.planner.tasks import Progress, run_tasks
from bywash.planner.traffic import ways_of

FIRST_SEQUENCES = 64
SLOTS = (2, 4, 8)
ALPHAS_1024 = (1044, 1126)
"""Load that a rank keeps: 1.02 suits prefill, 1.1 decode (docs/overflow.md); a run has one for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What the search found.

    Attributes:
        winner: the best deployment; None where none is feasible.
        ranked: deployments, best first, the winner among them; those that were simulated before those that were not.
        pareto: of the winner's groups.
        nearest: without a winner, the outcome closest to feasible and what binds it.
        simulated: group and phase -> the simulated exchange behind the winner's figures.
        sendings: group -> the ways of sending that were tried for it alone, the one taken first.
        priced, simulations: how much was looked at.
    """

    winner: Deployment | None
    ranked: tuple[Deployment, ...]
    pareto: tuple[Outcome, ...]
    nearest: Outcome | None
    binding: tuple[Binding, ...]
    simulated: dict[tuple[tuple[int, ...], str], Simulated]
    sendings: dict[tuple[int, ...], tuple[TriedSending, ...]]
    priced: int
    simulations: int


def search(cluster: Cluster, problem: Problem, *, jobs: int = 1, progress: Progress | None = None) -> SearchResult:
    """Find the best deployment.

    Args:
        cluster: hosts and network.
        problem: model, traffic, workload and target.
        jobs: processes.
        progress: called as tasks end.

    Raises:
        ConfigError: hosts that cannot form any group.
    """
    cuts = list(_cuts(cluster))
    kinds = {kind_of(cluster, hosts): hosts for _, groups in cuts for hosts in groups}
    searches = run_tasks(
        "pricing candidates", [(_search_group, (cluster, problem, hosts)) for hosts in kinds.values()], jobs, progress
    )
    found = dict(zip(kinds, searches, strict=True))
    priced = sum(one.priced for one in searches)
    ranked = rank_deployments(cluster, problem, cuts, found)
    if not any(one.feasible for one in ranked):
        return _infeasible(ranked, searches, priced)
    simulated: dict[tuple[tuple[int, ...], str], Simulated] = {}
    sendings: dict[tuple[int, ...], tuple[TriedSending, ...]] = {}
    if problem.network is not None:
        ranked, simulated, sendings = refine(cluster, problem, ranked, jobs, progress)
    winner = ranked[0] if ranked[0].feasible else None
    if winner is None:
        return _infeasible(ranked, searches, priced)
    pareto = [found[kind_of(cluster, one.candidate.group.hosts)].pareto for one in winner.outcomes]
    longest = max(pareto, key=len)
    return SearchResult(
        winner=winner,
        ranked=tuple(ranked),
        pareto=longest,
        nearest=None,
        binding=(),
        simulated=simulated,
        sendings=sendings,
        priced=priced,
        simulations=len(simulated),
    )


def _cuts(cluster: Cluster) -> Iterator[Cut]:
    """Ways to cut all hosts into groups: (label, groups); each generation alone, and all together."""
    pools: dict[str, list[int]] = {}
    for number, host in enumerate(cluster.hosts):
        pools.setdefault(f"{host.device.name} x {host.gpus}", []).append(number)
    for name, hosts in pools.items():
        yield from _sizes(name, hosts)
    if len(pools) > 1 and len({host.gpus for host in cluster.hosts}) == 1:
        yield from _sizes("all", list(range(len(cluster.hosts))))


def _sizes(name: str, hosts: list[int]) -> Iterator[Cut]:
    size = 1
    while True:
        groups = [tuple(hosts[i : i + size]) for i in range(0, len(hosts), size)]
        yield f"{name}: {size} host{'s' if size > 1 else ''} a group", groups
        if size == len(hosts):
            return
        size = min(2 * size, len(hosts))


def _search_group(cluster: Cluster, problem: Problem, hosts: Sequence[int]) -> GroupSearch:
    """Every choice for one group of hosts."""
    outcomes: list[Outcome] = []
    for tp in _tps(cluster, problem, hosts):
        group = make_group(cluster, hosts, tp)
        if group.ranks > problem.model.experts:
            continue
        cost = _best_way(problem, group, outcomes)
        if cost is not None:
            if not problem.workload.slots:
                outcomes += [cost.price(n) for n in batches(problem)]
            outcomes += _with_slots(cost, outcomes)
    return _sorted_out(outcomes)


def _best_way(problem: Problem, group: Group, outcomes: list[Outcome]) -> GroupCost | None:
    """The way of sending with most tokens per second at a middling batch; all are noted in `outcomes`."""
    costs = [GroupCost.of(problem, group, way) for way in ways_of(group)]
    first = problem.workload.sequences or FIRST_SEQUENCES
    priced = [cost.price(first) for cost in costs]
    if not problem.workload.slots or costs[0].traffic is None:
        outcomes += priced
    if costs[0].traffic is None:
        return None
    rates = [one.tokens_per_s for one in priced]
    if not any(rates):  # that batch has no room: a smaller one decides
        rates = [cost.price(1).tokens_per_s for cost in costs]
    return costs[rates.index(max(rates))]


def _tps(cluster: Cluster, problem: Problem, hosts: Sequence[int]) -> list[int]:
    """Ways to split attention: powers of two that divide devices and heads. MLA's cache cannot be split, and CPU ranks
    run what `bywash run` runs: 1 only."""
    if problem.model.attention.latent or any(cluster.hosts[number].device.is_cpu for number in hosts):
        return [1]
    gpus = [cluster.hosts[number].gpus for number in hosts]
    return [tp for tp in (1, 2, 4, 8) if all(n % tp == 0 for n in gpus) and problem.model.attention.heads % tp == 0]


def _with_slots(cost: GroupCost, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The best batch so far with slots for spilled rows; every batch where their number is asked for."""
    asked = cost.problem.workload.slots
    if asked is not None:
        rules = slot_rules(cost, asked) if asked else ()
        return [cost.price(n, rule) for n in batches(cost.problem) for rule in rules]
    mine = [one for one in outcomes if one.candidate.group == cost.group and one.feasible]
    if not mine:
        return []
    best = max(mine, key=lambda one: one.tokens_per_s)
    return [cost.price(best.candidate.sequences, rule) for slots in SLOTS for rule in slot_rules(cost, slots)]


def slot_rules(cost: GroupCost, slots: int) -> tuple[SlotRule, ...]:
    """Slots with the break-even of the group's slowest way to copy weights, for each load that a rank may keep."""
    model, group = cost.problem.model, cost.group
    fastest = max(rates_of(model, device).tflops for device in group.device_R)
    rows = break_even_rows(model.expert_bytes / model.expert_weights, fastest, group.copy_gbytes_per_s)
    cap = capacity_factor_of(cost.traffic) if cost.traffic is not None else 0.0
    return tuple(SlotRule(slots=slots, alpha_1024=alpha, break_even=rows, capacity_factor=cap) for alpha in ALPHAS_1024)


def _sorted_out(outcomes: Sequence[Outcome]) -> GroupSearch:
    feasible = [one for one in outcomes if one.feasible]
    best = max(feasible, key=lambda one: one.tokens_per_s, default=None)
    broken = [one for one in outcomes if not one.feasible]
    nearest = min(broken, key=_distance, default=None) if best is None else None
    pareto: list[Outcome] = []
    for one in sorted((o for o in outcomes if o.decode is not None), key=lambda o: (o.tpot_ms, -o.tokens_per_s)):
        if not pareto or one.tokens_per_s > pareto[-1].tokens_per_s:
            pareto.append(one)
    return GroupSearch(best=best, nearest=nearest, pareto=tuple(pareto), priced=len(outcomes))


def _distance(outcome: Outcome) -> tuple[bool, float]:
    """From being feasible: one that fits in memory is nearer than any that does not, whatever time it takes."""
    return outcome.decode is None, outcome.binding[0].excess


def _infeasible(ranked: Sequence[Deployment], searches: Sequence[GroupSearch], priced: int) -> SearchResult:
    """Nothing keeps every bound: what comes closest, and what binds it."""
    near = [one.nearest for one in searches if one.nearest is not None]
    near += [outcome for one in ranked for outcome in one.missed]
    nearest = min(near, key=_distance, default=None)
    served = [one for one in ranked if one.outcomes and one.binding]
    binding = served[0].binding if served else nearest.binding if nearest is not None else ()
    if not binding:
        raise ConfigError("cluster: no group of hosts has at most as many devices as the model has experts")
    return SearchResult(
        winner=None,
        ranked=tuple(ranked),
        pareto=(),
        nearest=None if served else nearest,
        binding=tuple(binding),
        simulated={},
        sendings={},
        priced=priced,
        simulations=0,
    )
