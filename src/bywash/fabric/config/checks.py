"""Structural checks of one config_db, always run: types, ranges, references. What YANG checks, without YANG.

Says nothing of whether values are good; that is `audit_switch`. Only tables of buffers and QoS are looked at: a
config_db has many others, which are none of our business. Called by `audit` and the command line.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from bywash.fabric.config.findings import Finding

Rows = Mapping[str, Any]

_RANGES: dict[str, dict[str, tuple[int, int]]] = {
    "BUFFER_POOL": {"size": (0, 1 << 40), "xoff": (0, 1 << 40), "percentage": (0, 100)},
    "BUFFER_PROFILE": {
        "size": (0, 1 << 40), "xon": (0, 1 << 40), "xoff": (0, 1 << 40), "xon_offset": (0, 1 << 40),
        "dynamic_th": (-8, 7), "static_th": (0, 1 << 40),
    },
    "SCHEDULER": {"weight": (1, 100)},
    "PORT": {"mtu": (68, 9216), "speed": (1, 1_600_000)},
    "PFC_WD": {"detection_time": (100, 5000), "restoration_time": (100, 60_000), "POLL_INTERVAL": (100, 1000)},
    "LOSSLESS_TRAFFIC_PATTERN": {"mtu": (1, 9216), "small_packet_percentage": (0, 100)},
    "DEFAULT_LOSSLESS_BUFFER_PARAMETER": {"default_dynamic_th": (-8, 7)},
    "WRED_PROFILE": {
        f"{colour}_{what}": (0, 100 if what == "drop_probability" else 1 << 40)
        for colour in ("green", "yellow", "red") for what in ("min_threshold", "max_threshold", "drop_probability")
    },
}  # fmt: skip
_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "BUFFER_POOL": {"type": ("ingress", "egress", "both"), "mode": ("static", "dynamic")},
    "SCHEDULER": {"type": ("DWRR", "WRR", "STRICT")},
    "PFC_WD": {"action": ("drop", "forward", "alert")},
    "WRED_PROFILE": {f"wred_{colour}_enable": ("true", "false") for colour in ("green", "yellow", "red")}
    | {
        "ecn": (
            "ecn_none", "ecn_green", "ecn_yellow", "ecn_red", "ecn_green_yellow", "ecn_green_red", "ecn_yellow_red",
            "ecn_all",
        )
    },
}  # fmt: skip
_NEEDED = {
    "BUFFER_POOL": ("type", "mode"),
    "BUFFER_PROFILE": ("pool", "size"),
    "PORT": ("lanes", "speed"),
    "LOSSLESS_TRAFFIC_PATTERN": ("mtu", "small_packet_percentage"),
}
_MAPS = {
    "DSCP_TO_TC_MAP": (63, 7), "TC_TO_PRIORITY_GROUP_MAP": (7, 7), "TC_TO_QUEUE_MAP": (7, 7),
    "MAP_PFC_PRIORITY_TO_QUEUE": (7, 7), "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP": (7, 7),
}  # fmt: skip
"""Tables of maps: the largest key and value."""
_REFERENCES = {
    "BUFFER_PROFILE": {"pool": "BUFFER_POOL"},
    "BUFFER_PG": {"profile": "BUFFER_PROFILE"},
    "BUFFER_QUEUE": {"profile": "BUFFER_PROFILE"},
    "BUFFER_PORT_INGRESS_PROFILE_LIST": {"profile_list": "BUFFER_PROFILE"},
    "BUFFER_PORT_EGRESS_PROFILE_LIST": {"profile_list": "BUFFER_PROFILE"},
    "QUEUE": {"scheduler": "SCHEDULER", "wred_profile": "WRED_PROFILE"},
    "PORT_QOS_MAP": {
        "dscp_to_tc_map": "DSCP_TO_TC_MAP", "tc_to_pg_map": "TC_TO_PRIORITY_GROUP_MAP",
        "tc_to_queue_map": "TC_TO_QUEUE_MAP",
        "pfc_to_queue_map": "MAP_PFC_PRIORITY_TO_QUEUE", "pfc_to_pg_map": "PFC_PRIORITY_TO_PRIORITY_GROUP_MAP",
    },
}  # fmt: skip
_OF_PORTS = {"BUFFER_PG": 7, "BUFFER_QUEUE": 15, "QUEUE": 47}
"""Tables keyed port|number or port|range, and the largest number."""
_PER_PORT = ("PORT_QOS_MAP", "PFC_WD", "BUFFER_PORT_INGRESS_PROFILE_LIST", "BUFFER_PORT_EGRESS_PROFILE_LIST")
_NOT_PORTS = {"global", "GLOBAL", "CPU"}
_KNOWN = {*_RANGES, *_WORDS, *_MAPS, *_REFERENCES, *_OF_PORTS, *_PER_PORT, "CABLE_LENGTH"}
_LIST_OF_PRIORITIES = re.compile(r"([0-7](,[0-7])*)?")
_CABLE = re.compile(r"[0-9]+m")


def check(device: str, config: Mapping[str, Any]) -> list[Finding]:
    """Every structural finding of one device's config_db. Ids: bad-table, bad-value, bad-key, missing-field,
    unknown-reference, unknown-port, thresholds-reversed."""
    findings: list[Finding] = []
    for table, rows in config.items():
        if table not in _KNOWN:
            continue
        if not isinstance(rows, Mapping) or not all(isinstance(row, Mapping) for row in rows.values()):
            findings.append(
                _finding("bad-table", f"{device} {table}", "no rows of fields", "table -> key -> field", "unreadable")
            )
            continue
        for key, row in rows.items():
            findings += _row(f"{device} {table}|{key}", table, key, row, config)
    return findings


def _row(where: str, table: str, key: str, row: Rows, config: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _missing(where, table, row)
    yield from _values(where, table, row)
    yield from _key(where, table, key, config)
    yield from _references(where, table, row, config)
    if table in _MAPS:
        yield from _map(where, row, *_MAPS[table])
    if table == "WRED_PROFILE":
        yield from _thresholds(where, row)
    if table == "PORT_QOS_MAP":
        yield from _priorities(where, row)
    if table == "CABLE_LENGTH":
        yield from _cables(where, row, config)
    if table == "PFC_WD":
        yield from _watchdog(where, row, config)


def _missing(where: str, table: str, row: Rows) -> Iterator[Finding]:
    for name in _NEEDED.get(table, ()):
        if name not in row:
            yield _finding("missing-field", where, f"no {name}", f"a {name}", "SONiC ignores the row without it")
    if table == "BUFFER_PROFILE" and not {"dynamic_th", "static_th"} & set(row):
        yield _finding(
            "missing-field",
            where,
            "no dynamic_th or static_th",
            "one of them",
            "the profile has no threshold to pause at",
        )


def _values(where: str, table: str, row: Rows) -> Iterator[Finding]:
    for name, (low, high) in _RANGES.get(table, {}).items():
        if name in row and not _whole(row[name], low, high):
            yield _finding(
                "bad-value", f"{where}.{name}", repr(row[name]), f"a whole number from {low} to {high}", "out of range"
            )
    for name, words in _WORDS.get(table, {}).items():
        if name in row and row[name] not in words:
            yield _finding(
                "bad-value", f"{where}.{name}", repr(row[name]), f"one of {', '.join(words)}", "no such word"
            )


def _key(where: str, table: str, key: str, config: Mapping[str, Any]) -> Iterator[Finding]:
    ports = config.get("PORT") or {}
    if table in _OF_PORTS:
        port, _, numbers = key.partition("|")
        first, _, last = numbers.partition("-")
        if not (_whole(first, 0, _OF_PORTS[table]) and (not last or _whole(last, int(first), _OF_PORTS[table]))):
            yield _finding(
                "bad-key",
                where,
                repr(numbers),
                f"a number or a range up to {_OF_PORTS[table]}",
                "names no queue or group",
            )
    elif table in _PER_PORT:
        port = key
    else:
        return
    if ports and port not in ports and port not in _NOT_PORTS:
        yield _finding("unknown-port", where, port, "a port of table PORT", "the row has no effect")


def _references(where: str, table: str, row: Rows, config: Mapping[str, Any]) -> Iterator[Finding]:
    for name, target in _REFERENCES.get(table, {}).items():
        if name not in row:
            continue
        for one in str(row[name]).split(","):
            if one not in (config.get(target) or {}) and not (table == "BUFFER_PG" and one == "NULL"):
                yield _finding(
                    "unknown-reference",
                    f"{where}.{name}",
                    repr(one),
                    f"a row of {target}",
                    "SONiC drops a row whose target is missing",
                )


def _map(where: str, row: Rows, largest_key: int, largest_value: int) -> Iterator[Finding]:
    for key, value in row.items():
        if not _whole(key, 0, largest_key):
            yield _finding("bad-key", f"{where}.{key}", repr(key), f"0 to {largest_key}", "no such code point or class")
        if not _whole(value, 0, largest_value):
            yield _finding(
                "bad-value", f"{where}.{key}", repr(value), f"0 to {largest_value}", "no such class, group or queue"
            )


def _thresholds(where: str, row: Rows) -> Iterator[Finding]:
    for colour in ("green", "yellow", "red"):
        low, high = row.get(f"{colour}_min_threshold"), row.get(f"{colour}_max_threshold")
        if _whole(low, 0, 1 << 40) and _whole(high, 0, 1 << 40) and int(str(low)) > int(str(high)):
            yield _finding(
                "thresholds-reversed",
                where,
                f"{colour} min {low} > max {high}",
                "min at or below max",
                "WRED refuses the profile",
            )


def _priorities(where: str, row: Rows) -> Iterator[Finding]:
    for name in ("pfc_enable", "pfcwd_sw_enable"):
        if not _LIST_OF_PRIORITIES.fullmatch(str(row.get(name, ""))):
            yield _finding("bad-value", f"{where}.{name}", repr(row[name]), "priorities such as 3,4", "cannot be read")


def _cables(where: str, row: Rows, config: Mapping[str, Any]) -> Iterator[Finding]:
    ports = config.get("PORT") or {}
    for port, length in row.items():
        if not _CABLE.fullmatch(str(length)):
            yield _finding(
                "bad-value", f"{where}.{port}", repr(length), "whole metres such as 40m", "headroom cannot be looked up"
            )
        if ports and port not in ports:
            yield _finding("unknown-port", f"{where}.{port}", port, "a port of table PORT", "the row has no effect")


def _watchdog(where: str, row: Rows, config: Mapping[str, Any]) -> Iterator[Finding]:
    poll = ((config.get("PFC_WD") or {}).get("GLOBAL") or {}).get("POLL_INTERVAL")
    for name in ("detection_time", "restoration_time"):
        if _whole(poll, 100, 1000) and _whole(row.get(name), 100, 60_000) and int(str(row[name])) < int(str(poll)):
            yield _finding(
                "bad-value",
                f"{where}.{name}",
                str(row[name]),
                f"at least POLL_INTERVAL {poll}",
                "it would never be seen",
            )


def _whole(value: Any, low: int, high: int) -> bool:
    text = str(value)
    return text.removeprefix("-").isdigit() and low <= int(text) <= high


def _finding(id_: str, where: str, is_: str, should_be: str, why: str) -> Finding:
    return Finding(id=id_, severity="error", where=where, is_=is_, should_be=should_be, why=why)
