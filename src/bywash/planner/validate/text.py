"""A validation as text for a terminal and as plain data. Pure."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bywash.planner.cluster_text import table
from bywash.planner.validate.deepep import Rates
from bywash.planner.validate.points import Check, by_regime, order, spread
from bywash.planner.validate.run import Validation
from bywash.planner.validate.serving import Serving

OWN_TARGET, DEEPEP_TARGET = 0.10, 0.15
NO_TABLES = (
    "DeepEP's tables and the public serving points: not compared, no tables at hand; pip install 'bywash[planner]', or "
    "give --data DIR"
)


def validation_text(found: Validation) -> str:
    """All tables; errors are |predicted / measured - 1|."""
    parts = [_own(found.own)]
    if found.rates is None or found.serving is None:
        return "\n\n".join([*parts, NO_TABLES]) + "\n"
    parts += [_deepep(found.deepep, found.rates), _serving(found.serving, found.peer)]
    return "\n\n".join(parts) + "\n"


def validation_json(found: Validation) -> dict[str, Any]:
    """Every check, and the fitted numbers."""
    serving = found.serving
    return {
        "own": [_check(one) for one in found.own],
        "deepep": [_check(one) for one in found.deepep],
        "deepep_fitted": asdict(found.rates) if found.rates is not None else None,
        "serving": [_check(one) for one in serving.raw] if serving is not None else [],
        "serving_held_out": [_check(one) for one in serving.scaled] if serving is not None else [],
        "serving_weights": serving.weights if serving is not None else {},
        "serving_skipped": serving.skipped if serving is not None else {},
    }


def held_out(checks: Sequence[Check]) -> list[Check]:
    """DeepEP's points on 4 and 8 nodes, in steps as large as the fitted ones."""
    return [one for one in checks if not one.fitted and "above" not in one.regime]


def _check(one: Check) -> dict[str, Any]:
    return asdict(one) | {"error": one.error, "other_error": one.other_error}


def _own(checks: Sequence[Check]) -> str:
    rows = [["figure", "case", "measured us", "predicted us", "error"]]
    rows += [
        [
            one.regime,
            one.name,
            f"{one.measured:,.1f}",
            f"{one.predicted:,.1f}",
            f"{one.predicted / one.measured - 1:+.1%}",
        ]
        for one in checks
    ]
    all_of_it = spread([one.error for one in checks])
    return f"our own figures, two H200\n{table(rows)}\nmedian error {all_of_it}, target {OWN_TARGET:.0%}: " + _met(
        all_of_it.median, OWN_TARGET
    )


def _met(value: float, target: float) -> str:
    return "met" if value <= target else "not met"


def _deepep(checks: Sequence[Check], rates: Rates) -> str:
    rows = [["kernels", "points", "", "median error", "p90"]]
    for regime, ones in by_regime(checks).items():
        errors = spread([one.error for one in ones])
        told = "fitted" if ones[0].fitted else "held out"
        rows.append([regime, str(errors.count), told, f"{errors.median:.1%}", f"{errors.p90:.1%}"])
    away = spread([one.error for one in held_out(checks)])
    fitted = "; ".join(
        f"{mode}: peer links {rates.peer[mode]:.2f}x ours, starts {rates.dispatch_us[mode]:.0f} / "
        f"{rates.combine_us[mode]:.0f} us, between nodes {rates.node_us[mode]:.0f} us"
        for mode in sorted(rates.peer)
    )
    return (
        f"DeepEP on H100: fitted on 1 and 2 nodes, 4 and 8 predicted\nfitted: NIC {rates.nic_gbps:.0f} Gb/s; {fitted}\n"
        f"{table(rows)}\n{away.count} held-out points of 4 and 8 nodes: median error {away}, target "
        f"{DEEPEP_TARGET:.0%}: {_met(away.median, DEEPEP_TARGET)}"
    )


def _serving(found: Serving, peer: bool) -> str:
    lines = [
        f"public serving points: {found.rows} rows with expert parallelism on one group, {found.points} points",
        *(f"left out, rows: {count} {why}" for why, count in found.skipped.items()),
        f"noise: values that one configuration was measured at, from their median: {found.noise}, "
        f"{found.noise.count} values",
        "time between tokens, nothing fitted; order: rank correlation of ours",
        _compared(found.raw),
        "time between tokens, the held-out half; on the other were fitted, for each stack, start + a x decode step + "
        "b x prompts (ours) and start + a x number (AIConfigurator)",
        _compared(found.scaled),
    ]
    if not peer:
        lines.append("AIConfigurator: not asked, it is not installed (pip install 'bywash[planner]')")
    return "\n".join(lines)


def _compared(checks: Sequence[Check]) -> str:
    """Ours on all points; beside the peer's on those where it gives an answer."""
    rows = [["stack", "points", "ours", "p90", "order", "both", "ours there", "p90", "AIConfigurator", "p90"]]
    for regime, ones in [*by_regime(checks).items(), ("all", list(checks))]:
        both = [one for one in ones if one.other_error is not None]
        mine, there = spread([one.error for one in ones]), spread([one.error for one in both])
        theirs = spread([one.other_error for one in both if one.other_error is not None])
        cells = [f"{x:.1%}" if both else "-" for x in (there.median, there.p90, theirs.median, theirs.p90)]
        rows.append(
            [
                regime,
                str(mine.count),
                f"{mine.median:.1%}",
                f"{mine.p90:.1%}",
                f"{order(ones):.2f}",
                str(len(both)),
                *cells,
            ]
        )
    return table(rows)
