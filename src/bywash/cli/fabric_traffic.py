"""`bywash fabric traffic`: from a routing trace to a scenario that `bywash fabric simulate` runs.

Thin: reads options, calls `bywash.planner`, writes two files (the scenario in YAML, its messages in CSV beside it) and
prints what they hold. Heavy imports are inside. Registered by `bywash.cli.fabric`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from bywash.cli.limits import check_memory
from bywash.cli.output import printing, replaceable
from bywash.errors import ConfigError

if TYPE_CHECKING:
    from bywash.balance import Placement
    from bywash.fabric import Topology
    from bywash.planner import LayerBytes, Router, TokenChoices, Wire
    from bywash.routing import RoutingTrace

CLUSTER = "rail-optimised:servers=16,nics_per_server=8,spines=2,links_per_pair=8,gbps=400,delay_ns=100"
_LAYERS = 3
_MAX_TOKENS = 1 << 20
_BYTES_PER_CHOICE = 40  # ids, homes, keys and masks of one (token, expert) while rows are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where the choices come from, as given."""

    source: str
    ranks: int
    tokens: int | None
    step: int
    phase: str | None
    layers: str
    router: "Router"
    seed: int


def register(app: typer.Typer) -> None:
    """Add the command to the group `bywash fabric`."""
    app.command("traffic")(traffic)


def traffic(
    trace: Annotated[
        str, typer.Option(help="a routing trace, a shipped one (prose, code, tables, mixed), or expert counts in JSON")
    ],
    out: Annotated[Path, typer.Option(help="the scenario to write (.yaml); messages go into a .csv beside it")],
    topology: Annotated[str, typer.Option(help="as for simulate; one rank for each host (NIC)")] = CLUSTER,
    tokens: Annotated[
        int | None, typer.Option(help="tokens per rank, drawn from the trace; default: one step as recorded")
    ] = None,
    step: Annotated[int, typer.Option(help="the recorded step to take, without --tokens")] = 0,
    phase: Annotated[str | None, typer.Option(help="with --tokens: draw from prefill or decode steps only")] = None,
    layers: Annotated[str, typer.Option(help="layers, with commas between; default: up to 3, spread evenly")] = "",
    rows: Annotated[str, typer.Option(help="a row is sent per-expert, per-rank or per-node")] = "per-rank",
    path: Annotated[str, typer.Option(help="flat, or hierarchical: on one rail, the rest over NVLink")] = "flat",
    schedule: Annotated[str, typer.Option(help="at-once, rotated, staggered, paced or receiver-granted")] = "at-once",
    placement: Annotated[str, typer.Option(help="experts on ranks: in-order, or balanced by their load")] = "in-order",
    hidden: Annotated[int, typer.Option(help="hidden size")] = 7168,
    dispatch: Annotated[str, typer.Option(help="rows sent out: fp8, bf16 or fp32")] = "fp8",
    combine: Annotated[str, typer.Option(help="rows sent back: fp8, bf16 or fp32")] = "bf16",
    attention_us: Annotated[float, typer.Option(help="computing before each dispatch")] = 0.0,
    experts_us: Annotated[float, typer.Option(help="computing before each combine")] = 0.0,
    topk: Annotated[int, typer.Option(help="with counts: experts per token")] = 8,
    groups: Annotated[int, typer.Option(help="with counts: groups of experts (DeepSeek-V3: 8)")] = 1,
    top_groups: Annotated[int, typer.Option(help="with counts: groups a token may use (DeepSeek-V3: 4)")] = 1,
    profile: Annotated[str, typer.Option(help="settings of the scenario, as for simulate")] = "rocev2",
    seed: Annotated[int, typer.Option(help="of drawn tokens")] = 0,
) -> None:
    """Turn a routing trace into a scenario: dispatch and combine of some layers, message by message."""
    from bywash.fabric.files import TopologyFile, build_topology, parse_short
    from bywash.fabric.profiles import profile as named
    from bywash.planner import Compute, Method, Router, RowFormat, Wire, layer_bytes, moe_flows, nic_for, round_trip_us

    replaceable(out, "--out")
    if out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {out}: must end in .yaml")
    replaceable(out.with_suffix(".csv"), "--out")
    settings, section = named(profile), parse_short(topology, "--topology")
    fabric = build_topology(checked(TopologyFile, section))
    router = Router(top_k=topk, groups=groups, top_groups=top_groups)
    choices = token_choices(Request(
        source=trace, ranks=fabric.hosts, tokens=tokens, step=step, phase=phase, layers=layers, router=router, seed=seed
    ))  # fmt: skip
    method = Method(gpus_per_server=gpus_per_server_of(fabric), rows=cast(Any, rows), path=cast(Any, path))
    row = RowFormat(hidden=hidden, dispatch=dispatch, combine=combine)
    exchanges = layer_bytes(choices, placements_of(choices, placement), method, row)
    compute = Compute(attention_us=attention_us, experts_us=experts_us)
    wire = Wire(topology=fabric, frame=settings.frame, rtt_us=round_trip_us(fabric, settings.switch.latency_ns))
    barrier = "server" if path == "hierarchical" else "host"
    flows = moe_flows(exchanges, wire, schedule=cast(Any, schedule), compute=compute, barrier=cast(Any, barrier))
    data: dict[str, Any] = {"name": out.stem, "profile": profile, "topology": section, "barrier": barrier}
    gaps_us = [attention_us, experts_us] * len(exchanges)
    data["traffic"] = [{"kind": "flows", "path": out.with_suffix(".csv").name, "gaps_us": gaps_us[: flows.phases]}]
    nic = nic_for(cast(Any, schedule), settings.nic)
    if nic != settings.nic:
        data["nic"] = {"control": nic.control, "window_bytes": nic.window_bytes}
    _write(out, data, flows)
    with printing():
        _print(choices, exchanges, wire, out)


