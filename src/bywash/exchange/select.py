"""Opening a GPU exchange by the algorithm that suits the step: the cost model decides, and says why.

Both ends have the same calls and results; `exchange.cost` compares them, this module adds what each of them cannot do.
Callers are users of `moe.device_layer.DeviceLayer`. `PeerExchange` does not ask: its ranks bring what they have.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError
from bywash.exchange.allgather import AllGatherDevice
from bywash.exchange.cost import Algorithm, Rates, Step, choose
from bywash.exchange.names import Combine
from bywash.exchange.peer_device import PeerDevice
from bywash.exchange.peer_layout import PeerLayout
from bywash.memory.rendezvous import Members

DeviceExchange: TypeAlias = PeerDevice | AllGatherDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which algorithm, and why it and no other."""

    algorithm: Algorithm
    why: str


def select(
    layout: PeerLayout,
    *,
    combine_mode: Combine,
    algorithm: Algorithm | Literal["auto"] = "auto",
    equal_rows: bool = False,
    overlapped: bool = False,
    remote_ranks: float | None = None,
    rates: Rates | None = None,
) -> Selection:
    """The algorithm for an exchange of this layout. Pure: ranks that pass the same get the same.

    Args:
        layout: sizes; the choice is made for full steps.
        combine_mode: see `Exchange`.
        algorithm: take this one; `auto` leaves it to the cost model.
        equal_rows: whether every rank brings the same number of rows to each step (padded; the real number of tokens is
            on the device), which all-gather needs.
        overlapped, rates: see `choose`.
        remote_ranks: see `Step`.

    Raises:
        ConfigError: an algorithm that there is not, or all-gather where it cannot be.
    """
    names = get_args(Algorithm)
    if algorithm not in ("auto", *names):
        raise ConfigError(f"algorithm {algorithm!r}: choose one of auto, {', '.join(names)}")
    obstacle = _no_all_gather(layout, combine_mode, equal_rows)
    if algorithm == "all-gather" and obstacle:
        raise ConfigError(f"algorithm all-gather: {obstacle}; use all-to-all")
    if algorithm != "auto":
        return Selection(algorithm=algorithm, why="asked for")
    if obstacle:
        return Selection(algorithm="all-to-all", why=f"the only way: {obstacle}")
    step = Step(
        ranks=layout.ranks,
        tokens=layout.tokens,
        hidden=layout.hidden,
        item_bytes=layout.dtype.itemsize,
        top_k=layout.top_k,
        experts=layout.experts,
        combine=combine_mode,
        remote_ranks=remote_ranks,
    )
    choice = choose(step, rates, overlapped=overlapped)
    return Selection(algorithm=choice.algorithm, why=choice.why)


def open_device_exchange(
    members: Members,
    layout: PeerLayout,
    home_E: NDArray[np.int32],
    *,
    combine_mode: Combine = "fast",
    algorithm: Algorithm | Literal["auto"] = "auto",
    equal_rows: bool = False,
    overlapped: bool = False,
) -> tuple[DeviceExchange, Selection]:
    """This rank's end on the current device, and how it was chosen. Every rank calls, with the same arguments.

    Args:
        members, layout, combine_mode: see `PeerDevice`.
        home_E: int32 [E], the home of every expert.
        algorithm, equal_rows, overlapped: see `select`.

    Raises:
        ConfigError, RankLostError: see `select` and `PeerDevice`.
    """
    selection = select(
        layout, combine_mode=combine_mode, algorithm=algorithm, equal_rows=equal_rows, overlapped=overlapped
    )
    kind = AllGatherDevice if selection.algorithm == "all-gather" else PeerDevice
    return kind(members, layout, home_E, combine_mode=combine_mode), selection


def _no_all_gather(layout: PeerLayout, combine_mode: Combine, equal_rows: bool) -> str | None:
    """Why all-gather cannot carry such steps, or None."""
    if combine_mode == "exact":
        return "`exact` returns every pair unsummed, there is nothing to scatter"
    if layout.fp8 != "off":
        return "fp8 rows are made while the kernel sends them"
    if not equal_rows:
        return "ranks may bring different numbers of rows"
    return None
