"""Bounds and defaults that several commands share: deadlines, emulated links, memory, balance."""

from typing import TYPE_CHECKING

from bywash.errors import ConfigError

if TYPE_CHECKING:
    from bywash.exchange import Link

MAX_DEADLINE_S = 1e6
DEFAULT_ALPHA = 1.1
"""Of runs, and of what is planned for them. Decode at 1.0 chases noise: much of what it fetches serves few steps."""
ALPHA_HELP = f"Load that a rank keeps, as a multiple of its fair share (default: {DEFAULT_ALPHA})."


def check_deadline(deadline: float) -> None:
    """Refuse a deadline that no wait can use; NaN and infinity among them."""
    if not 0 < deadline <= MAX_DEADLINE_S:
        raise ConfigError(f"--deadline {deadline:g}: must be more than 0 and at most {MAX_DEADLINE_S:g} seconds")


def check_link(link: "Link | None", deadline: float, message_bytes: int = 0) -> None:
    """Refuse an emulated link over which a message takes as long as the deadline."""
    if link is None:
        return
    if link.latency_us >= deadline * 1e6:
        raise ConfigError(f"--latency {link.latency_us:g} us: must be below --deadline, {deadline:g} s")
    takes = message_bytes * 8 / (link.rate_gbps * 1e9) + link.latency_us * 1e-6
    if takes >= deadline:
        raise ConfigError(
            f"--link {link.rate_gbps:g} Gb/s: a message of up to {message_bytes:,} bytes takes {takes:,.0f} s, longer "
            f"than --deadline, {deadline:g} s; choose a faster link or smaller messages"
        )


def check_memory(needed: int, arithmetic: str, advice: str) -> None:
    """Refuse what cannot fit; `arithmetic` says how `needed` came about, `advice` which options to lower."""
    available = available_bytes()
    if available is not None and needed > available:
        raise ConfigError(
            f"{arithmetic} = {needed / 1e9:,.1f} GB, but {available / 1e9:,.1f} GB of memory are available; {advice}"
        )


def available_bytes() -> int | None:
    """MemAvailable of /proc/meminfo, or None where that is not to be had."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None
