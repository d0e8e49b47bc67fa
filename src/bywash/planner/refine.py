"""The search's second round: exchanges of the best deployments, packet by packet, and prices made anew with them.

Called by `search`; deterministic.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bywash.planner.candidate import Outcome, Problem, batches
from bywash.planner.cluster import Cluster
from bywash.planner.cost import GroupCost
from bywash.planner.deployment import Deployment, kind_of, moved, within_target
from bywash.planner.network import Sending, Sent, Simulated
from bywash.planner.sendings import TriedSending, best_first, refusal, sendings_of
from bywash.planner.tasks import Progress, run_tasks
from bywash.planner.wire import layer_bytes_of, with_simulation

MOST_SIMULATED, MOST_FINAL = 12, 4
SHARED = 0.05
"""Groups that take so much longer together than alone share links; less is noise of what was simulated."""

Known = dict[tuple[Any, ...], tuple[TriedSending, ...]]
"""Kind of group -> the ways of sending that were simulated, the best first."""
Runs = dict[tuple[tuple[int, ...], str], Simulated]
"""(hosts of a group, phase) -> its exchange."""
Tried = dict[tuple[int, ...], tuple[TriedSending, ...]]
"""Hosts of a group -> what was tried for it alone, what was taken first."""


def refine(
    cluster: Cluster, problem: Problem, ranked: Sequence[Deployment], jobs: int, progress: Progress | None
) -> tuple[list[Deployment], Runs, Tried]:
    """Simulate deployments until none that was not simulated could win.

    A bound is the least time between hosts, so that a deployment priced with it promises at least what it can give. The
    best one is then simulated with all of its groups at once; if that makes another one better, that one is too.
    """
    known: Known = {}
    waiting = [one for one in ranked if one.feasible]
    front: list[Deployment] = []
    final: list[tuple[Deployment, Runs]] = []
    while len(final) < MOST_FINAL:
        while waiting and len(front) + len(final) < MOST_SIMULATED and _ahead(waiting[0], front, final):
            taken = [waiting.pop(0)]
            _refine_groups(cluster, problem, taken, known, jobs, progress)
            front = sorted([*front, *_repriced(cluster, problem, taken, known)], key=_order)
        if not front or (final and _order(min((one for one, _ in final), key=_order)) <= _order(front[0])):
            break
        best = [front.pop(0)]
        _refine_groups(cluster, problem, best, known, jobs, progress, others=True)
        best = _repriced(cluster, problem, best, known)
        runs = _runs(cluster, best[0], known)
        final.append((_together(problem, best[0], runs), runs))
    final.sort(key=lambda one: _order(one[0]))
    done = [one for one, _ in final] + front
    rest = [one for one in ranked if all(one.label != other.label for other in done)]
    return done + rest, final[0][1], _tried(cluster, problem, final[0][0], known)


def _order(one: Deployment) -> tuple[bool, float]:
    return not one.feasible, -one.tokens_per_s


def _ahead(one: Deployment, front: Sequence[Deployment], final: Sequence[tuple[Deployment, Runs]]) -> bool:
    """Whether a deployment promises more than any that was simulated gives."""
    return all(_order(one) < _order(other) for other in [*front, *(done for done, _ in final)])


def _runs(cluster: Cluster, deployment: Deployment, known: Known) -> Runs:
    found: Runs = {}
    for one in deployment.outcomes:
        hosts = one.candidate.group.hosts
        for taken in known.get(kind_of(cluster, hosts), ())[:1]:
            found |= {(hosts, phase): run for phase, run in taken.runs.items()}
    return found


def _tried(cluster: Cluster, problem: Problem, deployment: Deployment, known: Known) -> Tried:
    """What was tried for each group, decode at the batch that was chosen."""
    found: Tried = {}
    for one in deployment.outcomes:
        hosts, alike = one.candidate.group.hosts, []
        for tried in known.get(kind_of(cluster, hosts), ()):
            assert problem.network is not None
            times = one.candidate.sequences / tried.outcome.candidate.sequences
            decode = at_times(tried.runs["decode"], times, problem.network.rtt_us)
            alike.append(replace(tried, runs=tried.runs | {"decode": decode}))
        if alike:
            found[hosts] = tuple(alike)
    return found


def _refine_groups(
    cluster: Cluster,
    problem: Problem,
    front: Sequence[Deployment],
    known: Known,
    jobs: int,
    progress: Progress | None,
    *,
    others: bool = False,
) -> None:
    """Fill `known`: simulate each kind of group with the plain ways of sending, or then with the `others`, once."""
    kinds: dict[tuple[Any, ...], Outcome] = {}
    for deployment in front:
        for one in deployment.outcomes:
            if len(one.candidate.group.members) > 1:
                kinds.setdefault(kind_of(cluster, one.candidate.group.hosts), one)
    todo = []
    for kind, one in kinds.items():
        before, wanted = known.get(kind, ()), sendings_of(one.candidate.group)
        if len(before) <= (len(wanted) if others else 0):
            wanted = sendings_of(one.candidate.group, before[0].sending) if others else wanted
            todo += [(kind, one, sending) for sending in wanted]
    tasks = [(simulate_group, (problem, one, sending)) for _, one, sending in todo]
    if not tasks:
        return
    for (kind, one, sending), (outcome, runs) in zip(todo, run_tasks("simulating exchanges", tasks, jobs, progress)):
        no = refusal(sending, one.candidate.group)
        tried = TriedSending(sending=sending, outcome=outcome, runs=runs, refused=no)
        known[kind] = best_first((*known.get(kind, ()), tried))


def simulate_group(problem: Problem, outcome: Outcome, sending: Sending) -> tuple[Outcome, dict[str, Simulated]]:
    """Price a group with its exchange simulated, one line for each phase; other batches may be better now."""
    chosen = outcome.candidate
    cost = GroupCost.of(problem, chosen.group, chosen.way)
    assert problem.network is not None
    assert cost.traffic is not None
    assert cost.exchange is not None
    runs, lines = {}, {}
    for phase in ("decode", "prefill"):
        tokens = float(cost.tokens_of(phase, chosen.sequences))
        layers = layer_bytes_of(problem.model, cost.traffic, tokens)
        run = problem.network.simulate([Sent(layers=layers, sending=sending)])
        runs[phase] = run
        lines[phase] = with_simulation(cost.exchange, run, tokens, problem.network.rtt_us)
    cost = replace(cost, exchange=lines["decode"], prefill_exchange=lines["prefill"], _known={})
    priced = [cost.price(n, chosen.rule, sending) for n in _near(problem, chosen.sequences)]
    feasible = [one for one in priced if one.feasible]
    best = max(feasible or priced, key=lambda one: one.tokens_per_s)
    times = best.candidate.sequences / chosen.sequences
    return best, runs | {"decode": at_times(runs["decode"], times, problem.network.rtt_us)}


def at_times(run: Simulated, times: float, rtt_us: float) -> Simulated:
    """The same exchange with `times` as many tokens, along the line that `with_simulation` lays through it.

    Example: 110 us with a round trip of 10 us, half as many tokens: 60 us.
    """
    if times == 1:
        return run
    dispatch, combine = (rtt_us + max(0.0, us - rtt_us) * times for us in (run.dispatch_us, run.combine_us))
    how = f"{run.arithmetic}; {times:.3g} times as many tokens"
    return replace(run, dispatch_us=dispatch, combine_us=combine, arithmetic=how)


def _near(problem: Problem, sequences: int) -> list[int]:
    """The batch that was simulated and its neighbours."""
    known = batches(problem)
    at = known.index(sequences) if sequences in known else 0
    return list(known[max(0, at - 2) : at + 2])


def _repriced(
    cluster: Cluster,
    problem: Problem,
    front: Sequence[Deployment],
    known: Known,
) -> list[Deployment]:
    """The deployments with simulated figures where there are; a group that breaks a bound now goes idle."""
    made = []
    for deployment in front:
        outcomes, idle, missed = [], list(deployment.idle), list(deployment.missed)
        for one in deployment.outcomes:
            hosts = one.candidate.group.hosts
            kind = kind_of(cluster, hosts)
            fresh = moved(known[kind][0].outcome, cluster, hosts) if kind in known else one
            if fresh.feasible:
                outcomes.append(fresh)
            else:
                idle.append((hosts, str(fresh.binding[0])))
                missed.append(fresh)
        changed = replace(deployment, outcomes=tuple(outcomes), idle=tuple(idle), missed=tuple(missed))
        made.append(within_target(changed, problem))
    return sorted(made, key=lambda one: (not one.feasible, -one.tokens_per_s))


def _together(problem: Problem, winner: Deployment, simulated: Runs) -> Deployment:
    """The winner with all of its groups sending at once: slower where they share links. `simulated` is brought up to
    date; a group that breaks a bound now goes idle."""
    groups = [one for one in winner.outcomes if (one.candidate.group.hosts, "decode") in simulated]
    if len(groups) < 2:
        return winner
    assert problem.network is not None
    costs = [GroupCost.of(problem, one.candidate.group, one.candidate.way) for one in groups]
    for phase in ("decode", "prefill"):
        sent = [sent_of(cost, phase, one) for cost, one in zip(costs, groups)]
        for one, (dispatch, combine) in zip(groups, problem.network.simulate_together(sent)):
            key = one.candidate.group.hosts, phase
            alone = simulated[key]
            if dispatch + combine > (1 + SHARED) * (alone.dispatch_us + alone.combine_us):
                how = f"{alone.arithmetic}, {len(groups)} groups at once"
                simulated[key] = replace(alone, dispatch_us=dispatch, combine_us=combine, arithmetic=how)
    fresh = {one.candidate.group.hosts: _priced(cost, one, simulated) for cost, one in zip(costs, groups)}
    outcomes = [fresh.get(one.candidate.group.hosts, one) for one in winner.outcomes]
    missed = [one for one in outcomes if not one.feasible]
    idle = [(one.candidate.group.hosts, str(one.binding[0])) for one in missed]
    kept = tuple(one for one in outcomes if one.feasible)
    changed = replace(winner, outcomes=kept, idle=(*winner.idle, *idle), missed=(*winner.missed, *missed))
    return within_target(changed, problem)


def sent_of(cost: GroupCost, phase: str, outcome: Outcome) -> Sent:
    """What a group of several hosts sends in a step, in the way that was chosen for it."""
    assert cost.traffic is not None
    assert outcome.candidate.sending is not None
    tokens = float(cost.tokens_of(phase, outcome.candidate.sequences))
    layers = layer_bytes_of(cost.problem.model, cost.traffic, tokens)
    return Sent(layers=layers, sending=outcome.candidate.sending)


def _priced(cost: GroupCost, outcome: Outcome, simulated: Runs) -> Outcome:
    """The same choices with the exchanges as simulated."""
    assert cost.exchange is not None
    assert cost.problem.network is not None
    chosen, lines = outcome.candidate, {}
    for phase in ("decode", "prefill"):
        tokens = float(cost.tokens_of(phase, chosen.sequences))
        run = simulated[chosen.group.hosts, phase]
        lines[phase] = with_simulation(cost.exchange, run, tokens, cost.problem.network.rtt_us)
    ready = replace(cost, exchange=lines["decode"], prefill_exchange=lines["prefill"], _known={})
    return ready.price(chosen.sequences, chosen.rule, chosen.sending)
