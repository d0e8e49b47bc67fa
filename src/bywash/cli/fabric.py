"""`bywash fabric`: simulate a RoCEv2 fabric, and measure the simulator.

Thin: reads options, calls `bywash.fabric`, prints. Everything heavy is imported inside the commands, so that `--help`
answers at once. Errors leave as `BywashError`; `bywash.cli.main` prints them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bywash.cli import fabric_config, fabric_schedules, fabric_traffic, fabric_tune
from bywash.cli.output import STDOUT, printing, stdout_console, writable, write_json
from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from bywash.fabric import Result, Scenario
    from bywash.fabric.bench import BenchRow

app = typer.Typer(no_args_is_help=True, help="Simulate a RoCEv2 fabric packet by packet; prove, configure, audit one.")

_SECTIONS = ("switch", "nic", "routing", "frame", "run")
_WATCHED_PORTS = 5
DEADLOCKED = 3


@app.command()
def simulate(
    scenario: Annotated[str | None, typer.Argument(help="scenario file (YAML); options replace parts of it")] = None,
    topology: Annotated[
        str | None, typer.Option(help="such as leaf-spine:hosts=32,leaves=4,spines=8,gbps=100,delay_ns=1000")
    ] = None,
    traffic: Annotated[
        list[str] | None, typer.Option(help="such as alltoall:bytes=256000 or incast:receiver=0,bytes=1000000; repeat")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="default, rocev2, ns3-hpcc or dcqcn-paper")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="one field, such as routing.mode=adaptive; repeat")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same run")] = None,
    json_to: Annotated[
        str | None, typer.Option("--json", help="write the numbers to a file, or - to print them")
    ] = None,
) -> None:
    """Run a scenario to its verdict. Ends with code 3 when the fabric deadlocks."""
    from bywash.fabric import simulate as run

    writable(json_to, "--json", or_stdout=True)
    wanted = _scenario(scenario, topology, traffic or [], profile, change or [], seed)
    with _progress(wanted.name) as report:
        result = run(wanted, report)
    if json_to is not None:
        write_json(json_to, result.summary() | {"busiest": _busiest(result)})
    if json_to != STDOUT:
        with printing():
            _print_result(result)
    if result.summary()["deadlock"]:
        raise typer.Exit(DEADLOCKED)


def _scenario(
    path: str | None, topology: str | None, traffic: list[str], profile: str | None, change: list[str], seed: int | None
) -> "Scenario":
    from bywash.fabric.files import load_scenario, parse_scenario, parse_short

    data: dict[str, Any] = {}
    if topology is not None:
        data["topology"] = parse_short(topology, "--topology")
    if traffic:
        data["traffic"] = [parse_short(one, "--traffic") for one in traffic]
    if profile is not None:
        data["profile"] = profile
    changes = list(change) + ([f"run.seed={seed}"] if seed is not None else [])
    if path is None:
        if topology is None or not traffic:
            raise ConfigError("fabric simulate: give a scenario file, or --topology and --traffic")
        return parse_scenario(_changed(data, changes))
    if not changes:
        return load_scenario(path, data)
    from pathlib import Path

    from bywash.fabric.files import read_yaml

    return parse_scenario(_changed(read_yaml(path) | data, changes), Path(path).parent)


def _changed(data: dict[str, Any], changes: list[str]) -> dict[str, Any]:
    """Apply `section.field=value` to plain data."""
    import copy

    import yaml

    data = copy.deepcopy(data)
    for one in changes:
        name, equals, value = one.partition("=")
        parts = name.split(".")
        if not equals or parts[0] not in _SECTIONS or len(parts) < 2:
            raise ConfigError(f"--set {one!r}: wants SECTION.FIELD=VALUE, with a section of {', '.join(_SECTIONS)}")
        place = data
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {one!r}: {part} holds no fields")
        try:
            place[parts[-1]] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {one!r}: {value!r} is no value") from error
    return data


@contextmanager
def _progress(name: str) -> Iterator[Callable[[float, float], None]]:
    """A bar on stderr, where that is a terminal: flows done, simulated time, time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% of flows, {task.fields[simulated]:,.0f} us simulated"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=1.0, simulated=0.0)
        yield lambda simulated_us, share: bar.update(task, completed=share, simulated=simulated_us)


def _busiest(result: "Result") -> list[dict[str, Any]]:
    """The ports with the largest queues: what an operator looks at next."""
    peak_P = result.peak_bytes_PQ[:, 1:].max(axis=1)
    use_P = result.link_use_P()
    order = sorted(range(peak_P.size), key=lambda p: (-int(peak_P[p]), p))[:_WATCHED_PORTS]
    return [
        {
            "port": result.scenario.topology.port_name(p),
            "peak_queue_bytes": int(peak_P[p]),
            "link_use": round(float(use_P[p]), 4),
            "paused_us": round(float(result.paused_ps_PQ[p].sum()) / 1e6, 3),
            "marks": int(result.marks_PQ[p].sum()),
            "drops": int(result.drops_PQ[p].sum()),
        }
        for p in order
        if peak_P[p] > 0
    ]


