"""Time of a group's dispatch and combine, as a line over tokens: what starts cost, and what each token adds.

Between hosts from the busiest link (`bound`), or from the fabric simulator on the same bytes (`simulated`); inside a
host from measured peer rates. Both run at once, so that the longer of the two counts. `cost` calls it; validation fits
`Starts` and rates to published tables. Knows nothing of compute.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bywash.planner.figures import PEER_SHARE, READ_SHARE, Figure, Source
from bywash.planner.group import Group
from bywash.planner.model import ModelShape
from bywash.planner.moe_traffic import LayerBytes, RowFormat
from bywash.planner.network import Network, Simulated
from bywash.planner.traffic import LayerRows, Traffic

COPY_SHARE = 377.0 / 450.0
"""Of peer links' name, by copy engine (`exchange.cost`)."""
SUM_SHARE = 3530.0 / 4800.0
"""What the source's sum of returned rows reads and writes, over the memory's peak (`exchange.cost`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """What a dispatch and a combine cost whatever they carry, us.

    Attributes:
        dispatch_us, combine_us: inside a host (`exchange.cost`: fits to our measurements).
        copy_us: of a gather or a scatter by copy engine.
        node_us: on top where a leg between hosts takes part. An estimate: nothing of ours has run there yet.
        cpu_us: of a CPU exchange between processes.
    """

    dispatch_us: float = 7.1
    combine_us: float = 8.1
    copy_us: float = 47.0
    node_us: float = 20.0
    cpu_us: float = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`start_us + max(network, peer) + after`, each linear in the step's tokens.

    Attributes:
        start_us: fixed, the round trip between hosts included.
        network_us, peer_us, after_us: for each token of the whole group.
        source: of the network part.
        arithmetic: in words.
    """

    start_us: float
    network_us: float
    peer_us: float
    after_us: float
    source: Source
    arithmetic: str

    def at(self, tokens: float) -> float:
        """Microseconds of a step of so many tokens, over all ranks."""
        return self.start_us + tokens * (max(self.network_us, self.peer_us) + self.after_us)

    def figure(self, tokens: float) -> Figure:
        """The same with its arithmetic."""
        binding = "network" if self.network_us > self.peer_us else "peer links"
        how = (
            f"{self.start_us:.1f} us + max(network {tokens * self.network_us:.1f}, peer {tokens * self.peer_us:.1f}) + "
            f"sums {tokens * self.after_us:.1f}; {binding} bind; {self.arithmetic}"
        )
        return Figure(us=self.at(tokens), source=self.source, arithmetic=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Both halves."""

    dispatch: Line
    combine: Line


def row_format(model: ModelShape) -> RowFormat:
    """Rows as the exchange sends them: 8 bytes of index for each choice."""
    return RowFormat(
        hidden=model.hidden,
        dispatch=model.dispatch_dtype,
        combine=model.combine_dtype,
        index_bytes=8 * model.top_k,
    )


def exchange_lines(
    model: ModelShape, group: Group, traffic: Traffic, network: Network | None, starts: Starts | None = None
) -> Exchange:
    """The bound: the busiest link between hosts, peer links at the rate that was measured on NVLink."""
    starts, row = starts or Starts(), row_format(model)
    rtt = network.rtt_us if network is not None and len(group.members) > 1 else 0.0
    halves = []
    for name, row_bytes in (("dispatch", row.dispatch_bytes), ("combine", row.combine_bytes)):
        net = [_network_us(layer, row_bytes, network, name) for layer in traffic.layers] if rtt else [0.0]
        peer = [_peer_us(layer, row_bytes, group, traffic.way.gather) for layer in traffic.layers]
        after = _sum_us(model, traffic, row_bytes, group) if name == "combine" else 0.0
        first = starts.dispatch_us if name == "dispatch" else starts.combine_us
        first = starts.copy_us if traffic.way.gather else first
        first = starts.cpu_us if group.device_R[0].is_cpu else first
        halves.append(
            Line(
                start_us=first + (starts.node_us + rtt if rtt else 0.0),
                network_us=float(np.mean(net)) / traffic.tokens,
                peer_us=float(np.mean(peer)) / traffic.tokens,
                after_us=after / traffic.tokens,
                source="bound" if rtt else "measured" if _nvlink(group) else "roofline",
                arithmetic=f"{row_bytes:,} B a row, {traffic.reached:.2f} other ranks a token, {traffic.way}",
            )
        )
    return Exchange(dispatch=halves[0], combine=halves[1])


def with_simulation(exchange: Exchange, simulated: Simulated, tokens: float, rtt_us: float) -> Exchange:
    """The network's part as simulated at `tokens`; the start keeps its round trip."""
    made = []
    for line, us in ((exchange.dispatch, simulated.dispatch_us), (exchange.combine, simulated.combine_us)):
        slope = max(0.0, us - rtt_us) / tokens
        made.append(
            replace(line, network_us=slope, source="simulated", arithmetic=f"{line.arithmetic}; {simulated.arithmetic}")
        )
    return Exchange(dispatch=made[0], combine=made[1])


def layer_bytes_of(model: ModelShape, traffic: Traffic, tokens: float) -> tuple[LayerBytes, ...]:
    """Bytes between NIC ports of every sampled layer, for a step of `tokens`."""
    row, factor = row_format(model), tokens / traffic.tokens
    return tuple(
        LayerBytes(
            dispatch_HH=_whole(layer.network_PP * (row.dispatch_bytes * factor)),
            combine_HH=_whole(layer.network_PP.T * (row.combine_bytes * factor)),
            network_rows=round(int(layer.network_PP.sum()) * factor),
            local_rows=round(int(layer.peer_RR.sum()) * factor),
        )
        for layer in traffic.layers
    )


def _whole(bytes_PP: NDArray[np.floating]) -> NDArray[np.int64]:
    return np.asarray(np.ceil(bytes_PP), np.int64)


def _network_us(layer: LayerRows, row_bytes: int, network: Network | None, half: str) -> float:
    assert network is not None
    rows_PP = layer.network_PP if half == "dispatch" else layer.network_PP.T
    return network.busiest_us(rows_PP * row_bytes)


def _peer_us(layer: LayerRows, row_bytes: int, group: Group, gather: bool) -> float:
    share = COPY_SHARE if gather else PEER_SHARE
    rate_R = np.array([device.peer_gbytes_per_s for device in group.device_R]) * share
    rows_R = np.maximum(layer.peer_RR.sum(axis=1), layer.peer_RR.sum(axis=0))
    return float((rows_R * row_bytes / rate_R).max() * 1e-3)


def _sum_us(model: ModelShape, traffic: Traffic, row_bytes: int, group: Group) -> float:
    """The source adds up what came back: rows read, one written. After a gather every rank first sums its part of all
    tokens, and a row comes back from each."""
    memory_R = np.array([device.memory_gbytes_per_s for device in group.device_R])
    if not traffic.way.gather:
        return float((traffic.tokens_R * (traffic.reached + 2) * row_bytes / (memory_R * SUM_SHARE)).max() * 1e-3)
    partial_R = (traffic.tokens_R * model.top_k + traffic.tokens) / (memory_R * READ_SHARE)
    summed_R = traffic.tokens_R * (group.ranks + 1) / (memory_R * SUM_SHARE)
    return float(((partial_R + summed_R) * row_bytes).max() * 1e-3)


def _nvlink(group: Group) -> bool:
    return {device.name for device in group.device_R} == {"h200"}
