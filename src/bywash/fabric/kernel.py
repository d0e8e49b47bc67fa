"""The hot loop: one event after another, compiled by numba.

Event sources, in the order of ties at one instant (P ports, H hosts); each has at most one live event:
    0..P-1         arrival of the packet at the head of a link's pipe, at the node that the port sends to
    P..2P-1        a port is free again and something waits for it
    2P..3P-1       the earliest paced QP of a host's port
    3P..4P-1       timers of a port: pause quanta, PFC watchdog
    4P..4P+H-1     retransmission timers of a host
    4P+H..4P+2H-1  a receiver's next grant
    4P+2H          the next flow to start
    4P+2H+1        the next sample of the queues
An event whose time is no longer its source's noted one is stale and does nothing.

Each event is handled in stages, and what one stage finds to do goes to a stack that a later one empties:
dispatch -> `kick` (QPs that may be able to send) -> `ctl` (control packets to queue) -> `pfc` (pause frames to send)
-> `wake` (ports that may start a packet; doing so may add to `pfc`) -> `pend` (events to schedule).

`make_kernel(False)` compiles the lean one: one lossless class, ECMP, no recovery, no samples; `make_kernel(True)` all.
They agree on every scenario that both can run. Works on the rows of `layout`; called by `run` only.
"""

# Column numbers are many and used everywhere here; numba code has no types that mypy could check.
# ruff: noqa: F403, F405, SIM102
# mypy: ignore-errors

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np

from bywash.fabric.calendar import follow, refill, schedule
from bywash.fabric.dcqcn import catch_up, on_bytes, on_cnp, repace
from bywash.fabric.heaps import nic_pop, nic_push, pop_top, push, start_pop
from bywash.fabric.hints import assume, prefetch
from bywash.fabric.layout import *
from bywash.fabric.phases import advance, chain, host_done

_M32 = 0xFFFFFFFF
_SPARE = 64
_MANY_QPS = 8192  # from here on the rows of QPs no longer fit the second-level cache


@numba.njit(forceinline=True, _nrt=False)
def choose_by_hash(entropy, seed, count):
    """One of `count` by the finaliser of MurmurHash3 over entropy and the switch's seed."""
    h = (entropy ^ seed) & _M32
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _M32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _M32
    h ^= h >> 16
    return (h * count) >> 32


