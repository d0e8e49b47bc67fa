"""Each snapshot is the healthy host with one thing spoilt: exactly the right findings, nothing else."""

import pytest

from bywash.doctor import Severity, examine
from tests.doctor import hosts
from tests.doctor.hosts import GPUS, NETDEVS, NICS

PORT0, PORT1 = (f"sys/class/infiniband/mlx5_{i}/ports/1" for i in (0, 1))
PCI = "sys/bus/pci/devices"


def no_ip_address(files):
    for index in (2, 3):
        for name in (f"gids/{index}", f"gid_attrs/types/{index}", f"gid_attrs/ndevs/{index}"):
            del files[f"{PORT0}/{name}"]


def pfc_off(files):
    files["commands/mlnx_qos-ens2np0.txt"] = hosts.mlnx_qos(pfc=())


def no_peermem(files):
    del files["sys/module/nvidia_peermem/version"]


def closed_driver(files):
    no_peermem(files)
    files["proc/driver/nvidia/version"] = hosts.CLOSED_DRIVER


def old_kernel(files):
    no_peermem(files)
    files["proc/sys/kernel/osrelease"] = "5.4.0-200-generic"


def acs_on(files):
    hosts.acs_on(files, hosts.bridges()[2])


def down_everywhere(files):
    for port in (PORT0, PORT1):
        files |= {f"{port}/state": "1: DOWN", f"{port}/phys_state": "3: Disabled"}


def dcb_instead(files):
    for netdev in NETDEVS:
        del files[f"commands/mlnx_qos-{netdev}.txt"]
        files[f"commands/dcb-pfc-{netdev}.txt"] = (
            "pfc-cap 8 macsec-bypass off delay 0\nprio-pfc 0:off 1:off 2:off 3:on 4:off 5:off 6:off 7:off"
        )
        files[f"commands/dcb-app-{netdev}.txt"] = "dscp-prio 24:3 26:3 48:6"


def dcb_without_trust(files):
    dcb_instead(files)
    files["commands/dcb-app-ens1np0.txt"] = "default-prio 0"


def far_nic(files):
    """The second NIC dies; the second GPU is left with the first NIC, on the other socket."""
    files[f"{PORT1}/state"] = "1: DOWN"


def unset_class(files):
    for device in ("mlx5_0", "mlx5_1"):
        files[f"sys/class/infiniband/{device}/tc/1/traffic_class"] = ""


def setting(path, text):
    return lambda files: files.update({path: text})


def variable(text):
    return setting("commands/env.txt", text)


def without(*paths):
    def spoil(files):
        for path in paths:
            del files[path]

    return spoil


def guest(files):
    files["proc/cpuinfo"] = "flags : fpu vme hypervisor"


def soft_rdma(files):
    path = "sys/class/infiniband/rxe0"
    files |= {f"{path}/ports/1/{name}": text for name, text in (("state", "4: ACTIVE"), ("link_layer", "Ethernet"))}
    files |= {
        f"{path}/ports/1/{name}": text for name, text in (("rate", "2.5 Gb/sec (1X SDR)"), ("phys_state", "5: LinkUp"))
    }
    files |= {f"{path}/ports/1/gids/0": "0000:0000:0000:0000:0000:ffff:0a00:0009", f"{path}/parent": "eth9"}
    files |= {f"{path}/ports/1/gid_attrs/types/0": "RoCE v2"}
    files |= {"sys/class/infiniband_verbs/uverbs2/ibdev": "rxe0", "dev/infiniband/uverbs2": ""}


