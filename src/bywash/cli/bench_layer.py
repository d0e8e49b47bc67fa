"""`bywash bench layer`: how much of the exchange overlap hides, beside the serial schedule in the same run."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from bywash.cli.limits import check_deadline, check_link, check_memory
from bywash.cli.output import STDOUT, apart, printing, writable, write_json
from bywash.cli.units import microseconds, parse_link
from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from bywash.bench.layer import LayerBench
    from bywash.moe.pipeline import Split

_ITEM_BYTES = 4
_MOST_PIECES = 64
"""Of a step: the time that a schedule takes to make grows with their square, 2 s for 8 layers in so many."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every rank needs: the bench, and where rank 0 writes."""

    bench: "LayerBench"
    deadline: float
    json: str | None
    timeline: str | None


def layer(
    ranks: int = typer.Option(2, help="Local processes, each with one compute thread."),
    layers: int = typer.Option(8, help="Decoder layers of the stack."),
    hidden: int = typer.Option(512, help="Hidden size."),
    intermediate: int = typer.Option(2048, help="Intermediate size of an expert."),
    experts: int = typer.Option(4, help="Experts of a layer, over all ranks."),
    topk: int = typer.Option(2, help="Experts per token."),
    heads: int = typer.Option(8, help="Attention heads."),
    shared: bool = typer.Option(False, "--shared", help="Give every layer a shared expert too."),
    sequences: int = typer.Option(12, help="Sequences of each rank, dealt to the micro-batches."),
    sequence: int = typer.Option(32, help="Tokens of a sequence."),
    splits: str = typer.Option(
        "2x1,3x1,1x4",
        help="Micro-batches x chunks of each schedule beside the serial one, with commas; 1x1: one, in one piece, "
        "beside its shared expert.",
    ),
    combine: str = typer.Option("exact", help="exact, stable or fast."),
    rounds: int = typer.Option(5, "-n", "--rounds", help="Rounds, each of which measures everything once."),
    link: str = typer.Option("", help="Emulate a link of this rate (default: communication as long as compute)."),
    latency: str = typer.Option("20us", help="Latency of the emulated link."),
    deadline: float = typer.Option(60.0, help="Seconds any wait on another rank may take."),
    timeline: str | None = typer.Option(None, help="Write the last round of every schedule to this file (.json)."),
    json_file: str | None = typer.Option(
        None, "--json", help="Write the rows to this file; - prints them, and the table to stderr."
    ),
) -> None:
    """Time a stack of MoE layers serially and overlapped, over an emulated link as slow as the compute."""
    from bywash.bench.layer import LayerBench
    from bywash.bench.stack import StackShape
    from bywash.exchange import COMBINES
    from bywash.launch import run_local, under_torchrun

    if under_torchrun():
        raise ConfigError("bench layer: starts its own processes; run it without torchrun, with --ranks")
    check_deadline(deadline)
    sizes = {"layers": layers, "hidden": hidden, "intermediate": intermediate, "experts": experts, "topk": topk}
    sizes |= {"heads": heads, "sequences": sequences, "sequence": sequence, "rounds": rounds}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    if topk > experts:
        raise ConfigError(f"--topk {topk}: there are only {experts} experts")
    if hidden % heads:
        raise ConfigError(f"--heads {heads}: must divide --hidden {hidden}")
    if combine not in COMBINES:
        raise ConfigError(f"--combine {combine}: choose one of {', '.join(COMBINES)}")
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank sends nothing; give at least 2")
    writable(json_file, "--json", or_stdout=True)
    writable(timeline, "--timeline")
    apart({"--json": json_file, "--timeline": timeline})
    shape = StackShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=topk,
        heads=heads,
        sequence=sequence,
        shared=shared,
    )
    bench = LayerBench(
        shape=shape,
        batches=sequences,
        splits=parse_splits(splits, sequences),
        combine=combine,
        link=parse_link(link, latency) if link else None,
        latency_us=microseconds(latency, "--latency"),
        rounds=rounds,
    )
    _check_size(bench, ranks, deadline)
    print(
        f"bywash: measuring {rounds} rounds of {len(bench.splits) + 1} schedules; the default sizes take minutes",
        file=sys.stderr,
        flush=True,
    )
    run_local(rank_main, _Job(bench=bench, deadline=deadline, json=json_file, timeline=timeline), ranks, deadline)


