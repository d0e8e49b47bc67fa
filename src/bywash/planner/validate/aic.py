"""AIConfigurator's own prediction of a serving point, where its package is installed and its tables reach.

Its estimator (`aiconfigurator-core`, Apache-2.0) is asked as its sweeps ask: continuous batching, one prompt at a time
between decode steps, quantisation as the checkpoint says; where that has no table, attention in bf16. Knows nothing of
our prediction.
"""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

from bywash.planner.validate.serving import Point
from bywash.planner.validate.tables import PACKAGE

VERSION = "current"
MOST_CONTEXT = 8192


def installed() -> bool:
    """Whether it can be asked at all."""
    return find_spec(PACKAGE) is not None


def aic_tpot_ms(point: Point) -> float | None:
    """Milliseconds between tokens; None where it gives no answer."""
    if not installed():
        return None
    dp = 1 if point.tp > 1 else point.devices
    for fmha in (None, "bfloat16"):
        found = _ask(point.model_path, point.system, point.backend, point.devices, point.tp, fmha)
        if found is None:
            continue
        backend, model, database = found
        try:
            return _tpot(backend, model, database, point, dp)
        except Exception as error:  # whatever it raises, it has no answer
            logging.getLogger(__name__).debug("AIConfigurator has no answer for %s: %s", point, error)
    return None


def _tpot(backend: Any, model: Any, database: Any, point: Point, dp: int) -> float | None:
    from aiconfigurator_core.sdk.config import RuntimeConfig

    load = RuntimeConfig(batch_size=max(1, point.concurrency // dp), isl=point.prompt_tokens, osl=point.output_tokens)
    summary = backend.run_agg(model, database, load, ctx_tokens=min(point.prompt_tokens, MOST_CONTEXT))
    value = float(summary.get_summary_df()["tpot"].iloc[0])
    return value if value > 0 else None


@cache
def _ask(path: str, system: str, backend: str, devices: int, tp: int, fmha: str | None) -> tuple[Any, Any, Any] | None:
    """Its engine, model and tables of one configuration; None where it refuses."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database_view

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns of every table that it borrows
    dp = 1 if tp > 1 else devices
    try:
        config = build_model_config(tp, 1, dp, 1, devices, fmha_quant_mode=fmha)
        database = get_database_view(system, backend, VERSION)
        return None if database is None else (get_backend(backend), get_model(path, config, backend), database)
    except Exception as error:  # an unknown model, version or table: each its own class
        logging.getLogger(__name__).debug("AIConfigurator refuses %s on %s: %s", path, system, error)
        return None
