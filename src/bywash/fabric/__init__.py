"""The fabric: a RoCEv2 network, packet by packet, and what can be said about it without running it.

A scenario in, a result out:

    from bywash.fabric import Scenario, alltoall, leaf_spine, simulate

    result = simulate(Scenario(topology=leaf_spine(hosts=32, leaves=4, spines=8), flows=alltoall(32, 256_000)))
    print(result.summary()["completion_us"], result.verdict)

Reading order: `topology` and `builders` (hosts, switches, links), `traffic` (`Flows`: who sends what, when, after
what), `scenario` (every setting, with its default), `run.simulate`, `result`. Inside: `routes`, `inputs` (queue pairs,
hashes), `layout`, `rows`, `settings`, `state` (the engine's memory), `kernel` (the hot loop, numba), `dcqcn`, `phases`,
`deadlock`, `collect`; `naive` is the same engine in plain Python, the oracle. `files` reads scenarios that people write
(YAML; `schema`, `file_topology`, `file_traffic`), `profiles` has named settings such as `ns3-hpcc`.

Knows nothing of torch, experts or tokens: traffic arrives as bytes between hosts.
"""

from bywash.fabric.builders import (
    fat_tree,
    from_graph,
    graph_file,
    leaf_spine,
    mesh,
    rail_optimised,
    ring,
    single_switch,
)
from bywash.fabric.result import Result
from bywash.fabric.run import simulate
from bywash.fabric.scenario import (
    DcqcnConfig,
    EcnConfig,
    FrameConfig,
    NicConfig,
    PfcConfig,
    RoutingConfig,
    RunConfig,
    Scenario,
    SwitchConfig,
    TrafficClass,
)
from bywash.fabric.topology import Link, Node, Topology
from bywash.fabric.traffic import Flows, alltoall, from_matrix, incast, join, permutation, poisson

__all__ = [
    "DcqcnConfig",
    "EcnConfig",
    "Flows",
    "FrameConfig",
    "Link",
    "NicConfig",
    "Node",
    "PfcConfig",
    "Result",
    "RoutingConfig",
    "RunConfig",
    "Scenario",
    "SwitchConfig",
    "Topology",
    "TrafficClass",
    "alltoall",
    "fat_tree",
    "from_graph",
    "from_matrix",
    "graph_file",
    "incast",
    "join",
    "leaf_spine",
    "mesh",
    "permutation",
    "poisson",
    "rail_optimised",
    "ring",
    "simulate",
    "single_switch",
]
