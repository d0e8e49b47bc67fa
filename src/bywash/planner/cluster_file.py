"""What a cluster file may hold: names, types and bounds. pydantic checks each field, `cluster` what they say together.

    name: two-generations
    nodes:
      - {name: new, count: 2, device: h100, nics: [{gbps: 400, count: 8}]}
      - {name: old, count: 2, device: a100, nics: [{gbps: 200, count: 8}]}
    fabric: {kind: leaf-spine, nodes_per_leaf: 1, spines: 2, links_per_pair: 4, uplink_gbps: 400}

Called by `cluster`, the importers and `schema`.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_HOSTS = 4096


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceFile(_Strict):
    """An own generation: a known one with other figures."""

    like: str
    bf16_tflops: float | None = Field(default=None, gt=0, le=1e5)
    fp8_tflops: float | None = Field(default=None, ge=0, le=1e5)
    memory_gb: float | None = Field(default=None, gt=0, le=1e4)
    memory_gbytes_per_s: float | None = Field(default=None, gt=0, le=1e6)
    peer_gbytes_per_s: float | None = Field(default=None, gt=0, le=1e5)


class NicFile(_Strict):
    """`count` NIC ports of one rate. `switch` names the switch of their cables where the fabric's kind does not say."""

    gbps: float = Field(gt=0, le=10_000)
    count: int = Field(default=1, ge=1, le=64)
    switch: str | None = None


class NodeFile(_Strict):
    """One host, or `count` alike (their names get -0, -1, ...)."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    count: int = Field(default=1, ge=1, le=MOST_HOSTS)
    device: str
    devices: int = Field(default=8, ge=1, le=64)
    peer_gbytes_per_s: float | None = Field(default=None, gt=0, le=1e5)
    nics: list[NicFile] = Field(default_factory=list)


class CableFile(_Strict):
    """`count` cables between two switches (or, in a fabric of kind `cables`, the only way they are joined)."""

    a: str
    b: str
    gbps: float = Field(gt=0, le=10_000)
    count: int = Field(default=1, ge=1, le=256)
    length_m: float = Field(default=20.0, ge=0, le=100_000)


class LinkFile(_Strict):
    """What is special about one cable of a regular fabric: `link` as `leaf0-spine1`, `#2` behind it for the second."""

    link: str
    gbps: float | None = Field(default=None, gt=0, le=10_000)
    failed: bool = False


class FabricFile(_Strict):
    """The network between hosts.

    `leaf-spine`: all NICs of `nodes_per_leaf` hosts on one leaf. `rail-optimised`: NIC r of every host on rail switch
    r. `cables`: NICs name their `switch`, and `cables` join switches. `one-switch`: all on one.
    """

    kind: Literal["leaf-spine", "rail-optimised", "one-switch", "cables"] = "leaf-spine"
    nodes_per_leaf: int = Field(default=1, ge=1)
    spines: int = Field(default=2, ge=1, le=256)
    links_per_pair: int = Field(default=1, ge=1, le=256)
    uplink_gbps: float = Field(default=400.0, gt=0, le=10_000)
    length_m: float = Field(default=5.0, ge=0, le=100_000)
    uplink_length_m: float = Field(default=40.0, ge=0, le=100_000)
    leaf_asic: str = "sn4700"
    spine_asic: str = "sn5600"
    cables: list[CableFile] = Field(default_factory=list)
    links: list[LinkFile] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.cables and self.kind != "cables":
            raise ValueError(f"cables are for kind cables; kind {self.kind} has its own")
        return self


class ClusterFile(_Strict):
    """The whole file."""

    name: str = Field(default="cluster", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    devices: dict[str, DeviceFile] = Field(default_factory=dict)
    nodes: list[NodeFile] = Field(min_length=1)
    fabric: FabricFile | None = None
