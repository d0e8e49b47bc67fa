"""The engine's memory: which column of which row holds what.

Rows, not columns: everything about one packet, port, queue or QP lies side by side in one row of a 2-D integer array,
so that touching it costs one or two cache lines (structure-of-arrays measured up to twice slower, records with
helper functions far slower). Times are picoseconds, sizes bytes, indices -1 for none.

Arrays: `pk` packets (int32, grows), `po` ports, `qu` queues (row port * Q + queue), `qp` senders' half of a queue
pair and `qc` its colder part, `rx` receivers' half, `fl` flows, `sw` nodes (only switches' rows are used), `ho` hosts,
`sim` scalars that survive between calls, `par` and `parf` settings. `po4`, `qu4`, `qp4`, `rx4` are the same memory as
int32, `qpf`, `qcf` and `flf` as float64: what every packet touches is packed into one 64-byte line of each row.

Queues of a port: 0 PFC frames, 1 control (ACK, NACK, CNP, RTS, GRANT), 2 + c class c. On a host's port the class
queues hold QPs that are ready to send, not packets.

Knows nothing else. `state` fills the rows, `kernel` and `dcqcn` work on them, `run` reads them back.
"""

NEVER = 1 << 62
SOURCE_BITS = 20
SOURCE_MASK = (1 << SOURCE_BITS) - 1
NO_EVENT = (1 << 63) - 1
"""Fills the event heap behind its last entry."""

LAST_PS = 8_200_000_000_000
"""Events beyond 8.2 s do not fit the key `time << 20 | source`; none is scheduled."""

# packet types
DATA, ACK, NACK, CNP, RTS, GRANT, PAUSE, RESUME = range(8)
# pk[:, META]: size in bits 0-15, then
TYPE_SHIFT = 16
QUEUE_SHIFT = 19
ECN_BIT = 1 << 23
ECHO_BIT = 1 << 24  # in an ACK: the data packet was marked
# pk columns (int32)
NEXT, QP, PSN, DST, INPORT, META, ENTROPY, TIME = range(8)
SACK = INPORT  # ingress ports are noted for data, acknowledged packets for control
PK_COLUMNS = 8

# po columns: of int64; the first 64 bytes are what every packet touches
FREE_AT, TX_AT, DELAY, PS_PER_BYTE, NIC_AT, TIMER_AT, DWRR = 0, 1, 4, 5, 8, 9, 10
# po4 columns
PIPE_HEAD, PIPE_TAIL, PEER, OWNER, ACTIVE, PAUSED, HEAP_N, HEAP_BASE = 4, 5, 6, 7, 12, 13, 14, 15
PO_COLUMNS = 16

# qu4 columns, then qu columns; again the first 64 bytes are what every packet touches
HEAD, TAIL, EGRESS, PEAK, INGRESS, INGRESS_PEAK, HEADROOM, PAUSE_SENT, KMIN, KMAX, HEADROOM_CAP, MARKS = range(12)
TX_BYTES, TX_PACKETS, DEFICIT, WEIGHT = 6, 7, 8, 9
PAUSED_SINCE, PAUSED_TOTAL, PAUSES, FIRST_PAUSE, DROPS, BURST_SINCE, BURSTS, BURST_TOTAL = range(10, 18)
BURST_MAX, STORM, UNPAUSE_AT, REFRESH_AT, WATCH_AT, RESTORE_AT = range(18, 24)
QU_COLUMNS = 24

# qp4 columns (sender)
NXT, UNA, LIMIT, ACK_END, CUR_END, TO, HASH, LINK, STATE, CUR_LAST = 0, 1, 2, 3, 4, 5, 6, 7, 14, 15
# qp columns; f: float64 through qpf
NEXT_AT, RATE_F, DUE = 4, 5, 6
QP_COLUMNS = 8
# qc columns: what a QP needs less often, first what the full kernel touches for every packet; f: float64 through qcf
PORT, QUEUE, B_LEFT, RETX, RETX_END, SACK_HIGH, BIT_BASE, BIT_MASK = range(8)
NEXT_INC, NEXT_DEC, NEXT_ALPHA, BITS, T_STAGE, B_STAGE, ALPHA_F, TARGET_F = range(8, 16)
MAX_RATE_F, CUR_FLOW, ACK_FLOW, READY_FLOW, CREDIT, PROGRESS, DROPPED, RETRIES = range(16, 24)
QC_COLUMNS = 24
NO_PACKET = (1 << 31) - 1
"""For ACK_END and RX_END: nothing more to wait for."""
# qp4[:, STATE]
IDLE, READY, PACED = range(3)
# qc[:, BITS]
STARTED, ALPHA_BIT, CUT_BIT = 1, 2, 4

