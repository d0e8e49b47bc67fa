"""DCQCN's reaction point without timers: each QP keeps when its next ticks are due and catches up when it matters.

A rate is read when a packet is sent and changed when a CNP comes, so ticks in between are applied then, in time
order, up to and including now; at one instant alpha first, then increase, then decrease. That replaces three heap
events per QP and tick. Every path that reads `qp[:, RATE_F]` must call `catch_up` first when `now >= qp[:, DUE]`.

Two variants (see `DcqcnConfig`): `paper` cuts at each CNP and restarts alpha and rate timers there; `ns3` notes the
CNP and acts on fixed ticks that began with the QP's first one. Rates are Gb/s in float64.
Compiled by numba and called from `kernel`; `naive` has the same laws with real timers.
"""

# mypy: ignore-errors

import numba

from bywash.fabric.layout import (
    ALPHA_BIT,
    ALPHA_F,
    B_LEFT,
    B_STAGE,
    BITS,
    CUT_BIT,
    DUE,
    MAX_RATE_F,
    NEVER,
    NEXT_ALPHA,
    NEXT_DEC,
    NEXT_INC,
    P_ALPHA_PS,
    P_BYTES,
    P_DECREASE_PS,
    P_FAST,
    P_TIMER_PS,
    P_VARIANT_NS3,
    R_AI,
    R_G,
    R_HAI,
    R_MIN,
    RATE_F,
    STARTED,
    T_STAGE,
    TARGET_F,
)


@numba.njit(forceinline=True, _nrt=False)
def _alpha_to(qp, qpf, qc, qcf, q, now, par, parf):
    """Apply the alpha ticks that are due: one with the CNP bit if it is set, the others decay."""
    if qc[q, NEXT_ALPHA] > now:
        return
    ticks = (now - qc[q, NEXT_ALPHA]) // par[P_ALPHA_PS] + 1
    qc[q, NEXT_ALPHA] += ticks * par[P_ALPHA_PS]
    keep = 1.0 - parf[R_G]
    if qc[q, BITS] & ALPHA_BIT:
        qcf[q, ALPHA_F] = keep * qcf[q, ALPHA_F] + parf[R_G]
        qc[q, BITS] &= ~ALPHA_BIT
        ticks -= 1
    for _ in range(ticks):  # not a power: every tick rounds, as it would with a timer
        qcf[q, ALPHA_F] *= keep


@numba.njit(forceinline=True, _nrt=False)
def _increase(qp, qpf, qc, qcf, q, first, second, par, parf):
    """One increase event: after F of fast recovery by timer or bytes additive, after F by the lesser stage hyper."""
    if first > par[P_FAST]:
        step = parf[R_HAI] if second > par[P_FAST] else parf[R_AI]
        qcf[q, TARGET_F] = min(qcf[q, TARGET_F] + step, qcf[q, MAX_RATE_F])
    qpf[q, RATE_F] = qpf[q, RATE_F] / 2 + qcf[q, TARGET_F] / 2


@numba.njit(forceinline=True, _nrt=False)
def _set_due(qp, qpf, qc, qcf, q):
    due = qc[q, NEXT_INC]
    if qc[q, BITS] & CUT_BIT and qc[q, NEXT_DEC] < due:
        due = qc[q, NEXT_DEC]
    qp[q, DUE] = due


