"""What a fabric was meant to do, and the small questions that every audit rule asks of a device.

`Intent` comes from the values file, or from what most ports and NICs do. Called by `audit_switch` and `audit_hosts`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from bywash.fabric.config.audit_model import FabricFacts, PortFacts, SwitchFacts
from bywash.fabric.config.findings import Finding, Severity
from bywash.fabric.config.headroom import LookupTable

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What the fabric was meant to do: from the values file, or what most ports and NICs do.

    `codes` maps the DSCPs of lossless classes to their priority.
    """

    said_by: str
    priorities: tuple[int, ...]
    codes: Mapping[int, int]
    cnp_dscp: int
    cnp_priority: int
    mtu_bytes: int
    nic_mtu_bytes: int | None
    dynamic_th: int | None
    table: LookupTable | None = None


Rule = Callable[[FabricFacts, Intent], Iterator[Finding]]


def inferred(facts: FabricFacts, table: LookupTable | None = None) -> Intent:
    """What most ports do, taken as what was meant. Ties go to the smaller value, so that runs agree."""
    ports = [port for switch in facts.switches.values() for port in switch.ports.values()]
    priorities = most(port.pfc for port in ports) or ()
    codes = {}
    for code in range(64):
        tc = most(port.tc_of_dscp[code] for port in ports if code in port.tc_of_dscp)
        if tc is not None and tc in priorities:
            codes[code] = tc
    said = [nic.values.get("cnp_dscp", "") for nic in facts.nics.values()]
    cnp = most(int(text) for text in said if text.isdigit())
    cnp_dscp = cnp if cnp is not None else 48
    cnp_tc = most(port.tc_of_dscp[cnp_dscp] for port in ports if cnp_dscp in port.tc_of_dscp)
    return Intent(
        said_by="most ports",
        priorities=priorities,
        codes=codes,
        cnp_dscp=cnp_dscp,
        cnp_priority=cnp_tc if cnp_tc is not None else 6,
        mtu_bytes=most(port.mtu for port in ports) or 9100,
        nic_mtu_bytes=most(nic.mtu for nic in facts.nics.values() if nic.mtu is not None),
        dynamic_th=most(th for switch in facts.switches.values() for _, _, th in lossless_alphas(switch, priorities)),
        table=table,
    )


def most(values: Iterable[T]) -> T | None:
    """The most frequent value, the smallest of equals; None of nothing."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], str(value)), default=None)


def lossless_alphas(switch: SwitchFacts, priorities: tuple[int, ...]) -> Iterator[tuple[PortFacts, str, int]]:
    """Each lossless group: its port, profile and dynamic_th."""
    for port in switch.ports.values():
        for priority in priorities:
            name = port.groups.get(priority)
            th = (
                number(profile_of(switch, port, priority).get("dynamic_th"))
                if name and is_lossless(switch, name)
                else None
            )
            if name is not None and th is not None:
                yield port, name, th


def profile_of(switch: SwitchFacts, port: PortFacts, priority: int) -> Mapping[str, str]:
    """The profile that holds for a lossless group; under the dynamic model what the switch would make."""
    name = port.groups.get(priority, "")
    if name != "NULL":
        return switch.profiles.get(name, {})
    rows = switch.config.get("DEFAULT_LOSSLESS_BUFFER_PARAMETER") or {}
    default: Any = next(iter(rows.values()), {}) if isinstance(rows, Mapping) else {}
    return {"pool": "ingress_lossless_pool", "dynamic_th": str(default.get("default_dynamic_th", "0"))}


def is_lossless(switch: SwitchFacts, name: str) -> bool:
    """A profile with xoff (0 is `headroom-short`'s to report when it is named as lossless), or the dynamic model's."""
    profile = switch.profiles.get(name, {})
    return name == "NULL" or "xoff" in profile


def number(value: object) -> int | None:
    """A whole number of a config_db, or None."""
    text = str(value)
    return int(text) if text.removeprefix("-").isdigit() else None


def error(id_: str, where: str, is_: str, should_be: str, why: str) -> Finding:
    """A finding of severity error."""
    return finding("error", id_, where, is_, should_be, why)


def finding(severity: Severity, id_: str, where: str, is_: str, should_be: str, why: str) -> Finding:
    """A finding, by position."""
    return Finding(id=id_, severity=severity, where=where, is_=is_, should_be=should_be, why=why)


def listed(priorities: Iterable[int]) -> str:
    """Priorities as `3,4`, or none."""
    return ",".join(map(str, priorities)) or "none"
