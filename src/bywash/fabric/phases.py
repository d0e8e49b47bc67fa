"""Phases and chains, compiled: which flows may start when another is done. Rare next to packets."""

# mypy: ignore-errors

import numba

from bywash.fabric.heaps import start_push
from bywash.fabric.layout import F_CHAIN, F_CHAIN_NEXT, F_OFFSET, F_PHASE, F_SRC, GROUP, S_STARTS


@numba.njit(_nrt=False)
def advance(group, now, phases, at_G, entered_GP, left_GP, first_GP, members, gap_P, fl, start_time, start_flow, sim):
    """Let a group enter the next phase, and those after it as far as they hold nothing to wait for."""
    while True:
        phase = at_G[group]
        if phase >= 0 and left_GP[group * phases + phase] > 0:
            break
        if phase + 1 >= phases:
            break
        begun = now
        if phase >= 0 and entered_GP[group * phases + phase] > now:
            begun = entered_GP[group * phases + phase]
        phase += 1
        at_G[group] = phase
        cell = group * phases + phase
        entered_GP[cell] = begun + gap_P[phase]
        for place in range(first_GP[cell], first_GP[cell + 1]):
            flow = members[place]
            start_push(start_time, start_flow, sim[S_STARTS], entered_GP[cell] + fl[flow, F_OFFSET], flow)
            sim[S_STARTS] += 1


@numba.njit(_nrt=False)
def host_done(
    host, phase, now, phases, ho, at_G, entered_GP, left_GP, first_GP, members, gap_P, fl, start_time, start_flow, sim
):
    """One flow of a phase is done at a host: sent and acknowledged, or arrived."""
    group = ho[host, GROUP]
    left_GP[group * phases + phase] -= 1
    if left_GP[group * phases + phase] == 0 and at_G[group] == phase:
        advance(
            group, now, phases, at_G, entered_GP, left_GP, first_GP, members, gap_P, fl, start_time, start_flow, sim
        )


@numba.njit(_nrt=False)
def chain(flow, now, phases, ho, entered_GP, fl, start_time, start_flow, sim):
    """Start the flows that waited for this one."""
    cell = ho[fl[flow, F_SRC], GROUP] * phases + fl[flow, F_PHASE]
    following = fl[flow, F_CHAIN]
    while following >= 0:
        time = entered_GP[cell] + fl[following, F_OFFSET]
        start_push(start_time, start_flow, sim[S_STARTS], max(now, time), following)
        sim[S_STARTS] += 1
        following = fl[following, F_CHAIN_NEXT]
