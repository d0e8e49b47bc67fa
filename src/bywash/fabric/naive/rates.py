"""DCQCN's reaction point with real timers: one event for every tick of alpha, increase and decrease."""

import heapq

from bywash.fabric.naive.network import Network
from bywash.fabric.naive.parts import Sender


def _set_timer(net: Network, qp: Sender, what: str, time: int) -> None:
    """Order at one instant: alpha, increase, decrease."""
    qp.timers[what] = time
    heapq.heappush(net.heap, (time, -4 + ("alpha", "increase", "decrease").index(what), qp.number, what))


def congested(net: Network, qp: Sender) -> None:
    """A congestion notification has reached the sender."""
    d = net.s.nic.dcqcn
    if d.variant == "paper":
        qp.target = qp.rate
        qp.rate = max(min(d.min_mbps / 1e3, qp.most), qp.rate * (1.0 - qp.alpha / 2.0))
        qp.alpha = (1.0 - d.g) * qp.alpha + d.g
        qp.t_stage = qp.b_stage = 0
        qp.b_left = d.byte_counter
        _set_timer(net, qp, "alpha", net.now + round(d.alpha_us * 1e6))
        _set_timer(net, qp, "increase", net.now + round(d.timer_us * 1e6))
        return
    if qp.started:
        qp.alpha_bit = qp.cut_bit = True
        return
    qp.started, qp.cut_bit, qp.alpha, qp.target = True, True, 1.0, qp.rate
    _set_timer(net, qp, "alpha", net.now + round(d.alpha_us * 1e6))
    _set_timer(net, qp, "decrease", net.now + round(d.decrease_us * 1e6) + 1000)


def tick(net: Network, time: int, qp: Sender, what: str) -> None:
    """A timer has gone off, unless it was set anew since."""
    if qp.timers.get(what) != time:
        return
    d = net.s.nic.dcqcn
    period = {"alpha": d.alpha_us, "increase": d.timer_us, "decrease": d.decrease_us}[what]
    _set_timer(net, qp, what, time + round(period * 1e6))
    if what == "alpha":
        qp.alpha = (1.0 - d.g) * qp.alpha + (d.g if qp.alpha_bit else 0.0)
        qp.alpha_bit = False
    elif what == "increase":
        if d.variant == "ns3":
            increase(net, qp, qp.t_stage + 1, qp.t_stage)
            qp.t_stage += 1
        else:
            qp.t_stage += 1
            increase(net, qp, max(qp.t_stage, qp.b_stage), min(qp.t_stage, qp.b_stage))
    elif qp.cut_bit:
        if qp.t_stage != 0:
            qp.target = qp.rate
        qp.rate = max(min(d.min_mbps / 1e3, qp.most), qp.rate * (1.0 - qp.alpha / 2.0))
        qp.t_stage, qp.cut_bit = 0, False
        _set_timer(net, qp, "increase", time + round(d.timer_us * 1e6))


def repace(qp: Sender, pace: float) -> None:
    """The next flow's pace: rate and target keep their share of it."""
    if pace != qp.most:
        share = pace / qp.most
        qp.rate, qp.target, qp.most = qp.rate * share, qp.target * share, pace


def increase(net: Network, qp: Sender, first: int, second: int) -> None:
    """One increase event: after F additive, after F by the lesser stage too hyper."""
    d = net.s.nic.dcqcn
    if first > d.fast_recovery:
        step = d.hai_mbps if second > d.fast_recovery else d.ai_mbps
        qp.target = min(qp.target + step / 1e3, qp.most)
    qp.rate = qp.rate / 2 + qp.target / 2
