"""What an audit knows of a fabric: devices read from files, and the cables between them.

Reads config_db files and the text that `nic.sh --show` prints (or `mlnx_qos` and `ethtool -S` output). No judgement:
`audit_switch` and `audit_hosts` have that. A device keeps the file's own words beside what they mean.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.fabric.config.asic import Asic, asic_of_hwsku


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """One port as its config_db has it; maps resolved, ranges expanded.

    Attributes:
        tc_of_dscp: traffic class by DSCP; empty when the port has no map.
        group_of_tc, queue_of_tc: priority group and queue by traffic class.
        pfc, watched: priorities of pfc_enable and pfcwd_sw_enable.
        groups: profile name by priority group. queues, wreds: buffer profile and WRED profile by queue.
        watchdog: whether PFC_WD has a row for it.
    """

    name: str
    gbps: int
    mtu: int
    cable_m: int | None
    tc_of_dscp: Mapping[int, int]
    group_of_tc: Mapping[int, int]
    queue_of_tc: Mapping[int, int]
    pfc: tuple[int, ...]
    watched: tuple[int, ...]
    groups: Mapping[int, str]
    queues: Mapping[int, str]
    wreds: Mapping[int, str]
    watchdog: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchFacts:
    """One switch: its ports, and the tables they refer to."""

    name: str
    hwsku: str
    asic: Asic | None
    buffer_model: str
    ports: Mapping[str, PortFacts]
    profiles: Mapping[str, Mapping[str, str]]
    pools: Mapping[str, Mapping[str, str]]
    wreds: Mapping[str, Mapping[str, str]]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NicFacts:
    """One NIC; None for what its dump does not say. `counters` are those of `ethtool -S`."""

    name: str
    mtu: int | None = None
    trust: str | None = None
    priority_of_dscp: Mapping[int, int] = field(default_factory=dict)
    pfc: tuple[int, ...] | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A cable between two ends, each (device, port); a NIC's port is empty. Length None: not known."""

    a: tuple[str, str]
    b: tuple[str, str]
    length_m: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFacts:
    """Everything that was read."""

    switches: Mapping[str, SwitchFacts]
    nics: Mapping[str, NicFacts]
    environment: Mapping[str, str]
    cables: tuple[Cable, ...]


