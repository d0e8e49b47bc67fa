"""Memory of the host: NUMA balancing, the limit on locked memory, the size of /dev/shm."""

from bywash.doctor.facts.system import may_lock_memory, memlock_bytes, shm_bytes
from bywash.doctor.finding import Finding, Severity, unseen
from bywash.doctor.snapshot import Snapshot

SHM_BYTES = 1 << 30
"""What NCCL's own guide asks containers for (`--shm-size=1g`); the usual container gets 64 MiB."""


def numa_balancing(snapshot: Snapshot) -> list[Finding]:
    """The kernel moving pages between nodes under running transfers."""
    path = "proc/sys/kernel/numa_balancing"
    mode = snapshot.integer(path)
    if mode is None:
        return [unseen("numa-unseen", f"/{path}", "NUMA balancing cannot be seen", snapshot.why_not(path))]
    if mode == 0:
        return []
    return [
        Finding(
            severity=Severity.WARNING,
            code="numa-balancing",
            where=f"/{path}",
            what=f"automatic NUMA balancing is on ({mode})",
            why="page faults on purpose, and pages that move: stalls of proxy threads and host buffers",
            fix="sysctl -w kernel.numa_balancing=0",
        )
    ]


def memlock(snapshot: Snapshot) -> list[Finding]:
    """RDMA registers, hence locks, whole buffers."""
    limit = memlock_bytes(snapshot)
    if limit is None:
        why = snapshot.why_not("proc/self/limits")
        return [unseen("memlock-unseen", "ulimit -l", "the limit on locked memory cannot be seen", why)]
    if limit == float("inf"):
        return []
    free = may_lock_memory(snapshot)
    what = f"{limit / 1024:,.0f} KiB may be locked" + (", but this process is exempt (CAP_IPC_LOCK)" if free else "")
    return [
        Finding(
            severity=Severity.INFO if free else Severity.ERROR,
            code="memlock",
            where="ulimit -l",
            what=what,
            why="registering a buffer with the NIC locks it; beyond the limit registration fails",
            fix="'* - memlock unlimited' in /etc/security/limits.conf; LimitMEMLOCK=infinity; --ulimit memlock=-1",
        )
    ]


def shared_memory(snapshot: Snapshot) -> list[Finding]:
    """NCCL's buffers between processes. bywash's own exchange uses memfd, which this does not bound."""
    size = shm_bytes(snapshot)
    if size is None:
        why = snapshot.why_not("proc/self/mounts")
        return [unseen("shm-unseen", "/dev/shm", "its size cannot be seen", why)]
    if size >= SHM_BYTES:
        return []
    return [
        Finding(
            severity=Severity.WARNING,
            code="shm-small",
            where="/dev/shm",
            what=f"{size >> 20} MiB" if size else "no tmpfs mounted there",
            why="NCCL and torch put buffers between processes there; too little gives 'no space left' or a bus error",
            fix="in a container: --shm-size=1g or --ipc=host; on the host: mount -o remount,size=4g /dev/shm",
        )
    ]
