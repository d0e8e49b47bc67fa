"""The search: successive halving over settings and cases, then simplification towards the vendor's defaults.

Many settings on one case, the better ones and their neighbours on two, on four, on all: bad settings are found out
cheaply, and the last few are judged on everything. Then each group of parameters is put back to the vendor's values:
where nothing is lost by that it stays so (fewer changes to roll out), elsewhere the loss is what the group is worth.

Deterministic: one seed, ties by order of appearance. Knows nothing of simulation, only of a `Pool`. The cases given
here are those to learn from; `heldout` judges on others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from bywash.errors import ConfigError
from bywash.fabric.tune.objective import Score
from bywash.fabric.tune.pool import Pool
from bywash.fabric.tune.space import GROUPS, Setting, Space, changes, revert

FREE = 1.005
"""Objective over the best one's at which a simpler or calmer setting is as good: less than the cases can tell apart."""
EXPLORE_SHARE, NEIGHBOURS = 0.35, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a group of parameters is worth: the objective without it over that with it; the worst pause share then."""

    group: str
    objective_ratio: float
    pause_share_without: float
    completed_without: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a search.

    Attributes:
        best: the setting, and its score over all search cases.
        worth: for each group in which it differs from the vendor's, in the order of `GROUPS`.
        judged: every setting that was run on the cases of `pareto_cases`, with its score over them.
        simulations: how many were run.
    """

    best: Setting
    score: Score
    worth: tuple[Worth, ...]
    judged: Mapping[Setting, Score]
    pareto_cases: int
    simulations: int

    def pareto(self) -> list[tuple[Setting, Score]]:
        """Settings that none beats in objective, pause share and largest queue at once; fastest first."""
        alive = [(setting, one) for setting, one in self.judged.items() if one.completed]
        front = [pair for pair in alive if not any(_dominates(other, pair[1]) for _, other in alive)]
        return sorted(front, key=lambda pair: (pair[1].objective_us, pair[1].pause_share))


def _dominates(a: Score, b: Score) -> bool:
    one = (a.objective_us, a.pause_share, a.peak_queue_bytes)
    two = (b.objective_us, b.pause_share, b.peak_queue_bytes)
    return all(x <= y for x, y in zip(one, two)) and one != two


def search(
    pool: Pool,
    space: Space,
    cases: int,
    references: Sequence[Setting],
    *,
    budget: int,
    pause_budget: float,
    seed: int = 0,
) -> Found:
    """Find a setting.

    Args:
        pool: simulates.
        space: what may be chosen.
        cases: the first so many of the pool's are searched on.
        references: where to start; the first is the vendor's, towards which the result is simplified.
        budget: simulations, about.
        pause_budget: largest share of port time that may be spent paused, in any case.
        seed: of the draws.

    Raises:
        ConfigError: no setting completes the traffic without a drop.
    """
    rng = np.random.default_rng(seed)
    people = _first(space, references, max(len(references) + 1, round(budget * EXPLORE_SHARE)), rng)
    seen = 1
    while True:
        pool.run(people, range(seen))
        ranked = _ranked(pool, people, seen, pause_budget)
        if seen == cases:
            break
        seen = min(cases, 2 * seen)
        rungs = max(1, (cases - 1).bit_length())
        keep = max(2, round(budget * (1 - EXPLORE_SHARE) / rungs / seen / (1 + NEIGHBOURS)))
        kept = [one for one in ranked if space.allows(one)][:keep]
        people = list(dict.fromkeys(kept + [space.step(one, rng) for one in kept for _ in range(NEIGHBOURS)]))
    best = _calmest(pool, [one for one in ranked if space.allows(one)], cases, pause_budget)
    if not pool.score(best, range(cases)).completed:
        raise ConfigError(
            "tune: no setting completes this traffic without a drop in time; see `bywash fabric simulate`"
        )
    best, worth = _simplified(pool, space, best, references[0], cases, pause_budget)
    pool.run(references, range(cases))
    wide = max(1, cases // 2)
    return Found(
        best=best,
        score=pool.score(best, range(cases)),
        worth=worth,
        judged=_judged(pool, wide),
        pareto_cases=wide,
        simulations=len(pool.done),
    )


def _first(space: Space, references: Sequence[Setting], count: int, rng: np.random.Generator) -> list[Setting]:
    """The references, and settings that keep about half of one."""
    people = list(dict.fromkeys(references))
    drawn = [space.mutate(references[i % len(references)], rng, share=0.5) for i in range(count - len(people))]
    return list(dict.fromkeys(people + drawn))


def _ranked(pool: Pool, people: Sequence[Setting], cases: int, pause_budget: float) -> list[Setting]:
    return sorted(people, key=lambda one: pool.score(one, range(cases)).rank(pause_budget))


def _calmest(pool: Pool, ranked: Sequence[Setting], cases: int, pause_budget: float) -> Setting:
    """Of the settings that are as fast as the best one, that with the least pauses, then the smallest queue."""
    scores = {one: pool.score(one, range(cases)) for one in ranked}
    first = scores[ranked[0]]
    place, limit = first.rank(pause_budget)[0], FREE * first.objective_us
    near = [one for one in ranked if scores[one].rank(pause_budget)[0] == place and scores[one].objective_us <= limit]
    return min(near, key=lambda one: (scores[one].worst_pause_share, scores[one].peak_queue_bytes))


def _judged(pool: Pool, cases: int) -> dict[Setting, Score]:
    """Every setting that has been run on all of the first cases; in an order that no race between processes decides."""
    known = sorted({setting for setting, _ in pool.done}, key=astuple)
    whole = [one for one in known if all((one, case) in pool.done for case in range(cases))]
    return {one: pool.score(one, range(cases)) for one in whole}


def _simplified(
    pool: Pool, space: Space, best: Setting, base: Setting, cases: int, pause_budget: float
) -> tuple[Setting, tuple[Worth, ...]]:
    """Groups put back to `base` where that loses nothing, one after the other; then what the others are worth."""
    for group in GROUPS:
        plain = revert(best, base, group)
        if plain != best and space.allows(plain) and _as_good(pool, plain, best, cases, pause_budget):
            best = plain
    worth = []
    mine = pool.score(best, range(cases))
    for group, names in GROUPS.items():
        if set(names) & set(changes(best, base)):
            without = pool.score(revert(best, base, group), range(cases))
            worth.append(
                Worth(
                    group=group,
                    objective_ratio=without.objective_us / mine.objective_us,
                    pause_share_without=without.worst_pause_share,
                    completed_without=without.completed,
                )
            )
    return best, tuple(worth)


def _as_good(pool: Pool, plain: Setting, best: Setting, cases: int, pause_budget: float) -> bool:
    """Faster within the constraints, or as fast with no more pauses."""
    one, two = pool.score(plain, range(cases)), pool.score(best, range(cases))
    if one.rank(pause_budget)[0] > two.rank(pause_budget)[0]:
        return False
    calm = one.worst_pause_share <= two.worst_pause_share
    return one.objective_us < two.objective_us / FREE or (calm and one.objective_us <= FREE * two.objective_us)
