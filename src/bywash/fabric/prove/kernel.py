"""The proof's loops, compiled: next hops, the buffer dependencies of one destination, and whether a graph has a cycle.

Letters as in `graph`. A packet's state is (link it came over, class); its buffer is (that link, priority of the class
at the switch the link leads to).

`naive` says the same in plain Python over whole paths; the tests hold the two against each other.
Called by `prover` only. Arrays in, arrays changed in place.
"""

from typing import Any

import numba
import numpy as np

SHORTEST, UPDOWN, DETOUR = 0, 1, 2
"""Policies: shortest live paths; shortest that never go up after down; shortest of the healthy fabric, with the switch
next to a failure sending what has no next hop left to any neighbour but the one it came from."""

_FAR = 1 << 30
Array = Any  # numba's arrays; numpy's types say nothing to it


@numba.njit(cache=True)
def next_hops(
    policy: int,
    attached_S: Array,
    head_L: Array,
    tail_L: Array,
    up_L: Array,
    top_first_S: Array,
    out_S: Array,
    degree_S: Array,
    in_S: Array,
    indegree_S: Array,
    dead_L: Array,
    hop_L: Array,
    count_S: Array,
) -> None:
    """Mark in `hop_L` the links that are next hops, at their tails, towards one destination; count them in `count_S`.

    The choices are those of `bywash.fabric.routes`. Up-down: who has a way down takes the shortest, the others climb
    towards the nearest switch above that has a way.
    """
    far_S = _distances(policy, attached_S, tail_L, up_L, in_S, indegree_S, dead_L)
    down_S = far_S.copy()
    if policy == UPDOWN:
        for s in top_first_S:
            if down_S[s] < _FAR:
                continue
            for i in range(degree_S[s]):
                link = out_S[s, i]
                if up_L[link] and not dead_L[link] and far_S[head_L[link]] + 1 < far_S[s]:
                    far_S[s] = far_S[head_L[link]] + 1
    hop_L[:] = False
    count_S[:] = 0
    for link in range(head_L.shape[0]):
        t, h = tail_L[link], head_L[link]
        if dead_L[link] or far_S[h] == _FAR or far_S[t] != far_S[h] + 1:
            continue
        if policy == UPDOWN and (up_L[link] if down_S[t] < _FAR else not up_L[link]):
            continue
        if policy == UPDOWN and not up_L[link] and down_S[h] != far_S[h]:
            continue
        hop_L[link] = True
        count_S[t] += 1


@numba.njit(cache=True)
def _distances(
    policy: int, attached_S: Array, tail_L: Array, up_L: Array, in_S: Array, indegree_S: Array, dead_L: Array
) -> Array:
    """Links to the destination over live links, breadth first; for up-down over links that go down only."""
    switches = attached_S.shape[0]
    far_S = np.full(switches, _FAR, np.int32)
    queue = np.empty(switches, np.int32)
    first, last = 0, 0
    for s in range(switches):
        if attached_S[s]:
            far_S[s] = 0
            queue[last] = s
            last += 1
    while first < last:
        s = queue[first]
        first += 1
        for i in range(indegree_S[s]):
            link = in_S[s, i]
            t = tail_L[link]
            if not dead_L[link] and far_S[t] == _FAR and not (policy == UPDOWN and up_L[link]):
                far_S[t] = far_S[s] + 1
                queue[last] = t
                last += 1
    return far_S


@numba.njit(cache=True)
def choices(
    policy: int,
    switch: int,
    came: int,
    attached_S: Array,
    head_L: Array,
    twin_L: Array,
    out_S: Array,
    degree_S: Array,
    hop_L: Array,
    dead_L: Array,
    found: Array,
) -> int:
    """Links that a packet at `switch`, come over link `came` (-1: from a host), may take; how many are in `found`."""
    back = twin_L[came] if came >= 0 else -1
    n = 0
    for i in range(degree_S[switch]):
        link = out_S[switch, i]
        if hop_L[link] and not dead_L[link] and (policy != DETOUR or link != back):
            found[n] = link
            n += 1
    if n or policy != DETOUR:
        return n
    for i in range(degree_S[switch]):  # a detour: any live neighbour that can go on without coming back
        link = out_S[switch, i]
        if dead_L[link] or link == back:
            continue
        s = head_L[link]
        onward = attached_S[s]
        for j in range(degree_S[s]):
            other = out_S[s, j]
            onward = onward or (hop_L[other] and not dead_L[other] and head_L[other] != switch)
        if onward:
            found[n] = link
            n += 1
    return n


