"""`bywash plan`: from a cluster, a model and recorded traffic to a deployment and all of its files.

Thin: reads options, calls `bywash.planner`, writes what comes back. Heavy imports are inside. Sub-commands: `memory`,
and those of `cli.plan_import`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bywash.cli.output import STDOUT, printing, writable, write_json
from bywash.cli.plan_import import import_cluster, schema, show_cluster
from bywash.cli.plan_memory import memory
from bywash.cli.plan_validate import validate
from bywash.errors import ConfigError

if TYPE_CHECKING:
    from bywash.planner.plan import Plan
    from bywash.planner.tasks import Progress
    from bywash.routing import RoutingTrace

app = typer.Typer(help="Plan a deployment: what it needs and what it gives.")
app.command("memory")(memory)
app.command("import-cluster")(import_cluster)
app.command("show-cluster")(show_cluster)
app.command("schema")(schema)
app.command("validate")(validate)

INFEASIBLE = 3
OLD_NAMED = 5


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    cluster: Annotated[Path | None, typer.Option(help="cluster file (YAML); see examples/")] = None,
    model: Annotated[
        str, typer.Option(help="deepseek-v3, qwen3-235b, mixtral-8x7b, gpt-oss-120b, olmoe, kimi-k2, or a config.json")
    ] = "deepseek-v3",
    out: Annotated[Path | None, typer.Option(help="directory for the plan's files; made if missing")] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="routing trace, or a shipped one (prose, code, tables, mixed); default: a Zipf law"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="of the mean request")] = 2048,
    output_tokens: Annotated[int, typer.Option(help="of the mean request")] = 512,
    chunk_tokens: Annotated[int, typer.Option(help="prompt tokens of a device in one prefill step")] = 2048,
    sequences: Annotated[int | None, typer.Option(help="decoded at once by each device; default: searched")] = None,
    slots: Annotated[int | None, typer.Option(help="for foreign experts on each device; default: searched")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="at least, over the whole deployment")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="between tokens of a sequence, at most")] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="to the first token, without queueing, at most")] = None,
    step_ms: Annotated[float | None, typer.Option(help="of a prefill step, at most")] = None,
    jobs: Annotated[int, typer.Option(help="processes; more pay off from some hundred hosts")] = 1,
    json_to: Annotated[
        str | None, typer.Option("--json", help="write the numbers to a file, or - to print them")
    ] = None,
) -> None:
    """Find the best deployment of a model on a cluster, and write plan.yaml, switch and launch files, and a report.

    Ends with code 3 when no deployment keeps the bounds, and says which one binds.
    """
    if context.invoked_subcommand is not None:
        return
    if cluster is None:
        raise ConfigError("--cluster: must be given; examples/private-16x8-mixed.yaml is one")
    if not 1 <= jobs <= 256:
        raise ConfigError(f"--jobs {jobs}: must be 1 to 256")
    if out is not None:
        _check_folder(out)
    writable(json_to, "--json", or_stdout=True)
    from bywash.planner.cluster import load_cluster
    from bywash.planner.model import load_model_shape
    from bywash.planner.plan import make_plan
    from bywash.planner.target import make_target, make_workload

    workload = make_workload({
        "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "chunk_tokens": chunk_tokens,
        "sequences": sequences, "slots": slots,
    })  # fmt: skip
    target = make_target({
        "tokens_per_s": tokens_per_s, "tpot_ms": tpot_ms, "ttft_ms": ttft_ms, "step_ms": step_ms
    })  # fmt: skip
    described = load_cluster(cluster)
    shape = load_model_shape(model)
    with plan_progress() as progress:
        made = make_plan(described, shape, load_trace(trace), workload, target, jobs=jobs, progress=progress)
    _deliver(made, out, json_to)
    if not made.feasible:
        raise typer.Exit(INFEASIBLE)


def load_trace(name: str | None) -> "RoutingTrace | None":
    """A shipped trace or a file; None for none."""
    from bywash.routing import SHIPPED_TRACES, RoutingTrace, shipped_trace

    if name is None:
        return None
    return shipped_trace(name) if name in SHIPPED_TRACES and not Path(name).is_file() else RoutingTrace.load(name)


def _check_folder(out: Path) -> None:
    """Refuse a folder that cannot be made or written, before any work."""
    try:
        near = next(one for one in (out, *out.absolute().parents) if one.exists())
        if not near.is_dir():
            raise ConfigError(f"--out {out}: {near} is no directory")
        if not os.access(near, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {out}: cannot write there: {near} may not be written")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {out}: cannot write there: {getattr(error, 'strerror', None) or error}") from error


def _deliver(made: "Plan", out: Path | None, json_to: str | None) -> None:
    from bywash.planner.output.folder import plan_files, plan_json
    from bywash.planner.output.text import plan_text
    from bywash.report.page import report_files

    lines = [plan_text(made)]
    if out is not None:
        files = plan_files(made) | report_files(made)
        write_files(out, files)
        lines.append(f"{len(files)} files in {out}")
        old = older_files(out, files)
        if old:
            more = f" and {len(old) - OLD_NAMED} more" if len(old) > OLD_NAMED else ""
            lines.append(f"left by an earlier plan, not of this one: {', '.join(old[:OLD_NAMED])}{more}")
    if json_to is not None:
        write_json(json_to, plan_json(made))
    if json_to != STDOUT:
        with printing():
            print("\n".join(lines))


def write_files(out: Path, files: dict[str, str]) -> None:
    """Write texts under a directory; shell scripts may be run."""
    try:
        for name, text in files.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            if name.endswith(".sh"):
                path.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write there: {error.strerror or error}") from error


def older_files(out: Path, files: dict[str, str]) -> list[str]:
    """What an earlier plan left in the folder: names that a plan writes, but not this one."""
    kinds = ("plan.yaml", "fabric.yaml", "topology.yaml", "g[0-9]*.sh", "g[0-9]*.lws.yaml", "fabric/*")
    found = {path.relative_to(out).as_posix() for kind in kinds for path in out.glob(kind) if path.is_file()}
    return sorted(found - files.keys())


@contextmanager
def plan_progress() -> "Iterator[Progress]":
    """A bar on stderr for each part of the work, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks or not done:
                tasks[what] = bar.add_task(f"plan: {what}", total=total)
            bar.update(tasks[what], completed=done)

        yield report
