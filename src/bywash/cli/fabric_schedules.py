"""`bywash fabric schedules`: which order of sending suits the node leg of a hierarchical exchange, by simulation.

Thin: reads options, calls `bywash.planner.node_schedules`, prints. Heavy imports are inside. Registered by
`bywash.cli.fabric`.
"""

from dataclasses import asdict
from typing import Annotated

import typer

from bywash.cli.fabric_traffic import CLUSTER, Request, checked, gpus_per_server_of, placements_of, token_choices
from bywash.cli.output import STDOUT, printing, stdout_console, writable, write_json


def register(app: typer.Typer) -> None:
    """Add the command to the group `bywash fabric`."""
    app.command("schedules")(schedules)


def schedules(
    trace: Annotated[
        str, typer.Option(help="a routing trace, a shipped one (prose, code, tables, mixed), or expert counts in JSON")
    ],
    topology: Annotated[str, typer.Option(help="as for simulate; one rank for each host (NIC)")] = CLUSTER,
    tokens: Annotated[
        int | None, typer.Option(help="tokens per rank, drawn from the trace; default: one step as recorded")
    ] = None,
    step: Annotated[int, typer.Option(help="the recorded step to take, without --tokens")] = 0,
    phase: Annotated[str | None, typer.Option(help="with --tokens: draw from prefill or decode steps only")] = None,
    layers: Annotated[str, typer.Option(help="layers, with commas between; default: up to 3, spread evenly")] = "",
    placement: Annotated[str, typer.Option(help="experts on ranks: in-order, or balanced by their load")] = "in-order",
    hidden: Annotated[int, typer.Option(help="hidden size")] = 7168,
    dispatch: Annotated[str, typer.Option(help="rows sent out: fp8, bf16 or fp32")] = "bf16",
    combine: Annotated[str, typer.Option(help="rows sent back: fp8, bf16 or fp32")] = "bf16",
    attention_us: Annotated[float, typer.Option(help="computing before each dispatch")] = 0.0,
    experts_us: Annotated[float, typer.Option(help="computing before each combine")] = 0.0,
    topk: Annotated[int, typer.Option(help="with counts: experts per token")] = 8,
    groups: Annotated[int, typer.Option(help="with counts: groups of experts (DeepSeek-V3: 8)")] = 1,
    top_groups: Annotated[int, typer.Option(help="with counts: groups a token may use (DeepSeek-V3: 4)")] = 1,
    profile: Annotated[str, typer.Option(help="settings of switches and NICs, as for simulate")] = "rocev2",
    adaptive: Annotated[bool, typer.Option(help="adaptive routing, and NICs that take packets out of order")] = False,
    seed: Annotated[int, typer.Option(help="of drawn tokens and of the run")] = 0,
    json_to: Annotated[
        str | None, typer.Option("--json", help="write the numbers to a file, or - to print them")
    ] = None,
) -> None:
    """Simulate the node leg all at once, rotated, staggered and paced; say which is fastest and by how much."""
    from dataclasses import replace

    from rich.table import Table

    from bywash.fabric.files import TopologyFile, build_topology, parse_short
    from bywash.fabric.profiles import profile as named
    from bywash.planner import Compute, Method, Router, RowFormat, Wire, layer_bytes, round_trip_us
    from bywash.planner.node_schedules import fastest, schedule_costs

    writable(json_to, "--json", or_stdout=True)
    settings = named(profile)
    fabric = build_topology(checked(TopologyFile, parse_short(topology, "--topology")))
    router = Router(top_k=topk, groups=groups, top_groups=top_groups)
    choices = token_choices(Request(
        source=trace, ranks=fabric.hosts, tokens=tokens, step=step, phase=phase, layers=layers, router=router, seed=seed
    ))  # fmt: skip
    method = Method(gpus_per_server=gpus_per_server_of(fabric), rows="per-node", path="hierarchical")
    row = RowFormat(hidden=hidden, dispatch=dispatch, combine=combine)
    exchanges = layer_bytes(choices, placements_of(choices, placement), method, row)
    wire = Wire(topology=fabric, frame=settings.frame, rtt_us=round_trip_us(fabric, settings.switch.latency_ns))
    if adaptive:
        settings = replace(settings, nic=replace(settings.nic, out_of_order=True))
    compute = Compute(attention_us=attention_us, experts_us=experts_us)
    costs = schedule_costs(exchanges, wire, settings, compute=compute, adaptive=adaptive, seed=seed)
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
        typer.echo(f"{fabric.describe()}; {choices.note}; simulated, dispatch and combine of {len(exchanges)} layers")
        stdout_console().print(table)
        typer.echo(f"fastest: {best.schedule}, {why}; with the exchange: --node-schedule {best.schedule}")
