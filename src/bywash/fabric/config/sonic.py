"""SONiC: a `config_db.json` fragment per switch, filled into `templates/sonic*.yaml`.

Only puts a plan's numbers into SONiC's words: flat tables of strings, keys joined with `|`. `yang` translates and
validates them, `rollout` makes patches of them. Adaptive routing (ARS) has no place in SONiC's own models yet, so
nothing is written for it; `adaptive_routing_words` says so.
"""

from typing import Any

from bywash.fabric.config.expand import expand_tree, template_tree
from bywash.fabric.config.plan import LOSSY_QUEUE_BYTES, FabricPlan, SwitchPlan
from bywash.fabric.config.values import Values

ConfigDb = dict[str, dict[str, Any]]
"""Table -> key -> field -> string, as in config_db.json."""

LOSSY_GROUP = 0


def config_db(plan: FabricPlan, switch: SwitchPlan) -> ConfigDb:
    """The fragment of one switch. Pure: the same plan gives the same file."""
    values = plan.values
    scope = {
        "switch": switch,
        "values": values,
        "pfc_enable": ",".join(map(str, values.priorities)),
        "lossy_group": LOSSY_GROUP,
        "lossy_queue_bytes": LOSSY_QUEUE_BYTES,
    }
    lists = {
        "port": switch.ports,
        "headroom": switch.headrooms,
        "wred": switch.wreds,
        "lossless": sorted(values.lossless, key=lambda one: one.priority),
        "lossy": lossy_queues(values),
        "dscp": [_Code(code, values.traffic_class_of(code)) for code in range(64)],
        "tc": [_Class(tc, tc if tc in values.priorities else LOSSY_GROUP) for tc in range(8)],
    }
    tables: ConfigDb = {}
    for name in ("sonic.yaml", f"sonic-{switch.rule.buffer_model}.yaml"):
        tables |= expand_tree(template_tree(name), scope, lists)
    return tables


def lossy_queues(values: Values) -> list[int]:
    """Queues that are neither lossless nor the CNP's."""
    return [queue for queue in range(8) if queue not in values.priorities and queue != values.cnp.priority]


def adaptive_routing_words(values: Values) -> str:
    """What a person must be told about adaptive routing on SONiC, or an empty string."""
    if not values.adaptive_routing:
        return ""
    return (
        "adaptive_routing: SONiC's released models have no table for adaptive routing and switching (ARS), so none is "
        "written; turn it on as the platform's vendor documents, and only with NICs that accept packets out of order"
    )


class _Code:
    def __init__(self, code: int, tc: int) -> None:
        self.code, self.tc = code, tc


class _Class:
    def __init__(self, number: int, group: int) -> None:
        self.number, self.group = number, group
