"""The PCIe tree: which device hangs under which bridge, how far two devices are apart, how fast a link runs.

From /sys/bus/pci/devices: a bridge names the bus below it (`secondary_bus_number`), so no link of sysfs is needed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from bywash.doctor.facts.rdma import PCI_ADDRESS, active_ports
from bywash.doctor.snapshot import Snapshot, integer

DEVICES = "sys/bus/pci/devices"
NVIDIA, MELLANOX = 0x10DE, 0x15B3
_NETWORK, _DISPLAY = 0x02, 0x03
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
# PCIe base specification: line code of 2.5 and 5 GT/s is 8b/10b, from 8 GT/s on 128b/130b; 64 GT/s has FLIT mode.
_LINE_CODE = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 1.0}


class Distance(IntEnum):
    """How far apart two devices are, in the words of `nvidia-smi topo -m`."""

    PIX = 1
    """Below one and the same switch."""
    PXB = 2
    """Switches only."""
    PHB = 3
    """Through a PCIe host bridge."""
    NODE = 4
    """Between host bridges of one NUMA node."""
    SYS = 5
    """Between NUMA nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """One function. Numbers are None where unreadable; `numa_node` -1 means that the firmware does not say."""

    address: str
    vendor: int | None
    kind: int | None
    numa_node: int | None
    secondary_bus: int | None
    speed_gts: float | None
    width: int | None
    max_width: int | None

    @property
    def gpu(self) -> bool:
        """An NVIDIA display or 3D controller."""
        return self.vendor == NVIDIA and self.kind == _DISPLAY

    @property
    def nic(self) -> bool:
        """A network controller."""
        return self.kind == _NETWORK

    @property
    def rate_gbps(self) -> float | None:
        """What the link carries now, before packet headers, in Gb/s."""
        code = _LINE_CODE.get(self.speed_gts or 0.0)
        return None if code is None or self.width is None else (self.speed_gts or 0.0) * self.width * code


def devices(snapshot: Snapshot) -> dict[str, PciDevice]:
    """Every PCI function by address."""
    return {
        address: _device(snapshot, address)
        for address in snapshot.children(DEVICES)
        if re.fullmatch(PCI_ADDRESS, address)
    }


def gpus(snapshot: Snapshot) -> list[PciDevice]:
    """NVIDIA GPUs."""
    return [device for device in devices(snapshot).values() if device.gpu]


def rdma_addresses(snapshot: Snapshot) -> list[str]:
    """PCI addresses under active RDMA ports, each once."""
    return list(dict.fromkeys(port.pci for port in active_ports(snapshot) if port.pci is not None))


def bridges_above(tree: Mapping[str, PciDevice], address: str) -> list[str]:
    """From the nearest bridge up to the root port."""
    by_bus = {(_domain(a), d.secondary_bus): a for a, d in tree.items() if d.secondary_bus}
    above: list[str] = []
    here: str | None = by_bus.get((_domain(address), _bus(address)))
    while here is not None and here not in above:
        above.append(here)
        here = by_bus.get((_domain(here), _bus(here)))
    return above


def distance(tree: Mapping[str, PciDevice], first: str, second: str) -> Distance:
    """Where the paths of two devices to the root part."""
    one, two = bridges_above(tree, first), bridges_above(tree, second)
    shared = next((bridge for bridge in one if bridge in two), None)
    if shared is not None:
        # A switch is an upstream port and a downstream port per device: at most one bridge each below the shared one.
        return Distance.PIX if max(one.index(shared), two.index(shared)) <= 1 else Distance.PXB
    if _root(one, first) == _root(two, second):
        return Distance.PHB
    nodes = [tree[address].numa_node if address in tree else None for address in (first, second)]
    return Distance.NODE if nodes[0] == nodes[1] else Distance.SYS


def _root(above: list[str], address: str) -> tuple[str, int]:
    top = above[-1] if above else address
    return _domain(top), _bus(top)


def _domain(address: str) -> str:
    return address.split(":")[0]


def _bus(address: str) -> int:
    return int(address.split(":")[1], 16)


def _device(snapshot: Snapshot, address: str) -> PciDevice:
    path = f"{DEVICES}/{address}"
    kind = _hex(snapshot.text(f"{path}/class"))
    speed = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", snapshot.text(f"{path}/current_link_speed") or "")
    return PciDevice(
        address=address,
        vendor=_hex(snapshot.text(f"{path}/vendor")),
        kind=None if kind is None else kind >> 16,
        numa_node=snapshot.integer(f"{path}/numa_node"),
        secondary_bus=snapshot.integer(f"{path}/secondary_bus_number"),
        speed_gts=float(speed[1]) if speed else None,
        width=_width(snapshot.text(f"{path}/current_link_width")),
        max_width=_width(snapshot.text(f"{path}/max_link_width")),
    )


def _hex(text: str | None) -> int | None:
    return int(text, 16) if text and re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else None


def _width(text: str | None) -> int | None:
    """Lanes; 0, 63 or 255 is what a device that has gone answers."""
    lanes = integer(text)
    return lanes if lanes in _WIDTHS else None
