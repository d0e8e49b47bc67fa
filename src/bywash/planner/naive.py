"""Row counts the slow, obvious way: one token at a time, with sets. The oracle of `moe_traffic.rows_between`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bywash.planner.moe_traffic import Method


def rows_between(
    ids_NK: Sequence[Sequence[int]], rank_N: Sequence[int], home_E: Sequence[int], ranks: int, method: Method
) -> tuple[NDArray[np.int64], int]:
    """As `moe_traffic.rows_between`."""
    gpus = method.gpus_per_server
    rows_RR = np.zeros((ranks, ranks), np.int64)
    local = 0
    for ids_K, source in zip(ids_NK, rank_N):
        reached: set[int] = set()
        for expert in ids_K:
            home = int(home_E[expert])
            place = home // gpus if method.rows == "per-node" else home
            if method.rows != "per-expert" and place in reached:
                continue
            reached.add(place)
            if home // gpus == source // gpus:
                local += 1
                continue
            sender, receiver = source, home
            if method.path == "hierarchical" and method.rows == "per-node":
                receiver = home // gpus * gpus + source % gpus
            elif method.path == "hierarchical":
                sender = source // gpus * gpus + home % gpus
            rows_RR[sender, receiver] += 1
    return rows_RR, local
