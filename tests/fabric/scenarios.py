"""Random small scenarios for the fuzz tests: every feature, odd sizes, all from one seed."""

from dataclasses import replace

import numpy as np

from bywash.errors import ConfigError
from bywash.fabric import (
    DcqcnConfig,
    EcnConfig,
    Flows,
    FrameConfig,
    NicConfig,
    PfcConfig,
    RoutingConfig,
    RunConfig,
    Scenario,
    SwitchConfig,
    Topology,
    TrafficClass,
    fat_tree,
    leaf_spine,
    mesh,
    rail_optimised,
    ring,
    single_switch,
)
from bywash.fabric.scenario import shared_pool_bytes


def random_scenario(seed: int, *, lean: bool = False, packets: int = 400) -> Scenario:
    """A scenario that is valid and small; `lean` keeps to what the lean kernel runs."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            drawn = _scenario(rng, lean, packets)
            spare = int(_pick(rng, 5_000, 20_000, 100_000, 2_000_000))  # little shared pool: pauses and drops
            taken = drawn.switch.buffer_bytes - min(shared_pool_bytes(drawn)[drawn.topology.hosts :])
            headroom = drawn.switch.headroom_bytes
            if not lean and rng.random() < 0.15:
                headroom, taken = 2000, taken + 100_000  # too little: drops in a lossless class
            switch = replace(drawn.switch, buffer_bytes=taken + spare, headroom_bytes=headroom)
            return replace(drawn, switch=switch)
        except ConfigError:  # failed links that cut a host off, a window below the ACK interval: draw again
            continue


def _pick(rng, *choices):
    return choices[int(rng.integers(len(choices)))]


def _topology(rng) -> Topology:
    rate = float(_pick(rng, 10, 25, 40, 100, 400))
    delay = float(_pick(rng, 0, 5, 100, 1000, 3333.3))
    kind = int(rng.integers(6))
    if kind == 0:
        return single_switch(hosts=int(rng.integers(2, 7)), gbps=rate, delay_ns=delay)
    if kind == 1:
        leaves, spines = int(rng.integers(2, 4)), int(rng.integers(1, 4))
        hosts = leaves * int(rng.integers(1, 4))
        failed = ["leaf0-spine0"] if spines > 1 and rng.random() < 0.3 else []
        rates = [float(_pick(rng, rate, rate / 2)) for _ in range(hosts)]
        return leaf_spine(
            hosts=hosts, leaves=leaves, spines=spines, gbps=rates, uplink_gbps=rate, delay_ns=delay, failed=failed,
            links_per_pair=int(rng.integers(1, 3)), nics_per_server=int(rng.integers(1, 3)),
        )  # fmt: skip
    if kind == 2:
        return fat_tree(k=2 * int(rng.integers(1, 3)), gbps=rate, delay_ns=delay)
    if kind == 3:
        return rail_optimised(servers=int(rng.integers(1, 4)), nics_per_server=2, spines=2, gbps=rate, delay_ns=delay)
    if kind == 4:
        return ring(switches=int(rng.integers(3, 6)), gbps=rate, delay_ns=delay)
    return mesh(rows=2, columns=int(rng.integers(1, 4)), gbps=rate, delay_ns=delay)


def _flows(rng, hosts: int, classes: int, payload: int, packets: int, servers: bool) -> Flows:
    count = int(rng.integers(1, 20))
    src = rng.integers(0, hosts, count)
    dst = (src + rng.integers(1, hosts, count)) % hosts
    if rng.random() < 0.6:  # incast
        dst[:] = rng.integers(hosts)
        src = (dst + rng.integers(1, hosts, count)) % hosts
    size = np.maximum(1, (rng.exponential(packets * payload / count, count))).astype(np.int64)
    phases = int(rng.integers(1, 4))
    phase = rng.integers(0, phases, count)
    after = np.full(count, -1)
    for flow in range(1, count):
        before = [f for f in range(flow) if src[f] == src[flow] and phase[f] == phase[flow]]
        if before and rng.random() < 0.3:
            after[flow] = before[int(rng.integers(len(before)))]
    background = rng.random(count) < 0.15
    background[0] = False
    return Flows(
        src_F=src,
        dst_F=dst,
        bytes_F=size,
        start_ps_F=rng.integers(0, 20_000_000, count) * (rng.random() < 0.6),
        class_F=rng.integers(0, classes, count),
        qp_F=rng.integers(0, 2, count),
        phase_F=phase,
        after_F=after,
        rate_gbps_F=_pick(rng, 0.0, 0.0, 3.7) * (np.arange(count) % 4 if phases > 1 else np.ones(count)),
        background_F=background,
        gap_ps_P=rng.integers(0, 5_000_000, phases),
        barrier=_pick(rng, "host", "server", "global"),
    )


def _scenario(rng, lean: bool, packets: int) -> Scenario:
    topology = _topology(rng)
    classes = (TrafficClass(),)
    if not lean:
        classes = tuple(
            TrafficClass(
                name=f"c{i}",
                lossless=bool(rng.random() < 0.6),
                strict=bool(rng.random() < 0.3),
                weight=int(rng.integers(1, 4)),
            )
            for i in range(int(rng.integers(1, 4)))
        )
    payload = int(_pick(rng, 100, 1000, 4096))
    mode = "ecmp" if lean else _pick(rng, "ecmp", "flowlet", "adaptive", "spray")
    ns3 = bool(rng.random() < 0.4)
    early = mode in ("adaptive", "spray") or (not lean and rng.random() < 0.3)
    control = (
        _pick(rng, "none", "dcqcn", "dcqcn", "window")
        if lean
        else _pick(rng, "none", "dcqcn", "dcqcn", "window", "receiver")
    )
    pfc = PfcConfig() if lean else PfcConfig(
        enabled=bool(rng.random() < 0.85), mode=_pick(rng, "on-off", "quanta"), quanta=int(_pick(rng, 100, 2000)),
    )  # fmt: skip
    if not lean and pfc.enabled and rng.random() < 0.3:
        pfc = PfcConfig(watchdog_us=float(_pick(rng, 5, 50)), watchdog_restore_us=10.0)
    kmin = int(_pick(rng, 0, 2000, 20_000))
    return Scenario(
        topology=topology,
        flows=_flows(rng, topology.hosts, len(classes), payload, packets, False),
        classes=classes,
        switch=SwitchConfig(
            buffer_bytes=1 << 30,
            alpha=float(_pick(rng, 0.0625, 0.125, 1.0, 8.0)),
            lossy_alpha=float(_pick(rng, 0.25, 1.0)),
            reserve_bytes=int(_pick(rng, 0, 4096)),
            xon_offset_bytes=int(_pick(rng, 0, 3072)),
            static_xoff_bytes=int(_pick(rng, 0, 0, 10_000)),
            latency_ns=float(_pick(rng, 0, 450.5)),
            pfc=pfc,
            ecn=EcnConfig(
                enabled=bool(rng.random() < 0.8), kmin_bytes=kmin, kmax_bytes=kmin + int(_pick(rng, 0, 30_000)),
                pmax=float(_pick(rng, 0.01, 0.5)), at=_pick(rng, "enqueue", "dequeue"),
                dynamic=0.0 if lean else float(_pick(rng, 0.0, 0.5)),
            ),
        ),
        nic=NicConfig(
            control=control,
            dcqcn=DcqcnConfig(
                variant="ns3" if ns3 else "paper", cnp="ack-bit" if ns3 else _pick(rng, "packet", "ack-bit"),
                cnp_interval_us=float(_pick(rng, 0.5, 5)), alpha_us=float(_pick(rng, 1, 5.5)),
                timer_us=float(_pick(rng, 2, 7)),
                decrease_us=float(_pick(rng, 1, 4)), byte_counter=int(_pick(rng, 0, 20_000)),
                fast_recovery=int(rng.integers(0, 4)), ai_mbps=float(_pick(rng, 40, 500)), min_mbps=500.0,
            ),
            window_bytes=int(_pick(rng, 2, 20)) * payload if control == "window" or rng.random() < 0.2 else 0,
            out_of_order=early,
            recovery=_pick(rng, "go-back-n", "selective") if early else "go-back-n",
            reorder_packets=int(_pick(rng, 1, 3)),
            ooo_packets=int(_pick(rng, 64, 256)),
            rto_us=float(_pick(rng, 40, 150)),
            ack_every=1 if lean else int(_pick(rng, 1, 1, 4)),
        ),
        routing=RoutingConfig(
            mode=mode, paths=_pick(rng, "shortest", "up-down"), polarised=bool(rng.random() < 0.3),
            flowlet_gap_us=float(_pick(rng, 0.5, 10)), hash=_pick(rng, "mix", "murmur-ns3"),
        ),
        frame=FrameConfig(
            payload_bytes=payload, header_bytes=int(_pick(rng, 0, 48)), ack_bytes=int(_pick(rng, 20, 64)), whole_ns=ns3
        ),
        run=RunConfig(
            seed=int(rng.integers(1000)), end_us=float(_pick(rng, 2_000, 20_000)),
            sample_us=0.0 if lean else float(_pick(rng, 0, 3)), burst_bytes=0 if lean else int(_pick(rng, 0, 5000)),
        ),
    )  # fmt: skip
