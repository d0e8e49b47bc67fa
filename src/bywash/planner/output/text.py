"""A plan for a terminal: the winner in one line, the ranking with its arithmetic, what binds, the Pareto front.

Pure: text from a `Plan`.
"""

from collections import Counter
from collections.abc import Sequence

from bywash.planner.candidate import Outcome, PhaseCost
from bywash.planner.cluster_text import table
from bywash.planner.deployment import Deployment
from bywash.planner.figures import Figure
from bywash.planner.network import Simulated
from bywash.planner.plan import Plan, PlannedGroup
from bywash.planner.sendings import node_schedule

WIDTH, HEIGHT = 64, 12
_SHOWN = 8


def plan_text(plan: Plan) -> str:
    """Everything, winner first."""
    parts = [headline(plan), f"traffic: {plan.sample.note}"]
    if plan.feasible:
        parts += [_groups(plan), _sendings(plan), _arithmetic(plan), pareto_text(plan.result.pareto)]
    parts += [_ranking(plan.result.ranked), _looked_at(plan)]
    if plan.fabric is not None:
        parts.append(_fabric(plan))
    return "\n\n".join(part for part in parts if part) + "\n"


def headline(plan: Plan) -> str:
    """One line: the winner, or what makes the target infeasible and by how much."""
    winner = plan.result.winner
    if winner is not None:
        return (
            f"winner: {plan.model.name} on {winner.devices} of {plan.cluster.gpus} devices in {len(winner.outcomes)} "
            f"group{'s' if len(winner.outcomes) > 1 else ''}: {winner.tokens_per_s:,.0f} tokens/s, "
            f"{winner.tpot_ms:.1f} ms between tokens, {winner.ttft_ms:,.0f} ms to the first"
        )
    near = plan.result.nearest
    where = f"; nearest: {_words(near)}" if near is not None else ""
    return f"infeasible: {plan.result.binding[0]}{where}"


def _words(outcome: Outcome) -> str:
    chosen = outcome.candidate
    return f"{chosen.group.describe()}, tp {chosen.group.tp}, {chosen.sequences} sequences each, {chosen.way}"


def _groups(plan: Plan) -> str:
    rows = [["groups", "hosts", "devices", "tp", "seq each", "sent", "order", "slots", "decode", "prefill", "tokens/s"]]
    for names, one in alike(plan.groups):
        chosen, decode, prefill = one.outcome.candidate, one.outcome.decode, one.outcome.prefill
        assert decode is not None
        assert prefill is not None
        rows.append(
            [
                names,
                str(len(chosen.group.members)),
                chosen.group.describe().split(", ")[1],
                str(chosen.group.tp),
                str(chosen.sequences),
                sent(one.outcome),
                chosen.schedule or "-",
                str(chosen.rule.slots),
                f"{decode.step_ms:.1f} ms, {decode.split}",
                f"{prefill.step_ms:.1f} ms, {prefill.split}",
                f"{one.outcome.tokens_per_s:,.0f}",
            ]
        )
    winner = plan.result.winner
    assert winner is not None
    idle = [f"idle: {', '.join(plan.cluster.hosts[h].name for h in hosts)}: {why}" for hosts, why in winner.idle]
    return "\n".join([table(rows), *idle])


def sent(outcome: Outcome) -> str:
    """How rows travel, in words."""
    way = outcome.candidate.way
    if len(outcome.candidate.group.members) > 1:
        return str(way)
    return f"peer links, {'all-gather' if way.gather else 'all-to-all'}"


def alike(groups: Sequence[PlannedGroup]) -> list[tuple[str, PlannedGroup]]:
    """Groups with the same choices and price, as one: (names, the first)."""
    found: dict[tuple[object, ...], list[PlannedGroup]] = {}
    for one in groups:
        key = (one.outcome.arithmetic, one.outcome.candidate.group.describe(), one.outcome.candidate.way)
        found.setdefault(key, []).append(one)
    return [(", ".join(one.name for one in same), same[0]) for same in found.values()]


SENDING_COLUMNS = ("groups", "sending", "--node-schedule", "decode us", "prefill us", "tokens/s", "why not")
SENDINGS_NOTE = (
    "sending between hosts: dispatch + combine of a layer, each group alone, simulated; the first of each is taken"
)


def _sendings(plan: Plan) -> str:
    rows = sending_rows(plan)
    return "\n".join([SENDINGS_NOTE, table([list(row) for row in (SENDING_COLUMNS, *rows)])]) if rows else ""


