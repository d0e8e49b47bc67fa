"""Thirty ways to spoil a config_db: what is changed, what our checks must say, and whether YANG refuses it too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Broken:
    name: str
    spoil: Callable[[Config], None]
    id: str
    where: str
    yang: bool = True


def put(table: str, key: str, field: str, value: str) -> Callable[[Config], None]:
    def spoil(config: Config) -> None:
        config[table][key][field] = value

    return spoil


def row(table: str, key: str, fields: dict[str, str]) -> Callable[[Config], None]:
    def spoil(config: Config) -> None:
        config[table][key] = fields

    return spoil


def drop(table: str, key: str, field: str) -> Callable[[Config], None]:
    def spoil(config: Config) -> None:
        del config[table][key][field]

    return spoil


def gone(table: str, key: str) -> Callable[[Config], None]:
    def spoil(config: Config) -> None:
        del config[table][key]

    return spoil


PG = "pg_lossless_400000_5m_profile"
WRED = "ROCE_400G"
BROKEN = (
    Broken("kmax below kmin", put("WRED_PROFILE", WRED, "green_max_threshold", "1000"), "thresholds-reversed", WRED),
    Broken(
        "yellow kmax below kmin", put("WRED_PROFILE", WRED, "yellow_max_threshold", "1"), "thresholds-reversed", WRED
    ),
    Broken("drop probability 101", put("WRED_PROFILE", WRED, "green_drop_probability", "101"), "bad-value", WRED),
    Broken("ecn word", put("WRED_PROFILE", WRED, "ecn", "ecn_blue"), "bad-value", WRED),
    Broken("wred enable word", put("WRED_PROFILE", WRED, "wred_green_enable", "yes"), "bad-value", WRED),
    Broken("threshold no number", put("WRED_PROFILE", WRED, "green_min_threshold", "1M"), "bad-value", WRED),
    Broken("pool dangling", put("BUFFER_PROFILE", PG, "pool", "no_pool"), "unknown-reference", f"{PG}.pool"),
    Broken("pool gone", gone("BUFFER_POOL", "ingress_lossless_pool"), "unknown-reference", "BUFFER_PROFILE"),
    Broken("dynamic_th 9", put("BUFFER_PROFILE", PG, "dynamic_th", "9"), "bad-value", f"{PG}.dynamic_th"),
    Broken("dynamic_th -9", put("BUFFER_PROFILE", PG, "dynamic_th", "-9"), "bad-value", f"{PG}.dynamic_th"),
    Broken("size missing", drop("BUFFER_PROFILE", PG, "size"), "missing-field", PG),
    Broken("size negative", put("BUFFER_PROFILE", PG, "size", "-1"), "bad-value", f"{PG}.size"),
    Broken("no threshold", drop("BUFFER_PROFILE", PG, "dynamic_th"), "missing-field", PG, yang=False),
    Broken("pool type", put("BUFFER_POOL", "egress_lossy_pool", "type", "sideways"), "bad-value", "egress_lossy_pool"),
    Broken("pool mode missing", drop("BUFFER_POOL", "egress_lossy_pool", "mode"), "missing-field", "egress_lossy_pool"),
    Broken("profile dangling", put("BUFFER_PG", "Ethernet0|3", "profile", "nope"), "unknown-reference", "Ethernet0|3"),
    Broken("group 8", row("BUFFER_PG", "Ethernet0|8", {"profile": PG}), "bad-key", "Ethernet0|8"),
    Broken("group of no port", row("BUFFER_PG", "Ethernet999|3", {"profile": PG}), "unknown-port", "Ethernet999"),
    Broken(
        "queue profile dangling",
        put("BUFFER_QUEUE", "Ethernet0|3", "profile", "nope"),
        "unknown-reference",
        "BUFFER_QUEUE",
    ),
    Broken("queue 99", row("BUFFER_QUEUE", "Ethernet0|99", {"profile": PG}), "bad-key", "Ethernet0|99"),
    Broken(
        "scheduler dangling", put("QUEUE", "Ethernet0|3", "scheduler", "nope"), "unknown-reference", "QUEUE|Ethernet0|3"
    ),
    Broken(
        "wred dangling", put("QUEUE", "Ethernet0|3", "wred_profile", "nope"), "unknown-reference", "QUEUE|Ethernet0|3"
    ),
    Broken("weight 101", put("SCHEDULER", "scheduler.roce", "weight", "101"), "bad-value", "scheduler.roce.weight"),
    Broken("scheduler word", put("SCHEDULER", "scheduler.roce", "type", "FAIR"), "bad-value", "scheduler.roce.type"),
    Broken("dscp 64", put("DSCP_TO_TC_MAP", "ROCE", "64", "3"), "bad-key", "DSCP_TO_TC_MAP|ROCE.64"),
    Broken("tc 17", put("DSCP_TO_TC_MAP", "ROCE", "26", "17"), "bad-value", "DSCP_TO_TC_MAP|ROCE.26"),
    Broken(
        "map dangling", put("PORT_QOS_MAP", "Ethernet0", "dscp_to_tc_map", "NOPE"), "unknown-reference", "PORT_QOS_MAP"
    ),
    Broken("pfc_enable 8", put("PORT_QOS_MAP", "Ethernet0", "pfc_enable", "3,8"), "bad-value", "Ethernet0.pfc_enable"),
    Broken("detection below 100 ms", put("PFC_WD", "Ethernet0", "detection_time", "50"), "bad-value", "detection_time"),
    Broken("detection below poll", put("PFC_WD", "Ethernet0", "detection_time", "150"), "bad-value", "detection_time"),
    Broken("watchdog word", put("PFC_WD", "Ethernet0", "action", "panic"), "bad-value", "Ethernet0.action"),
    Broken(
        "cable in feet", put("CABLE_LENGTH", "AZURE", "Ethernet0", "16ft"), "bad-value", "CABLE_LENGTH|AZURE.Ethernet0"
    ),
    Broken("mtu 10000", put("PORT", "Ethernet0", "mtu", "10000"), "bad-value", "PORT|Ethernet0.mtu"),
    Broken("speed missing", drop("PORT", "Ethernet0", "speed"), "missing-field", "PORT|Ethernet0"),
)
