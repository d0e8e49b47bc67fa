"""Who computes what: home placement and the plan of each step. Integers only; no torch, no processes."""

from bywash.balance.placement import Placement
from bywash.balance.plan import StepPlan, digest32, plan_step

__all__ = ["Placement", "StepPlan", "digest32", "plan_step"]
