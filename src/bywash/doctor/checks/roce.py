"""RoCE addressing and sizes: GIDs, the connection manager's mode, MTU. What queues do is `lossless`'s."""

from bywash.doctor.facts.rdma import ROCE_V2, Port, roce_netdevs, roce_ports
from bywash.doctor.facts.system import Setting, variables
from bywash.doctor.finding import Finding, Severity, unseen
from bywash.doctor.snapshot import Snapshot, integer

GID_VARIABLES = ("NCCL_IB_GID_INDEX", "NVSHMEM_IB_GID_INDEX")
_IB_MTUS = (4096, 2048, 1024, 512, 256)
# GRH 40, UDP 8, BTH 12, XRC 4, atomic 28, ICRC 4: what Linux keeps free for headers (iboe_get_mtu in ib_addr.h).
_HEADER_BYTES = 96


def gids(snapshot: Snapshot) -> list[Finding]:
    """A port without a routable RoCE v2 address, and variables that point at another entry."""
    given = variables(snapshot)
    findings = []
    for port in roce_ports(snapshot):
        if any(gid.routable for gid in port.gids):
            findings += [
                _wrong_index(port, name, given[name])
                for name in GID_VARIABLES
                if name in given and not _good_index(port, given[name].value)
            ]
        elif not port.gids_whole or not port.gids:
            findings.append(_unseen_gids(snapshot, port))
        else:
            findings.append(_not_routable(port))
    return findings + _cm_modes(snapshot)


def mtu(snapshot: Snapshot) -> list[Finding]:
    """Interfaces that differ, or all too small for RDMA packets of 4096 bytes."""
    findings, known = [], {}
    for netdev in roce_netdevs(snapshot):
        path = f"sys/class/net/{netdev}/mtu"
        size = snapshot.integer(path)
        if size is None:
            findings.append(unseen("mtu-unseen", netdev, "MTU unreadable", snapshot.why_not(path)))
        else:
            known[netdev] = size
    largest = max(known.values(), default=0)
    needed = _IB_MTUS[0] + _HEADER_BYTES
    for netdev, size in known.items():
        if size < largest:
            what = f"MTU {size}, while others have {largest}"
            why = f"RDMA packets carry {_payload(size)} bytes here, {_payload(largest)} there; unlike ends fail or slow"
            findings.append(_mtu("mtu-mixed", netdev, what, why, largest))
        elif largest < needed:
            why = f"RDMA packets carry {_payload(size)} bytes rather than {_IB_MTUS[0]}: more packets, more headers"
            findings.append(_mtu("mtu-small", netdev, f"MTU {size}", why, 9000))
    return findings


def _mtu(code: str, netdev: str, what: str, why: str, better: int) -> Finding:
    fix = f"ip link set {netdev} mtu {better}  # the switch ports must allow it"
    return Finding(severity=Severity.WARNING, code=code, where=netdev, what=what, why=why, fix=fix)


def _payload(mtu_bytes: int) -> int:
    """RDMA payload per packet over an interface of this MTU."""
    return next((size for size in _IB_MTUS if size + _HEADER_BYTES <= mtu_bytes), 0)


def _good_index(port: Port, value: str) -> bool:
    """Negative: the library chooses."""
    index = integer(value)
    return index is not None and (index < 0 or any(gid.index == index and gid.routable for gid in port.gids))


def _wrong_index(port: Port, name: str, given: Setting) -> Finding:
    here = next((str(gid) for gid in port.gids if gid.index == integer(given.value)), "empty or not a number")
    best = best_index(port)
    return Finding(
        severity=Severity.ERROR,
        code="gid-index-wrong",
        where=port.name,
        what=f"{name}={given.value} ({given.source}) is {here}; index {best} is routable RoCE v2",
        why="connections to other subnets fail, and RoCE v1 packets pass no router and get no DSCP",
        fix=f"unset {name} (NCCL 2.21 and later choose by themselves), or {name}={best}",
    )


def best_index(port: Port) -> int | None:
    """The routable GID that libraries should use: IPv4 before IPv6, then the lowest index."""
    usable = sorted((gid.address.ipv4_mapped is None, gid.index) for gid in port.gids if gid.routable)
    return usable[0][1] if usable else None


def _unseen_gids(snapshot: Snapshot, port: Port) -> Finding:
    strange = [gid.index for gid in port.gids if gid.kind is None]
    path = f"{port.path}/gid_attrs/types/{strange[0]}" if strange else f"{port.path}/gids"
    what = "no entry of the GID table can be judged"
    fix = "look from the network namespace that owns the interface"
    return unseen("gid-unseen", port.name, what, snapshot.why_not(path), fix)


def _not_routable(port: Port) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        code="gid-not-routable",
        where=port.name,
        what="only " + ", ".join(f"{gid.index}: {gid}" for gid in port.gids[:4]),
        why="the interface has no IP address, so RoCE v2 has no source that other subnets can answer",
        fix=f"ip addr add ADDRESS/PREFIX dev {port.netdevs[0] if port.netdevs else 'NETDEV'}",
    )


def _cm_modes(snapshot: Snapshot) -> list[Finding]:
    """What rdma_cm connections use; only there once somebody made the configfs directory."""
    findings = []
    for port in roce_ports(snapshot):
        path = f"sys/kernel/config/rdma_cm/{port.device}/ports/{port.number}/default_roce_mode"
        mode = snapshot.text(path)
        if mode not in (None, ROCE_V2):
            findings.append(
                Finding(
                    severity=Severity.WARNING,
                    code="cm-mode",
                    where=port.name,
                    what=f"rdma_cm makes connections of type {mode!r}",
                    why="libraries that connect through rdma_cm get no RoCE v2, hence no routing and no DSCP",
                    fix=f"cma_roce_mode -d {port.device} -p {port.number} -m 2",
                )
            )
    return findings
