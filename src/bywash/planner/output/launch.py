"""Launch files for each group: torchrun by hand, SLURM, Kubernetes LeaderWorkerSet; and the environment of processes.

Text from a plan file. They start `bywash run --plan`; a serving engine that reads the plan takes its place. Nothing
here was submitted to a cluster: formats follow the schedulers' own documentation, and tests parse them.
"""

from typing import Any

import yaml

from bywash.planner.output.plan_file import GroupFile, PlanFile

PORT = 29_500


def launch_files(plan: PlanFile) -> dict[str, str]:
    """File name -> text."""
    made: dict[str, str] = {}
    for group in plan.groups:
        gpus = group.ranks // len(group.hosts)
        made[f"{group.name}.torchrun.sh"] = _torchrun(plan, group, gpus)
        made[f"{group.name}.slurm.sh"] = _slurm(plan, group, gpus)
        made[f"{group.name}.lws.yaml"] = _leader_worker_set(plan, group, gpus)
    return made


def _command(group: GroupFile) -> str:
    return f'-m bywash run --plan plan.yaml --group {group.name} --model "$MODEL"'


def _sending(group: GroupFile) -> str:
    """How hosts send to each other, as a comment: the command takes it from the plan."""
    return f"# Between hosts, from plan.yaml: --node-schedule {group.node_schedule}\n" if len(group.hosts) > 1 else ""


def _torchrun(plan: PlanFile, group: GroupFile, gpus: int) -> str:
    ranks = "\n".join(
        f"  {host}) node={number} env=fabric/{host}.nccl.env ;;" for number, host in enumerate(group.hosts)
    )
    return (
        "#!/bin/sh\n"
        f"# {group.name} of {plan.cluster}: run on every host of the group, in this directory, with MODEL set.\n"
        f"{_sending(group)}"
        "set -eu\n"
        f'case "$(hostname -s)" in\n{ranks}\n  *) echo "not a host of {group.name}" >&2; exit 2 ;;\nesac\n'
        'if [ -f "$env" ]; then set -a; . "$env"; set +a; fi\n'
        f"exec torchrun --nnodes {len(group.hosts)} --node-rank $node --nproc-per-node {gpus} "
        f"--master-addr {group.hosts[0]} --master-port {PORT} \\\n  {_command(group)}\n"
    )


def _slurm(plan: PlanFile, group: GroupFile, gpus: int) -> str:
    gres = "" if group.devices[0].startswith("cpu") else f"#SBATCH --gpus-per-node={gpus}\n"
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name=bywash-{group.name}\n"
        f"#SBATCH --nodes={len(group.hosts)}\n"
        f"#SBATCH --nodelist={','.join(group.hosts)}\n"
        f"#SBATCH --ntasks-per-node={gpus}\n"
        f"{gres}"
        "#SBATCH --exclusive\n"
        f"# {group.name} of {plan.cluster}. Submit here: sbatch --export=ALL,MODEL=... {group.name}.slurm.sh\n"
        f"{_sending(group)}"
        "set -euo pipefail\n"
        "srun bash -c 'env=fabric/$(hostname -s).nccl.env; "
        'if [ -f "$env" ]; then set -a; . "$env"; set +a; fi; '
        f"exec python {_command(group)}'\n"
    )


def _leader_worker_set(plan: PlanFile, group: GroupFile, gpus: int) -> str:
    cpu = group.devices[0].startswith("cpu")
    command = (
        'env=./$(NODE).nccl.env; if [ -f "$env" ]; then set -a; . "$env"; set +a; fi; '
        f"exec torchrun --nnodes {len(group.hosts)} --node-rank $(LWS_WORKER_INDEX) --nproc-per-node {gpus} "
        f"--master-addr $(LWS_LEADER_ADDRESS) --master-port {PORT} {_command(group)}"
    )
    container: dict[str, Any] = {
        "name": "bywash",
        "image": "IMAGE",  # the operator's own
        "workingDir": "/plan",
        "command": ["sh", "-c", command],
        "env": [
            {"name": "MODEL", "value": "/model"},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "volumeMounts": [{"name": "plan", "mountPath": "/plan"}, {"name": "model", "mountPath": "/model"}],
    }
    if not cpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    pod: dict[str, Any] = {
        "spec": {
            "hostNetwork": True,
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _on_hosts(group)}},
            "containers": [container],
            "volumes": [
                {"name": "plan", "configMap": {"name": f"bywash-{group.name}-plan"}},
                {"name": "model", "persistentVolumeClaim": {"claimName": "model"}},
            ],
        }
    }
    data = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": f"bywash-{group.name}", "labels": {"app": "bywash", "cluster": plan.cluster}},
        "spec": {
            "replicas": 1,
            "leaderWorkerTemplate": {"size": len(group.hosts), "workerTemplate": pod},
        },
    }
    head = (
        f"# kubectl create configmap bywash-{group.name}-plan --from-file=plan.yaml \\\n"
        "#   $(ls fabric/*.nccl.env 2>/dev/null | sed 's/^/--from-file=/')\n"
        "# Set IMAGE to an image with bywash, and the claim `model` to where the checkpoint lies.\n"
        f"{_sending(group)}"
    )
    text: str = yaml.safe_dump(data, sort_keys=False, width=120)
    return head + text


def _on_hosts(group: GroupFile) -> dict[str, Any]:
    match = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(group.hosts)}
    return {"nodeSelectorTerms": [{"matchExpressions": [match]}]}
