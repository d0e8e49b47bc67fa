"""NCCL and NVSHMEM: the environment that puts their traffic into the class which switches and NICs protect.

Names are those of NCCL's and NVSHMEM's own documentation. NVSHMEM has a traffic class and a GID of its own beside
NCCL's: set one and the other still travels unprotected.
"""

from bywash.fabric.config.nic import type_of_service
from bywash.fabric.config.plan import FabricPlan, NicPlan


def environment(plan: FabricPlan, nics: tuple[NicPlan, ...]) -> dict[str, str]:
    """Variables for the processes of one server, in the order in which a person reads them."""
    values = plan.values
    tos = str(type_of_service(values.lossless[0].dscp[0]))
    devices = [nic.device for nic in nics]
    env = {
        "NCCL_IB_HCA": "=" + ",".join(devices),
        "NCCL_IB_GID_INDEX": str(values.nic.gid_index),
        "NCCL_IB_ROCE_VERSION_NUM": "2",
        "NCCL_IB_TC": tos,
        "NCCL_IB_FIFO_TC": tos,
        "NCCL_IB_ADAPTIVE_ROUTING": "1" if values.adaptive_routing else "0",
        "NVSHMEM_HCA_LIST": ",".join(f"{device}:1" for device in devices),
        "NVSHMEM_IB_GID_INDEX": str(values.nic.gid_index),
        "NVSHMEM_IB_TRAFFIC_CLASS": tos,
    }
    return env


def environment_file(plan: FabricPlan, nics: tuple[NicPlan, ...]) -> str:
    """The same as `KEY=value` lines, for `docker --env-file`, systemd or `set -a; . FILE`."""
    one = plan.values.lossless[0]
    code = one.dscp[0]
    said = f"# DSCP {code} with ECT(0) is traffic class {type_of_service(code)}: priority {one.priority}."
    return "\n".join([said, *(f"{key}={value}" for key, value in environment(plan, nics).items())]) + "\n"
