"""`Setting`: one choice of every parameter that the tuner may change, and the `Space` of choices that it searches.

A setting is in the units of the values file, so that what wins can be written there as it is. Its parameters fall into
groups that an operator changes together: marking, pause threshold, notification, decrease, increase, sending.
References are settings that others recommend; the search starts from them, and its result is held against them.

Knows nothing of topologies or simulation. `search` draws from it, `objective` turns a setting into a scenario.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bywash.errors import ConfigError
from bywash.fabric.config.thresholds import KMIN_PER_GBPS_BYTES
from bywash.fabric.config.values import Reaction

KIB = 1024
PAPER_GBPS = 40.0
NO_MARKING_BYTES = 1 << 30
HYPER = 10
"""Hyper increase over additive increase: the paper's 400 to 40 Mb/s, and what the NIC script writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Values of every tunable parameter; ECN thresholds are for links of `Space.gbps`.

    Attributes:
        kmin_bytes, kmax_bytes, pmax_percent: the WRED line.
        dynamic_th: alpha of lossless priority groups, as a power of two.
        cnp_interval_us: least time between notifications (and so between cuts) of a QP.
        alpha_g, alpha_timer_us: ConnectX's gain (g = 1 - alpha_g / 1024) and the period of its decay.
        increase_timer_us, byte_counter_bytes, fast_recovery_steps, increase_mbps: how rates come back.
        active: messages that a NIC has under way at once; 0 for all of them.
        pace_gbps: cap on the rate of a QP; 0 for none.
        pace_by_counts: cap on a message, over its share of the receiver's link (see `sending`); 0 for none.
    """

    kmin_bytes: int
    kmax_bytes: int
    pmax_percent: int
    increase_mbps: int
    dynamic_th: int = 0
    cnp_interval_us: int = Reaction().cnp_interval_us
    alpha_g: int = Reaction().alpha_g
    alpha_timer_us: int = Reaction().alpha_timer_us
    increase_timer_us: int = Reaction().increase_timer_us
    byte_counter_bytes: int = Reaction().byte_counter_bytes
    fast_recovery_steps: int = Reaction().fast_recovery_steps
    active: int = 0
    pace_gbps: float = 0.0
    pace_by_counts: float = 0.0


PARAMETERS = tuple(Setting.__dataclass_fields__)
GROUPS: dict[str, tuple[str, ...]] = {
    "marking": ("kmin_bytes", "kmax_bytes", "pmax_percent"),
    "pause threshold": ("dynamic_th",),
    "notification": ("cnp_interval_us",),
    "decrease": ("alpha_g", "alpha_timer_us"),
    "increase": ("increase_timer_us", "byte_counter_bytes", "fast_recovery_steps", "increase_mbps"),
    "sending": ("active", "pace_gbps", "pace_by_counts"),
}

Bounds = Callable[[int], tuple[float, float]]
"""From `dynamic_th` to what Kmin and Kmax must stay below, in bytes at the space's rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Levels of each parameter, in order, for links of `gbps`; and the bounds past which PFC could precede ECN."""

    gbps: float
    levels: Mapping[str, tuple[Any, ...]]
    bounds: Bounds

    def allows(self, setting: Setting) -> bool:
        """Whether a values file may have it: thresholds in order, and marking before pausing at every port.

        Shares of a receiver's link are for messages that start together, so that they go with no other pace or order.
        """
        if setting.pace_by_counts and (setting.active or setting.pace_gbps):
            return False
        kmin_below, kmax_below = self.bounds(setting.dynamic_th)
        return setting.kmin_bytes <= setting.kmax_bytes < kmax_below and setting.kmin_bytes < kmin_below

    def mutate(self, setting: Setting, rng: np.random.Generator, *, share: float) -> Setting:
        """Each parameter is drawn anew with probability `share`; at least one is. Allowed, whatever `setting` was."""
        for _ in range(10_000):
            chosen = rng.random(len(PARAMETERS)) < share
            chosen[rng.integers(len(PARAMETERS))] = True
            fresh = {
                name: self.levels[name][rng.integers(len(self.levels[name]))]
                for name, drawn in zip(PARAMETERS, chosen)
                if drawn
            }
            made = replace(setting, **fresh)
            if made != setting and self.allows(made):
                return made
        raise ConfigError(
            "tune: no setting lets ECN mark before PFC pauses on this fabric; see `bywash fabric headroom`"
        )

    def step(self, setting: Setting, rng: np.random.Generator) -> Setting:
        """One or two parameters moved to the next level up or down. Allowed."""
        movable = [name for name in PARAMETERS if len(self.levels[name]) > 1]
        for _ in range(10_000):
            names = rng.choice(movable, size=int(rng.integers(1, 3)), replace=False)
            made = replace(setting, **{str(name): self._beside(str(name), setting, rng) for name in names})
            if made != setting and self.allows(made):
                return made
        return self.mutate(setting, rng, share=0.2)

    def _beside(self, name: str, setting: Setting, rng: np.random.Generator) -> Any:
        levels, value = self.levels[name], getattr(setting, name)
        at = min(range(len(levels)), key=lambda i: abs(levels[i] - value))
        return levels[int(np.clip(at + rng.choice((-1, 1)), 0, len(levels) - 1))]


