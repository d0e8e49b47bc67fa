"""Cumulus Linux: NVUE commands per switch, filled into `templates/cumulus.nv`.

Only commands that NVIDIA's reference names are written. What has none is said in the file: Cumulus computes XOFF, XON
and pools from the cable length, and its dynamic threshold factor is left alone. Adaptive routing is written only when
the values file asks for it.
"""

from dataclasses import dataclass

from bywash.fabric.config.expand import expand_lines, template_text
from bywash.fabric.config.plan import FabricPlan, SwitchPlan
from bywash.fabric.config.sonic import lossy_queues
from bywash.fabric.config.values import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    queue: int
    percent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    code: int
    tc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Class:
    number: int


def nvue(plan: FabricPlan, switch: SwitchPlan) -> str:
    """The commands of one switch, one a line; `nv config apply` makes them hold."""
    values = plan.values
    scope = {"switch": switch, "values": values, "pfc_enable": ",".join(map(str, values.priorities))}
    lists = {
        "port": switch.ports,
        "cable": sorted({port.cable_m for port in switch.ports}),
        "wred": switch.wreds,
        "share": _shares(values),
        "dscp": [_Code(code=code, tc=values.traffic_class_of(code)) for code in range(64)],
        "tc": [_Class(number=tc) for tc in range(8)],
    }
    return expand_lines(template_text("cumulus.nv"), scope, lists) + adaptive_routing_lines(plan, switch)


def adaptive_routing_lines(plan: FabricPlan, switch: SwitchPlan) -> str:
    """Adaptive routing on every port that shares an ECMP route, or nothing when it was not asked for."""
    if not plan.values.adaptive_routing:
        return ""
    uplinks = [port.name for port in switch.ports if not port.peer_is_host]
    lines = ["# Adaptive routing reorders packets: the NICs must accept them out of order."]
    lines += [f"nv set interface {name} router adaptive-routing enable on" for name in uplinks]
    return "\n".join(lines) + "\n"


def _shares(values: Values) -> list[_Share]:
    """Weights as percentages that sum to 100: a queue of each lossless class, the rest shared by lossy queues."""
    lossy = lossy_queues(values)
    total = sum(one.weight for one in values.lossless) + values.lossy_weight
    shares = [_Share(queue=one.priority, percent=100 * one.weight // total) for one in values.lossless]
    left = 100 - sum(share.percent for share in shares)
    shares += [_Share(queue=queue, percent=left // len(lossy)) for queue in lossy[1:]]
    first = 100 - sum(share.percent for share in shares)
    return sorted([*shares, _Share(queue=lossy[0], percent=first)], key=lambda share: share.queue)
