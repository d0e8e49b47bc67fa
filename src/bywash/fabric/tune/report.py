"""What a tuning found, in words, in JSON, and as a values file for `bywash fabric emit`. Pure: nobody writes here."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from bywash.fabric.tune.heldout import TIMES, Interval, Row
from bywash.fabric.tune.objective import Score
from bywash.fabric.tune.session import TUNED, VENDOR, Tuning
from bywash.fabric.tune.space import GROUPS, PARAMETERS, Setting, changes

PARETO_ROWS = 8


def values_data(data: Mapping[str, Any], setting: Setting, gbps: float) -> dict[str, Any]:
    """The plain data of a values file with a setting in it; everything else stays as it was."""
    out = dict(data)
    out["dynamic_th"] = setting.dynamic_th
    out["marking"] = {
        "gbps": gbps,
        "kmin_bytes": setting.kmin_bytes,
        "kmax_bytes": setting.kmax_bytes,
        "pmax_percent": setting.pmax_percent,
    }
    out["dcqcn"] = dict(out.get("dcqcn") or {}) | {
        "cnp_interval_us": setting.cnp_interval_us,
        "cut_interval_us": max(1, setting.cnp_interval_us),
        "alpha_g": setting.alpha_g,
        "alpha_timer_us": setting.alpha_timer_us,
        "increase_timer_us": setting.increase_timer_us,
        "byte_counter_bytes": setting.byte_counter_bytes,
        "fast_recovery_steps": setting.fast_recovery_steps,
        "increase_mbps": setting.increase_mbps,
    }
    sending = {name: getattr(setting, name) for name in GROUPS["sending"] if getattr(setting, name)}
    out.pop("sending", None)
    if sending:
        out["sending"] = sending
    return out


def values_text(data: Mapping[str, Any], tuning: Tuning) -> str:
    """A values file with the tuned setting, and where it comes from."""
    tuned = values_data(data, tuning.found.best, tuning.fabric.gbps)
    head = [
        "# Written by `bywash fabric tune`: dynamic_th, marking, dcqcn and sending are its choice, by simulation.",
        f"# Searched on {len(tuning.search_cases)} cases, judged on {len(tuning.heldout_cases)} others; "
        f"{tuning.found.simulations} simulations.",
    ]
    body: str = yaml.safe_dump(tuned, sort_keys=False)
    return "\n".join(head) + "\n" + body


def tuning_text(tuning: Tuning) -> list[str]:
    """For people: what changed and what it is worth, the choices there were, and the judgement."""
    found, budget = tuning.found, tuning.effort.pause_budget
    lines = [
        f"{found.simulations} simulations; {len(tuning.search_cases)} cases searched on, "
        f"{len(tuning.heldout_cases)} held out; pause budget {budget:.2%} of port time in any case",
        "",
        *_settings_text(tuning),
        "",
        "what each group of changes is worth, put back to the defaults alone (search cases)",
    ]
    for one in found.worth:
        effect = f"objective {one.objective_ratio - 1:+.1%}" if one.completed_without else "traffic not completed"
        over = ", over the pause budget" if one.pause_share_without > budget else ""
        lines.append(f"  {one.group:<16} {effect}, paused up to {one.pause_share_without:.3%}{over}")
    lines += ["", *_pareto_text(tuning), "", "held-out cases", *rows_text(tuning.rows), "", *_verdict(tuning)]
    return lines


def _settings_text(tuning: Tuning) -> list[str]:
    """One line for each parameter that differs from the defaults."""
    best, named = tuning.found.best, tuning.named
    shown = {name: setting for name, setting in named.items() if name in (VENDOR, "DCQCN paper", TUNED)}
    width = max(len(name) for name in PARAMETERS)
    lines = [f"{'parameter':<{width}}" + "".join(f" {name:>28}" for name in shown)]
    differing = changes(best, named[VENDOR])
    for name in PARAMETERS:
        mark = "*" if name in differing else " "
        lines.append(
            f"{name:<{width}}" + "".join(f" {_plain(getattr(one, name)):>28}" for one in shown.values()) + mark
        )
    return [*lines, f"ECN thresholds for links of {tuning.fabric.gbps:g} Gb/s; * changed"]


def _pareto_text(tuning: Tuning) -> list[str]:
    front = tuning.found.pareto()
    lines = [
        f"completion against pause and queue: {len(front)} of {len(tuning.found.judged)} settings are beaten by none "
        f"({tuning.found.pareto_cases} search cases)",
        f"  {'objective us':>12} {'p99 us':>9} {'whole us':>9} {'paused':>8} {'queue MB':>8}"
        "   Kmin KiB  Kmax KiB  Pmax  alpha",
    ]
    step = max(1, math.ceil(len(front) / PARETO_ROWS))
    for setting, one in front[::step]:
        mark = "  <- tuned" if setting == tuning.found.best else ""
        lines.append(
            f"  {one.objective_us:>12,.0f} {one.p99_us:>9,.0f} {one.whole_us:>9,.0f} {one.pause_share:>8.3%} "
            f"{one.peak_queue_bytes / 1e6:>8.1f}   {setting.kmin_bytes // 1024:>8,} {setting.kmax_bytes // 1024:>9,} "
            f"{setting.pmax_percent:>4}% {2.0**setting.dynamic_th:>6g}{mark}"
        )
    return lines


def rows_text(rows: Sequence[Row]) -> list[str]:
    """A table of settings on held-out cases; ratios are over the tuned setting's, with 95 % intervals.

    `/ bound` is over the whole exchange's lower bound: what no schedule can beat.
    """
    width = max(len(row.name) for row in rows)
    lines = [
        f"{'':<{width}} {'p99 us':>9} {'mean us':>9} {'whole us':>9} {'/ bound':>9} {'paused':>8} {'at most':>8}"
        f" {'queue MB':>8} {'drops':>6}"
        f"   {'p99 x tuned':>18} {'mean x tuned':>18} {'whole x tuned':>18}"
    ]
    for row in rows:
        one, drops = row.score, "none" if row.score.completed else "FAILED"
        ratios = " ".join(f"{_range(row.ratios[name]):>18}" for name in TIMES)
        lines.append(
            f"{row.name:<{width}} {one.p99_us:>9,.0f} {one.mean_us:>9,.0f} {one.whole_us:>9,.0f} "
            f"{one.whole_us / one.floor_us:>9.2f} {one.pause_share:>8.3%} {one.worst_pause_share:>8.3%} "
            f"{one.peak_queue_bytes / 1e6:>8.1f} {drops:>6}   {ratios}"
        )
    return lines


def _verdict(tuning: Tuning) -> list[str]:
    """Where the tuned setting is better, where it is not, and where the intervals leave it open."""
    lines = []
    tuned = next(row.score for row in tuning.rows if row.name == TUNED)
    for row in tuning.rows:
        if row.name == TUNED:
            continue
        words = [f"paused {tuned.pause_share:.3%} instead of {row.score.pause_share:.3%}"]
        for metric, name in zip(TIMES, ("p99", "mean", "whole")):
            ratio = row.ratios[metric]
            if ratio.low > 1:
                words.append(f"{name} {1 - 1 / ratio.value:.0%} shorter")
            elif ratio.high < 1:
                words.append(f"{name} {1 / ratio.value - 1:.0%} LONGER")
            else:
                words.append(f"{name} no clear difference")
        lines.append(f"tuned against {row.name}: " + ", ".join(words))
    return lines


def tuning_json(tuning: Tuning) -> dict[str, Any]:
    """Everything, as plain data."""
    found = tuning.found
    return {
        "topology": tuning.fabric.topology.describe(),
        "seed": tuning.effort.seed,
        "pause_budget": tuning.effort.pause_budget,
        "simulations": found.simulations,
        "search_cases": list(tuning.search_cases),
        "heldout_cases": list(tuning.heldout_cases),
        "tuned": setting_json(found.best),
        "changes": {name: list(pair) for name, pair in changes(found.best, tuning.named[VENDOR]).items()},
        "worth": [{name: getattr(one, name) for name in one.__dataclass_fields__} for one in found.worth],
        "pareto": [{"setting": setting_json(setting)} | score_json(one) for setting, one in found.pareto()],
        "heldout": rows_json(tuning.rows),
    }


def rows_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Held-out rows as plain data."""
    return [
        {"name": row.name}
        | score_json(row.score)
        | {"pause_share_95": _interval_json(row.pause_share)}
        | {f"{name}_over_tuned": _interval_json(row.ratios[name]) for name in TIMES}
        for row in rows
    ]


def setting_json(setting: Setting) -> dict[str, Any]:
    """A setting's parameters by name."""
    return {name: getattr(setting, name) for name in PARAMETERS}


def score_json(score: Score) -> dict[str, Any]:
    """A score by name; null for what has no finite value."""
    return {name: _finite(getattr(score, name)) for name in Score.__dataclass_fields__}


def _interval_json(one: Interval) -> list[float | None]:
    return [_finite(one.value), _finite(one.low), _finite(one.high)]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def _range(one: Interval) -> str:
    return f"{one.value:.2f} ({one.low:.2f}-{one.high:.2f})" if math.isfinite(one.value) else "not completed"


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
