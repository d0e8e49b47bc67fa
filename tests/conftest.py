"""What all tests share: examples that are the same in every run, seeds, and rank processes that stay.

The default lane decides whether a change is taken, so nothing in it depends on chance or on the machine's load:
hypothesis draws the same examples each time and counts no milliseconds. `--hypothesis-profile=search` draws others.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import warm
from tests.ranks import RankPool

settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("search", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_numbers():
    """What a test draws without a generator of its own does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def pools():
    """Ask for `pools(n)`: n rank processes that stay for the whole session, since starting them takes seconds."""
    warm.balance()  # else every rank would compile for itself
    opened: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        if ranks not in opened or not opened[ranks].healthy:
            opened[ranks] = RankPool(ranks)
        return opened[ranks]

    yield pool
    for one in opened.values():
        one.close()
