"""Every file of a plan, by name: what `bywash fabric emit` writes. Pure; the command line does the writing.

`plan.md` is for people: each number with its arithmetic. `rollout.md` says in which order to apply the rest.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from bywash.errors import ConfigError
from bywash.fabric.config.cumulus import nvue
from bywash.fabric.config.nccl import environment_file
from bywash.fabric.config.nic import nic_script, servers
from bywash.fabric.config.plan import FabricPlan, SwitchPlan
from bywash.fabric.config.rollout import patch, rollout
from bywash.fabric.config.sonic import ConfigDb, adaptive_routing_words, config_db

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


def sonic_configs(plan: FabricPlan) -> dict[str, ConfigDb]:
    """The config_db fragment of every SONiC switch, by switch."""
    return {switch.name: config_db(plan, switch) for switch in plan.switches if switch.rule.os == "sonic"}


def files(plan: FabricPlan, current: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, str]:
    """File name -> text. `current` are config_db files that switches have now; patches are made against them.

    Raises:
        ConfigError: a switch whose name cannot be that of a file.
    """
    for switch in plan.switches:
        if not _FILE_NAME.fullmatch(switch.name):
            raise ConfigError(
                f"topology.nodes: the switch {switch.name!r} gives its files their names; use letters, digits and . _ "
                "-, beginning with a letter or a digit"
            )
    made = {"plan.md": describe(plan), "rollout.md": _rollout(plan)}
    for name, config in sonic_configs(plan).items():
        made[f"{name}.json"] = _json(config)
        made[f"{name}.patch.json"] = _json(patch((current or {}).get(name, {}), config))
    for switch in plan.switches:
        if switch.rule.os == "cumulus":
            made[f"{switch.name}.nv"] = nvue(plan, switch)
    for server, nics in servers(plan).items():
        made[f"server{server}.nic.sh"] = nic_script(plan, nics)
        made[f"server{server}.nccl.env"] = environment_file(plan, nics)
    return made


def describe(plan: FabricPlan) -> str:
    """The plan with all of its arithmetic. Switches that are alike are described once."""
    lines = [plan.topology.describe(), f"longest control loop: {plan.loop_us:.2f} us"]
    lines.append(bounds(plan))
    alike: dict[tuple[Any, ...], list[SwitchPlan]] = {}
    for switch in plan.switches:
        key = (switch.asic, switch.rule, switch.pool_bytes, switch.headrooms, switch.wreds, len(switch.ports))
        alike.setdefault(tuple(map(repr, key)), []).append(switch)
    for same in alike.values():
        lines += ["", *_switch(same)]
    return "\n".join(lines) + "\n"


def bounds(plan: FabricPlan) -> str:
    """What senders must keep to so that a first burst, which no control has seen, pauses nobody."""
    keep = _sending(plan)
    if plan.rotation is None:
        return keep + f"first bursts: {plan.values.incast} senders at once to one receiver fit below the first pause"
    return keep + (
        f"first bursts: {plan.values.incast} senders at full rate to one receiver pause it; let at most "
        f"{plan.rotation} send at once (an all-to-all in rotation has one), or pace each to {plan.pace_gbps:g} Gb/s"
    )


def _sending(plan: FabricPlan) -> str:
    """The schedule that the values file wants of senders; no switch or NIC setting enforces it."""
    sending = plan.values.sending
    words = [f"at most {sending.active} messages of a NIC under way at once"] if sending.active else []
    words += [f"each QP paced to {sending.pace_gbps:g} Gb/s"] if sending.pace_gbps else []
    if sending.pace_by_counts:
        words.append(
            f"each message paced to {sending.pace_by_counts:g} times its share of the receiver's link, which is its "
            "bytes over all bytes that the receiver is due in the exchange"
        )
    return f"senders: {', '.join(words)} (the exchange has to keep to it)\n" if words else ""


def _switch(same: list[SwitchPlan]) -> list[str]:
    first = same[0]
    names = ", ".join(switch.name for switch in same[:4]) + (f" and {len(same) - 4} more" if len(same) > 4 else "")
    lines = [
        f"{names}: {first.asic.name}, {len(first.ports)} ports, {first.rule.os}, {first.rule.buffer_model} buffer model"
    ]
    lines += [f"  {line}" for line in first.lines]
    for one in first.headrooms:
        lines.append(f"  headroom {one.gbps} Gb/s, {one.cable_m} m ({one.headroom.source}):")
        lines += [f"    {line}" for line in one.headroom.lines]
        if one.on_switch is not None:
            used = "this is what the switch will take" if first.rule.buffer_model == "dynamic" else "for comparison"
            lines.append(
                f"    today's dynamic model computes xoff {one.on_switch.xoff_bytes}, size "
                f"{one.on_switch.size_bytes} B: {used}"
            )
    for wred in first.wreds:
        lines.append(f"  marking at {wred.gbps} Gb/s, decided by port {wred.decided_by}:")
        lines += [f"    {line}" for line in wred.marking.lines]
    return lines


def _rollout(plan: FabricPlan) -> str:
    lines = [f"# Rolling out {plan.values.name}", ""]
    lines += [f"{step.number}. **{step.device}**: `{step.action}` ({step.why})" for step in rollout(plan)]
    lines += [
        "",
        "To go back: the NICs first (`nic.sh --undo`), then the switches in the opposite order.",
        "",
        bounds(plan),
    ]
    words = adaptive_routing_words(plan.values)
    if words:
        lines += ["", words]
    return "\n".join(lines) + "\n"


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"


def plan_json(plan: FabricPlan) -> dict[str, Any]:
    """The plan's numbers as plain data, for `--json`."""
    return {
        "fabric": plan.values.name,
        "loop_us": round(plan.loop_us, 3),
        "pace_gbps": plan.pace_gbps,
        "rotation": plan.rotation,
        "switches": [
            {
                "name": switch.name,
                "asic": switch.asic.name,
                "pool_bytes": switch.pool_bytes,
                "reserved_bytes": switch.reserved_bytes,
                "headroom": [
                    {
                        "gbps": one.gbps,
                        "cable_m": one.cable_m,
                        "size_bytes": one.headroom.size_bytes,
                        "xon_bytes": one.headroom.xon_bytes,
                        "xoff_bytes": one.headroom.xoff_bytes,
                        "dynamic_model_xoff_bytes": one.on_switch.xoff_bytes if one.on_switch else None,
                    }
                    for one in switch.headrooms
                ],
                "marking": [
                    {
                        "gbps": one.gbps,
                        "kmin_bytes": one.marking.kmin_bytes,
                        "kmax_bytes": one.marking.kmax_bytes,
                        "pmax_percent": one.marking.pmax_percent,
                        "first_pause_bytes": one.marking.first_pause_bytes,
                        "pace_gbps": one.marking.pace_gbps,
                        "rotation": one.marking.rotation,
                    }
                    for one in switch.wreds
                ],
            }
            for switch in plan.switches
        ],
    }
