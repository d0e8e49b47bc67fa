"""The proof by enumeration, for small graphs: every path of every flow, every dependency, every elementary cycle.

The oracle of `prover`: it shares no route and no loop with it, walks whole paths where the kernel walks states, and
lets networkx list the cycles. Exponential; meant for a handful of switches.
"""

from collections.abc import Iterator
from itertools import pairwise

import networkx as nx

from bywash.fabric.prove.graph import SwitchGraph
from bywash.fabric.prove.prover import HEALTHY, Classes, Failure, Policy

Buffer = tuple[int, int]
"""(link, index of priority)."""


def dependencies(
    graph: SwitchGraph, policy: Policy, classes: Classes, failure: Failure = HEALTHY
) -> set[tuple[Buffer, Buffer]]:
    """Every (buffer, buffer it waits for) that some path of some flow creates."""
    live = [link for link in range(graph.links) if link not in failure.links]
    found: set[tuple[Buffer, Buffer]] = set()
    for d in range(len(graph.hosts_D)):
        targets = {s for s in range(graph.topology.switches) if graph.attached_DS[d, s]}
        alive = targets - {failure.switch}
        if not alive:
            continue
        for source in range(graph.topology.switches):
            if graph.source_DS[d, source] and source != failure.switch:
                for path in _paths(graph, policy, live, source, targets):
                    found |= _waits(graph, classes, path)
    return found


def has_cycle(edges: set[tuple[Buffer, Buffer]]) -> bool:
    """Whether any elementary cycle exists."""
    return next(nx.simple_cycles(nx.DiGraph(list(edges))), None) is not None


def _paths(graph: SwitchGraph, policy: Policy, live: list[int], source: int, targets: set[int]) -> Iterator[list[int]]:
    """Every path, as links, that a packet from `source` may take to the first of `targets`."""
    if policy == "detour":
        yield from _detours(graph, live, source, targets)
        return
    if policy == "up-down":
        yield from _up_down(graph, live, source, targets)
        return
    complete = list(_simple(graph, live, [], source, targets, {source}))
    least = min((len(path) for path in complete), default=0)
    yield from (path for path in complete if len(path) == least)


def _simple(
    graph: SwitchGraph, live: list[int], path: list[int], here: int, targets: set[int], seen: set[int]
) -> Iterator[list[int]]:
    if here in targets:
        yield path
        return
    for link in live:
        head = int(graph.head_L[link])
        if graph.tail_L[link] == here and head not in seen:
            yield from _simple(graph, live, [*path, link], head, targets, seen | {head})


def _up_down(graph: SwitchGraph, live: list[int], source: int, targets: set[int]) -> list[list[int]]:
    """Shortest ways down where there are any; else a step up to those above from which the rest is shortest."""
    falling = [link for link in live if not graph.up_L[link]]
    down = list(_simple(graph, falling, [], source, targets, {source}))
    if down:
        least = min(map(len, down))
        return [path for path in down if len(path) == least]
    climbing = [link for link in live if graph.up_L[link] and graph.tail_L[link] == source]
    ways = [[link, *rest] for link in climbing for rest in _up_down(graph, live, int(graph.head_L[link]), targets)]
    least = min(map(len, ways), default=0)
    return [way for way in ways if len(way) == least]


def _detours(graph: SwitchGraph, live: list[int], source: int, targets: set[int]) -> Iterator[list[int]]:
    """Walks under tables of the healthy fabric; a walk ends at the target, or when it repeats a link."""
    whole = nx.MultiDiGraph()
    whole.add_nodes_from(range(graph.topology.switches))
    whole.add_edges_from((int(graph.head_L[link]), int(graph.tail_L[link])) for link in range(graph.links))
    far = nx.multi_source_dijkstra_path_length(whole, targets, weight=lambda *_: 1)

    def table(here: int) -> list[int]:
        return [
            link
            for link in live
            if graph.tail_L[link] == here and far.get(int(graph.head_L[link]), -9) + 1 == far.get(here, -1)
        ]

    def onward(here: int, came: int) -> list[int]:
        back = came ^ 1 if came >= 0 else -1
        usual = [link for link in table(here) if link != back]
        if usual:
            return usual
        around = [link for link in live if graph.tail_L[link] == here and link != back]
        return [
            link
            for link in around
            if (n := int(graph.head_L[link])) in targets or any(graph.head_L[o] != here for o in table(n))
        ]

    def walk(here: int, path: list[int]) -> Iterator[list[int]]:
        nexts = [] if here in targets else onward(here, path[-1] if path else -1)
        fresh = [link for link in nexts if link not in path]
        repeated = [link for link in nexts if link in path]
        for link in repeated:
            yield [*path, link]
        for link in fresh:
            yield from walk(int(graph.head_L[link]), [*path, link])
        if not nexts:
            yield path

    yield from walk(source, [])


def _waits(graph: SwitchGraph, classes: Classes, path: list[int]) -> set[tuple[Buffer, Buffer]]:
    """What each class that hosts send holds and needs along one path."""
    waits: set[tuple[Buffer, Buffer]] = set()
    for first in range(len(classes.first_C)):
        if not classes.first_C[first]:
            continue
        class_ = first
        for link, after in pairwise(path):
            s = int(graph.head_L[link])
            now = class_
            if graph.up_L[after] and not graph.up_L[link]:
                class_ = int(classes.bounced_C[class_])
            if class_ < 0:
                break
            holds, needs = int(classes.priority_SC[s, now]), int(classes.priority_SC[s, class_])
            if holds >= 0 and needs >= 0:
                waits.add(((link, holds), (after, needs)))
    return waits
