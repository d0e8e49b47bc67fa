"""ECN and PFC settings for a deployment: computed from the network, held against the vendor's on the deployment's own
traffic, all groups at once.

`fabric.config` computes thresholds from cables, ASICs and fan-in; `fabric.tune` knows the vendor's defaults. Both are
simulated packet by packet on one layer of prefill of every group, together; the better one is taken. Knows bytes and
switches, nothing of models. `plan` calls it.
"""

import glob
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from bywash.errors import ConfigError
from bywash.fabric.config.plan import FabricPlan
from bywash.fabric.config.plan import make_plan as make_fabric_plan
from bywash.fabric.config.values import Values
from bywash.fabric.scenario import Scenario
from bywash.fabric.traffic import alltoall
from bywash.fabric.tune.objective import Case, Fabric, make_fabric, planned, scenario, space_of
from bywash.fabric.tune.space import Setting, vendor
from bywash.planner.cluster import Cluster
from bywash.planner.network import SWITCH_NS, Network, Sent, Simulated

TOPOLOGY_FILE = "topology.yaml"
COMPUTED = "computed"
NEAR = 1.01
"""Settings within a hundredth of the best are as good; the plainest of them is taken."""
CNP_INTERVAL_US = 50
"""The paper's. At ConnectX's 4 us the simulated NIC, which cuts on every CNP, falls to a fifth of its rate where a NIC
has few queue pairs (docs/planner.md)."""
OTHERS: dict[str, dict[str, object]] = {
    "computed, CNPs 4 us apart": {"dcqcn": {"cnp_interval_us": 4}},
    "computed, dynamic_th -1": {"dynamic_th": -1},
    "computed, dynamic_th 1": {"dynamic_th": 1},
}
"""`dynamic_th`: PFC pauses at 2^d times the free pool; 0 in SONiC's tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One setting on the deployment's traffic."""

    name: str
    setting: Setting
    run: Simulated

    @property
    def us(self) -> float:
        """Dispatch and combine of a layer; infinite where packets were lost."""
        return self.run.dispatch_us + self.run.combine_us if not self.run.drops else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricChoice:
    """What switches and NICs are told.

    Attributes:
        values: the values file as plain data; `fabric_plan` is derived from it.
        fabric_plan: every number of every switch and NIC.
        tried: the settings that were simulated, the chosen one first.
        refused: settings that were not tried, and why.
        why_not: why there is no configuration; "" where there is one.
    """

    values: dict[str, object]
    fabric_plan: FabricPlan | None
    tried: tuple[Tried, ...]
    refused: tuple[str, ...] = ()
    why_not: str = ""

    @property
    def chosen(self) -> Tried | None:
        """The better setting."""
        return self.tried[0] if self.tried else None


def choose_settings(cluster: Cluster, groups: Sequence[Sent], *, keep: bool = True) -> FabricChoice:
    """Compute, simulate, choose.

    Args:
        cluster: with a network.
        groups: what each sends between NIC ports, and how.
        keep: the chosen run's samples, for the report.
    """
    assert cluster.topology is not None
    values = values_data(cluster)
    try:
        fabric_plan = plan_from(values, cluster)
    except ConfigError as error:
        return FabricChoice(values=values, fabric_plan=None, tried=(), why_not=str(error))
    if not groups:
        return FabricChoice(values=values, fabric_plan=fabric_plan, tried=())
    settings, refused = _candidates(values, fabric_plan, cluster)
    fabric = make_fabric(fabric_plan)
    tried = []
    for name, setting in settings.items():
        network = Network(cluster.topology, _scenario(fabric, setting))
        tried.append(Tried(name=name, setting=setting, run=network.simulate(groups, keep=keep)))
    least = min(one.us for one in tried)
    chosen = next(one for one in tried if one.us <= NEAR * least)
    tried = [chosen, *sorted((one for one in tried if one is not chosen), key=lambda one: one.us)]
    if tried[0].name != COMPUTED:
        values |= _written(tried[0].setting, fabric.gbps)
        fabric_plan = plan_from(values, cluster)
    return FabricChoice(values=values, fabric_plan=fabric_plan, tried=tuple(tried), refused=tuple(refused))