def _print_result(result: "Result") -> None:
    from rich.table import Table

    numbers = result.summary()
    console = stdout_console()
    console.print(f"[bold]{numbers['topology']}[/bold]", highlight=False, soft_wrap=True)
    colour = "green" if result.verdict == "completed" else "red"
    console.print(
        f"[{colour}]{result.verdict}[/{colour}]: {numbers['flows_finished']:,} of {numbers['flows']:,} flows, "
        f"{numbers['simulated_us']:,.1f} us simulated",
        highlight=False,
    )
    if result.cycle:
        console.print("deadlocked: " + " waits for ".join(result.cycle), highlight=False)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "mean", "p50", "p99", "max"):
        table.add_column(name, justify="right")
    for title, spread in (("completion us", numbers["fct_us"]), ("slow-down", numbers["slowdown"])):
        if spread is not None:
            table.add_row(title, *(f"{spread[key]:,.2f}" for key in ("mean", "p50", "p99", "max")))
    console.print(table)
    console.print(
        f"pauses {numbers['pauses']:,} ({numbers['pause_us']:,.1f} us of ports held), ECN marks "
        f"{numbers['ecn_marks']:,}, CNPs {numbers['cnps']:,}, drops {numbers['drops']:,}, "
        f"sent again {numbers['retransmitted']:,}, early {numbers['ooo_packets']:,} (by up to "
        f"{numbers['ooo_distance']:,})",
        highlight=False,
    )
    if "watchdog" in numbers:
        console.print(f"[yellow]PFC watchdog acted; {numbers['watchdog']}[/yellow]", highlight=False)
    _print_ports(console, result)
    console.print(
        f"{numbers['packet_hops']:,} packet-hops in {numbers['seconds']:.3f} s of CPU "
        f"({(numbers['packet_hops_per_s'] or 0) / 1e6:.2f} M/s), {numbers['memory_bytes'] / 1e6:.1f} MB",
        highlight=False,
    )


def _print_ports(console: Any, result: "Result") -> None:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("largest queues", "peak KB", "use", "paused us", "marks", "drops"):
        table.add_column(name, justify="left" if name == "largest queues" else "right")
    for row in _busiest(result):
        table.add_row(
            row["port"],
            f"{row['peak_queue_bytes'] / 1e3:,.1f}",
            f"{row['link_use']:.0%}",
            f"{row['paused_us']:,.1f}",
            f"{row['marks']:,}",
            f"{row['drops']:,}",
        )
    console.print(table)


_COLUMNS = "{:<10} {:<5} {:>12} {:>12} {:>9} {:>9} {:>9} {:>8} {:>9}  {}"


@app.command()
def bench(
    workloads: Annotated[str, typer.Option(help="inc32, a2a32, perm128, a2a128, with commas between; or none")] = (
        "inc32,a2a32,perm128,a2a128"
    ),
    features: Annotated[
        str, typer.Option(help="lean (one lossless class), full (everything on), or both")
    ] = "lean,full",
    rounds: Annotated[int, typer.Option(help="runs of each; the fastest counts")] = 5,
    grow: Annotated[bool, typer.Option("--grow", help="also all-to-alls of 32 to 512 hosts")] = False,
    json_to: Annotated[str | None, typer.Option("--json", help="write the rows to a file, or - to print them")] = None,
) -> None:
    """Time the event loop: packet-hops per second of CPU time, best of several, compile time apart."""
    from bywash.fabric.bench import HOSTS_GROWTH, WORKLOADS, growth, machine, measure

    names = tuple(filter(None, workloads.replace("none", "").split(",")))
    chosen = tuple(features.split(","))
    for flag, given, known in (("--workloads", names, tuple(WORKLOADS)), ("--features", chosen, ("lean", "full"))):
        wrong = [one for one in given if one not in known]
        if wrong:
            raise ConfigError(f"{flag} {wrong[0]!r}: choose from {', '.join(known)}")
    if rounds < 1:
        raise ConfigError(f"--rounds {rounds}: must be at least 1")
    writable(json_to, "--json", or_stdout=True)
    now = machine()
    _say(
        json_to,
        f"# this machine, now: {now['bare_events_per_s'] / 1e6:.1f} M events/s in a bare loop, "
        f"{now['load_256kb_ns']:g} ns a load within 256 kB, {now['load_8mb_ns']:g} ns within 8 MB\n"
        f"# CPU time of the event loop, best of {rounds}",
    )
    _say(
        json_to,
        _COLUMNS.format(
            *["workload", "kind", "packet-hops", "events", "hops/s", "events/s", "ns/hop", "MB", "compile_s", "what"]
        ),
    )
    rows = []
    for row in measure(names, rounds=rounds, features=chosen):
        rows.append(row)
        _say(json_to, _line(row))
    if grow:
        for row in growth(HOSTS_GROWTH, rounds=rounds):
            rows.append(row)
            _say(json_to, _line(row))
    if json_to is not None:
        write_json(json_to, {"rounds": rounds, "machine": now, "rows": [row.as_json() for row in rows]})
    unfinished = [row.workload for row in rows if row.result.verdict != "completed"]
    if unfinished:
        raise BywashError(f"fabric bench: {', '.join(unfinished)} did not complete")


def _line(row: "BenchRow") -> str:
    data = row.as_json()
    return _COLUMNS.format(
        row.workload,
        row.features,
        f"{data['packet_hops']:,}",
        f"{data['events']:,}",
        f"{data['packet_hops_per_s'] / 1e6:.2f} M",
        f"{data['events_per_s'] / 1e6:.2f} M",
        data["ns_per_packet_hop"],
        data["memory_mb"],
        data["compile_s"],
        row.description,
    )


def _say(json_to: str | None, text: str) -> None:
    if json_to == STDOUT:
        print(text, file=sys.stderr, flush=True)
        return
    with printing():
        print(text, flush=True)


fabric_config.register(app)
fabric_traffic.register(app)
fabric_schedules.register(app)
fabric_tune.register(app)
