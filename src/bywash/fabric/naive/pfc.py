"""Pause frames sent and obeyed, quanta that run out, the watchdog."""

from bywash.fabric.naive import switch
from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Packet, Port


def paused(net: Network, back: Port, packet: Packet) -> None:
    """A pause or resume frame has arrived: the port back to its sender stops or goes on."""
    queue, pfc = back.queues[packet.queue], net.s.switch.pfc
    if packet.kind == "pause":
        if not queue.paused:
            queue.paused, queue.paused_since = True, net.now
            if pfc.watchdog_us and queue.line and back.owner >= net.hosts and not queue.storm:
                queue.watch_at = net.now + round(pfc.watchdog_us * 1e6)
        if pfc.mode == "quanta":
            queue.unpause_at = net.now + (pfc.quanta * 64 * back.per_byte >> 16)
        if queue.storm:
            queue.restore_at = None
    elif queue.paused:
        queue.paused = False
        queue.paused_total += net.now - queue.paused_since
        queue.watch_at = queue.unpause_at = None
        if queue.storm:
            queue.restore_at = net.now + round(pfc.watchdog_restore_us * 1e6)
        net.wake.append(back.number)
    net.arm_timer(back, queue.unpause_at, queue.watch_at, queue.restore_at)


def send_pfc(net: Network, number: int, klass: int, kind: str) -> None:
    """Queue a pause or resume frame, before everything else on its port."""
    port, queue, pfc = net.ports[number], net.ports[number].queues[klass], net.s.switch.pfc
    port.queues[0].line.append(Packet(kind, net.s.frame.ack_bytes, klass))
    if kind == "pause":
        queue.pauses += 1
        if queue.first_pause < 0:
            queue.first_pause = net.now
    if pfc.mode == "quanta":
        queue.refresh_at = net.now + (pfc.quanta * 32 * port.per_byte >> 16) if kind == "pause" else None
        net.arm_timer(port, queue.refresh_at)
    net.wake.append(number)


def port_timer(net: Network, port: Port) -> None:
    """What is due on a port: quanta that ran out, refreshed pauses, the watchdog."""
    now, pfc = net.now, net.s.switch.pfc
    pending: list[int] = []
    for number, queue in enumerate(port.queues[2:], start=2):
        if queue.unpause_at is not None and queue.unpause_at <= now:
            queue.unpause_at = queue.watch_at = None
            if queue.paused:
                queue.paused = False
                queue.paused_total += now - queue.paused_since
                if queue.storm:
                    queue.restore_at = now + round(pfc.watchdog_restore_us * 1e6)
                net.wake.append(port.number)
        if queue.refresh_at is not None and queue.refresh_at <= now:
            queue.refresh_at = None
            if queue.pause_sent:
                net.pfc.append((port.number, number, "pause"))
        if queue.restore_at is not None and queue.restore_at <= now:
            queue.restore_at, queue.storm = None, False
        if queue.watch_at is not None and queue.watch_at <= now:
            queue.watch_at = None
            if queue.paused and queue.line:
                queue.storm = True
                while queue.line:
                    packet = queue.line.popleft()
                    queue.egress -= packet.size
                    switch.release(net, port.owner, packet)
                    switch.lose(net, queue, packet)
        times = (queue.unpause_at, queue.refresh_at, queue.watch_at, queue.restore_at)
        pending += [time for time in times if time is not None]
    port.timer_at = min(pending, default=None)
    if port.timer_at is not None:
        net.schedule(port.timer_at, 3 * net.P + port.number)
