"""The proof: does any cycle of buffers exist in which each waits for the next, healthy or under a failure?

PFC makes the buffer of (ingress port, priority) at one switch wait for a buffer at the next. A cycle of such waits is
necessary for a deadlock, not sufficient: no cycle proves the fabric free of PFC deadlock, a cycle is a hazard which
traffic may or may not close (the simulator's ring: two flows of a cycle finish, a third stops everything).

Routes are of three policies (`Policy`), always stated with the verdict. Every single failure of a cable or a switch is
proved, exactly: only destinations some switch of which loses its last next hop get new routes, all others lose edges at
most. If the new edges of the former and all old edges of the latter have no cycle together, the failure has none;
otherwise the graph of that very failure is built and judged. `naive` is the oracle.

Knows nothing of rates, queues or time. `cures` proposes what to do about a cycle.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bywash.errors import ConfigError
from bywash.fabric.prove import kernel
from bywash.fabric.prove.cycle import Cycle, short_cycle
from bywash.fabric.prove.graph import SwitchGraph, switch_graph
from bywash.fabric.topology import Topology

Policy = Literal["shortest", "up-down", "detour"]
POLICIES: dict[str, int] = {"shortest": kernel.SHORTEST, "up-down": kernel.UPDOWN, "detour": kernel.DETOUR}
POLICY_WORDS = {
    "shortest": "shortest paths; after a failure every switch re-routes over the shortest live paths",
    "up-down": "shortest paths that never go up after down; after a failure the same over live links",
    "detour": "shortest paths; after a failure only the switch beside it acts: what has no next hop left goes to any "
    "neighbour but the one it came from",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """Which priority a traffic class has at each switch, and what a bounce does to it.

    A class is what a packet carries (its DSCP). A bounce is a turn from a down link to an up link.

    Attributes:
        names: of the classes, for reports.
        priority_SC: priority of class c at switch s as an index of `priorities`; -1 where s treats it as lossy.
        priorities: the lossless priorities, by their 802.1p numbers.
        first_C: the classes that hosts send.
        bounced_C: class after a bounce: itself where nothing is changed, -1 where it goes on lossy.
    """

    names: tuple[str, ...]
    priority_SC: npt.NDArray[np.int32]
    priorities: tuple[int, ...]
    first_C: npt.NDArray[np.bool_]
    bounced_C: npt.NDArray[np.int32]


def one_class(switches: int, priority: int = 3) -> Classes:
    """One lossless class that is the same at every switch, and that bounces leave alone."""
    return tagged_classes(switches, (priority,), bounce_is_lossy=False)


def tagged_classes(switches: int, priorities: Sequence[int], *, bounce_is_lossy: bool = True) -> Classes:
    """Tagger (Hu et al., CoNEXT 2017): the k-th priority for packets that have bounced k times.

    After the last one a packet goes on lossy: it may be dropped, but holds no one up. With one priority and
    `bounce_is_lossy` False, bounces change nothing.
    """
    count = len(priorities)
    bounced = np.arange(1, count + 1, dtype=np.int32)
    bounced[-1] = -1 if bounce_is_lossy else count - 1
    return Classes(
        names=tuple(f"{bounce} bounces" if bounce else "no bounce" for bounce in range(count)),
        priority_SC=np.tile(np.arange(count, dtype=np.int32), (switches, 1)),
        priorities=tuple(priorities),
        first_C=np.arange(count) == 0,
        bounced_C=bounced,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One thing that fails: a cable between switches, or a switch with all its cables."""

    kind: Literal["none", "link", "switch"]
    name: str
    links: tuple[int, ...] = ()
    switch: int = -1


