"""What the tests of this folder share: a fabric of eight NICs whose small switches pause, and traffic for it."""

import functools

import numpy as np

from bywash.fabric import from_matrix
from bywash.fabric.config.plan import FabricPlan, make_plan
from bywash.fabric.config.values import parse_values
from bywash.fabric.tune import Case

SMALL = {
    "name": "small",
    "topology": "leaf-spine:hosts=8,leaves=2,spines=2,links_per_pair=2,gbps=100,length_m=5,uplink_length_m=40",
    "switches": [{"asic": "sn2700", "buffer_bytes": 3 << 20}],
    "incast": 4,
}


@functools.cache
def plan_of(shape: str = "") -> FabricPlan:
    return make_plan(*parse_values(SMALL | ({"topology": shape} if shape else {})))


def skewed(seed: int, hosts: int = 8, mean_bytes: int = 300_000):
    """An all-to-all in which one receiver is due three times the mean."""
    rng = np.random.default_rng(seed)
    matrix = rng.integers(mean_bytes // 2, 3 * mean_bytes // 2, (hosts, hosts))
    matrix[:, rng.integers(hosts)] *= 3
    np.fill_diagonal(matrix, 0)
    return from_matrix(matrix)


def cases(count: int, first_seed: int = 0) -> list[Case]:
    return [Case(name=f"case {seed}", flows=skewed(seed), seed=seed) for seed in range(first_seed, first_seed + count)]
