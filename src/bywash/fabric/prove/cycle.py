"""Naming a cycle: which buffers, in which order, and a flow for every one that makes it wait for the next.

Runs only when there is something to name, so it is plain Python. Called by `prover`.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bywash.fabric.prove.prover import Routes

Buffer = tuple[int, int]
"""(link, index of priority): the ingress buffer at the link's head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One buffer of a cycle, and a flow that makes it wait for the next one.

    Attributes:
        switch: where the buffer is.
        port: the link whose far end it is, `leaf0->spine1`: it fills behind that ingress port.
        priority: its 802.1p priority.
        flow: (source host, destination host) by name, of a flow that holds this buffer and needs the next.
        path: the switches of that flow up to and beyond the two buffers.
    """

    switch: str
    port: str
    priority: int
    flow: tuple[str, str]
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Buffers each of which waits for the next, and the last for the first."""

    waits: tuple[Wait, ...]

    def __str__(self) -> str:
        return " -> ".join(f"{wait.port} p{wait.priority}" for wait in self.waits) + " -> (first)"


def short_cycle(routes: "Routes", edges: Any, left: Any, hop_DL: Any, dead: Any, dead_switch: int) -> Cycle:
    """A shortest cycle through the first buffer that lies on any; `left` is what `kernel.leftover` kept."""
    after = _successors(routes, edges, left)
    buffers = next(found for start in after if (found := _back_to(start, after)))
    return _named(routes, buffers, hop_DL, dead, dead_switch)


def _successors(routes: "Routes", edges: Any, left: Any) -> dict[Buffer, list[Buffer]]:
    graph = routes.graph
    kept = {(int(link), int(p)) for link, p in zip(*np.nonzero(left))}
    after: dict[Buffer, list[Buffer]] = {}
    for link, p in sorted(kept):
        s = int(graph.head_L[link])
        nexts = [(int(graph.out_S[s, o]), int(q)) for o, q in zip(*np.nonzero(edges[link, p]))]
        after[link, p] = [buffer for buffer in nexts if buffer in kept]
    return after


def _back_to(start: Buffer, after: dict[Buffer, list[Buffer]]) -> list[Buffer]:
    """A shortest cycle through `start`, or nothing."""
    came: dict[Buffer, Buffer] = {}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for other in after[here]:
            if other == start:
                path = [here]
                while path[-1] != start:
                    path.append(came[path[-1]])
                return path[::-1]
            if other not in came:
                came[other] = here
                queue.append(other)
    return []


def _named(routes: "Routes", cycle: list[Buffer], hop_DL: Any, dead: Any, dead_switch: int) -> Cycle:
    """The cycle in names. Destinations are tried with the compiled loop first; only those that help are walked."""
    graph, classes = routes.graph, routes.classes
    nexts = [cycle[(i + 1) % len(cycle)] for i in range(len(cycle))]
    found: dict[int, tuple[tuple[str, str], tuple[str, ...]]] = {}
    for d in range(len(graph.hosts_D)):
        edges, _ = routes.edges_of(d, hop_DL[d], dead, dead_switch)
        wanted = {
            ((link, p), (after, q)): i
            for i, ((link, p), (after, q)) in enumerate(zip(cycle, nexts))
            if i not in found and edges[link, p, graph.place_L[after], q]
        }
        if wanted:
            found |= _search(routes, d, hop_DL[d], dead, dead_switch, wanted)
    waits = []
    for i, (link, p) in enumerate(cycle):
        flow, path = found[i]
        waits.append(
            Wait(
                switch=graph.switch_name(int(graph.head_L[link])),
                port=graph.link_name(link),
                priority=classes.priorities[p],
                flow=flow,
                path=path,
            )
        )
    return Cycle(waits=tuple(waits))


def _search(
    routes: "Routes", d: int, hop_L: Any, dead: Any, dead_switch: int, wanted: dict[tuple[Buffer, Buffer], int]
) -> dict[int, tuple[tuple[str, str], tuple[str, ...]]]:
    """For each wanted (buffer, next buffer), a flow to destination d that makes the one wait for the other."""
    graph, classes = routes.graph, routes.classes
    found: dict[int, tuple[tuple[str, str], tuple[str, ...]]] = {}
    parent: dict[tuple[int, int], tuple[int, int]] = {}
    for before, state in routes.states(d, hop_L, dead, dead_switch):
        parent.setdefault(state, before)
        link, class_ = before
        if link < 0:
            continue
        s = int(graph.head_L[link])
        holds, waits = int(classes.priority_SC[s, class_]), int(classes.priority_SC[s, state[1]])
        i = wanted.get(((link, holds), (state[0], waits)))
        if i is None or i in found:
            continue
        links = [state[0], link]
        step = before
        while parent[step][0] >= 0:
            step = parent[step]
            links.append(step[0])
        source = parent[step][1]
        switches = [source, *(int(graph.head_L[one]) for one in reversed(links))]
        hosts = _host_at(routes, source), graph.topology.nodes[graph.hosts_D[d][0]].name
        found[i] = hosts, tuple(graph.switch_name(one) for one in switches)
        if len(found) == len(wanted):
            break
    return found


def _host_at(routes: "Routes", switch: int) -> str:
    graph = routes.graph
    for d in np.flatnonzero(graph.attached_DS[:, switch]):
        return graph.topology.nodes[graph.hosts_D[int(d)][0]].name
    return graph.switch_name(switch)
