"""`bywash fabric schedules`: which order of sending suits the node leg of a hierarchical exchange, by simulation.

Thin: reads options, calls `bywash.planner.node_schedules`, prints. Heavy imports are inside. Registered by
`bywash.cli.fabric`.
"""

from dataclasses import asdict
from typing import Annotated

import typer

from bywash.cli.moe_exchange import (
    CLUSTER,
    AttentionUs,
    Combine,
    Dispatch,
    ExpertsUs,
    Groups,
    Hidden,
    Layers,
    Phase,
    PlacementKind,
    Request,
    StepNumber,
    Tokens,
    TopGroups,
    TopK,
    TopologyText,
    Trace,
    moe_exchange,
)
from bywash.cli.output import STDOUT, printing, stdout_console, writable, write_json


def register(app: typer.Typer) -> None:
    """Add the command to the group `bywash fabric`."""
    app.command("schedules")(schedules)


def schedules(
    trace: Trace,
    topology: TopologyText = CLUSTER,
    tokens: Tokens = None,
    step: StepNumber = 0,
    phase: Phase = None,
    layers: Layers = "",
    placement: PlacementKind = "in-order",
    hidden: Hidden = 7168,
    dispatch: Dispatch = "bf16",
    combine: Combine = "bf16",
    attention_us: AttentionUs = 0.0,
    experts_us: ExpertsUs = 0.0,
    topk: TopK = 8,
    groups: Groups = 1,
    top_groups: TopGroups = 1,
    profile: Annotated[str, typer.Option(help="settings of switches and NICs, as for simulate")] = "rocev2",
    adaptive: Annotated[bool, typer.Option(help="adaptive routing, and NICs that take packets out of order")] = False,
    seed: Annotated[int, typer.Option(help="of drawn tokens and of the run")] = 0,
    json_to: Annotated[
        str | None, typer.Option("--json", help="write the numbers to a file, or - to print them")
    ] = None,
) -> None:
    """Simulate the node leg by every --node-schedule; say which is fastest and by how much."""
    from dataclasses import replace

    from rich.table import Table

    from bywash.fabric.files import parse_short
    from bywash.planner import Compute, Router, RowFormat
    from bywash.planner.node_schedules import fastest, option, schedule_costs

    writable(json_to, "--json", or_stdout=True)
    router = Router(top_k=topk, groups=groups, top_groups=top_groups)
    request = Request(source=trace, tokens=tokens, step=step, phase=phase, layers=layers, router=router, seed=seed)
    row = RowFormat(hidden=hidden, dispatch=dispatch, combine=combine)
    section = parse_short(topology, "--topology")
    exchange = moe_exchange(
        request, section, profile, placement=placement, rows="per-node", path="hierarchical", row=row
    )
    settings = exchange.settings
    if adaptive:
        settings = replace(settings, nic=replace(settings.nic, out_of_order=True))
    compute = Compute(attention_us=attention_us, experts_us=experts_us)
    costs = schedule_costs(exchange.layers, exchange.wire, settings, compute=compute, adaptive=adaptive, seed=seed)
    best, why = fastest(costs)
    if json_to is not None:
        write_json(json_to, {"schedules": [asdict(cost) for cost in costs], "fastest": best.schedule, "why": why})
    if json_to == STDOUT:
        return
    table = Table("schedule", "us per layer", "/ bound", "/ together", "pauses", "ECN marks", "largest queue, kB")
    for cost in costs:
        table.add_row(
            cost.schedule,
            f"{cost.layer_us:,.1f}",
            f"{cost.layer_us / cost.bound_us:.2f}",
            f"{cost.layer_us / costs[0].layer_us:.2f}",
            f"{cost.pauses:,}",
            f"{cost.marks:,}",
            f"{cost.peak_queue_bytes / 1e3:,.0f}",
        )
    with printing():
        typer.echo(
            f"{exchange.wire.topology.describe()}; {exchange.choices.note}; simulated, dispatch and combine of "
            f"{len(exchange.layers)} layers"
        )
        stdout_console().print(table)
        typer.echo(f"fastest: {best.schedule}, {why}; with the exchange: {option(best.schedule)}")
