"""The audit: reads a directory of what devices are configured to do, and lists what is wrong with it.

    DIR/*.json   one config_db.json a switch (`show runningconfiguration all`, /etc/sonic/config_db.json)
    DIR/*.txt    one file a server: what `nic.sh --show` prints, or `mlnx_qos -i` and `ethtool -S` of one NIC
    DIR/*.env    NCCL and NVSHMEM variables of the jobs

With a values file, what was meant and the cables are its; without one, what most ports do and DEVICE_NEIGHBOR say.
Structural checks come first, then YANG where models are given, then the rules. Pure but for reading files.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bywash.errors import ConfigError
from bywash.fabric.config.audit_hosts import HOST_RULES
from bywash.fabric.config.audit_intent import Intent, inferred
from bywash.fabric.config.audit_model import (
    Cable,
    FabricFacts,
    NicFacts,
    neighbour_cables,
    nic_facts,
    read_config_db,
    read_environment,
    switch_facts,
)
from bywash.fabric.config.audit_switch import SWITCH_RULES
from bywash.fabric.config.checks import check
from bywash.fabric.config.findings import Finding
from bywash.fabric.config.headroom import LookupTable
from bywash.fabric.config.plan import FabricPlan
from bywash.fabric.config.yang import YangModels

Configs = dict[str, dict[str, Any]]


def read_directory(directory: str | Path) -> tuple[Configs, dict[str, NicFacts], dict[str, str]]:
    """config_db by switch, NICs by name, environment.

    Raises:
        ConfigError: no such directory, nothing to audit in it, a file that cannot be read, two files of one switch.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no directory; give one with a config_db .json for each switch")
    configs: Configs = {}
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".patch.json"):
            continue
        config = read_config_db(path)
        name = _hostname(config) or path.stem
        if name in configs:
            raise ConfigError(f"{path}: a second file of switch {name}")
        configs[name] = config
    nics = {nic.name: nic for path in sorted(folder.glob("*.txt")) for nic in nic_facts(path.stem, _text(path))}
    environment: dict[str, str] = {}
    for path in sorted(folder.glob("*.env")):
        environment |= read_environment(_text(path))
    if not configs and not nics:
        raise ConfigError(f"{folder}: neither a .json of a switch nor a .txt of a server in it")
    return configs, nics, environment


def audit(
    configs: Configs,
    nics: Mapping[str, NicFacts],
    environment: Mapping[str, str],
    *,
    plan: FabricPlan | None = None,
    table: LookupTable | None = None,
    models: YangModels | None = None,
) -> list[Finding]:
    """All findings: structure first, then rules; findings that differ by port only are one."""
    findings = [finding for name, config in configs.items() for finding in check(name, config)]
    if models is not None:
        structural = {finding.where.split(" ")[0] for finding in findings}
        for name, config in configs.items():
            if name not in structural:  # what the checks refuse, YANG refuses too; once is enough
                findings += _yang(name, config, models)
    switches = {name: switch_facts(name, config) for name, config in configs.items()}
    cables = tuple(_plan_cables(plan)) if plan is not None else tuple(neighbour_cables(switches))
    facts = FabricFacts(switches=switches, nics=nics, environment=environment, cables=cables)
    intent = _meant(plan, table) if plan is not None else inferred(facts, table)
    for rule in SWITCH_RULES + HOST_RULES:
        findings += _merged(list(rule(facts, intent)))
    return findings


def _meant(plan: FabricPlan, table: LookupTable | None) -> Intent:
    values = plan.values
    return Intent(
        said_by="values file",
        priorities=values.priorities,
        codes={code: one.priority for one in values.lossless for code in one.dscp},
        cnp_dscp=values.cnp.dscp,
        cnp_priority=values.cnp.priority,
        mtu_bytes=values.mtu_bytes,
        nic_mtu_bytes=values.nic.mtu_bytes,
        dynamic_th=values.dynamic_th,
        table=table,
    )


def _plan_cables(plan: FabricPlan) -> list[Cable]:
    """One half cable for each port: the far end has its own."""
    return [
        Cable(a=(switch.name, port.name), b=("", ""), length_m=port.cable_m)
        for switch in plan.switches
        for port in switch.ports
    ]


def _yang(name: str, config: Mapping[str, Any], models: YangModels) -> list[Finding]:
    return [
        Finding(
            id="yang",
            severity="error",
            where=f"{name} {finding.where}",
            is_="refused",
            should_be="valid under SONiC's YANG models",
            why=finding.why,
        )
        for finding in models.validate(config)
    ]


_PORT = re.compile(r"(?P<head>.* )?(?P<row>[A-Z_]+\|)?\(?(?P<port>Ethernet\d+)\)?(?P<tail>.*)$")


def _merged(findings: list[Finding]) -> list[Finding]:
    """Findings of one device that say the same of several ports, as one that names the first and counts the rest."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        match = _PORT.match(finding.where)
        device = finding.where.split(" ")[0]
        shape = _PORT.sub(r"\g<head>\g<row>*\g<tail>", finding.where) if match else finding.where
        groups.setdefault((device, finding.id, shape, finding.is_, finding.should_be), []).append(finding)
    return [
        same[0] if len(same) == 1 else replace(same[0], where=f"{same[0].where} and {len(same) - 1} more")
        for same in groups.values()
    ]


def _hostname(config: Mapping[str, Any]) -> str:
    meta = config.get("DEVICE_METADATA")
    local = meta.get("localhost") if isinstance(meta, Mapping) else None
    return str(local.get("hostname", "")) if isinstance(local, Mapping) else ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from error
