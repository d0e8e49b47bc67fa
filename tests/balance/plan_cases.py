"""Random and adversarial count matrices with limits and slots, for tests and the long sweep."""

from dataclasses import dataclass

import numpy as np

from bywash.balance import Limits, Placement, SlotDirectory
from bywash.balance.naive import plan_limits_naive

SHAPES = ("random", "one expert", "one source", "one donor", "top-1", "fewer rows than experts", "equal", "nothing")


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """Plans in turn over the layers of one directory: `counts` int32 [plans, R, E]."""

    counts: np.ndarray
    placement: Placement
    limits: Limits
    directory: SlotDirectory


class Oracle:
    """The naive planner with its directory, plan after plan: what the device's arrays must be. Needs no numba."""

    def __init__(self, placement, limits, directory):
        self._home, self._limits, self._hot = placement.home_E.tolist(), limits, directory.hot_LE.tolist()
        self._keys, self._ages = directory.keys_RS.tolist(), directory.ages_RS.tolist()
        self._shape = directory.keys_RS.shape

    def __call__(self, counts_RE, layer=0):
        """Arrays by the names that `DevicePlanner` gives them."""
        plan = plan_limits_naive(counts_RE.tolist(), self._home, self._limits, self._keys, self._ages, self._hot, layer)
        self._keys, self._ages, self._hot = plan.keys, plan.ages, plan.hot
        rows_ER = np.array(plan.rows, np.int32)
        slots = {"keys_RS": plan.keys, "ages_RS": plan.ages, "fetch_RS": plan.fetch}
        arrays = {name: np.array(value, np.int32).reshape(self._shape) for name, value in slots.items()}
        digest, hot_LE = np.array([plan.digest], np.uint32), np.array(plan.hot, np.int32)
        arrays["hot_LE"] = hot_LE
        return arrays | {"rows_ER": rows_ER, "rows_R": rows_ER.sum(axis=0, dtype=np.int64), "digest": digest}


def draw_case(rng, *, most_ranks=6, most_experts=14, most_slots=4, plans=6):
    ranks, experts = int(rng.integers(1, most_ranks + 1)), int(rng.integers(1, most_experts + 1))
    layers = int(rng.integers(1, 4))
    home_E = rng.integers(0, ranks, experts).astype(np.int32)
    if rng.random() < 0.5:
        home_E = Placement.equal(experts, ranks).home_E
    speeds = (1, *(int(speed) for speed in rng.integers(0, 6, ranks - 1)))
    capacity = int(rng.choice([1, 3, 10, 50, 10**6]))
    limits = Limits(
        capacity=capacity,
        alpha_1024=int(rng.choice([1024, 1100, 1500])),
        fetch_rows=min(capacity, int(rng.choice([1, 2, 9, 60]))),
        use_rows=min(capacity, int(rng.choice([1, 2, 5]))),
        speeds=speeds if rng.random() < 0.4 else (),
        keep=int(rng.choice([0, layers])),
    )
    slots = int(rng.integers(0, most_slots + 1))
    return PlanCase(
        counts=draw_steps(rng, ranks, experts, plans, layers),
        placement=Placement(home_E=home_E, ranks=ranks),
        limits=limits,
        directory=SlotDirectory.empty(ranks=ranks, slots=slots, experts=experts, layers=layers),
    )


def draw_steps(rng, ranks, experts, plans, layers):
    """int32 [plans, R, E] of layers in turn; half of the time a layer's counts are nearly those of its last plan."""
    steady, counts = rng.random() < 0.5, []
    for number in range(plans):
        if steady and number >= layers:
            counts.append(draw_like(rng, counts[number - layers]))
        else:
            counts.append(draw_counts(rng, ranks, experts, rng.choice(SHAPES)))
    return np.stack(counts)


def draw_like(rng, counts_RE):
    """Counts that differ little from given ones."""
    return np.where(counts_RE > 0, counts_RE + rng.integers(-2, 3, counts_RE.shape), 0).clip(min=0).astype(np.int32)


def draw_counts(rng, ranks, experts, shape):
    """int32 [R, E] of one of `SHAPES`."""
    counts = rng.geometric(1 / (1 + rng.integers(0, 20)), size=(ranks, experts)) - 1
    if shape == "one expert":
        counts[:, np.arange(experts) != rng.integers(experts)] = 0
        counts *= 20
    elif shape == "one source":
        counts[np.arange(ranks) != rng.integers(ranks)] = 0
    elif shape == "one donor":
        counts[:, : experts // ranks + 1] *= 30
    elif shape == "top-1":
        counts = np.stack([rng.multinomial(rng.integers(0, 100), rng.dirichlet(np.full(experts, 0.3))) for _ in counts])
    elif shape == "fewer rows than experts":
        counts = (rng.random((ranks, experts)) < 1 / (1 + ranks * experts)).astype(np.int64)
    elif shape == "equal":
        counts[:] = rng.integers(0, 4)
    elif shape == "nothing":
        counts[:] = 0
    return counts.astype(np.int32)
