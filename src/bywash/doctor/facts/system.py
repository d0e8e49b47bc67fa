"""Small facts of the host: modules, kernel, NUMA nodes, limits, mounts, whether it is a guest, and NCCL's variables."""

import re
from dataclasses import dataclass

from bywash.doctor.snapshot import Snapshot, integer

_KIB = 1024
_UNITS = {"": 1, "k": _KIB, "m": _KIB**2, "g": _KIB**3, "t": _KIB**4}
_CAP_IPC_LOCK = 14
_PEERMEM_FILES = (
    "sys/module/nvidia_peermem/version",
    "sys/module/nv_peer_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A variable in force and where it came from."""

    value: str
    source: str


def variables(snapshot: Snapshot) -> dict[str, Setting]:
    """NCCL's and NVSHMEM's variables in force: the environment first, then the user's file, then the system's."""
    found: dict[str, Setting] = {}
    sources = (
        ("commands/env.txt", "environment"),
        ("home/.nccl.conf", "~/.nccl.conf"),
        ("etc/nccl.conf", "/etc/nccl.conf"),
    )
    for path, source in sources:
        for name, value in re.findall(r"^\s*([A-Z][A-Z0-9_]*)=(.*?)\s*$", snapshot.text(path) or "", re.MULTILINE):
            found.setdefault(name, Setting(value=value, source=source))
    return found


def setting(snapshot: Snapshot, name: str) -> str | None:
    """One variable's value in force."""
    found = variables(snapshot).get(name)
    return found.value if found else None


def guest(snapshot: Snapshot) -> bool:
    """Whether this is a virtual machine, whose host's bridges and IOMMU cannot be seen from inside."""
    return bool(re.search(r"^flags\b.*\bhypervisor\b", snapshot.text("proc/cpuinfo") or "", re.MULTILINE))


def peermem(snapshot: Snapshot) -> bool:
    """Whether nvidia-peermem or its forerunner is loaded: the files that NCCL and UCX look for."""
    return any(snapshot.has(path) for path in _PEERMEM_FILES)


def kernel_version(snapshot: Snapshot) -> tuple[int, int] | None:
    """Major and minor."""
    found = re.match(r"([0-9]{1,4})\.([0-9]{1,4})\b", snapshot.text("proc/sys/kernel/osrelease") or "")
    return (int(found[1]), int(found[2])) if found else None


def open_gpu_driver(snapshot: Snapshot) -> bool | None:
    """Whether NVIDIA's kernel module is the open one; None where its banner is missing or strange."""
    banner = snapshot.text("proc/driver/nvidia/version") or ""
    found = re.match(r"NVRM version: NVIDIA UNIX (.*?)Kernel Module", banner)
    return "Open" in found[1] if found else None


def numa_nodes(snapshot: Snapshot) -> int | None:
    """How many nodes are online, from a list such as `0-1,4`."""
    text = snapshot.text("sys/devices/system/node/online") or ""
    if not re.fullmatch(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*", text):
        return None
    spans = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return sum(max(0, span[-1] - span[0] + 1) for span in spans)


def memlock_bytes(snapshot: Snapshot) -> float | None:
    """Soft limit on locked memory; infinity for `unlimited`."""
    text = snapshot.text("proc/self/limits") or ""
    found = re.search(r"^Max locked memory\s+(unlimited|[0-9]{1,20})\s+(?:unlimited|[0-9]{1,20})\s+bytes", text, re.M)
    if found is None:
        return None
    return float("inf") if found[1] == "unlimited" else int(found[1])


def may_lock_memory(snapshot: Snapshot) -> bool:
    """CAP_IPC_LOCK: the limit does not bind this process."""
    found = re.search(r"^CapEff:\s*([0-9a-f]{16})$", snapshot.text("proc/self/status") or "", re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def shm_bytes(snapshot: Snapshot) -> int | None:
    """Size of the tmpfs at /dev/shm: its option, or half the memory where it has none. 0: nothing mounted there."""
    text = snapshot.text("proc/self/mounts")
    if text is None:
        return None
    if not text:
        return 0
    mount = re.search(r"^\S+ /dev/shm tmpfs (\S+)", text, re.MULTILINE)
    if mount is None:
        return None
    size = re.search(r"\bsize=([0-9]{1,20})([kmgt]?)(?:,|$)", mount[1])
    if size:
        return int(size[1]) * _UNITS[size[2]]
    memory = re.match(r"MemTotal:\s+([0-9]{1,15}) kB", snapshot.text("proc/meminfo") or "")
    return integer(memory[1]) * _KIB // 2 if memory and "size=" not in mount[1] else None  # type: ignore[operator]
