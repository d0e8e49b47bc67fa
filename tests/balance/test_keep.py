"""The attempt that keeps what slots hold: chains of ranks by hand."""

import numpy as np

from bywash.balance import Limits, Placement, SlotDirectory, plan_step
from bywash.balance.limits import KEEP_ENTRIES


def directory_of(keys, experts):
    empty = SlotDirectory.empty(ranks=len(keys), slots=len(keys[0]), experts=experts)
    empty.keys_RS[:] = keys
    return empty


def plan_of(rows_E, directory, **limits):
    counts_RE = np.zeros((directory.keys_RS.shape[0], len(rows_E)), np.int32)
    counts_RE[0] = rows_E
    return plan_step(counts_RE, Placement.equal(len(rows_E), len(counts_RE)), Limits(**limits), directory)


def test_a_rank_at_its_target_takes_rows_and_passes_others_on():
    """Rank 0 has 30 too many, rank 1 none, rank 2 room for 30; slots: expert 0 at rank 1, expert 1 at rank 2."""
    plan = plan_of([90, 60, 30], directory_of([[-1], [0], [1]], 3))
    assert plan.rows_ER.tolist() == [[60, 30, 0], [0, 30, 30], [0, 0, 30]]
    assert plan.fetches == 0


def test_rows_go_back_where_that_makes_room_for_others():
    """Expert 0, of rank 0, may be at ranks 2 and 3; expert 2, of rank 1, only at rank 2, which expert 0 fills first."""
    directory = directory_of([[-1, -1], [-1, -1], [0, 2], [0, -1]], 8)
    plan = plan_of([40, 0, 40, 0, 0, 0, 0, 0], directory)
    assert plan.rows_R.tolist() == [20, 20, 20, 20]
    assert plan.fetches == 0


def test_the_hottest_of_those_that_relieve_as_much_is_fetched():
    directory = directory_of([[-1, -1], [0, -1], [-1, -1]], 6)
    for _ in range(4):
        directory = plan_of([10, 40, 20, 20, 20, 20], directory, alpha_1024=4096).directory
    plan = plan_of([45, 45, 5, 15, 5, 15], directory, alpha_1024=1100)
    assert plan.directory.held(2, 0) == {1: 0}  # expert 0 has as many rows now, but had fewer


def test_a_piece_below_its_break_even_is_left_to_the_other_attempts():
    plan = plan_of([90, 60, 30], directory_of([[-1], [0], [1]], 3), use_rows=31)
    assert plan.rows_R.max() == 60
    assert (plan.rows_ER[0, 1], plan.fetches) == (0, 1)


def test_more_entries_than_it_takes_on():
    ranks, slots, experts = 9, 32, 45
    keys = [[e for e in range(experts) if e // 5 != rank][:slots] for rank in range(ranks)]
    assert ranks * slots > KEEP_ENTRIES
    plan = plan_of([50] * 5 + [1] * 40, directory_of(keys, experts))
    assert plan.rows_R.max() == -(-plan.rows_R.sum() // ranks)
