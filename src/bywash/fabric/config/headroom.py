"""PFC headroom: how many bytes still arrive after a port has decided to pause its peer.

Three sources, never mixed: `formula` (ours; it reproduces SONiC's tables of four Spectrum switches), `lua` (what the
dynamic buffer model of today's sonic-swss computes on the switch, which differs on three of them) and `LookupTable`
(the user's own `pg_profile_lookup.ini` or a CSV of such rows: the only source for ASICs without a formula).

Knows one port and one cable; what a whole switch needs is `plan`'s. All sizes in bytes, cables in metres.
"""

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bywash.errors import ConfigError
from bywash.fabric.config.asic import KIB, PAUSE_QUANTA, Asic

SPEED_IN_CABLE_M_PER_S = 1.98e8
QUANTUM_BYTES = 512 // 8
PORT_MTU_BYTES = 9216
LOSSLESS_MTU_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What one lossless priority group reserves. `lines` is the arithmetic, for a person to check."""

    size_bytes: int
    xon_bytes: int
    xoff_bytes: int
    xon_offset_bytes: int | None = None
    source: str
    lines: tuple[str, ...] = ()


def cable_bytes(gbps: float, cable_m: float) -> float:
    """Bytes in flight on a cable, there and back: 2 L C / (8 v)."""
    return 2 * cable_m * gbps * 1e9 / SPEED_IN_CABLE_M_PER_S / 8


def formula(
    asic: Asic,
    gbps: int,
    cable_m: float,
    *,
    mtu_bytes: int = PORT_MTU_BYTES,
    lossless_mtu_bytes: int = LOSSLESS_MTU_BYTES,
    small_packet_percent: int = 100,
) -> Headroom:
    """Headroom as SONiC's `pg_profile_lookup.ini` files have it for the ASICs of `asic.ASICS`.

    xoff = lossless MTU + cell occupancy x (frame being sent when the pause arrives + cable there and back
    + MAC/PHY delay + the peer's response), rounded up to KiB. Reproduces all 78 xoff values of the ACS SKUs.

    Raises:
        ConfigError: the ASIC has no formula, or the speed is none of its own.
    """
    _check(asic, gbps, cable_m)
    wire = cable_bytes(gbps, cable_m)
    peer, said = _peer_response(asic, gbps)
    extra = asic.extra_bytes_per_gbps * gbps
    occupancy = (100 - small_packet_percent + small_packet_percent * asic.cell_factor) / 100
    in_flight = mtu_bytes + wire + asic.mac_phy_bytes + peer + extra
    xoff = _round_up(lossless_mtu_bytes + in_flight * occupancy)
    eight_lanes = gbps >= asic.double_pipeline_gbps
    xon = 2 * asic.pipeline_bytes - KIB if eight_lanes else asic.pipeline_bytes
    overhead = mtu_bytes if eight_lanes else 0
    added = f" + {extra} B ({asic.extra_bytes_per_gbps} B per Gb/s)" if extra else ""
    return Headroom(
        size_bytes=_round_up(xon + xoff + overhead),
        xon_bytes=xon,
        xoff_bytes=xoff,
        source=f"formula of {asic.name}",
        lines=(
            f"in flight = MTU {mtu_bytes} + cable 2 x {cable_m:g} m x {gbps} Gb/s / (8 x 1.98e8 m/s) = {wire:.0f}"
            f" + MAC/PHY {asic.mac_phy_bytes:.0f} + peer {said}{added} = {in_flight:.0f} B",
            f"cells: {asic.cell_bytes} B, worst case x {asic.cell_factor:.4g}, {small_packet_percent} % small frames"
            f" -> x {occupancy:.4g}",
            f"xoff = {lossless_mtu_bytes} + {in_flight:.0f} x {occupancy:.4g}, up to KiB = {xoff} B",
            f"size = xon {xon} + xoff {xoff} + eight-lane overhead {overhead} = {_round_up(xon + xoff + overhead)} B",
        ),
    )


def lua(
    asic: Asic,
    gbps: int,
    cable_m: float,
    *,
    mtu_bytes: int = PORT_MTU_BYTES,
    lossless_mtu_bytes: int = LOSSLESS_MTU_BYTES,
    small_packet_percent: int = 100,
) -> Headroom:
    """Headroom as the dynamic buffer model of today's sonic-swss computes it on the switch.

    Its script takes the pause quanta on every ASIC and rounds the factor of large cells up, so that SN2700, SN3700 and
    SN4700 reserve far more than the traditional model's tables: 266,240 against 77,824 B of xoff for 400 Gb/s, 40 m.
    `asic.extra_bytes_per_gbps` stands for the gearbox and MAC delays that the SN5600's tables contain.
    """
    _check(asic, gbps, cable_m)
    factor = math.ceil(asic.cell_factor) if asic.cell_bytes > 128 else asic.cell_factor
    occupancy = (100 - small_packet_percent + small_packet_percent * factor) / 100
    peer = PAUSE_QUANTA[gbps] * QUANTUM_BYTES
    in_flight = mtu_bytes + cable_bytes(gbps, cable_m) + asic.mac_phy_bytes + peer + asic.extra_bytes_per_gbps * gbps
    xoff = _round_up(lossless_mtu_bytes + in_flight * occupancy)
    eight_lanes = gbps >= asic.double_pipeline_gbps
    xon = 2 * asic.pipeline_bytes - KIB if eight_lanes else asic.pipeline_bytes
    size = _round_up(xon + xoff + (mtu_bytes if eight_lanes else 0))
    return Headroom(size_bytes=size, xon_bytes=xon, xoff_bytes=xoff, source="dynamic model of sonic-swss")


def _check(asic: Asic, gbps: int, cable_m: float) -> None:
    if not asic.has_formula:
        raise ConfigError(
            f"{asic.hwsku}: no headroom formula for this ASIC; give its pg_profile_lookup.ini with --pg-lookup"
        )
    if gbps not in PAUSE_QUANTA or gbps > asic.max_gbps:
        known = ", ".join(str(speed) for speed in PAUSE_QUANTA if speed <= asic.max_gbps)
        raise ConfigError(f"{asic.name}: no port of {gbps} Gb/s; its speeds are {known}")
    if not 0 <= cable_m <= 100_000:
        raise ConfigError(f"{asic.name}: a cable of {cable_m:g} m; give 0 to 100,000 m")


def _peer_response(asic: Asic, gbps: int) -> tuple[float, str]:
    if asic.peer_response_bytes is not None:
        return asic.peer_response_bytes, f"{asic.peer_response_bytes:.0f}"
    quanta = PAUSE_QUANTA[gbps]
    return quanta * QUANTUM_BYTES, f"{quanta} quanta x 512 bit = {quanta * QUANTUM_BYTES}"


def _round_up(value: float) -> int:
    return math.ceil(value / KIB) * KIB


# Look-up tables of the user's: SONiC's pg_profile_lookup.ini, or a CSV with a column for the SKU.


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupRow:
    """One row of a table: what this speed and cable reserve."""

    sku: str
    gbps: int
    cable_m: int
    headroom: Headroom


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTable:
    """Rows of one file. An ini file has no SKU: its rows fit any."""

    path: str
    rows: tuple[LookupRow, ...]

    def skus(self) -> tuple[str, ...]:
        """Every SKU named, in the file's order."""
        return tuple(dict.fromkeys(row.sku for row in self.rows))

    def find(self, sku: str, gbps: int, cable_m: float) -> Headroom:
        """The row of this speed whose cable is the shortest that is long enough. Nothing is computed from rows.

        Raises:
            ConfigError: no row of this SKU and speed, or the cable is longer than all of them.
        """
        mine = [row for row in self.rows if row.sku in ("", sku) and row.gbps == gbps]
        if not mine:
            speeds = sorted({row.gbps for row in self.rows if row.sku in ("", sku)})
            raise ConfigError(f"{self.path}: no row for {sku} at {gbps} Gb/s; it has {speeds or 'no row of that SKU'}")
        fitting = [row for row in mine if row.cable_m >= cable_m]
        if not fitting:
            longest = max(row.cable_m for row in mine)
            raise ConfigError(
                f"{self.path}: {sku} at {gbps} Gb/s ends at {longest} m, the cable has {cable_m:g} m; add the row that "
                "the vendor gives for it"
            )
        return min(fitting, key=lambda row: row.cable_m).headroom


def read_lookup(path: str | Path) -> LookupTable:
    """Read `pg_profile_lookup.ini` as SONiC writes it, or a CSV with columns sku, speed_mbps, cable_m, size_bytes, ...

    Raises:
        ConfigError: unreadable, or a row is not numbers.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--pg-lookup {path}: cannot read it: {getattr(error, 'strerror', None) or error}") from error
    lines = text.splitlines()
    is_csv = bool(lines) and "speed_mbps" in lines[0]
    rows = tuple(_csv_rows(lines, path) if is_csv else _ini_rows(lines, path))
    if not rows:
        raise ConfigError(f"--pg-lookup {path}: no rows; give a pg_profile_lookup.ini, or a CSV with its columns")
    return LookupTable(path=str(path), rows=rows)


def _csv_rows(lines: list[str], path: str | Path) -> Iterable[LookupRow]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            yield _row(
                row.get("sku") or "",
                int(row["speed_mbps"]),
                int(row["cable_m"]),
                [int(row[name]) for name in ("size_bytes", "xon_bytes", "xoff_bytes")],
                row.get("xon_offset_bytes") or "",
                f"{path}:{number}",
            )
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"--pg-lookup {path}: line {number}: {error}; a row needs whole numbers") from error


def _ini_rows(lines: list[str], path: str | Path) -> Iterable[LookupRow]:
    """Columns: speed in Mb/s, cable as `40m`, size, xon, xoff, threshold, and perhaps xon_offset."""
    for number, line in enumerate(lines, start=1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        try:
            sizes = [int(field) for field in fields[2:5]]
            offset = fields[6] if len(fields) > 6 else ""
            speed, cable = int(fields[0]), int(fields[1].removesuffix("m"))
            yield _row("", speed, cable, sizes, offset, f"{path}:{number}")
        except (IndexError, ValueError) as error:
            raise ConfigError(
                f"--pg-lookup {path}: line {number}: {error}; a row is: speed cable size xon xoff threshold"
            ) from error


def _row(sku: str, speed_mbps: int, cable_m: int, sizes: list[int], offset: str, where: str) -> LookupRow:
    size, xon, xoff = sizes
    headroom = Headroom(
        size_bytes=size,
        xon_bytes=xon,
        xoff_bytes=xoff,
        xon_offset_bytes=int(offset) if offset else None,
        source=f"look-up {where}",
        lines=(f"size {size}, xon {xon}, xoff {xoff} B: the row at {where}, not recomputed",),
    )
    return LookupRow(sku=sku, gbps=speed_mbps // 1000, cable_m=cable_m, headroom=headroom)
