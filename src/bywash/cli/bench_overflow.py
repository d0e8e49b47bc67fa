"""`bywash bench overflow`: load of every rank before and after planning, for recorded counts or a trace."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bywash.cli.output import STDOUT, printing, writable, write_json
from bywash.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MAX_RANKS, _MAX_SLOTS = 1024, 4096
_LINE = "{:>6} {:>10} {:>10} {:>10} {:>9} {:>13}"


def overflow(
    counts: Annotated[str, typer.Option(help="JSON list of layers x experts, our trace file, or a shipped trace")],
    ep: Annotated[int, typer.Option(help="ranks that share the experts")] = 8,
    slots: Annotated[int, typer.Option(help="slots for foreign experts on each rank, shared by all layers")] = 4,
    policy: Annotated[str, typer.Option(help="bywash, refetch, none, eplb or llep")] = "bywash",
    rows: Annotated[int, typer.Option(help="rows that each rank sends in a step (tokens x top-k), for counts")] = 32768,
    alpha: Annotated[float, typer.Option(help="load a rank keeps, times its fair share; 1: as even as can be")] = 1.0,
    capacity: Annotated[int, typer.Option(help="most rows of one expert on a rank at once; 0 for no limit")] = 0,
    break_even: Annotated[int, typer.Option(help="rows below which no weights are copied")] = 1,
    rearrange: Annotated[bool, typer.Option(help="place experts by these counts first, instead of in blocks")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="write the result here; - prints it")] = None,
) -> None:
    """Plan every layer of recorded counts: nothing is dropped, what leaves home, how even the load gets."""
    from bywash.bench.overflow import OverflowBench, measure

    for flag, value, least, most in (
        ("--ep", ep, 1, _MAX_RANKS),
        ("--slots", slots, 0, _MAX_SLOTS),
        ("--rows", rows, 1, 1 << 24),
        ("--capacity", capacity, 0, 1 << 29),
        ("--break-even", break_even, 1, (1 << 29) - 1),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{flag} {value}: must be {least} to {most}")
    writable(json_file, "--json", or_stdout=True)
    bench = OverflowBench(
        ranks=ep, slots=slots, limits=_limits(alpha, capacity, break_even), policy=policy, rearrange=rearrange
    )
    layers, steps_LRE = _read(counts, ep, rows)
    result = {"counts": counts, **measure(bench, steps_LRE, layers)}
    if json_file is not None:
        write_json(json_file, result)
    if json_file == STDOUT:
        print(_table(result), file=sys.stderr)
        return
    with printing():
        print(_table(result))


def _limits(alpha: float, capacity: int, break_even: int) -> Any:
    from bywash.balance.limits import MOST_ROWS, Limits

    if not 1 <= alpha <= 64:
        raise ConfigError(f"--alpha {alpha:g}: must be 1 to 64")
    return Limits(capacity=capacity or MOST_ROWS, alpha_1024=round(alpha * 1024), fetch_rows=break_even)


def _read(name: str, ranks: int, rows: int) -> "tuple[tuple[int, ...], NDArray[np.int32]]":
    """The numbers of the layers and int32 [S, L, R, E]."""
    from bywash.bench.overflow import scaled_counts
    from bywash.routing import RoutingTrace
    from bywash.routing.counts import load_counts
    from bywash.routing.shipped import SHIPPED_TRACES, shipped_trace

    if name in SHIPPED_TRACES:
        return _of_trace(shipped_trace(name), ranks)
    path = Path(name)
    if path.suffix == ".npz":
        return _of_trace(RoutingTrace.load(path), ranks)
    layers, counts_LE = load_counts(path)
    return layers, scaled_counts(counts_LE, ranks, rows)


def _of_trace(trace: Any, ranks: int) -> "tuple[tuple[int, ...], NDArray[np.int32]]":
    import numpy as np

    steps = [[trace.counts_RE(step, layer, ranks) for layer in trace.layers] for step in range(trace.steps)]
    return trace.layers, np.array(steps, dtype=np.int32)


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"# {result['policy']}: {result['ranks']} ranks, {result['slots']} slots on each, {result['steps']} step(s) of "
        f"{result['counts']}; planned, not run",
        "# before, after: rows of the most loaded rank over the mean, mean over steps; worst: of any step",
        _LINE.format("layer", "before", "after", "worst", "fetches", "rows spilled"),
    ]
    for row in result["layers"]:
        numbers = [f"{row[key]:.4f}" for key in ("max_over_mean_before", "max_over_mean_after", "worst_after")]
        lines.append(_LINE.format(row["layer"], *numbers, row["fetches"], f"{row['rows_spilled']:,}"))
    numbers = [f"{result[key]:.4f}" for key in ("max_over_mean_before", "max_over_mean_after", "worst_after")]
    fetches = sum(row["fetches"] for row in result["layers"])
    spilled = sum(row["rows_spilled"] for row in result["layers"])
    lines.append(_LINE.format("all", *numbers, fetches, f"{spilled:,}"))
    lines.append(f"# {result['dropped_rows']} rows dropped; median plan {result['plan_us_median']:.0f} us on this CPU")
    return "\n".join(lines)
