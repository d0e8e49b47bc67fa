"""`bywash trace`: record routing, show how skewed it is, and make traces with a known law.

Thin: reads options, calls `bywash.routing`, prints. numpy and rich are imported inside the commands, so that
`--help` answers at once. Errors leave as `BywashError`; `bywash.cli.main` prints them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from bywash.cli.limits import check_memory
from bywash.cli.output import STDOUT, printing, replaceable, stdout_console, writable, write_json
from bywash.cli.run import DEFAULT_MODEL, DEFAULT_TOKENS, RANKS_HELP, RunRequest, collect_prompts, start_run
from bywash.errors import ConfigError, TraceError

if TYPE_CHECKING:
    from bywash.routing import RoutingTrace, SkewSummary, TraceShape

# Per topic: the summary of its counts, and how far it lies from the whole trace, 0..1.
Topics: TypeAlias = "dict[str, tuple[SkewSummary, float]]"

app = typer.Typer(no_args_is_help=True, help="Record, make and inspect routing traces.")


class Kind(StrEnum):
    """The laws that `make` knows."""

    uniform = "uniform"
    zipf = "zipf"
    hot_set = "hot-set"
    drifting = "drifting"


# The options of each law, with their defaults; any other law's option is refused rather than ignored.
_LAW_OPTIONS: dict[Kind, dict[str, Any]] = {
    Kind.uniform: {},
    Kind.zipf: {"exponent": 0.6},
    Kind.hot_set: {"hot": 4, "share": 0.5},
    Kind.drifting: {"topics": 4, "period": 10, "exponent": 0.9},
}
_COPIES = 3
_LONG_BYTES = 50_000_000
_MAX_RANKS = 65536  # as many as a trace may have experts


@app.command()
def record(
    out: Annotated[Path, typer.Option(help="the trace file to write")],
    model: Annotated[str, typer.Option(help="checkpoint directory or preset")] = DEFAULT_MODEL,
    ranks: Annotated[int | None, typer.Option(help=RANKS_HELP)] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="prompt text; repeat for several")] = None,
    topic: Annotated[list[str] | None, typer.Option(help="label of each prompt, in order")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="file of prompts: 'prompt' and 'topic' in JSON on each line")
    ] = None,
    tokens: Annotated[int, typer.Option(help="tokens to generate for each prompt")] = DEFAULT_TOKENS,
) -> None:
    """Run a model and record its routing: short for `bywash run --trace`, which has more options."""
    replaceable(out, "--out")
    start_run(
        RunRequest(
            model=model,
            ranks=ranks,
            prompts=collect_prompts(prompt or (), (), prompts, topic or ()),
            tokens=tokens,
            trace=str(out),
        )
    )


@app.command()
def show(
    file: Annotated[
        Path,
        typer.Argument(
            help="a trace, a shipped one (prose, code, tables, mixed), or counts in JSON (layers x experts)"
        ),
    ],
    ranks: Annotated[str, typer.Option(help="expert-parallel sizes to report, with commas between")] = "2,4,8",
    json_to: Annotated[str | None, typer.Option("--json", help="write JSON to a file, or - to print it")] = None,
) -> None:
    """Show the load of each layer's experts, and of each rank when experts are placed in order."""
    from bywash.routing import SHIPPED_TRACES, RoutingTrace, load_counts, shipped_trace, summarise

    sizes = _parse_ranks(ranks)
    writable(json_to, "--json", or_stdout=True)
    trace = None
    if str(file) in SHIPPED_TRACES and not file.exists():
        trace = shipped_trace(str(file))
        summary = summarise(trace, sizes)
    elif _is_json(file):
        layers, counts_LE = load_counts(file)
        summary = summarise(counts_LE, sizes, layers=layers)
    else:
        trace = RoutingTrace.load(file)
        summary = summarise(trace, sizes)
    topics = _by_topic(trace, sizes) if trace is not None else {}
    headline = _headline(summary, trace)
    if json_to is not None:
        write_json(json_to, _as_json(file, headline, summary, trace, topics))
    if json_to != STDOUT:
        with printing():
            _print_tables(headline, summary, topics)


