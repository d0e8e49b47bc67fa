"""`plan.yaml`: what was decided, for `bywash run --plan` and for serving engines. Written from a `Plan`.

Knows nothing of search or simulation. pydantic checks what is read, since people edit it; errors name the field.
"""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bywash.errors import ConfigError
from bywash.exchange.node_schedule import NodeSchedule
from bywash.fabric.schema import as_config_error
from bywash.moe.pipeline.schedule import Split
from bywash.planner.plan import MICRO_BATCH, Plan, PlannedGroup, run_speeds


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Predicted(_Strict):
    """What the planner expects of a group; rows and imbalance only where the trace was of this model."""

    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float
    decode_layer_us: float
    prefill_layer_us: float
    imbalance_max_over_mean: float | None = None
    rows_per_layer_and_rank: list[list[int]] | None = None
    rows_spilled: int | None = None
    fetches: int | None = None


class GroupFile(_Strict):
    """One expert-parallel group. `home` is the rank of each expert, the same in all layers; `homes` layer by layer, for
    engines that place layers apart. `schedule` and `qps_per_pair` are the simulator's words for how messages leave,
    `node_schedule` is what the runtime is told (`bywash run --node-schedule`)."""

    name: str
    hosts: list[str]
    devices: list[str]
    ranks: int = Field(ge=1)
    tp: int = Field(default=1, ge=1)
    sequences: int = Field(ge=1)
    chunk_tokens: int = Field(ge=1)
    exchange: str = "auto"
    algorithm: Literal["all-to-all", "all-gather"] = "all-to-all"
    rows: Literal["per-expert", "per-rank", "per-node"] = "per-rank"
    path: Literal["flat", "hierarchical"] = "flat"
    schedule: str = ""
    node_schedule: str = "together"
    qps_per_pair: int = Field(default=1, ge=1)
    combine: Literal["exact", "stable", "fast"] = "exact"
    overlap: Literal["off", "microbatch", "tile", "shared"] = "off"
    micro_batches: dict[str, int] = Field(default_factory=dict)
    micro_batch: int = Field(default=MICRO_BATCH, ge=1)
    slots: int = Field(default=0, ge=0)
    capacity_factor: float = Field(default=0.0, ge=0)
    alpha: float = Field(default=1.1, ge=1, le=64)
    break_even: int = Field(default=1, ge=1)
    speeds: list[int] = Field(default_factory=list)
    home: list[int] = Field(min_length=1)
    homes: list[list[int]] | None = None
    predicted: Predicted

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for expert, rank in enumerate(self.home):
            if not 0 <= rank < self.ranks:
                raise ValueError(f"home[{expert}] = {rank}: ranks are 0 to {self.ranks - 1}")
        if self.speeds and len(self.speeds) != self.ranks:
            raise ValueError(f"speeds: {len(self.speeds)} for {self.ranks} ranks")
        try:
            NodeSchedule.parse(self.node_schedule)
        except ConfigError as error:
            raise ValueError(str(error).replace("--node-schedule ", "node_schedule = ", 1)) from error
        return self


class PlanFile(_Strict):
    """The whole file."""

    bywash_plan: Literal[1]
    cluster: str
    model: str
    traffic: str
    workload: dict[str, Any]
    target: dict[str, Any]
    groups: list[GroupFile] = Field(min_length=1)

    def group(self, name: str = "") -> GroupFile:
        """The group of that name, by default the first. Raises `ConfigError` when there is none."""
        for one in self.groups:
            if not name or one.name == name:
                return one
        raise ConfigError(f"--group {name}: the plan has groups {', '.join(one.name for one in self.groups)}")


def plan_file(plan: Plan) -> PlanFile:
    """What `plan.yaml` holds; only for feasible plans."""
    return PlanFile(
        bywash_plan=1,
        cluster=plan.cluster.name,
        model=plan.model.name,
        traffic=plan.sample.note,
        workload=plan.workload.model_dump(exclude_none=True),
        target=plan.target.model_dump(exclude_none=True),
        groups=[_group(plan, one) for one in plan.groups],
    )


