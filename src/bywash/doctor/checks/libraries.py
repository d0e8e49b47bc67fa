"""NCCL's and NVSHMEM's variables: those in force that stand in the way, and those that this host calls for."""

from bywash.doctor.checks.lossless import class_for, class_in_force
from bywash.doctor.checks.roce import GID_VARIABLES, best_index
from bywash.doctor.facts.qos import forced_traffic_class, qos
from bywash.doctor.facts.rdma import Port, active_ports, roce_ports
from bywash.doctor.facts.system import Setting, variables
from bywash.doctor.finding import Finding, Severity, Variable
from bywash.doctor.snapshot import Snapshot

_ERROR, _WARNING = Severity.ERROR, Severity.WARNING
_HARMFUL: tuple[tuple[str, tuple[str, ...], Severity, str], ...] = (
    ("NCCL_IB_DISABLE", ("1",), _ERROR, "NCCL goes over kernel sockets"),
    ("NCCL_NET", ("Socket",), _ERROR, "NCCL goes over kernel sockets"),
    ("NCCL_P2P_DISABLE", ("1",), _ERROR, "GPUs of this host exchange through host memory"),
    ("NCCL_P2P_LEVEL", ("LOC", "0"), _ERROR, "GPUs of this host exchange through host memory"),
    ("NCCL_NET_GDR_LEVEL", ("LOC", "0"), _ERROR, "GPUDirect RDMA is off"),
    ("NCCL_IB_CUDA_SUPPORT", ("0",), _ERROR, "GPUDirect RDMA is off"),
    ("NCCL_SHM_DISABLE", ("1",), _WARNING, "processes without peer access go through the network, inside the host"),
    ("NCCL_CHECKS_DISABLE", ("0",), _WARNING, "pointer checks on every call"),
    ("NVSHMEM_DISABLE_P2P", ("1", "true"), _ERROR, "GPUs of this host exchange through the network"),
    ("NVSHMEM_REMOTE_TRANSPORT", ("none",), _ERROR, "no traffic to other hosts"),
)
_DEVICE_LISTS = ("NCCL_IB_HCA", "NVSHMEM_HCA_LIST")


def in_force(snapshot: Snapshot) -> list[Finding]:
    """Variables that switch zero-copy off, or name devices and interfaces that are not there."""
    given = variables(snapshot)
    findings = [
        _finding(severity, "variable-harmful", name, given[name], why, f"unset {name}")
        for name, values, severity, why in _HARMFUL
        if name in given and given[name].value in values
    ]
    named = [port.name for port in active_ports(snapshot)]
    for name in _DEVICE_LISTS:
        if name in given:
            findings += _list(name, given[name], named, "NCCL and NVSHMEM ignore the name: fewer NICs, or sockets")
    nets = snapshot.children("sys/class/net")
    if "NCCL_SOCKET_IFNAME" in given and nets:
        findings += _list(
            "NCCL_SOCKET_IFNAME", given["NCCL_SOCKET_IFNAME"], nets, "NCCL finds no interface to start on"
        )
    return findings


def recommended(snapshot: Snapshot) -> tuple[Variable, ...]:
    """Variables worth setting on this host, with reasons; none where it has no active RDMA port."""
    ports, roce = active_ports(snapshot), roce_ports(snapshot)
    given = {name: found.value for name, found in variables(snapshot).items()}
    if not ports:
        return ()
    hca = ",".join(port.name for port in ports if port.pci is not None)
    rows = [("NCCL_IB_HCA", f"={hca}" if hca else None, "exactly the active RDMA ports, no prefixes")]
    rows.append(("NVSHMEM_HCA_LIST", hca or None, "the same ports"))
    if roce:
        rows += _roce_rows(snapshot, roce)
    return tuple(Variable(name=n, in_force=given.get(n), recommended=value, why=why) for n, value, why in rows)


def _roce_rows(snapshot: Snapshot, roce: list[Port]) -> list[tuple[str, str | None, str]]:
    indices = {best_index(port) for port in roce}
    index = str(next(iter(indices))) if len(indices) == 1 and None not in indices else None
    why = "routable RoCE v2 at this index on every port" if index else "no index is routable RoCE v2 on every port"
    nccl, nvshmem = GID_VARIABLES
    rows: list[tuple[str, str | None, str]] = [
        (nccl, None, f"leave unset: NCCL 2.21 and later choose per port ({why}{': ' + index if index else ''})"),
        (nvshmem, index, why),
    ]
    classes = {class_for(qos(snapshot, netdev)) for port in roce for netdev in port.netdevs}
    wanted = next(iter(classes)) if len(classes) == 1 else None
    if wanted is None:
        rows.append(("NCCL_IB_TC", None, "no one traffic class is lossless on every interface"))
        return rows
    value, forced = str(wanted), all(forced_traffic_class(snapshot, port) is not None for port in roce)
    said = f"DSCP {wanted >> 2}, which the NIC maps to a lossless priority"
    if forced:
        current = class_in_force(snapshot, roce[0])[0]
        rows.append(
            ("NCCL_IB_TC", None, f"not needed: the driver forces class {current} on queue pairs made by the kernel")
        )
        said += "; needed all the same, since queue pairs that a GPU drives are not made by the kernel"
    else:
        rows.append(("NCCL_IB_TC", value, said))
    return [*rows, ("NVSHMEM_IB_TRAFFIC_CLASS", value, said)]


def _list(name: str, given: Setting, there: list[str], why: str) -> list[Finding]:
    """Entries that match nothing. NCCL: `^` excludes, `=` asks for whole names, otherwise prefixes match."""
    text = given.value.removeprefix("^")
    exact = text.startswith("=") or name == "NVSHMEM_HCA_LIST"
    if given.value.startswith("^"):
        return []
    lost = [entry for entry in text.removeprefix("=").split(",") if entry and not _matches(entry, there, exact)]
    if not lost:
        return []
    what = f"{', '.join(lost)} is not among {', '.join(there) or 'the active devices: there are none'}"
    return [_finding(Severity.ERROR, "variable-names-nothing", name, given, f"{what}; {why}", f"unset {name}")]


def _matches(entry: str, there: list[str], exact: bool) -> bool:
    device, _, port = entry.partition(":")
    names = [name.partition(":") for name in there]
    return any((d == device if exact else d.startswith(device)) and (not port or p == port) for d, _, p in names)


def _finding(severity: Severity, code: str, name: str, given: Setting, why: str, fix: str) -> Finding:
    what = f"{name}={given.value} ({given.source})"
    return Finding(severity=severity, code=code, where=name, what=what, why=why, fix=fix)
