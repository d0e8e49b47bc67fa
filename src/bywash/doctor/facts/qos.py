"""What a RoCE interface does with priorities: trust, PFC, the DSCP map, ECN, the forced traffic class.

From `mlnx_qos -i NETDEV` where it ran, else from iproute2's `dcb pfc show` and `dcb -N app show`, which every vendor's
driver answers. ECN's switches are files of NVIDIA's driver package; other drivers keep them where nothing can read.
"""

import re
from dataclasses import dataclass

from bywash.doctor.facts.rdma import Port
from bywash.doctor.snapshot import Snapshot

PRIORITIES = 8
_DSCPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Qos:
    """One interface. `pfc`: lossless priorities; `priority_of`: per DSCP, 64 of them; None where not stated."""

    tool: str
    trust: str | None
    pfc: tuple[int, ...] | None
    priority_of: tuple[int, ...] | None


def qos(snapshot: Snapshot, netdev: str) -> Qos | None:
    """None where neither tool answered."""
    mlnx = snapshot.output(f"mlnx_qos-{netdev}")
    if mlnx is not None:
        return _from_mlnx_qos(mlnx)
    pfc, app = snapshot.output(f"dcb-pfc-{netdev}"), snapshot.output(f"dcb-app-{netdev}")
    return None if pfc is None and app is None else _from_dcb(pfc or "", app)


def ecn(snapshot: Snapshot, netdev: str, priority: int) -> tuple[int | None, int | None]:
    """Whether the interface answers marks with CNPs (`roce_np`) and slows down on CNPs (`roce_rp`): 1, 0, None."""
    path = f"sys/class/net/{netdev}/ecn"
    np, rp = (snapshot.integer(f"{path}/{side}/enable/{priority}") for side in ("roce_np", "roce_rp"))
    return np, rp


def forced_traffic_class(snapshot: Snapshot, port: Port) -> int | None:
    """The class that the driver gives every queue pair made through the kernel, whatever its library asked for."""
    text = snapshot.text(f"sys/class/infiniband/{port.device}/tc/{port.number}/traffic_class")
    found = re.match(r"Global tclass=([0-9]{1,3})$", text or "", re.MULTILINE)
    return int(found[1]) if found and int(found[1]) < 256 else None


def _from_mlnx_qos(text: str) -> Qos:
    trust = re.search(r"^Priority trust state: (dscp|pcp)\s*$", text, re.MULTILINE)
    enabled = re.search(
        r"^PFC configuration:\s*\n\s*priority[ \t0-9]+\n\s*enabled((?:[ \t]+[01]){8})[ \t]*$", text, re.M
    )
    of: dict[int, int] = {}
    for priority, points in re.findall(r"^\s*prio:([0-7]) dscp:([0-9,]+)\s*$", text, re.MULTILINE):
        of |= {int(point): int(priority) for point in points.split(",") if point}
    return Qos(
        tool="mlnx_qos",
        trust=trust[1] if trust else None,
        pfc=_ones(enabled[1].split()) if enabled else None,
        priority_of=tuple(of[d] for d in range(_DSCPS)) if sorted(of) == list(range(_DSCPS)) else None,
    )


def _from_dcb(pfc: str, app: str | None) -> Qos:
    line = re.search(r"prio-pfc((?: [0-7]:(?:on|off)){8})", pfc)
    of, trust = None, None
    if app is not None:
        entries = re.search(r"^dscp-prio((?: [0-9]{1,2}:[0-7])+)\s*$", app, re.MULTILINE)
        given = dict(pair.split(":") for pair in entries[1].split()) if entries else {}
        # Without a DSCP entry a driver classifies by the VLAN tag; with one, unlisted DSCPs take priority 0.
        if entries or not re.search(r"^(?!(default|ethtype|stream-port|dgram-port|port|pcp)-prio )", app.strip(), re.M):
            trust = "dscp" if given else "pcp"
            of = tuple(int(given.get(str(d), 0)) for d in range(_DSCPS))
    states = [pair.split(":")[1] for pair in line[1].split()] if line else []
    return Qos(
        tool="dcb",
        trust=trust,
        pfc=_ones(["1" if state == "on" else "0" for state in states]) if line else None,
        priority_of=of,
    )


def _ones(flags: list[str]) -> tuple[int, ...]:
    return tuple(priority for priority, flag in enumerate(flags) if flag == "1")