@app.command()
def make(
    out: Annotated[Path, typer.Option(help="the trace file to write")],
    kind: Annotated[Kind, typer.Option(help="the law of the experts' popularity")] = Kind.zipf,
    experts: Annotated[int, typer.Option(help="experts of each layer")] = 128,
    topk: Annotated[int, typer.Option(help="experts per token")] = 8,
    layers: Annotated[int, typer.Option(help="MoE layers")] = 4,
    tokens: Annotated[int, typer.Option(help="tokens per step, over all ranks")] = 1024,
    steps: Annotated[int, typer.Option(help="forward steps")] = 16,
    exponent: Annotated[float | None, typer.Option(help="zipf (0.6), drifting (0.9): Zipf exponent")] = None,
    hot: Annotated[int | None, typer.Option(help="hot-set (4): hot experts of each layer")] = None,
    share: Annotated[float | None, typer.Option(help="hot-set (0.5): their share of first choices, 0..1")] = None,
    topics: Annotated[int | None, typer.Option(help="drifting (4): topics that take turns")] = None,
    period: Annotated[int | None, typer.Option(help="drifting (10): steps until the topic changes")] = None,
    seed: Annotated[int, typer.Option(help="the same seed gives the same trace")] = 0,
) -> None:
    """Make a trace with a known law and write it to a file."""
    from bywash.routing import TraceShape, drifting, hot_set, uniform, zipf

    given = {"exponent": exponent, "hot": hot, "share": share, "topics": topics, "period": period}
    law = _law_options(kind, given)
    replaceable(out, "--out")
    shape = TraceShape(num_experts=experts, top_k=topk, layers=layers, tokens=tokens, steps=steps)
    makers: dict[Kind, Callable[..., RoutingTrace]] = {
        Kind.uniform: uniform,
        Kind.zipf: zipf,
        Kind.hot_set: hot_set,
        Kind.drifting: drifting,
    }
    _check_size(shape, law.get("topics", 1))
    with _progress(shape) as on_step:
        trace = makers[kind](shape, seed=seed, on_step=on_step, **law)
    trace.save(out)
    size_kb = out.stat().st_size / 1000
    with printing():
        typer.echo(f"{out}: {_describe(trace)}; {size_kb:,.0f} kB")


def _check_size(shape: "TraceShape", topics: int) -> None:
    """Refuse a trace that cannot fit: its ids while they are checked and written, and every topic's popularities."""
    popularities = 8 * topics * shape.layers * shape.num_experts
    check_memory(
        _COPIES * shape.ids_bytes + popularities,
        f"--steps {shape.steps} x --tokens {shape.tokens} x --layers {shape.layers} x --topk {shape.top_k} ids, "
        f"{_COPIES} copies, and {topics} x --layers {shape.layers} x --experts {shape.num_experts} popularities",
        "lower one of them",
    )


