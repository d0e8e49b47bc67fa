"""A switch's buffer: what it admits, marks, drops, and gives back when a packet leaves."""

from bywash.fabric import inputs
from bywash.fabric.naive import routing
from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Packet, Port, Queue


def forward(net: Network, port: Port, packet: Packet) -> None:
    """A packet has arrived at a switch: choose its port, admit it, queue it."""
    node, number = port.peer, packet.queue
    out = net.ports[routing.route(net, node, packet)]
    queue = out.queues[number]
    if number >= 2:
        packet.came_in = port.number ^ 1
        if not _admit(net, node, net.ports[packet.came_in].queues[number], queue, number, packet):
            lose(net, queue, packet)
            return
    queue.line.append(packet)
    queue.egress += packet.size
    queue.peak = max(queue.peak, queue.egress)
    if net.s.switch.pfc.watchdog_us and queue.paused and queue.watch_at is None:
        queue.watch_at = net.now + round(net.s.switch.pfc.watchdog_us * 1e6)
        net.arm_timer(out, queue.watch_at)
    net.wake.append(out.number)


def threshold(net: Network, node: int) -> int:
    """The PFC threshold of every ingress queue of a switch now, in bytes beyond its reserve."""
    switch = net.s.switch
    if switch.static_xoff_bytes:
        return switch.static_xoff_bytes
    return (net.shared_cap[node] - net.shared_used[node]) * round(switch.alpha * 65536) >> 16


def _admit(net: Network, node: int, into: Queue, queue: Queue, number: int, packet: Packet) -> bool:
    switch, klass, size = net.s.switch, net.s.classes[number - 2], packet.size
    over = into.ingress + size - switch.reserve_bytes
    room = net.shared_cap[node] - net.shared_used[node]
    limit = threshold(net, node)
    if queue.storm:
        return False
    if not klass.lossless:
        most = switch.reserve_bytes + (room * round(switch.lossy_alpha * 65536) >> 16)
        if queue.egress + size > most or (over > 0 and min(size, over) > room):
            return False
        into.ingress += size
        net.shared_used[node] += max(0, min(size, over))
    elif over > 0 and (over > limit or min(size, over) > room):
        if into.headroom + size > into.cap:
            return False
        into.headroom += size
    else:
        into.ingress += size
        net.shared_used[node] += max(0, min(size, over))
    if klass.lossless and switch.pfc.enabled and not into.pause_sent:
        limit = threshold(net, node)
        if into.headroom > 0 or into.ingress - switch.reserve_bytes >= limit:
            into.pause_sent = True
            net.pfc.append((packet.came_in, number, "pause"))
    if switch.ecn.at == "enqueue":
        _mark(net, queue, number, packet, limit)
    return True


def _mark(net: Network, queue: Queue, number: int, packet: Packet, limit: int) -> None:
    ecn = net.s.switch.ecn
    if not (ecn.enabled and net.s.classes[number - 2].ecn):
        return
    port = next(one for one in net.ports if any(q is queue for q in one.queues))
    kmin, kmax = inputs.ecn_thresholds(net.s, port.gbps)
    if ecn.dynamic > 0 and int(ecn.dynamic * limit) < kmax:
        lower = int(ecn.dynamic * limit)
        kmin, kmax = kmin * lower // kmax, lower
    if queue.egress > kmax or (
        queue.egress > kmin and net.uniform() < ecn.pmax * (queue.egress - kmin) / (kmax - kmin)
    ):
        packet.marked = True
        queue.marks += 1


def leave(net: Network, port: Port, number: int) -> Packet:
    """Take the packet at the head of a queue, and give back its buffer."""
    queue = port.queues[number]
    packet: Packet = queue.line.popleft()
    if not queue.line:
        queue.deficit = 0
    if number > 0:
        queue.egress -= packet.size
    if number >= 2:
        release(net, port.owner, packet)
        if net.s.switch.ecn.at == "dequeue":
            _mark(net, queue, number, packet, threshold(net, port.owner))
    return packet


def release(net: Network, node: int, packet: Packet) -> None:
    """Give back the buffer that a packet held; its sender may resume."""
    switch = net.s.switch
    into = net.ports[packet.came_in].queues[packet.queue]
    from_headroom = min(into.headroom, packet.size)
    rest = packet.size - from_headroom
    net.shared_used[node] -= max(0, min(rest, into.ingress - switch.reserve_bytes))
    into.headroom -= from_headroom
    into.ingress -= rest
    if into.pause_sent and into.headroom == 0:
        used = into.ingress - switch.reserve_bytes
        if used <= 0 or used + switch.xon_offset_bytes <= threshold(net, node):
            into.pause_sent = False
            net.pfc.append((packet.came_in, packet.queue, "resume"))


def lose(net: Network, queue: Queue, packet: Packet) -> None:
    """Count a drop, and arm the sender's retransmission timer."""
    queue.drops += 1
    qp = packet.qp
    if packet.kind != "data" or qp is None or packet.psn < qp.una:
        return
    if qp.dropped < 0:
        qp.retries, qp.progress = 0, net.now
    qp.dropped = max(qp.dropped, packet.psn)
    if net.rto_at[qp.src] is None:
        time = net.rto_at[qp.src] = net.now + round(net.s.nic.rto_us * 1e6)
        net.schedule(time, 4 * net.P + qp.src)
