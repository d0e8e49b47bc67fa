"""The sending half of a queue pair: what it may send next, answers, retransmission."""

import heapq

from bywash.fabric.layout import RETRY_LIMIT
from bywash.fabric.naive import phases, rates, receiver
from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Packet, Port, Sender


def answered(net: Network, host: int, packet: Packet) -> None:
    """A control packet has arrived at a host."""
    qp = packet.qp
    assert qp is not None
    if packet.kind == "cnp" or packet.marked:
        rates.congested(net, qp)
    if packet.kind in ("ack", "nack"):
        _acknowledged(net, qp, packet)
    elif packet.kind == "rts":
        receiver.requested(net, host, qp, packet)
        return
    elif packet.kind == "grant":
        qp.credit = max(qp.credit, packet.psn)
    if qp.state == "idle":
        net.kick.append(qp)


def _acknowledged(net: Network, qp: Sender, packet: Packet) -> None:
    cum = packet.cum
    if cum > qp.una:
        before, qp.una = qp.una, cum
        if qp.dropped >= 0:
            qp.progress, qp.retries = net.now, 0
            if cum > qp.dropped:
                qp.dropped = -1
        qp.next = max(qp.next, cum)
        done = [flow for flow in qp.flows if before < flow.end <= cum]
        for flow in done:
            flow.done = net.now
            if not net.s.flows.background_F[flow.number]:
                net.unfinished -= 1
            phases.host_done(net, flow, qp.src)
            phases.chain(net, flow.number)
        if done:
            phases.arm_start(net)
    if packet.kind == "nack" and cum == qp.una:
        _rewind(net, qp)
    elif net.s.nic.recovery == "selective" and packet.psn >= qp.una:
        qp.sacked.add(packet.psn)
        if packet.psn > qp.sack_high:
            qp.sack_high = packet.psn
            reorder = net.s.nic.reorder_packets
            if net.s.routing.mode != "ecmp":
                reorder = max(reorder, net.s.nic.ooo_packets)
            qp.retx_end = max(qp.retx_end, packet.psn - reorder + 1)


def _rewind(net: Network, qp: Sender) -> None:
    if qp.una < qp.flows[-1].end:
        net.retransmitted += qp.next - qp.una
        qp.next = qp.una


def _hole(net: Network, qp: Sender) -> int | None:
    if qp.retx >= qp.retx_end:
        return None
    qp.retx = max(qp.retx, qp.una)
    while qp.retx < qp.retx_end and qp.retx in qp.sacked:
        qp.retx += 1
    return qp.retx if qp.retx < qp.retx_end else None


def retransmission_timer(net: Network, host: int) -> None:
    """Send again what was lost, for the queue pairs of a host that made no progress."""
    rto = round(net.s.nic.rto_us * 1e6)
    soon: list[int] = []
    for qp in net.senders:
        if qp.src != host or qp.dropped < 0 or qp.retries > RETRY_LIMIT:
            continue
        if net.now - qp.progress >= rto:
            net.timeouts += 1
            qp.progress = net.now
            qp.retries += 1
            if qp.retries > RETRY_LIMIT:
                continue
            if net.s.nic.recovery == "selective":
                qp.retx, qp.retx_end = qp.una, qp.next
            else:
                _rewind(net, qp)
            net.kick.append(qp)
        soon.append(qp.progress + rto)
    net.rto_at[host] = min(soon, default=None)
    if soon:
        net.schedule(min(soon), 4 * net.P + host)


def _may_send(net: Network, qp: Sender) -> bool:
    new = qp.next < qp.limit and qp.next - qp.una < qp.window
    if net.s.nic.control == "receiver" and qp.next >= qp.credit:
        new = False
    return _hole(net, qp) is not None or new


def kick(net: Network, qp: Sender) -> None:
    """A queue pair may have become able to send."""
    if qp.state == "idle" and _may_send(net, qp):
        line_up(net, qp)
        net.wake.append(qp.port)


def line_up(net: Network, qp: Sender) -> None:
    """Let a queue pair wait for its turn, or for its pacing."""
    port = net.ports[qp.port]
    if qp.next_at <= net.now:
        qp.state = "ready"
        port.queues[qp.queue].line.append(qp)
    else:
        qp.state = "paced"
        heapq.heappush(port.paced, (qp.next_at, qp.number))


def next_of_nic(net: Network, port: Port, number: int) -> Packet | None:
    """The next packet of the queue pair whose turn it is, or None."""
    queue, s = port.queues[number], net.s
    qp: Sender = queue.line.popleft()
    if not queue.line:
        queue.deficit = 0
    if not _may_send(net, qp):
        qp.state = "idle"
        return None
    psn = _hole(net, qp)
    if psn is not None:
        qp.retx = psn + 1
        net.retransmitted += 1
    else:
        psn = qp.next
        qp.next += 1
        rates.repace(qp, qp.flow_of(psn).pace)
    size = qp.payload(psn, s.frame.payload_bytes) + s.frame.header_bytes
    if s.nic.control == "dcqcn" and s.nic.dcqcn.variant == "paper" and s.nic.dcqcn.byte_counter:
        qp.b_left -= size
        if qp.b_left <= 0:
            qp.b_left += s.nic.dcqcn.byte_counter
            qp.b_stage += 1
            rates.increase(net, qp, max(qp.t_stage, qp.b_stage), min(qp.t_stage, qp.b_stage))
    took = net.wire_ps(size, port)
    gap = int(size * 8000.0 / qp.rate)
    gap = gap // 1000 * 1000 if s.frame.whole_ns else gap
    gap = took if gap <= took + 1 else gap
    qp.next_at = net.now + gap
    if not _may_send(net, qp):
        qp.state = "idle"
    elif gap <= took:
        queue.line.append(qp)
    else:
        qp.state = "paced"
        heapq.heappush(port.paced, (qp.next_at, qp.number))
    return Packet("data", size, number, qp, psn, to=qp.dst, entropy=qp.entropy)
