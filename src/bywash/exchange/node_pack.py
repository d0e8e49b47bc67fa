"""Arithmetic of the node leg on GPUs: which token lies in which slot, and how outputs of hosts are added. No host sync.

Everything is a fixed number of torch operations on tensors of fixed shapes, so it can be captured in a CUDA graph; it
runs on any device. `node_naive` is the oracle, `node_device` the caller. Knows nothing of transports.

Shapes: as in `node_layout`: T tokens, K experts per token, O other hosts, S slots, D hidden, E experts, R ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.exchange.host_map import HostMap
from bywash.exchange.node_layout import NodeLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Who computes what, on the device; index -1 is for no expert.

    Attributes:
        host_E: int64 [E + 1], the number of each expert's host, then -1.
        local_E: int64 [E + 1], each expert's place among those of its host, by id, then -1.
        rank_E: int64 [E + 1], each expert's rank, then -1.
        others_O: int64 [O], the numbers of the other hosts, ascending.
        here: the number of this host.
        ranks: R.
    """

    host_E: Tensor
    local_E: Tensor
    rank_E: Tensor
    others_O: Tensor
    here: int
    ranks: int

    @classmethod
    def of(cls, rank_E: NDArray[np.int32], hosts: HostMap, here: int, device: str) -> "Tables":
        """For experts at home on `rank_E`.

        Example: experts on ranks 0, 2, 1 with ranks 0 and 1 on host 0: host_E 0, 1, 0 and local_E 0, 0, 1.
        """
        host_E = np.asarray(hosts.host_R)[rank_E]
        local_E = np.zeros(rank_E.size, np.int64)
        for host in range(hosts.hosts):
            local_E[host_E == host] = np.arange(np.count_nonzero(host_E == host))

        def table(values: NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(np.append(values, -1).astype(np.int64)).to(device)

        others = [host for host in range(hosts.hosts) if host != here]
        return cls(
            host_E=table(host_E),
            local_E=table(local_E),
            rank_E=table(rank_E),
            others_O=torch.tensor(others, dtype=torch.int64, device=device),
            here=here,
            ranks=len(hosts.host_R),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One step on the source.

    Attributes:
        place_OT: int64 [O, T], the slot of each token among what goes to each other host; -1 where it does not go, or
            where the waves are full.
        token_S: int64 [S], the token in each slot; 0 in empty ones.
        meta_SJ: int32 [S, 2K], for each slot the expert's place on that host or -1, then the bits of the weights.
        own_TK: int64 [T, K], the expert's place for pairs that this host computes, -1 for others.
        most: int64 [1], the most rows that any host needs.
    """

    place_OT: Tensor
    token_S: Tensor
    meta_SJ: Tensor
    own_TK: Tensor
    most: Tensor


def pack(known_TK: Tensor, weights_TK: Tensor, tables: Tables, layout: NodeLayout, waves: int) -> Packed:
    """Give each token a slot for every other host that it needs, in the order of tokens.

    Example: one other host, 2 rows a wave; tokens 0, 2 and 3 need it: slots 0, -1, 1, 2; token_S is 0, 2, 3, 0.

    Args:
        known_TK: int64, experts, -1 for none and for tokens that are padding.
        weights_TK: float32.
        tables, layout: of the exchange.
        waves: how many will be sent.
    """
    rows, slots, device = known_TK.shape[0], layout.slots(waves), known_TK.device
    host_TK, local_TK = tables.host_E[known_TK], tables.local_E[known_TK]
    sent_OT = (host_TK == tables.others_O[:, None, None]).any(dim=2)
    count_OT = sent_OT.cumsum(dim=1)
    number_OT = count_OT - 1
    fits_OT = sent_OT & (number_OT < waves * layout.capacity)
    at_O1 = torch.arange(layout.others, device=device)[:, None]
    slot_OT = (number_OT // layout.capacity * layout.others + at_O1) * layout.capacity + number_OT % layout.capacity
    target = torch.where(fits_OT, slot_OT, slots).reshape(-1)  # tokens without a slot write past the end
    tokens = torch.arange(rows, device=device).expand(layout.others, rows).reshape(-1)
    token_S = torch.full((slots + 1,), -1, dtype=torch.int64, device=device).scatter_(0, target, tokens)[:slots]
    filled_S, token_S = token_S >= 0, token_S.clamp(min=0)
    host_S = tables.others_O[:, None].expand(layout.others, layout.capacity).reshape(-1).repeat(waves)
    if not rows:
        return _nothing(layout, slots, known_TK)
    here_SK = filled_S[:, None] & (host_TK[token_S] == host_S[:, None])
    names_SK = torch.where(here_SK, local_TK[token_S], -1).to(torch.int32)
    return Packed(
        place_OT=torch.where(fits_OT, slot_OT, -1),
        token_S=token_S,
        meta_SJ=torch.cat([names_SK, weights_TK[token_S].view(torch.int32)], dim=1),
        own_TK=torch.where(host_TK == tables.here, local_TK, -1),
        most=count_OT[:, -1].amax(dim=0, keepdim=True),
    )


def _nothing(layout: NodeLayout, slots: int, known_TK: Tensor) -> Packed:
    """A rank without tokens still sends its empty slots."""
    top_k = known_TK.shape[1]
    meta_SJ = torch.zeros(slots, 2 * top_k, dtype=torch.int32, device=known_TK.device)
    meta_SJ[:, :top_k] = -1
    return Packed(
        place_OT=known_TK.new_empty(layout.others, 0),
        token_S=known_TK.new_zeros(slots),
        meta_SJ=meta_SJ,
        own_TK=known_TK,
        most=known_TK.new_zeros(1),
    )


def add_hosts(own_TD: Tensor, back_SD: Tensor, place_OT: Tensor, tables: Tables) -> Tensor:
    """[T, D]: one sum for each host, added in the order of hosts in float32, rounded once."""
    total_TD = torch.zeros(own_TD.shape, dtype=torch.float32, device=own_TD.device)
    for host in range(place_OT.shape[0] + 1):
        if host == tables.here:
            total_TD += own_TD
            continue
        place_T = place_OT[host - (host > tables.here)]
        total_TD += torch.where((place_T >= 0)[:, None], back_SD[place_T.clamp(min=0)], 0)
    return total_TD.to(own_TD.dtype)


def add_pairs(
    own_MD: Tensor, back_MD: Tensor, place_OT: Tensor, known_TK: Tensor, weights_TK: Tensor, tables: Tables
) -> Tensor:
    """`exact`: [T, D], all pairs added in k order in float32; a product, then an addition, never one FMA.

    Args:
        own_MD: outputs of this host, K for each token.
        back_MD: outputs of other hosts, K for each slot.
        place_OT: of the step.
        known_TK, weights_TK: as for `pack`.
        tables: of the exchange.
    """
    total_TD = torch.zeros(known_TK.shape[0], own_MD.shape[1], dtype=torch.float32, device=own_MD.device)
    for k in range(known_TK.shape[1]):
        total_TD += _weighted(own_MD, back_MD, place_OT, known_TK, weights_TK, tables, k)
    return total_TD.to(own_MD.dtype)


def add_homes(
    own_MD: Tensor, back_MD: Tensor, place_OT: Tensor, known_TK: Tensor, weights_TK: Tensor, tables: Tables
) -> Tensor:
    """`stable` from unsummed pairs: as each home rank would have summed and rounded, added in rank order."""
    home_TK = tables.rank_E[known_TK]
    total_TD = torch.zeros(known_TK.shape[0], own_MD.shape[1], dtype=torch.float32, device=own_MD.device)
    for rank in range(tables.ranks):
        sum_TD = torch.zeros_like(total_TD)
        for k in range(known_TK.shape[1]):
            term_TD = _weighted(own_MD, back_MD, place_OT, known_TK, weights_TK, tables, k)
            sum_TD += torch.where((home_TK[:, k] == rank)[:, None], term_TD, 0)
        total_TD += sum_TD.to(own_MD.dtype)
    return total_TD.to(own_MD.dtype)


def _weighted(
    own_MD: Tensor, back_MD: Tensor, place_OT: Tensor, known_TK: Tensor, weights_TK: Tensor, tables: Tables, k: int
) -> Tensor:
    """float32 [T, D]: each token's k-th output times its weight, 0 where there is none."""
    rows, top_k = known_TK.shape
    host_T = tables.host_E[known_TK[:, k]]
    token_T = torch.arange(rows, device=known_TK.device)
    # The other hosts' numbers without this one's: -1 for tokens that stay here.
    other_T = torch.where(host_T == tables.here, -1, host_T - (host_T > tables.here).long())
    place_T = place_OT[other_T.clamp(min=0), token_T]
    away_TD = back_MD[place_T.clamp(min=0) * top_k + k]
    y_TD = torch.where((host_T == tables.here)[:, None], own_MD[token_T * top_k + k], away_TD)
    return torch.where((host_T >= 0)[:, None], y_TD.float() * weights_TK[:, k, None], 0)
