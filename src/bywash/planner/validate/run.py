"""`validate`: all three comparisons, or our own alone where no public tables are at hand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bywash.planner.validate.aic import aic_tpot_ms, installed
from bywash.planner.validate.deepep import Rates, deepep_checks
from bywash.planner.validate.own import own_checks
from bywash.planner.validate.points import Check
from bywash.planner.validate.serving import Serving, serving_checks
from bywash.planner.validate.tables import deepep_rows, find_tables, serving_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What was held against what.

    Attributes:
        own: our figures on two H200.
        deepep, rates: DeepEP's tables, and what was fitted to 1 and 2 nodes; () and None without tables.
        serving: the public serving points; None without tables.
        peer: whether AIConfigurator could be asked.
    """

    own: tuple[Check, ...]
    deepep: tuple[Check, ...] = ()
    rates: Rates | None = None
    serving: Serving | None = None
    peer: bool = False


def validate(folder: Path | None, *, on_point: Callable[[int, int], None] = lambda done, total: None) -> Validation:
    """Compare.

    Args:
        folder: with AIConfigurator's tables; None takes those of its installed package, if there is one.
        on_point: called as serving points end: (done, total).

    Raises:
        ConfigError: the folder has no tables, or they cannot be read.
    """
    own = tuple(own_checks())
    tables = find_tables(folder)
    if tables is None:
        return Validation(own=own)
    deepep, rates = deepep_checks(deepep_rows(tables))
    serving = serving_checks(serving_rows(tables), aic_tpot_ms, on_point=on_point)
    return Validation(own=own, deepep=tuple(deepep), rates=rates, serving=serving, peer=installed())
