"""The outcome of a run, as JSON for programs and as a table for an operator. Pure: it reads results, moves nothing."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bywash.balance.counters import as_json, imbalance
from bywash.cli.output import stdout_console
from bywash.models.check import CheckReport
from bywash.models.job import JobOptions, RankResult
from bywash.models.loader import read_config
from bywash.models.text import text_for
from bywash.moe.pipeline import Usage

_SHOWN_PROMPTS = 3


def result_json(
    model: str,
    options: JobOptions,
    results: list[RankResult],
    tokens: dict[int, list[int]],
    report: CheckReport | None,
) -> dict[str, Any]:
    """The `--json` document. Sums are over ranks; times are the slowest rank's, in seconds."""
    prefill, decode = max(r.prefill_s for r in results), max(r.decode_s for r in results)
    generated = sum(len(ids) for ids in tokens.values())
    first_tokens = len(tokens)
    rows_LR = results[0].rows_LR
    per_layer = rows_LR.max(axis=1) / np.maximum(rows_LR.mean(axis=1), 1e-9)
    out: dict[str, Any] = {
        "model": model,
        "ranks": len(results),
        "exchange": results[0].exchange,
        "device": results[0].device,
        "experts_by": results[0].experts_by,
        "emulated": results[0].emulated,
        "combine": options.combine,
        "dtype": options.dtype,
        "prompts": len(options.prompts),
        "prompt_tokens": sum(len(p) for p in options.prompts),
        "generated_tokens": generated,
        "rows_sent": sum(r.traffic.rows_sent for r in results),
        "rows_returned": sum(r.traffic.rows_returned for r in results),
        "wire_bytes": sum(r.traffic.wire_bytes for r in results),
        "host_bytes": sum(r.traffic.host_bytes for r in results if r.traffic.host_bytes is not None)
        if results[0].traffic.host_bytes is not None
        else None,
        "logical_bytes": sum(r.traffic.logical_bytes for r in results),
        "imbalance_max_over_mean": round(float(per_layer.mean()), 4),
        "imbalance_worst_layer": round(float(per_layer.max()), 4),
        "rows_per_layer_and_rank": rows_LR.tolist(),
        "experts_per_rank": [r.experts for r in results],
        "weight_bytes_read_per_rank": [r.bytes_read for r in results],
        "load_s": round(max(r.load_s for r in results), 4),
        "prefill_s": round(prefill, 4),
        "decode_s": round(decode, 4),
        "tokens_per_s": round(generated / max(prefill + decode, 1e-9), 2),
        "decode_tokens_per_s": round((generated - first_tokens) / decode, 2) if decode > 0 else None,
        "overlap": _overlap_json(options, results),
        "overflow": _overflow_json(options, results),
        "tokens": [tokens[p] for p in sorted(tokens)],
    }
    if report is not None:
        out |= asdict(report)
    return out


def _overlap_json(options: JobOptions, results: list[RankResult]) -> dict[str, Any]:
    """How prefill and decode were split, why, and how much of the communication no compute covered (all ranks)."""
    found = results[0].overlap
    assert found is not None, "a job that ran has one"
    phases = {
        "prefill": (found.prefill, found.why_prefill, sum((r.prefill_usage for r in results), Usage())),
        "decode": (found.decode, found.why_decode, sum((r.decode_usage for r in results), Usage())),
    }
    out: dict[str, Any] = {"mode": options.overlap}
    for phase, (split, why, used) in phases.items():
        out[phase] = {
            "split": str(split),
            "why": why,
            "communication_fraction": round(used.communication_ns / max(1, used.step_ns), 4),
            "exposed_fraction": round(used.exposed_fraction, 4),
            "hidden_share": round(used.hidden_share, 4),
        }
    return out


def _overflow_json(options: JobOptions, results: list[RankResult]) -> dict[str, Any] | None:
    """What left home and what that cost; None where every row was computed at home at once."""
    asked, found = options.overflow, results[0].overflow
    if asked is None or found is None:
        return None
    counters = found.counters
    at_home, as_run = imbalance(counters, len(results))
    out: dict[str, Any] = {
        "slots": asked.slots,
        "capacity_rows": found.capacity,
        "alpha": round(asked.alpha_1024 / 1024, 4),
        "break_even": asked.break_even,
        "imbalance_at_home": round(at_home, 4),
        "imbalance": round(as_run, 4),
    }
    sums = ("rows_home", "rows_spilled", "rows_waited", "fetches", "fetched_bytes")
    out |= {name: sum(getattr(layer, name) for layer in counters) for name in sums}
    out["most_waves"] = max(layer.most_waves for layer in counters)
    return out | {"layers": as_json(counters)}


