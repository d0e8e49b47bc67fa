"""What a group's exchange moves: rows between NIC ports and rows over peer links, for one way of sending.

Shapes: R ranks of the group, P ports of the cluster's network, L sampled layers, E experts. Rows of a reference step;
time on the wire is linear in them. Dispatch sends a row per entry, combine sends one back. Knows nothing of rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.balance.placement import Placement
from bywash.planner.choices import TokenChoices
from bywash.planner.group import Group
from bywash.planner.moe_traffic import Method, Path, Rows, rows_between

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How rows travel between hosts: see `moe_traffic.Rows` and `Path`. Inside one host, `gather` sends every row to
    every rank by copy engine (`exchange.cost`)."""

    rows: Rows
    path: Path
    gather: bool = False

    def __str__(self) -> str:
        return "all-gather" if self.gather else f"{self.rows}, {self.path}"


WAYS: tuple[Way, ...] = (
    Way(rows="per-rank", path="flat"),
    Way(rows="per-rank", path="hierarchical"),
    Way(rows="per-node", path="hierarchical"),
)


WAYS_IN_HOST = (WAYS[0], Way(rows="per-rank", path="flat", gather=True))


def ways_of(group: Group) -> tuple[Way, ...]:
    """What the group's runtime can do: between CPU hosts a row goes once to each host (`exchange.hierarchical`)."""
    cpu = group.device_R[0].is_cpu
    if len(group.members) > 1:
        return WAYS[2:] if cpu else WAYS
    return WAYS[:1] if cpu else WAYS_IN_HOST


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRows:
    """One layer of a reference step.

    Attributes:
        network_PP: int64 [P, P], rows dispatched from port to port.
        peer_RR: int64 [R, R], rows over peer links in the dispatch, relayed ones included.
        expert_rows_E: int64 [E]. home_E: int32 [E].
        reached: other ranks that compute for a token, on average.
    """

    network_PP: IntArray
    peer_RR: IntArray
    expert_rows_E: IntArray
    home_E: NDArray[np.int32]
    reached: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """All sampled layers of a reference step of `tokens_R` tokens."""

    way: Way
    layers: tuple[LayerRows, ...]
    tokens_R: IntArray

    @property
    def tokens(self) -> int:
        """Of the reference step, over all ranks."""
        return int(self.tokens_R.sum())

    @property
    def reached(self) -> float:
        """Mean over layers."""
        return float(np.mean([layer.reached for layer in self.layers]))


def group_traffic(group: Group, choices: TokenChoices, homes: Sequence[Placement], way: Way, ports: int) -> Traffic:
    """Count the rows of every sampled layer.

    Args:
        group: all its hosts have as many devices.
        choices: of the group's ranks.
        homes: a placement for each sampled layer.
        way: of sending between hosts.
        ports: P; 0 for a cluster without a network.
    """
    gpus, many = group.members[0].gpus, len(group.members) > 1
    once: Rows = "per-expert" if way.rows == "per-expert" else "per-rank"
    each = Method(gpus_per_server=1, rows=once, path="flat")
    between = Method(gpus_per_server=gpus, rows=way.rows, path=way.path)
    layers = []
    for i, placement in enumerate(homes):
        ids_NK = choices.ids_NLK[:, i]
        full_RR, _ = rows_between(ids_NK, choices.rank_N, placement.home_E, group.ranks, each)
        network_PP = np.zeros((ports, ports), np.int64)
        if many:
            rows_RR, _ = rows_between(ids_NK, choices.rank_N, placement.home_E, group.ranks, between)
            port_R = group.port_R
            np.add.at(network_PP, (port_R[:, None], port_R[None, :]), rows_RR)
        layers.append(
            LayerRows(
                network_PP=network_PP,
                peer_RR=_gathered(choices, group.ranks) if way.gather else peer_rows(full_RR, gpus, way),
                expert_rows_E=np.bincount(ids_NK.ravel(), minlength=choices.num_experts),
                home_E=placement.home_E,
                reached=float(full_RR.sum()) / max(1, choices.rank_N.size),
            )
        )
    tokens_R = np.bincount(choices.rank_N, minlength=group.ranks)
    return Traffic(way=way, layers=tuple(layers), tokens_R=tokens_R)


def _gathered(choices: TokenChoices, ranks: int) -> IntArray:
    """Every row to every other rank."""
    tokens_R = np.bincount(choices.rank_N, minlength=ranks)
    peer_RR = np.repeat(tokens_R[:, None], ranks, axis=1)
    np.fill_diagonal(peer_RR, 0)
    return peer_RR


def peer_rows(full_RR: IntArray, gpus: int, way: Way) -> IntArray:
    """Rows over peer links inside hosts: int64 [R, R].

    Example: 2 hosts of 2 devices, one row from rank 0 to rank 3, per node and hierarchical: it arrives on rank 2 (the
    source's rail) and goes from there to rank 3 over the peer link.

    Args:
        full_RR: one row for each (token, other rank that computes for it), also between hosts.
        gpus: devices of a host.
        way: of sending between hosts.
    """
    src, dst = np.nonzero(full_RR)
    rows = full_RR[src, dst]
    away = src // gpus != dst // gpus
    begin, end = src.copy(), dst.copy()
    if way.path == "flat":
        begin, end, rows = src[~away], dst[~away], rows[~away]
    elif way.rows == "per-node":
        begin[away] = dst[away] // gpus * gpus + src[away] % gpus
    else:
        end[away] = src[away] // gpus * gpus + dst[away] % gpus
    peer_RR = np.zeros_like(full_RR)
    np.add.at(peer_RR, (begin, end), rows)
    np.fill_diagonal(peer_RR, 0)
    return peer_RR
