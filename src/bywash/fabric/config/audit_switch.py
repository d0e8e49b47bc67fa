"""Rules of switches: what must hold between settings and between switches, and YANG cannot say. One function a rule.

Each takes everything that was read and what was meant, and yields findings. None knows of the others: each has its own
precise condition, so that a fault of one kind trips one rule. The arithmetic is that of `headroom` and `thresholds`.
Called by `audit`, which merges findings that differ by port only.
"""

from collections.abc import Iterator, Mapping

from bywash.errors import ConfigError
from bywash.fabric.config.asic import KIB
from bywash.fabric.config.audit_intent import (
    Intent,
    Rule,
    error,
    finding,
    is_lossless,
    listed,
    lossless_alphas,
    most,
    number,
    profile_of,
)
from bywash.fabric.config.audit_model import FabricFacts, PortFacts, SwitchFacts
from bywash.fabric.config.findings import Finding
from bywash.fabric.config.headroom import Headroom, formula, lua
from bywash.fabric.config.thresholds import alpha_of, any_spread_ecn_bound, queue_at_first_pause


def ecn_before_pfc(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """ecn-after-pfc: with the real alpha, pool and number of ports, PFC would pause before ECN has marked."""
    for switch in facts.switches.values():
        for name, (port, priority) in _wred_users(switch, intent).items():
            row, profile = switch.wreds.get(name, {}), profile_of(switch, port, priority)
            kmin, kmax = number(row.get("green_min_threshold")), number(row.get("green_max_threshold"))
            pool, th = _pool_bytes(switch, profile, intent), number(profile.get("dynamic_th"))
            if kmin is None or kmax is None or pool is None or th is None:
                continue
            ports, alpha = len(switch.ports), alpha_of(th)
            bound = any_spread_ecn_bound(pool, ports, len(intent.priorities), alpha)
            free = max(0.0, pool - len(intent.priorities) * (ports - 1) * kmin)
            pause = queue_at_first_pause(free, alpha, 1 / max(1, ports - 1))
            if kmin >= bound or kmax >= pause:
                yield error(
                    "ecn-after-pfc",
                    f"{switch.name} WRED_PROFILE|{name}",
                    f"Kmin {kmin:,} B, Kmax {kmax:,} B",
                    f"Kmin below {bound:,.0f} B and Kmax below {max(bound, pause):,.0f} B",
                    f"alpha {alpha:g}, pool {pool:,} B, {ports} ports: an ingress may pause at {ports} x "
                    f"{bound:,.0f} B spread over all egress queues before any of them marks",
                )


def headroom_fits(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """headroom-short: a profile reserves less than this speed and cable need, at either end of a cable."""
    lengths = _lengths(facts)
    for switch in facts.switches.values():
        for port in switch.ports.values():
            cable = lengths.get((switch.name, port.name), port.cable_m)
            for priority in intent.priorities:
                name = port.groups.get(priority)
                profile = switch.profiles.get(name or "", {})
                if name is None or name == "NULL" or cable is None or not is_lossless(switch, name):
                    continue
                needed = _needed(switch, port, cable, intent)
                xoff, size = number(profile.get("xoff")) or 0, number(profile.get("size")) or 0
                if needed is not None and (xoff < needed.xoff_bytes or size < needed.size_bytes - KIB):
                    yield error(
                        "headroom-short",
                        f"{switch.name} BUFFER_PROFILE|{name} ({port.name})",
                        f"xoff {xoff:,} B, size {size:,} B" + _said_length(port, cable),
                        f"xoff {needed.xoff_bytes:,} B, size {needed.size_bytes:,} B ({needed.source}"
                        f"{_dynamic(switch, port, cable)})",
                        f"{port.gbps} Gb/s over {cable} m: packets in flight when the pause is sent would be dropped",
                    )


def cable_lengths(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """cable-length: CABLE_LENGTH is shorter than the cable, where the switch computes its headroom from it."""
    lengths = _lengths(facts)
    for switch in facts.switches.values():
        for port in switch.ports.values():
            real = lengths.get((switch.name, port.name))
            computed = any(port.groups.get(priority) == "NULL" for priority in intent.priorities)
            if real is not None and computed and (port.cable_m or 0) < real:
                yield error(
                    "cable-length",
                    f"{switch.name} CABLE_LENGTH|{port.name}",
                    f"{port.cable_m or 0} m",
                    f"{real} m",
                    "the dynamic buffer model computes headroom from it: too little for this cable",
                )


def memory_suffices(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """pool-overcommitted: headroom of all ports and the shared pool together exceed the memory."""
    for switch in facts.switches.values():
        if switch.asic is None or switch.buffer_model == "dynamic":
            continue
        reserved = 0
        for port in switch.ports.values():
            names = [port.groups[group] for group in sorted(port.groups)]
            reserved += sum(number(switch.profiles.get(name, {}).get("size")) or 0 for name in names)
        shared = max(
            (
                number(pool.get("size")) or 0
                for pool in switch.pools.values()
                if pool.get("type") in ("ingress", "both")
            ),
            default=0,
        )
        if reserved + shared > switch.asic.buffer_bytes:
            yield error(
                "pool-overcommitted",
                f"{switch.name} BUFFER_POOL",
                f"headroom {reserved:,} + shared {shared:,} = {reserved + shared:,} B",
                f"at most {switch.asic.buffer_bytes:,} B ({switch.asic.name})",
                "headroom that is not there cannot take packets in flight",
            )


def pfc_on_the_class(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """pfc-priority: a port pauses other priorities than those that are lossless everywhere else."""
    for switch in facts.switches.values():
        for port in switch.ports.values():
            if port.pfc != intent.priorities:
                yield error(
                    "pfc-priority",
                    f"{switch.name} PORT_QOS_MAP|{port.name}",
                    f"pfc_enable {listed(port.pfc)}",
                    f"pfc_enable {listed(intent.priorities)} ({intent.said_by})",
                    "one hop without PFC on the class drops its packets; PFC on another holds up what may be dropped",
                )


def groups_are_mapped(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """unmapped-pg, unmapped-queue: lossless traffic lands in a group without headroom, or a queue without a profile."""
    for switch in facts.switches.values():
        for port in switch.ports.values():
            for priority in intent.priorities:
                if priority not in port.pfc:
                    continue  # pfc-priority has said it
                group = port.group_of_tc.get(priority)
                name = port.groups.get(group) if group is not None else None
                if name is None or not is_lossless(switch, name):
                    yield error(
                        "unmapped-pg",
                        f"{switch.name} BUFFER_PG|{port.name}|{group if group is not None else priority}",
                        f"TC {priority} -> group {group} -> {name or 'no profile'}",
                        "a profile with xoff, or NULL under the dynamic model",
                        "the class has PFC but no headroom: pauses come too late, or never",
                    )
                queue = port.queue_of_tc.get(priority)
                if queue is None or queue not in port.queues:
                    yield error(
                        "unmapped-queue",
                        f"{switch.name} BUFFER_QUEUE|{port.name}|{queue if queue is not None else priority}",
                        f"TC {priority} -> queue {queue} -> no profile",
                        "the egress lossless profile",
                        "egress drops what ingress took care not to",
                    )


def watchdog_on(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """watchdog-off: PFC without a watchdog lets one stuck NIC stop the fabric."""
    for switch in facts.switches.values():
        for port in switch.ports.values():
            unwatched = [priority for priority in port.pfc if priority not in port.watched]
            if port.pfc and (unwatched or not port.watchdog):
                missing = f"pfcwd_sw_enable {listed(port.watched)}" if unwatched else "no PFC_WD row"
                yield error(
                    "watchdog-off",
                    f"{switch.name} PORT_QOS_MAP|{port.name}" if unwatched else f"{switch.name} PFC_WD|{port.name}",
                    missing,
                    f"pfcwd_sw_enable {listed(port.pfc)} and a PFC_WD row",
                    "a NIC that never stops pausing would stop the whole fabric",
                )


def one_dscp_map(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """dscp-map: a switch classifies a code point otherwise than the rest."""
    ports = [port for switch in facts.switches.values() for port in switch.ports.values()]
    usual = {code: most(port.tc_of_dscp[code] for port in ports if code in port.tc_of_dscp) for code in range(64)}
    usual |= dict(intent.codes)
    for switch in facts.switches.values():
        for port in switch.ports.values():
            wrong = {
                code: port.tc_of_dscp.get(code)
                for code in range(64)
                if usual[code] is not None
                and port.tc_of_dscp.get(code) != usual[code]
                and not _cnp_case(port, code, intent)
            }
            if wrong:
                serious = any(code in intent.codes or tc in intent.priorities for code, tc in wrong.items())
                yield finding(
                    "error" if serious else "warning",
                    "dscp-map",
                    f"{switch.name} DSCP_TO_TC_MAP ({port.name})",
                    ", ".join(f"{code} -> {'nothing' if tc is None else tc}" for code, tc in wrong.items()),
                    ", ".join(f"{code} -> {usual[code]}" for code in wrong),
                    "a packet that is lossless at one hop must be so at every hop",
                )


def one_alpha(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """asymmetric-alpha: lossless groups pause at another share of the pool than those of the other ports."""
    for switch in facts.switches.values():
        for port, name, th in lossless_alphas(switch, intent.priorities):
            if intent.dynamic_th is not None and th != intent.dynamic_th:
                yield finding(
                    "warning",
                    "asymmetric-alpha",
                    f"{switch.name} BUFFER_PROFILE|{name} ({port.name})",
                    f"dynamic_th {th} (alpha {alpha_of(th):g})",
                    f"dynamic_th {intent.dynamic_th} (alpha {alpha_of(intent.dynamic_th):g}, {intent.said_by})",
                    "ports of small alpha are paused first and give way to the others",
                )


def ecn_marks(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """ecn-off: a lossless queue that no profile marks, or one whose profile does not mark green packets."""
    for switch in facts.switches.values():
        for port in switch.ports.values():
            for priority in intent.priorities:
                queue = port.queue_of_tc.get(priority)
                name = port.wreds.get(queue) if queue is not None else None
                row = switch.wreds.get(name or "", {})
                good = row.get("ecn") in ("ecn_all", "ecn_green", "ecn_green_yellow", "ecn_green_red")
                if queue is not None and not (good and row.get("wred_green_enable") == "true"):
                    yield error(
                        "ecn-off",
                        f"{switch.name} WRED_PROFILE|{name} ({port.name})"
                        if name
                        else f"{switch.name} QUEUE|{port.name}|{queue}",
                        f"ecn {row.get('ecn', 'ecn_none')}, wred_green_enable {row.get('wred_green_enable', 'false')}",
                        "ecn ecn_all and wred_green_enable true",
                        "nothing is marked, so senders slow down only when they are paused",
                    )


def thresholds_by_speed(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """thresholds-by-speed: one WRED profile for links of several speeds is wrong for all but one."""
    for switch in facts.switches.values():
        speeds: dict[str, set[int]] = {}
        for port in switch.ports.values():
            for priority in intent.priorities:
                name = port.wreds.get(port.queue_of_tc.get(priority, -1))
                if name is not None:
                    speeds.setdefault(name, set()).add(port.gbps)
        for name, found in speeds.items():
            if len(found) > 1:
                yield finding(
                    "warning",
                    "thresholds-by-speed",
                    f"{switch.name} WRED_PROFILE|{name}",
                    f"one profile for {', '.join(f'{speed} Gb/s' for speed in sorted(found))}",
                    "one profile for each speed",
                    "a queue of the same bytes is four times the delay at a quarter of the rate",
                )


def one_mtu(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """mtu-mixed: a port or NIC of another MTU than the rest."""
    for switch in facts.switches.values():
        for port in switch.ports.values():
            if port.mtu != intent.mtu_bytes:
                yield error(
                    "mtu-mixed",
                    f"{switch.name} PORT|{port.name}",
                    f"mtu {port.mtu}",
                    f"mtu {intent.mtu_bytes} ({intent.said_by})",
                    "larger frames are dropped here, and headroom is computed for the MTU",
                )
    for nic in facts.nics.values():
        usual = intent.nic_mtu_bytes
        if nic.mtu is not None and (nic.mtu > intent.mtu_bytes or (usual is not None and nic.mtu != usual)):
            yield error(
                "mtu-mixed",
                nic.name,
                f"mtu {nic.mtu}",
                f"mtu {usual or intent.mtu_bytes}",
                "its frames do not fit, or are smaller than its peers'",
            )


def cnp_is_lossy(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """cnp-priority: notifications wait behind the very pauses they should prevent, or in best effort."""
    for switch in facts.switches.values():
        for port in switch.ports.values():
            if _cnp_case(port, intent.cnp_dscp, intent):
                yield error(
                    "cnp-priority",
                    f"{switch.name} DSCP_TO_TC_MAP ({port.name})",
                    f"CNP DSCP {intent.cnp_dscp} -> TC {port.tc_of_dscp[intent.cnp_dscp]}, which is lossless",
                    f"TC {intent.cnp_priority}",
                    "a notification that waits behind a pause comes too late",
                )
    for nic in facts.nics.values():
        for key, should in (("cnp_dscp", intent.cnp_dscp), ("cnp_priority", intent.cnp_priority)):
            said = nic.values.get(key, "")
            if said.isdigit() and int(said) != should:
                yield error(
                    "cnp-priority",
                    nic.name,
                    f"{key} {said}",
                    f"{key} {should}",
                    "switches serve notifications by that mark",
                )
                break


def _wred_users(switch: SwitchFacts, intent: Intent) -> dict[str, tuple[PortFacts, int]]:
    """For each WRED profile of a lossless queue, a port and priority that use it."""
    found: dict[str, tuple[PortFacts, int]] = {}
    for port in switch.ports.values():
        for priority in intent.priorities:
            name = port.wreds.get(port.queue_of_tc.get(priority, -1))
            if name is not None:
                found.setdefault(name, (port, priority))
    return found


def _pool_bytes(switch: SwitchFacts, profile: Mapping[str, str], intent: Intent) -> int | None:
    """Shared bytes of the pool of a profile: as configured, or what the dynamic model leaves."""
    size = number(switch.pools.get(profile.get("pool", ""), {}).get("size"))
    if size is not None or switch.asic is None or switch.buffer_model != "dynamic":
        return size
    try:
        taken = [lua(switch.asic, port.gbps, port.cable_m or 0).size_bytes for port in switch.ports.values()]
    except ConfigError:
        return None
    return switch.asic.buffer_bytes - len(intent.priorities) * sum(taken)


def _needed(switch: SwitchFacts, port: PortFacts, cable_m: int, intent: Intent) -> Headroom | None:
    """Headroom by the user's table where it has the SKU, by the formula elsewhere, None where neither is known."""
    table = intent.table
    try:
        if table is not None and any(row.sku in ("", switch.hwsku) for row in table.rows):
            return table.find(switch.hwsku, port.gbps, cable_m)
        return formula(switch.asic, port.gbps, cable_m) if switch.asic is not None else None
    except ConfigError:
        return None


def _dynamic(switch: SwitchFacts, port: PortFacts, cable_m: int) -> str:
    if switch.asic is None:
        return ""
    return f"; the dynamic model would take xoff {lua(switch.asic, port.gbps, cable_m).xoff_bytes:,} B"


def _said_length(port: PortFacts, cable_m: int) -> str:
    return f", CABLE_LENGTH {port.cable_m} m" if port.cable_m is not None and port.cable_m != cable_m else ""


def _lengths(facts: FabricFacts) -> dict[tuple[str, str], int]:
    return {end: cable.length_m for cable in facts.cables for end in (cable.a, cable.b) if cable.length_m is not None}


def _cnp_case(port: PortFacts, code: int, intent: Intent) -> bool:
    """The CNP's code point in a lossless class: `cnp-priority` reports it, `dscp-map` does not."""
    return code == intent.cnp_dscp and port.tc_of_dscp.get(code) in intent.priorities


SWITCH_RULES: tuple[Rule, ...] = (
    ecn_before_pfc, headroom_fits, cable_lengths, memory_suffices, pfc_on_the_class, groups_are_mapped, watchdog_on,
    one_dscp_map, one_alpha, ecn_marks, thresholds_by_speed, one_mtu, cnp_is_lossy,
)  # fmt: skip
