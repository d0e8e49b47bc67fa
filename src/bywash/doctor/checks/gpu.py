"""GPUs: driver, direct access between them, direct access from the NIC, and the modules that small messages want."""

import re

from bywash.doctor.facts import pci
from bywash.doctor.facts.system import kernel_version, open_gpu_driver, peermem, setting
from bywash.doctor.finding import Finding, Severity, unseen
from bywash.doctor.snapshot import Snapshot, command_path

_DRIVER = "proc/driver/nvidia/version"
_DMABUF_KERNEL = (5, 12)
_P2P_WORDS = {
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a driver setting",
    "U": "unknown",
}


def driver(snapshot: Snapshot) -> list[Finding]:
    """No GPU, no driver, or a driver that programs cannot open."""
    banner = snapshot.text(_DRIVER)
    if banner is None and not pci.gpus(snapshot):
        if not snapshot.complete or not snapshot.has("sys"):
            return [unseen("gpu-unseen", f"/{pci.DEVICES}", "no GPU seen", snapshot.why_not(_DRIVER))]
        why = "rows in GPU memory are what zero-copy is for; CPU processes exchange through host memory"
        return [_error("no-gpu", f"/{pci.DEVICES}", "no NVIDIA GPU", why)]
    if banner is None:
        if not snapshot.complete:
            return [unseen("driver-unseen", f"/{_DRIVER}", "driver not seen", snapshot.why_not(_DRIVER))]
        fix = "install the NVIDIA driver, modprobe nvidia; in a container: --gpus all"
        return [_error("no-gpu-driver", f"/{_DRIVER}", "the NVIDIA driver is not loaded", "GPUs cannot be used", fix)]
    if open_gpu_driver(snapshot) is None:
        return [unseen("driver-unseen", f"/{_DRIVER}", "not a driver's banner", snapshot.why_not(_DRIVER))]
    if snapshot.complete and not snapshot.has("dev/nvidia-uvm"):
        why = "CUDA fails to start without it"
        return [_error("no-uvm", "/dev/nvidia-uvm", "no device node", why, "nvidia-modprobe -u; modprobe nvidia_uvm")]
    return []


def peer_access(snapshot: Snapshot) -> list[Finding]:
    """Pairs of GPUs that cannot reach each other's memory, and pairs left out of NVLink."""
    findings = []
    names, cells = _matrix(snapshot.output("nvidia-smi-p2p"))
    closed = {pair: word for pair, word in cells.items() if word != "OK" and pair[0] < pair[1]}
    if not names or not set(closed.values()) <= set(_P2P_WORDS):
        why = snapshot.why_not(command_path("nvidia-smi-p2p"))
        findings.append(unseen("p2p-unseen", "GPUs", "peer access between GPUs cannot be seen", why))
    elif closed:
        words = ", ".join(_P2P_WORDS[word] for word in dict.fromkeys(closed.values()))
        why = "rows between these GPUs are copied through host memory"
        fix = "on NVSwitch machines: systemctl status nvidia-fabricmanager; else see ACS, IOMMU and NVreg settings"
        findings.append(_error("p2p-off", _pairs(names, list(closed)), f"no peer access: {words}", why, fix))
    return findings + _nvlink(snapshot)


