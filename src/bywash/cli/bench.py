"""`bywash bench`: measurements beside baselines, with the columns of nccl-tests."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from bywash.cli.limits import check_deadline, check_link, check_memory
from bywash.cli.output import STDOUT, printing, writable, write_json
from bywash.cli.units import parse_link
from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from bywash.bench.exchange import ExchangeBench

app = typer.Typer(no_args_is_help=True, help="Measure, beside baselines in the same run.")

_COPIES = 4


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every rank needs: the bench, and where rank 0 writes."""

    bench: "ExchangeBench"
    deadline: float
    json: str | None


@app.callback()
def _group() -> None:
    """Keep `exchange` a sub-command while it is the only one."""


@app.command("exchange")
def exchange(
    ranks: int = typer.Option(2, help="Local processes."),
    hidden: int = typer.Option(2048, help="Hidden size."),
    experts: int = typer.Option(64, help="Experts over all ranks."),
    topk: int = typer.Option(8, help="Experts per token."),
    begin: int = typer.Option(16, "-b", "--begin", help="Smallest size, in tokens per rank."),
    end: int = typer.Option(1024, "-e", "--end", help="Largest size, in tokens per rank."),
    factor: int = typer.Option(4, "-f", "--factor", help="Each size is this many times the one before."),
    dtype: str = typer.Option("float32", help="float32, bfloat16 or float16."),
    combine: str = typer.Option("exact", help="exact, stable or fast."),
    zipf: float = typer.Option(0.0, help="Zipf exponent of the experts' popularity; 0 is uniform."),
    rounds: int = typer.Option(
        15, "-n", "--rounds", help="Timed rounds of each algorithm and size; up to 20 steps each."
    ),
    link: str = typer.Option("", help="Emulate a link of this rate for shm, such as 200Gbps."),
    latency: str = typer.Option("", help="Latency of the emulated link, such as 5us."),
    deadline: float = typer.Option(60.0, help="Seconds any wait on another rank may take."),
    json_file: str | None = typer.Option(
        None, "--json", help="Write the rows to this file; - prints them, and the table to stderr."
    ),
    explain: bool = typer.Option(
        False, "--explain", help="Measure nothing: show what GPUs would take for these sizes, and why. Needs no GPU."
    ),
) -> None:
    """Time counts + plan + dispatch + combine: shared memory, deduplicated gloo, and all_to_all_single by hand."""
    from bywash.bench.exchange import DTYPES, ExchangeBench
    from bywash.exchange import COMBINES
    from bywash.launch import run_local, under_torchrun

    if under_torchrun():
        raise ConfigError("bench exchange: starts its own processes; run it without torchrun, with --ranks")
    sizes = sizes_between(begin, end, factor)
    check_deadline(deadline)
    for flag, value in (("--hidden", hidden), ("--experts", experts), ("--topk", topk), ("--rounds", rounds)):
        if value < 1:
            raise ConfigError(f"{flag} {value}: must be at least 1")
    if topk > experts:
        raise ConfigError(f"--topk {topk}: there are only {experts} experts")
    for flag, chosen, known in (("--dtype", dtype, tuple(DTYPES)), ("--combine", combine, COMBINES)):
        if chosen not in known:
            raise ConfigError(f"{flag} {chosen}: choose one of {', '.join(known)}")
    if not 0 <= zipf < 100:
        raise ConfigError(f"--zipf {zipf}: must be 0 or more, and below 100")
    writable(json_file, "--json", or_stdout=True)
    bench = ExchangeBench(
        sizes=sizes,
        hidden=hidden,
        experts=experts,
        top_k=topk,
        dtype=dtype,
        combine=combine,  # type: ignore[arg-type]
        zipf=zipf,
        rounds=rounds,
        link=parse_link(link, latency),
    )
    if explain:
        _explain(bench, ranks, json_file)
        return
    _check_size(bench, ranks, deadline)
    run_local(rank_main, _Job(bench=bench, deadline=deadline, json=json_file), ranks, deadline)


def _explain(bench: "ExchangeBench", ranks: int, json_file: str | None) -> None:
    """`--explain`: the cost model's table, and its rows as JSON."""
    from bywash.bench.explain import explain_choices, explain_rows, explain_text

    if ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be at least 1")
    choices = explain_choices(bench, ranks)
    if json_file is not None:
        write_json(json_file, {"ranks": ranks, "rows": explain_rows(choices)})
    _print(json_file, explain_text(bench, ranks, choices))