def checked(model: Any, section: dict[str, Any]) -> Any:
    """A section of a file or option as its model, or a `ConfigError` with the field's path."""
    from pydantic import ValidationError

    from bywash.fabric.files import as_config_error

    try:
        return model.model_validate(section)
    except ValidationError as error:
        raise ConfigError(f"topology.{as_config_error(error)}") from error


def gpus_per_server_of(topology: "Topology") -> int:
    """Ranks of a server; all servers must have as many, numbered one after the other."""
    servers = [node.server for node in topology.nodes[: topology.hosts]]
    gpus = servers.count(servers[0])
    if any(server != servers[0] + host // gpus for host, server in enumerate(servers)):
        raise ConfigError("--topology: hosts of a server must have consecutive numbers, as many on each server")
    return gpus


def token_choices(request: Request) -> "TokenChoices":
    """A recorded step, tokens drawn from a trace, or tokens drawn to match counts."""
    from bywash.planner import drawn_choices, recorded_choices, resampled_choices
    from bywash.routing import DECODE, PREFILL, SHIPPED_TRACES, RoutingTrace, load_counts, shipped_trace

    if request.tokens is not None and not 1 <= request.tokens <= _MAX_TOKENS:
        raise ConfigError(f"--tokens {request.tokens}: must be 1 to {_MAX_TOKENS:,}")
    if request.phase not in (None, "prefill", "decode"):
        raise ConfigError(f"--phase {request.phase!r}: must be prefill or decode")
    if request.source.endswith(".json"):
        numbers, counts_LE = load_counts(Path(request.source))
        if request.tokens is None:
            raise ConfigError(f"--trace {request.source}: counts say nothing of steps; give --tokens per rank")
        chosen = _pick_layers(request.layers, numbers)
        _check_memory(request, request.tokens * request.ranks, len(chosen), request.router.top_k)
        return drawn_choices(
            counts_LE[chosen], request.router, ranks=request.ranks, tokens=request.tokens, seed=request.seed,
            note=Path(request.source).name,
        )  # fmt: skip
    shipped = request.source in SHIPPED_TRACES and not Path(request.source).exists()
    trace = shipped_trace(request.source) if shipped else RoutingTrace.load(request.source)
    trace = _with_layers(trace, _pick_layers(request.layers, trace.layers))
    if request.tokens is None:
        return recorded_choices(trace, request.step, request.ranks)
    _check_memory(request, request.tokens * request.ranks, len(trace.layers), trace.top_k)
    number = {"prefill": PREFILL, "decode": DECODE}.get(request.phase or "")
    return resampled_choices(trace, ranks=request.ranks, tokens=request.tokens, seed=request.seed, phase=number)


def _check_memory(request: Request, tokens: int, layers: int, top_k: int) -> None:
    check_memory(
        tokens * top_k * (_BYTES_PER_CHOICE + 2 * layers),
        f"--tokens {request.tokens} x {request.ranks} ranks x top-{top_k} choices in {layers} layers",
        "lower --tokens or --layers",
    )


def _with_layers(trace: "RoutingTrace", chosen: list[int]) -> "RoutingTrace":
    from dataclasses import replace

    ids_NLK = trace.ids_NLK[:, chosen]
    return replace(trace, ids_NLK=ids_NLK, layers=tuple(trace.layers[i] for i in chosen), weights_NLK=None)


def _pick_layers(text: str, known: tuple[int, ...]) -> list[int]:
    """Places of the wanted layers among those there are."""
    if not text:
        count = min(_LAYERS, len(known))
        return [i * (len(known) - 1) // max(1, count - 1) for i in range(count)]
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--layers {text!r}: must be layer numbers with commas between") from error
    for layer in wanted:
        if layer not in known:
            raise ConfigError(f"--layers {layer}: there are layers {', '.join(map(str, known))}")
    if wanted != sorted(set(wanted)):
        raise ConfigError(f"--layers {text!r}: must rise")
    return [known.index(layer) for layer in wanted]


def placements_of(choices: "TokenChoices", kind: str) -> "list[Placement]":
    """One placement for all layers (`in-order`), or one for each by its load (`balanced`)."""
    from bywash.balance import Placement

    if kind == "in-order":
        return [Placement.equal(choices.num_experts, choices.ranks)]
    if kind == "balanced":
        return Placement.of_layers(choices.counts_LE(), choices.ranks)
    raise ConfigError(f"--placement {kind!r}: must be in-order or balanced")


def _write(out: Path, data: dict[str, Any], flows: Any) -> None:
    import yaml

    from bywash.fabric.flow_file import save_flows

    try:
        save_flows(flows, out.with_suffix(".csv"))
        out.write_text(yaml.safe_dump(data, sort_keys=False))
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write it: {error.strerror or error}") from error


def _print(choices: "TokenChoices", exchanges: "tuple[LayerBytes, ...]", wire: "Wire", out: Path) -> None:
    typer.echo(f"{wire.topology.describe()}, round trip {wire.rtt_us:.2f} us without queues")
    typer.echo(f"{choices.num_experts} experts on {choices.ranks} ranks; {choices.note}")
    for number, layer in enumerate(exchanges):
        for name, bytes_HH in (("dispatch", layer.dispatch_HH), ("combine", layer.combine_HH)):
            out_H, in_H = bytes_HH.sum(axis=1), bytes_HH.sum(axis=0)
            typer.echo(
                f"exchange {number} {name:<8} {bytes_HH.sum() / 1e6:10,.1f} MB over the fabric; busiest NIC sends "
                f"{out_H.max() / max(1e-9, out_H.mean()):.2f}x, receives {in_H.max() / max(1e-9, in_H.mean()):.2f}x "
                f"the mean; not faster than {wire.bound_us(bytes_HH):,.1f} us"
            )
    rows = sum(layer.network_rows for layer in exchanges)
    local = sum(layer.local_rows for layer in exchanges)
    typer.echo(f"{rows:,} rows over the fabric, {local:,} within servers (NVLink, which takes no time here)")
    typer.echo(f"wrote {out} and {out.with_suffix('.csv').name}; next: bywash fabric simulate {out}")
