"""The planner: what a deployment does to its network, before there is one. It knows models and the fabric; no torch.

A routing trace, or expert counts, becomes the traffic of an exchange:

    choices = resampled_choices(shipped_trace("prose"), ranks=16, tokens=128, seed=0)
    layers = layer_bytes(choices, [Placement.equal(choices.num_experts, 16)], Method(gpus_per_server=8), RowFormat())
    flows = moe_flows(layers, Wire(topology=topology, frame=frame, rtt_us=5.0), schedule="rotated", compute=Compute())

Reading order: `choices` (which experts), `moe_traffic` (how many bytes between which hosts), `schedule` (when they
leave; how much of it is exposed). `naive` counts rows one token at a time, as an oracle.
"""

from bywash.planner.choices import Router, TokenChoices, drawn_choices, recorded_choices, resampled_choices
from bywash.planner.moe_traffic import LayerBytes, Method, RowFormat, layer_bytes
from bywash.planner.schedule import SCHEDULES, Compute, Schedule, Wire, exposed_us, moe_flows, nic_for, round_trip_us

__all__ = [
    "SCHEDULES",
    "Compute",
    "LayerBytes",
    "Method",
    "Router",
    "RowFormat",
    "Schedule",
    "TokenChoices",
    "Wire",
    "drawn_choices",
    "exposed_us",
    "layer_bytes",
    "moe_flows",
    "nic_for",
    "recorded_choices",
    "resampled_choices",
    "round_trip_us",
]
