"""Snapshots made by code: a healthy host with two GPUs and two ConnectX-7 at 400 Gb/s RoCE, and ways to spoil it.

Formats are those of Linux 6.8 with NVIDIA's driver package: sysfs ABI, `mlnx_qos`, `lspci -Dvvv`, `nvidia-smi topo`.
Each GPU shares a PCIe switch with one NIC: root port, upstream port, two downstream ports.
"""

from bywash.doctor import Snapshot

GPUS = ("0000:1a:00.0", "0000:9a:00.0")
NICS = ("0000:1b:00.0", "0000:9b:00.0")
NETDEVS = ("ens1np0", "ens2np0")

MLNX_QOS = """DCBX mode: OS controlled
Priority trust state: {trust}
dscp2prio mapping:
{map}default priority:
Receive buffer size (bytes): 19872,243072,0,0,0,0,0,0,max_buffer_size=2069280
Cable len: 7
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     {pfc}
\tbuffer      0   0   0   1   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: vendor
\t priority:  1
tc: 3 ratelimit: unlimited, tsa: vendor
\t priority:  3
"""
TOPO = """\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPIX\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS
NIC1\tSYS\tPIX\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
P2P = """ \tGPU0\tGPU1\t
 GPU0\tX\t{0}\t
 GPU1\t{0}\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder@U16)"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023"


def mlnx_qos(trust="dscp", pfc=(3,)):
    rows = [",".join(f"{d:02}" for d in range(8 * p + 7, 8 * p - 1, -1)) for p in range(8)]
    return MLNX_QOS.format(
        trust=trust,
        map="".join(f"\tprio:{p} dscp:{row},\n" for p, row in enumerate(rows)),
        pfc="   ".join(str(int(p in pfc)) for p in range(8)) + "   ",
    )


def healthy() -> dict[str, str]:
    """Path to text; `snapshot` makes it one."""
    files = {
        "proc/cmdline": "iommu=pt",
        "proc/cpuinfo": "flags :",
        "proc/meminfo": "MemTotal:       2113455616 kB",
        "proc/self/limits": "Max locked memory         unlimited            unlimited            bytes",
        "proc/self/mounts": "tmpfs /dev/shm tmpfs rw,nosuid,nodev,inode64 0 0",
        "proc/self/status": "CapEff:\t0000000000000000",
        "proc/sys/kernel/numa_balancing": "0",
        "proc/sys/kernel/osrelease": "6.8.0-60-generic",
        "proc/driver/nvidia/version": OPEN_DRIVER,
        "sys/devices/system/node/online": "0-1",
        "sys/module/nvidia_peermem/version": "570.124.06",
        "dev/infiniband/rdma_cm": "",
        "dev/nvidia-uvm": "",
        "dev/gdrdrv": "",
        "commands/env.txt": "",
        "commands/nvidia-smi-topo.txt": TOPO,
        "commands/nvidia-smi-p2p.txt": P2P.format("OK"),
    }
    for side in (0, 1):
        files |= _pcie(side) | _nic(side)
    files["commands/lspci.txt"] = "".join(_lspci(bridge) for bridge in bridges())
    return files


def bridges() -> list[str]:
    """Root port, upstream port and two downstream ports of either side."""
    tops = (0x17, 0x97)
    return [f"0000:{t + bus:02x}:{slot:02x}.0" for t in tops for bus, slot in ((0, 1), (1, 0), (2, 0), (2, 1))]


def snapshot(files: dict[str, str], complete=True) -> Snapshot:
    content = {path: f"{text.rstrip()}\n".encode() if text else b"" for path, text in files.items()}
    return Snapshot(files=content, complete=complete)


def _lspci(address: str, control="SrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-"):
    return f"{address} PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)\n\t\tACSCtl:\t{control}\n"


def acs_on(files: dict[str, str], bridge: str) -> None:
    off, on = (
        _lspci(bridge),
        _lspci(bridge, "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"),
    )
    assert off in files["commands/lspci.txt"]
    files["commands/lspci.txt"] = files["commands/lspci.txt"].replace(off, on)


def _pcie(side: int) -> dict[str, str]:
    root, up, *down = bridges()[4 * side : 4 * side + 4]
    top = int(root.split(":")[1], 16)
    below = {root: top + 1, up: top + 2, down[0]: top + 3, down[1]: top + 4}
    kinds = dict.fromkeys(below, ("0x060400", "0x1000")) | {
        GPUS[side]: ("0x030200", "0x10de"),
        NICS[side]: ("0x020000", "0x15b3"),
    }
    files = {}
    for address, (kind, vendor) in kinds.items():
        path = f"sys/bus/pci/devices/{address}"
        files |= {f"{path}/class": kind, f"{path}/vendor": vendor, f"{path}/numa_node": str(side)}
        files |= {f"{path}/current_link_speed": "32.0 GT/s PCIe", f"{path}/iommu_group/type": "identity"}
        files |= {f"{path}/current_link_width": "16", f"{path}/max_link_width": "16"}
        if address in below:
            files[f"{path}/secondary_bus_number"] = str(below[address])
    files[f"sys/bus/pci/devices/{GPUS[side]}/current_link_speed"] = "2.5 GT/s PCIe"  # idle GPUs save power
    return files


def _nic(side: int) -> dict[str, str]:
    device, netdev = f"mlx5_{side}", NETDEVS[side]
    sys, port = f"sys/class/infiniband/{device}", f"sys/class/infiniband/{device}/ports/1"
    local, v4 = f"fe80:0000:0000:0000:a288:c2ff:fe00:000{side}", f"0000:0000:0000:0000:0000:ffff:0a00:000{side + 1}"
    files = {
        f"{port}/state": "4: ACTIVE",
        f"{port}/phys_state": "5: LinkUp",
        f"{port}/rate": "400 Gb/sec (4X NDR)",
        f"{port}/link_layer": "Ethernet",
        f"{sys}/device/uevent": f"DRIVER=mlx5_core\nPCI_CLASS=20000\nPCI_SLOT_NAME={NICS[side]}",
        f"{sys}/device/net/{netdev}/mtu": "9000",
        f"{sys}/tc/1/traffic_class": "Global tclass=106",
        f"sys/class/infiniband_verbs/uverbs{side}/ibdev": device,
        f"dev/infiniband/uverbs{side}": "",
        f"sys/class/net/{netdev}/mtu": "9000",
        f"sys/kernel/config/rdma_cm/{device}/ports/1/default_roce_mode": "RoCE v2",
        f"commands/mlnx_qos-{netdev}.txt": mlnx_qos(),
    }
    for index, (gid, kind) in enumerate(
        ((local, "IB/RoCE v1"), (local, "RoCE v2"), (v4, "IB/RoCE v1"), (v4, "RoCE v2"))
    ):
        files[f"{port}/gids/{index}"] = gid
        files[f"{port}/gid_attrs/types/{index}"] = kind
        files[f"{port}/gid_attrs/ndevs/{index}"] = netdev
    files[f"{port}/gids/4"] = "0000:0000:0000:0000:0000:0000:0000:0000"
    for priority in range(8):
        for end in ("roce_np", "roce_rp"):
            files[f"sys/class/net/{netdev}/ecn/{end}/enable/{priority}"] = "1"
    return files