@numba.njit(forceinline=True, _nrt=False)
def catch_up(qp, qpf, qc, qcf, q, now, par, parf):
    """Apply all rate ticks up to now."""
    while True:
        increase = qc[q, NEXT_INC]
        decrease = qc[q, NEXT_DEC] if qc[q, BITS] & CUT_BIT else NEVER
        if increase > now and decrease > now:
            break
        if increase <= decrease:
            if par[P_VARIANT_NS3]:
                stage = qc[q, T_STAGE]
                _increase(qp, qpf, qc, qcf, q, stage + 1, stage, par, parf)
                qc[q, T_STAGE] = stage + 1
            else:
                qc[q, T_STAGE] += 1
                first, second = qc[q, T_STAGE], qc[q, B_STAGE]
                _increase(qp, qpf, qc, qcf, q, max(first, second), min(first, second), par, parf)
            qc[q, NEXT_INC] = increase + par[P_TIMER_PS]
        else:
            _alpha_to(qp, qpf, qc, qcf, q, decrease, par, parf)
            if qc[q, T_STAGE] != 0:
                qcf[q, TARGET_F] = qpf[q, RATE_F]
            qpf[q, RATE_F] = max(min(parf[R_MIN], qcf[q, MAX_RATE_F]), qpf[q, RATE_F] * (1.0 - qcf[q, ALPHA_F] / 2.0))
            qc[q, T_STAGE] = 0
            qc[q, BITS] &= ~CUT_BIT
            qc[q, NEXT_INC] = decrease + par[P_TIMER_PS]
            qc[q, NEXT_DEC] = decrease + par[P_DECREASE_PS]
    _set_due(qp, qpf, qc, qcf, q)


@numba.njit(forceinline=True, _nrt=False)
def repace(qp, qpf, qc, qcf, q, gbps, now, par, parf):
    """The next flow's pace: rate and target keep their share of it, so that a cut outlives the flow."""
    if gbps != qcf[q, MAX_RATE_F]:
        catch_up(qp, qpf, qc, qcf, q, now, par, parf)
        share = gbps / qcf[q, MAX_RATE_F]
        qpf[q, RATE_F] *= share
        qcf[q, TARGET_F] *= share
        qcf[q, MAX_RATE_F] = gbps


@numba.njit(forceinline=True, _nrt=False)
def on_cnp(qp, qpf, qc, qcf, q, now, par, parf):
    """A congestion notification has reached the sender."""
    catch_up(qp, qpf, qc, qcf, q, now, par, parf)
    if par[P_VARIANT_NS3]:
        if not qc[q, BITS] & STARTED:
            qc[q, BITS] = STARTED | CUT_BIT
            qcf[q, ALPHA_F] = 1.0
            qcf[q, TARGET_F] = qpf[q, RATE_F]
            qc[q, NEXT_ALPHA] = now + par[P_ALPHA_PS]
            qc[q, NEXT_DEC] = now + par[P_DECREASE_PS] + 1000
        else:
            _alpha_to(qp, qpf, qc, qcf, q, now, par, parf)
            qc[q, BITS] |= ALPHA_BIT
            if not qc[q, BITS] & CUT_BIT:
                qc[q, BITS] |= CUT_BIT
                if qc[q, NEXT_DEC] <= now:
                    late = (now - qc[q, NEXT_DEC]) // par[P_DECREASE_PS] + 1
                    qc[q, NEXT_DEC] += late * par[P_DECREASE_PS]
    else:
        _alpha_to(qp, qpf, qc, qcf, q, now, par, parf)
        qcf[q, TARGET_F] = qpf[q, RATE_F]
        qpf[q, RATE_F] = max(min(parf[R_MIN], qcf[q, MAX_RATE_F]), qpf[q, RATE_F] * (1.0 - qcf[q, ALPHA_F] / 2.0))
        qcf[q, ALPHA_F] = (1.0 - parf[R_G]) * qcf[q, ALPHA_F] + parf[R_G]
        qc[q, NEXT_ALPHA] = now + par[P_ALPHA_PS]
        qc[q, NEXT_INC] = now + par[P_TIMER_PS]
        qc[q, T_STAGE] = 0
        qc[q, B_STAGE] = 0
        qc[q, B_LEFT] = par[P_BYTES]
    _set_due(qp, qpf, qc, qcf, q)


@numba.njit(forceinline=True, _nrt=False)
def on_bytes(qp, qpf, qc, qcf, q, size, par, parf):
    """The byte counter of the `paper` variant; rate ticks up to now have been applied."""
    qc[q, B_LEFT] -= size
    if qc[q, B_LEFT] <= 0:
        qc[q, B_LEFT] += par[P_BYTES]
        qc[q, B_STAGE] += 1
        first, second = qc[q, T_STAGE], qc[q, B_STAGE]
        _increase(qp, qpf, qc, qcf, q, max(first, second), min(first, second), par, parf)