HEALTHY = Failure(kind="none", name="healthy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What holds under one failure. `lossy_turns` counts turns at which a packet left the lossless classes."""

    failure: Failure
    cycle: Cycle | None
    unreachable: int
    lossy_turns: int

    @property
    def deadlock_free(self) -> bool:
        """No cycle of buffers exists."""
        return self.cycle is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The verdicts of a fabric: healthy first, then every failure asked for."""

    policy: Policy
    classes: Classes
    buffers: int
    dependencies: int
    verdicts: tuple[Verdict, ...]

    @property
    def deadlock_free(self) -> bool:
        """Free of cycles healthy and under every failure that was asked for."""
        return all(verdict.deadlock_free for verdict in self.verdicts)

    @property
    def hazards(self) -> tuple[Verdict, ...]:
        """The verdicts with a cycle."""
        return tuple(verdict for verdict in self.verdicts if not verdict.deadlock_free)


def prove(
    topology: Topology,
    policy: Policy = "shortest",
    *,
    classes: Classes | None = None,
    pairs: tuple[tuple[int, int], ...] | None = None,
    failures: Literal["none", "links", "switches", "single"] = "single",
    progress: Callable[[int, int], None] | None = None,
) -> Proof:
    """Prove a fabric free of cyclic buffer dependencies, or name the cycles.

    Args:
        topology: its failed links are out of use from the start.
        policy: how routes are chosen, before and after a failure.
        classes: priorities; None is one lossless class.
        pairs: (source host, destination host) that exchange traffic; None is all of them.
        failures: which single failures to try besides the healthy fabric.
        progress: called with (done, total).

    Raises:
        ConfigError: an unknown policy, or a pair that names no host.
    """
    if policy not in POLICIES:
        raise ConfigError(f"policy {policy!r}: must be one of {', '.join(POLICIES)}")
    graph = switch_graph(topology, pairs)
    routes = Routes(graph, policy, classes or one_class(topology.switches))
    todo = list(_failures(graph, failures))
    verdicts = [routes.healthy()]
    for done, failure in enumerate(todo, start=1):
        verdicts.append(routes.under(failure))
        if progress is not None:
            progress(done, len(todo))
    return Proof(
        policy=policy,
        classes=routes.classes,
        buffers=graph.links * len(routes.classes.priorities),
        dependencies=int(routes.edges.sum()),
        verdicts=tuple(verdicts),
    )


def _failures(graph: SwitchGraph, which: str) -> Iterator[Failure]:
    if which in ("links", "single"):
        for link in range(0, graph.links, 2):
            name = graph.link_name(link).replace("->", "-")
            yield Failure(kind="link", name=name, links=(link, link + 1))
    if which in ("switches", "single"):
        for s in range(graph.topology.switches):
            touching = np.flatnonzero((graph.tail_L == s) | (graph.head_L == s))
            yield Failure(kind="switch", name=graph.switch_name(s), links=tuple(map(int, touching)), switch=s)


class Routes:
    """Next hops and buffer dependencies of one fabric under one policy; failures are variations of the healthy one.

    `hop_DL`, `count_DS`: next hops per destination, and how many each switch has. `edges`: see
    `kernel.explore`; `uses`: how many destinations make each of them. Letters as in `graph`.
    """

    def __init__(self, graph: SwitchGraph, policy: Policy, classes: Classes) -> None:
        self.graph, self.policy, self.classes = graph, policy, classes
        self.code = POLICIES[policy]
        destinations, links = len(graph.hosts_D), graph.links
        self.hop_DL = np.zeros((destinations, links), np.bool_)
        self.count_DS = np.zeros((destinations, graph.topology.switches), np.int32)
        self.no_dead = np.zeros(links, np.bool_)
        self.lossy = np.zeros(destinations, np.int64)
        self.uses = self._no_edges().astype(np.int32)
        for d in range(destinations):
            self._next_hops(d, self.no_dead, self.hop_DL[d], self.count_DS[d])
            edges, self.lossy[d] = self.edges_of(d, self.hop_DL[d], self.no_dead, -1)
            self.uses += edges
        self.edges = self.uses > 0

    def healthy(self) -> Verdict:
        """The verdict without a failure."""
        cycle = self._cycle(self.edges, self.hop_DL, self.no_dead, -1)
        lost = self._unreachable(self.count_DS, -1)
        return Verdict(failure=HEALTHY, cycle=cycle, unreachable=lost, lossy_turns=int(self.lossy.sum()))

    def under(self, failure: Failure) -> Verdict:
        """The verdict under one failure; see the module's docstring for why it is exact."""
        dead = self.no_dead.copy()
        dead[list(failure.links)] = True
        affected = [d for d in self._affected(failure) if not self._gone(d, failure.switch)]
        fresh = {d: self._hops_under(d, dead) for d in affected}
        union, fell = self._bound(failure, dead, fresh)
        cycle = None
        if self._leftover(union).any():
            cycle, fell = self._exactly(failure, dead, fresh)
        lost = self._unreachable_under(fresh, failure.switch, dead)
        return Verdict(failure=failure, cycle=cycle, unreachable=lost, lossy_turns=fell)

    def _bound(self, failure: Failure, dead: Any, fresh: dict[int, tuple[Any, Any]]) -> tuple[Any, int]:
        """Edges among which all of this failure's are: old ones of destinations that keep their routes, new ones."""
        uses, fell = self.uses.copy(), int(self.lossy.sum())
        for d in range(len(self.graph.hosts_D)):
            if d in fresh or self._gone(d, failure.switch):
                uses -= self.edges_of(d, self.hop_DL[d], self.no_dead, -1)[0]
        union = uses > 0
        union[list(failure.links)] = False
        for link in failure.links:
            union[self.graph.head_L == self.graph.tail_L[link], :, self.graph.place_L[link]] = False
        for d, (hop_L, _) in fresh.items():
            fell += self._explore(d, hop_L, dead, failure.switch, union) - int(self.lossy[d])
        return union, fell

    def _exactly(self, failure: Failure, dead: Any, fresh: dict[int, tuple[Any, Any]]) -> tuple[Cycle | None, int]:
        """The very graph of this failure, judged."""
        hop, edges, fell = self.hop_DL.copy(), self._no_edges(), 0
        for d, (hop_L, _) in fresh.items():
            hop[d] = hop_L
        for d in range(len(self.graph.hosts_D)):
            if not self._gone(d, failure.switch):
                fell += self._explore(d, hop[d], dead, failure.switch, edges)
        return self._cycle(edges, hop, dead, failure.switch), fell

    def _affected(self, failure: Failure) -> list[int]:
        """Destinations for which some live switch loses every next hop it had."""
        graph = self.graph
        lost = np.zeros(self.count_DS.shape, np.int32)
        for link in failure.links:
            lost[:, graph.tail_L[link]] += self.hop_DL[:, link]
        hit = (lost > 0) & (lost == self.count_DS)
        if failure.switch >= 0:
            hit[:, failure.switch] = False
        affected = hit.any(axis=1)
        if failure.switch >= 0:
            affected |= graph.attached_DS[:, failure.switch]
        return [int(d) for d in np.flatnonzero(affected)]

    def _gone(self, d: int, dead_switch: int) -> bool:
        """All switches that destination d hangs on are dead."""
        attached = self.graph.attached_DS[d]
        return dead_switch >= 0 and bool(attached[dead_switch]) and int(attached.sum()) == 1

    def _hops_under(self, d: int, dead: Any) -> tuple[Any, Any]:
        if self.policy == "detour":  # tables do not know of the failure
            return self.hop_DL[d], self.count_DS[d]
        hop, count = np.zeros_like(self.hop_DL[d]), np.zeros_like(self.count_DS[d])
        self._next_hops(d, dead, hop, count)
        return hop, count

    def _next_hops(self, d: int, dead: Any, hop_L: Any, count_S: Any) -> None:
        g = self.graph
        code = kernel.SHORTEST if self.policy == "detour" else self.code
        args = (g.head_L, g.tail_L, g.up_L, g.top_first_S, g.out_S, g.degree_S, g.in_S, g.indegree_S)
        kernel.next_hops(code, g.attached_DS[d], *args, dead, hop_L, count_S)

    def _explore(self, d: int, hop_L: Any, dead: Any, dead_switch: int, edges: Any) -> int:
        g, c = self.graph, self.classes
        dead_S = np.zeros(g.topology.switches, np.bool_)
        if dead_switch >= 0:
            dead_S[dead_switch] = True
        seen = np.zeros((g.links, len(c.first_C)), np.bool_)
        return int(
            kernel.explore(
                self.code, g.attached_DS[d], g.source_DS[d], dead_S,
                g.head_L, g.twin_L, g.up_L, g.out_S, g.degree_S, g.place_L,
                hop_L, dead, c.priority_SC, c.first_C, c.bounced_C, edges, seen,
            )
        )  # fmt: skip

    def edges_of(self, d: int, hop_L: Any, dead: Any, dead_switch: int) -> tuple[Any, int]:
        """The dependencies that traffic to destination d makes, and how many turns were lossy."""
        edges = self._no_edges()
        return edges, self._explore(d, hop_L, dead, dead_switch, edges)

    def _no_edges(self) -> Any:
        priorities = len(self.classes.priorities)
        return np.zeros((self.graph.links, priorities, self.graph.out_S.shape[1], priorities), np.bool_)

    def _leftover(self, edges: Any) -> Any:
        return kernel.leftover(self.graph.head_L, self.graph.out_S, self.graph.degree_S, edges)

    def _cycle(self, edges: Any, hop_DL: Any, dead: Any, dead_switch: int) -> Cycle | None:
        left = self._leftover(edges)
        if not left.any():
            return None
        return short_cycle(self, edges, left, hop_DL, dead, dead_switch)

    def _unreachable(self, count_DS: Any, dead_switch: int) -> int:
        """Pairs (source switch, destination group) without a route."""
        want = self.graph.source_DS.copy()
        if dead_switch >= 0:
            want[:, dead_switch] = False
        return int((want & (count_DS == 0)).sum())

    def _unreachable_under(self, fresh: dict[int, tuple[Any, Any]], dead_switch: int, dead: Any) -> int:
        """Pairs that lost every route; hosts of a dead switch are not counted, their absence is no news."""
        if self.policy == "detour":
            return self._unreachable(self.count_DS, dead_switch)
        count = self.count_DS.copy()
        for d, (_, fresh_count) in fresh.items():
            count[d] = fresh_count
        for d in range(len(self.graph.hosts_D)):
            if self._gone(d, dead_switch):
                count[d] = 1
        return self._unreachable(count, dead_switch)

    def states(
        self, d: int, hop_L: Any, dead: Any, dead_switch: int
    ) -> Iterable[tuple[tuple[int, int], tuple[int, int]]]:
        """Every step ((link, class), (next link, class after)) of traffic to destination d; link -1 is a host's.

        The slow twin of `kernel.explore`, for naming the flows of a cycle.
        """
        g, c = self.graph, self.classes
        found = np.empty(g.out_S.shape[1], np.int32)
        table = (g.attached_DS[d], g.head_L, g.twin_L, g.out_S, g.degree_S, hop_L, dead)
        seen: set[tuple[int, int]] = set()
        queue: list[tuple[int, int]] = []
        for source in map(int, np.flatnonzero(g.source_DS[d])):
            if source == dead_switch:
                continue
            for i in range(kernel.choices(self.code, source, -1, *table, found)):
                for first in map(int, np.flatnonzero(c.first_C)):
                    state = (int(found[i]), first)
                    yield (-1, source), state
                    if state not in seen:
                        seen.add(state)
                        queue.append(state)
        for came, class_ in queue:  # grows while it is walked
            s = int(g.head_L[came])
            if g.attached_DS[d, s]:
                continue
            for i in range(kernel.choices(self.code, s, came, *table, found)):
                link = int(found[i])
                bounced = bool(g.up_L[link]) and not bool(g.up_L[came])
                after = int(c.bounced_C[class_]) if bounced else class_
                if after < 0:
                    continue
                state = (link, after)
                yield (came, class_), state
                if state not in seen:
                    seen.add(state)
                    queue.append(state)
