"""What the arithmetic must know of a switch ASIC: memory, cells, latencies. Data and look-up, no formulas.

Figures are those of SONiC's own files for the `ACS-*` hardware SKUs: cell size, MAC/PHY delay and peer response of its
ASIC table, the pipeline latency that its `pg_profile_lookup.ini` files state as XON, and the memory that SONiC hands
out (`egress_lossless_pool` of its buffer tests and templates). The values file may override the memory, since the
switch itself knows best: `redis-cli -n 6 HGET "BUFFER_MAX_PARAM_TABLE|global" mmu_size`.

An ASIC without a formula (Broadcom and others) is `lookup`: its headroom comes from the user's own
`pg_profile_lookup.ini`, never from here. Called by `headroom`, `values` and `plan`.
"""

from dataclasses import dataclass

from bywash.errors import ConfigError

KIB = 1024
_SMALLEST_FRAME_BYTES = 64

PAUSE_QUANTA = {10: 67, 25: 80, 40: 118, 50: 147, 100: 394, 200: 453, 400: 905, 800: 905}
"""Pause response time in quanta of 512 bit times, by port speed in Gb/s: IEEE 802.3 annex 31B.3.7, as SONiC has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asic:
    """One switch model. `peer_response_bytes` None takes `PAUSE_QUANTA` of the port's speed instead."""

    name: str
    hwsku: str
    platform: str
    buffer_bytes: int
    cell_bytes: int
    pipeline_bytes: int
    mac_phy_bytes: float
    peer_response_bytes: float | None
    extra_bytes_per_gbps: int
    double_pipeline_gbps: int
    max_gbps: int

    @property
    def cell_factor(self) -> float:
        """Worst-case buffer bytes per byte on the wire, when every frame is the smallest one.

        A cell of more than two smallest frames holds one of them: cell / 64. A smaller one: a frame of one byte more
        than a cell fills two, 2 cell / (1 + cell). Not rounded up: SONiC's tables are not either.
        """
        if self.cell_bytes > 2 * _SMALLEST_FRAME_BYTES:
            return self.cell_bytes / _SMALLEST_FRAME_BYTES
        return 2 * self.cell_bytes / (1 + self.cell_bytes)

    @property
    def has_formula(self) -> bool:
        """Whether `headroom.formula` holds for this ASIC; otherwise only a look-up table does."""
        return self.cell_bytes > 0


def _spectrum(name: str, hwsku: str, platform: str, buffer_bytes: int, cell_bytes: int, max_gbps: int) -> Asic:
    fourth = name == "sn5600"
    return Asic(
        name=name,
        hwsku=hwsku,
        platform=platform,
        buffer_bytes=buffer_bytes,
        cell_bytes=cell_bytes,
        pipeline_bytes=19 * KIB,
        mac_phy_bytes=0.8 * KIB,
        peer_response_bytes=None if fourth else 3.8 * KIB,
        extra_bytes_per_gbps=15 if fourth else 0,
        double_pipeline_gbps=800 if fourth else 400,  # ports of eight lanes
        max_gbps=max_gbps,
    )


ASICS = {
    asic.name: asic
    for asic in (
        _spectrum("sn2700", "ACS-MSN2700", "x86_64-mlnx_msn2700-r0", 13_945_824, 96, 100),
        _spectrum("sn3700", "ACS-MSN3700", "x86_64-mlnx_msn3700-r0", 34_287_552, 144, 200),
        _spectrum("sn4700", "ACS-MSN4700", "x86_64-mlnx_msn4700-r0", 60_817_392, 144, 400),
        _spectrum("sn5600", "ACS-SN5600", "x86_64-nvidia_sn5600-r0", 158_229_504, 192, 800),
    )
}
"""Every ASIC whose headroom has a formula, by name."""


def lookup_asic(hwsku: str, platform: str, buffer_bytes: int) -> Asic:
    """An ASIC of which only the memory is known; its headroom comes from a table of the user's."""
    return Asic(
        name="lookup",
        hwsku=hwsku,
        platform=platform,
        buffer_bytes=buffer_bytes,
        cell_bytes=0,
        pipeline_bytes=0,
        mac_phy_bytes=0.0,
        peer_response_bytes=None,
        extra_bytes_per_gbps=0,
        double_pipeline_gbps=0,
        max_gbps=1600,
    )


def find_asic(name: str, where: str) -> Asic:
    """The ASIC of this name. `where` is the path of the field, for the error.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in ASICS:
        known = ", ".join(ASICS)
        raise ConfigError(f"{where}: no ASIC {name!r}; choose one of {known}, or give hwsku, buffer_bytes and a table")
    return ASICS[name]


def asic_of_hwsku(hwsku: str) -> Asic | None:
    """The ASIC of a SONiC hardware SKU such as `ACS-MSN4700`, or None. Only exact SKUs: others use other tables."""
    return next((asic for asic in ASICS.values() if asic.hwsku == hwsku), None)
