import pytest
import torch

from tests.ranks import RankPool


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools():
    """Ask for `pools(n)`: n rank processes that stay for the whole session, since starting them takes seconds."""
    opened: dict[int, RankPool] = {}

    def pool(ranks: int) -> RankPool:
        if ranks not in opened or not opened[ranks].healthy:
            opened[ranks] = RankPool(ranks)
        return opened[ranks]

    yield pool
    for one in opened.values():
        one.close()
