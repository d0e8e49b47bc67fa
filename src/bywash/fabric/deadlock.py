"""Deadlocks in a running fabric: queues that wait for each other in a circle.

A paused egress queue waits for the ingress queue downstream that paused it; that one waits for every egress queue of
its switch that holds its packets. What can still move is found first: a queue that is not paused moves, an ingress
queue drains when any of its packets can move, and what waits for something that drains will move. The rest is
deadlocked, and a cycle of it is named. (`proof` looks for the hazard in routes alone, without running.)
Reads the engine's rows through `layout`; called by `run` between chunks and at the end.
"""

import networkx as nx
import numpy as np

from bywash.fabric import layout as L
from bywash.fabric.state import State

Queue = tuple[int, int]
"""(port, queue): as an egress queue the port sends from it; as an ingress queue the port's owner received on it."""


def find_cycle(state: State) -> tuple[str, ...]:
    """The egress queues of a deadlock, each waiting for the next, as `leaf0->spine1/roce`; empty when there is none."""
    waits, holds = _waiting(state)
    if not waits:
        return ()
    stuck = _stuck(waits, holds)
    graph = nx.DiGraph()
    for queue in sorted(stuck):
        graph.add_edges_from((queue, other) for other in holds[waits[queue]] if other in stuck)
    try:
        edges = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return ()
    return tuple(_name(state, edge[0]) for edge in edges)


def _waiting(state: State) -> tuple[dict[Queue, Queue], dict[Queue, list[Queue]]]:
    """Paused egress queue -> the ingress queue it waits for; such ingress queue -> egress queues with its packets."""
    po4, qu4, pk = state.arrays["po4"], state.arrays["qu4"], state.arrays["pk"]
    waits: dict[Queue, Queue] = {}
    for port in np.flatnonzero(po4[:, L.PAUSED]).tolist():
        for queue in range(2, state.queues):
            held = po4[port, L.PAUSED] >> queue & 1 and qu4[port * state.queues + queue, L.HEAD] >= 0
            if held and qu4[(port ^ 1) * state.queues + queue, L.PAUSE_SENT] and po4[port, L.OWNER] >= state.hosts:
                waits[port, queue] = (port ^ 1, queue)
    holds: dict[Queue, list[Queue]] = {ingress: [] for ingress in waits.values()}
    if not waits:
        return waits, holds
    switches = {int(po4[ingress[0], L.OWNER]) for ingress in holds}
    for port in range(state.ports_count):
        if int(po4[port, L.OWNER]) not in switches:
            continue
        for queue in range(2, state.queues):
            seen: set[int] = set()
            packet = int(qu4[port * state.queues + queue, L.HEAD])
            while packet >= 0:
                seen.add(int(pk[packet, L.INPORT]))
                packet = int(pk[packet, L.NEXT])
            for inport in sorted(seen):
                if (inport, queue) in holds:
                    holds[inport, queue].append((port, queue))
    return waits, holds


def _stuck(waits: dict[Queue, Queue], holds: dict[Queue, list[Queue]]) -> set[Queue]:
    stuck = set(waits)
    while True:
        moves = {
            queue
            for queue in stuck
            if any(other not in stuck for other in holds[waits[queue]]) or not holds[waits[queue]]
        }
        if not moves:
            return stuck
        stuck -= moves


def _name(state: State, queue: Queue) -> str:
    return f"{state.scenario.topology.port_name(queue[0])}/{state.scenario.classes[queue[1] - 2].name}"
