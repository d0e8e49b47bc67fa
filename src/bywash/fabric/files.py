"""Scenario files: YAML that people write, and the same in short on a command line.

    profile: rocev2
    topology: {kind: leaf-spine, hosts: 32, leaves: 4, spines: 8, gbps: 400, length_m: 20}
    traffic:
      - {kind: alltoall, bytes: 256000, schedule: rotated}
      - {kind: poisson, load: 0.1, bytes: 1000000, end_us: 500}
    routing: {mode: adaptive}
    nic: {out_of_order: true, dcqcn: {ai_mbps: 100}}

Short forms: `leaf-spine:hosts=32,leaves=4,spines=8` and `alltoall:bytes=256000`. Every error names the path of its
field. pydantic checks shapes and names (`schema`); `Topology`, `Flows` and `Scenario` check values. Called by the
command line; Python callers build a `Scenario` directly.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from bywash.errors import ConfigError
from bywash.fabric import traffic
from bywash.fabric.file_topology import build_topology
from bywash.fabric.file_traffic import build_traffic
from bywash.fabric.profiles import profile
from bywash.fabric.scenario import RunConfig, Scenario, TrafficClass
from bywash.fabric.schema import ScenarioFile, TopologyFile, as_config_error

__all__ = [
    "TopologyFile",
    "as_config_error",
    "build_topology",
    "load_scenario",
    "parse_scenario",
    "parse_short",
    "read_yaml",
]


def load_scenario(path: Path | str, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """Read a scenario file; `overrides` replaces top-level entries (profile, topology, traffic, ...).

    Raises:
        ConfigError: the file cannot be read, is no YAML, or a field is wrong; the message starts with its path.
    """
    return parse_scenario(read_yaml(path) | dict(overrides or {}), directory=Path(path).parent)


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The plain data of a scenario file, named after it unless it says otherwise."""
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot read it: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as a date that is none
        raise ConfigError(f"{file}: is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: must hold fields, as the files of examples/ do; it is empty or something else")
    return {"name": file.stem} | data


def parse_scenario(data: Mapping[str, Any], directory: Path = Path()) -> Scenario:
    """A scenario from the plain data of a file. Relative paths in it are relative to `directory`."""
    try:
        file = ScenarioFile.model_validate(dict(data))
    except ValidationError as error:
        raise as_config_error(error) from error
    base = profile(file.profile)
    topology = build_topology(file.topology, directory)
    classes = base.classes
    if file.classes is not None:
        classes = tuple(_dataclass(TrafficClass(), one, f"classes[{i}]") for i, one in enumerate(file.classes))
    run = _dataclass(RunConfig(), file.run, "run")
    parts = []
    for i, one in enumerate(file.traffic):
        parts.append(build_traffic(one, topology, classes, directory, f"traffic[{i}]", i, file.barrier))
    return Scenario(
        name=file.name,
        topology=topology,
        flows=traffic.join(parts, barrier=file.barrier),
        classes=classes,
        switch=_dataclass(base.switch, file.switch, "switch"),
        nic=_dataclass(base.nic, file.nic, "nic"),
        routing=_dataclass(base.routing, file.routing, "routing"),
        frame=_dataclass(base.frame, file.frame, "frame"),
        run=run,
    )


def parse_short(text: str, flag: str) -> dict[str, Any]:
    """`kind:key=value,key=value` to plain data; lists have `/` between their entries."""
    kind, _, rest = text.partition(":")
    out: dict[str, Any] = {"kind": kind}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} {text!r}: wants kind:key=value,key=value; {part!r} has no value")
        out[key.strip()] = [_scalar(v) for v in value.split("/")] if key in ("failed",) else _scalar(value)
    return out


def _scalar(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def _dataclass(base: Any, given: Mapping[str, Any], where: str) -> Any:
    """A frozen dataclass with some fields replaced; nested ones by nested mappings."""
    known = {one.name: one for one in fields(base)}
    changes: dict[str, Any] = {}
    for name, value in given.items():
        here = f"{where}.{name}"
        if name not in known:
            raise ConfigError(f"{here}: there is no such field; known are {', '.join(known)}")
        old = getattr(base, name)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{here} = {value!r}: must hold fields")
            changes[name] = _dataclass(old, value, here)
        else:
            changes[name] = _converted(old, value, here, optional=name == "headroom_bytes")
    return replace(base, **changes)


def _converted(old: Any, value: Any, where: str, *, optional: bool) -> Any:
    if value is None and optional:
        return None
    wanted: tuple[type, ...] = (int,) if optional else (type(old),)
    if isinstance(old, bool) or wanted == (bool,):
        good = isinstance(value, bool)
    elif wanted == (float,):
        good = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if good else value
    else:
        good = isinstance(value, wanted) and not isinstance(value, bool)
    if not good:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
        raise ConfigError(f"{where} = {value!r}: must be {names.get(wanted[0], wanted[0].__name__)}")
    return value
