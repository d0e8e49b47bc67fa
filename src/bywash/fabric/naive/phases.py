"""Flows that start: at their time, after another flow, when their group of hosts enters a phase."""

import heapq

from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Flow


def arm_start(net: Network) -> None:
    """See to it that the next flow starts in time."""
    if net.waiting and (net.start_at is None or net.waiting[0][0] < net.start_at):
        net.start_at = net.waiting[0][0]
        net.schedule(net.start_at, 4 * net.P + 2 * net.hosts)


def start_flow(net: Network) -> None:
    """The flow whose time has come is ready to send; under receiver control it asks for grants."""
    flow = net.flows[heapq.heappop(net.waiting)[1]]
    qp = net.senders[net.sender_of[flow.number]]
    before = qp.limit
    flow.start, flow.ready = net.now, True
    if net.s.nic.control == "receiver" and qp.limit != before:
        unasked = net.s.nic.window_bytes // net.s.frame.payload_bytes
        qp.credit = max(qp.credit, min(qp.next + unasked, qp.limit))
        if qp.credit < qp.limit:
            net.control("rts", qp, qp.dst, psn=qp.limit, cum=qp.credit)
    if qp.state == "idle":
        net.kick.append(qp)
    net.start_at = None
    arm_start(net)


def host_done(net: Network, flow: Flow, host: int) -> None:
    """A host is done with its end of a flow; its group may enter the next phase."""
    if net.s.flows.background_F[flow.number]:
        return
    cell = net.group[host], int(net.s.flows.phase_F[flow.number])
    net.left[cell] -= 1
    if net.left[cell] == 0 and net.phase_of[cell[0]] == cell[1]:
        advance(net, cell[0])


def advance(net: Network, group: int) -> None:
    """Let a group of hosts enter the phases that it is ready for."""
    flows = net.s.flows
    while net.phase_of[group] + 1 < flows.phases:
        old = net.phase_of[group]
        if old >= 0 and net.left.get((group, old), 0) > 0:
            return
        begun = max(net.now, net.entered.get((group, old), 0))
        net.phase_of[group] = phase = old + 1
        net.entered[group, phase] = begun + int(flows.gap_ps_P[phase])
        for n in range(flows.count):
            mine = net.group[int(flows.src_F[n])] == group and int(flows.phase_F[n]) == phase
            if mine and flows.after_F[n] < 0:
                heapq.heappush(net.waiting, (net.entered[group, phase] + int(flows.start_ps_F[n]), n))


def chain(net: Network, done: int) -> None:
    """Let the flows start that waited for this one."""
    flows = net.s.flows
    for n in range(flows.count):
        if int(flows.after_F[n]) == done:
            begun = net.entered[net.group[int(flows.src_F[n])], int(flows.phase_F[n])]
            heapq.heappush(net.waiting, (max(net.now, begun + int(flows.start_ps_F[n])), n))
