"""`bywash fabric tune`: choose ECN, PFC and DCQCN parameters by simulating the user's own traffic.

Thin: turns options into cases, calls `bywash.fabric.tune`, prints, and writes the values file that `emit` reads. A
routing trace becomes one case a layer through `bywash.planner`. Heavy imports are inside. Registered by
`bywash.cli.fabric`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from bywash.cli.fabric_config import Json, PgLookup
from bywash.cli.output import STDOUT, apart, printing, replaceable, stdout_console, writable, write_json
from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from bywash.fabric.config.plan import FabricPlan
    from bywash.fabric.topology import Topology
    from bywash.fabric.tune import Case
    from bywash.planner import TokenChoices

_CASES = 6
"""Searched on, and as many held out, when there is no more traffic than that."""
_MOST_LAYERS = 24
_MOST_JOBS = 256


def register(app: typer.Typer) -> None:
    """Add the command to the group `bywash fabric`."""
    app.command("tune")(tune)


def tune(
    values: Annotated[Path, typer.Argument(help="values file: the fabric, as for emit")],
    out: Annotated[Path | None, typer.Option(help="values file to write, for emit; without it only print")] = None,
    trace: Annotated[
        str | None, typer.Option(help="routing trace, shipped trace, or expert counts in JSON, as for traffic")
    ] = None,
    tokens: Annotated[int, typer.Option(help="with --trace: tokens per rank, drawn from it")] = 1024,
    layers: Annotated[str, typer.Option(help="with --trace: layers, with commas between; default: up to 24")] = "",
    topk: Annotated[int, typer.Option(help="with counts: experts per token")] = 8,
    groups: Annotated[int, typer.Option(help="with counts: groups of experts (DeepSeek-V3: 8)")] = 1,
    top_groups: Annotated[int, typer.Option(help="with counts: groups a token may use (DeepSeek-V3: 4)")] = 1,
    hidden: Annotated[int, typer.Option(help="with --trace: hidden size")] = 7168,
    traffic: Annotated[
        list[str] | None, typer.Option(help="a pattern such as alltoall:bytes=1000000; repeat for several cases")
    ] = None,
    scenario: Annotated[
        list[Path] | None, typer.Option(help="a scenario file, for its traffic; repeat for several cases")
    ] = None,
    pause_budget: Annotated[float, typer.Option(help="largest share of port time spent paused, 0 to 1")] = 0.001,
    sending: Annotated[
        bool, typer.Option("--sending", help="also choose how senders send: messages under way, their pace")
    ] = False,
    budget: Annotated[int, typer.Option(help="simulations of the search, about")] = 120,
    jobs: Annotated[int | None, typer.Option(help="processes; default: one for each core")] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same result")] = 0,
    pg_lookup: PgLookup = None,
    json_to: Json = None,
) -> None:
    """Search parameters on some of the traffic, judge them on the rest, and write the values file that emit reads."""
    import os

    from bywash.cli.fabric_config import plan_from
    from bywash.fabric.files import read_yaml
    from bywash.fabric.tune import Effort, tuning_json, tuning_text, values_text
    from bywash.fabric.tune import tune as run

    if jobs is not None and not 1 <= jobs <= _MOST_JOBS:
        raise ConfigError(f"--jobs {jobs}: must be 1 to {_MOST_JOBS}")
    writable(json_to, "--json", or_stdout=True)
    replaceable(out, "--out")
    apart({"--json": json_to, "--out": out})
    effort = Effort(
        budget=budget, seed=seed, jobs=jobs or os.cpu_count() or 1, pause_budget=pause_budget, sending=sending
    )
    plan = plan_from(values, pg_lookup)
    if trace is not None and not (traffic or scenario):
        wanted = {"tokens": tokens, "layers": layers, "topk": topk, "groups": groups, "top_groups": top_groups}
        to_search, to_judge = _trace_cases(plan, trace, hidden, seed, **cast(Any, wanted))
    elif trace is None:
        to_search, to_judge = _pattern_cases(plan, values, traffic or [], scenario or [])
    else:
        raise ConfigError("fabric tune: give --trace, or --traffic and --scenario, not both")
    with _progress() as report:
        tuning = run(plan, to_search, to_judge, effort, report=report)
    text = values_text(read_yaml(values), tuning)
    _check(text, values, pg_lookup)
    if out is not None:
        _write(out, text)
    if json_to is not None:
        write_json(json_to, tuning_json(tuning))
    if json_to != STDOUT:
        _print([plan.topology.describe(), *tuning_text(tuning)], out)


def _trace_cases(
    plan: "FabricPlan", source: str, hidden: int, seed: int, **wanted: Any
) -> "tuple[list[Case], list[Case]]":
    """A case for each layer and draw of tokens. Even layers are searched on, odd ones held out; with fewer than four
    layers, all of them are in both, with other tokens drawn."""
    from bywash.cli.moe_exchange import Request, gpus_per_server_of, token_choices
    from bywash.planner import Method, Router, RowFormat

    router = Router(top_k=wanted["topk"], groups=wanted["groups"], top_groups=wanted["top_groups"])
    method, row = Method(gpus_per_server=gpus_per_server_of(plan.topology)), RowFormat(hidden=hidden)
    layers = wanted["layers"] or _all_layers(source)

    def drawn(draw: int) -> "list[Case]":
        request = Request(
            source=source, tokens=wanted["tokens"], step=0, phase=None, layers=layers,
            router=router, seed=1000 * seed + draw,
        )  # fmt: skip
        return _layer_cases(
            plan.topology, token_choices(request, plan.topology.hosts), layers.split(","), method, row, draw
        )

    first = drawn(0)
    if len(first) >= 4:
        draws = -(-2 * _CASES // len(first))
        many = [drawn(draw) if draw else first for draw in range(draws)]
        return [case for one in many for case in one[::2]], [case for one in many for case in one[1::2]]
    draws = -(-_CASES // len(first))
    return (
        [case for draw in range(draws) for case in (drawn(draw) if draw else first)],
        [case for draw in range(draws, 2 * draws) for case in drawn(draw)],
    )


def _all_layers(source: str) -> str:
    """Numbers of the layers of a trace, at most 24, spread evenly."""
    from bywash.routing import SHIPPED_TRACES, RoutingTrace, load_counts, shipped_trace

    if source.endswith(".json"):
        known = load_counts(Path(source))[0]
    elif source in SHIPPED_TRACES and not Path(source).exists():
        known = shipped_trace(source).layers
    else:
        known = RoutingTrace.load(source).layers
    count = min(_MOST_LAYERS, len(known))
    places = dict.fromkeys(i * (len(known) - 1) // max(1, count - 1) for i in range(count))
    return ",".join(str(known[place]) for place in places)


def _layer_cases(
    topology: "Topology", choices: "TokenChoices", names: list[str], method: Any, row: Any, draw: int
) -> "list[Case]":
    from bywash.balance import Placement
    from bywash.fabric.profiles import profile
    from bywash.fabric.tune import Case
    from bywash.planner import Compute, Wire, layer_bytes, moe_flows, round_trip_us

    wire = Wire(topology=topology, frame=profile("rocev2").frame, rtt_us=round_trip_us(topology, 0.0))
    exchanges = layer_bytes(choices, [Placement.equal(choices.num_experts, choices.ranks)], method, row)
    return [
        Case(
            name=f"layer {name}" + (f", draw {draw}" if draw else ""),
            flows=moe_flows([one], wire, schedule="at-once", compute=Compute()),
            seed=draw * len(names) + place,
        )
        for place, (name, one) in enumerate(zip(names, exchanges))
    ]


def _pattern_cases(
    plan: "FabricPlan", values: Path, traffic: list[str], scenarios: list[Path]
) -> "tuple[list[Case], list[Case]]":
    """Four patterns or more: every other one is held out. Fewer: all are in both, under other seeds."""
    from bywash.fabric.tune import Case

    sources = [(text, _pattern(plan, values, text)) for text in traffic]
    sources += [(str(path), _scenario_flows(plan.topology, path)) for path in scenarios]
    if not sources:
        raise ConfigError("fabric tune: give traffic with --trace, --traffic or --scenario")
    cases = [Case(name=name, flows=flows, seed=i) for i, (name, flows) in enumerate(sources)]
    if len(cases) >= 4:
        return cases[::2], cases[1::2]
    seeds = range(2 * -(-_CASES // len(cases)))
    many = [
        Case(name=f"{one.name}, seed {seed}", flows=one.flows, seed=seed * len(cases) + one.seed)
        for seed in seeds
        for one in cases
    ]
    return many[: len(many) // 2], many[len(many) // 2 :]


def _pattern(plan: "FabricPlan", values: Path, text: str) -> Any:
    """The flows of a pattern in short form, on the topology of the values file."""
    from bywash.fabric.files import parse_scenario, parse_short
    from bywash.fabric.scenario import MAX_BUFFER_BYTES

    topology = plan.values.topology.model_dump(exclude_defaults=True)
    if "path" in topology:
        topology["path"] = str(values.parent / topology["path"])
    data = {"topology": topology, "traffic": [parse_short(text, "--traffic")], "profile": "rocev2"}
    try:
        return parse_scenario(data | {"switch": {"buffer_bytes": MAX_BUFFER_BYTES}}).flows
    except ConfigError as error:
        raise ConfigError(f"--traffic {text}: {error}") from error


def _scenario_flows(topology: "Topology", path: Path) -> Any:
    from bywash.fabric.files import load_scenario

    flows, hosts = (one := load_scenario(path)).flows, one.topology.hosts
    if hosts != topology.hosts:
        raise ConfigError(f"--scenario {path}: has {hosts} hosts, the values file {topology.hosts}; they must agree")
    return flows


def _check(text: str, values: Path, pg_lookup: Path | None) -> None:
    """Refuse to hand out a values file that `emit` would not take."""
    import yaml

    from bywash.cli.fabric_config import lookup_table
    from bywash.fabric.config.audit import audit
    from bywash.fabric.config.emit import sonic_configs
    from bywash.fabric.config.plan import make_plan
    from bywash.fabric.config.values import parse_values

    table = lookup_table(pg_lookup)
    plan = make_plan(*parse_values(yaml.safe_load(text), values.parent), table)
    findings = audit(sonic_configs(plan), {}, {}, plan=plan, table=table)
    if findings:
        raise BywashError(
            "fabric tune: what was found does not pass the audit:\n  " + "\n  ".join(map(str, findings[:3]))
        )


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write it: {error.strerror or error}") from error


def _print(lines: list[str], out: Path | None) -> None:
    with printing():
        console = stdout_console()
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if out is not None:
            console.print(f"wrote {out}; next: bywash fabric emit {out} --out DIR", highlight=False, markup=False)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tune: simulations", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