def _check_size(bench: "ExchangeBench", ranks: int, deadline: float) -> None:
    """Refuse sizes that cannot fit in memory, and messages that an emulated link delivers after the deadline."""
    from bywash.bench.exchange import DTYPES

    tokens, item = max(bench.sizes), DTYPES[bench.dtype].itemsize
    # By hand: rows out, rows in, outputs back, outputs in order. Drawing the routing: three float32 per expert.
    rows = _COPIES * bench.top_k * bench.hidden * item
    draws = 12 * bench.experts
    check_memory(
        ranks * tokens * (rows + draws),
        f"--ranks {ranks} x -e {tokens} tokens x ({_COPIES} copies x --topk {bench.top_k} x --hidden {bench.hidden} x "
        f"{item} bytes + 12 bytes x --experts {bench.experts})",
        "lower one of them",
    )
    returned = min(bench.top_k, -(-bench.experts // max(1, ranks))) if bench.combine == "exact" else 1
    check_link(bench.link, deadline, tokens * returned * bench.hidden * item)  # type: ignore[arg-type]


def sizes_between(begin: int, end: int, factor: int) -> tuple[int, ...]:
    """As nccl-tests steps: begin, begin * factor, ... up to end."""
    if begin < 1 or end < begin:
        raise ConfigError(f"-b {begin} -e {end}: sizes go from at least 1 up to the end")
    if factor < 2 and end > begin:
        raise ConfigError(f"-f {factor}: must be at least 2")
    sizes = [begin]
    while sizes[-1] * factor <= end and end > begin:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def rank_main(job: _Job, rank: int, ranks: int, store: Any) -> None:
    """What each rank does; rank 0 prints each size as it is done."""
    from bywash.bench.exchange import measure, rows_of
    from bywash.exchange.group import Group, gather_objects

    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=job.deadline)
    rows: list[dict[str, Any]] = []
    try:
        if rank == 0:
            _print(job.json, header(job.bench, ranks))
        for measured in measure(group, job.bench):
            gathered = gather_objects(group, measured)
            if gathered is not None:
                done = rows_of(gathered)
                _print(job.json, "\n".join(line(row) for row in done))
                rows += done
    finally:
        group.close()
    if rank == 0:
        if job.json is not None:
            write_json(job.json, {"ranks": ranks, "rows": rows})
        wrong = sum(row["wrong"] for row in rows)
        if wrong:
            raise BywashError(f"{wrong} elements differ from one process; see the #wrong column")


def _print(json_file: str | None, text: str) -> None:
    if json_file == STDOUT:
        print(text, file=sys.stderr, flush=True)
        return
    with printing():
        print(text, flush=True)


_COLUMNS = "{:>9} {:>7} {:>13} {:>12} {:>11} {:>7} {:>7} {:>7} {:>9} {:>9} {:>8}"


def header(bench: "ExchangeBench", ranks: int) -> str:
    """What is measured, and the column names."""
    from bywash.exchange.link import describe

    emulated = describe(bench.link)
    lines = [
        f"# {ranks} processes of one machine; hidden {bench.hidden}, {bench.experts} experts, top-{bench.top_k}, "
        f"{bench.dtype}, combine {bench.combine}, zipf {bench.zipf:g}",
        "# time: counts + plan + dispatch + combine, no expert compute; per step, slowest rank, median over rounds",
        "# algbw: logical bytes (a row per token and expert, out and back) / time; busbw: bytes sent to others / time",
        "# by hand, dedup: how many times faster than all_to_all_single by hand, than the deduplicated gloo exchange",
    ]
    if emulated:
        lines.append(f"# shm runs over an {emulated}: its times are emulated, the baselines' are not")
    names = _COLUMNS.format(
        "algorithm",
        "tokens",
        "logical B",
        "wire B",
        "time us",
        "algbw",
        "busbw",
        "#wrong",
        "imbalance",
        "by hand",
        "dedup",
    )
    units = _COLUMNS.format("", "/rank", "/rank", "/rank", "median", "GB/s", "GB/s", "", "max/mean", "x", "x")
    return "\n".join([*lines, names, units])


def line(row: dict[str, Any]) -> str:
    """One measurement under the header."""
    return _COLUMNS.format(
        row["algorithm"],
        row["tokens"],
        row["logical_bytes"],
        row["wire_bytes"],
        row["time_us_median"],
        f"{row['algbw_gbytes_per_s']:.2f}",
        f"{row['busbw_gbytes_per_s']:.2f}",
        row["wrong"],
        row["imbalance"],
        row["ratio_to_by_hand"],
        row["ratio_to_dedup_gloo"],
    )
