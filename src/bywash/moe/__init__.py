"""The MoE layer: experts' compute and their spread over ranks."""

from importlib import import_module
from typing import Any

from bywash.moe.experts import Experts, GatedExperts, run_experts
from bywash.moe.layer import ExpertParallel
from bywash.moe.naive import expert_parallel_naive
from bywash.moe.slots import SlotPool

__all__ = [
    "DeviceLayer",
    "ExpertParallel",
    "Experts",
    "GatedExperts",
    "SlotPool",
    "expert_parallel_naive",
    "open_device_exchange",
    "open_device_experts",
    "pairs_capacity",
    "quantise_gate_up",
    "quantise_weights",
    "run_experts",
]

_FOR_GPUS = {
    "DeviceLayer": "bywash.moe.device_layer",
    "open_device_exchange": "bywash.exchange.select",
    "open_device_experts": "bywash.moe.device_experts",
    "pairs_capacity": "bywash.moe.device_layer",
    "quantise_gate_up": "bywash.moe.fp8_weights",
    "quantise_weights": "bywash.moe.fp8_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _FOR_GPUS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FOR_GPUS[name]), name)
