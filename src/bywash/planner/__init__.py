"""The planner: from a cluster, a model and recorded traffic to a deployment, with the arithmetic of every number.

    plan = make_plan(load_cluster("c.yaml"), load_model_shape("deepseek-v3"), trace, Workload(), Target(tpot_ms=50))
    files = plan_files(plan)

It knows models and the fabric; the runtime it knows through `balance` (who computes which rows) and `moe.pipeline`
(what overlaps). Nothing here runs a model.

Reading order: descriptions (`cluster`, `devices`, `model`, `target`, `sample`; `importers/`), one group of hosts
(`group`, `traffic`, `network`, `wire`, `compute`, `figures`, `overflow`, `ledger`), its price (`candidate`, `cost`),
the search (`search`, `deployment`, `refine`, `sendings`), what comes of it (`plan`, `settings`, `replay`,
`common_home`; `output/`). Those are imported by name from their modules.

Here is the bridge from traces to the fabric, which `bywash fabric traffic` uses too:

    choices = resampled_choices(shipped_trace("prose"), ranks=16, tokens=128, seed=0)
    layers = layer_bytes(choices, [Placement.equal(choices.num_experts, 16)], Method(gpus_per_server=8), RowFormat())
    flows = moe_flows(layers, Wire(topology=topology, frame=frame, rtt_us=5.0), schedule="rotated", compute=Compute())

`choices` (which experts), `moe_traffic` (how many bytes between which hosts), `schedule` (when they leave; how much of
it is exposed). `naive` counts rows one token at a time, as an oracle.
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
