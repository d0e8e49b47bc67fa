"""Which order of sending suits the node leg: every schedule of the `hierarchical` exchange, simulated on a fabric.

The traffic is that of the node leg alone: each token's row once per server, on its source's rail, and one row back.
Knows the simulator and the bytes between hosts; nothing of tokens, nor of processes that run such a schedule.
`bywash fabric schedules` calls it; the names are those of `--node-schedule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bywash.errors import ConfigError
from bywash.exchange.node_schedule import RATED
from bywash.fabric import Scenario, simulate
from bywash.fabric.profiles import Profile
from bywash.fabric.scenario import RoutingConfig, RunConfig
from bywash.planner.moe_traffic import LayerBytes
from bywash.planner.schedule import Compute, Schedule, Wire, exposed_us, moe_flows, nic_for

NODE_SCHEDULES: dict[str, Schedule] = {
    "together": "at-once",
    "rotated": "rotated",
    "staggered": "staggered",
    "paced": "paced",
    "by-counts": "by-counts",
}
"""The exchange's schedules by their names there, and what the simulator calls them."""
MARGIN = 1.02
"""`together` needs no rate and no clock: another schedule must be this much faster to be worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCost:
    """One schedule on one fabric.

    Attributes:
        schedule: its name in the exchange.
        layer_us: simulated time of dispatch and combine of a layer, the compute between them left out.
        bound_us: the least that any schedule needs for the same bytes.
        pauses, marks: PFC pause frames and ECN marks in the whole run.
        peak_queue_bytes: the largest egress queue.
    """

    schedule: str
    layer_us: float
    bound_us: float
    pauses: int
    marks: int
    peak_queue_bytes: int


def schedule_costs(
    layers: Sequence[LayerBytes],
    wire: Wire,
    settings: Profile,
    *,
    compute: Compute | None = None,
    adaptive: bool = False,
    seed: int = 0,
) -> tuple[ScheduleCost, ...]:
    """Simulate every schedule of the node leg, in the order of `NODE_SCHEDULES`.

    Args:
        layers: `layer_bytes` with rows per node on one rail.
        wire: the fabric.
        settings: switches, NICs and frames, such as `profile("rocev2")`.
        compute: between the exchanges; none by default.
        adaptive: whether switches spread packets, and NICs take them out of order.
        seed: of the run.

    Raises:
        ConfigError: nothing to send, sizes that do not fit, or a run that did not finish (named).
    """
    computing = compute or Compute()
    costs = []
    for name, schedule in NODE_SCHEDULES.items():
        result = simulate(
            Scenario(
                name=f"node leg, {name}",
                topology=wire.topology,
                flows=moe_flows(layers, wire, schedule=schedule, compute=computing, barrier="server"),
                classes=settings.classes,
                switch=settings.switch,
                nic=nic_for(schedule, settings.nic),
                routing=RoutingConfig(mode="adaptive" if adaptive else "ecmp"),
                frame=settings.frame,
                run=RunConfig(seed=seed),
            )
        )
        if result.verdict != "completed":
            raise ConfigError(f"schedule {name}: the simulated run ended with {result.verdict!r}")
        numbers = result.summary()
        costs.append(
            ScheduleCost(
                schedule=name,
                layer_us=exposed_us(result, len(layers), computing),
                bound_us=_bound_us(layers, wire),
                pauses=numbers["pauses"],
                marks=numbers["ecn_marks"],
                peak_queue_bytes=numbers["peak_queue_bytes"],
            )
        )
    return tuple(costs)


def _bound_us(layers: Sequence[LayerBytes], wire: Wire) -> float:
    """Per layer, of all bytes at once: a server sends back as soon as all has come, while others still send out."""
    total_HH = np.sum([layer.dispatch_HH + layer.combine_HH for layer in layers], axis=0)
    return float(wire.bound_us(total_HH)) / len(layers)


def fastest(costs: Sequence[ScheduleCost]) -> tuple[ScheduleCost, str]:
    """The schedule to take, and why: `together` unless another is faster by more than `MARGIN`."""
    together = next(cost for cost in costs if cost.schedule == "together")
    best = min(costs, key=lambda cost: cost.layer_us)
    gain = together.layer_us / best.layer_us
    if gain <= MARGIN:
        return together, f"no other is faster by more than {MARGIN - 1:.0%}"
    return best, f"{gain:.2f}x faster than together"


def option(schedule: str) -> str:
    """What to give `bywash run` for a schedule, with what is to be filled in: `--node-schedule paced:GBPS`."""
    return f"--node-schedule {schedule}" + (":GBPS" if schedule in RATED else "")
