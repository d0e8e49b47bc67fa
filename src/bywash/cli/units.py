"""Rates and times as operators write them: `200Gbps`, `5us`; and the emulated link that they describe."""

import re
from typing import TYPE_CHECKING

from bywash.errors import ConfigError

if TYPE_CHECKING:
    from bywash.exchange import Link

_RATES = {"gbps": 1.0, "gb/s": 1.0, "gbit/s": 1.0, "mbps": 1e-3, "tbps": 1e3}
_TIMES = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def gigabits(text: str, flag: str) -> float:
    """`200Gbps` to 200.0; raises `ConfigError` naming the flag. Bytes (`25GB/s`) are refused, not taken for bits."""
    return _number(text, flag, _RATES, "a rate such as 200Gbps")


def microseconds(text: str, flag: str) -> float:
    """`5us` to 5.0; raises `ConfigError` naming the flag."""
    return _number(text, flag, _TIMES, "a time such as 5us")


def parse_link(rate: str, latency: str) -> "Link | None":
    """The emulated link of `--link` and `--latency`, or None."""
    from bywash.exchange import Link

    if not rate:
        if latency:
            raise ConfigError(f"--latency {latency}: give --link too; without it nothing is emulated")
        return None
    latency_us = microseconds(latency, "--latency") if latency else 0.0
    return Link(rate_gbps=gigabits(rate, "--link"), latency_us=latency_us)


def _number(text: str, flag: str, units: dict[str, float], wanted: str) -> float:
    parts = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z/]+)\s*", text)
    if parts is not None and units is _RATES and "B" in parts[2]:
        raise ConfigError(f"{flag} {text!r}: B means bytes; give bits per second, {wanted} (1 GB/s is 8 Gbps)")
    if parts is None or parts[2].lower() not in units:
        raise ConfigError(f"{flag} {text!r}: must be {wanted}")
    return float(parts[1]) * units[parts[2].lower()]