def sending_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Every way of sending that was tried for the winner's groups, under `SENDING_COLUMNS`: the one taken, what others
    cost against it, and which of them the runtime cannot keep to."""
    rows = []
    for names, one in alike(plan.groups):
        for tried in one.sendings:
            option = "-" if tried.refused else node_schedule(tried.sending, one.outcome.candidate.group)
            times = [_against(tried.runs[phase], one.sendings[0].runs[phase]) for phase in ("decode", "prefill")]
            rows.append(
                (names, str(tried.sending), option, *times, f"{tried.outcome.tokens_per_s:,.0f}", tried.refused)
            )
    return rows


def _against(run: Simulated, taken: Simulated) -> str:
    """Such as `80 + 150 (1.020x)`: so many times what was taken."""
    times = (run.dispatch_us + run.combine_us) / (taken.dispatch_us + taken.combine_us)
    return f"{run.dispatch_us:,.0f} + {run.combine_us:,.0f}" + (f" ({times:.3f}x)" if run is not taken else "")


def _arithmetic(plan: Plan) -> str:
    lines = []
    for names, one in alike(plan.groups):
        lines.append(f"{names}: {one.outcome.arithmetic}")
        for phase in (one.outcome.decode, one.outcome.prefill):
            assert phase is not None
            lines += _phase(plan, phase)
        for ledger in one.outcome.ledgers:
            lines.append(
                f"  memory of {ledger.device}: {ledger.need_bytes / 1e9:.1f} of {ledger.have_bytes / 1e9:.1f} GB"
            )
            lines += [f"    {e.name:<14} {e.bytes / 1e9:8.2f} GB  {e.arithmetic}" for e in ledger.entries if e.bytes]
    return "\n".join(lines)


def _phase(plan: Plan, phase: PhaseCost) -> list[str]:
    options = ", ".join(f"{name} {ms:.2f}" for name, ms in phase.options)
    lines = [
        f"  {phase.name}: {phase.tokens:,} tokens; ms by split: {options}; imbalance {phase.imbalance_home:.2f} "
        f"at home, {phase.imbalance:.2f} as planned"
    ]
    for kind, figure in phase.stages.items():
        lines.append(f"    {kind:<14} {figure.us:9.1f} us  [{figure.source}] {figure.arithmetic}")
    return lines


def by_source(stages: Sequence[Figure]) -> dict[str, float]:
    """Share of the summed stage times by where they come from."""
    total = sum(one.us for one in stages)
    shares: Counter[str] = Counter()
    for one in stages:
        shares[one.source] += one.us / total  # type: ignore[assignment]
    return dict(shares)


def _ranking(ranked: Sequence[Deployment]) -> str:
    rows = [["rank", "tokens/s", "exchange", "devices", "ms between", "ms to first", "deployment"]]
    for number, one in enumerate(ranked[:_SHOWN], start=1):
        words = one.label if one.feasible else f"{one.label} (infeasible: {_why(one)})"
        rows.append(
            [
                str(number),
                f"{one.tokens_per_s:,.0f}",
                exchange_source(one),
                str(one.devices),
                f"{one.tpot_ms:.1f}",
                f"{one.ttft_ms:,.0f}",
                words,
            ]
        )
    return table(rows)


def exchange_source(one: Deployment) -> str:
    """Whether its exchanges between hosts were simulated, or are the bound of the busiest link."""
    sources = {figure.source for o in one.outcomes if o.prefill is not None for figure in o.prefill.stages.values()}
    return next((name for name in ("bound", "simulated") if name in sources), "in hosts")


def _why(one: Deployment) -> str:
    if one.binding:
        return str(one.binding[0])
    return one.idle[0][1] if one.idle else "nothing serves"


def pareto_text(outcomes: Sequence[Outcome]) -> str:
    """Tokens per second against time between tokens, for the group with most choices; `o` keeps all bounds, `x` not."""
    if len(outcomes) < 2:
        return ""
    most = max(one.tokens_per_s for one in outcomes)
    low, high = min(one.tpot_ms for one in outcomes), max(one.tpot_ms for one in outcomes)
    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    for one in outcomes:
        x = round((one.tpot_ms - low) / max(1e-9, high - low) * (WIDTH - 1))
        y = round(one.tokens_per_s / most * (HEIGHT - 1))
        grid[HEIGHT - 1 - y][x] = "o" if one.feasible else "x"
    lines = [f"{outcomes[0].candidate.group.describe()}: tokens/s against ms between tokens (busiest-link bound)"]
    for i, row in enumerate(grid):
        label = f"{most:>9,.0f}" if i == 0 else f"{0:>9}" if i == HEIGHT - 1 else " " * 9
        lines.append(f"{label} |{''.join(row).rstrip()}")
    lines.append(f"{'':>9} +{'-' * WIDTH}")
    lines.append(f"{'':>11}{low:<{WIDTH // 2}.1f}{high:>{WIDTH // 2}.1f}")
    return "\n".join(lines)


def _looked_at(plan: Plan) -> str:
    lines = [f"{plan.result.priced} candidates priced, {plan.result.simulations} exchanges of the winner simulated"]
    for names, one in alike(plan.groups):
        assert one.outcome.decode is not None
        shares = by_source(list(one.outcome.decode.stages.values()))
        lines.append(f"{names}, decode: " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items()))
    return "\n".join(lines)


def _fabric(plan: Plan) -> str:
    fabric = plan.fabric
    assert fabric is not None
    if fabric.why_not:
        return f"no switch configuration: {fabric.why_not}"
    rows = [["switch settings", "dispatch us", "combine us", "pauses", "marks", "drops", "largest queue MB"]]
    for one in fabric.tried:
        run = one.run
        rows.append(
            [
                one.name,
                f"{run.dispatch_us:,.0f}",
                f"{run.combine_us:,.0f}",
                str(run.pauses),
                str(run.marks),
                str(run.drops),
                f"{run.peak_queue_bytes / 1e6:.2f}",
            ]
        )
    head = "ECN and PFC, one layer of prefill of all groups at once, simulated; the first is taken"
    rows_text = "\n".join([head, table(rows), *(f"not tried: {one}" for one in fabric.refused)])
    return rows_text if fabric.tried else "no group sends between hosts: switch settings as computed"