def make_space(gbps: float, bounds: Bounds, *, sending: bool) -> Space:
    """The usual levels for NICs of this rate. Without `sending`, schedule and pacing stay as the traffic has them."""
    scale = [round(KMIN_PER_GBPS_BYTES * gbps * 2.0**i / KIB) * KIB for i in range(-6, 3)]
    levels: dict[str, tuple[Any, ...]] = {
        "kmin_bytes": tuple(scale),
        "kmax_bytes": tuple(scale),
        "pmax_percent": (1, 2, 5, 10, 20, 50, 100),
        "dynamic_th": (-3, -2, -1, 0, 1, 2, 3),
        "cnp_interval_us": (4, 10, 25, 50, 100),
        "alpha_g": (960, 992, 1008, 1016, 1019, 1020),
        "alpha_timer_us": (1, 5, 20, 55),
        "increase_timer_us": (10, 25, 55, 100, 300),
        "byte_counter_bytes": (32_767, 262_144, 2_097_152, 10_000_000),
        "fast_recovery_steps": (1, 2, 5),
        "increase_mbps": tuple(max(1, round(gbps * factor)) for factor in (0.1, 0.25, 1, 2.5, 10)),
        "active": (0, 1, 2, 4, 8) if sending else (0,),
        "pace_gbps": (0.0, *(gbps / share for share in (128, 64, 32, 16, 8, 4, 2))) if sending else (0.0,),
        "pace_by_counts": (0.0, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0) if sending else (0.0,),
    }
    return Space(gbps=gbps, levels=levels, bounds=bounds)


def vendor(gbps: float) -> Setting:
    """SONiC's AZURE_LOSSLESS profile, `dynamic_th` 0 of its Mellanox tables, ConnectX's DCQCN as `Reaction` has it.

    The additive increase is `Reaction`'s too: 1 Mb/s for each Gb/s of the NIC.
    """
    return Setting(kmin_bytes=1_048_576, kmax_bytes=2_097_152, pmax_percent=5, increase_mbps=max(1, round(gbps)))


def paper(gbps: float = PAPER_GBPS) -> Setting:
    """Zhu et al., SIGCOMM 2015, for 40 Gb/s. With another rate, thresholds and increase in proportion to it."""
    factor = gbps / PAPER_GBPS
    return Setting(
        kmin_bytes=round(5_000 * factor),
        kmax_bytes=round(200_000 * factor),
        pmax_percent=1,
        cnp_interval_us=50,
        alpha_g=1020,  # g = 1/256
        alpha_timer_us=55,
        increase_timer_us=55,
        byte_counter_bytes=10_000_000,
        fast_recovery_steps=5,
        increase_mbps=max(1, round(40 * factor)),
    )


def pfc_alone(gbps: float) -> Setting:
    """No congestion control: marking begins beyond any buffer, so that only pauses hold senders back."""
    return replace(vendor(gbps), kmin_bytes=NO_MARKING_BYTES, kmax_bytes=NO_MARKING_BYTES)


def changes(setting: Setting, base: Setting) -> dict[str, tuple[Any, Any]]:
    """Parameter -> (base's value, setting's), where they differ."""
    pairs = {name: (getattr(base, name), getattr(setting, name)) for name in PARAMETERS}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def revert(setting: Setting, base: Setting, group: str) -> Setting:
    """The setting with the parameters of one group as `base` has them."""
    return replace(setting, **{name: getattr(base, name) for name in GROUPS[group]})


def gain(alpha_g: int) -> float:
    """DCQCN's g from ConnectX's `dce_tcp_g`, in 1/1024: alpha keeps alpha_g / 1024 of itself."""
    return 1 - alpha_g / 1024
