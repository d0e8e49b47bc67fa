"""Who computes what: home placement, the plan of each step, the slots for spilled work. Integers only; no torch."""

from bywash.balance.limits import Limits, SlotDirectory
from bywash.balance.pieces import ranks_of_pairs
from bywash.balance.placement import Placement
from bywash.balance.plan import StepPlan, digest32, plan_step, prepare_planner

__all__ = [
    "Limits",
    "Placement",
    "SlotDirectory",
    "StepPlan",
    "digest32",
    "plan_step",
    "prepare_planner",
    "ranks_of_pairs",
]