def print_summary(
    options: JobOptions, results: list[RankResult], tokens: dict[int, list[int]], outcome: dict[str, Any]
) -> None:
    """Print what an operator asks first: does it agree, who did how much, what moved, how fast."""
    console = stdout_console()
    console.print(
        f"[bold]{escape(str(outcome['model']))}[/bold] on {outcome['ranks']} ranks, exchange {outcome['exchange']}, "
        f"combine {outcome['combine']}, {outcome['dtype']} ("
        + ("GPUs" if outcome["device"] == "cuda" else "ranks of one machine share its cores")
        + f"; experts computed {outcome['experts_by']})"
    )
    if outcome["emulated"]:
        console.print(f"[yellow]{escape(outcome['emulated'])}: times are emulated[/yellow]")
    console.print(_ranks_table(results))
    console.print(_traffic_line(outcome))
    console.print(
        f"speed: {outcome['tokens_per_s']:g} tokens/s generated; prefill {outcome['prefill_s']:.2f} s, decode "
        f"{outcome['decode_s']:.2f} s, loading {outcome['load_s']:.2f} s"
    )
    console.print(_overlap_lines(outcome["overlap"]))
    if outcome["overflow"] is not None:
        console.print(_overflow_lines(outcome["overflow"]))
    if "tokens_identical" in outcome:
        console.print(_check_table(outcome))
    _print_text(console, options, tokens)


def _ranks_table(results: list[RankResult]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("rank", "experts", "weights read MB", "expert rows", "rows sent", "wire MB"):
        table.add_column(name, justify="right")
    rows_R = results[0].rows_LR.sum(axis=0)
    for rank, result in enumerate(results):
        table.add_row(
            str(rank),
            str(result.experts),
            f"{result.bytes_read / 1e6:.2f}",
            f"{int(rows_R[rank]):,}",
            f"{result.traffic.rows_sent:,}",
            f"{result.traffic.wire_bytes / 1e6:.3f}",
        )
    return table


def _traffic_line(outcome: dict[str, Any]) -> str:
    return (
        f"moved: {outcome['rows_sent']:,} rows out, {outcome['wire_bytes'] / 1e6:.3f} MB on the wire for "
        f"{outcome['logical_bytes'] / 1e6:.3f} MB of (token, expert) rows out and back\n"
        f"load: the busiest rank computes {outcome['imbalance_max_over_mean']:.2f}x the mean number of expert rows "
        f"(worst layer {outcome['imbalance_worst_layer']:.2f}x)"
    )


def _overlap_lines(overlap: dict[str, Any]) -> str:
    lines = [
        f"overlap, {phase}: {part['split']}; exposed: {part['exposed_fraction']:.1%} of the layers' time, "
        f"{part['hidden_share']:.0%} of the communication hidden. Why: {part['why']}"
        for phase, part in overlap.items()
        if phase != "mode"
    ]
    return escape("\n".join(lines))


def _overflow_lines(overflow: dict[str, Any]) -> str:
    rows = overflow["rows_home"] + overflow["rows_spilled"]
    capacity = overflow["capacity_rows"]
    return (
        f"overflow: {overflow['rows_spilled']:,} of {rows:,} expert rows left home for {overflow['slots']} slots per "
        f"rank, {overflow['rows_waited']:,} waited there"
        + (f" (capacity {capacity:,} rows, at most {overflow['most_waves']} waves)" if capacity else "")
        + f"; {overflow['fetches']:,} copies of weights, {overflow['fetched_bytes'] / 1e6:.3f} MB\n"
        f"busiest rank of a step: {overflow['imbalance_at_home']:.2f}x the mean at home, {overflow['imbalance']:.2f}x "
        f"as run"
    )


def _check_table(outcome: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    answers = [
        ("generated ids equal one process", outcome["tokens_identical"]),
        ("prefill logits bitwise equal one rank", outcome["logits_identical"]),
        ("generated ids equal transformers", outcome["tokens_identical_transformers"]),
        ("routing equals the model's own router", outcome["router_identical"]),
    ]
    for question, answer in answers:
        table.add_row(question, "[green]yes[/green]" if answer else "[red]no[/red]")
    table.add_row(
        "logit difference to transformers",
        f"{outcome['max_abs_logit_diff']:.2g} (largest logit {outcome['max_abs_logit']:.3g}"
        + (f"; accepted {outcome['tolerance']:.2g})" if outcome["token_diff_to_float32"] is None else ")"),
    )
    if outcome["token_diff_to_float32"] is not None:
        table.add_row(
            "a token's distance from float32",
            f"{outcome['token_diff_to_float32']:.2g}, transformers' own "
            f"{outcome['transformers_token_diff_to_float32']:.2g} (accepted {outcome['tolerance']:.2g})",
        )
    table.add_row("sha256 of the prefill logits", outcome["logits_sha256"][:16] + "...")
    return table


def _print_text(console: Console, options: JobOptions, tokens: dict[int, list[int]]) -> None:
    directory = Path(options.directory)
    vocab = read_config(directory).vocab_size
    if vocab < 256:
        return
    text = text_for(directory, vocab)
    for number in sorted(tokens)[:_SHOWN_PROMPTS]:
        prompt = text.decode(options.prompts[number])
        console.print(f"[dim]{escape(repr(prompt))}[/dim] {escape(repr(text.decode(tokens[number])))}", soft_wrap=True)
    if len(tokens) > _SHOWN_PROMPTS:
        console.print(f"[dim]... and {len(tokens) - _SHOWN_PROMPTS} more prompts (--json has all)[/dim]")