def direct_rdma(snapshot: Snapshot) -> list[Finding]:
    """Neither nvidia-peermem nor dma-buf: the NIC cannot reach GPU memory."""
    if peermem(snapshot):
        return []
    opened, kernel = open_gpu_driver(snapshot), kernel_version(snapshot)
    refused = setting(snapshot, "NCCL_DMABUF_ENABLE") == "0"
    if opened is not False and not refused and (opened is None or kernel is None):
        path = "proc/sys/kernel/osrelease" if kernel is None else _DRIVER
        return [
            unseen("gpudirect-unseen", "GPUDirect RDMA", "dma-buf support cannot be judged", snapshot.why_not(path))
        ]
    if not snapshot.complete and not (opened and kernel and kernel >= _DMABUF_KERNEL and not refused):
        why = snapshot.why_not("sys/module/nvidia_peermem/version")
        return [unseen("gpudirect-unseen", "GPUDirect RDMA", "nvidia-peermem cannot be seen", why)]
    lacking = []
    if not opened:
        lacking.append("the closed kernel module exports no dma-buf")
    if kernel is not None and kernel < _DMABUF_KERNEL:
        lacking.append(f"kernel {kernel[0]}.{kernel[1]} is older than 5.12")
    if refused:
        lacking.append("NCCL_DMABUF_ENABLE=0")
    if not lacking:
        return []
    what = f"nvidia-peermem is not loaded, and dma-buf is out: {', '.join(lacking)}"
    why = "every row to another host is first copied to host memory"
    return [
        _error(
            "no-gpudirect", "GPUDirect RDMA", what, why, "modprobe nvidia-peermem, or install the open kernel module"
        )
    ]


def copy_module(snapshot: Snapshot) -> list[Finding]:
    """gdrdrv lets a CPU write GPU memory directly; NCCL and NVSHMEM use it for small messages where it is there."""
    if snapshot.has("dev/gdrdrv") or not snapshot.complete:
        return []
    why = "NVSHMEM's proxy and NCCL's flags take a slower way to GPU memory for small messages"
    fix = "install gdrcopy's driver; modprobe gdrdrv"
    what = "GDRCopy's driver is not loaded"
    return [Finding(severity=Severity.INFO, code="no-gdrcopy", where="/dev/gdrdrv", what=what, why=why, fix=fix)]


def _nvlink(snapshot: Snapshot) -> list[Finding]:
    names, cells = _matrix(snapshot.output("nvidia-smi-topo"))
    linked = [pair for pair, word in cells.items() if re.fullmatch(r"NV[0-9]+", word)]
    others = [pair for pair in cells if pair[0] < pair[1] and pair not in linked]
    if not names:
        why = snapshot.why_not(command_path("nvidia-smi-topo"))
        return [unseen("nvlink-unseen", "GPUs", "NVLink between GPUs cannot be seen", why)]
    if not linked or not others:
        return []
    what = "these pairs have no NVLink, others have"
    why = "a collective runs at the speed of its slowest pair"
    fix = "nvidia-smi nvlink --status; or group ranks so that heavy traffic stays on NVLink"
    return [
        Finding(
            severity=Severity.WARNING, code="nvlink-partial", where=_pairs(names, others), what=what, why=why, fix=fix
        )
    ]


def _matrix(text: str | None) -> tuple[list[str], dict[tuple[int, int], str]]:
    """GPU names and the words between them, from a table of `nvidia-smi topo`; nothing unless it is whole."""
    clean = re.sub(r"\x1b\[[0-9;]*m", "", text or "")  # nvidia-smi underlines its header
    rows = {line.split()[0]: line.split()[1:] for line in clean.splitlines() if re.match(r"\s*GPU[0-9]+\s+\S", line)}
    header = next((line.split() for line in clean.splitlines() if line.split()[:1] == ["GPU0"]), [])
    names = [name for name in header if re.fullmatch(r"GPU[0-9]+", name)]
    if list(rows) != names or any(len(words) < len(names) or words[i] != "X" for i, words in enumerate(rows.values())):
        return [], {}
    return names, {(i, j): rows[a][j] for i, a in enumerate(names) for j in range(len(names)) if i != j}


def _pairs(names: list[str], pairs: list[tuple[int, int]]) -> str:
    shown = ", ".join(f"{names[i]}-{names[j]}" for i, j in pairs[:8])
    return shown + (f" and {len(pairs) - 8} more" if len(pairs) > 8 else "")


def _error(code: str, where: str, what: str, why: str, fix: str = "") -> Finding:
    return Finding(severity=Severity.ERROR, code=code, where=where, what=what, why=why, fix=fix)
