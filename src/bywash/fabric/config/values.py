"""The values file: one YAML that a person writes, from which every switch, NIC and library is told the same.

    name: two-spine
    topology: {kind: leaf-spine, hosts: 128, leaves: 16, spines: 2, gbps: 400, length_m: 5, uplink_length_m: 40}
    switches:
      - {match: "spine*", asic: sn5600}
      - {match: "*", asic: sn4700, buffer_model: traditional}
    lossless: [{name: roce, priority: 3, dscp: [26]}]
    cnp: {priority: 6, dscp: 48}
    incast: 16

Only what cannot be computed stands here; headroom and thresholds are `plan`'s. Errors name the path of the field.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bywash.errors import ConfigError
from bywash.fabric.config.asic import Asic, find_asic, lookup_asic
from bywash.fabric.config.fixed_point import Dcqcn
from bywash.fabric.files import TopologyFile, as_config_error, build_topology, parse_short, read_yaml
from bywash.fabric.topology import Topology


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SwitchRule(_Strict):
    """Switches whose name matches, shell-style; the first rule that matches a switch holds for it.

    `asic` names one with a headroom formula. Others give `hwsku`, `platform` and `buffer_bytes`, and take headroom from
    the user's `pg_profile_lookup.ini`. `buffer_bytes` also overrides the known size: the switch says it in
    `BUFFER_MAX_PARAM_TABLE|global mmu_size`.
    """

    match: str = "*"
    os: Literal["sonic", "cumulus"] = "sonic"
    asic: str | None = None
    hwsku: str | None = None
    platform: str | None = None
    buffer_bytes: int | None = Field(default=None, ge=1 << 20)
    buffer_model: Literal["traditional", "dynamic"] = "traditional"
    ports: list[str] | None = None


class LosslessClass(_Strict):
    """A class that PFC protects. `dscp` are the code points that carry it; its priority is TC, PG and queue too."""

    name: str = Field(default="roce", pattern=r"^[a-z][a-z0-9-]{0,15}$")
    priority: int = Field(default=3, ge=1, le=6)
    dscp: list[int] = Field(default=[26], min_length=1)
    weight: int = Field(default=50, ge=1, le=100)


class CnpClass(_Strict):
    """Where congestion notifications travel: strict priority, never lossless."""

    priority: int = Field(default=6, ge=1, le=7)
    dscp: int = Field(default=48, ge=0, le=63)


class Watchdog(_Strict):
    """SONiC's PFC watchdog, in its own units; it polls in steps of 100 ms at least."""

    detection_ms: int = Field(default=200, ge=100, le=5000)
    restoration_ms: int = Field(default=200, ge=100, le=60_000)
    poll_ms: int = Field(default=200, ge=100, le=1000)
    action: Literal["drop", "forward", "alert"] = "drop"


class Reaction(_Strict):
    """DCQCN on the NICs. Defaults are ConnectX's; `increase_mbps` None scales the paper's 40 Mb/s per 40 Gb/s."""

    alpha_g: int = Field(default=1019, ge=1, le=1023)
    alpha_timer_us: int = Field(default=1, ge=1, le=131_071)
    cut_interval_us: int = Field(default=4, ge=1)
    increase_timer_us: int = Field(default=300, ge=1)
    byte_counter_bytes: int = Field(default=32_767, ge=1)
    fast_recovery_steps: int = Field(default=1, ge=1, le=31)
    increase_mbps: int | None = Field(default=None, ge=1)
    cnp_interval_us: int = Field(default=4, ge=0, le=4095)

    def control(self, gbps: float) -> Dcqcn:
        """What `fixed_point` needs, for NICs of this rate."""
        return Dcqcn(
            alpha_timer_us=self.alpha_timer_us,
            cut_interval_us=self.cut_interval_us,
            increase_timer_us=self.increase_timer_us,
            byte_counter_bytes=self.byte_counter_bytes,
            fast_recovery_steps=self.fast_recovery_steps,
            increase_mbps=self.increase_for(gbps),
        )

    def increase_for(self, gbps: float) -> int:
        """Additive increase in Mb/s: as given, or 1 Mb/s per Gb/s of the NIC."""
        return self.increase_mbps if self.increase_mbps is not None else max(1, round(gbps))


