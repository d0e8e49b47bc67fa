"""RDMA devices, their ports and GID tables, from /sys/class/infiniband. Knows nothing of queues or priorities.

Formats (kernel's Documentation/ABI/stable/sysfs-class-infiniband): state `4: ACTIVE`, rate `400 Gb/sec (4X NDR)`,
GIDs as eight groups of four hex digits, their types `IB/RoCE v1` or `RoCE v2`.
"""

import ipaddress
import re
from dataclasses import dataclass

from bywash.doctor.snapshot import Snapshot, integer

CLASS = "sys/class/infiniband"
ROCE_V2 = "RoCE v2"
_EMPTY = ":".join(["0000"] * 8)
PCI_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One entry of a port's GID table. `kind` is None where the kernel's word for it is missing or strange."""

    index: int
    address: ipaddress.IPv6Address
    kind: str | None
    netdev: str | None

    @property
    def routable(self) -> bool:
        """RoCE v2 from an address that other subnets can answer."""
        return self.kind == ROCE_V2 and not self.address.is_link_local

    def __str__(self) -> str:
        address = self.address.ipv4_mapped or self.address
        local = ", link-local" if self.address.is_link_local else ""
        return f"{address} ({self.kind or 'type unknown'}{local})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port. None where unreadable. `software`: no device behind it (siw), or a plain interface (rxe).

    `gids_whole`: no entry of the GID table is missing or garbled, so that what is not there is really not there.
    """

    device: str
    number: str
    state: str | None
    physical: str | None
    rate_gbps: float | None
    link_layer: str | None
    pci: str | None
    software: bool
    netdevs: tuple[str, ...]
    gids: tuple[Gid, ...]
    gids_whole: bool

    @property
    def name(self) -> str:
        """As NCCL writes it: `mlx5_0:1`."""
        return f"{self.device}:{self.number}"

    @property
    def path(self) -> str:
        """Its directory in sysfs."""
        return f"{CLASS}/{self.device}/ports/{self.number}"

    @property
    def active(self) -> bool:
        """Up, as far as the port itself can tell."""
        return self.state == "ACTIVE"

    @property
    def roce(self) -> bool:
        """A NIC over Ethernet, so GIDs, PFC and ECN matter."""
        return self.link_layer == "Ethernet" and not self.software


def ports(snapshot: Snapshot) -> list[Port]:
    """Every port of every RDMA device."""
    return [
        _port(snapshot, device, number)
        for device in snapshot.children(CLASS)
        for number in snapshot.children(f"{CLASS}/{device}/ports")
    ]


def active_ports(snapshot: Snapshot) -> list[Port]:
    """Ports that carry traffic."""
    return [port for port in ports(snapshot) if port.active]


def roce_ports(snapshot: Snapshot) -> list[Port]:
    """Active ports of NICs over Ethernet."""
    return [port for port in active_ports(snapshot) if port.roce]


def roce_netdevs(snapshot: Snapshot) -> list[str]:
    """The physical interfaces under the active RoCE ports, each once: where PFC, trust, ECN and MTU are set."""
    return list(dict.fromkeys(netdev for port in roce_ports(snapshot) for netdev in port.netdevs))


def _port(snapshot: Snapshot, device: str, number: str) -> Port:
    path = f"{CLASS}/{device}/ports/{number}"
    gids, whole = _gids(snapshot, path)
    rate = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", snapshot.text(f"{path}/rate") or "")
    uevent = snapshot.text(f"{CLASS}/{device}/device/uevent")
    slot = re.search(rf"^PCI_SLOT_NAME=({PCI_ADDRESS})$", uevent or "", re.MULTILINE)
    return Port(
        device=device,
        number=number,
        state=_word(snapshot.text(f"{path}/state")),
        physical=_word(snapshot.text(f"{path}/phys_state")),
        rate_gbps=float(rate[1]) if rate else None,
        link_layer=_one_of(snapshot.text(f"{path}/link_layer"), ("Ethernet", "InfiniBand", "Unspecified")),
        pci=slot[1] if slot else None,
        software=snapshot.has(f"{CLASS}/{device}/parent") or (uevent is None and snapshot.complete),
        netdevs=_netdevs(snapshot, device, gids),
        gids=gids,
        gids_whole=whole,
    )


def _word(text: str | None) -> str | None:
    """`4: ACTIVE` to `ACTIVE`."""
    found = re.fullmatch(r"[0-9]: ([A-Za-z_]+)", text or "")
    return found[1] if found else None


def _one_of(text: str | None, known: tuple[str, ...]) -> str | None:
    return text if text in known else None


def _gids(snapshot: Snapshot, path: str) -> tuple[tuple[Gid, ...], bool]:
    """Entries in use (the others are all zero), and whether every entry could be read."""
    found = []
    names = snapshot.children(f"{path}/gids")
    whole = bool(names) and set(snapshot.children(f"{path}/gid_attrs/types")) <= set(names)
    for name in names:
        index = integer(name)
        text = snapshot.text(f"{path}/gids/{name}") or ""
        if text == _EMPTY:  # most of 256
            continue
        try:
            address = ipaddress.IPv6Address(text)
        except ValueError:
            whole = False
            continue
        if index is not None and int(address) & ((1 << 64) - 1):
            kind = _one_of(snapshot.text(f"{path}/gid_attrs/types/{name}"), (ROCE_V2, "IB/RoCE v1"))
            netdev = snapshot.text(f"{path}/gid_attrs/ndevs/{name}")
            found.append(Gid(index=index, address=address, kind=kind, netdev=netdev))
            whole = whole and kind is not None
    return tuple(found), whole


def _netdevs(snapshot: Snapshot, device: str, gids: tuple[Gid, ...]) -> tuple[str, ...]:
    """Physical interfaces: those of the PCI function, or of this port where it has several; a bond's members too."""
    own = snapshot.children(f"{CLASS}/{device}/device/net")
    named = [gid.netdev for gid in gids if gid.netdev]
    members = [m for n in named for m in (snapshot.text(f"sys/class/net/{n}/bonding/slaves") or "").split()]
    here = [name for name in own if name in named] or own or ([] if members else named)
    return tuple(dict.fromkeys((*here, *members)))
