"""`bywash plan memory`: what every buffer of one rank takes, fixed before the first step. Registered by `cli.plan`."""

import sys
from typing import Annotated, Any

import typer

from bywash.cli.limits import ALPHA_HELP, DEFAULT_ALPHA
from bywash.cli.output import STDOUT, printing, writable, write_json
from bywash.errors import ConfigError

_LINE = "{:<13} {:>16}  {}"
_MOST = 1 << 24


def memory(
    hidden: Annotated[int, typer.Option(help="hidden size")] = 7168,
    intermediate: Annotated[int, typer.Option(help="intermediate size of an expert")] = 2048,
    experts: Annotated[int, typer.Option(help="experts of a layer")] = 256,
    topk: Annotated[int, typer.Option(help="experts per token")] = 8,
    layers: Annotated[int, typer.Option(help="MoE layers")] = 58,
    ranks: Annotated[int, typer.Option(help="ranks that share the experts")] = 8,
    tokens: Annotated[int, typer.Option(help="most tokens of a rank in a step")] = 4096,
    slots: Annotated[int, typer.Option(help="slots for foreign experts on each rank, shared by all layers")] = 4,
    capacity: Annotated[float, typer.Option(help="most rows of an expert at once, times the mean; 0 for no cap")] = 2.0,
    alpha: Annotated[float, typer.Option(help=ALPHA_HELP, show_default=False)] = DEFAULT_ALPHA,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    combine: Annotated[str, typer.Option(help="exact, stable or fast")] = "fast",
    json_file: Annotated[str | None, typer.Option("--json", help="write the buffers here; - prints them")] = None,
) -> None:
    """Print the memory of every buffer with its arithmetic. The defaults are DeepSeek-V3's shape on 8 GPUs."""
    import torch

    from bywash.exchange.names import COMBINES
    from bywash.memory.budget import BudgetShape, Buffer, memory_budget

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    for flag, chosen, known in (("--dtype", dtype, tuple(dtypes)), ("--combine", combine, COMBINES)):
        if chosen not in known:
            raise ConfigError(f"{flag} {chosen}: choose one of {', '.join(known)}")
    for flag, value in (("--tokens", tokens), ("--ranks", ranks), ("--hidden", hidden), ("--slots", slots)):
        if value > _MOST:
            raise ConfigError(f"{flag} {value}: must be at most {_MOST}")
    if not 1 <= alpha <= 64:
        raise ConfigError(f"--alpha {alpha:g}: must be 1 to 64")
    writable(json_file, "--json", or_stdout=True)
    shape = BudgetShape(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=topk,
        moe_layers=layers,
        ranks=ranks,
        tokens=tokens,
        slots=slots,
        capacity_factor=capacity,
        alpha_1024=round(alpha * 1024),
        item_bytes=dtypes[dtype].itemsize,
    )
    buffers = memory_budget(shape, _heap(shape, dtypes[dtype], combine, Buffer))
    if json_file is not None:
        write_json(json_file, _as_json(shape, buffers))
    text = _table(shape, buffers)
    if json_file == STDOUT:
        print(text, file=sys.stderr)
        return
    with printing():
        print(text)


def _heap(shape: Any, dtype: Any, combine: str, buffer: Any) -> Any:
    """The heap of the GPU exchange, which knows its own arithmetic."""
    from bywash.exchange.peer_layout import PeerLayout

    layout = PeerLayout(
        ranks=shape.ranks,
        experts=shape.experts,
        top_k=shape.top_k,
        tokens=shape.tokens,
        hidden=shape.hidden,
        dtype=dtype,
        exact=combine == "exact",
    )
    return buffer(name="heap", bytes=layout.heap_bytes, arithmetic=layout.arithmetic)


def _as_json(shape: Any, buffers: list[Any]) -> dict[str, Any]:
    return {
        "capacity_rows": shape.capacity,
        "held_pairs": shape.held_pairs,
        "buffers": [{"name": b.name, "bytes": b.bytes, "arithmetic": b.arithmetic} for b in buffers],
        "total_bytes": sum(b.bytes for b in buffers),
        "uncapped_pairs": shape.pairs,
    }


def _table(shape: Any, buffers: list[Any]) -> str:
    lines = [
        f"# one of {shape.ranks} ranks, {shape.tokens} tokens each, top-{shape.top_k} of {shape.experts} experts; "
        "fixed at start, whatever the routing",
        _LINE.format("buffer", "bytes", "how"),
    ]
    lines += [_LINE.format(b.name, f"{b.bytes:,}", b.arithmetic) for b in buffers]
    lines.append(_LINE.format("all", f"{sum(b.bytes for b in buffers):,}", ""))
    row_bytes = shape.item_bytes * (shape.hidden + shape.intermediate) + 8
    uncapped, held = (f"{pairs * row_bytes / 1e9:.2f} GB" for pairs in (shape.pairs, shape.held_pairs))
    lines.append(
        f"# without a cap a rank may be sent all {shape.pairs:,} pairs: {uncapped} of index, intermediate and outputs "
        f"instead of {held};\n# what is above the cap and finds no slot is computed at home in rounds through the same "
        "buffers"
    )
    return "\n".join(lines)