class MarkingValues(_Strict):
    """ECN thresholds in place of computed ones, for links of `gbps`; links of other rates take them in proportion.

    `bywash fabric tune` writes them. They still have to precede PFC: a plan refuses those that do not.
    """

    gbps: float = Field(gt=0)
    kmin_bytes: int = Field(ge=1)
    kmax_bytes: int = Field(ge=1)
    pmax_percent: int = Field(ge=1, le=100)

    def at(self, gbps: float) -> tuple[int, int]:
        """Kmin and Kmax of a link of this rate, in bytes."""
        return round(self.kmin_bytes * gbps / self.gbps), round(self.kmax_bytes * gbps / self.gbps)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.kmin_bytes > self.kmax_bytes:
            raise ValueError(f"kmin_bytes {self.kmin_bytes} exceeds kmax_bytes {self.kmax_bytes}")
        return self


class SendingValues(_Strict):
    """What senders keep to; 0 for no bound.

    `active`: messages that a NIC has under way at once. `pace_gbps`: rate of a QP. `pace_by_counts`: rate of a message
    over its share of the receiver's link (its bytes over all that the receiver is due), see `fabric.sending`.
    """

    active: int = Field(default=0, ge=0)
    pace_gbps: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    pace_by_counts: float = Field(default=0.0, ge=0, le=100)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.pace_by_counts and self.active:
            raise ValueError("pace_by_counts is for messages that start together, active starts them in turn: give one")
        return self


class NicValues(_Strict):
    """Host side. Lists are in the order of a server's NICs; `{n}` in a pattern is the NIC's number in its server."""

    interface: str = Field(default="eth{n}", pattern=r"^[A-Za-z0-9_.{}-]+$")
    device: str = Field(default="mlx5_{n}", pattern=r"^[A-Za-z0-9_.{}-]+$")
    mtu_bytes: int = Field(default=9000, ge=1280, le=9216)
    gid_index: int = Field(default=3, ge=0, le=255)
    out_of_order: bool = False
    reaction_us: float = Field(default=5.0, ge=0, le=1000)


