"""The twin's state: built from a scenario, with the clock, the heap of events and the stages' lists of work.

The rooms beside it are functions that take a `Network` first. Nothing here decides what a packet does.
"""

import heapq
from collections import deque

from bywash.fabric import inputs
from bywash.fabric.layout import LAST_PS
from bywash.fabric.naive.parts import Flow, Packet, Port, Queue, Sender
from bywash.fabric.routes import compute_routes
from bywash.fabric.scenario import Scenario, headroom_bytes

_M64 = (1 << 64) - 1


class Network:
    """Read `flows`, `ports`, `hops`, `verdict` and the counters after a run; `s` is the scenario, `P` its ports."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        topology = scenario.topology
        self.hosts, self.P = topology.hosts, 2 * len(topology.links)
        self.routes = compute_routes(topology, scenario.routing.paths)
        self.rng = inputs.first_rng(scenario.run.seed)
        self.now, self.verdict = 0, ""
        self.heap: list[tuple[int, int, int, str]] = []
        self.hops = self.cnps = self.retransmitted = self.timeouts = self.early = self.early_max = 0
        self.samples: list[tuple[int, list[int]]] = []
        self.start_at: int | None = None
        self.waiting: list[tuple[int, int]] = []
        self.flowlets: dict[int, tuple[int, int, int]] = {}
        self._build_ports()
        self._build_senders()
        self._build_hosts()
        self.kick: list[Sender] = []
        self.ctl: list[tuple[Packet, int]] = []
        self.pfc: list[tuple[int, int, str]] = []
        self.wake: list[int] = []

    def _build_ports(self) -> None:
        s, topology = self.s, self.s.topology
        latency = inputs.delay_ps(s.switch.latency_ns)
        lossless = [one.lossless and s.switch.pfc.enabled for one in s.classes]
        self.ports = []
        self.shared_cap = [s.switch.buffer_bytes] * len(topology.nodes)
        self.shared_used = [0] * len(topology.nodes)
        self.turn = [0] * len(topology.nodes)
        for number in range(self.P):
            link = topology.links[number // 2]
            owner, peer = int(self.routes.owner_P[number]), int(self.routes.peer_P[number])
            queues = [Queue() for _ in range(2 + len(s.classes))]
            for c, guarded in enumerate(lossless):
                queues[2 + c].cap = headroom_bytes(s, link) if guarded else 0
                if not link.failed:
                    self.shared_cap[owner] -= s.switch.reserve_bytes + queues[2 + c].cap
            delay = inputs.delay_ps(link.delay_ns) + (latency if peer >= self.hosts else 0)
            self.ports.append(Port(number, owner, peer, delay, inputs.ps_per_byte_q16(link.gbps), link.gbps, queues))

    def _build_senders(self) -> None:
        s, flows = self.s, self.s.flows
        pairs = inputs.queue_pairs(s, self.routes)
        by_number: dict[int, Flow] = {}
        mine: list[list[Flow]] = [[] for _ in pairs.src]
        self.sender_of: list[int] = pairs.qp_F.tolist()
        for number in sorted(range(flows.count), key=lambda n: (int(flows.phase_F[n]), self._earliest(n), n)):
            ours = mine[self.sender_of[number]]
            first = ours[-1].end if ours else 0
            size = int(flows.bytes_F[number])
            packets = -(-size // s.frame.payload_bytes)
            line = self.ports[int(pairs.port[self.sender_of[number]])].gbps
            pace = min(float(flows.rate_gbps_F[number]) or line, line)
            flow = Flow(number, first, first + packets, size - (packets - 1) * s.frame.payload_bytes, pace)
            ours.append(flow)
            by_number[number] = flow
        self.flows = [by_number[number] for number in range(flows.count)]
        window = inputs.window_packets(s)
        self.senders = []
        for n in range(len(pairs.src)):
            src, dst, klass, channel = (int(x[n]) for x in (pairs.src, pairs.dst, pairs.klass, pairs.channel))
            rate = mine[n][0].pace
            sender = Sender(
                number=n,
                src=src,
                dst=dst,
                queue=2 + klass,
                port=int(pairs.port[n]),
                back_port=int(pairs.back_port[n]),
                entropy=inputs.entropy(s, src, dst, klass, channel),
                back_entropy=inputs.entropy(s, dst, src, klass, channel),
                flows=mine[n],
                rate=rate,
                most=rate,
                window=window,
            )
            sender.target, sender.b_left = rate, s.nic.dcqcn.byte_counter
            self.senders.append(sender)

    def _earliest(self, flow: int) -> int:
        """When a flow may start, after its phase began and the flows it waits for."""
        before = int(self.s.flows.after_F[flow])
        return max(int(self.s.flows.start_ps_F[flow]), self._earliest(before) if before >= 0 else 0)

    def _build_hosts(self) -> None:
        flows, topology = self.s.flows, self.s.topology
        servers = [topology.nodes[h].server for h in range(self.hosts)]
        group = {"host": list(range(self.hosts)), "server": servers, "global": [0] * self.hosts}
        self.group = group[flows.barrier]
        self.phase_of: dict[int, int] = {g: -1 for g in sorted(set(self.group))}
        self.entered: dict[tuple[int, int], int] = {}
        self.left: dict[tuple[int, int], int] = {}
        for n in range(flows.count):
            if not flows.background_F[n]:
                for host in (int(flows.src_F[n]), int(flows.dst_F[n])):
                    cell = self.group[host], int(flows.phase_F[n])
                    self.left[cell] = self.left.get(cell, 0) + 1
        self.unfinished = int((~flows.background_F).sum())
        self.rings: list[deque[Sender]] = [deque() for _ in range(self.hosts)]
        self.grant_at: list[int | None] = [None] * self.hosts
        self.grant_free = [0] * self.hosts
        self.rto_at: list[int | None] = [None] * self.hosts

    def schedule(self, time: int, source: int) -> None:
        """An event of a source; none beyond the last instant that the engine's keys can hold."""
        if time <= LAST_PS:
            heapq.heappush(self.heap, (time, source, 0, ""))

    def arm_timer(self, port: Port, *times: int | None) -> None:
        """See to it that the port's timer goes off at the earliest of these times."""
        soon = min((time for time in times if time is not None), default=None)
        if soon is not None and (port.timer_at is None or soon < port.timer_at):
            port.timer_at = soon
            self.schedule(soon, 3 * self.P + port.number)

    def uniform(self) -> float:
        """The next number in [0, 1) of the run's xorshift64."""
        x = self.rng
        x ^= x << 13 & _M64
        x ^= x >> 7
        x ^= x << 17 & _M64
        self.rng = x
        return float(x >> 11) / 9007199254740992.0

    def control(self, kind: str, qp: Sender, to: int, *, psn: int = 0, cum: int = 0, marked: bool = False) -> None:
        """A control packet of a queue pair, for the stage that queues them."""
        port, entropy = (qp.back_port, qp.back_entropy) if to == qp.src else (qp.port, qp.entropy)
        size = self.s.frame.ack_bytes
        self.ctl.append((Packet(kind, size, 1, qp, psn, cum, to, entropy, marked=marked), port))

    def wire_ps(self, size: int, port: Port) -> int:
        """How long a frame takes to leave a port."""
        took = size * port.per_byte >> 16
        return took // 1000 * 1000 if self.s.frame.whole_ns else took