def read_config_db(path: str | Path) -> dict[str, Any]:
    """A config_db.json. Raises `ConfigError` when it is not a JSON object."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be an object of tables, as config_db.json is")
    return data


def switch_facts(name: str, config: Mapping[str, Any]) -> SwitchFacts:
    """What a config_db says. Values that cannot be read count as absent; `checks` has reported them."""
    meta = _row(config, "DEVICE_METADATA", "localhost")
    hwsku = str(meta.get("hwsku", ""))
    return SwitchFacts(
        name=name,
        hwsku=hwsku,
        asic=asic_of_hwsku(hwsku),
        buffer_model=str(meta.get("buffer_model", "traditional")),
        ports=_ports(config),
        profiles=_table(config, "BUFFER_PROFILE"),
        pools=_table(config, "BUFFER_POOL"),
        wreds=_table(config, "WRED_PROFILE"),
        config=config,
    )


def _ports(config: Mapping[str, Any]) -> dict[str, PortFacts]:
    qos = _table(config, "PORT_QOS_MAP")
    lengths = {port: length for rows in _table(config, "CABLE_LENGTH").values() for port, length in rows.items()}
    groups = _by_port(config, "BUFFER_PG", "profile")
    queues = _by_port(config, "BUFFER_QUEUE", "profile")
    wreds = _by_port(config, "QUEUE", "wred_profile")
    watched = _table(config, "PFC_WD")
    found = {}
    for port, row in _table(config, "PORT").items():
        own = qos.get("global", {}) | qos.get(port, {})
        found[port] = PortFacts(
            name=port,
            gbps=(_int(row.get("speed")) or 0) // 1000,
            mtu=_int(row.get("mtu")) or 9100,  # SONiC's default
            cable_m=_int(str(lengths.get(port, "")).removesuffix("m")),
            tc_of_dscp=_map(config, "DSCP_TO_TC_MAP", own.get("dscp_to_tc_map")),
            group_of_tc=_map(config, "TC_TO_PRIORITY_GROUP_MAP", own.get("tc_to_pg_map")),
            queue_of_tc=_map(config, "TC_TO_QUEUE_MAP", own.get("tc_to_queue_map")),
            pfc=_numbers(own.get("pfc_enable")),
            watched=_numbers(own.get("pfcwd_sw_enable")),
            groups=groups.get(port, {}),
            queues=queues.get(port, {}),
            wreds=wreds.get(port, {}),
            watchdog=port in watched,
        )
    return found


def _table(config: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    rows = config.get(name)
    return (
        {key: dict(row) for key, row in rows.items() if isinstance(row, Mapping)} if isinstance(rows, Mapping) else {}
    )


def _row(config: Mapping[str, Any], table: str, key: str) -> dict[str, Any]:
    return _table(config, table).get(key, {})


def _map(config: Mapping[str, Any], table: str, name: Any) -> dict[int, int]:
    pairs = ((_int(key), _int(value)) for key, value in _row(config, table, str(name)).items())
    return {key: value for key, value in pairs if key is not None and value is not None}


def _by_port(config: Mapping[str, Any], table: str, field_name: str) -> dict[str, dict[int, str]]:
    """A field of rows keyed port|number or port|range, by port and number."""
    found: dict[str, dict[int, str]] = {}
    for key, row in _table(config, table).items():
        port, _, numbers = key.partition("|")
        first, _, last = numbers.partition("-")
        low, high = _int(first), _int(last or first)
        if field_name in row and low is not None and high is not None and high < 64:
            found.setdefault(port, {}).update(dict.fromkeys(range(low, high + 1), str(row[field_name])))
    return found


def _numbers(text: Any) -> tuple[int, ...]:
    return tuple(sorted({int(part) for part in str(text or "").split(",") if part.isdigit()}))


def _int(value: Any) -> int | None:
    text = str(value)
    return int(text) if text.removeprefix("-").isdigit() else None


def neighbour_cables(switches: Mapping[str, SwitchFacts]) -> Iterator[Cable]:
    """Cables as DEVICE_NEIGHBOR tables have them, each once; their length is the longer of what the two ends say."""
    seen: set[frozenset[tuple[str, str]]] = set()
    for switch in switches.values():
        for port, row in _table(switch.config, "DEVICE_NEIGHBOR").items():
            here, there = (switch.name, port), (str(row.get("name", "")), str(row.get("port", "")))
            if port not in switch.ports or frozenset((here, there)) in seen:
                continue
            seen.add(frozenset((here, there)))
            peer = switches.get(there[0])
            far = peer.ports.get(there[1]) if peer else None
            lengths = [end.cable_m for end in (switch.ports[port], far) if end is not None and end.cable_m is not None]
            yield Cable(a=here, b=there if peer else (there[0], ""), length_m=max(lengths, default=None))


def nic_facts(name: str, text: str) -> list[NicFacts]:
    """NICs from `nic.sh --show`, one per `interface=` line; or one from bare `mlnx_qos` and `ethtool -S` output."""
    parts = re.split(r"(?m)^interface=(.*)$", text)
    if len(parts) == 1:
        return [_nic(name, text)]
    several = len(parts) > 3
    return [
        _nic(f"{name}:{interface.strip()}" if several else name, body)
        for interface, body in zip(parts[1::2], parts[2::2])
    ]


def _nic(name: str, text: str) -> NicFacts:
    values = dict(re.findall(r"(?m)^([a-z0-9_]+)=(.*)$", text))
    trust = re.search(r"(?m)^\s*Priority trust state:\s*(\w+)", text)
    pfc = re.search(r"(?ms)^PFC configuration:.*?^\s*enabled\s+([01 \t]+)$", text)
    codes: dict[int, int] = {}
    for priority, listed in re.findall(r"(?m)^\s*prio:([0-7]) dscp:([0-9,]*)", text):
        codes |= {int(code): int(priority) for code in listed.split(",") if code}
    counters = {key: int(value) for key, value in re.findall(r"(?m)^\s*((?:rx|tx)_\w+):\s*(\d+)\s*$", text)}
    return NicFacts(
        name=name,
        mtu=_int(values.get("mtu")),
        trust=trust[1] if trust else None,
        priority_of_dscp=codes,
        pfc=tuple(i for i, flag in enumerate(pfc[1].split()) if flag == "1") if pfc else None,
        values={key: value.strip() for key, value in values.items()},
        counters=counters,
    )


def read_environment(text: str) -> dict[str, str]:
    """`KEY=value` lines, with or without `export`; comments and quotes are taken off."""
    found = re.findall(r"(?m)^\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=(.*)$", text)
    return {key: value.strip().strip("\"'") for key, value in found}
