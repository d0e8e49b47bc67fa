"""`bywash fabric prove`, `headroom`, `emit` and `audit`: operating a fabric. Registered by `bywash.cli.fabric`.

Thin: reads options, calls `bywash.fabric.prove` and `bywash.fabric.config`, prints. Heavy imports are inside.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bywash.cli.output import STDOUT, printing, stdout_console, writable, write_json
from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from bywash.fabric.config.findings import Finding
    from bywash.fabric.config.headroom import LookupTable
    from bywash.fabric.config.plan import FabricPlan
    from bywash.fabric.config.yang import YangModels
    from bywash.fabric.prove import Cure
    from bywash.fabric.topology import Topology

HAZARD = 3
FOUND = 1

Json = Annotated[str | None, typer.Option("--json", help="write the result to a file, or - to print it")]
PgLookup = Annotated[
    Path | None, typer.Option(help="pg_profile_lookup.ini, or a CSV of such rows: headroom of other ASICs")
]
YangDir = Annotated[Path | None, typer.Option(help="SONiC's directory of YANG models, to validate with libyang")]


def register(app: typer.Typer) -> None:
    """Add the commands to the group `bywash fabric`."""
    for name, command in (("prove", prove), ("headroom", headroom), ("emit", emit), ("audit", audit)):
        app.command(name)(command)


def prove(
    topology: Annotated[str | None, typer.Option(help="such as fat-tree:k=8 or ring:switches=4,hosts=4")] = None,
    values: Annotated[Path | None, typer.Option(help="values file, for its topology")] = None,
    policy: Annotated[str, typer.Option(help="routes: shortest, up-down, or detour (local reroute only)")] = "shortest",
    failures: Annotated[
        str, typer.Option(help="also prove under each single failure: none, links, switches, single")
    ] = "single",
    flow: Annotated[
        list[str] | None, typer.Option(help="host-host pair that sends, such as 0-3; repeat. Default all")
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="prove these paths only, such as host0,sw0,sw1,host1; repeat")
    ] = None,
    cure: Annotated[bool, typer.Option(help="propose and re-prove cures of a cycle")] = True,
    json_to: Json = None,
) -> None:
    """Prove that PFC cannot deadlock on these routes, or name the cycle of buffers and the flows that close it."""
    from bywash.fabric.prove import POLICIES, cures, prove_paths
    from bywash.fabric.prove import prove as run
    from bywash.fabric.prove.report import paths_json, paths_text, proof_json, proof_text

    for flag, given, known in (
        ("--policy", policy, tuple(POLICIES)),
        ("--failures", failures, ("none", "links", "switches", "single")),
    ):
        if given not in known:
            raise ConfigError(f"{flag} {given!r}: choose one of {', '.join(known)}")
    writable(json_to, "--json", or_stdout=True)
    network = _topology(topology, values)
    if path:
        cycle = prove_paths(network, [one.split(",") for one in path])
        _report(json_to, paths_json(network, cycle), paths_text(cycle))
        free = cycle is None
    else:
        pairs = tuple(_pair(network, one) for one in flow) if flow else None
        with _progress("prove") as report:
            proof = run(network, policy, pairs=pairs, failures=failures, progress=report)  # type: ignore[arg-type]
        proposed: tuple[Cure, ...] = ()
        if cure and not proof.deadlock_free:
            with _progress("cures") as report:
                proposed = cures(network, policy, pairs=pairs, failures=failures, progress=report)  # type: ignore[arg-type]
        _report(json_to, proof_json(network, proof, proposed), proof_text(network, proof, proposed))
        free = proof.deadlock_free
    if not free:
        raise typer.Exit(HAZARD)


def _topology(text: str | None, values: Path | None) -> "Topology":
    from bywash.fabric.config.values import load_values, topology_of

    if text is not None and values is None:
        return topology_of(text, "--topology")
    if values is not None and text is None:
        return load_values(values)[1]
    raise ConfigError("fabric prove: give either --topology or --values")


def _pair(network: "Topology", text: str) -> tuple[int, int]:
    ends = text.split("-")
    if len(ends) != 2:
        raise ConfigError(f"--flow {text!r}: wants two hosts, such as 0-3 or host0-host3")
    numbers = [int(end) if end.isdigit() else network.index(end) for end in ends]
    return numbers[0], numbers[1]


def headroom(
    values: Annotated[Path | None, typer.Argument(help="values file: headroom and thresholds of every switch")] = None,
    asic: Annotated[str | None, typer.Option(help="one port instead: sn2700, sn3700, sn4700 or sn5600")] = None,
    gbps: Annotated[int, typer.Option(help="with --asic, its speed")] = 400,
    cable: Annotated[float, typer.Option(help="with --asic, its cable in metres")] = 40.0,
    pg_lookup: PgLookup = None,
    json_to: Json = None,
) -> None:
    """Headroom, pools and ECN thresholds with their arithmetic; or a table of headroom held against the formula."""
    writable(json_to, "--json", or_stdout=True)
    if values is not None:
        from bywash.fabric.config.emit import describe, plan_json

        plan = plan_from(values, pg_lookup)
        _report(json_to, plan_json(plan), describe(plan).splitlines())
    elif asic is not None:
        _one_port(asic, gbps, cable, json_to)
    elif pg_lookup is not None:
        _comparison(pg_lookup, json_to)
    else:
        raise ConfigError(
            "fabric headroom: give a values file, --asic, or --pg-lookup to hold a table against the formula"
        )


def _one_port(name: str, gbps: int, cable: float, json_to: str | None) -> None:
    from bywash.fabric.config.asic import find_asic
    from bywash.fabric.config.headroom import formula, lua

    one = find_asic(name, "--asic")
    ours, today = formula(one, gbps, cable), lua(one, gbps, cable)
    data = {
        which: {"size_bytes": h.size_bytes, "xon_bytes": h.xon_bytes, "xoff_bytes": h.xoff_bytes, "source": h.source}
        for which, h in (("formula", ours), ("dynamic_model", today))
    }
    _report(
        json_to,
        {"asic": name, "gbps": gbps, "cable_m": cable} | data,
        [*ours.lines, f"today's dynamic model of sonic-swss: xoff {today.xoff_bytes} B, size {today.size_bytes} B"],
    )


def _comparison(path: Path, json_to: str | None) -> None:
    from bywash.fabric.config.compare import compare
    from bywash.fabric.config.headroom import read_lookup

    table = read_lookup(path)
    counts, deviations = compare(table)
    lines = [
        f"{one.sku}: of {one.rows} rows the formula gives {one.xoff} xoff, {one.size} sizes and {one.xon} xon "
        f"exactly; today's dynamic model {one.dynamic_xoff} xoff"
        for one in counts
    ]
    lines += [f"finding: {one}" for one in deviations]
    others = len(table.rows) - sum(one.rows for one in counts)
    lines.append(f"{others:,} rows of other SKUs: look-up data, not recomputed")
    data = {
        "skus": [{name: getattr(one, name) for name in one.__dataclass_fields__} for one in counts],
        "rows": sum(one.rows for one in counts),
        "xoff_exact": sum(one.xoff for one in counts),
        "size_exact": sum(one.size for one in counts),
        "findings": [str(one) for one in deviations],
    }
    _report(json_to, data, lines)


def plan_from(values: Path, pg_lookup: Path | None) -> "FabricPlan":
    """The plan of a values file, with the headroom of other ASICs where a table is given."""
    from bywash.fabric.config.plan import make_plan
    from bywash.fabric.config.values import load_values

    return make_plan(*load_values(values), lookup_table(pg_lookup))


def lookup_table(pg_lookup: Path | None) -> "LookupTable | None":
    """The headroom table of `--pg-lookup`, if any."""
    from bywash.fabric.config.headroom import read_lookup

    return None if pg_lookup is None else read_lookup(pg_lookup)


def _models(yang_dir: Path | None) -> "YangModels | None":
    from bywash.fabric.config.yang import YangModels

    return None if yang_dir is None else YangModels(yang_dir)


def emit(
    values: Annotated[Path, typer.Argument(help="values file")],
    out: Annotated[Path, typer.Option(help="directory for the files; made when missing")],
    current: Annotated[
        Path | None, typer.Option(help="directory of config_db .json files as they are now, for patches")
    ] = None,
    pg_lookup: PgLookup = None,
    yang_dir: YangDir = None,
    json_to: Json = None,
) -> None:
    """Write switch, NIC and library configuration of a fabric from one values file, checked before it is written."""
    from bywash.fabric.config.audit import audit as check_all
    from bywash.fabric.config.audit import read_directory
    from bywash.fabric.config.emit import bounds, files, plan_json, sonic_configs

    writable(json_to, "--json", or_stdout=True)
    plan, table, models = plan_from(values, pg_lookup), lookup_table(pg_lookup), _models(yang_dir)
    now = read_directory(current)[0] if current is not None else {}
    findings = check_all(sonic_configs(plan), {}, {}, plan=plan, table=table, models=models)
    if findings:
        raise BywashError(
            "fabric emit: the plan does not pass its own audit:\n  " + "\n  ".join(map(str, findings[:5]))
        )
    made = files(plan, now)
    _write(out, made)
    checked = "own checks, audit" + (", YANG" if models is not None else "; YANG not checked: no --yang-dir")
    lines = [
        plan.topology.describe(),
        f"{len(made)} files in {out} ({checked})",
        bounds(plan),
        f"start with {out / 'rollout.md'}",
    ]
    _report(json_to, {"out": str(out), "files": sorted(made), "yang": models is not None} | plan_json(plan), lines)


def _write(out: Path, made: dict[str, str]) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            (out / name).write_text(text)
            if name.endswith(".sh"):
                (out / name).chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write there: {error.strerror or error}") from error


def audit(
    directory: Annotated[Path, typer.Argument(help="config_db .json of switches, .txt of servers, .env of jobs")],
    values: Annotated[Path | None, typer.Option(help="values file: what was meant, and the cables")] = None,
    pg_lookup: PgLookup = None,
    yang_dir: YangDir = None,
    fix: Annotated[
        Path | None, typer.Option(help="with --values: directory for RFC 6902 patches that mend switches")
    ] = None,
    json_to: Json = None,
) -> None:
    """Hold existing configuration against the arithmetic and itself. Ends with code 1 when anything is found."""
    from bywash.fabric.config.audit import audit as run
    from bywash.fabric.config.audit import read_directory

    writable(json_to, "--json", or_stdout=True)
    if fix is not None and values is None:
        raise ConfigError("--fix: needs --values, which say what should be")
    plan = plan_from(values, pg_lookup) if values is not None else None
    configs, nics, environment = read_directory(directory)
    if plan is not None:
        known = {switch.name for switch in plan.switches}
        for name in configs:
            if name not in known:
                raise ConfigError(f"{directory}: switch {name} is not in the topology of {values}")
    findings = run(configs, nics, environment, plan=plan, table=lookup_table(pg_lookup), models=_models(yang_dir))
    mended = _fixes(plan, configs, fix) if plan is not None and fix is not None else []
    data = {
        "switches": len(configs),
        "nics": len(nics),
        "findings": [finding.as_json() for finding in findings],
        "patches": mended,
    }
    _report(json_to, data, _findings_text(len(configs), len(nics), findings, mended))
    if findings:
        raise typer.Exit(FOUND)


def _fixes(plan: "FabricPlan", configs: dict[str, dict[str, Any]], fix: Path) -> list[str]:
    import json

    from bywash.fabric.config.emit import sonic_configs
    from bywash.fabric.config.rollout import patch

    wanted = sonic_configs(plan)
    patches = {name: patch(config, wanted[name]) for name, config in configs.items() if name in wanted}
    made = {f"{name}.patch.json": json.dumps(steps, indent=2) + "\n" for name, steps in patches.items() if steps}
    _write(fix, made)
    return sorted(made)


def _findings_text(switches: int, nics: int, findings: "list[Finding]", mended: list[str]) -> list[str]:
    lines = [
        f"{switches} switches, {nics} NICs: {len(findings)} findings"
        if findings
        else f"{switches} switches, {nics} NICs: nothing found"
    ]
    for finding in findings:
        lines += [
            f"{finding.severity} {finding.id}: {finding.where}",
            f"  is         {finding.is_}",
            f"  should be  {finding.should_be}",
            f"  why        {finding.why}",
        ]
    return lines + ([f"{len(mended)} patches written: {', '.join(mended)}"] if mended else [])


def _report(json_to: str | None, data: dict[str, Any], lines: list[str]) -> None:
    if json_to is not None:
        write_json(json_to, data)
    if json_to != STDOUT:
        with printing():
            console = stdout_console()
            for line in lines:
                console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{name}: failures", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
