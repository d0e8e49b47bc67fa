"""Rolling a configuration out: RFC 6902 patches for SONiC's `config apply-patch`, and the order to apply them in.

A patch touches only what the plan knows: rows that it names, and rows of the same ports that would overlap them.
Physical facts (lanes, speed, alias) of a switch's PORT table are never changed. Within a patch, what is referred to
comes before what refers to it. Pure; called by the command line and `audit`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bywash.fabric.config.plan import FabricPlan, SwitchPlan

Operation = dict[str, Any]

_ORDER = (
    "DEVICE_METADATA", "PORT", "CABLE_LENGTH", "DSCP_TO_TC_MAP", "TC_TO_PRIORITY_GROUP_MAP", "TC_TO_QUEUE_MAP",
    "MAP_PFC_PRIORITY_TO_QUEUE", "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP", "LOSSLESS_TRAFFIC_PATTERN",
    "DEFAULT_LOSSLESS_BUFFER_PARAMETER", "BUFFER_POOL", "BUFFER_PROFILE", "BUFFER_PORT_INGRESS_PROFILE_LIST",
    "BUFFER_PORT_EGRESS_PROFILE_LIST", "BUFFER_PG", "BUFFER_QUEUE", "SCHEDULER", "WRED_PROFILE", "QUEUE", "PFC_WD",
    "PORT_QOS_MAP",
)  # fmt: skip
"""Tables in the order of their references; PORT_QOS_MAP last, since it turns PFC on."""

_BY_FIELD = {"DEVICE_METADATA", "PORT", "CABLE_LENGTH", "PORT_QOS_MAP"}
"""Tables whose rows hold more than a plan knows: only its own fields change."""
_FACTS = {"PORT": {"lanes", "speed", "admin_status"}, "DEVICE_METADATA": {"hwsku", "platform", "hostname"}}
"""Fields that are added where they are missing, and otherwise left as they are."""
_OWNED_BY_PORT = {"BUFFER_PG", "BUFFER_QUEUE", "QUEUE"}
"""Tables keyed port|number or port|range: other rows of our ports overlap ours, so they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a rollout: what to do to which device, and why now."""

    number: int
    device: str
    action: str
    why: str


def patch(current: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Operation]:
    """RFC 6902 operations that turn `current` into one in which all of `wanted` holds. Empty when it does already."""
    operations: list[Operation] = []
    removals: list[Operation] = []
    tables = sorted(wanted, key=lambda name: _ORDER.index(name) if name in _ORDER else -1)
    for table in tables:
        if table not in current:
            operations.append({"op": "add", "path": _pointer(table), "value": dict(wanted[table])})
            continue
        for key, row in wanted[table].items():
            operations += _row(table, key, current[table].get(key), row)
        if table in _OWNED_BY_PORT:
            ports = {key.split("|")[0] for key in wanted[table]}
            stale = [key for key in current[table] if key.split("|")[0] in ports and key not in wanted[table]]
            removals += [{"op": "remove", "path": _pointer(table, key)} for key in stale]
    return removals + operations


def _row(table: str, key: str, old: Any, new: Mapping[str, Any]) -> list[Operation]:
    if not isinstance(old, Mapping):
        return [{"op": "add", "path": _pointer(table, key), "value": dict(new)}]
    if table not in _BY_FIELD:
        same = dict(old) == dict(new)
        return [] if same else [{"op": "replace", "path": _pointer(table, key), "value": dict(new)}]
    operations = []
    for field, value in new.items():
        if field not in old:
            operations.append({"op": "add", "path": _pointer(table, key, field), "value": value})
        elif old[field] != value and field not in _FACTS.get(table, set()):
            operations.append({"op": "replace", "path": _pointer(table, key, field), "value": value})
    return operations


def _pointer(*parts: str) -> str:
    """RFC 6901: `~` is `~0`, `/` is `~1`."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


def rollout(plan: FabricPlan) -> list[Step]:
    """The order: switches from the top down and one at a time, the NICs after all of them, then the jobs.

    A class is lossless only where every hop has headroom for it, so no NIC may mark traffic into it before the last
    switch is ready. One switch at a time leaves the others to carry the traffic while its buffers are set anew.
    """
    tiers = {node.name: node.tier for node in plan.topology.nodes}
    switches = sorted(plan.switches, key=lambda switch: (-tiers[switch.name], plan.switches.index(switch)))
    steps = [
        Step(
            number=number,
            device=switch.name,
            action=_action(switch),
            why="drain it first: buffers of live ports are set anew"
            if number == 1
            else "one at a time; peers carry on",
        )
        for number, switch in enumerate(switches, start=1)
    ]
    hosts = sorted({nic.server for nic in plan.nics})
    nics = Step(
        number=len(steps) + 1,
        device=f"servers {hosts[0]} to {hosts[-1]}",
        action="nic.sh --dry-run, then nic.sh",
        why="only now does every hop protect the class that NICs will mark",
    )
    jobs = Step(
        number=len(steps) + 2,
        device="jobs",
        action="start with the nccl.env of their server",
        why="NICs classify by DSCP now",
    )
    return [*steps, nics, jobs]


def _action(switch: SwitchPlan) -> str:
    if switch.rule.os == "cumulus":
        return f"source {switch.name}.nv, then nv config apply"
    return f"config apply-patch {switch.name}.patch.json"
