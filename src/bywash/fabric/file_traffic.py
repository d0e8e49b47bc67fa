"""An entry of a scenario file's traffic list, to `Flows`. Called by `files`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bywash.errors import ConfigError
from bywash.fabric import traffic
from bywash.fabric.file_topology import host_numbers
from bywash.fabric.flow_file import load_flows
from bywash.fabric.scenario import TrafficClass
from bywash.fabric.schema import MOST_PHASES, TrafficFile
from bywash.fabric.sending import with_sending
from bywash.fabric.topology import Topology
from bywash.fabric.traffic import Barrier, Flows

MAX_FLOWS = 20_000_000


def build_traffic(
    file: TrafficFile,
    topology: Topology,
    classes: tuple[TrafficClass, ...],
    directory: Path,
    where: str,
    number: int,
    barrier: Barrier,
) -> Flows:
    """The flows of entry `number`, whose path in the file is `where`; its seed is `number` unless it has one.

    Raises:
        ConfigError: a field is missing or its value wrong; the message starts with its path.
    """
    if file.pace_by_counts and file.kind not in ("alltoall", "matrix"):
        raise ConfigError(f"{where}.pace_by_counts: is for kinds alltoall and matrix; kind {file.kind} has no counts")
    klass = _class_number(file.traffic_class, classes, f"{where}.class")
    seed = file.seed if file.seed is not None else number
    try:
        if file.kind in ("alltoall", "matrix"):
            return _shift(_exchange(file, topology, klass, directory, where, barrier), file.start_us)
        if file.kind in ("incast", "permutation", "poisson"):
            return _pattern(file, topology, klass, seed, where)
        if file.path is not None:
            return _shift(load_flows(directory / file.path, gaps_us=file.gaps_us, traffic_class=klass), file.start_us)
        return _listed(_need(file, "flows", where), klass, where)
    except ConfigError as error:
        message = str(error)
        raise ConfigError(
            where + message.removeprefix("traffic") if message.startswith("traffic.") else message
        ) from error


def _need(file: TrafficFile, name: str, where: str) -> Any:
    value = getattr(file, name)
    if value is None:
        raise ConfigError(f"{where}.{name}: must be given for kind {file.kind}")
    return value


def _exchange(
    file: TrafficFile, topology: Topology, klass: int, directory: Path, where: str, barrier: Barrier
) -> Flows:
    """Every host to every other: the same bytes for each pair, or those of a matrix; perhaps paced by them."""
    hosts = topology.hosts
    settings = {name: getattr(file, name) for name in ("schedule", "active", "step_us", "qps_per_pair", "rate_gbps")}
    settings |= {"traffic_class": klass, "phase": file.phase, "gap_us": file.gap_us, "barrier": barrier}
    if file.kind == "matrix":
        flows = traffic.from_matrix(_matrix(directory / _need(file, "path", where), hosts, where), **settings)
    else:
        _check_count(hosts * (hosts - 1) * file.qps_per_pair, where)
        flows = traffic.alltoall(hosts, _need(file, "bytes", where), **settings)
    return with_sending(flows, topology.gbps_H, pace_by_counts=file.pace_by_counts)


def _pattern(file: TrafficFile, topology: Topology, klass: int, seed: int, where: str) -> Flows:
    hosts = topology.hosts
    if file.kind == "incast":
        receiver = _need(file, "receiver", where)
        senders = [h for h in range(hosts) if h != receiver]
        if file.senders is not None:
            senders = host_numbers(file.senders, hosts, f"{where}.senders")
        size = _need(file, "bytes", where)
        return traffic.incast(senders, receiver, size, start_us=file.start_us, traffic_class=klass)
    if file.kind == "permutation":
        return traffic.permutation(
            hosts,
            _need(file, "bytes", where),
            seed=seed,
            start_us=file.start_us,
            qps_per_pair=file.qps_per_pair,
            traffic_class=klass,
        )
    slowest = min(topology.host_gbps(host) for host in range(hosts))
    size, end, load = (_need(file, name, where) for name in ("bytes", "end_us", "load"))
    _check_count(load * slowest * 125 / max(1, size) * hosts * end, where)
    return traffic.poisson(
        hosts, load=load, gbps=slowest, bytes_per_flow=size, end_us=end, seed=seed, traffic_class=klass
    )


def _check_count(count: float, where: str) -> None:
    if not count <= MAX_FLOWS:
        raise ConfigError(f"{where}: {count:,.0f} flows; at most {MAX_FLOWS:,} are supported")


def _class_number(given: int | str, classes: tuple[TrafficClass, ...], where: str) -> int:
    names = [one.name for one in classes]
    if isinstance(given, str) and given in names:
        return names.index(given)
    if isinstance(given, int) and 0 <= given < len(classes):
        return given
    raise ConfigError(f"{where} = {given!r}: classes are {', '.join(names)}")


def _shift(flows: Flows, start_us: float) -> Flows:
    return replace(flows, start_ps_F=flows.start_ps_F + round(start_us * traffic.PS_PER_US)) if start_us else flows


_FLOW_KEYS = {"src", "dst", "bytes", "start_us", "qp", "phase", "after"}


def _listed(rows: list[dict[str, float]], klass: int, where: str) -> Flows:
    for i, row in enumerate(rows):
        wrong = sorted(set(row) - _FLOW_KEYS) or sorted({"src", "dst", "bytes"} - set(row))
        if wrong:
            raise ConfigError(
                f"{where}.flows[{i}]: wants src, dst, bytes, and may have start_us, qp, phase, after; see {wrong[0]}"
            )
        for name, value in row.items():
            most = {"start_us": 8.2e6, "phase": MOST_PHASES}.get(name, traffic.MAX_FLOW_BYTES)
            if not -1 <= value <= most or (name != "start_us" and value % 1):
                raise ConfigError(f"{where}.flows[{i}].{name} = {value:g}: must be a whole number up to {most:g}")
    count = len(rows)
    return Flows(
        src_F=np.array([row["src"] for row in rows], np.int64),
        dst_F=np.array([row["dst"] for row in rows], np.int64),
        bytes_F=np.array([row["bytes"] for row in rows], np.int64),
        start_ps_F=np.array([round(row.get("start_us", 0) * traffic.PS_PER_US) for row in rows], np.int64),
        qp_F=np.array([row.get("qp", 0) for row in rows], np.int64),
        phase_F=np.array([row.get("phase", 0) for row in rows], np.int64),
        after_F=np.array([row.get("after", -1) for row in rows], np.int64),
        class_F=np.full(count, klass),
    )


def _matrix(path: Path, hosts: int, where: str) -> np.ndarray[Any, Any]:
    try:
        matrix = np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}.path = {path}: is no CSV matrix of bytes: {error}") from error
    if matrix.shape != (hosts, hosts):
        raise ConfigError(f"{where}.path = {path}: {matrix.shape[0]} x {matrix.shape[1]}, but there are {hosts} hosts")
    return matrix.astype(np.int64)
