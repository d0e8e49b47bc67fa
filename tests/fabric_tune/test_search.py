"""The search on a fabric whose small switches pause: better than where it began, and the same every time."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bywash.errors import BywashError, ConfigError
from bywash.fabric.tune import Case, Effort, Pool, make_fabric, tune
from bywash.fabric.tune.objective import planned, space_of
from bywash.fabric.tune.search import FREE, search
from bywash.fabric.tune.session import TUNED, VENDOR
from bywash.fabric.tune.space import GROUPS, changes, paper, revert, vendor
from tests.fabric_tune.samples import cases, plan_of, skewed
from tests.leftovers import assert_gone

EFFORT = Effort(budget=24, seed=3)


@functools.cache
def tuned(jobs=1, sending=False):
    effort = Effort(budget=EFFORT.budget, seed=EFFORT.seed, jobs=jobs, sending=sending)
    return tune(plan_of(), cases(3), cases(3, first_seed=100), effort)


def test_the_result_is_at_least_as_good_as_every_start_that_may_be_used():
    plan, fabric = plan_of(), make_fabric(plan_of())
    space = space_of(plan, 100.0, sending=False)
    starts = [vendor(100), paper(), paper(100), planned(plan, 100.0)]
    with Pool(fabric, cases(3)) as pool:
        found = search(pool, space, 3, starts, budget=30, pause_budget=0.001, seed=3)
        best = found.score.rank(0.001)
        for one in starts:
            start = pool.score(one, range(3)).rank(0.001)
            assert best[:2] <= start[:2]
            assert best[0] < start[0] or best[2] <= FREE ** (len(GROUPS) + 1) * start[2]
        assert space.allows(found.best)
        assert found.simulations == len(pool.done)


def test_on_held_out_traffic_it_keeps_the_pause_budget_that_the_defaults_break():
    rows = {row.name: row for row in tuned().rows}
    assert rows[VENDOR].score.pause_share > EFFORT.pause_budget
    assert rows[TUNED].score.pause_share < EFFORT.pause_budget
    assert all(row.score.completed for row in rows.values())


def test_processes_change_nothing():
    assert tuned(jobs=2).found == tuned().found
    assert tuned(jobs=2).rows == tuned().rows


def test_what_is_changed_is_worth_it():
    """Every group that differs from the defaults costs time or pauses when it is put back."""
    found = tuned().found
    differing = changes(found.best, vendor(100))
    expected = [group for group, names in GROUPS.items() if set(names) & set(differing)]
    assert [one.group for one in found.worth] == expected
    space = space_of(plan_of(), 100.0, sending=False)
    for one in found.worth:
        free = one.completed_without and one.pause_share_without <= EFFORT.pause_budget and one.objective_ratio <= 1.0
        assert not free or not space.allows(revert(found.best, vendor(100), one.group))


def test_no_setting_of_the_front_beats_another():
    front = [score for _, score in tuned().found.pareto()]
    assert front
    for a in front:
        for b in front:
            better = (
                (a.objective_us, a.pause_share, a.peak_queue_bytes),
                (b.objective_us, b.pause_share, b.peak_queue_bytes),
            )
            assert a is b or not (all(x <= y for x, y in zip(*better)) and better[0] != better[1])


def test_a_schedule_among_the_changes_is_shown_alone():
    found = tuned(sending=True)
    alone = [name for name in found.named if name == "defaults, tuned sending"]
    has = any(getattr(found.found.best, name) for name in GROUPS["sending"])
    assert bool(alone) == has


def test_the_pool_runs_nothing_twice():
    seen = []
    with Pool(make_fabric(plan_of()), cases(2), report=lambda done, goal: seen.append((done, goal))) as pool:
        pool.run([vendor(100), vendor(100)], [0, 1])
        pool.run([vendor(100)], [0])
        assert seen == [(1, 2), (2, 2)]
        assert pool.score(vendor(100), [0, 1]).completed
        assert len(seen) == 2


def test_a_worker_that_dies_is_an_error():
    class Deadly(Case):
        def __reduce__(self):
            import os

            return os._exit, (1,)

    bad = [Deadly(name="deadly", flows=skewed(0))]
    with Pool(make_fabric(plan_of()), bad, jobs=2) as pool, pytest.raises(BywashError, match="worker process died"):
        pool.run([vendor(100)], [0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("budget", 3), ("jobs", 0), ("seed", -1), ("pause_budget", 1.5), ("pause_budget", float("nan"))],
)
def test_efforts_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        Effort(**{field: value})


def test_traffic_to_judge_on_is_needed():
    with pytest.raises(ConfigError, match="other traffic to judge on"):
        tune(plan_of(), cases(1), [], EFFORT)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, script]
    with subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 2
    assert_gone(workers)


_PARENT = """
import time
from bywash.fabric.tune import Pool, make_fabric
from bywash.fabric.tune.space import vendor
from tests.fabric_tune.samples import cases, plan_of

if __name__ == "__main__":
    with Pool(make_fabric(plan_of()), cases(4), jobs=2) as pool:
        pool.run([vendor(100)], range(4))
        print(*pool._executor._processes, flush=True)
        time.sleep(600)
"""
