"""`bywash fabric traffic`: from a routing trace to a scenario that `bywash fabric simulate` runs.

Thin: reads options, calls `bywash.planner`, writes two files (the scenario in YAML, its messages in CSV beside it) and
prints what they hold. Heavy imports are inside. Registered by `bywash.cli.fabric`.
"""

from pathlib import Path
from typing import Annotated, Any, cast

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
    MoeExchange,
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
from bywash.cli.output import printing, replaceable
from bywash.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command to the group `bywash fabric`."""
    app.command("traffic")(traffic)


def traffic(
    trace: Trace,
    out: Annotated[Path, typer.Option(help="the scenario to write (.yaml); messages go into a .csv beside it")],
    topology: TopologyText = CLUSTER,
    tokens: Tokens = None,
    step: StepNumber = 0,
    phase: Phase = None,
    layers: Layers = "",
    rows: Annotated[str, typer.Option(help="a row is sent per-expert, per-rank or per-node")] = "per-rank",
    path: Annotated[str, typer.Option(help="flat, or hierarchical: on one rail, the rest over NVLink")] = "flat",
    schedule: Annotated[
        str, typer.Option(help="at-once, rotated, staggered, paced, by-counts or receiver-granted")
    ] = "at-once",
    placement: PlacementKind = "in-order",
    hidden: Hidden = 7168,
    dispatch: Dispatch = "fp8",
    combine: Combine = "bf16",
    attention_us: AttentionUs = 0.0,
    experts_us: ExpertsUs = 0.0,
    topk: TopK = 8,
    groups: Groups = 1,
    top_groups: TopGroups = 1,
    profile: Annotated[str, typer.Option(help="settings of the scenario, as for simulate")] = "rocev2",
    seed: Annotated[int, typer.Option(help="of drawn tokens")] = 0,
) -> None:
    """Turn a routing trace into a scenario: dispatch and combine of some layers, message by message."""
    from bywash.fabric.files import parse_short
    from bywash.planner import Compute, Router, RowFormat, moe_flows, nic_for

    replaceable(out, "--out")
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out}: must end in .yaml")
    replaceable(out.with_suffix(".csv"), "--out")
    section = parse_short(topology, "--topology")
    router = Router(top_k=topk, groups=groups, top_groups=top_groups)
    request = Request(source=trace, tokens=tokens, step=step, phase=phase, layers=layers, router=router, seed=seed)
    row = RowFormat(hidden=hidden, dispatch=dispatch, combine=combine)
    exchange = moe_exchange(request, section, profile, placement=placement, rows=rows, path=path, row=row)
    compute = Compute(attention_us=attention_us, experts_us=experts_us)
    barrier = "server" if path == "hierarchical" else "host"
    flows = moe_flows(
        exchange.layers, exchange.wire, schedule=cast(Any, schedule), compute=compute, barrier=cast(Any, barrier)
    )
    data: dict[str, Any] = {"name": out.stem, "profile": profile, "topology": section, "barrier": barrier}
    gaps_us = [attention_us, experts_us] * len(exchange.layers)
    data["traffic"] = [{"kind": "flows", "path": out.with_suffix(".csv").name, "gaps_us": gaps_us[: flows.phases]}]
    nic = nic_for(cast(Any, schedule), exchange.settings.nic)
    if nic != exchange.settings.nic:
        data["nic"] = {"control": nic.control, "window_bytes": nic.window_bytes}
    _write(out, data, flows)
    with printing():
        _print(exchange, out)


def _write(out: Path, data: dict[str, Any], flows: Any) -> None:
    import yaml

    from bywash.fabric.flow_file import save_flows

    try:
        save_flows(flows, out.with_suffix(".csv"))
        out.write_text(yaml.safe_dump(data, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write it: {error.strerror or error}") from error


def _print(exchange: MoeExchange, out: Path) -> None:
    choices, wire = exchange.choices, exchange.wire
    typer.echo(f"{wire.topology.describe()}, round trip {wire.rtt_us:.2f} us without queues")
    typer.echo(f"{choices.num_experts} experts on {choices.ranks} ranks; {choices.note}")
    for number, layer in enumerate(exchange.layers):
        for name, bytes_HH in (("dispatch", layer.dispatch_HH), ("combine", layer.combine_HH)):
            out_H, in_H = bytes_HH.sum(axis=1), bytes_HH.sum(axis=0)
            typer.echo(
                f"exchange {number} {name:<8} {bytes_HH.sum() / 1e6:10,.1f} MB over the fabric; busiest NIC sends "
                f"{out_H.max() / max(1e-9, out_H.mean()):.2f}x, receives {in_H.max() / max(1e-9, in_H.mean()):.2f}x "
                f"the mean; not faster than {wire.bound_us(bytes_HH):,.1f} us"
            )
    rows = sum(layer.network_rows for layer in exchange.layers)
    local = sum(layer.local_rows for layer in exchange.layers)
    typer.echo(f"{rows:,} rows over the fabric, {local:,} within servers (NVLink, which takes no time here)")
    typer.echo(f"wrote {out} and {out.with_suffix('.csv').name}; next: bywash fabric simulate {out}")
