"""The slow, obvious twin of `plan_step`, in plain Python integers. Tests compare `fast.py` and `plan.cu` with it.

Shapes: R ranks, E experts, S slots per rank. The algorithm, which is the definition of a plan:

1. Every rank's load is the rows of its experts; its target is its fair share (by speed) times alpha, rounded up. If
   nobody is above its target and no expert above the capacity, all rows stay at home.
2. If slots hold experts of the layer, they may be enough, or nearly: `naive_keep.py` tries that first.
3. Up to 16 attempts, each from that start. The first only takes what is too much; the others may take more from a rank
   than it has too much (it then is a recipient itself: a recipient with few slots needs large pieces), with targets
   (attempt - 1)^2 / 256 higher. The first attempt that brings every load below its target and every expert below
   the capacity wins, else the one with the least load relative to speed. Where the winner's target is far above that of
   the attempt before, one between them is looked for, in 16ths, by bisection.
4. An attempt moves one piece at a time, first into slots that hold the expert already, then into any slot: to the rank
   that is most below its target, from the rank that is most above its own among those whose largest expert can fill
   the recipient's slots; a piece below the break-even does not move. Ties go to the lowest number. Where other experts
   are hot than before, what slots hold relieves little and leaves no slot for a fetch. So each attempt is also made
   *afresh*, without the first of these two phases, and wins if that brings a lower target: `TURNS`.
5. The winner's pieces get slots: the one that holds the expert; else an empty one; else one that was not used when its
   layer last had its turn, longest unused first; else the one whose layer's next turn is farthest away.

What cannot move stays at home, however much that is, and is computed there in waves of `capacity` rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bywash.balance.limits import ATTEMPTS, HOT_PLANS, MOST_AGE, MOST_HOT_ROWS, REFINED, Limits
from bywash.balance.naive_keep import Keep

Matrix = list[list[int]]

TURNS = [(0, False), (1, False), (0, True), (1, True)]
"""(number, afresh) of the attempts in the order of preference: lower targets first, of equal ones those with slots."""
TURNS += [(number, afresh) for number in range(2, ATTEMPTS) for afresh in (False, True)]


def plan_step_naive(counts: Sequence[Sequence[int]], home: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Without limits: (rank of each expert, rows of each rank, digest), one expert and one row at a time."""
    ranks = len(counts)
    rows = [0] * ranks
    for source in range(ranks):
        for expert, rank in enumerate(home):
            rows[rank] += counts[source][expert]
    return list(home), rows, digest_naive([count for per_source in counts for count in per_source] + list(home))


def digest_naive(words: Sequence[int]) -> int:
    """`digest32`, one word at a time."""
    digest = 0
    for position, word in enumerate(words, start=1):
        mixed = (word + position * 0x9E3779B9) % 2**32
        mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
        digest = (digest + (mixed ^ mixed >> 16)) % 2**32
    return digest


def weighed_naive(counts: Matrix) -> list[int]:
    """[E]: the counts of each expert, each times an odd number that depends on its rank, added modulo 2^32.

    They stand for all R x E counts in a plan's digest, since a device has them for a few instructions a count.
    """
    weighed = [0] * len(counts[0])
    for rank, per_expert in enumerate(counts, start=1):
        spread = rank * 0x9E3779B9 % 2**32
        weight = (spread ^ spread >> 16) | 1
        weighed = [(word + weight * count) % 2**32 for word, count in zip(weighed, per_expert, strict=True)]
    return weighed


@dataclass(kw_only=True)
class NaivePlan:
    """A plan as lists: `rows` [E][R], the directory after it [R][S] and [L][E], the fetches [R][S]."""

    rows: Matrix
    keys: Matrix
    ages: Matrix
    hot: Matrix
    fetch: Matrix
    digest: int = 0


