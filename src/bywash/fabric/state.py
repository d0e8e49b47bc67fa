"""The engine's memory: built from a scenario, grown when the loop asks for more.

See `layout` for the columns, `rows` and `settings` for what fills them. Called by `run`; knows nothing of how events
are handled.
"""

from dataclasses import dataclass

import numpy as np

from bywash.errors import ConfigError
from bywash.fabric import layout as L
from bywash.fabric.inputs import Array, QueuePairs, first_rng, pace_gbps_F, queue_pairs
from bywash.fabric.routes import Routes, compute_routes
from bywash.fabric.rows import (
    aligned_rows,
    calendar_rows,
    flow_rows,
    host_rows,
    phase_rows,
    port_rows,
    qp_rows,
    queue_rows,
    rx_rows,
    switch_rows,
)
from bywash.fabric.scenario import Scenario
from bywash.fabric.settings import rates, settings

_FIRST_PACKETS = 16_384
_FIRST_SAMPLES = 4096
LOG_ROWS = 1 << 18
_VIEWS = ("qpf", "qcf", "flf", "po4", "qu4", "qp4", "rx4")


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """The arrays of `layout`, and those without columns:

    Attributes:
        heap, wheel, counts, occupied, near, cal: pending events, see `calendar`; the heap is 4-ary.
        nic_key: int64 [N], paced QPs of each port, a binary heap of `time << 20 | QP` in its own segment.
        load_P: int64 [P], bytes in all egress queues of a port, below its pauses (see `layout.LOAD_BITS`).
        route: int64 [nodes * G], first candidate << 16 | count. ports: the candidates.
        bits, sacks: uint64, which packets beyond the first gap have come, have been acknowledged; a ring for each QP.
        left_GP, entered_GP, first_GP, members: phases: flows not done, when entered, flows to start (a slice
            of members).
        start_time, start_flow: flows waiting for their time, a binary heap.
        flowlets: int64 [nodes * slots, 3], time, entropy, port.
        log: int64 [rows, 4], PFC events: time, port, queue, what. samples: int64 [T, P].
    """

    full: bool
    scenario: Scenario
    routes: Routes
    pairs: QueuePairs
    hosts: int
    ports_count: int
    queues: int
    groups: int
    phases: int
    arrays: dict[str, Array]

    def memory_bytes(self) -> int:
        """All of it."""
        return sum(array.nbytes for name, array in self.arrays.items() if name not in _VIEWS)


def needs_full(scenario: Scenario) -> str:
    """Why the lean kernel cannot run this scenario, or an empty string."""
    nic, switch, run = scenario.nic, scenario.switch, scenario.run
    reasons = (
        (len(scenario.classes) > 1, "several classes"),
        (not scenario.classes[0].lossless, "a lossy class"),
        (not switch.pfc.enabled, "PFC off"),
        (switch.pfc.mode != "on-off", "pause quanta"),
        (switch.pfc.watchdog_us > 0, "PFC watchdog"),
        (switch.ecn.dynamic > 0, "dynamic ECN thresholds"),
        (nic.control == "receiver", "receiver-driven control"),
        (nic.out_of_order, "out-of-order acceptance"),
        (nic.ack_every > 1, "fewer ACKs than packets"),
        (scenario.routing.mode != "ecmp", f"{scenario.routing.mode} routing"),
        (run.sample_us > 0, "queue samples"),
        (run.burst_bytes > 0, "micro-bursts"),
    )
    return next((why for wrong, why in reasons if wrong), "")


