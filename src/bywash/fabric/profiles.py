"""Named settings: what `profile:` in a scenario file and `--profile` stand for. Single fields may be set on top.

`rocev2` is a plain 2026 cluster; `ns3-hpcc` takes the choices of the HPCC group's ns-3 simulator, to compare runs;
`dcqcn-paper` those of Zhu et al. (SIGCOMM 2015), section 5. Nothing here is tuned to a workload.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from bywash.errors import ConfigError
from bywash.fabric.scenario import (
    DcqcnConfig,
    EcnConfig,
    FrameConfig,
    NicConfig,
    RoutingConfig,
    SwitchConfig,
    TrafficClass,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The settings of a scenario without its topology and traffic."""

    classes: tuple[TrafficClass, ...] = (TrafficClass(),)
    switch: SwitchConfig = field(default_factory=SwitchConfig)
    nic: NicConfig = field(default_factory=NicConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    frame: FrameConfig = field(default_factory=FrameConfig)


def ns3_hpcc() -> Profile:
    """48 B headers, 60 B ACKs with the CNP as a bit, times truncated to ns, marking at dequeue, its ECMP hash; PFC
    alpha 1/8, reserve 4,096 B, XON offset 3,072 B, headroom 3 C d (37,500 B at 100 Gb/s and 1 us).

    Its headroom depends on the link: `headroom_bytes` is for 100 Gb/s and 1 us, set it for other links.
    """
    return Profile(
        switch=SwitchConfig(
            buffer_bytes=32 << 20,
            alpha=0.125,
            reserve_bytes=4096,
            xon_offset_bytes=3072,
            headroom_bytes=37_500,
            ecn=EcnConfig(kmin_bytes=400_000, kmax_bytes=1_600_000, pmax=0.2, at="dequeue"),
        ),
        nic=NicConfig(
            dcqcn=DcqcnConfig(
                variant="ns3",
                cnp="ack-bit",
                alpha_us=1.0,
                timer_us=300.0,
                decrease_us=4.0,
                byte_counter=0,
                fast_recovery=1,
                ai_mbps=20.0,
                hai_mbps=200.0,
                min_mbps=100.0,
            )
        ),
        routing=RoutingConfig(hash="murmur-ns3"),
        frame=FrameConfig(payload_bytes=1000, header_bytes=48, ack_bytes=60, whole_ns=True),
    )


def dcqcn_paper() -> Profile:
    """Kmin 5 KB, Kmax 200 KB, Pmax 1 %; g 1/256, alpha and rate timers 55 us, CNP interval 50 us, byte counter 10 MB,
    F 5, R_AI 40 Mb/s; for links of 40 Gb/s."""
    return Profile(
        switch=SwitchConfig(
            buffer_bytes=12 << 20, ecn=EcnConfig(kmin_bytes=5_000, kmax_bytes=200_000, pmax=0.01), alpha=1.0
        ),
        nic=NicConfig(dcqcn=DcqcnConfig()),
    )


def rocev2() -> Profile:
    """4,096 B payload, 82 B of headers (preamble and gap included), ECN scaled from 100 / 400 KB at 25 Gb/s."""
    return Profile(
        switch=SwitchConfig(
            buffer_bytes=64 << 20,
            ecn=EcnConfig(kmin_bytes=100_000, kmax_bytes=400_000, pmax=0.2, reference_gbps=25.0),
        ),
        frame=FrameConfig(payload_bytes=4096, header_bytes=82, ack_bytes=84),
    )


PROFILES: dict[str, Callable[[], Profile]] = {
    "default": Profile,
    "rocev2": rocev2,
    "ns3-hpcc": ns3_hpcc,
    "dcqcn-paper": dcqcn_paper,
}


def profile(name: str) -> Profile:
    """The named settings. Raises `ConfigError` for an unknown name."""
    if name not in PROFILES:
        raise ConfigError(f"profile = {name!r}: must be one of {', '.join(PROFILES)}")
    return PROFILES[name]()