@contextmanager
def _progress(shape: "TraceShape") -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; elsewhere a line, if it takes more than a moment."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal and shape.ids_bytes > _LONG_BYTES:
        console.print(
            f"bywash: making {shape.steps:,} steps of {shape.tokens:,} tokens, {shape.ids_bytes / 1e6:,.0f} MB of ids",
            highlight=False,
            soft_wrap=True,
        )
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("making steps", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _law_options(kind: Kind, given: dict[str, Any]) -> dict[str, Any]:
    known = _LAW_OPTIONS[kind]
    for name, value in given.items():
        if value is not None and name not in known:
            raise ConfigError(f"--{name} = {value}: kind {kind.value} has no such option")
    return {name: default if given[name] is None else given[name] for name, default in known.items()}


def _parse_ranks(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or max(sizes) > _MAX_RANKS:
        raise ConfigError(
            f"--ranks = {text!r}: give whole numbers from 1 to {_MAX_RANKS} with commas between, such as 4,8"
        )
    return tuple(dict.fromkeys(sizes))


def _is_json(file: Path) -> bool:
    try:
        with open(file, "rb") as stream:
            start = stream.read(64).lstrip()
    except OSError as error:
        raise TraceError(f"{file}: cannot read it: {error.strerror or error}") from error
    return file.suffix == ".json" or start[:1] in (b"[", b"{")


def _by_topic(trace: "RoutingTrace", sizes: tuple[int, ...]) -> Topics:
    """Per topic its summary, and its total variation distance from the whole trace, mean over layers."""
    from bywash.routing import summarise

    whole_LE = trace.counts_LE()
    whole_LE = whole_LE / whole_LE.sum(axis=1, keepdims=True).clip(min=1)
    topics = {}
    for name, counts_LE in trace.counts_by_topic().items():
        if counts_LE.any():
            share_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
            distance = abs(share_LE - whole_LE).sum(axis=1).mean() / 2
            topics[name] = (summarise(counts_LE, sizes, layers=trace.layers), float(distance))
    return topics


def _describe(trace: "RoutingTrace") -> str:
    from bywash.routing.trace import PHASE_NAMES

    origin = f"generated: {trace.note}, seed {trace.seed}"
    if trace.source == "recorded":
        origin = f"recorded from {trace.model or 'an unnamed model'}"
    phases = [f"{int((trace.step_phase_S == p).sum())} {name}" for p, name in enumerate(PHASE_NAMES)]
    return (
        f"{len(trace.layers)} layers x {trace.num_experts} experts, top-{trace.top_k}, {trace.tokens:,} "
        f"tokens in {trace.steps} steps ({', '.join(phases)}), {origin}"
    )


def _headline(summary: "SkewSummary", trace: "RoutingTrace | None") -> str:
    what = f"{len(summary.layers)} layers x {summary.num_experts} experts (counts only)"
    if trace is not None:
        what = _describe(trace)
    if not summary.total_L.any():
        return f"{what}: no tokens"
    worst = int(summary.max_over_mean_L.argmax())
    busy = "; ".join(
        f"EP{r} busiest rank {column.mean():.2f}x the mean (worst {column.max():.2f}x)"
        for r, column in zip(summary.ranks, summary.rank_max_over_mean_Ln.T)
    )
    return (
        f"{what}: the hottest expert gets {summary.max_over_mean_L.mean():.1f}x the mean load (worst "
        f"{summary.max_over_mean_L[worst]:.1f}x, layer {summary.layers[worst]}, expert "
        f"{summary.hottest_L[worst]}); {busy}"
    )


def _as_json(
    file: Path,
    headline: str,
    summary: "SkewSummary",
    trace: "RoutingTrace | None",
    topics: Topics,
) -> dict[str, Any]:
    result: dict[str, Any] = {"file": file.name, "headline": headline, **summary.as_dict()}
    if trace is not None:
        result |= {"model": trace.model, "note": trace.note, "source": trace.source, "seed": trace.seed}
        result |= {"tokens": trace.tokens, "steps": trace.steps, "top_k": trace.top_k}
    if topics:
        result["topics"] = {
            name: {"distance_from_all": distance, **by_layer.as_dict()} for name, (by_layer, distance) in topics.items()
        }
    return result


def _print_tables(headline: str, summary: "SkewSummary", topics: Topics) -> None:
    console = stdout_console()
    if not console.is_terminal:  # a pipe or a file: never cut columns to fit a screen that is not there
        console = stdout_console(width=200)
    console.print(headline, highlight=False, markup=False)
    if not summary.total_L.any():
        return
    _print_layers(console, summary)
    if topics:
        _print_topics(console, topics)


def _print_layers(console: Any, summary: "SkewSummary") -> None:
    drift_L, noise_L = summary.drift_L, summary.drift_noise_L
    names = ["layer", "hottest\nexpert", "its\nload", "its\nshare", "top\n10%", "Zipf", "unused\nexperts"]
    names += [f"EP{r}" for r in summary.ranks] + (["drift", "by\nchance"] if drift_L is not None else [])
    table = _table(names)
    for i, layer in enumerate(summary.layers):
        row = [str(layer), str(summary.hottest_L[i]), _figure(summary.max_over_mean_L[i])]
        row += [
            _figure(summary.top1_share_L[i], ".1%"),
            _figure(summary.top10pct_share_L[i], ".1%"),
            _figure(summary.zipf_L[i]),
        ]
        row += [str(summary.unused_L[i]), *(_figure(x) for x in summary.rank_max_over_mean_Ln[i])]
        if drift_L is not None and noise_L is not None:
            row += [_figure(drift_L[i], ".1%"), _figure(noise_L[i], ".1%")]
        table.add_row(*row)
    console.print(table)
    legend = "its load, EPn: hottest expert, busiest of n ranks, in multiples of the mean, experts in order"
    if drift_L is not None:
        legend += (
            f"\ndrift: part of the load that moves to other experts from one window of "
            f"{summary.window_steps} steps to the next; by chance: what sampling alone would show"
        )
    console.print(legend, highlight=False, markup=False)


def _print_topics(console: Any, topics: Topics) -> None:
    sizes = next(iter(topics.values()))[0].ranks
    table = _table(["topic", "assignments\nper layer", "hottest's\nload", "moved", *(f"EP{r}" for r in sizes)])
    table.columns[0].justify = "left"
    for name, (summary, distance) in topics.items():
        row = [
            name,
            f"{summary.total_L.mean():,.0f}",
            f"{summary.max_over_mean_L.mean():.2f}",
            f"{distance:.1%}",
        ]
        table.add_row(*row, *(f"{x:.2f}" for x in summary.rank_max_over_mean_Ln.mean(axis=0)))
    console.print(table)
    legend = "means over layers; moved: part of the topic's load that lies elsewhere than in the whole trace"
    console.print(legend, highlight=False, markup=False)


def _figure(value: float, form: str = ".2f") -> str:
    """A number of a table; a dash where there is none, such as a Zipf exponent of one expert."""
    return format(value, form) if math.isfinite(value) else "-"


def _table(names: list[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table
