"""Our own figures on two H200 (docs/benchmarks.md), against what the planner says of the same steps.

The experts' rates were fitted to expert times of the same runs (`figures`) and the exchange's constants to earlier
ones (`exchange.cost`); whole layers were not fitted to. Knows no files.
"""

from dataclasses import dataclass, replace

import numpy as np

from bywash.planner import compute
from bywash.planner.cluster import parse_cluster
from bywash.planner.group import make_group, placements
from bywash.planner.model import load_model_shape
from bywash.planner.overflow import home_loads
from bywash.planner.traffic import WAYS, Traffic, group_traffic
from bywash.planner.validate.deepep import uniform_choices
from bywash.planner.validate.points import Check
from bywash.planner.wire import exchange_lines

RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """One figure: `what` is dispatch, combine or layer; `tokens` of each rank; us."""

    what: str
    tokens: int
    experts: int
    dtype: str
    us: float


OWN = tuple(
    Own(what=what, tokens=tokens, experts=experts, dtype=dtype, us=us)
    for what, tokens, experts, dtype, us in (
        ("dispatch", 4096, 256, "bf16", 176.0),
        ("dispatch", 512, 256, "bf16", 28.5),
        ("dispatch", 128, 256, "bf16", 12.4),
        ("dispatch", 4096, 256, "fp8", 103.8),
        ("dispatch", 512, 256, "fp8", 19.9),
        ("dispatch", 128, 256, "fp8", 11.5),
        ("combine", 4096, 256, "bf16", 226.1),
        ("combine", 512, 256, "bf16", 39.7),
        ("combine", 128, 256, "bf16", 14.9),
        ("layer", 4096, 256, "bf16", 5591.0),
        ("layer", 4096, 64, "bf16", 5227.0),
        ("layer", 128, 16, "bf16", 239.7),
        ("layer", 128, 256, "bf16", 2618.0),
        ("layer", 4096, 256, "fp8", 5091.0),
        ("layer", 4096, 64, "fp8", 4148.0),
    )
)
"""Tables `GPU exchange, two H200` (counts first; combine `fast`) and `Whole layer, two H200`."""


def own_checks() -> list[Check]:
    """One check for each figure."""
    return [
        Check(
            regime=f"{one.what}, two H200",
            name=f"{one.tokens} tokens, {one.experts} experts, {one.dtype}",
            measured=one.us,
            predicted=predict(one),
        )
        for one in OWN
    ]


def predict(one: Own) -> float:
    """By the planner's exchange lines and experts' rates: us."""
    model = replace(load_model_shape("deepseek-v3"), experts=one.experts, dtype=one.dtype)
    group = make_group(parse_cluster({"nodes": [{"name": "n", "device": "h200", "devices": RANKS}]}), (0,))
    homes = placements(None, np.full(RANKS, one.experts // RANKS), 1, one.experts)
    choices = uniform_choices(RANKS, one.experts, model.top_k, nodes=1, most_nodes=1)
    traffic: Traffic = group_traffic(group, choices, homes, WAYS[0], 0)
    lines = exchange_lines(model, group, traffic, None)
    total = one.tokens * RANKS
    if one.what != "layer":
        return (lines.dispatch if one.what == "dispatch" else lines.combine).at(total)
    loads = home_loads(traffic.layers[0], RANKS, total, traffic.tokens)
    experts = compute.experts(model, group, loads.rows_R, loads.active_R).us - compute.start_us(group.device_R[0])
    return lines.dispatch.at(total) + experts + lines.combine.at(total)
