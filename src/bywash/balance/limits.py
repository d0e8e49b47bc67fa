"""The numbers that a plan obeys, and the slots that it hands out. Integers only; knows nothing of bytes or devices.

Shapes: R ranks, S slots per rank, L layers, E experts. `ExpertParallel`, the command line and benchmarks make them;
`plan_step` reads them.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bywash.errors import ConfigError

ATTEMPTS = 16
"""Target loads that a plan tries at most, on a device one in each warp."""
REFINED = 4
"""The first attempt whose target is refined when it wins: from here on, targets are more than a percent apart."""
KEEP_ENTRIES, KEEP_MOVES, KEEP_FETCHES = 256, 24, 16
"""Work of the attempt that keeps what slots hold: slots of a layer, chains and fetches together, fetches."""
HOT_PLANS, MOST_HOT_ROWS = 32, 1 << 25
"""Plans over which an expert's rows are averaged, and the most rows that count in one."""
MOST_ROWS = (1 << 29) - 1
"""The most rows of one step over all ranks: loads and their class fit one 32-bit key."""
MOST_AGE = (1 << 30) - 1
_MOST_SPEED, _MOST_ALPHA_1024 = 4096, 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When rows leave home. All in whole rows, so that every rank decides alike.

    Attributes:
        capacity: the most rows of one expert that a rank holds at once, at home or in a slot. More at home are computed
            in waves of this many.
        alpha_1024: load that a rank keeps, in 1024ths of its fair share: 1024 asks for perfect balance.
        fetch_rows: break-even; an expert's weights are not copied for fewer rows than this.
        use_rows: a slot that already holds the weights is not used for fewer rows than this.
        speeds: relative speed of each rank, whole numbers; () for equal ranks.
        keep: plans that may be made before the step of an earlier one has ended; slots named by those are not taken.
            0 where a plan is run at once, the number of layers where decode runs under the plan before.
    """

    capacity: int = MOST_ROWS
    alpha_1024: int = 1024
    fetch_rows: int = 1
    use_rows: int = 1
    speeds: tuple[int, ...] = ()
    keep: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("capacity", self.capacity, 1, MOST_ROWS),
            ("alpha_1024", self.alpha_1024, 1024, _MOST_ALPHA_1024),
            ("fetch_rows", self.fetch_rows, 1, MOST_ROWS),
            ("use_rows", self.use_rows, 1, MOST_ROWS),
            ("keep", self.keep, 0, MOST_ROWS),
        ):
            if not least <= value <= most:
                raise ConfigError(f"limits.{name} = {value}: must be a whole number, {least} to {most}")
        if self.capacity < max(self.fetch_rows, self.use_rows):
            raise ConfigError(
                f"limits.capacity = {self.capacity}: below fetch_rows = {self.fetch_rows} or use_rows = "
                f"{self.use_rows}, so that no slot could ever be used; raise it"
            )
        for rank, speed in enumerate(self.speeds):
            if not 0 <= speed <= _MOST_SPEED:
                raise ConfigError(f"limits.speeds[{rank}] = {speed}: must be a whole number, 0 to {_MOST_SPEED}")
        if self.speeds and not any(self.speeds):
            raise ConfigError("limits.speeds: all are 0; at least one rank must compute")

    def speeds_R(self, ranks: int) -> NDArray[np.int64]:
        """int64 [R]: the speeds, 1 for each where none are given. Raises `ConfigError` for another number of ranks."""
        if self.speeds and len(self.speeds) != ranks:
            raise ConfigError(f"limits.speeds: {len(self.speeds)} for {ranks} ranks")
        return np.array(self.speeds or (1,) * ranks, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotDirectory:
    """Which foreign expert's weights lie in which slot of which rank; the same on all ranks. Never changed in place.

    Attributes:
        keys_RS: int32 [R, S], layer * E + expert, -1 for an empty slot.
        ages_RS: int32 [R, S], plans made since the last one that used the slot, at most 2^30 - 1.
        hot_LE: int32 [L, E], 32 times the rows that an expert had on average, recent plans of its layer counting most.
        layers, experts: that share the slots; layers plan in turn.
    """

    keys_RS: NDArray[np.int32]
    ages_RS: NDArray[np.int32]
    hot_LE: NDArray[np.int32]
    layers: int
    experts: int

    @classmethod
    def empty(cls, *, ranks: int, slots: int, experts: int, layers: int = 1) -> Self:
        """`slots` empty slots on each rank; 0 for none."""
        if ranks < 1 or slots < 0 or experts < 1 or layers < 1:
            raise ConfigError(f"slots: {slots} slots on {ranks} ranks for {layers} layers of {experts} experts")
        if layers * experts >= 1 << 31:
            raise ConfigError(f"slots: {layers} layers x {experts} experts are more than 2^31 - 1 keys")
        keys_RS = np.full((ranks, slots), -1, dtype=np.int32)
        return cls(
            keys_RS=keys_RS,
            ages_RS=np.zeros_like(keys_RS),
            hot_LE=np.zeros((layers, experts), np.int32),
            layers=layers,
            experts=experts,
        )

    def held(self, rank: int, layer: int) -> dict[int, int]:
        """Expert to slot: what `rank` holds of `layer`."""
        keys_S = self.keys_RS[rank]
        return {int(k) % self.experts: s for s, k in enumerate(keys_S) if k >= 0 and int(k) // self.experts == layer}
