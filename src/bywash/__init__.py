"""bywash: fast Mixture-of-Experts inference on private clusters.

Importing the package is cheap: torch loads with the first name that needs it.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Routing": "bywash.routing",
    "RoutingTrace": "bywash.routing",
    "ExpertParallel": "bywash.moe",
    "Placement": "bywash.balance",
    "StepPlan": "bywash.balance",
    "plan_step": "bywash.balance",
    "open_exchange": "bywash.exchange",
    "BywashError": "bywash.errors",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bywash' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
