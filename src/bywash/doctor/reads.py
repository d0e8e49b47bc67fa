"""What the doctor reads, as data: paths, the tools it runs, and what is kept of files that say more than it needs.

Nothing else is read and nothing else gets into a capture. No credentials, no addresses of other hosts, no process
lists; GIDs do hold this host's MAC and IP addresses. Interpreted by `collect`; listed for operators in docs/doctor.md.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from bywash.doctor.facts.rdma import roce_netdevs
from bywash.doctor.snapshot import Snapshot

_PORT = "sys/class/infiniband/*/ports/*"
_PCI = "sys/bus/pci/devices/*"

FILES: tuple[str, ...] = (
    "proc/cmdline",
    "proc/cpuinfo",
    "proc/meminfo",
    "proc/self/limits",
    "proc/self/mounts",
    "proc/self/status",
    "proc/sys/kernel/numa_balancing",
    "proc/sys/kernel/osrelease",
    "proc/driver/nvidia/version",
    "sys/devices/system/node/online",
    f"{_PCI}/class",
    f"{_PCI}/vendor",
    f"{_PCI}/numa_node",
    f"{_PCI}/current_link_speed",
    f"{_PCI}/current_link_width",
    f"{_PCI}/max_link_width",
    f"{_PCI}/secondary_bus_number",
    f"{_PCI}/iommu_group/type",
    f"{_PORT}/state",
    f"{_PORT}/phys_state",
    f"{_PORT}/rate",
    f"{_PORT}/link_layer",
    f"{_PORT}/gids/*",
    f"{_PORT}/gid_attrs/types/*",
    f"{_PORT}/gid_attrs/ndevs/*",
    "sys/class/infiniband/*/parent",
    "sys/class/infiniband/*/device/uevent",
    "sys/class/infiniband/*/device/net/*/mtu",
    "sys/class/infiniband/*/tc/*/traffic_class",
    "sys/class/infiniband_verbs/*/ibdev",
    "sys/class/net/*/mtu",
    "sys/class/net/*/bonding/slaves",
    "sys/class/net/*/ecn/roce_np/enable/*",
    "sys/class/net/*/ecn/roce_rp/enable/*",
    "sys/kernel/config/rdma_cm/*/ports/*/default_roce_mode",
    "sys/kernel/mm/memory_peers/*/version",
    "sys/module/nvidia_peermem/version",
    "sys/module/nv_peer_mem/version",
    "etc/nccl.conf",
    "home/.nccl.conf",
)
"""Patterns under the root. `home/.nccl.conf` stands for the user's own `~/.nccl.conf`."""

NAMES: tuple[str, ...] = ("dev/infiniband/*", "dev/nvidia-uvm", "dev/gdrdrv")
"""Only whether they exist: device nodes are never opened."""

VARIABLES = ("NCCL_", "NVSHMEM_", "UCX_")
"""Prefixes of the environment variables that `commands/env.txt` keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A command to run; its output becomes `commands/NAME.txt`."""

    name: str
    argv: tuple[str, ...]


def tools(files: Snapshot) -> list[Tool]:
    """The tools worth running on a host with these files; QoS tools once per RoCE interface."""
    found = [Tool(name="lspci", argv=("lspci", "-Dvvv"))]
    if files.has("proc/driver/nvidia/version"):
        found += [
            Tool(name="nvidia-smi-topo", argv=("nvidia-smi", "topo", "-m")),
            Tool(name="nvidia-smi-p2p", argv=("nvidia-smi", "topo", "-p2p", "r")),
        ]
    for netdev in roce_netdevs(files):
        found += [
            Tool(name=f"mlnx_qos-{netdev}", argv=("mlnx_qos", "-i", netdev)),
            Tool(name=f"dcb-pfc-{netdev}", argv=("dcb", "pfc", "show", "dev", netdev)),
            Tool(name=f"dcb-app-{netdev}", argv=("dcb", "-N", "app", "show", "dev", netdev)),
        ]
    return found


def _lines(pattern: str) -> Callable[[str], str]:
    """Keeps the lines in which the pattern occurs."""
    wanted = re.compile(pattern)
    return lambda text: "".join(line for line in text.splitlines(keepends=True) if wanted.search(line))


def _hypervisor(text: str) -> str:
    """One word of `flags`: whether this is a guest."""
    return "flags : hypervisor\n" if re.search(r"^flags\b.*\bhypervisor\b", text, re.MULTILINE) else "flags :\n"


def _iommu_words(text: str) -> str:
    """Boot parameters may hold tokens and addresses; these words do not."""
    kept = (
        word for word in text.split() if re.match(r"(intel_iommu|amd_iommu|iommu\b|iommu\.|pci=|numa_balancing)", word)
    )
    return " ".join(kept) + "\n"


KEEP: dict[str, Callable[[str], str]] = {
    "proc/cmdline": _iommu_words,
    "proc/cpuinfo": _hypervisor,
    "proc/meminfo": _lines(r"^MemTotal:"),
    "proc/self/limits": _lines(r"^Max locked memory"),
    "proc/self/mounts": _lines(r"^\S+ /dev/shm "),
    "proc/self/status": _lines(r"^CapEff:"),
    "etc/nccl.conf": _lines(r"^\s*NCCL_"),
    "home/.nccl.conf": _lines(r"^\s*NCCL_"),
    "commands/lspci.txt": _lines(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:|ACSCtl:|access denied"),
    "commands/env.txt": _lines(rf"^({'|'.join(VARIABLES)})"),
}
"""What is kept of files that say more than the doctor needs. Each is a fixed point: filtering again changes nothing."""
