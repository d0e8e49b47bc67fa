"""RDMA devices and their ports: are there any, are they up, may programs open them."""

from bywash.doctor.facts import pci
from bywash.doctor.facts.rdma import CLASS, Port, active_ports, ports
from bywash.doctor.finding import Finding, Severity, unseen
from bywash.doctor.snapshot import Snapshot

_VERBS = "sys/class/infiniband_verbs"


def devices(snapshot: Snapshot) -> list[Finding]:
    """No RDMA device, ports that are down, devices that are software only."""
    if not snapshot.has("sys"):
        return [unseen("no-sysfs", "/sys", "nothing of sysfs can be seen", snapshot.why_not("sys"))]
    found = ports(snapshot)
    dark = [name for name in snapshot.children(CLASS) if not snapshot.children(f"{CLASS}/{name}/ports")]
    if not found and not dark:
        return [_none(snapshot)]
    up = active_ports(snapshot)
    findings = [unseen("port-unseen", d, "no port seen", snapshot.why_not(f"{CLASS}/{d}/ports")) for d in dark]
    findings += [_port(snapshot, port, spare=bool(up)) for port in found if not port.active]
    findings += [finding for port in up for finding in _strange(snapshot, port)]
    return findings + [_software(port) for port in up if port.software]


def verbs(snapshot: Snapshot) -> list[Finding]:
    """A device without its node under /dev/infiniband cannot be opened: usual in containers."""
    nodes = {snapshot.text(f"{_VERBS}/{name}/ibdev"): name for name in snapshot.children(_VERBS)}
    findings = []
    for device in dict.fromkeys(port.device for port in active_ports(snapshot)):
        node = nodes.get(device)
        if node is not None and snapshot.has(f"dev/infiniband/{node}"):
            continue
        where = f"/dev/infiniband/{node}" if node else f"/{_VERBS}"
        what = f"{device} has no device node" if node else f"{device} is unknown to ib_uverbs"
        why = "user programs reach an RDMA device through its uverbs node only"
        fix = "in a container: --device=/dev/infiniband; on the host: modprobe ib_uverbs"
        if snapshot.complete:
            findings.append(
                Finding(severity=Severity.ERROR, code="no-uverbs", where=where, what=what, why=why, fix=fix)
            )
        else:
            findings.append(
                unseen("uverbs-unseen", where, f"{device}: device node not seen", snapshot.why_not(where[1:]))
            )
    return findings


def _none(snapshot: Snapshot) -> Finding:
    cards = [d.address for d in pci.devices(snapshot).values() if d.nic and d.vendor == pci.MELLANOX]
    if not snapshot.complete:
        return unseen("rdma-unseen", f"/{CLASS}", "no RDMA device seen", snapshot.why_not(CLASS))
    what, fix = "no RDMA device", "fit an RDMA NIC, or accept kernel sockets between hosts"
    if cards:
        what = f"no RDMA device, although {', '.join(cards)} could be one"
        fix = "modprobe mlx5_ib; in a container: --device=/dev/infiniband and the RDMA network namespace"
    return Finding(
        severity=Severity.ERROR,
        code="no-rdma-device",
        where=f"/{CLASS}",
        what=what,
        why="without one, what goes to another host is copied through kernel sockets",
        fix=fix,
    )


def _port(snapshot: Snapshot, port: Port, *, spare: bool) -> Finding:
    if port.state is None:
        return unseen("port-unseen", port.name, "state unreadable", snapshot.why_not(f"{port.path}/state"))
    return Finding(
        severity=Severity.WARNING if spare else Severity.ERROR,
        code="port-down",
        where=port.name,
        what=f"{port.state}, physical state {port.physical or 'unknown'}",
        why="no traffic goes over this port" + ("" if spare else "; no other RDMA port is up either"),
        fix=f"check cable and switch port; ip link set {' '.join(port.netdevs) or 'NETDEV'} up",
    )


def _strange(snapshot: Snapshot, port: Port) -> list[Finding]:
    """What an active port does not tell, so that checks had to leave it out."""
    missing: dict[str, object] = {f"{port.path}/link_layer": port.link_layer, f"{port.path}/rate": port.rate_gbps}
    if not port.software:
        missing[f"{CLASS}/{port.device}/device/uevent"] = port.pci
    if port.roce:
        missing[f"{CLASS}/{port.device}/device/net"] = port.netdevs or None
    return [
        unseen(
            "port-unseen",
            port.name,
            f"{path.rpartition('/')[2]} unreadable: other checks lack it",
            snapshot.why_not(path),
        )
        for path, value in missing.items()
        if value is None
    ]


def _software(port: Port) -> Finding:
    return Finding(
        severity=Severity.WARNING,
        code="software-rdma",
        where=port.name,
        what="a software device (rxe, siw)",
        why="it copies every packet through the kernel; it is for tests",
        fix=f"leave it out of NCCL_IB_HCA, or: rdma link delete {port.device}",
    )
