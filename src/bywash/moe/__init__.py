"""The MoE layer: experts' compute and their spread over ranks."""

from bywash.moe.experts import Experts, GatedExperts, run_experts
from bywash.moe.layer import ExpertParallel
from bywash.moe.naive import expert_parallel_naive

__all__ = ["ExpertParallel", "Experts", "GatedExperts", "expert_parallel_naive", "run_experts"]
