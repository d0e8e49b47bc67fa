"""Pure arithmetic of the `hierarchical` exchange: who gets which rows, and how outputs are added.

Shapes: T tokens of this rank, K experts per token, D hidden, R ranks, H hosts, E experts, P rows for one host,
M (row, expert) pairs, O outputs that one host returns. Knows nothing of processes or transports.

Returned outputs are, for each row for a host: `pairs`, all of them in k order; `homes`, one sum per home rank that the
row has experts of, in rank order; or `sum`, one.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance import StepPlan, ranks_of_pairs
from bywash.exchange.host_map import HostMap
from bywash.exchange.rows import weighted_sum
from bywash.routing import Routing

Outputs = Literal["pairs", "homes", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRows:
    """The tokens of this rank that one host computes for.

    Attributes:
        tokens_P: int64 [P], ascending; each token once.
        names_PK: int64 [P, K], index of the computing rank on that host x E + expert; -1 for pairs that are elsewhere.
        weights_PK: float32 [P, K].
    """

    tokens_P: Tensor
    names_PK: Tensor
    weights_PK: Tensor

    @property
    def pairs(self) -> int:
        """(row, expert) pairs that the host computes."""
        return int(np.count_nonzero(self.names_PK.numpy() >= 0))


def rows_per_host(routing: Routing, plan: StepPlan, source: int, hosts: HostMap) -> list[NodeRows]:
    """What each host computes for the tokens of rank `source`, by host.

    Example: ids_TK = [[0, 1], [1, 2]], experts 0, 1, 2 on ranks 0, 1, 2, and ranks 1 and 2 on host 1: host 0 gets
    token 0 with names [[0, -1]], host 1 gets tokens 0 and 1 with [[-1, 1], [1, 3 + 2]].
    """
    ids_TK = routing.ids_TK.numpy()
    rank_TK = ranks_of_pairs(plan, source, ids_TK)
    name_TK = np.append(hosts.index_R, 0)[rank_TK] * routing.num_experts + ids_TK
    host_TK = np.append(hosts.host_R, -1)[rank_TK]
    rows = []
    for host in range(hosts.hosts):
        here_TK = host_TK == host
        tokens_P = torch.from_numpy(np.flatnonzero(here_TK.any(axis=1)))
        rows.append(
            NodeRows(
                tokens_P=tokens_P,
                names_PK=torch.from_numpy(np.where(here_TK, name_TK, -1)[tokens_P.numpy()]),
                weights_PK=routing.weights_TK.detach()[tokens_P],
            )
        )
    return rows


def home_order(names_PK: Tensor, experts: int, rank_E: NDArray[np.int32]) -> tuple[Tensor, Tensor, Tensor]:
    """The (row, home rank) groups of a message, by row, then rank: their rows [O], ranks [O]; each pair's home [P, K].

    Example: experts 0, 1 at home on rank 0, 2 on rank 1; names [[1, 2], [-1, 0]] give rows [0, 0, 1], ranks [0, 1, 0].
    """
    home_PK = torch.from_numpy(np.append(rank_E, -1).astype(np.int64))[
        torch.where(names_PK >= 0, names_PK % experts, rank_E.size)
    ]
    ranks = int(rank_E.max(initial=0)) + 1
    keys_M = (torch.arange(names_PK.shape[0])[:, None] * ranks + home_PK)[names_PK >= 0]
    keys_O = torch.unique(keys_M)  # sorted
    return keys_O // ranks, keys_O % ranks, home_PK


def outputs_per_host(rows: NodeRows, kind: Outputs, experts: int, rank_E: NDArray[np.int32]) -> int:
    """O: how many outputs come back for `rows`."""
    if kind == "pairs":
        return rows.pairs
    return rows.tokens_P.numel() if kind == "sum" else home_order(rows.names_PK, experts, rank_E)[0].numel()


def sum_homes(y_MD: Tensor, names_PK: Tensor, weights_PK: Tensor, experts: int, rank_E: NDArray[np.int32]) -> Tensor:
    """[O, D]: each (row, home rank) group summed in k order in float32, rounded once to the dtype of `y_MD`."""
    row_O, home_O, home_PK = home_order(names_PK, experts, rank_E)
    valid_PK = names_PK >= 0
    position_PK = (valid_PK.reshape(-1).cumsum(0) - 1).view_as(valid_PK)
    mine_OK = valid_PK[row_O] & (home_PK[row_O] == home_O[:, None])
    picked = y_MD[position_PK[row_O][mine_OK]]
    return weighted_sum(picked, torch.where(mine_OK, 0, -1), weights_PK[row_O])


def add_pairs(parts: list[Tensor], rows: list[NodeRows], routing: Routing) -> Tensor:
    """`exact`: [T, D], each token's outputs added in k order, wherever they were computed."""
    return weighted_sum(_in_token_order(parts, rows, routing), routing.ids_TK, routing.weights_TK.detach())


def add_homes(parts: list[Tensor], rows: list[NodeRows], routing: Routing, plan: StepPlan) -> Tensor:
    """`stable`: [T, D], the sums of each token's home ranks added in rank order."""
    orders = [home_order(one.names_PK, routing.num_experts, plan.rank_E) for one in rows]
    y_OD, home_O = torch.cat(parts), torch.cat([home for _, home, _ in orders])
    token_O = torch.cat([one.tokens_P[row_O] for one, (row_O, _, _) in zip(rows, orders, strict=True)])
    return _add_by_home(y_OD, token_O, home_O, routing.tokens)


def add_pairs_by_home(parts: list[Tensor], rows: list[NodeRows], routing: Routing, plan: StepPlan) -> Tensor:
    """`stable` from outputs that came unsummed: what the homes would have summed, then as `add_homes`."""
    y_MD = _in_token_order(parts, rows, routing)
    experts, ids_TK = routing.num_experts, routing.ids_TK
    token_O, home_O, _ = home_order(ids_TK, experts, plan.rank_E)
    y_OD = sum_homes(y_MD, ids_TK, routing.weights_TK.detach(), experts, plan.rank_E)
    return _add_by_home(y_OD, token_O, home_O, routing.tokens)


def add_sums(parts: list[Tensor], rows: list[NodeRows], x_TD: Tensor) -> Tensor:
    """`fast`: [T, D], one sum per host, added in the order of hosts in float32."""
    total_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
    for part, one in zip(parts, rows, strict=True):
        total_TD[one.tokens_P] += part.float()
    return total_TD.to(x_TD.dtype)


def _add_by_home(y_OD: Tensor, token_O: Tensor, home_O: Tensor, tokens: int) -> Tensor:
    total_TD = torch.zeros(tokens, y_OD.shape[1], dtype=torch.float32)
    for home in home_O.unique().tolist():
        of_home = (home_O == home).nonzero()[:, 0]
        total_TD[token_O[of_home]] += y_OD[of_home].float()
    return total_TD.to(y_OD.dtype)


def _in_token_order(parts: list[Tensor], rows: list[NodeRows], routing: Routing) -> Tensor:
    """[M, D]: outputs of all pairs, token by token in k order."""
    valid_TK = routing.ids_TK >= 0
    position_TK = (valid_TK.reshape(-1).cumsum(0) - 1).view_as(valid_TK)
    y_MD = parts[0].new_empty(sum(part.shape[0] for part in parts), parts[0].shape[1])
    for part, one in zip(parts, rows, strict=True):
        y_MD[position_TK[one.tokens_P][one.names_PK >= 0]] = part
    return y_MD
