"""The receiving half of a queue pair: order, ACK, NACK, CNP, and grants in turn."""

from bywash.fabric.naive import phases
from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Packet, Sender


def receive(net: Network, packet: Packet) -> None:
    """A data packet has arrived at its host."""
    qp, nic = packet.qp, net.s.nic
    assert qp is not None
    psn, before, answer = packet.psn, qp.expected, "ack"
    if psn == qp.expected:
        qp.expected += 1
        while qp.expected in qp.early:
            qp.early.remove(qp.expected)
            qp.expected += 1
    elif psn > qp.expected:
        if nic.out_of_order:
            if psn not in qp.early:
                qp.early.add(psn)
                net.early += 1
                net.early_max = max(net.early_max, psn - qp.expected)
        else:
            answer = "" if qp.nacked == qp.expected else "nack"
            qp.nacked = qp.expected
    echo = False
    if packet.marked and nic.control == "dcqcn":
        if nic.dcqcn.cnp == "ack-bit":
            echo = True
            net.cnps += 1
        elif qp.cnp_at is None or net.now - qp.cnp_at >= round(nic.dcqcn.cnp_interval_us * 1e6):
            qp.cnp_at = net.now
            net.cnps += 1
            net.control("cnp", qp, qp.src)
    finished = False
    for flow in qp.flows:
        if before < flow.end <= qp.expected:
            flow.arrived = net.now
            finished = True
            phases.host_done(net, flow, qp.dst)
    if finished:
        phases.arm_start(net)
    if nic.ack_every > 1 and answer == "ack" and not finished and not echo and psn < qp.expected:
        qp.unacked += 1
        if qp.unacked < nic.ack_every:
            answer = ""
    if answer:
        qp.unacked = 0
        net.control(answer, qp, qp.src, psn=psn, cum=qp.expected, marked=echo)


def requested(net: Network, host: int, qp: Sender, packet: Packet) -> None:
    """A sender asks for grants."""
    if packet.psn > qp.want:
        qp.want = packet.psn
        qp.granted = max(qp.granted, packet.cum)
        if qp.granted < qp.want and not qp.in_ring:
            qp.in_ring = True
            net.rings[host].append(qp)
            if net.grant_at[host] is None:
                time = net.grant_at[host] = max(net.now, net.grant_free[host])
                net.schedule(time, 4 * net.P + net.hosts + host)


def grant(net: Network, host: int) -> None:
    """Grant one packet to the queue pair whose turn it is."""
    qp = net.rings[host].popleft()
    qp.granted += 1
    qp.in_ring = qp.granted < qp.want
    if qp.in_ring:
        net.rings[host].append(qp)
    net.control("grant", qp, qp.src, psn=qp.granted)
    net.grant_free[host] = net.now + (net.s.frame_bytes * net.ports[qp.back_port].per_byte >> 16)
    net.grant_at[host] = None
    if net.rings[host]:
        net.grant_at[host] = net.grant_free[host]
        net.schedule(net.grant_free[host], 4 * net.P + net.hosts + host)
