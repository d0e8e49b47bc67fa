"""`bywash bench exchange --explain`: what the cost model of the GPU exchange says for the sizes of a bench, and why.

Pure: it measures nothing and needs no GPU. `exchange.cost` has the arithmetic.
"""

from typing import Any

import torch

from bywash.balance import Placement
from bywash.bench.exchange import DTYPES, ExchangeBench, draw_batch
from bywash.exchange.cost import Choice, Rates, Step, choose
from bywash.exchange.link import Link

_SAMPLE = 2048
"""Tokens drawn to see how many ranks a token reaches where routing is not uniform."""


def explain_choices(bench: ExchangeBench, ranks: int) -> dict[int, Choice]:
    """Tokens per rank to the choice of the cost model, as `auto` would make it."""
    remote_ranks = _remote_ranks(bench, ranks) if bench.zipf else None
    choices = {}
    for tokens in bench.sizes:
        step = Step(
            ranks=ranks,
            tokens=tokens,
            hidden=bench.hidden,
            item_bytes=DTYPES[bench.dtype].itemsize,
            top_k=bench.top_k,
            experts=bench.experts,
            combine=bench.combine,
            remote_ranks=remote_ranks,
        )
        choices[tokens] = choose(step, rates_of(bench))
    return choices


def explain_rows(choices: dict[int, Choice]) -> list[dict[str, Any]]:
    """For each size, half and algorithm: bytes, time and arithmetic; and whether and why that algorithm is taken."""
    return [
        {
            "tokens": tokens,
            "half": one.half,
            "algorithm": one.algorithm,
            "wire_bytes": one.wire_bytes,
            "time_us": round(one.time_us, 1),
            "arithmetic": one.arithmetic,
            "taken": one.algorithm == choice.algorithm,
            "why": choice.why if one.algorithm == choice.algorithm else None,
        }
        for tokens, choice in choices.items()
        for one in choice.estimates
    ]


def rates_of(bench: ExchangeBench) -> Rates:
    """The measured rates, or with `--link` those of a link that is slower than NVLink."""
    if not isinstance(bench.link, Link):
        return Rates()
    default, gbytes_per_s, latency_us = Rates(), bench.link.rate_gbps / 8, bench.link.latency_us
    return Rates(
        kernel_gbytes_per_s=min(default.kernel_gbytes_per_s, gbytes_per_s),
        kernel_start_us=default.kernel_start_us + latency_us,
        copy_gbytes_per_s=min(default.copy_gbytes_per_s, gbytes_per_s),
        copy_start_us=default.copy_start_us + latency_us,
        combine_start_us=default.combine_start_us + latency_us,
        source=f"a link of {bench.link}, starts and memory as {default.source}",
    )


def explain_text(bench: ExchangeBench, ranks: int, choices: dict[int, Choice]) -> str:
    """The choices as a table: every way with its arithmetic, then what is taken and why."""
    routing = f"zipf {bench.zipf:g}, drawn" if bench.zipf else "uniform routing"
    lines = [
        f"# GPU exchange, {ranks} ranks of one host; hidden {bench.hidden}, {bench.experts} experts, "
        f"top-{bench.top_k}, {bench.dtype}, combine {bench.combine}, {routing}",
        f"# calculated, not measured here; rates: {rates_of(bench).source}",
        "# all-gather is for ranks that bring equally many rows (padded); others always take all-to-all",
        f"{'tokens':>9} {'half':<9} {'algorithm':<11} {'wire B':>13} {'time us':>9}",
    ]
    for tokens, choice in choices.items():
        for one in choice.estimates:
            lines.append(f"{tokens:>9} {one.half:<9} {one.algorithm:<11} {one.wire_bytes:>13} {one.time_us:>9.1f}")
            lines.append(f"{'':>20}= {one.arithmetic}")
        time_us = choice.time_us(choice.algorithm)
        lines.append(f"{tokens:>9} {'both':<9} {choice.algorithm:<11} {'':>13} {time_us:>9.1f}  taken: {choice.why}")
    return "\n".join(lines)


def _remote_ranks(bench: ExchangeBench, ranks: int) -> float:
    """Other ranks that compute for a token, on average over drawn tokens of all ranks."""
    home_E = torch.from_numpy(Placement.equal(bench.experts, ranks).home_E).long()
    reached = 0
    for rank in range(ranks):
        _, routing = draw_batch(bench, rank, _SAMPLE)
        here_TR = torch.zeros(_SAMPLE, ranks, dtype=torch.bool).scatter_(1, home_E[routing.ids_TK], True)
        here_TR[:, rank] = False
        reached += int(here_TR.sum())
    return reached / (ranks * _SAMPLE)
