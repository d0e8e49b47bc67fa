"""What another choice would give: other cuts, batches, splits and settings that were looked at, and other networks.

Prices with other network and peer rates are made here, in closed form, with all choices as planned; the rest was found
by the search. Knows plans; nothing of drawing.
"""

from collections.abc import Iterator
from dataclasses import replace

from bywash.planner.candidate import Outcome, PhaseCost
from bywash.planner.cost import GroupCost
from bywash.planner.output.text import alike, exchange_source
from bywash.planner.plan import Plan, PlannedGroup
from bywash.planner.wire import Exchange, Line
from bywash.report.document import Block, Section, Table

DEPLOYMENTS_SHOWN = 8
RATES = (
    (2.0, 1.0, "NICs and uplinks twice as fast"),
    (0.5, 1.0, "half as fast"),
    (1.0, 2.0, "peer links twice as fast"),
)


def what_if_section(plan: Plan) -> Section:
    """Tables of alternatives, the chosen row marked."""
    blocks: list[Block] = [_deployments(plan)]
    for names, one in alike(plan.groups):
        blocks += [_batches(names, one), _splits(names, one)]
        if len(one.cost.group.members) > 1:
            blocks.append(_rates(names, one))
    if plan.fabric is not None and plan.fabric.tried:
        blocks.append(_settings(plan))
    return Section(
        title="What if",
        text="Alternatives beside the choice. Rows from the search were priced with the same formulas as the winner.",
        blocks=tuple(blocks),
    )


def _deployments(plan: Plan) -> Table:
    best = plan.result.ranked[0].tokens_per_s or 1.0
    shown = plan.result.ranked[:DEPLOYMENTS_SHOWN]
    return Table(
        title="Other ways to cut the cluster",
        columns=(
            "rank",
            "tokens/s",
            "of the best",
            "devices",
            "ms between tokens",
            "ms to the first",
            "exchange",
            "cut",
        ),
        rows=tuple(
            (
                str(number),
                f"{one.tokens_per_s:,.0f}",
                f"{one.tokens_per_s / best:.0%}",
                str(one.devices),
                _ms(one.tpot_ms),
                _ms(one.ttft_ms),
                exchange_source(one),
                one.label if one.feasible else f"{one.label}; infeasible",
            )
            for number, one in enumerate(shown, start=1)
        ),
        words=(7,),
        chosen=0 if plan.feasible else None,
        note="bound: the busiest link alone, without queues; only the best deployments were simulated packet by packet",
    )


def _batches(names: str, one: PlannedGroup) -> Table:
    """An eighth to twice the batch of this group, in closed form."""
    chosen, rule = one.outcome.candidate.sequences, one.outcome.candidate.rule
    tried = sorted({chosen, *(max(1, round(chosen * factor)) for factor in (0.125, 0.25, 0.5, 0.75, 1.25, 1.5, 2.0))})
    priced = [one.cost.price(n, rule) for n in tried]
    return Table(
        title=f"{names}: other batches",
        columns=("sequences each", "tokens/s", "ms between tokens", "memory free, GB", "why not"),
        rows=tuple(
            (
                str(n),
                f"{p.tokens_per_s:,.0f}" if p.decode is not None else "-",
                _ms(p.tpot_ms),
                f"{min((ledger.free_bytes for ledger in p.ledgers), default=0) / 1e9:.1f}",
                str(p.binding[0]) if p.binding else "",
            )
            for n, p in zip(tried, priced, strict=True)
        ),
        words=(4,),
        chosen=tried.index(chosen),
        note=_bound_note(one),
    )


def _splits(names: str, one: PlannedGroup) -> Table:
    phases = [phase for phase in (one.outcome.prefill, one.outcome.decode) if phase is not None]
    options = [(phase, name, ms) for phase in phases for name, ms in phase.options]
    return Table(
        title=f"{names}: other overlap",
        columns=("phase, split", "ms a step", "of serial", ""),
        rows=tuple(
            (f"{phase.name}, {name}", f"{ms:.2f}", f"{ms / phase.options[0][1]:.0%}", _taken(phase, name))
            for phase, name, ms in options
        ),
    )


def _taken(phase: PhaseCost, name: str) -> str:
    return "taken" if name == str(phase.split) else ""


def _rates(names: str, one: PlannedGroup) -> Table:
    """Same choices, other rates; the round trip and starts stay."""
    rule, sequences = one.outcome.candidate.rule, one.outcome.candidate.sequences
    base = one.cost.price(sequences, rule)
    rows = [("as it is", base), *((name, price_at(one.cost, base, net, peer)) for net, peer, name in RATES)]
    return Table(
        title=f"{names}: other networks",
        columns=("network", "tokens/s", "against now", "decode step, ms", "prefill step, ms"),
        rows=tuple(
            (name, f"{o.tokens_per_s:,.0f}", f"{o.tokens_per_s / base.tokens_per_s:.2f}x", *_steps(o))
            for name, o in rows
        ),
        chosen=0,
        note=_bound_note(one),
    )


def price_at(cost: GroupCost, base: Outcome, network: float, peer: float) -> Outcome:
    """The same choices with `network` and `peer` times the rates."""
    assert cost.exchange is not None
    faster = Exchange(
        dispatch=_faster(cost.exchange.dispatch, network, peer), combine=_faster(cost.exchange.combine, network, peer)
    )
    other = replace(cost, exchange=faster, prefill_exchange=None, _known={})
    return other.price(base.candidate.sequences, base.candidate.rule)


def _faster(line: Line, network: float, peer: float) -> Line:
    return replace(line, network_us=line.network_us / network, peer_us=line.peer_us / peer)


def _steps(outcome: Outcome) -> Iterator[str]:
    for phase in (outcome.decode, outcome.prefill):
        yield f"{phase.step_ms:.2f}" if phase is not None else "-"


def _settings(plan: Plan) -> Table:
    fabric = plan.fabric
    assert fabric is not None
    return Table(
        title="Other switch settings, on one layer of prefill of all groups at once",
        columns=("setting", "dispatch, us", "combine, us", "pauses", "held up, us", "ECN marks", "drops",
                 "deepest queue, MB"),
        rows=tuple(
            (one.name, f"{one.run.dispatch_us:,.0f}", f"{one.run.combine_us:,.0f}", f"{one.run.pauses:,}",
             f"{one.run.pause_us:,.0f}", f"{one.run.marks:,}", str(one.run.drops),
             f"{one.run.peak_queue_bytes / 1e6:.2f}")
            for one in fabric.tried
        ),
        chosen=0,
        note=" ".join(["Simulated.", *(f"Not tried: {one}." for one in fabric.refused)]),
    )  # fmt: skip


def _bound_note(one: PlannedGroup) -> str:
    many = len(one.cost.group.members) > 1
    return "priced with the busiest link as the network's time, without queues" if many else ""


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value < float("inf") else "-"
