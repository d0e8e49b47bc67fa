"""What the twin is made of: packets, queues, ports, flows, and queue pairs with both their halves.

Plain records. `network` makes them, the rooms beside it change them.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Packet:
    """A frame in flight. `cum` is a NACK's or ACK's first missing packet, `psn` the packet it answers."""

    kind: str
    size: int
    queue: int
    qp: "Sender | None" = None
    psn: int = 0
    cum: int = 0
    to: int = 0
    entropy: int = 0
    came_in: int = -1
    marked: bool = False


@dataclass(slots=True)
class Queue:
    """A queue of a port: packets (QPs on a host), and the switch's ingress counters of the same port and class."""

    line: deque[Any] = field(default_factory=deque)
    egress: int = 0
    ingress: int = 0
    headroom: int = 0
    cap: int = 0
    pause_sent: bool = False
    paused: bool = False
    paused_since: int = 0
    paused_total: int = 0
    deficit: int = 0
    peak: int = 0
    marks: int = 0
    drops: int = 0
    pauses: int = 0
    first_pause: int = -1
    sent_bytes: int = 0
    storm: bool = False
    unpause_at: int | None = None
    refresh_at: int | None = None
    watch_at: int | None = None
    restore_at: int | None = None


@dataclass(slots=True)
class Port:
    """A transmitter and its link. `pipe` holds (arrival, packet)."""

    number: int
    owner: int
    peer: int
    delay: int
    per_byte: int
    gbps: float
    queues: list[Queue]
    free_at: int = 0
    pipe: deque[tuple[int, Packet]] = field(default_factory=deque)
    tx_at: int | None = None
    nic_at: int | None = None
    timer_at: int | None = None
    paced: list[tuple[int, int]] = field(default_factory=list)
    turn: int = 2


@dataclass(slots=True)
class Flow:
    """A message of a queue pair: packets `first` to `end` - 1 at `pace` Gb/s, the last one with `last` bytes."""

    number: int
    first: int
    end: int
    last: int
    pace: float
    ready: bool = False
    start: int = -1
    arrived: int = -1
    done: int = -1


@dataclass(slots=True, eq=False)
class Sender:
    """Both halves of a queue pair."""

    number: int
    src: int
    dst: int
    queue: int
    port: int
    back_port: int
    entropy: int
    back_entropy: int
    flows: list[Flow]
    rate: float
    most: float
    window: int
    next: int = 0
    una: int = 0
    next_at: int = 0
    state: str = "idle"
    credit: int = 0
    sacked: set[int] = field(default_factory=set)
    sack_high: int = -1
    retx: int = 0
    retx_end: int = 0
    dropped: int = -1
    progress: int = 0
    retries: int = 0
    # reaction point
    alpha: float = 1.0
    target: float = 0.0
    started: bool = False
    alpha_bit: bool = False
    cut_bit: bool = False
    t_stage: int = 0
    b_stage: int = 0
    b_left: int = 0
    timers: dict[str, int] = field(default_factory=dict)
    # receiver
    expected: int = 0
    early: set[int] = field(default_factory=set)
    nacked: int = -1
    cnp_at: int | None = None
    unacked: int = 0
    want: int = 0
    granted: int = 0
    in_ring: bool = False

    @property
    def limit(self) -> int:
        """Packets of the flows that are ready, without a gap."""
        end = 0
        for flow in self.flows:
            if not flow.ready:
                break
            end = flow.end
        return end

    def payload(self, psn: int, full: int) -> int:
        """Data bytes of a packet."""
        flow = self.flow_of(psn)
        return flow.last if psn + 1 == flow.end else full

    def flow_of(self, psn: int) -> Flow:
        """The flow that a packet belongs to."""
        return next(one for one in self.flows if one.first <= psn < one.end)