def parse_splits(text: str, sequences: int) -> tuple["Split", ...]:
    """`2x1,1x4` to two micro-batches of as many sequences, and one in four chunks."""
    from bywash.moe.pipeline import Split

    found = []
    for part in text.split(","):
        lanes, _, chunks = part.strip().partition("x")
        if not (lanes.isdecimal() and chunks.isdecimal()):
            raise ConfigError(f"--splits {text!r}: must be micro-batches x chunks with commas, for example 2x1,1x4")
        pieces = int(lanes) * int(chunks)
        if not 1 <= pieces <= _MOST_PIECES or int(lanes) > sequences:
            raise ConfigError(
                f"--splits {part.strip()}: give at least 1 of each, at most as many micro-batches as --sequences "
                f"{sequences}, and at most {_MOST_PIECES} pieces in all"
            )
        found.append(Split(lanes=int(lanes), chunks=int(chunks)))
    return tuple(found)


def _check_size(bench: "LayerBench", ranks: int, deadline: float) -> None:
    """Refuse sizes that cannot fit in memory, and messages that the link delivers after the deadline."""
    shape, tokens = bench.shape, bench.batches * bench.shape.sequence
    dense = ranks * (4 * shape.hidden + shape.experts) * shape.hidden
    expert = 3 * shape.hidden * shape.intermediate
    weights = shape.layers * (dense + (shape.experts + ranks * shape.shared) * expert)
    # Rows sent and arrived, outputs computed and returned are kept for each split, beside two generations of the heap.
    rows = ranks * tokens * shape.hidden * (2 + 2 * shape.top_k)
    kept = rows * (shape.layers * (len(bench.splits) + 1) + 2)
    check_memory(
        _ITEM_BYTES * (weights + kept),
        f"{_ITEM_BYTES} bytes x ({weights:,} weights of all ranks + {kept:,} numbers of kept rows)",
        "lower --layers, --hidden, --intermediate or --sequences",
    )
    check_link(bench.link, deadline, tokens * shape.top_k * shape.hidden * _ITEM_BYTES)


def rank_main(job: _Job, rank: int, ranks: int, store: Any) -> None:
    """What each rank does; rank 0 prints."""
    from bywash.bench.layer import measure
    from bywash.exchange.group import Group, gather_objects

    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=job.deadline)
    try:
        results = gather_objects(group, measure(group, job.bench))
    finally:
        group.close()
    if results is not None:
        _report(job, ranks, results)


def _report(job: _Job, ranks: int, results: list[Any]) -> None:
    from bywash.bench.layer_report import header, line, rows_of, tracks, verdict
    from bywash.exchange.link import describe
    from bywash.report.timeline import chrome_trace

    rows = rows_of(results)
    emulated = describe(results[0].link) or ""
    how = "as named" if job.bench.link else "set so that communication alone takes as long as compute alone"
    text = "\n".join([header(job.bench, ranks, f"{emulated} ({how})"), *map(line, rows), verdict(rows)])
    if job.timeline is not None:
        write_json(job.timeline, chrome_trace(tracks(results), {"emulated": emulated}), "--timeline")
    if job.json is not None:
        write_json(job.json, {"ranks": ranks, "emulated": emulated, "rows": rows})
    if job.json == STDOUT:
        print(text, file=sys.stderr, flush=True)
    else:
        with printing():
            print(text, flush=True)
    wrong = sum(row["wrong"] for row in rows)
    if wrong and job.bench.combine != "fast":
        raise BywashError(f"{wrong} elements differ from the serial schedule's; see the #wrong column")