def plan_yaml(plan: Plan) -> str:
    """The file's text."""
    data = plan_file(plan).model_dump(mode="json", exclude_none=True)
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120)
    return "# Written by `bywash plan`; run a group with: bywash run --plan plan.yaml --group g0 --model DIR\n" + text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Lists of numbers on one line."""


def _list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flat = bool(data) and all(isinstance(one, int | float | str) for one in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _list)


def _group(plan: Plan, one: PlannedGroup) -> GroupFile:
    chosen, decode, prefill = one.outcome.candidate, one.outcome.decode, one.outcome.prefill
    assert decode is not None
    assert prefill is not None
    many = len(chosen.group.members) > 1
    cpu = chosen.group.device_R[0].is_cpu
    replay = one.replay
    return GroupFile(
        name=one.name,
        hosts=[host.name for host in chosen.group.members],
        devices=[host.device.name for host in chosen.group.members],
        ranks=chosen.group.ranks,
        tp=chosen.group.tp,
        sequences=chosen.sequences,
        chunk_tokens=plan.workload.chunk_tokens,
        exchange="hierarchical" if many else "auto",
        algorithm="all-gather" if chosen.way.gather else "all-to-all",
        rows=chosen.way.rows,
        path=chosen.way.path,
        schedule=chosen.sending.schedule if chosen.sending is not None else "",
        node_schedule=one.node_schedule,
        qps_per_pair=chosen.sending.qps if chosen.sending is not None else 1,
        combine="exact" if cpu else "fast",
        overlap=_overlap(prefill.split),
        micro_batches={"decode": decode.split.lanes, "prefill": prefill.split.lanes},
        slots=chosen.rule.slots,
        capacity_factor=chosen.rule.capacity_factor,
        alpha=chosen.rule.alpha_1024 / 1024,
        break_even=chosen.rule.break_even,
        speeds=list(run_speeds(one.cost)),
        home=one.common_home.home_E.tolist(),
        homes=[home.home_E.tolist() for home in one.homes] if len(one.homes) > 1 else None,
        predicted=Predicted(
            tokens_per_s=round(one.outcome.tokens_per_s, 1),
            tpot_ms=round(one.outcome.tpot_ms, 3),
            ttft_ms=round(one.outcome.ttft_ms, 3),
            decode_layer_us=round(decode.layer_us, 2),
            prefill_layer_us=round(prefill.layer_us, 2),
            imbalance_max_over_mean=replay.imbalance if replay is not None else None,
            rows_per_layer_and_rank=replay.rows_LR.tolist() if replay is not None else None,
            rows_spilled=sum(c.rows_spilled for c in replay.counters) if replay and replay.counters else None,
            fetches=sum(c.fetches for c in replay.counters) if replay and replay.counters else None,
        ),
    )


def _overlap(split: Split) -> Literal["off", "microbatch", "tile", "shared"]:
    if not split.overlapped:
        return "off"
    if split.whole:
        return "shared"
    return "microbatch" if split.lanes > 1 else "tile"


def load_plan_file(path: str | Path) -> PlanFile:
    """Read a plan.

    Raises:
        ConfigError: unreadable, no YAML, or a field is wrong; the message starts with `plan.` and the field.
    """
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--plan {file}: cannot read it: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none is a ValueError
        raise ConfigError(f"--plan {file}: is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or "bywash_plan" not in data:
        raise ConfigError(f"--plan {file}: is no plan; `bywash plan --out DIR` writes DIR/plan.yaml")
    try:
        return PlanFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            raise ConfigError(f"plan{where}.{first['msg'].removeprefix('Value error, ')}") from error
        raise ConfigError(f"plan.{as_config_error(error)}") from error
