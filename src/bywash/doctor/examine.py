"""The doctor's table of checks, and the one function that runs it. Pure: a snapshot in, a report out.

A check runs only where it applies; why it does not is part of the report. Called by the command line and by tests;
a start-up check may call `examine` on `collect.live()`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bywash.doctor.checks import gpu, host, libraries, links, lossless, pcie, roce
from bywash.doctor.facts import pci
from bywash.doctor.facts.rdma import active_ports, ports, roce_netdevs, roce_ports
from bywash.doctor.facts.system import numa_nodes
from bywash.doctor.finding import CheckResult, Finding, Report
from bywash.doctor.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row: its name, what it asks, what does the work, and what the host must have for it to apply."""

    name: str
    title: str
    run: Callable[[Snapshot], list[Finding]]
    needs: tuple[str, ...] = ()


_HAS: dict[str, tuple[Callable[[Snapshot], object], str]] = {
    "rdma": (active_ports, "no active RDMA port seen"),
    "devices": (lambda s: ports(s) or _has_gpu(s), "neither RDMA device nor GPU seen"),
    "ends": (lambda s: active_ports(s) or pci.gpus(s), "neither active RDMA port nor GPU seen"),
    "roce": (roce_ports, "no active RoCE port seen"),
    "netdev": (roce_netdevs, "no interface of an active RoCE port seen"),
    "gpu": (pci.gpus, "no GPU seen"),
    "gpus": (lambda s: len(pci.gpus(s)) > 1, "fewer than two GPUs seen"),
    "driver": (lambda s: s.has("proc/driver/nvidia/version"), "no GPU driver seen"),
    "nodes": (lambda s: numa_nodes(s) != 1, "one NUMA node"),
    "pci-nic": (pci.rdma_addresses, "no RDMA NIC on PCIe seen"),
}

CHECKS: tuple[Check, ...] = (
    Check(name="rdma", title="RDMA devices and links", run=links.devices),
    Check(name="verbs", title="RDMA device nodes", run=links.verbs, needs=("rdma",)),
    Check(name="gid", title="RoCE v2 addresses (GID)", run=roce.gids, needs=("roce",)),
    Check(name="mtu", title="MTU of the RoCE interfaces", run=roce.mtu, needs=("netdev",)),
    Check(name="pfc", title="DSCP trust and PFC", run=lossless.pfc, needs=("netdev",)),
    Check(name="ecn", title="ECN", run=lossless.marking, needs=("netdev",)),
    Check(name="class", title="Traffic class of NCCL", run=lossless.traffic_class, needs=("netdev",)),
    Check(name="gpu", title="GPU driver", run=gpu.driver),
    Check(name="p2p", title="Peer access and NVLink between GPUs", run=gpu.peer_access, needs=("gpus", "driver")),
    Check(name="gpudirect", title="GPUDirect RDMA", run=gpu.direct_rdma, needs=("rdma", "gpu", "driver")),
    Check(name="gdrcopy", title="GDRCopy", run=gpu.copy_module, needs=("rdma", "gpu", "driver")),
    Check(name="link", title="PCIe link width and speed", run=pcie.links, needs=("ends",)),
    Check(name="placement", title="Distance between GPUs and NICs", run=pcie.placement, needs=("gpu", "pci-nic")),
    Check(name="acs", title="PCIe access control (ACS)", run=pcie.acs, needs=("ends",)),
    Check(name="iommu", title="IOMMU", run=pcie.iommu, needs=("ends",)),
    Check(name="numa", title="NUMA balancing", run=host.numa_balancing, needs=("nodes",)),
    Check(name="memlock", title="Limit on locked memory", run=host.memlock, needs=("rdma",)),
    Check(name="shm", title="Shared memory", run=host.shared_memory),
    Check(name="variables", title="NCCL and NVSHMEM variables", run=libraries.in_force, needs=("devices",)),
)


def examine(snapshot: Snapshot) -> Report:
    """Run every check that applies. Never raises, whatever the files hold."""
    results = []
    for check in CHECKS:
        lacking = next((reason for has, reason in map(_HAS.__getitem__, check.needs) if not has(snapshot)), None)
        found = () if lacking else tuple(check.run(snapshot))
        results.append(CheckResult(check=check.name, title=check.title, findings=found, skipped=lacking))
    return Report(origin=snapshot.origin, results=tuple(results), variables=libraries.recommended(snapshot))


def _has_gpu(snapshot: Snapshot) -> bool:
    return bool(pci.gpus(snapshot)) or snapshot.has("proc/driver/nvidia/version")