@numba.njit(cache=True)
def explore(
    policy: int,
    attached_S: Array,
    source_S: Array,
    dead_S: Array,
    head_L: Array,
    twin_L: Array,
    up_L: Array,
    out_S: Array,
    degree_S: Array,
    place_L: Array,
    hop_L: Array,
    dead_L: Array,
    priority_SC: Array,
    first_C: Array,
    bounced_C: Array,
    edge_LPOP: Array,
    seen_LC: Array,
) -> int:
    """Add the dependencies of one destination to `edge_LPOP`; return how many bounces fell out of the lossless classes.

    `edge_LPOP[l, p, o, q]`: buffer (l, p) waits for the queue of priority q on the o-th link out of l's head.
    `first_C` marks the classes that hosts send; `bounced_C[c]` is the class after a turn from down to up, -1 when the
    packet goes on lossy and holds no one up.
    """
    seen_LC[:] = False
    stack = np.empty((head_L.shape[0] * first_C.shape[0] + 1, 2), np.int32)
    found = np.empty(out_S.shape[1], np.int32)
    top, fell = 0, 0
    for s in range(attached_S.shape[0]):
        if not source_S[s] or dead_S[s]:
            continue
        n = choices(policy, s, -1, attached_S, head_L, twin_L, out_S, degree_S, hop_L, dead_L, found)
        for i in range(n):
            for c in range(first_C.shape[0]):
                if first_C[c] and not seen_LC[found[i], c]:
                    seen_LC[found[i], c] = True
                    stack[top, 0], stack[top, 1] = found[i], c
                    top += 1
    while top:
        top -= 1
        came, c = stack[top, 0], stack[top, 1]
        s = head_L[came]
        if attached_S[s]:
            continue
        n = choices(policy, s, came, attached_S, head_L, twin_L, out_S, degree_S, hop_L, dead_L, found)
        for i in range(n):
            link = found[i]
            after = bounced_C[c] if up_L[link] and not up_L[came] else c
            if after < 0:
                fell += 1
                continue
            holds, waits = priority_SC[s, c], priority_SC[s, after]
            if holds >= 0 and waits >= 0:
                edge_LPOP[came, holds, place_L[link], waits] = True
            if not seen_LC[link, after]:
                seen_LC[link, after] = True
                stack[top, 0], stack[top, 1] = link, after
                top += 1
    return fell


@numba.njit(cache=True)
def leftover(head_L: Array, out_S: Array, degree_S: Array, edge_LPOP: Array) -> Array:
    """Buffers (l, p) that lie on a cycle or between two: what stays when buffers that wait for no one are removed.

    Kahn's algorithm from the sinks would need reverse edges; removing those that no one waits for needs none.
    """
    links, priorities = edge_LPOP.shape[0], edge_LPOP.shape[1]
    waited = np.zeros((links, priorities), np.int32)
    for link in range(links):
        s = head_L[link]
        for p in range(priorities):
            for o in range(degree_S[s]):
                for q in range(priorities):
                    if edge_LPOP[link, p, o, q]:
                        waited[out_S[s, o], q] += 1
    left = np.ones((links, priorities), np.bool_)
    stack = np.empty((links * priorities, 2), np.int32)
    top = 0
    for link in range(links):
        for p in range(priorities):
            if waited[link, p] == 0:
                stack[top, 0], stack[top, 1] = link, p
                top += 1
    while top:
        top -= 1
        link, p = stack[top, 0], stack[top, 1]
        left[link, p] = False
        s = head_L[link]
        for o in range(degree_S[s]):
            for q in range(priorities):
                if edge_LPOP[link, p, o, q]:
                    other = out_S[s, o]
                    waited[other, q] -= 1
                    if waited[other, q] == 0:
                        stack[top, 0], stack[top, 1] = other, q
                        top += 1
    return left
