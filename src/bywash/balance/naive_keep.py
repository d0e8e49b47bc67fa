"""The attempt of a plan that keeps what slots hold, in plain Python: the oracle of `fast_keep.py` and `plan_keep.cuh`.

Shapes: R ranks, E experts, S slots per rank. In decode, a layer's slots are nearly right for its next step. The greedy
attempts of `naive.py` fill the emptiest rank and then fetch for the next one; here slots are used as well as can be:

1. An *entry* is a slot of the layer that holds an expert from another rank. Rows move over entries: *out*, from the
   expert's home to the entry's rank, or *back*.
2. As long as a rank is above its target, rows move along the shortest chain of ranks that begins at one above its
   target and ends at one below (of the last ranks the one most below; a rank is reached from the lowest that reaches
   it). Over each link the entry that can carry most moves them; back only where none moves out. A chain carries what
   its weakest part allows. So a rank at its target may take rows if it can pass others on.
3. When there is no chain, an entry is added, a fetch: on the rank most below its target that has a slot left, for an
   expert whose home the chains reach. Of those that relieve most rows, the one that had most rows in recent plans.
4. It wins if all loads and experts fit, no piece is below its break-even, and the work stayed within `KEEP_MOVES`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bywash.balance.limits import KEEP_ENTRIES, KEEP_FETCHES, KEEP_MOVES, Limits


@dataclass(kw_only=True)
class Entry:
    """Room for rows of an expert at a rank, and those given to it."""

    expert: int
    rank: int
    least: int
    rows: int = 0


@dataclass(kw_only=True)
class Keep:
    """The attempt: rows that stay at home and `hot` of each expert; load, target and slots left of each rank."""

    stay: list[int]
    home: list[int]
    load: list[int]
    target: Sequence[int]
    limits: Limits
    left: list[int]
    hot: Sequence[int]
    entries: list[Entry] = field(default_factory=list)

    def pieces(self, held: list[list[int]]) -> list[tuple[int, int, int]]:
        """(expert, rank, rows), none if it does not fit. `held` [R][S] has the layer's experts, else -1."""
        self.stay, self.load, self.left = list(self.stay), list(self.load), list(self.left)
        for rank, experts in enumerate(held):
            for expert in experts:
                if expert >= 0 and self.home[expert] != rank:
                    self.entries.append(Entry(expert=expert, rank=rank, least=self.limits.use_rows))
        entries = len(self.entries)
        if not 0 < entries <= KEEP_ENTRIES:
            return []
        for _ in range(KEEP_MOVES):
            if not self._over():
                break
            reached = self._chain()
            if not reached:
                continue
            fetch = self._best_fetch(reached)
            if fetch is None or len(self.entries) == entries + KEEP_FETCHES:
                break
            self.entries.append(fetch)
        fits = not self._over() and max(self.stay) <= self.limits.capacity
        fits = fits and all(entry.rows == 0 or entry.rows >= entry.least for entry in self.entries)
        return [(entry.expert, entry.rank, entry.rows) for entry in self.entries if entry.rows] if fits else []

    def _over(self) -> list[int]:
        return [rank for rank, load in enumerate(self.load) if load > self.target[rank]]

    def _chain(self) -> set[int]:
        """Move rows along a chain; if there is none, the ranks that chains reach."""
        came_from: dict[int, int] = {}
        last = reached = set(self._over())
        while last:
            ends = {}
            for rank in sorted(set(range(len(self.load))) - reached):
                found = [before for before in sorted(last) if self._link(before, rank)[1]]
                if found:
                    came_from[rank] = found[0]
                    ends[rank] = self.target[rank] - self.load[rank]
            last = set(ends)
            reached = reached | last
            if any(room > 0 for room in ends.values()):
                self._carry(came_from, min(ends, key=lambda rank: (-ends[rank], rank)))
                return set()
        return reached

    def _carry(self, came_from: dict[int, int], end: int) -> None:
        links, rank = [], end
        while rank in came_from:
            links.append(self._link(came_from[rank], rank))
            rank = came_from[rank]
        room, excess = self.target[end] - self.load[end], self.load[rank] - self.target[rank]
        rows = min([room, excess, *(most for _, most, _ in links)])
        self.load[rank] -= rows
        self.load[end] += rows
        for entry, _, out in links:
            before = entry.rows
            entry.rows += rows if out else -rows
            self.stay[entry.expert] -= rows if out else -rows
            self.left[entry.rank] += (before > 0) - (entry.rows > 0)

    def _link(self, giver: int, taker: int) -> tuple[Entry, int, bool]:
        """(entry, how many rows it may move, whether out) of the best way from rank to rank; 0 rows for none."""
        best = (self.entries[0], 0, True)
        for entry in self.entries:
            if entry.rank == taker and self.home[entry.expert] == giver and (entry.rows or self.left[taker]):
                most = min(self.stay[entry.expert], self.limits.capacity - entry.rows)
                best = (entry, most, True) if most > best[1] else best
        if best[1]:
            return best
        for entry in self.entries:
            if entry.rank == giver and self.home[entry.expert] == taker and entry.rows > best[1]:
                best = (entry, entry.rows, False)
        return best

    def _best_fetch(self, reached: set[int]) -> Entry | None:
        room = {r: self.target[r] - load for r, load in enumerate(self.load) if self.left[r] and load < self.target[r]}
        if not room:
            return None
        rank = min(room, key=lambda r: (-room[r], r))
        excess = {r: self.load[r] - self.target[r] for r in reached}
        there = {entry.expert for entry in self.entries if entry.rank == rank}
        best, least = (0, 0, 0), self.limits.fetch_rows
        for expert, home in enumerate(self.home):
            if home in reached and expert not in there:
                most = excess[home] if excess[home] > 0 else max(excess.values())
                gain = min(self.stay[expert], most, room[rank], self.limits.capacity)
                best = max(best, (gain, self.hot[expert], -expert))
        return Entry(expert=-best[2], rank=rank, least=least) if best[0] >= least else None
