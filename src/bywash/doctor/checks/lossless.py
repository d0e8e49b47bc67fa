"""What the NIC does with RoCE traffic: DSCP trust, PFC, ECN, and the class that the traffic really rides in.

Judges the host's end only. Whether the switches agree is `bywash fabric audit`'s, which takes these facts.
"""

from collections import Counter

from bywash.doctor.facts.qos import PRIORITIES, Qos, ecn, forced_traffic_class, qos
from bywash.doctor.facts.rdma import Port, roce_netdevs, roce_ports
from bywash.doctor.facts.system import setting
from bywash.doctor.finding import Finding, Severity, unseen
from bywash.doctor.snapshot import Snapshot, command_path, integer

USUAL_PRIORITY = 3


def pfc(snapshot: Snapshot) -> list[Finding]:
    """Interfaces that trust the VLAN tag, have no lossless priority, or disagree about which one."""
    read = {netdev: qos(snapshot, netdev) for netdev in roce_netdevs(snapshot)}
    sets = Counter(q.pfc for q in read.values() if q is not None and q.pfc)
    common = max(sets, key=lambda pfc: (sets[pfc], pfc), default=(USUAL_PRIORITY,))
    findings = []
    for netdev, found in read.items():
        if found is None or found.pfc is None or found.trust is None:
            findings.append(_unseen(snapshot, netdev, found))
        if found is None:
            continue
        if found.trust == "pcp":
            findings.append(_trust(netdev, found))
        if found.pfc == ():
            what, why = (
                "PFC is off on every priority",
                "a full switch queue drops packets, and the NIC sends again from the gap",
            )
            findings.append(_pfc("pfc-off", netdev, what, why, found, common))
        elif found.pfc is not None and found.pfc != common:
            what = f"PFC on priorities {_listed(found.pfc)}, while others have {_listed(common)}"
            why = "flows of one collective take different NICs; some are lossless where others drop"
            findings.append(_pfc("pfc-differs", netdev, what, why, found, common))
    return findings


def marking(snapshot: Snapshot) -> list[Finding]:
    """ECN of the priorities that carry RoCE: answer marks, and slow down when told."""
    findings = []
    for port in roce_ports(snapshot):
        for netdev in port.netdevs:
            carried = _carried(snapshot, port, netdev)
            if carried is not None:
                findings += [found for priority in carried for found in _marking(snapshot, netdev, priority)]
            elif any(ecn(snapshot, netdev, priority) != (1, 1) for priority in range(PRIORITIES)):
                what, why = "ECN cannot be judged", "which priority carries RoCE cannot be seen (see qos-unseen)"
                findings.append(unseen("ecn-unseen", netdev, what, why))
    return list(dict.fromkeys(findings))


def traffic_class(snapshot: Snapshot) -> list[Finding]:
    """NCCL's packets carry a DSCP that the NIC maps outside the lossless priorities."""
    findings = []
    for port in roce_ports(snapshot):
        given, source = class_in_force(snapshot, port)
        for netdev in port.netdevs:
            found = qos(snapshot, netdev)
            priority = _priority(found, given)
            if found is None or found.pfc is None or found.priority_of is None:
                what, why = "NCCL's priority cannot be judged", "the DSCP map or PFC cannot be seen"
                findings.append(unseen("class-unseen", port.name, what, f"{why} on {netdev}"))
                continue
            if priority is None or not found.pfc or priority in found.pfc:
                continue
            better = class_for(found)
            what = f"NCCL's traffic class {given} ({source}) is DSCP {given >> 2}, priority {priority}"
            findings.append(
                Finding(
                    severity=Severity.WARNING,
                    code="class-not-lossless",
                    where=port.name,
                    what=what,
                    why=f"PFC is on priority {_listed(found.pfc)} only: these packets ride in a queue that drops",
                    fix=f"NCCL_IB_TC={better}" if better is not None else "map a DSCP to the lossless priority",
                )
            )
    return findings


def class_in_force(snapshot: Snapshot, port: Port) -> tuple[int, str]:
    """The IP traffic class of NCCL's queue pairs and who set it: the driver, the variable, or NCCL's default of 0."""
    forced = forced_traffic_class(snapshot, port)
    if forced is not None:
        return forced, "forced by the driver"
    asked = integer(setting(snapshot, "NCCL_IB_TC"))
    return (asked, "NCCL_IB_TC") if asked is not None and 0 <= asked < 256 else (0, "default")


