"""Random pauses between the steps of the protocol, fresh inputs, poisoned buffers: 10,000 steps and no stale row."""

import time

import pytest

from tests.exchange.shm_steps import SOUND_STEPS, soak
from tests.ranks import RankPool

STEPS = 10_000


@pytest.mark.parametrize(
    ("ranks", "share", "mode", "in_flight"),
    [(2, 0.4, "exact", 1), (2, 0.2, "fast", 2), (3, 0.2, "stable", 1), (4, 0.2, "exact", 2)],
)
def test_no_step_of_a_long_run_sees_stale_data(pools, ranks, share, mode, in_flight):
    """The four cases together run 10,000 steps, counted over the ranks."""
    steps = int(STEPS * share / ranks)
    began = time.monotonic()
    assert pools(ranks).run(soak, steps, 7, mode, in_flight) == [None] * ranks
    print(f"{ranks} ranks x {steps} steps, {mode}: {(time.monotonic() - began) / steps * 1e6:.0f} us per step")


@pytest.mark.parametrize("skipped", ["COUNTS", "ROWS", "OUTPUTS"])
def test_the_soak_finds_a_missing_wait(skipped):
    """The same run with one wait left out, once it is under way, goes wrong: so the test above would notice."""
    pool = RankPool(2)
    try:
        pool.send(soak, [(1500, 7, "exact", 1, skipped)] * 2)
        found = [pool.receive(rank) for rank in range(2)]
    finally:
        pool.close()
    # Usually the first wrong step; stale headers may also put rows where they do not fit.
    wrong_steps = [one for one in found if isinstance(one, int)]
    assert wrong_steps or any(isinstance(one, Exception) for one in found), f"{skipped} not awaited, nobody noticed"
    assert all(step >= SOUND_STEPS // 2 for step in wrong_steps), "wrong before the bug was seeded"
