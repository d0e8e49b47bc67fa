"""What every host is due from the others in a step: what the schedule `by-counts` divides a host's link by.

Each rank works out, token by token, how many rows it sends to each host and how many outputs come back. These words
go to its gateways in the header before the rows, and the ranks of a host, who together are gateways of all others, then
tell each other: so every rank knows every rank's words, of this very step, also where its plan is an earlier one's.

Shapes: R ranks, H hosts, W = H + 1 words. Pure arithmetic; knows nothing of processes. `hierarchical` calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bywash.exchange.host_map import HostMap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Due:
    """What crosses to each host in one step.

    Attributes:
        rows_H: int64 [H], rows that its ranks get from all other hosts.
        outputs_H: int64 [H], outputs that come back to its ranks.
    """

    rows_H: NDArray[np.int64]
    outputs_H: NDArray[np.int64]


def due_words(rows: Sequence[int], outputs: int, here: int) -> NDArray[np.int32]:
    """One rank's words, int32 [W]: rows that it sends to each host, none to its own; then outputs that come back.

    Example: a rank of host 1 sends 5 rows to host 0 and 2 to host 2, and 8 outputs come back: [5, 0, 2, 8].

    Args:
        rows: to each other host [H - 1].
        outputs: from all of them.
        here: its own host.
    """
    return np.array([*rows[:here], 0, *rows[here:], outputs], np.int32)


def due_by_host(words_RW: NDArray[np.int32], hosts: HostMap) -> Due:
    """From the words of all ranks."""
    words_RW = words_RW.astype(np.int64)
    back_H = np.zeros(hosts.hosts, np.int64)
    np.add.at(back_H, np.array(hosts.host_R), words_RW[:, -1])
    return Due(rows_H=words_RW[:, :-1].sum(axis=0), outputs_H=back_H)
