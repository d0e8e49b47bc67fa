"""SLURM's environment as torchrun would have set it: `srun bywash run ...` starts one rank per task.

`launch.torchrun` calls it. Reads the environment only; knows nothing of torch.
"""

import re
from collections.abc import Mapping

from bywash.errors import ConfigError

_FIRST_PORT, _PORTS = 20_000, 10_000


def slurm_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT for a task of a job step; else nothing.

    Only `srun` sets the variables of a step, so that a batch script itself, or an interactive shell, is no rank. The
    store is on the step's first node, at a port made from the job's and the step's number; MASTER_ADDR and MASTER_PORT
    are left alone where they are set.

    Raises:
        ConfigError: a node list that cannot be read.
    """
    if int_or_zero(environ, "SLURM_STEP_NUM_TASKS") < 2 or "SLURM_PROCID" not in environ:
        return {}
    port = _FIRST_PORT + (int_or_zero(environ, "SLURM_JOB_ID") * 7 + int_or_zero(environ, "SLURM_STEP_ID")) % _PORTS
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }
    found["MASTER_ADDR"] = environ.get("MASTER_ADDR") or first_node(environ.get("SLURM_STEP_NODELIST", ""))
    return found


def first_node(nodes: str) -> str:
    """The first name of a SLURM node list. Example: "gpu[03-05,9],cpu1" gives "gpu03".

    Raises:
        ConfigError: not a node list.
    """
    found = re.match(r"^([\w.-]+)(?:\[(\w+)[^\]]*\]([\w.-]*))?(?:,|$)", nodes)
    if found is None:
        raise ConfigError(
            f"SLURM_STEP_NODELIST={nodes!r}: is no list of nodes; set MASTER_ADDR to the first node's name"
        )
    return "".join(part or "" for part in found.groups())


def int_or_zero(environ: Mapping[str, str], name: str) -> int:
    """A variable's number; 0 where it is missing or none."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0
