"""A plan as a report: winner, timeline of a layer, network, skew, memory, and what another choice would give.

Reads what `planner.plan` decided. `page.report_files` calls it, for `bywash plan --out`. Knows nothing of drawing.
"""

from bywash.planner.candidate import PhaseCost
from bywash.planner.output.text import SENDING_COLUMNS, SENDINGS_NOTE, alike, by_source, headline, sending_rows, sent
from bywash.planner.plan import Plan, PlannedGroup
from bywash.report.document import Bars, Block, Report, Section, Table
from bywash.report.of_network import network_section
from bywash.report.of_skew import skew_blocks
from bywash.report.of_timeline import layer_timeline
from bywash.report.what_if import what_if_section


def plan_report(plan: Plan) -> Report:
    """All sections; an infeasible plan has only what came closest."""
    sections = [_groups(plan)] if plan.feasible else [_infeasible(plan)]
    if plan.feasible:
        sections += [_timelines(plan), *_network(plan), _skew(plan), _memory(plan)]
    return Report(
        title=f"{plan.model.name} on {plan.cluster.name}",
        headline=headline(plan),
        facts=_facts(plan),
        sections=(*sections, what_if_section(plan)),
    )


def _facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    work, bounds = plan.workload, plan.target.model_dump(exclude_none=True)
    return (
        ("hosts and devices", f"{len(plan.cluster.hosts)} hosts, {plan.cluster.gpus} devices"),
        ("generations", ", ".join(plan.cluster.generations())),
        ("request", f"{work.prompt_tokens:,} prompt + {work.output_tokens:,} output tokens"),
        ("bounds", ", ".join(f"{name} {value:g}" for name, value in bounds.items()) or "none"),
        ("traffic", plan.sample.note),
        ("looked at", f"{plan.result.priced:,} candidates, {plan.result.simulations} exchanges simulated"),
    )


def _groups(plan: Plan) -> Section:
    winner = plan.result.winner
    assert winner is not None
    rows = []
    for names, one in alike(plan.groups):
        chosen, decode, prefill = one.outcome.candidate, one.outcome.decode, one.outcome.prefill
        assert decode is not None
        assert prefill is not None
        rows.append(
            (
                names,
                chosen.group.describe(),
                str(chosen.group.tp),
                str(chosen.sequences),
                str(chosen.rule.slots),
                f"{decode.step_ms:.1f}",
                f"{prefill.step_ms:.1f}",
                f"{one.outcome.tokens_per_s:,.0f}",
                f"{sent(one.outcome)}{', ' + chosen.schedule if chosen.schedule else ''}",
            )
        )
    idle = [f"{', '.join(plan.cluster.hosts[h].name for h in hosts)} idle: {why}" for hosts, why in winner.idle]
    table = Table(
        columns=("groups", "devices", "tp", "sequences each", "slots", "decode step, ms", "prefill step, ms",
                 "tokens/s", "rows sent"),
        rows=tuple(rows),
        words=(8,),
        note="; ".join(idle),
    )  # fmt: skip
    tried = tuple(sending_rows(plan))
    ways = Table(
        title="Sending between hosts", columns=SENDING_COLUMNS, rows=tried, words=(1, 2, 6), note=SENDINGS_NOTE
    )
    blocks = (table, ways) if tried else (table,)
    return Section(title="Deployment", text="Each row is a kind of expert-parallel group.", blocks=blocks)


def _infeasible(plan: Plan) -> Section:
    table = Table(
        columns=("bound", "needs", "there is", "unit", "times"),
        rows=tuple(
            (one.name, f"{one.need:,.4g}", f"{one.have:,.4g}", one.unit, f"{one.excess:.2f}")
            for one in plan.result.binding
        ),
    )
    return Section(title="What binds", text="No deployment keeps every bound; this one comes closest.", blocks=(table,))


