"""The oracle of `node_pack` and of `NodeDevice`: token by token, in plain Python. Slow and obvious.

Shapes: as in `node_layout`. Knows nothing of waves being sent, devices or processes; tests call it.
"""

import torch
from torch import Tensor

from bywash.exchange.host_map import HostMap
from bywash.exchange.node_layout import NodeLayout
from bywash.exchange.rows import weighted_sum

Slot = tuple[int, int, tuple[int, ...]]
"""What lies in a slot: the token, its host, and for each k the expert's place on that host or -1."""


def slots_naive(ids_TK: Tensor, rank_E: list[int], hosts: HostMap, here: int, layout: NodeLayout) -> dict[int, Slot]:
    """What lies in each slot that is filled, when all waves are sent."""
    others = [host for host in range(hosts.hosts) if host != here]
    by_host = [[e for e, rank in enumerate(rank_E) if hosts.host_R[rank] == host] for host in range(hosts.hosts)]
    found = {}
    for number, host in enumerate(others):
        sent = 0
        for token, ids in enumerate(ids_TK.tolist()):
            places = tuple(by_host[host].index(e) if e in by_host[host] else -1 for e in ids)
            if max(places) < 0:
                continue
            wave, row = divmod(sent, layout.capacity)
            found[(wave * layout.others + number) * layout.capacity + row] = (token, host, places)
            sent += 1
    return found


def outputs_naive(
    y_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor, rank_E: list[int], hosts: HostMap, layout: NodeLayout
) -> Tensor:
    """[T, D]: what combine has to return for outputs [T, K, D] of all pairs, in the layout's mode.

    `fast` inside a host is the sum over its ranks of their sums, each rounded once.
    """
    if layout.combine == "exact":
        return weighted_sum(y_TKD[ids_TK >= 0], ids_TK, weights_TK)
    home_TK = torch.tensor([*rank_E, -1])[ids_TK]
    total = torch.zeros(y_TKD.shape[0], y_TKD.shape[2])
    for ranks in hosts.members:
        of_host = torch.zeros(y_TKD.shape[0], y_TKD.shape[2])
        for rank in ranks:
            here_TK = torch.where(home_TK == rank, ids_TK, -1)
            of_host += weighted_sum(y_TKD[here_TK >= 0], here_TK, weights_TK).float()
            if layout.combine == "stable":
                total += of_host
                of_host.zero_()
        total += of_host.to(y_TKD.dtype).float()
    return total.to(y_TKD.dtype)