E, W, U, INFO = Severity.ERROR, Severity.WARNING, Severity.UNKNOWN, Severity.INFO
CASES = {
    "healthy": (lambda files: None, []),
    "no routable gid": (no_ip_address, [(E, "gid-not-routable", "mlx5_0:1")]),
    "wrong gid index": (
        variable("NCCL_IB_GID_INDEX=1"),
        [(E, "gid-index-wrong", "mlx5_0:1"), (E, "gid-index-wrong", "mlx5_1:1")],
    ),
    "right gid index": (variable("NCCL_IB_GID_INDEX=3"), []),
    "gid index that libraries choose": (variable("NCCL_IB_GID_INDEX=-1"), []),
    "pfc off": (pfc_off, [(W, "pfc-off", "ens2np0")]),
    "pfc differs": (
        setting("commands/mlnx_qos-ens2np0.txt", hosts.mlnx_qos(pfc=(3, 5))),
        [(W, "pfc-differs", "ens1np0")],
    ),
    "trust pcp": (
        setting("commands/mlnx_qos-ens1np0.txt", hosts.mlnx_qos(trust="pcp")),
        [(W, "trust-not-dscp", "ens1np0")],
    ),
    "qos tool missing": (
        without("commands/mlnx_qos-ens1np0.txt"),
        [(U, "class-unseen", "mlx5_0:1"), (U, "qos-unseen", "ens1np0")],
    ),
    "qos through dcb": (dcb_instead, []),
    "dcb without a dscp map": (dcb_without_trust, [(W, "trust-not-dscp", "ens1np0")]),
    "ecn off": (setting("sys/class/net/ens1np0/ecn/roce_np/enable/3", "0"), [(W, "ecn-off", "ens1np0")]),
    "ecn not to be seen": (without("sys/class/net/ens1np0/ecn/roce_rp/enable/3"), [(U, "ecn-unseen", "ens1np0")]),
    "default class": (unset_class, [(W, "class-not-lossless", f"mlx5_{i}:1") for i in (0, 1)]),
    "peermem or dma-buf is enough": (no_peermem, []),
    "no peermem, closed driver": (closed_driver, [(E, "no-gpudirect", "GPUDirect RDMA")]),
    "no peermem, old kernel": (old_kernel, [(E, "no-gpudirect", "GPUDirect RDMA")]),
    "acs on": (acs_on, [(E, "acs-on", "0000:19:00.0")]),
    "lspci missing": (without("commands/lspci.txt"), [(U, "acs-unseen", None)]),
    "iommu translates": (setting(f"{PCI}/{NICS[0]}/iommu_group/type", "DMA-FQ"), [(W, "iommu-translates", NICS[0])]),
    "mixed mtu": (setting("sys/class/net/ens1np0/mtu", "1500"), [(W, "mtu-mixed", "ens1np0")]),
    "small mtu": (
        lambda files: files.update({f"sys/class/net/{n}/mtu": "1500" for n in NETDEVS}),
        [(W, "mtu-small", n) for n in NETDEVS],
    ),
    "narrow link": (setting(f"{PCI}/{GPUS[1]}/current_link_width", "8"), [(W, "link-narrow", GPUS[1])]),
    "slot too slow": (setting(f"{PCI}/{NICS[1]}/current_link_speed", "16.0 GT/s PCIe"), [(W, "link-slow", NICS[1])]),
    "gpu fell off the bus": (setting(f"{PCI}/{GPUS[0]}/current_link_width", "63"), [(U, "link-unseen", GPUS[0])]),
    "one nic down": (far_nic, [(W, "port-down", "mlx5_1:1"), (W, "nic-far", GPUS[1])]),
    "all nics down": (down_everywhere, [(E, "port-down", "mlx5_0:1"), (E, "port-down", "mlx5_1:1")]),
    "container without device nodes": (
        without("dev/infiniband/uverbs0", "dev/infiniband/uverbs1"),
        [(E, "no-uverbs", "/dev/infiniband/uverbs0"), (E, "no-uverbs", "/dev/infiniband/uverbs1")],
    ),
    "peer access off": (setting("commands/nvidia-smi-p2p.txt", hosts.P2P.format("CNS")), [(E, "p2p-off", "GPU0-GPU1")]),
    "numa balancing": (setting("proc/sys/kernel/numa_balancing", "1"), [(W, "numa-balancing", None)]),
    "memlock": (
        setting("proc/self/limits", "Max locked memory         8388608              8388608              bytes"),
        [(E, "memlock", "ulimit -l")],
    ),
    "container's shm": (
        setting("proc/self/mounts", "shm /dev/shm tmpfs rw,size=65536k 0 0"),
        [(W, "shm-small", "/dev/shm")],
    ),
    "no driver": (without("proc/driver/nvidia/version"), [(E, "no-gpu-driver", "/proc/driver/nvidia/version")]),
    "no gdrcopy": (without("dev/gdrdrv"), [(INFO, "no-gdrcopy", "/dev/gdrdrv")]),
    "cm mode": (
        setting("sys/kernel/config/rdma_cm/mlx5_1/ports/1/default_roce_mode", "IB/RoCE v1"),
        [(W, "cm-mode", "mlx5_1:1")],
    ),
    "software rdma": (soft_rdma, [(W, "software-rdma", "rxe0:1")]),
    "device without ports": (
        setting("sys/class/infiniband/mlx5_8/device/uevent", "DRIVER=mlx5_core"),
        [(U, "port-unseen", "mlx5_8")],
    ),
    "device of unknown place": (
        setting("sys/class/infiniband/mlx5_0/device/uevent", "DRIVER=mlx5_core"),
        [(U, "port-unseen", "mlx5_0:1"), (W, "nic-far", GPUS[0])],
    ),
    "guest": (guest, [(U, "acs-hypervisor", "hypervisor")]),
    "ib disabled": (variable("NCCL_IB_DISABLE=1"), [(E, "variable-harmful", "NCCL_IB_DISABLE")]),
    "unknown hca": (variable("NCCL_IB_HCA==mlx5_0:1,mlx5_7:1"), [(E, "variable-names-nothing", "NCCL_IB_HCA")]),
    "hca by prefix": (variable("NCCL_IB_HCA=mlx5"), []),
    "unknown interface in a file": (
        setting("etc/nccl.conf", "NCCL_SOCKET_IFNAME=eth7"),
        [(E, "variable-names-nothing", "NCCL_SOCKET_IFNAME")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_exactly_these_findings(case):
    spoil, expected = CASES[case]
    files = hosts.healthy()
    spoil(files)
    report = examine(hosts.snapshot(files))
    found = [(f.severity, f.code, f.where) for f in report.findings]
    assert len(found) == len(expected), report.findings
    for one, (severity, code, where) in zip(sorted(found), sorted(expected, key=str)):
        assert one[:2] == (severity, code)
        assert where is None or one[2] == where
    for finding in report.findings:
        assert finding.what
        assert finding.why
    assert report.exit_status == int(any(severity is not INFO for severity, _, _ in expected))


def test_every_check_applies_to_the_healthy_host():
    results = examine(hosts.snapshot(hosts.healthy())).results
    assert {result.status for result in results} == {"ok"}


def test_variables_for_the_healthy_host():
    wanted = {v.name: v.recommended for v in examine(hosts.snapshot(hosts.healthy())).variables}
    assert wanted == {
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NVSHMEM_HCA_LIST": "mlx5_0:1,mlx5_1:1",
        "NCCL_IB_GID_INDEX": None,
        "NVSHMEM_IB_GID_INDEX": "3",
        "NCCL_IB_TC": None,  # the driver forces 106
        "NVSHMEM_IB_TRAFFIC_CLASS": "106",
    }


def test_traffic_class_is_advised_where_the_driver_forces_none():
    files = hosts.healthy()
    unset_class(files)
    wanted = {v.name: v.recommended for v in examine(hosts.snapshot(files)).variables}
    assert wanted["NCCL_IB_TC"] == "106"
    files["commands/env.txt"] = "NCCL_IB_TC=106"
    assert examine(hosts.snapshot(files)).findings == ()


def test_interfaces_in_another_namespace_are_unknown_not_ok():
    """A container with the RDMA devices but not their interfaces."""
    files = {p: t for p, t in hosts.healthy().items() if "ndevs" not in p and "/net/" not in p}
    report = examine(hosts.snapshot(files))
    assert {(f.severity, f.code, f.where) for f in report.findings} == {
        (U, "port-unseen", "mlx5_0:1"),
        (U, "port-unseen", "mlx5_1:1"),
    }
    assert {r.check for r in report.results if r.status == "not applicable"} == {"mtu", "pfc", "ecn", "class"}


def test_the_limit_on_locked_memory_does_not_bind_the_exempt():
    files = hosts.healthy()
    CASES["memlock"][0](files)
    files["proc/self/status"] = "CapEff:\t000001ffffffffff"
    report = examine(hosts.snapshot(files))
    assert [(f.severity, f.code) for f in report.findings] == [(INFO, "memlock")]
    assert report.exit_status == 0


def test_what_is_not_in_an_incomplete_snapshot_is_unknown_never_wrong():
    """A hand-made directory: take away one file at a time; nothing that is merely absent may become an error."""
    whole = hosts.healthy()
    for path in whole:
        files = {name: text for name, text in whole.items() if name != path}
        for finding in examine(hosts.snapshot(files, complete=False)).findings:
            assert finding.severity is not Severity.ERROR, (path, finding)


def test_a_bond_is_judged_by_its_members():
    files = hosts.healthy()
    for index in range(4):
        files[f"{PORT0}/gid_attrs/ndevs/{index}"] = "bond0"
    files["sys/class/net/bond0/bonding/slaves"] = "ens1np0 ens9np1"
    files["sys/class/net/ens9np1/mtu"] = "1500"
    codes = {(f.code, f.where) for f in examine(hosts.snapshot(files)).findings}
    assert codes == {
        ("mtu-mixed", "ens9np1"),
        ("class-unseen", "mlx5_0:1"),
        ("qos-unseen", "ens9np1"),
        ("ecn-unseen", "ens9np1"),
    }
