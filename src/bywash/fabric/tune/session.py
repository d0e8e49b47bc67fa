"""`tune`: from a plan and traffic to a setting, its worth, and how it does on traffic that it was not chosen on.

Joins `search` and `heldout`; knows the names of what others recommend. Called by the command line and the benchmark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bywash.errors import ConfigError
from bywash.fabric.config.plan import FabricPlan
from bywash.fabric.tune.heldout import Row, compare
from bywash.fabric.tune.objective import Case, Fabric, make_fabric, planned, space_of
from bywash.fabric.tune.pool import Pool, Report
from bywash.fabric.tune.search import Found, search
from bywash.fabric.tune.space import GROUPS, Setting, paper, pfc_alone, vendor

VENDOR, TUNED = "SONiC and ConnectX defaults", "tuned"
PAUSE_BUDGET = 0.001
BUDGET = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to search: `budget` simulations, `seed` of the draws, `jobs` processes.

    `pause_budget` is the largest share of port time that may be spent paused; `sending` lets the schedule and pacing of
    senders be chosen too.
    """

    budget: int = BUDGET
    seed: int = 0
    jobs: int = 1
    pause_budget: float = PAUSE_BUDGET
    sending: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("budget", self.budget, 20), ("seed", self.seed, 0), ("jobs", self.jobs, 1)):
            if value < least:
                raise ConfigError(f"{name} = {value}: must be at least {least}")
        if not 0 <= self.pause_budget <= 1:
            raise ConfigError(f"pause_budget = {self.pause_budget:g}: must be from 0 to 1, a share of port time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What `tune` found. `named` are the settings of `rows`, by name: others' recommendations, `TUNED`, parts of it."""

    fabric: Fabric
    found: Found
    named: dict[str, Setting]
    rows: tuple[Row, ...]
    search_cases: tuple[str, ...]
    heldout_cases: tuple[str, ...]
    effort: Effort


def references(plan: FabricPlan, gbps: float) -> dict[str, Setting]:
    """What others recommend, by name; the vendor's first."""
    return {
        VENDOR: vendor(gbps),
        "DCQCN paper": paper(),
        f"DCQCN paper, scaled to {gbps:g}G": paper(gbps),
        "computed, not searched": planned(plan, gbps),
    }


def tune(
    plan: FabricPlan,
    search_cases: Sequence[Case],
    heldout_cases: Sequence[Case],
    effort: Effort,
    *,
    limits: FabricPlan | None = None,
    also: Mapping[str, Setting] | None = None,
    report: Report | None = None,
) -> Tuning:
    """Search on some cases, judge on others.

    Args:
        plan: the network to simulate.
        search_cases, heldout_cases: traffic; no case in both.
        effort: how much, and within what.
        limits: the plan whose switches bound the thresholds, when `plan` is a smaller model of it.
        also: further settings to judge, by name; nothing is learnt from them.
        report: progress, as `pool.Report`.

    Raises:
        ConfigError: too few cases, traffic that does not fit the topology, or no setting that completes it losslessly.
    """
    if not search_cases or not heldout_cases:
        raise ConfigError("tune: needs traffic to search on and other traffic to judge on")
    fabric = make_fabric(plan)
    known = references(plan if limits is None else limits, fabric.gbps)
    space = space_of(plan if limits is None else limits, fabric.gbps, sending=effort.sending)
    cases = [*search_cases, *heldout_cases]
    with Pool(fabric, cases, jobs=effort.jobs, report=report) as pool:
        found = search(
            pool,
            space,
            len(search_cases),
            list(known.values()),
            budget=effort.budget,
            pause_budget=effort.pause_budget,
            seed=effort.seed,
        )
        named = known | {"PFC alone, no ECN": pfc_alone(fabric.gbps)} | dict(also or {})
        named |= {TUNED: found.best} | _parts(found.best, known)
        held = range(len(search_cases), len(cases))
        pool.run(named.values(), held)
        rows = compare({name: pool.outcomes(setting, held) for name, setting in named.items()}, TUNED)
    return Tuning(
        fabric=fabric,
        found=found,
        named=named,
        rows=tuple(rows),
        search_cases=tuple(case.name for case in search_cases),
        heldout_cases=tuple(case.name for case in heldout_cases),
        effort=effort,
    )


def _parts(best: Setting, known: dict[str, Setting]) -> dict[str, Setting]:
    """With a schedule among the changes: the defaults with that schedule, to tell what the schedule alone does."""
    sending = {name: getattr(best, name) for name in GROUPS["sending"]}
    alone = replace(known[VENDOR], **sending)
    return {} if alone == known[VENDOR] else {"defaults, tuned sending": alone}
