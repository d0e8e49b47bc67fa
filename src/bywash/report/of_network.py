"""What a simulated network did, for a report: queues over time, pauses and marks of every link, how busy each one was.

Shapes as in `fabric.result`: P ports (directions of links), Q priorities, T samples. Knows fabrics; nothing of plans.
`of_plan` calls it for a plan's run, anybody with a `Result` may.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bywash.fabric.result import PS_PER_US, Result
from bywash.fabric.topology import Topology
from bywash.report.document import Block, Heat, Lines, Section, Series, Table

QUEUES_SHOWN = 5
LINKS_SHOWN = 12
ROWS_SHOWN = 40

FloatArray = NDArray[np.float64]


def network_section(result: Result, *, title: str = "Network", text: str = "") -> Section:
    """Queues, signals and use of links, most interesting first."""
    blocks: list[Block] = [*_queues(result), _signals(result), *use_of_links(result), *marks_of_links(result)]
    return Section(title=title, text=text, blocks=tuple(blocks))


def _queues(result: Result) -> list[Lines]:
    """The deepest queues over time, and all together; nothing for a run without samples."""
    depth_TP = result.queue_bytes_TP
    if not depth_TP.size or not depth_TP.any():
        return []
    topology = result.scenario.topology
    deepest = [int(p) for p in np.argsort(-depth_TP.max(axis=0), kind="stable")[:QUEUES_SHOWN] if depth_TP[:, p].any()]
    x = tuple((result.sample_ps_T / PS_PER_US).tolist())
    unit, name = _unit(int(depth_TP.max()))
    sum_unit, sum_name = _unit(int(depth_TP.sum(axis=1).max()))
    one = Lines(
        title="Queue depth over time",
        x=x,
        series=tuple(
            Series(name=topology.port_name(port), y=tuple((depth_TP[:, port] / unit).tolist())) for port in deepest
        ),
        x_name="us",
        y_name=name,
        note=f"the {len(deepest)} deepest of {depth_TP.shape[1]} egress queues, all classes together",
    )
    whole = Lines(
        title="All queues together",
        x=x,
        series=(
            Series(name="sum of all queues", y=tuple((depth_TP.sum(axis=1) / sum_unit).tolist())),
            Series(name="deepest queue of each moment", y=tuple((depth_TP.max(axis=1) / sum_unit).tolist())),
        ),
        x_name="us",
        y_name=sum_name,
    )
    return [one, whole]


def _unit(most: int) -> tuple[float, str]:
    """Bytes, KB or MB: what keeps the largest value above 1."""
    return (1e6, "MB") if most >= 1_000_000 else (1e3, "KB") if most >= 1_000 else (1.0, "bytes")


def _signals(result: Result) -> Table:
    """Ports with pauses, marks or drops, the most held up first; else those with the deepest queues."""
    topology = result.scenario.topology
    pauses_P, marks_P, drops_P = (m.sum(axis=1) for m in (result.pauses_PQ, result.marks_PQ, result.drops_PQ))
    paused_P, peak_P = result.paused_ps_PQ.sum(axis=1), result.peak_bytes_PQ.max(axis=1)
    order = np.lexsort((-peak_P, -marks_P, -drops_P, -paused_P))
    shown = [int(port) for port in order[:LINKS_SHOWN]]
    totals = (
        f"In all {int(pauses_P.sum()):,} pause frames, {paused_P.sum() / PS_PER_US:,.0f} us of links held up, "
        f"{int(marks_P.sum()):,} ECN marks, {int(drops_P.sum()):,} drops, {result.cnps:,} CNPs."
    )
    return Table(
        title="Pause and ECN marks by link",
        columns=("link", "held up by pauses, us", "pauses sent", "ECN marks", "drops", "deepest queue, KB", "busy"),
        rows=tuple(
            (
                topology.port_name(port),
                f"{paused_P[port] / PS_PER_US:,.1f}",
                f"{int(pauses_P[port]):,}",
                f"{int(marks_P[port]):,}",
                f"{int(drops_P[port]):,}",
                f"{peak_P[port] / 1e3:,.0f}",
                f"{use:.0%}",
            )
            for port, use in ((port, float(result.link_use_P()[port])) for port in shown)
        ),
        note=totals + (f" The {len(shown)} links with most of them." if len(shown) < peak_P.size else ""),
    )


def use_of_links(result: Result) -> list[Heat]:
    """How busy each link was, percent of the run: one map for each step up or down the topology."""
    return _maps(result.scenario.topology, result.link_use_P() * 100, "busy", "% of the run", 100.0)


def marks_of_links(result: Result) -> list[Heat]:
    """ECN marks of each link, where there are any."""
    return [
        one
        for one in _maps(result.scenario.topology, result.marks_PQ.sum(axis=1).astype(np.float64), "ECN marks", "", 0.0)
        if any(value for line in one.values for value in line)
    ]


def _maps(topology: Topology, value_P: FloatArray, what: str, unit: str, most: float) -> list[Heat]:
    """Ports by the tiers they join; rows are hosts or the lower switches, columns their links."""
    found: dict[tuple[int, int], dict[str, list[tuple[str, float]]]] = {}
    for port in range(value_P.size):
        link = topology.links[port // 2]
        begin, end = (link.a, link.b) if port % 2 == 0 else (link.b, link.a)
        tiers = (topology.nodes[begin].tier, topology.nodes[end].tier)
        low, high = (begin, end) if tiers[0] <= tiers[1] else (end, begin)
        row, column = _place(topology, low, high)
        found.setdefault(tiers, {}).setdefault(row, []).append((column, float(value_P[port])))
    return [_map(tiers, cells, what, unit, most) for tiers, cells in sorted(found.items())]


def _place(topology: Topology, low: int, high: int) -> tuple[str, str]:
    """Row and column of a link: a server and its NIC, or two switches."""
    node = topology.nodes[low]
    if node.kind == "host" and "." in node.name:
        host, nic = node.name.rsplit(".", 1)
        return host, nic
    return node.name, topology.nodes[high].name


def _map(tiers: tuple[int, int], cells: dict[str, list[tuple[str, float]]], what: str, unit: str, most: float) -> Heat:
    """Links of one kind; parallel ones get `#2` and so on."""
    named = {row: dict(_numbered(line)) for row, line in cells.items()}
    columns = tuple(dict.fromkeys(name for line in named.values() for name in line))
    busiest = sorted(named, key=lambda row: -max(named[row].values()))[:ROWS_SHOWN]
    rows = tuple(row for row in named if row in busiest)
    return Heat(
        title=f"Links from {_tier(tiers[0])} to {_tier(tiers[1])}: {what}",
        rows=rows,
        columns=columns,
        values=tuple(tuple(named[row].get(column) for column in columns) for row in rows),
        unit=unit,
        most=most,
        note=f"the {len(rows)} rows with the largest values of {len(named)}" if len(rows) < len(named) else "",
    )


def _numbered(line: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    seen: dict[str, int] = {}
    made = []
    for name, value in line:
        seen[name] = seen.get(name, 0) + 1
        made.append((name if seen[name] == 1 else f"{name}#{seen[name]}", value))
    return made


def _tier(tier: int) -> str:
    return ("NICs", "leaves", "spines")[tier] if tier < 3 else f"switches of tier {tier}"