def _candidates(
    values: dict[str, object], fabric_plan: FabricPlan, cluster: Cluster
) -> tuple[dict[str, Setting], list[str]]:
    """Settings by name, computed ones first: with SONiC's usual pause threshold and with other ones; the vendor's."""
    fabric = make_fabric(fabric_plan)
    settings = {COMPUTED: planned(fabric_plan, fabric.gbps)}
    refused = []
    for name, change in OTHERS.items():
        try:
            settings[name] = planned(plan_from(values | change, cluster), fabric.gbps)
        except ConfigError as error:
            refused.append(f"{name}: {error}")
    usual = vendor(fabric.gbps)
    if space_of(fabric_plan, fabric.gbps, sending=False).allows(usual):
        settings["vendor defaults"] = usual
    else:
        refused.append("vendor defaults: PFC could pause before ECN marks, which an audit refuses")
    return settings, refused


def make_network(cluster: Cluster) -> Network | None:
    """The cluster's network as the search simulates it: with computed settings where there is a configuration, else
    with those of the profile `rocev2`. None for one host."""
    if cluster.topology is None:
        return None
    try:
        fabric_plan = plan_from(values_data(cluster), cluster)
    except ConfigError:
        return Network(cluster.topology)
    fabric = make_fabric(fabric_plan)
    return Network(cluster.topology, _scenario(fabric, planned(fabric_plan, fabric.gbps)))


def plan_from(values: dict[str, object], cluster: Cluster) -> FabricPlan:
    """Every number, for the cluster's own topology. Raises `ConfigError`: no such speed, too little memory, ..."""
    assert cluster.topology is not None
    checked = Values.model_validate(values)
    return make_fabric_plan(checked, cluster.topology)


def values_data(cluster: Cluster) -> dict[str, object]:
    """The values file of a cluster: its switches' ASICs, the most NICs that can send to one at once."""
    topology = cluster.topology
    assert topology is not None
    switches = [{"match": name, "asic": asic} for name, asic in _patterns(cluster)]
    each = max(len(host.ports) for host in cluster.hosts)
    return {
        "name": cluster.name,
        "topology": {"kind": "file", "path": TOPOLOGY_FILE},
        "switches": switches,
        "lossless": [{"name": "roce", "priority": 3, "dscp": [26]}],
        "cnp": {"priority": 6, "dscp": 48},
        "dcqcn": {"cnp_interval_us": CNP_INTERVAL_US},
        "incast": max(2, min(16, topology.hosts - each, topology.hosts - 1)),
    }


def _patterns(cluster: Cluster) -> list[tuple[str, str]]:
    """`leaf*` where all switches that this matches agree, else their names: `s*` of `s0` matches `spine0` too."""
    stems: dict[str, list[str]] = {}
    for name in cluster.asics:
        stems.setdefault(glob.escape(name.rstrip("0123456789")), []).append(name)
    found = []
    for stem, names in stems.items():
        matched = {asic for name, asic in cluster.asics.items() if fnmatchcase(name, f"{stem}*")}
        if len(matched) == 1:
            found.append((f"{stem}*", matched.pop()))
        else:
            found += [(glob.escape(name), cluster.asics[name]) for name in names]
    return found


def _scenario(fabric: Fabric, setting: Setting) -> Scenario:
    """Switch, NIC and routing settings; the traffic in it is a place holder."""
    made = scenario(fabric, setting, Case(name="plan", flows=alltoall(2, 1)))
    return replace(made, switch=replace(made.switch, latency_ns=SWITCH_NS))


def _written(setting: Setting, gbps: float) -> dict[str, object]:
    """A setting as the values file has it."""
    return {
        "dynamic_th": setting.dynamic_th,
        "dcqcn": {"cnp_interval_us": setting.cnp_interval_us},
        "marking": {
            "gbps": gbps,
            "kmin_bytes": setting.kmin_bytes,
            "kmax_bytes": setting.kmax_bytes,
            "pmax_percent": setting.pmax_percent,
        },
    }