class Values(_Strict):
    """The whole file."""

    name: str = Field(default="fabric", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    topology: TopologyFile
    switches: list[SwitchRule] = Field(min_length=1)
    mtu_bytes: int = Field(default=9216, ge=1500, le=9216)
    lossless: list[LosslessClass] = Field(default_factory=lambda: [LosslessClass()], min_length=1, max_length=4)
    cnp: CnpClass = CnpClass()
    lossy_weight: int = Field(default=20, ge=1, le=100)
    dynamic_th: int = Field(default=0, ge=-8, le=7)
    incast: int = Field(default=16, ge=2)
    message_bytes: int | None = Field(default=None, ge=1)
    mark_at: Literal["enqueue", "dequeue"] = "enqueue"
    watchdog: Watchdog = Watchdog()
    dcqcn: Reaction = Reaction()
    marking: MarkingValues | None = None
    sending: SendingValues = SendingValues()
    nic: NicValues = NicValues()
    adaptive_routing: bool = False

    @model_validator(mode="before")
    @classmethod
    def _short_topology(cls, data: object) -> object:
        """`topology: leaf-spine:hosts=32,...` as on the command line."""
        if isinstance(data, dict) and isinstance(data.get("topology"), str):
            return data | {"topology": parse_short(data["topology"], "topology")}
        return data

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        priorities = [one.priority for one in self.lossless]
        codes = [code for one in self.lossless for code in one.dscp]
        if len(set(priorities)) < len(priorities):
            raise ValueError(f"lossless classes share a priority: {priorities}")
        if self.cnp.priority in priorities:
            raise ValueError(f"cnp.priority {self.cnp.priority} is lossless: a CNP must not wait behind a pause")
        for code in codes:
            if not 0 <= code <= 63:
                raise ValueError(f"lossless dscp {code}: must be 0 to 63")
        if len(set(codes)) < len(codes) or self.cnp.dscp in codes:
            raise ValueError(f"a DSCP stands twice among {codes} and cnp.dscp {self.cnp.dscp}")
        if self.nic.mtu_bytes > self.mtu_bytes:
            raise ValueError(f"nic.mtu_bytes {self.nic.mtu_bytes} exceeds the switches' mtu_bytes {self.mtu_bytes}")
        if self.adaptive_routing and not self.nic.out_of_order:
            raise ValueError("adaptive_routing reorders packets: it needs NICs with nic.out_of_order")
        if self.watchdog.detection_ms < self.watchdog.poll_ms or self.watchdog.restoration_ms < self.watchdog.poll_ms:
            raise ValueError("watchdog: detection_ms and restoration_ms must be poll_ms or more")
        return self

    @property
    def priorities(self) -> tuple[int, ...]:
        """The lossless priorities, ascending."""
        return tuple(sorted(one.priority for one in self.lossless))

    def traffic_class_of(self, dscp: int) -> int:
        """Which TC a packet of this DSCP has at every switch; 0 is lossy best effort."""
        if dscp == self.cnp.dscp:
            return self.cnp.priority
        return next((one.priority for one in self.lossless if dscp in one.dscp), 0)


def load_values(path: str | Path) -> tuple[Values, Topology]:
    """Read a values file and build its topology.

    Raises:
        ConfigError: unreadable, no YAML, or a field is wrong; the message starts with the file or the field.
    """
    return parse_values(read_yaml(path), Path(path).parent)


def parse_values(data: dict[str, object], directory: Path = Path()) -> tuple[Values, Topology]:
    """Values from the plain data of a file; relative paths in it are relative to `directory`."""
    values = _checked(Values, data)
    return values, build_topology(values.topology, directory)


def topology_of(text: str, flag: str) -> Topology:
    """A topology from the command line's short form, such as `ring:switches=4,hosts=4`."""
    try:
        return build_topology(_checked(TopologyFile, parse_short(text, flag)))
    except ConfigError as error:
        raise ConfigError(f"{flag} {text}: {str(error).removeprefix(f'{flag} {text!r}: ')}") from error


M = TypeVar("M", bound=BaseModel)


def _checked(model: type[M], data: object) -> M:
    """A model from plain data. Raises `ConfigError` with the path of the first field that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # the fields are fine one by one; what they say together is not
            raise ConfigError(first["msg"].removeprefix("Value error, ")) from error
        raise as_config_error(error) from error


def rule_for(values: Values, switch: str) -> tuple[SwitchRule, Asic]:
    """The rule that holds for a switch, and its ASIC.

    Raises:
        ConfigError: no rule matches, or the rule names no ASIC that is known and not enough to look one up.
    """
    for number, rule in enumerate(values.switches):
        if fnmatchcase(switch, rule.match):
            return rule, _asic(rule, f"switches[{number}]")
    raise ConfigError(f"switches: no entry matches {switch}; add one with match '*'")


def _asic(rule: SwitchRule, where: str) -> Asic:
    if rule.asic is None:
        if not (rule.hwsku and rule.platform and rule.buffer_bytes):
            raise ConfigError(f"{where}: give asic, or hwsku, platform and buffer_bytes with a headroom table")
        return lookup_asic(rule.hwsku, rule.platform, rule.buffer_bytes)
    asic = find_asic(rule.asic, f"{where}.asic")
    known = {name: getattr(asic, name) for name in Asic.__dataclass_fields__}
    given = {"hwsku": rule.hwsku, "platform": rule.platform, "buffer_bytes": rule.buffer_bytes}
    return Asic(**known | {name: value for name, value in given.items() if value is not None})
