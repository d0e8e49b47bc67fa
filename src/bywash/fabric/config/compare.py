"""A look-up table held against the formula, row by row: which figures are reproduced, and which are not.

Rows of SKUs without a formula are counted only. Called by `bywash fabric headroom` and the tests.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bywash.fabric.config.asic import asic_of_hwsku
from bywash.fabric.config.headroom import Headroom, LookupRow, LookupTable, formula, lua


@dataclass(frozen=True, slots=True, kw_only=True)
class SkuComparison:
    """How many rows of one SKU the formula, and the dynamic model of today's sonic-swss, give exactly."""

    sku: str
    rows: int
    xoff: int
    size: int
    xon: int
    dynamic_xoff: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One figure of a table that the formula does not give."""

    row: LookupRow
    field: str
    table_bytes: int
    formula_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.row.sku} {self.row.gbps} Gb/s {self.row.cable_m} m: {self.field} {self.table_bytes:,} B in the "
            f"table, {self.formula_bytes:,} B by the formula ({self.table_bytes - self.formula_bytes:+,} B)"
        )


def compare(table: LookupTable) -> tuple[list[SkuComparison], list[Deviation]]:
    """Every SKU that has a formula, and every figure that differs."""
    counts, deviations = [], []
    for sku in table.skus():
        asic = asic_of_hwsku(sku)
        if asic is None:
            continue
        rows = [row for row in table.rows if row.sku == sku]
        ours = [formula(asic, row.gbps, row.cable_m) for row in rows]
        today = [lua(asic, row.gbps, row.cable_m) for row in rows]
        found = [one for row, mine in zip(rows, ours) for one in _deviations(row, mine)]
        deviations += found
        wrong = {field: sum(one.field == field for one in found) for field in ("xoff", "size", "xon")}
        counts.append(
            SkuComparison(
                sku=sku,
                rows=len(rows),
                xoff=len(rows) - wrong["xoff"],
                size=len(rows) - wrong["size"],
                xon=len(rows) - wrong["xon"],
                dynamic_xoff=sum(mine.xoff_bytes == row.headroom.xoff_bytes for mine, row in zip(today, rows)),
            )
        )
    return counts, deviations


def _deviations(row: LookupRow, mine: Headroom) -> Iterator[Deviation]:
    theirs = row.headroom
    for field, table_bytes, formula_bytes in (
        ("xoff", theirs.xoff_bytes, mine.xoff_bytes),
        ("xon", theirs.xon_bytes, mine.xon_bytes),
        ("size", theirs.size_bytes, mine.size_bytes),
    ):
        if table_bytes != formula_bytes:
            yield Deviation(row=row, field=field, table_bytes=table_bytes, formula_bytes=formula_bytes)