def _timelines(plan: Plan) -> Section:
    blocks: list[Block] = []
    for names, one in alike(plan.groups):
        for phase in (one.outcome.prefill, one.outcome.decode):
            assert phase is not None
            blocks.append(_timeline(names, phase))
    for names, one in alike(plan.groups):
        for phase in (one.outcome.prefill, one.outcome.decode):
            assert phase is not None
            blocks.append(_stages(names, phase))
    return Section(
        title="Timeline of a layer",
        text="A layer in the middle of several, in the pipeline's own order; predicted, not measured. A and B are "
        "micro-batches, the number is the layer.",
        blocks=tuple(blocks),
    )


def _timeline(names: str, phase: PhaseCost) -> Block:
    used = phase.usage
    hidden = 1 - used.exposed_ns / used.communication_ns if used.communication_ns else 1.0
    note = f"{phase.layer_us:,.0f} us a layer, {phase.split}; {hidden:.0%} of the exchange behind compute"
    if phase.fetch_us:
        note += f"; copied weights add {phase.fetch_us:,.0f} us, not drawn"
    cost_us = {kind: figure.us for kind, figure in phase.split_stages.items()}
    return layer_timeline(f"{names}: {phase.name}", cost_us, phase.split, note=note)


def _stages(names: str, phase: PhaseCost) -> Table:
    shares = ", ".join(f"{share:.0%} {name}" for name, share in by_source(list(phase.stages.values())).items())
    return Table(
        title=f"{names}: {phase.name}, stages of a layer of {phase.tokens:,} tokens without overlap",
        columns=("stage", "us", "source", "arithmetic"),
        rows=tuple((str(kind), f"{f.us:,.1f}", f.source, f.arithmetic) for kind, f in phase.stages.items()),
        words=(3,),
        note=f"by time: {shares}",
        folded=True,
    )


def _network(plan: Plan) -> list[Section]:
    chosen = plan.fabric.chosen if plan.fabric is not None else None
    if chosen is None or chosen.run.result is None:
        return []
    part = "" if chosen.run.scale == 1 else f", at {chosen.run.scale:.3g} of their bytes"
    text = (
        f"Simulated packet by packet: dispatch and combine of sampled layers of prefill, all groups at once{part}, "
        f"with the switch settings named {chosen.name}."
    )
    return [network_section(chosen.run.result, text=text)]


def _skew(plan: Plan) -> Section:
    blocks = [block for names, one in alike(plan.groups) for block in skew_blocks(names, one)]
    return Section(title="Skew", text=f"Traffic: {plan.sample.note}.", blocks=tuple(blocks))


def _memory(plan: Plan) -> Section:
    ledgers = [block for names, one in alike(plan.groups) for block in _ledgers(names, one)]
    charts_first = sorted(ledgers, key=lambda block: block.kind == "table")
    text = "Every buffer of a device, fixed before the first step whatever the routing."
    return Section(title="Memory ledger", text=text, blocks=tuple(charts_first))


def _ledgers(names: str, one: PlannedGroup) -> list[Block]:
    made: list[Block] = []
    for ledger in one.outcome.ledgers:
        entries = [entry for entry in ledger.entries if entry.bytes]
        title = f"{names}: memory of {ledger.device}"
        made.append(
            Bars(
                title=title,
                names=(*(entry.name for entry in entries), "all"),
                values=(*(entry.bytes / 1e9 for entry in entries), ledger.need_bytes / 1e9),
                texts=(*(f"{entry.bytes / 1e9:.2f} GB" for entry in entries), f"{ledger.need_bytes / 1e9:.1f} GB"),
                limit=ledger.have_bytes / 1e9,
                limit_name=f"the device has {ledger.have_bytes / 1e9:.1f} GB",
            )
        )
        made.append(
            Table(
                title=f"{title}, arithmetic",
                columns=("buffer", "GB", "arithmetic"),
                rows=tuple((entry.name, f"{entry.bytes / 1e9:.2f}", entry.arithmetic) for entry in entries),
                words=(2,),
                folded=True,
                note=f"{ledger.free_bytes / 1e9:.1f} GB free",
            )
        )
    return made
