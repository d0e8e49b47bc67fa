"""Plans where the hot experts change and all slots are full: what slots hold must not stand in the way."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Limits, Placement, SlotDirectory, naive, plan_step
from bywash.balance.limits import ATTEMPTS
from tests.balance.plan_cases import draw_counts

RANKS, EXPERTS, SLOTS = 2, 64, 6


def topics(rng, number, steps):
    """int32 [number, steps, R, E]: hot experts, half of the load, that are others in each topic."""
    weights = np.ones((number, EXPERTS))
    for topic in range(number):
        hot = rng.choice(EXPERTS // 2, 8, replace=False) + EXPERTS // 2 * (topic % RANKS)
        weights[topic, hot] = EXPERTS / 8
    counts = [rng.multinomial(8192, w / w.sum(), size=(steps, RANKS)) for w in weights]
    return np.stack(counts).astype(np.int32)


def test_full_slots_do_not_keep_a_plan_from_what_empty_ones_reach():
    placement, limits = Placement.equal(EXPERTS, RANKS), Limits(alpha_1024=1044, fetch_rows=64)
    empty = SlotDirectory.empty(ranks=RANKS, slots=SLOTS, experts=EXPERTS)
    directory, fetches = empty, []
    for counts in topics(np.random.default_rng(3), 6, 4):
        fetches.append(0)
        for counts_RE in counts:
            plan = plan_step(counts_RE, placement, limits, directory)
            anew, directory = plan_step(counts_RE, placement, limits, empty), plan.directory
            assert plan.imbalance <= anew.imbalance + 0.01
            fetches[-1] += plan.fetches
    assert (directory.keys_RS >= 0).all()
    assert max(fetches) <= RANKS * SLOTS  # a topic fills the slots once, its later steps find them as they are
    assert min(fetches) > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_an_attempt_with_full_slots_wins_at_no_higher_a_target(seed):
    """Whatever the slots hold, as all of them may be taken."""
    rng = np.random.default_rng(seed)
    ranks, experts, slots = int(rng.integers(2, 7)), int(rng.integers(2, 20)), int(rng.integers(1, 5))
    limits = Limits(alpha_1024=int(rng.choice([1024, 1100])), fetch_rows=int(rng.choice([1, 9, 60])))
    home = rng.integers(0, ranks, experts).tolist()
    rows = draw_counts(rng, ranks, experts, rng.choice(["random", "one donor", "top-1"])).sum(axis=0).tolist()
    full = [rng.choice(experts, min(slots, experts), replace=False).tolist() for _ in range(ranks)]
    given = rows, home, (1,) * ranks, limits
    with_slots = naive._best_attempt(*given, full, [slots] * ranks)
    anew = naive._best_attempt(*given, [[-1] * slots] * ranks, [slots] * ranks)
    alphas = limits.alpha_1024 + limits.alpha_1024 * np.maximum(np.arange(ATTEMPTS) - 1, 0) ** 2 // 256
    if anew.fits():
        assert with_slots.fits()
        assert np.searchsorted(alphas, with_slots.alpha) <= np.searchsorted(alphas, anew.alpha)
    else:
        assert with_slots.fits() or with_slots.worst() <= anew.worst()
