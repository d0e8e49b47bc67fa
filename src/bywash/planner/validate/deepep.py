"""DeepEP on H100 at 1 to 8 nodes, against the planner's own exchange lines: fitted on 1 and 2, held out on 4 and 8.

The tables are AIConfigurator's (Apache-2.0): `low-latency` rows go once for each expert, straight; `normal` rows once
for each node, on one rail. They give no NIC rate, so that it is fitted, one rate for both; as are what a start costs
and the rate of peer links, of each kind. Rows come from the planner's traffic of uniform routing, as the benchmark
draws it. Knows nothing of files: `tables` reads them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.planner.choices import TokenChoices
from bywash.planner.cluster import parse_cluster
from bywash.planner.group import make_group, placements, shares_R
from bywash.planner.model import load_model_shape
from bywash.planner.network import Network
from bywash.planner.traffic import Way, group_traffic
from bywash.planner.validate.points import Check
from bywash.planner.wire import Exchange, Line, Starts, exchange_lines

Mode = Literal["low-latency", "normal"]
Half = Literal["dispatch", "combine"]
WAYS: dict[Mode, Way] = {
    "low-latency": Way(rows="per-expert", path="flat"),
    "normal": Way(rows="per-node", path="hierarchical"),
}
FIT_NODES = (1, 2)
REFERENCE_GBPS = 400.0
REFERENCE_TOKENS = 4096
GPUS = 8
MOST_NODES = 4
"""That a token's experts may be on, in DeepEP's benchmark of normal kernels."""
LARGEST_STEP = 16_384
"""Tokens of a rank. The table goes on to 131,072, which no serving step reaches; those rows are reported apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of the tables: `tokens` of each rank, us."""

    mode: Mode
    half: Half
    nodes: int
    experts: int
    tokens: int
    us: float

    @property
    def line(self) -> Line:
        """The planner's, at `REFERENCE_GBPS` and without starts."""
        lines = reference_lines(self.mode, self.nodes, self.experts)
        return lines.dispatch if self.half == "dispatch" else lines.combine

    @property
    def step_tokens(self) -> int:
        """Of all ranks."""
        return self.tokens * self.nodes * GPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What is fitted.

    Attributes:
        nic_gbps: of a device's NIC, headers included.
        peer: rate of peer links over `figures.PEER_SHARE` of their name, by mode.
        dispatch_us, combine_us, node_us: `wire.Starts`, by mode.
    """

    nic_gbps: float
    peer: dict[Mode, float]
    dispatch_us: dict[Mode, float]
    combine_us: dict[Mode, float]
    node_us: dict[Mode, float]


def deepep_checks(measured: Sequence[Measured]) -> tuple[list[Check], Rates]:
    """Fit on 1 and 2 nodes, predict all. Checks of the fitted points say so."""
    rates = fit([one for one in measured if one.nodes in FIT_NODES and one.tokens <= LARGEST_STEP])
    return [
        Check(
            regime=f"{one.mode} {one.half}, {one.nodes} node{'s' if one.nodes > 1 else ''}"
            + (f", above {LARGEST_STEP:,} tokens" if one.tokens > LARGEST_STEP else ""),
            name=f"{one.tokens} tokens, {one.experts} experts",
            measured=one.us,
            predicted=predict(one, rates),
            fitted=one.nodes in FIT_NODES and one.tokens <= LARGEST_STEP,
        )
        for one in measured
    ], rates


def predict(point: Measured, rates: Rates) -> float:
    """The planner's line, at fitted rates and starts: us."""
    line, mode = point.line, point.mode
    first = rates.dispatch_us if point.half == "dispatch" else rates.combine_us
    between = rates.node_us[mode] if point.nodes > 1 else 0.0
    scaled = replace(
        line,
        start_us=line.start_us + first[mode] + between,
        network_us=line.network_us * REFERENCE_GBPS / rates.nic_gbps,
        peer_us=line.peer_us / rates.peer[mode],
    )
    return scaled.at(point.step_tokens)


