"""Tuning: ECN, PFC and DCQCN parameters chosen by simulating the user's own traffic, judged on traffic held out.

    tuning = tune(make_plan(*load_values("fabric.yaml")), search_cases, heldout_cases, Effort(jobs=2))
    print("\\n".join(tuning_text(tuning)))

Reading order: `space` (what may be chosen), `objective` (what a choice is worth), `search`, `heldout`, `session`,
`report`; `pool` runs the simulations.
Knows flows, not tokens: the command line and the benchmark turn routing traces into flows.
"""

from bywash.fabric.tune.heldout import compare
from bywash.fabric.tune.objective import Case, make_fabric
from bywash.fabric.tune.pool import Pool
from bywash.fabric.tune.report import tuning_json, tuning_text, values_text
from bywash.fabric.tune.session import Effort, Tuning, tune
from bywash.fabric.tune.space import Setting

__all__ = [
    "Case",
    "Effort",
    "Pool",
    "Setting",
    "Tuning",
    "compare",
    "make_fabric",
    "tune",
    "tuning_json",
    "tuning_text",
    "values_text",
]
