"""The cluster shown back, as tables that a person can hold against the racks: hosts, cables, and rates between hosts.

Pure: text from a `Cluster`. `bywash plan` prints it and writes it into the plan's folder.
"""

from collections.abc import Sequence

from bywash.planner.cluster import Cluster, Host


def cluster_text(cluster: Cluster) -> str:
    """All tables, hosts that are alike in one row."""
    parts = [f"cluster {cluster.name}: {len(cluster.hosts)} hosts, {cluster.gpus} devices"]
    parts += [_hosts(cluster), _devices(cluster)]
    if cluster.topology is not None:
        parts += [cluster.topology.describe(), _cables(cluster), _between(cluster)]
    return "\n\n".join(parts) + "\n"


def _hosts(cluster: Cluster) -> str:
    rows = [["hosts", "device", "GPUs", "GB each", "peer GB/s", "NICs", "switches"]]
    for names, host in _alike(cluster.hosts):
        nics = " + ".join(f"{host.nic_gbps.count(rate)} x {rate:g}G" for rate in dict.fromkeys(host.nic_gbps))
        rows.append(
            [
                _run(names),
                host.device.name,
                str(host.gpus),
                f"{host.device.memory_gb:g}",
                f"{host.device.peer_gbytes_per_s:g}",
                nics or "none",
                _run(list(dict.fromkeys(host.switches))) or "-",
            ]
        )
    return table(rows)


def _devices(cluster: Cluster) -> str:
    """What each generation is taken to reach at most, and where that is from."""
    rows = [["device", "bf16 TFLOP/s", "fp8 TFLOP/s", "memory GB/s", "from"]]
    for device in dict.fromkeys(host.device for host in cluster.hosts):
        rates = (device.bf16_tflops, device.fp8_tflops, device.memory_gbytes_per_s)
        rows.append([device.name, *(f"{rate:g}" if rate else "-" for rate in rates), device.source])
    return table(rows)


def _alike(hosts: Sequence[Host]) -> list[tuple[list[str], Host]]:
    """Neighbouring hosts with the same devices, NICs and switches."""
    found: list[tuple[list[str], Host]] = []
    for host in hosts:
        if found:
            names, last = found[-1]
            if (last.device, last.gpus, last.nic_gbps, last.switches) == (
                host.device,
                host.gpus,
                host.nic_gbps,
                host.switches,
            ):
                names.append(host.name)
                continue
        found.append(([host.name], host))
    return found


def _cables(cluster: Cluster) -> str:
    """Switches of tier 1 against the others: cables x Gb/s; and what each gives hosts over what leads away."""
    topology = cluster.topology
    assert topology is not None
    firsts = [i for i, node in enumerate(topology.nodes) if node.tier == 1]
    others = [i for i, node in enumerate(topology.nodes) if node.tier > 1]
    joined: dict[tuple[int, int], list[float]] = {}
    for link in topology.links:
        if not link.failed:
            joined.setdefault((min(link.a, link.b), max(link.a, link.b)), []).append(link.gbps)
    rows = [["switch", "to hosts", *(topology.nodes[o].name for o in others), "up", "down:up"]]
    for first in firsts:
        down = [rate for (a, b), rates in joined.items() if first in (a, b) and a < topology.hosts for rate in rates]
        up = [joined.get((min(first, o), max(first, o)), []) for o in others]
        total = sum(map(sum, up))
        ratio = f"{sum(down) / total:.2f}:1" if total else "-"
        rows.append(
            [topology.nodes[first].name, _rates(down), *map(_rates, up), f"{total:g}G" if total else "-", ratio]
        )
    return table(rows)


def _rates(rates: Sequence[float]) -> str:
    return " + ".join(f"{list(rates).count(rate)} x {rate:g}G" for rate in dict.fromkeys(rates)) or "-"


def _between(cluster: Cluster) -> str:
    """Kinds of hosts against each other: what one pair of hosts can move, Gb/s (their NICs' rates, uplinks aside)."""
    kinds: dict[tuple[str, tuple[float, ...]], Host] = {}
    for host in cluster.hosts:
        kinds.setdefault((host.device.name, host.nic_gbps), host)
    named = [(f"{device} {sum(rates):g}G", sum(rates)) for device, rates in kinds]
    rows = [["Gb/s between hosts", *(name for name, _ in named)]]
    rows += [[name, *(f"{min(mine, other):g}" for _, other in named)] for name, mine in named]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks between; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _run(names: Sequence[str]) -> str:
    """`a-0 .. a-5` for a run of names."""
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})" if names else ""
