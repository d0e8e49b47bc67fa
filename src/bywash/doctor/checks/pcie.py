"""PCIe between GPU and NIC: link width and speed, distance, ACS on the way, IOMMU translation."""

import re
from itertools import groupby

from bywash.doctor.facts import pci
from bywash.doctor.facts.rdma import PCI_ADDRESS, active_ports
from bywash.doctor.facts.system import guest, setting
from bywash.doctor.finding import Finding, Severity, unseen
from bywash.doctor.snapshot import Snapshot, command_path

_GDR_LEVELS = {"LOC": 0, "PIX": 1, "PXB": 2, "PHB": 4, "SYS": 5}  # NCCL's PHB is one NUMA node
_TRANSLATING = ("DMA", "DMA-FQ")
_IOMMU_TYPES = (*_TRANSLATING, "identity", "blocked", "unmanaged")


def links(snapshot: Snapshot) -> list[Finding]:
    """Links narrower than the device, and NICs whose slot is slower than their ports. A GPU's speed drops when idle."""
    tree = pci.devices(snapshot)
    findings = []
    for address in _ends(snapshot):
        device = tree.get(address)
        if device is None or device.width is None or device.max_width is None:
            missing = "current_link_width" if device is None or device.width is None else "max_link_width"
            why = snapshot.why_not(f"{pci.DEVICES}/{address}/{missing}")
            findings.append(unseen("link-unseen", address, "PCIe link width cannot be seen", why))
        elif device.width < device.max_width:
            what = f"PCIe x{device.width}, the device can x{device.max_width}"
            why = "every byte to and from this device shares that link"
            fix = "reseat the card or riser; check the slot's lanes and bifurcation in the firmware setup"
            findings.append(_warning("link-narrow", address, what, why, fix))
    return findings + _slots(snapshot, tree)


def placement(snapshot: Snapshot) -> list[Finding]:
    """GPUs whose nearest NIC is so far that NCCL does not use GPUDirect RDMA by itself."""
    tree, nics = pci.devices(snapshot), pci.rdma_addresses(snapshot)
    allowed = _GDR_LEVELS.get(setting(snapshot, "NCCL_NET_GDR_LEVEL") or "", int(pci.Distance.PXB))
    if setting(snapshot, "NCCL_TOPO_FILE"):
        return []
    findings = []
    for gpu in pci.gpus(snapshot):
        apart, nic = min((pci.distance(tree, gpu.address, nic), nic) for nic in nics)
        strange = next((a for a in (gpu.address, nic) if a not in tree or tree[a].numa_node is None), None)
        if strange is not None and apart > pci.Distance.PHB:
            why = snapshot.why_not(f"{pci.DEVICES}/{strange}/numa_node")
            findings.append(unseen("placement-unseen", gpu.address, "distance to the NICs cannot be judged", why))
        elif apart > allowed:
            findings.append(_far(gpu.address, nic, apart, inside=guest(snapshot)))
    return findings


def acs(snapshot: Snapshot) -> list[Finding]:
    """Bridges that send peer-to-peer traffic up to the root complex."""
    tree = pci.devices(snapshot)
    bridges = list(dict.fromkeys(b for end in _ends(snapshot) for b in pci.bridges_above(tree, end)))
    said = _lspci(snapshot.output("lspci") or "")
    path = command_path("lspci")
    dark = [bridge for bridge in bridges if bridge not in said or "access denied" in said[bridge]]
    findings = []
    if dark:
        denied = any("access denied" in said.get(bridge, "") for bridge in dark)
        why = "lspci may not read it as this user" if denied else snapshot.why_not(path)
        what = f"ACS of {len(dark)} bridges above GPUs and NICs cannot be seen"
        findings.append(unseen("acs-unseen", _some(dark), what, why, "install pciutils and run as root"))
    on = [bridge for bridge in bridges if re.search(r"ACSCtl:.*\b(ReqRedir|CmpltRedir)\+", said.get(bridge, ""))]
    findings += [_acs_on(bridge) for bridge in on]
    if guest(snapshot):
        why = "a guest sees bridges that the hypervisor makes up"
        findings.append(unseen("acs-hypervisor", "hypervisor", "ACS of the real bridges cannot be seen", why))
    return findings