@cache
def reference_lines(mode: Mode, nodes: int, experts: int) -> Exchange:
    """The planner's lines at `REFERENCE_GBPS` for each device, without starts: those are fitted."""
    model = replace(load_model_shape("deepseek-v3"), experts=experts)
    nics = [{"gbps": REFERENCE_GBPS, "count": GPUS}]
    cluster = parse_cluster(
        {
            "nodes": [{"name": "n", "count": nodes, "device": "h100", "devices": GPUS, "nics": nics}],
            "fabric": {"kind": "rail-optimised", "spines": 1, "links_per_pair": 8, "uplink_gbps": 800},
        }
    )
    network = Network(cluster.topology) if cluster.topology is not None and nodes > 1 else None
    group = make_group(cluster, range(nodes))
    own_R = shares_R(experts, np.ones(group.ranks, np.int64))
    ports = network.topology.hosts if network is not None else 0
    most_nodes = MOST_NODES if mode == "normal" else nodes
    choices = uniform_choices(group.ranks, experts, model.top_k, nodes, most_nodes)
    traffic = group_traffic(group, choices, placements(None, own_R, 1, experts), WAYS[mode], ports)
    return exchange_lines(model, group, traffic, network, Starts(dispatch_us=0.0, combine_us=0.0, node_us=0.0))


def uniform_choices(ranks: int, experts: int, top_k: int, nodes: int, most_nodes: int) -> TokenChoices:
    """Uniform scores, the `most_nodes` nodes with the best ones, the best K experts there: DeepEP's benchmark."""
    score_NE = np.random.default_rng(0).random((REFERENCE_TOKENS, experts), np.float32)
    if nodes > most_nodes:
        score_NHe = score_NE.reshape(REFERENCE_TOKENS, nodes, -1)
        dropped_NH = np.argsort(-score_NHe.max(axis=2), axis=1)[:, most_nodes:]
        np.put_along_axis(score_NHe, dropped_NH[:, :, None], -1.0, axis=1)
    ids_NK = np.argpartition(-score_NE, top_k - 1, axis=1)[:, :top_k].astype(np.uint16)
    rank_N = np.arange(REFERENCE_TOKENS) * ranks // REFERENCE_TOKENS
    return TokenChoices(ids_NLK=ids_NK[:, None], rank_N=rank_N, num_experts=experts, ranks=ranks, note="uniform")


def fit(points: Sequence[Measured]) -> Rates:
    """The rates with the least mean square of log errors. Raises `ConfigError`: no points."""
    if not points:
        raise ConfigError("tables: hold no row of 1 or 2 nodes to fit to")
    modes = sorted({one.mode for one in points})
    names = ["nic", *(f"{name} {mode}" for mode in modes for name in ("peer", "dispatch", "combine", "node"))]
    at = {name: i for i, name in enumerate(names)}
    start, network, peer, after, tokens, us = np.array(
        [(p.line.start_us, p.line.network_us, p.line.peer_us, p.line.after_us, p.step_tokens, p.us) for p in points]
    ).T
    first_i = np.array([at[f"{p.half} {p.mode}"] for p in points])
    node_i = np.array([at[f"node {p.mode}"] for p in points])
    peer_i = np.array([at[f"peer {p.mode}"] for p in points])
    many = np.array([p.nodes > 1 for p in points])

    def loss(x: NDArray[np.float64]) -> float:
        """`predict` for all points at once."""
        v = np.exp(x)
        wire = np.maximum(network * REFERENCE_GBPS / v[0], peer / v[peer_i])
        took = start + v[first_i] + many * v[node_i] + tokens * (wire + after)
        return float(np.mean(np.log(took / us) ** 2))

    x = descend(loss, np.log([REFERENCE_GBPS, *([1.0, 10.0, 10.0, 20.0] * len(modes))]))
    return _rates(dict(zip(names, np.exp(x))), modes)


def _rates(values: dict[str, float], modes: Sequence[Mode]) -> Rates:
    def of(name: str) -> dict[Mode, float]:
        return {mode: float(values[f"{name} {mode}"]) for mode in modes}

    return Rates(
        nic_gbps=float(values["nic"]),
        peer=of("peer"),
        dispatch_us=of("dispatch"),
        combine_us=of("combine"),
        node_us=of("node"),
    )


def descend(loss: Callable[[NDArray[np.float64]], float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coordinate search: each variable a step up or down while that helps, then half steps. Deterministic."""
    best, step = loss(x), 0.5
    while step > 2e-3:
        moved = False
        for i in range(x.size):
            for sign in (step, -step):
                trial = x.copy()
                trial[i] += sign
                got = loss(trial)
                if got < best * (1 - 1e-4):
                    x, best, moved = trial, got, True
                    break
        if not moved:
            step /= 2
    return x