# rx4 columns (receiver), and one of rx
EXPECTED, RX_END, SOURCE, BACK_HASH, BACK_PORT, RX_FLOW = range(6)
EARLY, UNACKED, NACKED, IN_RING, WANT, GRANTED, RING = range(8, 15)
CNP_AT = 3
RX_COLUMNS = 8

# fl columns; f: float64 through flf
F_START, F_ARRIVED, F_DONE, F_END, F_LAST, F_NEXT, F_QP, F_READY = range(8)
F_BACKGROUND, F_CHAIN, F_CHAIN_NEXT, F_PHASE, F_OFFSET, F_SRC, F_DST, F_PACE_F = range(8, 16)
FL_COLUMNS = 16

# sw columns
SHARED_USED, SHARED_CAP, SEED, TURN = range(4)
SW_COLUMNS = 8

# ho columns (hosts: grant ring and timers)
RING_HEAD, RING_TAIL, GRANT_AT, GRANT_FREE, RTO_AT, QP_FIRST, QP_LAST, GROUP = range(8)
HO_COLUMNS = 8

# sim
(
    S_HEAP_N,
    S_NOW,
    S_FREE_HEAD,
    S_FREE_N,
    S_HOPS,
    S_EVENTS,
    S_LEFT,
    S_STARTS,
    S_START_AT,
    S_CNPS,
    S_RETX,
    S_TIMEOUTS,
    S_EARLY,
    S_EARLY_MAX,
    S_SAMPLES,
    S_LOG,
    S_STORMS,
    S_DROPPED_BYTES,
) = range(18)
SIM_SIZE = 24

# par
(
    P_PAYLOAD,
    P_HEADER,
    P_ACK,
    P_WHOLE_NS,
    P_END,
    P_RESERVE,
    P_ALPHA_Q16,
    P_LOSSY_ALPHA_Q16,
    P_XON,
    P_STATIC_XOFF,
    P_PFC,
    P_QUANTA,
    P_WATCH,
    P_RESTORE,
    P_LOSSY_MASK,
    P_ECN_MASK,
    P_ECN_AT_DEQUEUE,
    P_CONTROL,
    P_CNP_IN_ACK,
    P_CNP_INTERVAL,
    P_VARIANT_NS3,
    P_ALPHA_PS,
    P_TIMER_PS,
    P_DECREASE_PS,
    P_BYTES,
    P_FAST,
    P_MURMUR,
    P_MODE,
    P_FLOWLET_GAP,
    P_SELECTIVE,
    P_OUT_OF_ORDER,
    P_REORDER,
    P_RTO,
    P_ACK_EVERY,
    P_SAMPLE,
    P_BURST,
    P_STRICT_MASK,
    P_QUANTUM,
    P_UNASKED,
    P_WINDOW,
    P_REPACE,
) = range(41)
PAR_SIZE = 48
# parf
R_G, R_AI, R_HAI, R_MIN, R_PMAX, R_ECN_DYNAMIC = range(6)
PARF_SIZE = 8
# par[P_CONTROL]
NONE, DCQCN, FIXED_WINDOW, RECEIVER = range(4)
# par[P_MODE]
ECMP, FLOWLET, ADAPTIVE, SPRAY = range(4)
RETRY_LIMIT = 7
"""Timeouts without progress after which a QP gives up, as InfiniBand's retry count does."""

# cal: the calendar of events; what it holds, and what happened since buckets were last fitted
C_SHIFT, C_SOURCE_BITS, C_FRONT, C_HELD, C_NEAR_AT, C_DRAINS, C_DRAINED, C_FULL, C_FAR, C_LATE = range(10)
CAL_SIZE = 16
SLOTS = 16
"""Events of a bucket: their places fill one cache line."""

LAST_PLACE = (1 << 31) - 1
MOST_SHIFT = 30
AHEAD = 2
"""Events beyond the next one that are known in order, so that what they will touch can be fetched."""

# status with which the kernel returns
FINISHED, EMPTY, AT_END, CHUNK, GROW_PACKETS, GROW_HEAP, GROW_SAMPLES, LEAN_DROP = range(8)

FLOWLET_SLOTS = 1024
LOAD_BITS = 40
"""load_P: bytes in all egress queues of a port, and above them a copy of po4[:, PAUSED]."""

# log columns: time, port, queue, what
LOG_SENT_PAUSE, LOG_SENT_RESUME, LOG_PAUSED, LOG_RESUMED = range(4)
