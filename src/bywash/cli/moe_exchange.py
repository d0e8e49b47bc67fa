"""The MoE traffic that commands of `bywash fabric` simulate: their common options, and from these the exchange.

Knows nothing of schedules or of what is printed. Heavy imports are inside. `fabric_traffic`, `fabric_schedules` and
`fabric_tune` call it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from bywash.cli.limits import check_memory
from bywash.errors import ConfigError

if TYPE_CHECKING:
    from bywash.balance import Placement
    from bywash.fabric import Topology
    from bywash.fabric.profiles import Profile
    from bywash.planner import LayerBytes, Router, RowFormat, TokenChoices, Wire
    from bywash.routing import RoutingTrace

CLUSTER = "rail-optimised:servers=16,nics_per_server=8,spines=2,links_per_pair=8,gbps=400,delay_ns=100"
_LAYERS = 3
_MAX_TOKENS = 1 << 20
_BYTES_PER_CHOICE = 40  # ids, homes, keys and masks of one (token, expert) while rows are counted


Trace = Annotated[
    str, typer.Option(help="a routing trace, a shipped one (prose, code, tables, mixed), or expert counts in JSON")
]
TopologyText = Annotated[str, typer.Option(help="as for simulate; one rank for each host (NIC)")]
Tokens = Annotated[
    int | None, typer.Option(help="tokens per rank, drawn from the trace; default: one step as recorded")
]
StepNumber = Annotated[int, typer.Option(help="the recorded step to take, without --tokens")]
Phase = Annotated[str | None, typer.Option(help="with --tokens: draw from prefill or decode steps only")]
Layers = Annotated[str, typer.Option(help="layers, with commas between; default: up to 3, spread evenly")]
PlacementKind = Annotated[str, typer.Option(help="experts on ranks: in-order, or balanced by their load")]
Hidden = Annotated[int, typer.Option(help="hidden size")]
Dispatch = Annotated[str, typer.Option(help="rows sent out: fp8, bf16 or fp32")]
Combine = Annotated[str, typer.Option(help="rows sent back: fp8, bf16 or fp32")]
AttentionUs = Annotated[float, typer.Option(help="computing before each dispatch")]
ExpertsUs = Annotated[float, typer.Option(help="computing before each combine")]
TopK = Annotated[int, typer.Option(help="with counts: experts per token")]
Groups = Annotated[int, typer.Option(help="with counts: groups of experts (DeepSeek-V3: 8)")]
TopGroups = Annotated[int, typer.Option(help="with counts: groups a token may use (DeepSeek-V3: 4)")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where the choices come from, as given."""

    source: str
    tokens: int | None
    step: int
    phase: str | None
    layers: str
    router: "Router"
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeExchange:
    """What ranks send each other in some layers, on which network, with which settings of switches and NICs."""

    choices: "TokenChoices"
    layers: "tuple[LayerBytes, ...]"
    wire: "Wire"
    settings: "Profile"


def moe_exchange(
    request: Request,
    topology: Mapping[str, Any],
    profile: str,
    *,
    placement: str,
    rows: str,
    path: str,
    row: "RowFormat",
) -> MoeExchange:
    """The exchange that the options ask for. `topology` is a section as in a scenario file, the rest as the options.

    Raises:
        ConfigError: an option is wrong, or the trace does not fit.
    """
    from bywash.fabric.files import TopologyFile, build_topology
    from bywash.fabric.profiles import profile as named
    from bywash.planner import Method, Wire, layer_bytes, round_trip_us

    settings = named(profile)
    fabric = build_topology(_checked(TopologyFile, topology))
    choices = token_choices(request, fabric.hosts)
    method = Method(gpus_per_server=gpus_per_server_of(fabric), rows=cast(Any, rows), path=cast(Any, path))
    layers = layer_bytes(choices, _placements_of(choices, placement), method, row)
    wire = Wire(topology=fabric, frame=settings.frame, rtt_us=round_trip_us(fabric, settings.switch.latency_ns))
    return MoeExchange(choices=choices, layers=layers, wire=wire, settings=settings)


def _checked(model: Any, section: Mapping[str, Any]) -> Any:
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


def token_choices(request: Request, ranks: int) -> "TokenChoices":
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
        _check_memory(request.tokens, ranks, len(chosen), request.router.top_k)
        return drawn_choices(
            counts_LE[chosen], request.router, ranks=ranks, tokens=request.tokens, seed=request.seed,
            note=Path(request.source).name,
        )  # fmt: skip
    shipped = request.source in SHIPPED_TRACES and not Path(request.source).exists()
    trace = shipped_trace(request.source) if shipped else RoutingTrace.load(request.source)
    trace = _with_layers(trace, _pick_layers(request.layers, trace.layers))
    if request.tokens is None:
        return recorded_choices(trace, request.step, ranks)
    _check_memory(request.tokens, ranks, len(trace.layers), trace.top_k)
    number = {"prefill": PREFILL, "decode": DECODE}.get(request.phase or "")
    return resampled_choices(trace, ranks=ranks, tokens=request.tokens, seed=request.seed, phase=number)


def _check_memory(tokens: int, ranks: int, layers: int, top_k: int) -> None:
    check_memory(
        tokens * ranks * top_k * (_BYTES_PER_CHOICE + 2 * layers),
        f"--tokens {tokens} x {ranks} ranks x top-{top_k} choices in {layers} layers",
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


def _placements_of(choices: "TokenChoices", kind: str) -> "list[Placement]":
    """One placement for all layers (`in-order`), or one for each by its load (`balanced`)."""
    from bywash.balance import Placement

    if kind == "in-order":
        return [Placement.equal(choices.num_experts, choices.ranks)]
    if kind == "balanced":
        return Placement.of_layers(choices.counts_LE(), choices.ranks)
    raise ConfigError(f"--placement {kind!r}: must be in-order or balanced")
