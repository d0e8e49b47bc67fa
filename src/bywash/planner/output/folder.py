"""All files of a plan, by name: what `bywash plan --out DIR` writes. Pure; the command line does the writing."""

import json
from typing import Any

import yaml

from bywash.fabric.config.emit import files as fabric_files
from bywash.planner.cluster import Cluster, topology_yaml
from bywash.planner.cluster_text import cluster_text
from bywash.planner.output.launch import launch_files
from bywash.planner.output.plan_file import plan_file, plan_yaml
from bywash.planner.output.text import plan_text
from bywash.planner.plan import Plan
from bywash.planner.schema import SCHEMAS, json_schema
from bywash.planner.sendings import TriedSending
from bywash.planner.settings import TOPOLOGY_FILE, FabricChoice


def plan_files(plan: Plan) -> dict[str, str]:
    """File name -> text; names may have one folder in front."""
    made = {"plan.txt": plan_text(plan), "cluster.txt": cluster_text(plan.cluster), "plan.json": _json(plan_json(plan))}
    made |= {f"schema/{name}.json": _json(json_schema(name)) for name in SCHEMAS}
    if not plan.feasible:
        return made
    made["plan.yaml"] = plan_yaml(plan)
    made |= launch_files(plan_file(plan))
    if plan.fabric is not None:
        made |= _fabric(plan.cluster, plan.fabric)
        for group in plan_file(plan).groups:
            for host in group.hosts:
                made[f"fabric/{host}.nccl.env"] = made.get(f"fabric/{host}.nccl.env", "") + _queue_pairs(
                    group.qps_per_pair
                )
    return made


def _queue_pairs(qps: int) -> str:
    """NCCL splits a message over its queue pairs only when it is told to."""
    return f"NCCL_IB_QPS_PER_CONNECTION={qps}\nNCCL_IB_SPLIT_DATA_ON_QPS={int(qps > 1)}\n"


def _fabric(cluster: Cluster, fabric: FabricChoice) -> dict[str, str]:
    """The values file, the topology that it names, and what they give; environments under the hosts' names."""
    assert cluster.topology is not None
    head = (
        "# Written by `bywash plan`. `bywash fabric audit DIR --values fabric.yaml` holds what is there against it.\n"
    )
    made = {
        "fabric.yaml": head + yaml.safe_dump(dict(fabric.values), sort_keys=False),
        TOPOLOGY_FILE: topology_yaml(cluster.topology),
    }
    if fabric.fabric_plan is None:
        return made
    for name, text in fabric_files(fabric.fabric_plan).items():
        made[f"fabric/{_by_host(name, cluster)}"] = text
    return made


def _by_host(name: str, cluster: Cluster) -> str:
    """`server3.nccl.env` to `h100-3.nccl.env`."""
    stem, _, rest = name.partition(".")
    number = stem.removeprefix("server")
    return f"{cluster.hosts[int(number)].name}.{rest}" if stem.startswith("server") and number.isdecimal() else name


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan's numbers as plain data, for programs."""
    winner = plan.result.winner
    return {
        "cluster": plan.cluster.name,
        "model": plan.model.name,
        "traffic": plan.sample.note,
        "feasible": plan.feasible,
        "binding": [
            {"name": one.name, "need": one.need, "have": one.have, "unit": one.unit, "excess": _finite(one.excess)}
            for one in plan.result.binding
        ],
        "tokens_per_s": winner.tokens_per_s if winner else None,
        "tpot_ms": winner.tpot_ms if winner else None,
        "ttft_ms": winner.ttft_ms if winner else None,
        "groups": [_group_json(one) for one in plan.groups],
        "ranked": [
            {
                "deployment": one.label,
                "feasible": one.feasible,
                "devices": one.devices,
                "tokens_per_s": one.tokens_per_s,
                "tpot_ms": _finite(one.tpot_ms),
                "ttft_ms": _finite(one.ttft_ms),
            }
            for one in plan.result.ranked
        ],
        "priced": plan.result.priced,
    }


def _group_json(one: Any) -> dict[str, Any]:
    chosen = one.outcome.candidate
    return {
        "name": one.name,
        "hosts": [host.name for host in chosen.group.members],
        "ranks": chosen.group.ranks,
        "tp": chosen.group.tp,
        "sequences": chosen.sequences,
        "rows": chosen.way.rows,
        "path": chosen.way.path,
        "schedule": chosen.sending.schedule if chosen.sending is not None else None,
        "node_schedule": one.node_schedule,
        "qps_per_pair": chosen.sending.qps if chosen.sending is not None else None,
        "sendings": [_sending_json(tried) for tried in one.sendings],
        "slots": chosen.rule.slots,
        "experts_per_rank": one.experts_R.tolist(),
        "arithmetic": one.outcome.arithmetic,
        "phases": {
            phase.name: {
                "step_ms": phase.step_ms,
                "layer_us": phase.layer_us,
                "split": str(phase.split),
                "imbalance_home": phase.imbalance_home,
                "imbalance": phase.imbalance,
                "stages": {
                    str(kind): {"us": figure.us, "source": figure.source, "arithmetic": figure.arithmetic}
                    for kind, figure in phase.stages.items()
                },
            }
            for phase in (one.outcome.decode, one.outcome.prefill)
        },
        "memory": {
            ledger.device: {
                "need_bytes": ledger.need_bytes,
                "have_bytes": ledger.have_bytes,
                "entries": {entry.name: entry.bytes for entry in ledger.entries},
            }
            for ledger in one.outcome.ledgers
        },
    }


def _sending_json(tried: TriedSending) -> dict[str, Any]:
    """A way of sending, with the exchange of the group alone."""
    return {
        "schedule": tried.sending.schedule,
        "factor": tried.sending.factor,
        "qps_per_pair": tried.sending.qps,
        "refused": tried.refused or None,
        "tokens_per_s": tried.outcome.tokens_per_s,
        "exchange_us": {
            phase: {"dispatch": run.dispatch_us, "combine": run.combine_us} for phase, run in tried.runs.items()
        },
    }


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _json(data: Any) -> str:
    return json.dumps(data, indent=2) + "\n"