def build(scenario: Scenario, *, full: bool) -> State:
    """Allocate and fill the engine's memory."""
    topology, flows = scenario.topology, scenario.flows
    routes = compute_routes(topology, scenario.routing.paths)
    pairs = queue_pairs(scenario, routes)
    hosts, nodes, ports = topology.hosts, len(topology.nodes), 2 * len(topology.links)
    queues = 2 + len(scenario.classes)
    ho, groups = host_rows(scenario, pairs)
    qp, qc = qp_rows(scenario, pairs)
    wheel, cal = calendar_rows(scenario, ports)
    arrays: dict[str, Array] = {
        "heap": np.full(8 * ports + 4 * hosts + 1024, L.NO_EVENT, np.int64),
        "wheel": wheel,
        "counts": np.zeros(len(wheel) // L.SLOTS, np.uint8),
        "occupied": np.zeros(len(wheel) // (64 * L.SLOTS), np.uint64),
        "near": np.full(L.SLOTS + 2 * L.AHEAD + 1, L.NO_EVENT, np.int64),
        "cal": cal,
        "po": port_rows(scenario, routes, pairs),
        "qu": queue_rows(scenario, routes, ports, queues),
        "qp": qp,
        "qc": qc,
        "rx": rx_rows(scenario, pairs),
        "fl": flow_rows(scenario, pairs),
        "sw": switch_rows(scenario, nodes),
        "ho": ho,
        "nic_key": np.zeros(len(pairs.src), np.int64),
        "load_P": np.zeros(ports, np.int64),
        "route": (routes.first_NG << 16 | routes.count_NG).ravel(),
        "ports": routes.ports,
        "leaf_H": routes.leaf_H,
        "down_H": routes.down_H,
        "group_H": routes.group_H,
        "start_time": np.zeros(flows.count, np.int64),
        "start_flow": np.zeros(flows.count, np.int64),
        "flowlets": np.full(
            (nodes * L.FLOWLET_SLOTS if full and scenario.routing.mode == "flowlet" else 1, 3), -1, np.int64
        ),
        "log": np.zeros((LOG_ROWS if full else 1, 4), np.int64),
        "samples": np.zeros((_FIRST_SAMPLES if scenario.run.sample_us else 1, ports + 1), np.int64),
        "pend": np.zeros(4 * ports + 64, np.int64),
        "wake": np.zeros(2 * ports + len(pairs.src) + 64, np.int64),
        "kick": np.zeros(len(pairs.src) + 8, np.int64),
        "ctl": np.zeros(16, np.int64),
        "pfc": np.zeros(ports * queues + 16, np.int64),
        "sim": np.zeros(L.SIM_SIZE, np.int64),
        "par": settings(scenario, repaces=_repaces(pace_gbps_F(scenario, pairs), pairs)),
        "parf": rates(scenario),
        "rng": np.array([first_rng(scenario.run.seed)], np.uint64),
    }
    words = int(qc[-1, L.BIT_BASE] + (qc[-1, L.BIT_MASK] + 64) // 64) if full else 1
    arrays["bits"] = np.zeros(max(1, words), np.uint64)
    arrays["sacks"] = np.zeros(max(1, words if scenario.nic.recovery == "selective" else 1), np.uint64)
    arrays["qpf"], arrays["qcf"] = qp.view(np.float64), qc.view(np.float64)
    arrays["flf"] = arrays["fl"].view(np.float64)
    for name in ("po", "qu", "qp", "rx"):
        arrays[f"{name}4"] = arrays[name].view(np.int32)
    arrays |= phase_rows(scenario, groups, ho)
    state = State(
        full=full,
        scenario=scenario,
        routes=routes,
        pairs=pairs,
        hosts=hosts,
        ports_count=ports,
        queues=queues,
        groups=groups,
        phases=flows.phases,
        arrays=arrays,
    )
    _packet_pool(state, max(_FIRST_PACKETS, 4 * ports))
    sim = arrays["sim"]
    sim[L.S_LEFT] = int((~flows.background_F).sum())
    sim[L.S_START_AT] = L.NEVER
    return state


def _repaces(pace_F: Array, pairs: QueuePairs) -> bool:
    """Whether some QP has flows of different paces."""
    one_N = np.zeros(len(pairs.src))
    one_N[pairs.qp_F] = pace_F
    return bool((one_N[pairs.qp_F] != pace_F).any())


def _packet_pool(state: State, size: int) -> None:
    pool = aligned_rows(size, L.PK_COLUMNS // 2).view(np.int32)
    old = state.arrays.get("pk")
    first = 0 if old is None else old.shape[0]
    if old is not None:
        pool[:first] = old
    pool[first:, L.NEXT] = np.arange(first + 1, size + 1)
    sim = state.arrays["sim"]
    pool[size - 1, L.NEXT] = -1 if old is None else sim[L.S_FREE_HEAD]
    sim[L.S_FREE_HEAD] = first
    sim[L.S_FREE_N] += size - first
    state.arrays["pk"] = pool


def grow_packets(state: State) -> None:
    """Double the packet pool. Raises `ConfigError` beyond `run.packets`."""
    size, most = state.arrays["pk"].shape[0], state.scenario.run.packets
    if size >= most:
        raise ConfigError(
            f"run.packets = {most:,}: that many packets are in flight at once; raise it, or let less start together"
        )
    _packet_pool(state, min(2 * size, max(most, size + 1)))


def grow_heap(state: State) -> None:
    """Double the event heap."""
    old = state.arrays["heap"]
    state.arrays["heap"] = np.concatenate([old, np.full(old.size, L.NO_EVENT, np.int64)])


def grow_samples(state: State) -> None:
    """Double the room for queue samples."""
    old = state.arrays["samples"]
    state.arrays["samples"] = np.concatenate([old, np.zeros_like(old)])