def iommu(snapshot: Snapshot) -> list[Finding]:
    """Devices behind a translating IOMMU. Without a group there is no IOMMU in use, or a hypervisor hides it."""
    kinds = {end: snapshot.text(f"{pci.DEVICES}/{end}/iommu_group/type") for end in _ends(snapshot)}
    strange = [end for end, kind in kinds.items() if kind not in _IOMMU_TYPES and (kind or not snapshot.complete)]
    strange += [end for end in kinds if f"{pci.DEVICES}/{end}/iommu_group/type" in snapshot.unread]
    findings = []
    if strange:
        why = snapshot.why_not(f"{pci.DEVICES}/{strange[0]}/iommu_group/type")
        findings.append(unseen("iommu-unseen", _some(strange), "IOMMU mode cannot be seen", why))
    translated = [end for end, kind in kinds.items() if kind in _TRANSLATING]
    if translated:
        what = "DMA addresses are translated"
        why = "traffic between GPU and NIC goes up to the IOMMU rather than through the nearest switch"
        booted = snapshot.text("proc/cmdline")
        fix = "boot with iommu=pt (or switch the IOMMU off in the firmware setup)"
        fix += f"; booted with: {booted}" if booted else ""
        findings.append(_warning("iommu-translates", _some(translated), what, why, fix))
    return findings


def _ends(snapshot: Snapshot) -> list[str]:
    """GPUs, and NICs with an active RDMA port."""
    return [gpu.address for gpu in pci.gpus(snapshot)] + pci.rdma_addresses(snapshot)


def _slots(snapshot: Snapshot, tree: dict[str, pci.PciDevice]) -> list[Finding]:
    """Per slot: all active ports of a card's functions against the one link they share."""
    ports = sorted(
        (p.pci.rpartition(".")[0], p.pci, p.rate_gbps) for p in active_ports(snapshot) if p.pci and p.rate_gbps
    )
    findings = []
    for _, group in groupby(ports, key=lambda port: port[0]):
        members = list(group)
        address, total = members[0][1], sum(rate for _, _, rate in members)
        link = tree[address].rate_gbps if address in tree else None
        if link is None:
            if address in tree and tree[address].width is not None:
                why = snapshot.why_not(f"{pci.DEVICES}/{address}/current_link_speed")
                findings.append(unseen("link-unseen", address, "PCIe link speed cannot be seen", why))
        elif link < total:
            what = (
                f"PCIe {tree[address].speed_gts:g} GT/s x{tree[address].width} = {link:.0f} Gb/s, ports {total:g} Gb/s"
            )
            why = "the NIC cannot fill its ports, and a full NIC pauses the network"
            findings.append(_warning("link-slow", address, what, why, "use a faster slot, or fewer ports"))
    return findings


def _far(gpu: str, nic: str, apart: pci.Distance, *, inside: bool) -> Finding:
    why = "NCCL uses GPUDirect RDMA over PCIe switches only (PXB), unless told otherwise"
    fix = "move the NIC below the GPU's switch; or measure NCCL_NET_GDR_LEVEL=" + (
        "SYS" if apart is pci.Distance.SYS else "PHB"
    )
    if inside:
        fix = "this is a guest, whose PCIe tree is made up: give NCCL the real one in NCCL_TOPO_FILE"
    return _warning("nic-far", gpu, f"its nearest NIC, {nic}, is {apart.name} away", why, fix)


def _lspci(text: str) -> dict[str, str]:
    """The filtered output of `lspci -Dvvv` per device."""
    parts = re.split(rf"^({PCI_ADDRESS})\b", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def _acs_on(bridge: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        code="acs-on",
        where=bridge,
        what="ACS redirects peer-to-peer requests",
        why="traffic between GPU and NIC goes through the root complex: slow, and NCCL may hang",
        fix=f"setpci -s {bridge} ECAP_ACS+0x6.w=0000  # after each boot; or switch ACS off in the firmware setup",
    )


def _some(addresses: list[str]) -> str:
    return ", ".join(addresses[:4]) + (f" and {len(addresses) - 4} more" if len(addresses) > 4 else "")


def _warning(code: str, where: str, what: str, why: str, fix: str) -> Finding:
    return Finding(severity=Severity.WARNING, code=code, where=where, what=what, why=why, fix=fix)
