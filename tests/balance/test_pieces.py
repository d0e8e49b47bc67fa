import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bywash.balance import Limits, Placement, SlotDirectory, StepPlan, plan_step, ranks_of_pairs
from bywash.balance.pieces import rows_under


def routing_of(rng, ranks, experts):
    """ids [T, K] per source rank, some -1, half of them crowding one expert."""
    top_k = int(rng.integers(1, min(experts, 4) + 1))
    ids_R = []
    for _ in range(ranks):
        ids_TK = np.array([rng.permutation(experts)[:top_k] for _ in range(rng.integers(0, 20))]).reshape(-1, top_k)
        crowd_T = (ids_TK != 0).all(axis=1) & (rng.random(len(ids_TK)) < 0.5)
        ids_TK[crowd_T, 0] = 0
        ids_TK[rng.random(ids_TK.shape) < 0.1] = -1
        ids_R.append(ids_TK.astype(np.int64))
    return ids_R


def counts_of(ids_R, experts):
    return np.array([np.bincount(ids[ids >= 0], minlength=experts) for ids in ids_R], np.int32).reshape(-1, experts)


def ranks_of_pairs_naive(plan: StepPlan, ids_R):
    """Deal every pair out in the order of (source, token), one at a time."""
    dealt = [[rank for rank, rows in enumerate(per_rank) for _ in range(rows)] for per_rank in plan.rows_ER.tolist()]
    return [np.array([[dealt[e].pop(0) if e >= 0 else -1 for e in ids] for ids in ids_TK]) for ids_TK in ids_R]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_every_pair_is_where_the_plan_counted_it(seed):
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    ids_R = routing_of(rng, ranks, experts)
    limits = Limits(capacity=int(rng.choice([2, 5, 1000])))
    directory = SlotDirectory.empty(ranks=ranks, slots=int(rng.integers(0, 4)), experts=experts)
    plan = plan_step(counts_of(ids_R, experts), Placement.equal(experts, ranks), limits, directory)
    for source, expected in enumerate(ranks_of_pairs_naive(plan, ids_R)):
        assert ranks_of_pairs(plan, source, ids_R[source]).tolist() == expected.tolist()


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_under_an_earlier_plan_slots_get_no_more_than_planned(seed):
    """Decode: other rows than the plan counted. Each pair still goes to one rank, the excess to its home."""
    rng = np.random.default_rng(seed)
    ranks, experts = int(rng.integers(1, 6)), int(rng.integers(1, 12))
    placement = Placement.equal(experts, ranks)
    directory = SlotDirectory.empty(ranks=ranks, slots=2, experts=experts)
    plan = plan_step(counts_of(routing_of(rng, ranks, experts), experts), placement, Limits(), directory)
    ids_R = routing_of(rng, ranks, experts)
    got_ER = np.zeros((experts, ranks), np.int64)
    for source, ids_TK in enumerate(ids_R):
        rank_TK = ranks_of_pairs(plan, source, ids_TK)
        assert ((rank_TK >= 0) == (ids_TK >= 0)).all()
        np.add.at(got_ER, (ids_TK[ids_TK >= 0], rank_TK[ids_TK >= 0]), 1)
    away = np.arange(ranks) != placement.home_E[:, None]
    assert (got_ER[away] <= plan.rows_ER[away]).all()
    assert got_ER.sum() == counts_of(ids_R, experts).sum()
    assert rows_under(plan, counts_of(ids_R, experts)).tolist() == got_ER.tolist()
    assert rows_under(plan, plan.counts_RE).tolist() == plan.rows_ER.tolist()


def test_the_example_of_the_docstring():
    plan = plan_step(
        np.array([[4, 0], [1, 1]], np.int32),
        Placement.equal(2, 2),
        Limits(),
        SlotDirectory.empty(ranks=2, slots=1, experts=2),
    )
    assert plan.rows_ER[0].tolist() == [3, 2]
    assert ranks_of_pairs(plan, 0, np.zeros((5, 1), np.int64)).ravel().tolist() == [0, 0, 0, 1, 0]