def plan_limits_naive(
    counts: Matrix, home: list[int], limits: Limits, keys: Matrix, ages: Matrix, hot: Matrix, layer: int
) -> NaivePlan:
    """With limits and slots: see `plan_step`."""
    ranks, experts = len(counts), len(home)
    speeds = limits.speeds or (1,) * ranks
    rows = [sum(counts[source][expert] for source in range(ranks)) for expert in range(experts)]
    plan = NaivePlan(
        rows=[[rows[expert] if rank == home[expert] else 0 for rank in range(ranks)] for expert in range(experts)],
        keys=[list(slots) for slots in keys],
        ages=[[min(age + 1, MOST_AGE) for age in slots] for slots in ages],
        hot=[list(rows) for rows in hot],
        fetch=[[-1] * len(slots) for slots in keys],
    )
    for expert, before in enumerate(hot[layer]):
        plan.hot[layer][expert] = before - before // HOT_PLANS + min(rows[expert], MOST_HOT_ROWS)
    start = _Attempt(rows=rows, home=home, speeds=speeds, limits=limits, alpha=limits.alpha_1024)
    if not start.fits():
        held = [[key - layer * experts if key // experts == layer else -1 for key in slots] for slots in keys]
        usable = [
            [key < 0 or key // experts == layer or age >= limits.keep for key, age in zip(*slots, strict=True)]
            for slots in zip(plan.keys, plan.ages, strict=True)
        ]
        left = [sum(slots) for slots in usable]
        keep = Keep(
            stay=rows, home=home, load=start.load, target=start.target, limits=limits, left=left, hot=plan.hot[layer]
        )
        pieces = keep.pieces(held) or _best_attempt(rows, home, speeds, limits, held, left).pieces
        for expert, rank, moved in pieces:
            plan.rows[expert][rank] = moved
            plan.rows[expert][home[expert]] -= moved
        _give_slots(plan, pieces, home, limits.keep, layer)
    arrays = ([weighed_naive(counts), home], plan.rows, plan.keys, plan.fetch)
    plan.digest = digest_naive([word for matrix in arrays for line in matrix for word in line])
    return plan


def _best_attempt(
    rows: list[int], home: list[int], speeds: Sequence[int], limits: Limits, held: Matrix, usable: list[int]
) -> "_Attempt":
    def attempt(alpha: int, number: int, afresh: bool) -> _Attempt:
        made = _Attempt(rows=rows, home=home, speeds=speeds, limits=limits, alpha=alpha)
        made.overdraw, made.afresh = number > 0, afresh
        made.move(held, usable)
        return made

    alphas = [limits.alpha_1024 + limits.alpha_1024 * max(n - 1, 0) ** 2 // 256 for n in range(ATTEMPTS)]
    attempts = []
    for number, afresh in TURNS:
        attempts.append(attempt(alphas[number], number, afresh))
        if attempts[-1].fits():
            break
    winner = attempts[-1]
    if not winner.fits():
        return min(attempts, key=lambda made: made.worst())
    if number >= REFINED:
        fails, fitting, below = 0, 16, alphas[number - 1]
        while fitting - fails > 1:
            middle = (fails + fitting) // 2
            made = attempt(below + (alphas[number] - below) * middle // 16, number, afresh)
            if made.fits():
                winner, fitting = made, middle
            else:
                fails = middle
    return winner


@dataclass(kw_only=True)
class _Attempt:
    """One try at a target: who has how much, and the pieces (expert, rank, rows) moved so far."""

    rows: list[int]
    home: list[int]
    speeds: Sequence[int]
    limits: Limits
    alpha: int
    overdraw: bool = False
    afresh: bool = False
    pieces: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stay = list(self.rows)
        self.load = [sum(n for n, h in zip(self.rows, self.home, strict=True) if h == r) for r in self.ranks]
        total = sum(self.rows)
        self.target = [min(total, -(-total * speed * self.alpha // (1024 * sum(self.speeds)))) for speed in self.speeds]

    @property
    def ranks(self) -> range:
        return range(len(self.speeds))

    def fits(self) -> bool:
        return not any(self.load[r] > self.target[r] for r in self.ranks) and max(self.stay) <= self.limits.capacity

    def worst(self) -> int:
        return max(self.load[r] * sum(self.speeds) // max(1, self.speeds[r]) for r in self.ranks)

    def move(self, held: Matrix, usable: list[int]) -> None:
        self.left = list(usable)
        phases = ((False, self.limits.use_rows), (True, self.limits.fetch_rows))
        for fetching, least in phases[1:] if self.afresh else phases:
            open_ranks = set(self.ranks)
            while not self.fits():
                room = {r: self.target[r] - self.load[r] for r in open_ranks if self.left[r] > 0}
                room = {r: rows for r, rows in room.items() if rows >= least}
                if not room:
                    break
                rank = min(room, key=lambda r: (-room[r], r))
                wanted = min(max(-(-room[rank] // self.left[rank]), least), self.limits.capacity)
                expert = self._choose(rank, least, wanted, None if fetching else held[rank])
                if expert is None:
                    open_ranks.remove(rank)
                    continue
                rows = min(self._can(expert), room[rank], self.limits.capacity)
                self.stay[expert] -= rows
                self.load[self.home[expert]] -= rows
                self.load[rank] += rows
                self.left[rank] -= 1
                self.pieces.append((expert, rank, rows))

    def _choose(self, rank: int, least: int, wanted: int, held: list[int] | None) -> int | None:
        """The expert to take rows from: of those in `held` (slot order), or the largest of each donor."""
        here = {expert for expert, to, _ in self.pieces if to == rank}
        if held is not None:
            candidates = [e for e in held if e >= 0 and self.home[e] != rank and e not in here]
        else:
            candidates = []
            for donor in self.ranks:
                owned = [e for e, h in enumerate(self.home) if h == donor and self.stay[e] and e not in here]
                if donor != rank and owned:
                    candidates.append(max(owned, key=lambda e: (self.stay[e], -e)))
        ranked = [(self._value(e, least, wanted, held is None), -place, e) for place, e in enumerate(candidates)]
        best = max(ranked, default=((0, 0), 0, 0))
        return best[2] if best[0] > (0, 0) else None

    def _can(self, expert: int) -> int:
        """How many rows of it may leave its home."""
        donor = self.home[expert]
        too_much = max(self.load[donor] - self.target[donor], self.stay[expert] - self.limits.capacity)
        return self.stay[expert] if self.overdraw else min(self.stay[expert], too_much)

    def _value(self, expert: int, least: int, wanted: int, fetching: bool) -> tuple[int, int]:
        """(class, value): 3 fills the recipient from a rank with too much, 2 from another that can be filled again
        itself, 1 does not fill it; 0 is no use."""
        donor, can = self.home[expert], self._can(expert)
        excess = self.load[donor] - self.target[donor]
        over = excess > 0 or self.stay[expert] > self.limits.capacity
        if can < least:
            return (0, 0)
        if can >= wanted and over:
            return (3, excess + max(self.target))
        if can >= wanted and fetching and self.overdraw and self.left[donor] > 0:
            return (2, excess + max(self.target))
        return (1, can) if over else (0, 0)


def _give_slots(plan: NaivePlan, pieces: list[tuple[int, int, int]], home: list[int], keep: int, layer: int) -> None:
    experts, layers = len(home), len(plan.hot)
    missing = []
    for expert, rank, _ in pieces:
        if layer * experts + expert in plan.keys[rank]:
            plan.ages[rank][plan.keys[rank].index(layer * experts + expert)] = 0
        else:
            missing.append((expert, rank))
    for expert, rank in missing:
        order = []
        for slot, (key, age) in enumerate(zip(plan.keys[rank], plan.ages[rank], strict=True)):
            if key < 0:
                order.append((3, 0, -slot))
            elif age > 0 and (key // experts == layer or age >= keep):
                order.append((2, age, -slot) if age >= layers else (1, layers - age, -slot))
        slot = -max(order)[2]
        plan.keys[rank][slot], plan.ages[rank][slot] = layer * experts + expert, 0
        plan.fetch[rank][slot] = home[expert]
