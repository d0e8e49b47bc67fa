"""Ways of sending between hosts, as the planner tries them: what each takes against the bound of the busiest link.

    PYTHONPATH=src:. python benchmarks/planner/sendings.py

Simulated, packet by packet, on groups of the shipped example, of 16 alike GPU hosts, and of CPU hosts: one layer's
dispatch and combine of a prefill step, at once over 1, 4 and 8 queue pairs, rotated, and by the counts with the queue
pairs of the best of these. CPU ranks send over TCP; the simulator has RoCE for them too.
"""

from collections.abc import Iterator
from pathlib import Path

from bywash.planner.candidate import Problem
from bywash.planner.cluster import Cluster, load_cluster, parse_cluster
from bywash.planner.cost import GroupCost
from bywash.planner.group import make_group
from bywash.planner.model import load_model_shape
from bywash.planner.network import Sent
from bywash.planner.sample import make_sample
from bywash.planner.sendings import sendings_of
from bywash.planner.settings import make_network
from bywash.planner.target import Target, Workload
from bywash.planner.traffic import WAYS, Way
from bywash.planner.wire import layer_bytes_of
from bywash.routing.skew import TraceShape, zipf

EXAMPLE = Path(__file__).parents[2] / "examples" / "private-16x8-mixed.yaml"
SOCKETS = {"cpu-socket": {"like": "cpu", "bf16_tflops": 3.0, "memory_gb": 64.0, "memory_gbytes_per_s": 200.0}}


def alike(count: int, device: str, devices: int, gbps: float, nics: int, uplinks: tuple[int, float]) -> Cluster:
    """Hosts of one kind, four on a leaf, two spines."""
    nic = {"gbps": gbps, "count": nics}
    node = {"name": "h", "count": count, "device": device, "devices": devices, "nics": [nic]}
    fabric = {"kind": "leaf-spine", "nodes_per_leaf": 4, "spines": 2}
    fabric |= {"links_per_pair": uplinks[0], "uplink_gbps": uplinks[1]}
    return parse_cluster({"name": "alike", "nodes": [node], "fabric": fabric, "devices": SOCKETS})


def cases() -> Iterator[tuple[str, Cluster, tuple[int, ...], str, tuple[Way, ...], float]]:
    """(name, cluster, hosts of the group, model, ways, exponent of the trace that skew is taken from)."""
    gpus, flat, node = alike(16, "h100", 8, 400.0, 8, (16, 400.0)), WAYS[0], WAYS[2]
    for exponent in (0.45, 1.0):
        yield "example, 4 x 8 h100", load_cluster(EXAMPLE), (4, 5, 6, 7), "deepseek-v3", (node, flat), exponent
        yield "16 x 8 h100", gpus, tuple(range(16)), "deepseek-v3", (node, flat), exponent
        for gbps in (25.0, 5.0):
            cpus = alike(8, "cpu-socket", 2, gbps, 1, (1, 100.0))
            yield f"8 x 2 CPU, {gbps:g} Gb/s", cpus, tuple(range(8)), "olmoe", (node,), exponent


def table(cluster: Cluster, hosts: tuple[int, ...], model: str, way: Way, exponent: float) -> None:
    """Print one case: times over the bound, and over the best other way than by the counts."""
    shape, network = load_model_shape(model), make_network(cluster)
    assert network is not None
    other = zipf(TraceShape(num_experts=512, top_k=8, layers=2, tokens=4096), exponent=exponent, seed=0)
    problem = Problem(
        model=shape,
        sample=make_sample(shape, other),
        workload=Workload(),
        target=Target(),
        network=network,
        ports=cluster.topology.hosts if cluster.topology is not None else 0,
    )
    cost = GroupCost.of(problem, make_group(cluster, hosts), way)
    assert cost.traffic is not None
    layers = layer_bytes_of(shape, cost.traffic, float(cost.tokens_of("prefill", 1)))
    halves = ([one.dispatch_HH for one in layers], [one.combine_HH for one in layers])
    bound = [sum(map(network.busiest_us, half)) / len(layers) for half in halves]
    plain = sendings_of(cost.group)
    runs = {one: network.simulate([Sent(layers=layers, sending=one)]) for one in plain}
    best = min(runs, key=lambda one: runs[one].dispatch_us + runs[one].combine_us)
    for one in sendings_of(cost.group, best):
        runs[one] = network.simulate([Sent(layers=layers, sending=one)])
    least = min(run.dispatch_us + run.combine_us for one, run in runs.items() if one.schedule != "by-counts")
    for one, run in runs.items():
        parts = ((run.dispatch_us - network.rtt_us) / bound[0], (run.combine_us - network.rtt_us) / bound[1])
        print(
            f"{one!s:>30} {parts[0]:>9.3f} {parts[1]:>9.3f} {(run.dispatch_us + run.combine_us) / least:>12.3f} "
            f"{run.peak_queue_bytes / 1e6:>9.2f} {run.marks:>7} {run.pauses:>7}"
        )


def main() -> None:
    for name, cluster, hosts, model, ways, exponent in cases():
        for way in ways:
            print(f"\n{name}, {model}, {way}; skew of a trace with exponent {exponent:g}")
            print(f"{'':>30} {'dispatch':>9} {'combine':>9} {'/ best other':>12} {'queue MB':>9}   marks  pauses")
            table(cluster, hosts, model, way, exponent)


if __name__ == "__main__":
    main()
