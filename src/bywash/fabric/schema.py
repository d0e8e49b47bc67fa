"""What a scenario file may hold: names, types and which fields are known. pydantic checks shapes, not values.

Called by `files`, `file_topology` and `file_traffic`, and by other readers of files with a topology in them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bywash.errors import ConfigError

Microseconds = Annotated[float, Field(ge=0, le=8.2e6)]
"""The engine tells no later time."""
MOST_PHASES = 100_000


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False)


class TopologyFile(_Strict):
    """`kind` and the arguments of that builder; `length_m` may stand for `delay_ns`, `nics` for other NIC rates."""

    kind: Literal["leaf-spine", "fat-tree", "rail-optimised", "ring", "mesh", "single-switch", "file"]
    hosts: int | None = None
    leaves: int | None = None
    spines: int | None = None
    servers: int | None = None
    nics_per_server: int | None = None
    k: int | None = None
    switches: int | None = None
    hosts_per_switch: int | None = None
    rows: int | None = None
    columns: int | None = None
    gbps: float | None = None
    uplink_gbps: float | None = None
    links_per_pair: int | None = None
    delay_ns: float | None = None
    uplink_delay_ns: float | None = None
    length_m: float | None = None
    uplink_length_m: float | None = None
    nics: list["NicRate"] = Field(default_factory=list)
    failed: list[str] = Field(default_factory=list)
    path: str | None = None


class NicRate(_Strict):
    """Another NIC generation: hosts as `0-15` or `3`, and their rate."""

    hosts: str | int
    gbps: float


class TrafficFile(_Strict):
    """`kind` and its settings: alltoall, incast, permutation, poisson, flows (a list or a CSV file) or matrix (CSV)."""

    kind: Literal["alltoall", "incast", "permutation", "poisson", "flows", "matrix"]
    bytes: int | None = Field(default=None, ge=0, le=1 << 40)
    senders: str | int | list[int] | None = None
    receiver: int | None = None
    start_us: Microseconds = 0.0
    end_us: Microseconds | None = None
    load: float | None = None
    seed: int | None = Field(default=None, ge=0)
    schedule: Literal["at-once", "rotated", "staggered"] = "at-once"
    active: int = 1
    step_us: Microseconds = 0.0
    qps_per_pair: int = 1
    rate_gbps: float = 0.0
    pace_by_counts: float = Field(default=0.0, ge=0, le=100)
    traffic_class: int | str = Field(default=0, alias="class")
    phase: int = Field(default=0, ge=0, le=MOST_PHASES)
    gap_us: Microseconds = 0.0
    gaps_us: list[Microseconds] | None = None
    flows: list[dict[str, float]] | None = None
    path: str | None = None


class ScenarioFile(_Strict):
    """The whole file. Sections switch, nic, routing, frame and run hold fields of the dataclasses in `scenario`."""

    name: str = "scenario"
    profile: str = "default"
    topology: TopologyFile
    traffic: list[TrafficFile] = Field(min_length=1)
    barrier: Literal["host", "server", "global"] = "host"
    classes: list[dict[str, Any]] | None = None
    switch: dict[str, Any] = Field(default_factory=dict)
    nic: dict[str, Any] = Field(default_factory=dict)
    routing: dict[str, Any] = Field(default_factory=dict)
    frame: dict[str, Any] = Field(default_factory=dict)
    run: dict[str, Any] = Field(default_factory=dict)


def as_config_error(error: ValidationError) -> ConfigError:
    """The first of pydantic's complaints, with the path of its field in front."""
    first = error.errors()[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{path}: there is no such field")
    if first["type"] == "missing":
        return ConfigError(f"{path}: must be given")
    return ConfigError(f"{path} = {first['input']!r}: {first['msg']}")
