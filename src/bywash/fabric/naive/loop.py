"""The twin's event loop: dispatch by source, then the stages, then the next event."""

import heapq

from bywash.fabric.layout import LAST_PS
from bywash.fabric.naive import pfc, phases, rates, receiver, sender, switch
from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Port
from bywash.fabric.scenario import Scenario


def run_naive(scenario: Scenario) -> Network:
    """Handle events until everything counted is done, nothing is left (`empty`), or the end (`time limit`)."""
    net = Network(scenario)
    end = round(net.s.run.end_us * 1e6) if net.s.run.end_us else LAST_PS
    for group in net.phase_of:
        phases.advance(net, group)
    phases.arm_start(net)
    if net.s.run.sample_us:
        net.schedule(round(net.s.run.sample_us * 1e6), 4 * net.P + 2 * net.hosts + 1)
    net.verdict = "completed"
    while net.unfinished:
        if not net.heap:
            net.verdict = "empty"
            break
        time, source, number, what = net.heap[0]
        if what and source < 0 and not _other_events(net):
            net.verdict = "empty"  # only rate timers are left
            break
        if time > end:
            net.verdict = "time limit"
            break
        heapq.heappop(net.heap)
        if source < 0:
            rates.tick(net, time, net.senders[number], what)
            continue
        net.now = time
        _dispatch(net, source)
        _stages(net)
    return net


def _other_events(net: Network) -> bool:
    """Whether anything but rate timers is pending."""
    return any(event[1] >= 0 for event in net.heap)


def _dispatch(net: Network, source: int) -> None:
    P, H = net.P, net.hosts
    if source < P:
        _arrival(net, net.ports[source])
    elif source < 2 * P:
        net.ports[source - P].tx_at = None
        net.wake.append(source - P)
    elif source < 3 * P:
        port = net.ports[source - 2 * P]
        if port.nic_at == net.now:
            port.nic_at = None
            net.wake.append(port.number)
    elif source < 4 * P:
        if net.ports[source - 3 * P].timer_at == net.now:
            pfc.port_timer(net, net.ports[source - 3 * P])
    elif source < 4 * P + H:
        if net.rto_at[source - 4 * P] == net.now:
            sender.retransmission_timer(net, source - 4 * P)
    elif source < 4 * P + 2 * H:
        receiver.grant(net, source - 4 * P - H)
    elif source == 4 * P + 2 * H:
        if net.start_at == net.now:
            phases.start_flow(net)
    else:
        net.samples.append((net.now, [sum(q.egress for q in port.queues) for port in net.ports]))
        if _other_events(net):
            net.schedule(net.now + round(net.s.run.sample_us * 1e6), source)


def _stages(net: Network) -> None:
    while net.kick:
        sender.kick(net, net.kick.pop())
    while net.ctl:
        packet, number = net.ctl.pop()
        queue = net.ports[number].queues[1]
        queue.line.append(packet)
        queue.egress += packet.size
        queue.peak = max(queue.peak, queue.egress)
        net.wake.append(number)
    while net.wake or net.pfc:
        while net.pfc:
            pfc.send_pfc(net, *net.pfc.pop())
        _start_port(net, net.ports[net.wake.pop()])


def _arrival(net: Network, port: Port) -> None:
    _, packet = port.pipe.popleft()
    if port.pipe:
        net.schedule(port.pipe[0][0], port.number)
    if packet.kind in ("data", "ack", "nack"):
        net.hops += 1
    if packet.kind in ("pause", "resume"):
        pfc.paused(net, net.ports[port.number ^ 1], packet)
    elif port.peer >= net.hosts:
        switch.forward(net, port, packet)
    elif packet.kind == "data":
        receiver.receive(net, packet)
    else:
        sender.answered(net, port.peer, packet)


def _start_port(net: Network, port: Port) -> None:
    if port.free_at > net.now:
        _arm_tx(net, port)
        return
    host = port.owner < net.hosts
    while port.paced and port.paced[0][0] <= net.now:
        qp = net.senders[heapq.heappop(port.paced)[1]]
        sender.line_up(net, qp)
    number = _choose(net, port)
    if number is None:
        _arm_nic(net, port, 0)
        return
    if host and number >= 2:
        packet = sender.next_of_nic(net, port, number)
        if packet is None:
            net.wake.append(port.number)
            return
    else:
        packet = switch.leave(net, port, number)
    took = net.wire_ps(packet.size, port)
    port.queues[number].sent_bytes += packet.size
    port.free_at = net.now + took
    port.pipe.append((port.free_at + port.delay, packet))
    if len(port.pipe) == 1:
        net.schedule(port.pipe[0][0], port.number)
    if any(queue.line and not queue.paused for queue in port.queues):
        _arm_tx(net, port)
    else:
        _arm_nic(net, port, port.free_at)


def _arm_tx(net: Network, port: Port) -> None:
    if port.tx_at is None:
        port.tx_at = port.free_at
        net.schedule(port.free_at, net.P + port.number)


def _arm_nic(net: Network, port: Port, not_before: int) -> None:
    if port.paced:
        soon = max(not_before, port.paced[0][0])
        if port.nic_at is None or soon < port.nic_at:
            port.nic_at = soon
            net.schedule(soon, 2 * net.P + port.number)


def _choose(net: Network, port: Port) -> int | None:
    """Strict priorities first (PFC, control, strict classes), then deficit weighted round robin."""
    may = [n for n, queue in enumerate(port.queues) if queue.line and not queue.paused]
    strict = [n for n in may if n < 2 or net.s.classes[n - 2].strict]
    if strict or len(may) < 2:
        return (strict or may)[0] if may else None
    number = port.turn
    while True:
        queue = port.queues[number]
        if number in may:
            head = queue.line[0]
            size = net.s.frame_bytes if port.owner < net.hosts else head.size
            if queue.deficit >= size:
                queue.deficit -= size
                break
        number = number + 1 if number + 1 < len(port.queues) else 2
        if number in may:
            port.queues[number].deficit += net.s.frame_bytes * net.s.classes[number - 2].weight
    port.turn = number
    return number
