"""`Group`: the devices that share one set of experts, and how work is dealt out among them.

Shapes: R ranks (one device each), E experts. An expert-parallel group spans whole hosts; `tp` consecutive devices of a
host split attention among them, all others hold different sequences (data-parallel attention). Unequal devices get
unequal shares: tokens in proportion to speed, experts too as far as memory goes. Integers decide, ties by number.
Knows nothing of time on the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.balance.placement import Placement
from bywash.errors import ConfigError
from bywash.planner.cluster import Cluster, Host
from bywash.planner.devices import Device
from bywash.planner.figures import DENSE_SHARE, READ_SHARE
from bywash.planner.model import ModelShape
from bywash.planner.target import Workload

IntArray = NDArray[np.int64]

MOST_SPEED = 64
REFERENCE_SEQUENCES = 64
"""Of a device, when the speeds of generations are compared: weights read once serve so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Hosts of a cluster, by number, that form one expert-parallel group.

    Attributes:
        hosts: indices into `Cluster.hosts`, ascending.
        members: the hosts themselves.
        tp: devices that split attention.
    """

    hosts: tuple[int, ...]
    members: tuple[Host, ...]
    tp: int = 1

    @property
    def ranks(self) -> int:
        """R: all devices of its hosts."""
        return sum(host.gpus for host in self.members)

    @property
    def device_R(self) -> tuple[Device, ...]:
        """The device of each rank."""
        return tuple(host.device for host in self.members for _ in range(host.gpus))

    @property
    def host_R(self) -> IntArray:
        """The place of each rank's host among `members`."""
        return np.repeat(np.arange(len(self.members)), [host.gpus for host in self.members])

    @property
    def port_R(self) -> IntArray:
        """The NIC port (topology host) of each rank; only for clusters with a network. CPU ranks share their host's
        first one: gloo sends through one interface."""
        port = [host.port_of(0 if host.device.is_cpu else gpu) for host in self.members for gpu in range(host.gpus)]
        return np.array(port, np.int64)

    @property
    def copy_gbytes_per_s(self) -> float:
        """The slowest way to copy weights from rank to rank: a NIC between hosts, a peer link inside one."""
        if len(self.members) > 1:
            return min(min(host.nic_gbps) for host in self.members) / 8
        return min(device.peer_gbytes_per_s for device in self.device_R)

    def describe(self) -> str:
        """Such as `4 hosts, 16 h100 + 16 a100`."""
        names = [device.name for device in self.device_R]
        kinds = " + ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        return f"{len(self.members)} host{'s' if len(self.members) > 1 else ''}, {kinds}"


def make_group(cluster: Cluster, hosts: Sequence[int], tp: int = 1) -> Group:
    """Checked. Raises `ConfigError` when `tp` does not divide every host's devices."""
    members = tuple(cluster.hosts[number] for number in hosts)
    for host in members:
        if host.gpus % tp:
            raise ConfigError(f"tp = {tp}: must divide the {host.gpus} devices of {host.name}")
    return Group(hosts=tuple(hosts), members=members, tp=tp)


def request_seconds(model: ModelShape, workload: Workload, device: Device) -> float:
    """Device time of one request, arithmetic and reading only: what speeds of generations are compared by.

    Prompt tokens cost their operations; output tokens the longer of operations and reading cache and weights, the
    latter shared by `REFERENCE_SEQUENCES` sequences.
    """
    active = model.layers * model.attention.weights + model.moe_layers * (
        model.shared_weights + model.top_k * model.expert_weights
    )
    flop_s = 2 * active / (device.tflops(model.dtype) * DENSE_SHARE * 1e12)
    weights = active * model.dense_item_bytes / REFERENCE_SEQUENCES + model.kv_bytes_per_token * workload.context
    read_s = weights / (device.memory_gbytes_per_s * READ_SHARE * 1e9)
    return workload.prompt_tokens * flop_s + workload.output_tokens * max(flop_s, read_s)


def speeds_R(group: Group, model: ModelShape, workload: Workload) -> IntArray:
    """Relative speed of each rank, 1 to `MOST_SPEED`; ranks that split attention together have their slowest's."""
    seconds = {device: request_seconds(model, workload, device) for device in set(group.device_R)}
    fastest = min(seconds.values())
    return np.array([max(1, round(MOST_SPEED * fastest / seconds[device])) for device in group.device_R], np.int64)


def shares_R(total: int, speeds: IntArray) -> IntArray:
    """`total` things dealt out in proportion to speed: largest remainder, ties to the lower rank."""
    base = total * speeds // speeds.sum()
    order = np.lexsort((np.arange(speeds.size), -(total * speeds % speeds.sum())))
    base[order[: total - int(base.sum())]] += 1
    return np.asarray(base)


def experts_per_rank(experts: int, speeds: IntArray, most_R: IntArray) -> IntArray | None:
    """Experts of each rank, by speed, none above what its memory holds; None where all together hold too few.

    What a full rank cannot take goes to the others, by speed again.
    """
    if int(most_R.sum()) < experts:
        return None
    own_R, left = np.zeros_like(speeds), experts
    while left:
        room = own_R < most_R
        deal = shares_R(left, np.where(room, speeds, 0))
        given = np.minimum(deal, most_R - own_R)
        own_R += given
        left -= int(given.sum())
    return own_R


def placements(counts_LE: IntArray | None, own_R: IntArray, layers: int, experts: int) -> tuple[Placement, ...]:
    """The home of each expert, for each layer: by recorded load where `counts_LE` is given, else consecutive numbers.

    A balanced placement starts each layer at another rank among equals, so that the hottest expert is not on rank 0
    every time.
    """
    if counts_LE is None:
        one = Placement(home_E=np.repeat(np.arange(own_R.size, dtype=np.int32), own_R), ranks=own_R.size)
        return (one,) * layers
    made = []
    for layer, counts_E in enumerate(counts_LE):
        placed = Placement.from_counts(counts_E, own_R.size, own_R.tolist())
        made.append(Placement(home_E=_turned(placed.home_E, own_R, layer), ranks=own_R.size))
    return tuple(made)


def _turned(home_E: NDArray[np.int32], own_R: IntArray, layer: int) -> NDArray[np.int32]:
    """Ranks with as many experts exchange their parts in a circle, `layer` places on."""
    to = np.arange(own_R.size)
    for size in np.unique(own_R):
        alike = np.flatnonzero(own_R == size)
        to[alike] = np.roll(alike, -layer)
    return to[home_E].astype(np.int32)