def class_for(found: Qos | None) -> int | None:
    """A traffic class whose DSCP the interface maps to its first lossless priority, with ECT(0) set."""
    if found is None or not found.pfc or found.priority_of is None or found.pfc[0] not in found.priority_of:
        return None
    points = [dscp for dscp, priority in enumerate(found.priority_of) if priority == found.pfc[0]]
    return (26 if 26 in points else points[0]) << 2 | 2


def _priority(found: Qos | None, given: int) -> int | None:
    """The priority of a class on an interface that trusts DSCP; None where it does not or cannot be known."""
    trusted = found is not None and found.trust == "dscp" and found.priority_of is not None
    return found.priority_of[given >> 2] if trusted and found and found.priority_of else None


def _carried(snapshot: Snapshot, port: Port, netdev: str) -> tuple[int, ...] | None:
    """The priorities to judge: the lossless ones, or the one that the traffic takes; None where neither is known."""
    found = qos(snapshot, netdev)
    if found is None or found.pfc is None:
        return None
    if found.pfc:
        return found.pfc
    priority = _priority(found, class_in_force(snapshot, port)[0])
    return None if priority is None and found.trust != "pcp" else (priority or 0,)


def _marking(snapshot: Snapshot, netdev: str, priority: int) -> list[Finding]:
    path = f"sys/class/net/{netdev}/ecn"
    sides = dict(zip(("roce_np", "roce_rp"), ecn(snapshot, netdev, priority)))
    if None in sides.values():
        missing = next(side for side, value in sides.items() if value is None)
        why = snapshot.why_not(f"{path}/{missing}/enable/{priority}")
        fix = "NVIDIA's driver package (DOCA-OFED) shows it; with others ask the NIC vendor's tool"
        return [unseen("ecn-unseen", netdev, f"ECN of priority {priority} cannot be seen", why, fix)]
    off = [side for side, value in sides.items() if value == 0]
    if not off:
        return []
    said = {"roce_np": "it does not answer marks (roce_np)", "roce_rp": "it does not slow down when told (roce_rp)"}
    return [
        Finding(
            severity=Severity.WARNING,
            code="ecn-off",
            where=netdev,
            what=f"ECN is off on priority {priority}: " + ", ".join(said[side] for side in off),
            why="senders go on at full rate into a full queue until PFC stops whole links, or packets drop",
            fix="; ".join(f"echo 1 > /{path}/{side}/enable/{priority}" for side in off),
        )
    ]


def _unseen(snapshot: Snapshot, netdev: str, found: Qos | None) -> Finding:
    names = [f"mlnx_qos-{netdev}", f"dcb-pfc-{netdev}"]
    if found is not None:
        names = [f"mlnx_qos-{netdev}"] if found.tool == "mlnx_qos" else [f"dcb-pfc-{netdev}", f"dcb-app-{netdev}"]
    missing = [] if found is None else [n for n, v in (("trust", found.trust), ("PFC", found.pfc)) if v is None]
    why = "; ".join(snapshot.why_not(command_path(name)) for name in names)
    what = f"{' and '.join(missing) or 'trust and PFC'} cannot be seen"
    return unseen("qos-unseen", netdev, what, why, "install mlnx-tools (mlnx_qos) or iproute2 (dcb) and run as root")


def _trust(netdev: str, found: Qos) -> Finding:
    command = f"mlnx_qos -i {netdev} --trust dscp"
    if found.tool == "dcb":
        command = f"dcb app add dev {netdev} dscp-prio 26:{USUAL_PRIORITY}"
    return Finding(
        severity=Severity.WARNING,
        code="trust-not-dscp",
        where=netdev,
        what="the NIC trusts the VLAN tag (pcp), not DSCP",
        why="RoCE v2 carries its priority as DSCP; untagged packets all fall into priority 0 and out of PFC",
        fix=command,
    )


def _pfc(code: str, netdev: str, what: str, why: str, found: Qos, wanted: tuple[int, ...]) -> Finding:
    flags = ",".join("1" if p in wanted else "0" for p in range(PRIORITIES))
    command = f"mlnx_qos -i {netdev} --pfc {flags}"
    if found.tool == "dcb":
        command = f"dcb pfc set dev {netdev} prio-pfc all:off " + " ".join(f"{p}:on" for p in wanted)
    fix = f"{command}  # the priority must be the switches' lossless one"
    return Finding(severity=Severity.WARNING, code=code, where=netdev, what=what, why=why, fix=fix)


def _listed(priorities: tuple[int, ...]) -> str:
    return ", ".join(map(str, priorities))