@numba.njit(forceinline=True, _nrt=False)
def choose_as_ns3(entropy, to, is_data, seed, count):
    """The HPCC simulator's choice: its MurmurHash3 of (sip, dip, ports), modulo."""
    sender = entropy & 0x1FFFF
    sport = 10000 + (entropy >> 17)
    ports = sport | 100 << 16 if is_data else 100 | sport << 16
    h = seed & _M32
    for word in range(3):
        if word == 2:
            k = ports
        else:
            host = sender if word == 0 else to
            k = 0x0B000001 + ((host // 256) << 16) + ((host % 256) << 8)
        k = (k * 0xCC9E2D51) & _M32
        k = ((k << 15) | (k >> 17)) & _M32
        k = (k * 0x1B873593) & _M32
        h ^= k
        h = ((h << 13) | (h >> 19)) & _M32
        h = (h + (h << 2) + 0xE6546B64) & _M32
    h ^= 12
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _M32
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _M32
    h ^= h >> 16
    return h % count


@numba.njit(forceinline=True, _nrt=False)
def uniform(rng):
    """The next number in [0, 1) of the run's xorshift64."""
    x = rng[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = x
    return np.int64(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@numba.njit(forceinline=True, _nrt=False)
def least_loaded(first, count, turn, queue, ports, load_P):
    """The candidate with the fewest bytes queued, paused ones last; ties in turn."""
    best, best_load = -1, NO_EVENT
    for step in range(count):
        place = turn + step
        if place >= count:
            place -= count
        port = ports[first + place]
        load = (load_P[port] & ((1 << LOAD_BITS) - 1)) + ((load_P[port] >> (LOAD_BITS + queue)) & 1) * (1 << 50)
        if load < best_load:
            best, best_load = port, load
    return best


@numba.njit(forceinline=True, _nrt=False)
def fetch_sender(full, qp, qc, q):
    """Fetch a sender's row, and the part of its colder one that the full kernel touches for every packet."""
    prefetch(qp, q)
    if full:
        prefetch(qc, q)


@numba.njit(forceinline=True, _nrt=False)
def release(sw, qu4, node, row, size, par):
    """Give back the buffer that a leaving packet held on ingress queue `row`; whether its sender may resume."""
    from_headroom = min(qu4[row, HEADROOM], size)
    qu4[row, HEADROOM] -= from_headroom
    rest = size - from_headroom
    over = qu4[row, INGRESS] - par[P_RESERVE]
    qu4[row, INGRESS] -= rest
    if over > 0:
        sw[node, SHARED_USED] -= min(rest, over)
    if qu4[row, PAUSE_SENT] == 0 or qu4[row, HEADROOM] > 0:
        return False
    used = qu4[row, INGRESS] - par[P_RESERVE]
    return used <= 0 or used + par[P_XON] <= threshold(sw, node, par)


@numba.njit(forceinline=True, _nrt=False)
def threshold(sw, node, par):
    """The PFC threshold of every ingress queue of a switch now, in bytes beyond its reserve."""
    if par[P_STATIC_XOFF] > 0:
        return par[P_STATIC_XOFF]
    return ((sw[node, SHARED_CAP] - sw[node, SHARED_USED]) * par[P_ALPHA_Q16]) >> 16


@numba.njit(forceinline=True, _nrt=False)
def marks(qu4, row, limit, par, parf, rng):
    """WRED on the egress queue as it stands; `limit` is the PFC threshold now."""
    length = qu4[row, EGRESS]
    kmin, kmax = qu4[row, KMIN], qu4[row, KMAX]
    if parf[R_ECN_DYNAMIC] > 0.0:
        lower = int(parf[R_ECN_DYNAMIC] * limit)
        if lower < kmax:
            kmin = kmin * lower // kmax
            kmax = lower
    if length <= kmin:
        return False
    if length > kmax:
        return True
    return uniform(rng) < parf[R_PMAX] * (length - kmin) / (kmax - kmin)


@numba.njit(forceinline=True, _nrt=False)
def leave_queue(qu, qu4, row, load_P, port, size, now, par):
    """Egress accounting of a packet that leaves; ends a micro-burst when the queue falls to its threshold."""
    qu4[row, EGRESS] -= size
    load_P[port] -= size
    if qu4[row, EGRESS] <= par[P_BURST] < qu4[row, EGRESS] + size and qu[row, BURST_SINCE] > 0:
        lasted = now + 1 - qu[row, BURST_SINCE]
        qu[row, BURST_SINCE] = 0
        qu[row, BURSTS] += 1
        qu[row, BURST_TOTAL] += lasted
        qu[row, BURST_MAX] = max(qu[row, BURST_MAX], lasted)


@numba.njit(forceinline=True, _nrt=False)
def note(log, sim, now, port, queue, what):
    """Log a PFC event while there is room."""
    at = sim[S_LOG]
    if at < log.shape[0]:
        log[at, 0], log[at, 1], log[at, 2], log[at, 3] = now, port, queue, what
        sim[S_LOG] = at + 1


@numba.njit(forceinline=True, _nrt=False)
def lose(pk, k, qc, qp4, rx4, sim, row, qu, now):
    """Account for a dropped packet; the host whose retransmission timer must be armed, or -1."""
    qu[row, DROPS] += 1
    size = pk[k, META] & 0xFFFF
    sim[S_DROPPED_BYTES] += size
    if (pk[k, META] >> TYPE_SHIFT) & 7 != DATA:
        return -1
    q = pk[k, QP]
    if pk[k, PSN] < qp4[q, UNA]:
        return -1
    if qc[q, DROPPED] < 0:
        qc[q, RETRIES] = 0
        qc[q, PROGRESS] = now
    if pk[k, PSN] > qc[q, DROPPED]:
        qc[q, DROPPED] = pk[k, PSN]
    return rx4[q, SOURCE]


@numba.njit(forceinline=True, _nrt=False)
def next_hole(qc, qp4, q, sacks):
    """The next packet to send again, or -1; moves RETX past what has been acknowledged."""
    psn = max(qc[q, RETX], qp4[q, UNA])
    end = qc[q, RETX_END]
    while psn < end:
        place = psn & qc[q, BIT_MASK]
        if (sacks[qc[q, BIT_BASE] + (place >> 6)] >> np.uint64(place & 63)) & np.uint64(1) == 0:
            break
        psn += 1
    qc[q, RETX] = psn
    return psn if psn < end else -1


@numba.njit(forceinline=True, _nrt=False)
def rewind(qc, qp4, q, fl, sim):
    """Go back to the first packet that is not acknowledged; what lies between is sent again."""
    flow = qc[q, ACK_FLOW]
    if flow >= 0:
        sim[S_RETX] += qp4[q, NXT] - qp4[q, UNA]
        qp4[q, NXT] = qp4[q, UNA]
        qc[q, CUR_FLOW], qp4[q, CUR_END], qp4[q, CUR_LAST] = flow, qp4[q, ACK_END], fl[flow, F_LAST]


@numba.njit(forceinline=True, _nrt=False)
def payload_of(qc, q, psn, fl, full):
    """Payload of an old packet of a QP."""
    flow = qc[q, ACK_FLOW]
    while fl[flow, F_END] <= psn:
        flow = fl[flow, F_NEXT]
    return fl[flow, F_LAST] if psn + 1 == fl[flow, F_END] else full


def _sources() -> str:
    """A digest of all code that is compiled into the loop: numba's cache looks at this file alone."""
    digest = hashlib.sha256()
    for name in ("layout", "heaps", "calendar", "dcqcn", "phases", "hints", "kernel"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


@cache
def make_kernel(full: bool) -> Callable[..., Any]:
    """The event loop, compiled at its first call or read from numba's cache: all of it, or the lean one."""
    FULL = full
    VERSION = _sources()

    @numba.njit(cache=True, nogil=True, _nrt=False)
    def loop(
        stop_events, hosts, ports_count, queues, group_count, phases, heap, wheel, counts, occupied, near, cal, pk, po,
        po4, qu, qu4, qp, qp4, qpf, qc, qcf, rx, rx4, fl, flf, sw, ho, nic_key, load_P, route, ports, leaf_H, down_H,
        group_H, bits, sacks, left_GP, entered_GP, first_GP, members, at_G, gap_P, start_time, start_flow, flowlets,
        log, samples, pend, wake, kick, ctl, pfc, sim, par, parf, rng,
    ):  # fmt: skip
        """Handle events until one of `layout`'s statuses says why to stop. Long, since the stages share forty
        arrays and as many scalars, and each call of a function that is not inlined passes all of them on the stack:
        measured, that costs up to a third of the speed. The stages are marked, and what is used twice is a function."""
        _ = VERSION  # part of the cache's key
        assume(po.shape[1] == PO_COLUMNS and po4.shape[1] == 2 * PO_COLUMNS)
        assume(qu.shape[1] == QU_COLUMNS and qu4.shape[1] == 2 * QU_COLUMNS)
        assume(qp.shape[1] == QP_COLUMNS and qp4.shape[1] == 2 * QP_COLUMNS and qpf.shape[1] == QP_COLUMNS)
        assume(qc.shape[1] == QC_COLUMNS and qcf.shape[1] == QC_COLUMNS)
        assume(rx.shape[1] == RX_COLUMNS and rx4.shape[1] == 2 * RX_COLUMNS)
        assume(pk.shape[1] == PK_COLUMNS)
        assume(fl.shape[1] == FL_COLUMNS and flf.shape[1] == FL_COLUMNS)
        assume(sw.shape[1] == SW_COLUMNS and ho.shape[1] == HO_COLUMNS)
        P, H, Q = ports_count, hosts, queues
        START, SAMPLE = 4 * P + 2 * H, 4 * P + 2 * H + 1
        n_heap, free_head, free_n = sim[S_HEAP_N], sim[S_FREE_HEAD], sim[S_FREE_N]
        hops, events, now = sim[S_HOPS], sim[S_EVENTS], sim[S_NOW]
        end, control = par[P_END], par[P_CONTROL]
        payload_full, header, window = par[P_PAYLOAD], par[P_HEADER], par[P_WINDOW]
        whole_ns = par[P_WHOLE_NS] != 0
        heap_room = heap.shape[0] - pend.shape[0] - 8
        spare = P + _SPARE
        many = qp.shape[0] > _MANY_QPS
        status = -1
        shift, source_bits, front = cal[C_SHIFT], cal[C_SOURCE_BITS], cal[C_FRONT]
        n_wheel, near_at = cal[C_HELD], cal[C_NEAR_AT]
        assume(near_at >= 0)
        if at_G[0] < 0:  # the first call
            for group in range(at_G.shape[0]):
                advance(
                    group, 0, phases, at_G, entered_GP, left_GP, first_GP, members, gap_P, fl, start_time, start_flow,
                    sim,
                )  # fmt: skip
            sim[S_START_AT] = start_time[0]
            n_heap = push(heap, n_heap, (start_time[0] << SOURCE_BITS) | START)
            if FULL and par[P_SAMPLE] > 0:
                n_heap = push(heap, n_heap, (par[P_SAMPLE] << SOURCE_BITS) | SAMPLE)
        while True:
            # ---- the next event; may we go on?
            if n_wheel > 0 and near[near_at + AHEAD] == NO_EVENT:
                n_heap, n_wheel, front, shift = refill(
                    wheel, counts, occupied, near, heap, cal, n_heap, n_wheel, front, shift, source_bits, whole_ns,
                    near_at,
                )  # fmt: skip
                near_at = 0
            key = min(near[near_at], heap[0])
            if sim[S_LEFT] == 0:
                status = FINISHED
            elif free_n < spare:
                status = GROW_PACKETS
            elif n_heap > heap_room:
                status = GROW_HEAP
            elif events >= stop_events:
                status = CHUNK
            elif (key >> SOURCE_BITS) > end:
                status = EMPTY if key == NO_EVENT else AT_END
            if status >= 0:
                break
            if key == near[near_at]:
                near_at += 1
            else:
                n_heap = pop_top(heap, n_heap)
                if near[near_at] == NO_EVENT:
                    front, shift = follow(cal, front, shift, source_bits, whole_ns, key)
            now = key >> SOURCE_BITS
            source = key & SOURCE_MASK
            events += 1
            n_pend = n_wake = n_kick = n_ctl = n_pfc = 0

            # ---- dispatch
            if source < P:
                # A packet has arrived at the far end of port `source`'s link.
                p = source
                k = np.int64(po4[p, PIPE_HEAD])
                assume(k >= 0)
                following = np.int64(pk[k, NEXT])
                po4[p, PIPE_HEAD] = following
                if following >= 0:
                    prefetch(pk, np.int64(pk[following, NEXT]))
                    if po4[p, PEER] < H:
                        fetch_sender(FULL, qp, qc, np.int64(pk[following, QP]))
                        prefetch(rx, np.int64(pk[following, QP]))
                    pend[n_pend] = ((now + ((pk[following, TIME] - now) & _M32)) << SOURCE_BITS) | p
                    n_pend += 1
                node = np.int64(po4[p, PEER])
                assume(node >= 0)
                meta = np.int64(pk[k, META])
                kind = (meta >> TYPE_SHIFT) & 7
                size = meta & 0xFFFF
                if kind <= NACK:
                    hops += 1
                if kind >= PAUSE:
                    # -- PFC: the port back to the sender of this frame stops or goes on
                    back = p ^ 1
                    kq = (meta >> QUEUE_SHIFT) & 15
                    row = back * Q + kq
                    bit = 1 << kq
                    if kind == PAUSE:
                        if po4[back, PAUSED] & bit == 0:
                            po4[back, PAUSED] |= bit
                            load_P[back] += bit << LOAD_BITS
                            qu[row, PAUSED_SINCE] = now
                            if FULL:
                                note(log, sim, now, back, kq, LOG_PAUSED)
                                if par[P_WATCH] > 0 and qu4[row, HEAD] >= 0 and node >= H and qu[row, STORM] == 0:
                                    qu[row, WATCH_AT] = now + par[P_WATCH]
                        if FULL:
                            if par[P_QUANTA] > 0:
                                qu[row, UNPAUSE_AT] = now + ((par[P_QUANTA] * 64 * po[back, PS_PER_BYTE]) >> 16)
                            if qu[row, STORM] != 0:
                                qu[row, RESTORE_AT] = NEVER
                    elif po4[back, PAUSED] & bit:
                        po4[back, PAUSED] &= ~bit
                        load_P[back] -= bit << LOAD_BITS
                        qu[row, PAUSED_TOTAL] += now - qu[row, PAUSED_SINCE]
                        wake[n_wake] = back
                        n_wake += 1
                        if FULL:
                            note(log, sim, now, back, kq, LOG_RESUMED)
                            qu[row, WATCH_AT] = qu[row, UNPAUSE_AT] = NEVER
                            if qu[row, STORM] != 0:
                                qu[row, RESTORE_AT] = now + par[P_RESTORE]
                    if FULL:
                        soon = min(qu[row, UNPAUSE_AT], qu[row, WATCH_AT], qu[row, RESTORE_AT])
                        if soon < po[back, TIMER_AT]:
                            po[back, TIMER_AT] = soon
                            if soon <= LAST_PS:
                                pend[n_pend] = (soon << SOURCE_BITS) | (3 * P + back)
                                n_pend += 1
                    pk[k, NEXT] = free_head
                    free_head = k
                    free_n += 1
                elif node >= H:
                    # -- at a switch: route, admit, queue
                    to = np.int64(pk[k, DST])
                    assume(to >= 0)
                    kq = (meta >> QUEUE_SHIFT) & 15
                    if leaf_H[to] == node:
                        out = down_H[to]
                    else:
                        way = route[node * group_count + group_H[to]]
                        count = way & 0xFFFF
                        first = way >> 16
                        if count == 1:
                            out = ports[first]
                        elif FULL and par[P_MODE] != ECMP and kind == DATA:
                            if par[P_MODE] == SPRAY:
                                mixed = np.int64(pk[k, ENTROPY]) ^ (np.int64(pk[k, PSN]) * 0x9E3779B1)
                                out = ports[first + choose_by_hash(mixed & _M32, sw[node, SEED], count)]
                            else:
                                slot = 0
                                out = np.int64(-1)
                                if par[P_MODE] == FLOWLET:
                                    entropy = np.int64(pk[k, ENTROPY])
                                    slot = node * FLOWLET_SLOTS + ((entropy ^ (entropy >> 10)) & (FLOWLET_SLOTS - 1))
                                    if flowlets[slot, 1] == entropy and now - flowlets[slot, 0] <= par[P_FLOWLET_GAP]:
                                        out = flowlets[slot, 2]
                                    flowlets[slot, 0], flowlets[slot, 1] = now, entropy
                                if out < 0:
                                    turn = sw[node, TURN]
                                    sw[node, TURN] = turn + 1
                                    out = least_loaded(first, count, turn % count, kq, ports, load_P)
                                    if par[P_MODE] == FLOWLET:
                                        flowlets[slot, 2] = out
                        elif par[P_MURMUR]:
                            entropy = np.int64(pk[k, ENTROPY])
                            out = ports[first + choose_as_ns3(entropy, to, kind == DATA, sw[node, SEED], count)]
                        else:
                            out = ports[first + choose_by_hash(np.int64(pk[k, ENTROPY]), sw[node, SEED], count)]
                    row = out * Q + kq
                    if many:
                        prefetch(qu, row)
                        prefetch(po, out)
                    assume(out >= 0 and row >= 0)
                    admitted = True
                    if kq >= 2:
                        come_in = p ^ 1
                        pk[k, INPORT] = come_in
                        in_row = come_in * Q + kq
                        limit = threshold(sw, node, par)
                        fresh = qu4[in_row, INGRESS] + size
                        over = fresh - par[P_RESERVE]
                        room = sw[node, SHARED_CAP] - sw[node, SHARED_USED]
                        if FULL and sim[S_STORMS] > 0 and qu[row, STORM] != 0:
                            admitted = False
                        elif FULL and (par[P_LOSSY_MASK] >> kq) & 1:
                            most = par[P_RESERVE] + ((room * par[P_LOSSY_ALPHA_Q16]) >> 16)
                            if qu4[row, EGRESS] + size > most or (over > 0 and min(size, over) > room):
                                admitted = False
                            else:
                                qu4[in_row, INGRESS] = fresh
                                if over > 0:
                                    sw[node, SHARED_USED] += min(size, over)
                        elif over <= 0:
                            qu4[in_row, INGRESS] = fresh
                        elif over > limit or min(size, over) > room:
                            if qu4[in_row, HEADROOM] + size > qu4[in_row, HEADROOM_CAP]:
                                admitted = False
                            else:
                                qu4[in_row, HEADROOM] += size
                        else:
                            qu4[in_row, INGRESS] = fresh
                            sw[node, SHARED_USED] += min(size, over)
                        if admitted:
                            held = qu4[in_row, INGRESS] + qu4[in_row, HEADROOM]
                            if held > qu4[in_row, INGRESS_PEAK]:
                                qu4[in_row, INGRESS_PEAK] = held
                            if qu4[in_row, PAUSE_SENT] == 0 and (par[P_PFC] >> kq) & 1:
                                limit = threshold(sw, node, par)
                                if qu4[in_row, HEADROOM] > 0 or qu4[in_row, INGRESS] - par[P_RESERVE] >= limit:
                                    qu4[in_row, PAUSE_SENT] = 1
                                    pfc[n_pfc] = in_row << 1
                                    n_pfc += 1
                            if par[P_ECN_AT_DEQUEUE] == 0 and (par[P_ECN_MASK] >> kq) & 1:
                                if qu4[row, EGRESS] > qu4[row, KMIN] or (FULL and parf[R_ECN_DYNAMIC] > 0.0):
                                    if marks(qu4, row, limit, par, parf, rng):
                                        pk[k, META] = meta | ECN_BIT
                                        qu4[row, MARKS] += 1
                    if admitted:
                        pk[k, NEXT] = -1
                        if qu4[row, HEAD] < 0:
                            qu4[row, HEAD] = k
                            po4[out, ACTIVE] |= 1 << kq
                        else:
                            pk[qu4[row, TAIL], NEXT] = k
                        qu4[row, TAIL] = k
                        qu4[row, EGRESS] += size
                        load_P[out] += size
                        if qu4[row, EGRESS] > qu4[row, PEAK]:
                            qu4[row, PEAK] = qu4[row, EGRESS]
                        if FULL:
                            if qu4[row, EGRESS] - size <= par[P_BURST] < qu4[row, EGRESS] and par[P_BURST] > 0:
                                qu[row, BURST_SINCE] = now + 1
                            if par[P_WATCH] > 0 and (po4[out, PAUSED] >> kq) & 1 and qu[row, WATCH_AT] == NEVER:
                                qu[row, WATCH_AT] = now + par[P_WATCH]
                                if qu[row, WATCH_AT] < po[out, TIMER_AT]:
                                    po[out, TIMER_AT] = qu[row, WATCH_AT]
                                    pend[n_pend] = (qu[row, WATCH_AT] << SOURCE_BITS) | (3 * P + out)
                                    n_pend += 1
                        wake[n_wake] = out
                        n_wake += 1
                    elif not FULL:
                        status = LEAN_DROP
                    else:
                        host = lose(pk, k, qc, qp4, rx4, sim, row, qu, now)
                        if host >= 0 and ho[host, RTO_AT] == NEVER:
                            ho[host, RTO_AT] = now + par[P_RTO]
                            if now + par[P_RTO] <= LAST_PS:
                                pend[n_pend] = ((now + par[P_RTO]) << SOURCE_BITS) | (4 * P + host)
                                n_pend += 1
                        pk[k, NEXT] = free_head
                        free_head = k
                        free_n += 1
                elif kind == DATA:
                    # -- at the receiver: count, notify, acknowledge
                    q = np.int64(pk[k, QP])
                    assume(q >= 0)
                    psn = np.int64(pk[k, PSN])
                    expected = np.int64(rx4[q, EXPECTED])
                    answer = ACK
                    if not FULL or psn == expected:
                        expected += 1
                        if FULL and rx4[q, EARLY] > 0:
                            base, mask = qc[q, BIT_BASE], qc[q, BIT_MASK]
                            while rx4[q, EARLY] > 0:
                                place = expected & mask
                                word = base + (place >> 6)
                                one = np.uint64(1) << np.uint64(place & 63)
                                if bits[word] & one == 0:
                                    break
                                bits[word] &= ~one
                                rx4[q, EARLY] -= 1
                                expected += 1
                        rx4[q, EXPECTED] = expected
                    elif psn > expected:
                        if par[P_OUT_OF_ORDER]:
                            place = psn & qc[q, BIT_MASK]
                            word = qc[q, BIT_BASE] + (place >> 6)
                            one = np.uint64(1) << np.uint64(place & 63)
                            if bits[word] & one == 0:
                                bits[word] |= one
                                rx4[q, EARLY] += 1
                                sim[S_EARLY] += 1
                                sim[S_EARLY_MAX] = max(sim[S_EARLY_MAX], psn - expected)
                        elif rx4[q, NACKED] == expected:
                            answer = -1
                        else:
                            rx4[q, NACKED] = expected
                            answer = NACK
                    echo = 0
                    if meta & ECN_BIT and control == DCQCN:
                        if par[P_CNP_IN_ACK]:
                            echo = ECHO_BIT
                            sim[S_CNPS] += 1
                        elif now - rx[q, CNP_AT] >= par[P_CNP_INTERVAL]:
                            rx[q, CNP_AT] = now
                            sim[S_CNPS] += 1
                            c = free_head
                            free_head = np.int64(pk[c, NEXT])
                            free_n -= 1
                            pk[c, META] = par[P_ACK] | CNP << TYPE_SHIFT | 1 << QUEUE_SHIFT
                            pk[c, QP], pk[c, PSN] = q, psn
                            pk[c, DST], pk[c, ENTROPY] = rx4[q, SOURCE], rx4[q, BACK_HASH]
                            ctl[n_ctl] = c << 20 | rx4[q, BACK_PORT]
                            n_ctl += 1
                    finished = False
                    while expected >= rx4[q, RX_END]:
                        flow = np.int64(rx4[q, RX_FLOW])
                        fl[flow, F_ARRIVED] = now
                        finished = True
                        if fl[flow, F_BACKGROUND] == 0:
                            host_done(
                                fl[flow, F_DST], fl[flow, F_PHASE], now, phases, ho, at_G, entered_GP, left_GP,
                                first_GP, members, gap_P, fl, start_time, start_flow, sim,
                            )  # fmt: skip
                        flow = fl[flow, F_NEXT]
                        rx4[q, RX_FLOW] = flow
                        rx4[q, RX_END] = fl[flow, F_END] if flow >= 0 else NO_PACKET
                    if finished and sim[S_STARTS] > 0 and start_time[0] < sim[S_START_AT]:
                        sim[S_START_AT] = start_time[0]
                        if start_time[0] <= LAST_PS:
                            pend[n_pend] = (start_time[0] << SOURCE_BITS) | START
                            n_pend += 1
                    if (
                        FULL
                        and par[P_ACK_EVERY] > 1
                        and answer == ACK
                        and not finished
                        and echo == 0
                        and psn < expected
                    ):
                        rx4[q, UNACKED] += 1
                        if rx4[q, UNACKED] < par[P_ACK_EVERY]:
                            answer = -1
                    if answer < 0:
                        pk[k, NEXT] = free_head
                        free_head = k
                        free_n += 1
                    else:
                        if FULL:
                            rx4[q, UNACKED] = 0
                            pk[k, SACK] = psn
                        pk[k, META] = par[P_ACK] | answer << TYPE_SHIFT | 1 << QUEUE_SHIFT | echo
                        pk[k, PSN] = expected
                        pk[k, DST], pk[k, ENTROPY] = rx4[q, SOURCE], rx4[q, BACK_HASH]
                        ctl[n_ctl] = k << 20 | rx4[q, BACK_PORT]
                        n_ctl += 1
                else:
                    # -- back at the sender (or, for RTS, at the receiver)
                    q = np.int64(pk[k, QP])
                    assume(q >= 0)
                    psn = np.int64(pk[k, PSN])
                    if kind == CNP or meta & ECHO_BIT:
                        on_cnp(qp, qpf, qc, qcf, q, now, par, parf)
                    if kind <= NACK:
                        if psn > qp4[q, UNA]:
                            if FULL and par[P_SELECTIVE] and qc[q, SACK_HIGH] >= qp4[q, UNA]:
                                for old in range(qp4[q, UNA], psn):
                                    place = old & qc[q, BIT_MASK]
                                    sacks[qc[q, BIT_BASE] + (place >> 6)] &= ~(np.uint64(1) << np.uint64(place & 63))
                            qp4[q, UNA] = psn
                            if FULL and sim[S_DROPPED_BYTES] > 0 and qc[q, DROPPED] >= 0:
                                qc[q, PROGRESS] = now
                                qc[q, RETRIES] = 0
                                if psn > qc[q, DROPPED]:
                                    qc[q, DROPPED] = -1
                            if FULL and psn > qp4[q, NXT]:  # arrived before a rewind: nothing of it is sent again
                                qp4[q, NXT] = psn
                                flow = qc[q, ACK_FLOW]
                                while fl[flow, F_END] <= psn and fl[flow, F_NEXT] >= 0:
                                    flow = fl[flow, F_NEXT]
                                qc[q, CUR_FLOW], qp4[q, CUR_END], qp4[q, CUR_LAST] = (
                                    flow,
                                    fl[flow, F_END],
                                    fl[flow, F_LAST],
                                )
                            if psn >= qp4[q, ACK_END]:
                                while psn >= qp4[q, ACK_END]:
                                    flow = qc[q, ACK_FLOW]
                                    fl[flow, F_DONE] = now
                                    if fl[flow, F_BACKGROUND] == 0:
                                        sim[S_LEFT] -= 1
                                        host_done(
                                            fl[flow, F_SRC], fl[flow, F_PHASE], now, phases, ho, at_G, entered_GP,
                                            left_GP, first_GP, members, gap_P, fl, start_time, start_flow, sim,
                                        )  # fmt: skip
                                    chain(flow, now, phases, ho, entered_GP, fl, start_time, start_flow, sim)
                                    flow = fl[flow, F_NEXT]
                                    qc[q, ACK_FLOW] = flow
                                    qp4[q, ACK_END] = fl[flow, F_END] if flow >= 0 else NO_PACKET
                                if sim[S_STARTS] > 0 and start_time[0] < sim[S_START_AT]:
                                    sim[S_START_AT] = start_time[0]
                                    if start_time[0] <= LAST_PS:
                                        pend[n_pend] = (start_time[0] << SOURCE_BITS) | START
                                        n_pend += 1
                        if FULL:
                            if kind == NACK and psn == qp4[q, UNA]:
                                rewind(qc, qp4, q, fl, sim)
                            elif par[P_SELECTIVE]:
                                sack = np.int64(pk[k, SACK])
                                if sack >= qp4[q, UNA]:
                                    place = sack & qc[q, BIT_MASK]
                                    sacks[qc[q, BIT_BASE] + (place >> 6)] |= np.uint64(1) << np.uint64(place & 63)
                                    if sack > qc[q, SACK_HIGH]:
                                        qc[q, SACK_HIGH] = sack
                                        gone = sack - par[P_REORDER] + 1
                                        if gone > qc[q, RETX_END]:
                                            qc[q, RETX_END] = gone
                    elif kind == RTS:
                        if psn > rx4[q, WANT]:
                            rx4[q, WANT] = psn
                            rx4[q, GRANTED] = max(rx4[q, GRANTED], np.int64(pk[k, SACK]))
                            if rx4[q, GRANTED] < psn and rx4[q, IN_RING] == 0:
                                rx4[q, IN_RING] = 1
                                rx4[q, RING] = -1
                                if ho[node, RING_HEAD] < 0:
                                    ho[node, RING_HEAD] = q
                                else:
                                    rx4[ho[node, RING_TAIL], RING] = q
                                ho[node, RING_TAIL] = q
                                if ho[node, GRANT_AT] == NEVER:
                                    ho[node, GRANT_AT] = max(now, ho[node, GRANT_FREE])
                                    pend[n_pend] = (ho[node, GRANT_AT] << SOURCE_BITS) | (4 * P + H + node)
                                    n_pend += 1
                    elif kind == GRANT and psn > qc[q, CREDIT]:
                        qc[q, CREDIT] = psn
                    if qp4[q, STATE] == IDLE and kind != RTS:
                        kick[n_kick] = q
                        n_kick += 1
                    pk[k, NEXT] = free_head
                    free_head = k
                    free_n += 1
            elif source < 2 * P:
                # A port is free and something waits.
                po[source - P, TX_AT] = NEVER
                wake[n_wake] = source - P
                n_wake += 1
            elif source < 3 * P:
                # The earliest paced QP of a port may be due.
                if po[source - 2 * P, NIC_AT] == now:
                    po[source - 2 * P, NIC_AT] = NEVER
                    wake[n_wake] = source - 2 * P
                    n_wake += 1
            elif source == START:
                # A flow begins.
                if sim[S_START_AT] == now:
                    flow = start_flow[0]
                    start_pop(start_time, start_flow, sim[S_STARTS])
                    sim[S_STARTS] -= 1
                    fl[flow, F_START] = now
                    fl[flow, F_READY] = 1
                    q = fl[flow, F_QP]
                    head = qc[q, READY_FLOW]
                    while head >= 0 and fl[head, F_READY] != 0:
                        qp4[q, LIMIT] = fl[head, F_END]
                        head = fl[head, F_NEXT]
                    if FULL and control == RECEIVER and head != qc[q, READY_FLOW]:
                        qc[q, CREDIT] = max(qc[q, CREDIT], min(qp4[q, NXT] + par[P_UNASKED], qp4[q, LIMIT]))
                        if qc[q, CREDIT] < qp4[q, LIMIT]:
                            c = free_head
                            free_head = np.int64(pk[c, NEXT])
                            free_n -= 1
                            pk[c, META] = par[P_ACK] | RTS << TYPE_SHIFT | 1 << QUEUE_SHIFT
                            pk[c, QP], pk[c, PSN], pk[c, SACK] = q, qp4[q, LIMIT], qc[q, CREDIT]
                            pk[c, DST], pk[c, ENTROPY] = qp4[q, TO], qp4[q, HASH]
                            ctl[n_ctl] = c << 20 | qc[q, PORT]
                            n_ctl += 1
                    qc[q, READY_FLOW] = head
                    if qp4[q, STATE] == IDLE:
                        kick[n_kick] = q
                        n_kick += 1
                    sim[S_START_AT] = NEVER
                    if sim[S_STARTS] > 0:
                        sim[S_START_AT] = start_time[0]
                        if start_time[0] <= LAST_PS:
                            pend[n_pend] = (start_time[0] << SOURCE_BITS) | START
                            n_pend += 1
            elif FULL:
                if source < 4 * P:
                    # -- port timers: pauses that run out or must be refreshed, watchdog
                    p = source - 3 * P
                    if po[p, TIMER_AT] == now:
                        node = np.int64(po4[p, OWNER])
                        assume(node >= 0)
                        soon = NEVER
                        for kq in range(2, Q):
                            row = p * Q + kq
                            assume(row >= 0)
                            if qu[row, UNPAUSE_AT] <= now:
                                qu[row, UNPAUSE_AT] = qu[row, WATCH_AT] = NEVER
                                if (po4[p, PAUSED] >> kq) & 1:
                                    po4[p, PAUSED] &= ~(1 << kq)
                                    load_P[p] -= 1 << (LOAD_BITS + kq)
                                    qu[row, PAUSED_TOTAL] += now - qu[row, PAUSED_SINCE]
                                    note(log, sim, now, p, kq, LOG_RESUMED)
                                    if qu[row, STORM] != 0:
                                        qu[row, RESTORE_AT] = now + par[P_RESTORE]
                                    wake[n_wake] = p
                                    n_wake += 1
                            if qu[row, REFRESH_AT] <= now:
                                qu[row, REFRESH_AT] = NEVER
                                if qu4[row, PAUSE_SENT] != 0:
                                    pfc[n_pfc] = row << 1
                                    n_pfc += 1
                            if qu[row, RESTORE_AT] <= now:
                                qu[row, RESTORE_AT] = NEVER
                                qu[row, STORM] = 0
                            if qu[row, WATCH_AT] <= now:
                                qu[row, WATCH_AT] = NEVER
                                if (po4[p, PAUSED] >> kq) & 1 and qu4[row, HEAD] >= 0:
                                    qu[row, STORM] = 1
                                    sim[S_STORMS] += 1
                                    k = np.int64(qu4[row, HEAD])
                                    assume(k >= 0)
                                    while k >= 0:
                                        following = np.int64(pk[k, NEXT])
                                        size = np.int64(pk[k, META]) & 0xFFFF
                                        leave_queue(qu, qu4, row, load_P, p, size, now, par)
                                        in_row = np.int64(pk[k, INPORT]) * Q + kq
                                        assume(in_row >= 0)
                                        if release(sw, qu4, node, in_row, size, par):
                                            qu4[in_row, PAUSE_SENT] = 0
                                            pfc[n_pfc] = in_row << 1 | 1
                                            n_pfc += 1
                                        host = lose(pk, k, qc, qp4, rx4, sim, row, qu, now)
                                        if host >= 0 and ho[host, RTO_AT] == NEVER:
                                            ho[host, RTO_AT] = now + par[P_RTO]
                                            if now + par[P_RTO] <= LAST_PS:
                                                pend[n_pend] = ((now + par[P_RTO]) << SOURCE_BITS) | (4 * P + host)
                                                n_pend += 1
                                        pk[k, NEXT] = free_head
                                        free_head = k
                                        free_n += 1
                                        k = following
                                    qu4[row, HEAD] = qu4[row, TAIL] = -1
                                    po4[p, ACTIVE] &= ~(1 << kq)
                            soon = min(
                                soon, qu[row, UNPAUSE_AT], qu[row, REFRESH_AT], qu[row, WATCH_AT], qu[row, RESTORE_AT]
                            )
                        po[p, TIMER_AT] = soon
                        if soon <= LAST_PS:
                            pend[n_pend] = (soon << SOURCE_BITS) | (3 * P + p)
                            n_pend += 1
                elif source < 4 * P + H:
                    # -- retransmission timer of a host: QPs that lost something and have not moved since
                    host = source - 4 * P
                    if ho[host, RTO_AT] == now:
                        soon = NEVER
                        for q in range(ho[host, QP_FIRST], ho[host, QP_LAST]):
                            if qc[q, DROPPED] < 0 or qc[q, RETRIES] > RETRY_LIMIT:
                                continue
                            if now - qc[q, PROGRESS] >= par[P_RTO]:
                                sim[S_TIMEOUTS] += 1
                                qc[q, PROGRESS] = now
                                qc[q, RETRIES] += 1
                                if qc[q, RETRIES] > RETRY_LIMIT:
                                    continue
                                if par[P_SELECTIVE]:
                                    qc[q, RETX], qc[q, RETX_END] = qp4[q, UNA], qp4[q, NXT]
                                else:
                                    rewind(qc, qp4, q, fl, sim)
                                kick[n_kick] = q
                                n_kick += 1
                            soon = min(soon, qc[q, PROGRESS] + par[P_RTO])
                        ho[host, RTO_AT] = soon
                        if soon <= LAST_PS:
                            pend[n_pend] = (soon << SOURCE_BITS) | (4 * P + host)
                            n_pend += 1
                elif source < 4 * P + 2 * H:
                    # -- a receiver grants one more packet to the sender whose turn it is
                    host = source - 4 * P - H
                    q = np.int64(ho[host, RING_HEAD])
                    ho[host, RING_HEAD] = rx4[q, RING]
                    rx4[q, GRANTED] += 1
                    port = np.int64(rx4[q, BACK_PORT])
                    if rx4[q, GRANTED] < rx4[q, WANT]:
                        rx4[q, RING] = -1
                        if ho[host, RING_HEAD] < 0:
                            ho[host, RING_HEAD] = q
                        else:
                            rx4[ho[host, RING_TAIL], RING] = q
                        ho[host, RING_TAIL] = q
                    else:
                        rx4[q, IN_RING] = 0
                    c = free_head
                    free_head = np.int64(pk[c, NEXT])
                    free_n -= 1
                    pk[c, META] = par[P_ACK] | GRANT << TYPE_SHIFT | 1 << QUEUE_SHIFT
                    pk[c, QP], pk[c, PSN] = q, rx4[q, GRANTED]
                    pk[c, DST], pk[c, ENTROPY] = rx4[q, SOURCE], rx4[q, BACK_HASH]
                    ctl[n_ctl] = c << 20 | port
                    n_ctl += 1
                    ho[host, GRANT_FREE] = now + (((payload_full + header) * po[port, PS_PER_BYTE]) >> 16)
                    ho[host, GRANT_AT] = NEVER
                    if ho[host, RING_HEAD] >= 0:
                        ho[host, GRANT_AT] = ho[host, GRANT_FREE]
                        pend[n_pend] = (ho[host, GRANT_AT] << SOURCE_BITS) | (4 * P + H + host)
                        n_pend += 1
                elif source == SAMPLE:
                    if sim[S_SAMPLES] >= samples.shape[0]:
                        status = GROW_SAMPLES
                    else:
                        at = sim[S_SAMPLES]
                        samples[at, P] = now
                        for p in range(P):
                            samples[at, p] = load_P[p] & ((1 << LOAD_BITS) - 1)
                        sim[S_SAMPLES] = at + 1
                        if n_heap + n_wheel + (near[near_at] != NO_EVENT) > 0 and now + par[P_SAMPLE] <= LAST_PS:
                            pend[n_pend] = ((now + par[P_SAMPLE]) << SOURCE_BITS) | SAMPLE
                            n_pend += 1
            if status >= 0:  # nothing of this event has been done: it is handled again after growing
                events -= 1
                n_heap = push(heap, n_heap, key)
                break

            # ---- kick: QPs that may be able to send
            while n_kick > 0:
                n_kick -= 1
                q = kick[n_kick]
                assume(q >= 0)
                if qp4[q, STATE] != IDLE:
                    continue
                can = qp4[q, NXT] < qp4[q, LIMIT] and qp4[q, NXT] - qp4[q, UNA] < window
                if FULL:
                    if control == RECEIVER and qp4[q, NXT] >= qc[q, CREDIT]:
                        can = False
                    if par[P_SELECTIVE] and qc[q, RETX] < qc[q, RETX_END] and next_hole(qc, qp4, q, sacks) >= 0:
                        can = True
                if not can:
                    continue
                p = qc[q, PORT]
                assume(p >= 0)
                if qp[q, NEXT_AT] <= now:
                    qp4[q, STATE] = READY
                    qp4[q, LINK] = -1
                    row = p * Q + qc[q, QUEUE]
                    if qu4[row, HEAD] < 0:
                        qu4[row, HEAD] = q
                        po4[p, ACTIVE] |= 1 << qc[q, QUEUE]
                    else:
                        qp4[qu4[row, TAIL], LINK] = q
                    qu4[row, TAIL] = q
                else:
                    qp4[q, STATE] = PACED
                    base = po4[p, HEAP_BASE]
                    nic_push(nic_key, base, po4[p, HEAP_N], (qp[q, NEXT_AT] << SOURCE_BITS) | (q - base))
                    po4[p, HEAP_N] += 1
                wake[n_wake] = p
                n_wake += 1

            # ---- ctl: control packets join their port's queue
            while n_ctl > 0:
                n_ctl -= 1
                k = ctl[n_ctl] >> 20
                assume(k >= 0)
                p = ctl[n_ctl] & SOURCE_MASK
                assume(p >= 0)
                row = p * Q + 1
                assume(row >= 0)
                pk[k, NEXT] = -1
                if qu4[row, HEAD] < 0:
                    qu4[row, HEAD] = k
                    po4[p, ACTIVE] |= 2
                else:
                    pk[qu4[row, TAIL], NEXT] = k
                qu4[row, TAIL] = k
                qu4[row, EGRESS] += par[P_ACK]
                load_P[p] += par[P_ACK]
                if qu4[row, EGRESS] > qu4[row, PEAK]:
                    qu4[row, PEAK] = qu4[row, EGRESS]
                wake[n_wake] = p
                n_wake += 1

            while n_wake > 0 or n_pfc > 0:
                # ---- pfc: pause frames join queue 0, before everything else
                while n_pfc > 0:
                    n_pfc -= 1
                    in_row = pfc[n_pfc] >> 1
                    p = in_row // Q
                    kq = in_row - p * Q
                    resume = pfc[n_pfc] & 1
                    c = free_head
                    free_head = np.int64(pk[c, NEXT])
                    free_n -= 1
                    pk[c, META] = par[P_ACK] | (PAUSE + resume) << TYPE_SHIFT | kq << QUEUE_SHIFT
                    pk[c, NEXT] = -1
                    row = p * Q
                    if qu4[row, HEAD] < 0:
                        qu4[row, HEAD] = c
                        po4[p, ACTIVE] |= 1
                    else:
                        pk[qu4[row, TAIL], NEXT] = c
                    qu4[row, TAIL] = c
                    if resume == 0:
                        qu[in_row, PAUSES] += 1
                        if qu[in_row, FIRST_PAUSE] < 0:
                            qu[in_row, FIRST_PAUSE] = now
                    if FULL:
                        note(log, sim, now, p, kq, LOG_SENT_PAUSE + resume)
                        if par[P_QUANTA] > 0:
                            if resume == 0:
                                qu[in_row, REFRESH_AT] = now + ((par[P_QUANTA] * 32 * po[p, PS_PER_BYTE]) >> 16)
                                if qu[in_row, REFRESH_AT] < po[p, TIMER_AT]:
                                    po[p, TIMER_AT] = qu[in_row, REFRESH_AT]
                                    if po[p, TIMER_AT] <= LAST_PS:
                                        pend[n_pend] = (po[p, TIMER_AT] << SOURCE_BITS) | (3 * P + p)
                                        n_pend += 1
                            else:
                                qu[in_row, REFRESH_AT] = NEVER
                    wake[n_wake] = p
                    n_wake += 1
                # ---- wake: start a packet on a port, if it is free and may
                n_wake -= 1
                p = wake[n_wake]
                assume(p >= 0)
                if po[p, FREE_AT] > now:
                    if po[p, TX_AT] == NEVER:
                        po[p, TX_AT] = po[p, FREE_AT]
                        pend[n_pend] = (po[p, FREE_AT] << SOURCE_BITS) | (P + p)
                        n_pend += 1
                    continue
                node = np.int64(po4[p, OWNER])
                assume(node >= 0)
                if node < H:
                    base = po4[p, HEAP_BASE]
                    while po4[p, HEAP_N] > 0 and (nic_key[base] >> SOURCE_BITS) <= now:
                        q = base + (nic_key[base] & SOURCE_MASK)
                        nic_pop(nic_key, base, po4[p, HEAP_N])
                        po4[p, HEAP_N] -= 1
                        qp4[q, STATE] = READY
                        qp4[q, LINK] = -1
                        row = p * Q + qc[q, QUEUE]
                        if qu4[row, HEAD] < 0:
                            qu4[row, HEAD] = q
                            po4[p, ACTIVE] |= 1 << qc[q, QUEUE]
                        else:
                            qp4[qu4[row, TAIL], LINK] = q
                        qu4[row, TAIL] = q
                may = po4[p, ACTIVE] & ~po4[p, PAUSED]
                if may == 0:
                    if node < H and po4[p, HEAP_N] > 0:
                        soon = nic_key[po4[p, HEAP_BASE]] >> SOURCE_BITS
                        if soon < po[p, NIC_AT]:
                            po[p, NIC_AT] = soon
                            if soon <= LAST_PS:
                                pend[n_pend] = (soon << SOURCE_BITS) | (2 * P + p)
                                n_pend += 1
                    continue
                if may & 1:
                    kq = np.int64(0)
                elif may & 2:
                    kq = np.int64(1)
                elif not FULL:
                    kq = np.int64(2)
                else:
                    strict = may & par[P_STRICT_MASK]
                    if strict != 0 or may & (may - 1) == 0:
                        pick = strict if strict != 0 else may
                        kq = np.int64(2)
                        while (pick >> kq) & 1 == 0:
                            kq += 1
                    else:  # deficit weighted round robin: stay while the deficit lasts
                        kq = po[p, DWRR]
                        while True:
                            if (may >> kq) & 1:
                                row = p * Q + kq
                                assume(row >= 0)
                                size = payload_full + header
                                if node >= H:
                                    size = np.int64(pk[qu4[row, HEAD], META]) & 0xFFFF
                                if qu[row, DEFICIT] >= size:
                                    qu[row, DEFICIT] -= size
                                    break
                            kq = kq + 1 if kq + 1 < Q else np.int64(2)
                            if (may >> kq) & 1:
                                qu[p * Q + kq, DEFICIT] += par[P_QUANTUM] * qu[p * Q + kq, WEIGHT]
                        po[p, DWRR] = kq
                row = p * Q + kq
                assume(row >= 0)
                if kq >= 2 and node < H:
                    # -- a NIC takes the next QP in turn
                    q = np.int64(qu4[row, HEAD])
                    assume(q >= 0)
                    following = np.int64(qp4[q, LINK])
                    qu4[row, HEAD] = following
                    fetch_sender(FULL, qp, qc, following)
                    if following < 0:
                        po4[p, ACTIVE] &= ~(1 << kq)
                        if FULL and Q > 3:
                            qu[row, DEFICIT] = 0
                    psn = np.int64(-1)
                    if FULL and par[P_SELECTIVE] and qc[q, RETX] < qc[q, RETX_END]:
                        psn = next_hole(qc, qp4, q, sacks)
                        if psn >= 0:
                            qc[q, RETX] = psn + 1
                            sim[S_RETX] += 1
                            size = payload_of(qc, q, psn, fl, payload_full) + header
                    if psn < 0:
                        if FULL:
                            can = qp4[q, NXT] < qp4[q, LIMIT] and qp4[q, NXT] - qp4[q, UNA] < window
                            if not can or (control == RECEIVER and qp4[q, NXT] >= qc[q, CREDIT]):
                                qp4[q, STATE] = IDLE
                                wake[n_wake] = p
                                n_wake += 1
                                continue
                        psn = np.int64(qp4[q, NXT])
                        qp4[q, NXT] = psn + 1
                        if par[P_REPACE]:
                            repace(qp, qpf, qc, qcf, q, flf[qc[q, CUR_FLOW], F_PACE_F], now, par, parf)
                        if psn + 1 == qp4[q, CUR_END]:
                            size = qp4[q, CUR_LAST] + header
                            flow = fl[qc[q, CUR_FLOW], F_NEXT]
                            if flow >= 0:
                                qc[q, CUR_FLOW], qp4[q, CUR_END], qp4[q, CUR_LAST] = (
                                    flow,
                                    fl[flow, F_END],
                                    fl[flow, F_LAST],
                                )
                        else:
                            size = payload_full + header
                    k = free_head
                    assume(k >= 0)
                    free_head = np.int64(pk[k, NEXT])
                    free_n -= 1
                    pk[k, QP], pk[k, PSN] = q, psn
                    pk[k, DST], pk[k, ENTROPY] = qp4[q, TO], qp4[q, HASH]
                    pk[k, META] = size | DATA << TYPE_SHIFT | kq << QUEUE_SHIFT
                    took = (size * po[p, PS_PER_BYTE]) >> 16
                    if whole_ns:
                        took = took // 1000 * 1000
                    if control == DCQCN:
                        if now >= qp[q, DUE]:
                            catch_up(qp, qpf, qc, qcf, q, now, par, parf)
                        if par[P_BYTES] > 0:
                            on_bytes(qp, qpf, qc, qcf, q, size, par, parf)
                    gap = np.int64(size * 8000.0 / qpf[q, RATE_F])
                    if whole_ns:
                        gap = gap // 1000 * 1000
                    if gap <= took + 1:
                        gap = took
                    qp[q, NEXT_AT] = now + gap
                    can = qp4[q, NXT] < qp4[q, LIMIT] and qp4[q, NXT] - qp4[q, UNA] < window
                    if FULL:
                        if control == RECEIVER and qp4[q, NXT] >= qc[q, CREDIT]:
                            can = False
                        if par[P_SELECTIVE] and qc[q, RETX] < qc[q, RETX_END] and next_hole(qc, qp4, q, sacks) >= 0:
                            can = True
                    if not can:
                        qp4[q, STATE] = IDLE
                    elif gap <= took:
                        qp4[q, LINK] = -1
                        if qu4[row, HEAD] < 0:
                            qu4[row, HEAD] = q
                            po4[p, ACTIVE] |= 1 << kq
                        else:
                            qp4[qu4[row, TAIL], LINK] = q
                        qu4[row, TAIL] = q
                    else:
                        qp4[q, STATE] = PACED
                        base = po4[p, HEAP_BASE]
                        nic_push(nic_key, base, po4[p, HEAP_N], (qp[q, NEXT_AT] << SOURCE_BITS) | (q - base))
                        po4[p, HEAP_N] += 1
                else:
                    # -- the packet at the head of a queue; a switch gives back its buffer
                    k = np.int64(qu4[row, HEAD])
                    assume(k >= 0)
                    following = np.int64(pk[k, NEXT])
                    qu4[row, HEAD] = following
                    prefetch(pk, following)
                    if following < 0:
                        po4[p, ACTIVE] &= ~(1 << kq)
                        if FULL and Q > 3:
                            qu[row, DEFICIT] = 0
                    meta = np.int64(pk[k, META])
                    size = meta & 0xFFFF
                    if kq > 0:
                        if FULL:
                            leave_queue(qu, qu4, row, load_P, p, size, now, par)
                        else:
                            qu4[row, EGRESS] -= size
                            load_P[p] -= size
                    if kq >= 2:
                        in_row = np.int64(pk[k, INPORT]) * Q + kq
                        assume(in_row >= 0)
                        if release(sw, qu4, node, in_row, size, par):
                            qu4[in_row, PAUSE_SENT] = 0
                            pfc[n_pfc] = in_row << 1 | 1
                            n_pfc += 1
                        if par[P_ECN_AT_DEQUEUE] and (par[P_ECN_MASK] >> kq) & 1:
                            if qu4[row, EGRESS] > qu4[row, KMIN] or (FULL and parf[R_ECN_DYNAMIC] > 0.0):
                                if marks(qu4, row, threshold(sw, node, par), par, parf, rng):
                                    pk[k, META] = meta | ECN_BIT
                                    qu4[row, MARKS] += 1
                    took = (size * po[p, PS_PER_BYTE]) >> 16
                    if whole_ns:
                        took = took // 1000 * 1000
                # -- onto the wire
                qu[row, TX_BYTES] += size
                qu[row, TX_PACKETS] += 1
                free_at = now + took
                po[p, FREE_AT] = free_at
                arrives = free_at + po[p, DELAY]
                pk[k, TIME] = np.int32(arrives & _M32)
                pk[k, NEXT] = -1
                if po4[p, PIPE_HEAD] < 0:
                    po4[p, PIPE_HEAD] = k
                    pend[n_pend] = (arrives << SOURCE_BITS) | p
                    n_pend += 1
                else:
                    pk[po4[p, PIPE_TAIL], NEXT] = k
                po4[p, PIPE_TAIL] = k
                if po4[p, ACTIVE] & ~po4[p, PAUSED] != 0:
                    if po[p, TX_AT] == NEVER:
                        po[p, TX_AT] = free_at
                        pend[n_pend] = (free_at << SOURCE_BITS) | (P + p)
                        n_pend += 1
                elif node < H and po4[p, HEAP_N] > 0:
                    soon = max(free_at, nic_key[po4[p, HEAP_BASE]] >> SOURCE_BITS)
                    if soon < po[p, NIC_AT]:
                        po[p, NIC_AT] = soon
                        if soon <= LAST_PS:
                            pend[n_pend] = (soon << SOURCE_BITS) | (2 * P + p)
                            n_pend += 1

            # ---- pend: schedule
            for i in range(n_pend):
                n_heap, n_wheel = schedule(
                    wheel, counts, occupied, heap, cal, n_heap, n_wheel, front, shift, source_bits, whole_ns, pend[i]
                )
            if many:  # fetch what the two events after the next one will touch
                early = near[near_at + 2] & SOURCE_MASK
                if early < P:
                    prefetch(pk, np.int64(po4[early, PIPE_HEAD]))
                elif early < 2 * P:
                    prefetch(qu, (early - P) * Q + 2)
                early = near[near_at + 1] & SOURCE_MASK
                if early < P:
                    k = np.int64(po4[early, PIPE_HEAD])
                    if po4[early, PEER] < H and k >= 0:
                        fetch_sender(FULL, qp, qc, np.int64(pk[k, QP]))
                        prefetch(rx, np.int64(pk[k, QP]))
                    else:
                        prefetch(qu, (early ^ 1) * Q + 2)
                elif early < 2 * P:
                    k = np.int64(qu4[(early - P) * Q + 2, HEAD])
                    if po4[early - P, OWNER] < H:
                        fetch_sender(FULL, qp, qc, k)
                    else:
                        prefetch(pk, k)
        cal[C_SHIFT], cal[C_FRONT], cal[C_HELD], cal[C_NEAR_AT] = shift, front, n_wheel, near_at
        sim[S_HEAP_N], sim[S_FREE_HEAD], sim[S_FREE_N] = n_heap, free_head, free_n
        sim[S_HOPS], sim[S_EVENTS], sim[S_NOW] = hops, events, now
        return status

    return loop
