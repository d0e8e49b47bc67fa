"""What a source does not say."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Generation of the devices, rate of a NIC in Gb/s, devices of a host."""

    device: str = "h100"
    gbps: float = 400.0
    devices: int = 8
