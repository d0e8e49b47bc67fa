"""Rules of NICs and jobs: what a host must agree to with the switches. One function a rule, as in `audit_switch`."""

from collections.abc import Iterator

from bywash.fabric.config.audit_intent import Intent, Rule, error, finding, listed
from bywash.fabric.config.audit_model import FabricFacts
from bywash.fabric.config.findings import Finding
from bywash.fabric.config.nic import type_of_service


def nic_classifies(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """nic-trust, nic-dscp, nic-pfc, nic-ecn: what a NIC must agree to with the switches."""
    for nic in facts.nics.values():
        if nic.trust is not None and nic.trust != "dscp":
            yield error(
                "nic-trust",
                nic.name,
                f"trust {nic.trust}",
                "trust dscp",
                "without it RoCE packets are classed by VLAN priority, or not at all",
            )
        else:
            wrong = {
                code: nic.priority_of_dscp.get(code)
                for code, p in intent.codes.items()
                if nic.priority_of_dscp.get(code, p) != p
            }
            if wrong:
                yield error(
                    "nic-dscp",
                    nic.name,
                    ", ".join(f"{code} -> {priority}" for code, priority in wrong.items()),
                    ", ".join(f"{code} -> {intent.codes[code]}" for code in wrong),
                    "pauses from the switch stop another class than the one that fills it",
                )
        if nic.pfc is not None and nic.pfc != intent.priorities:
            yield error(
                "nic-pfc",
                nic.name,
                f"PFC on {listed(nic.pfc)}",
                f"PFC on {listed(intent.priorities)}",
                "the NIC ignores the switch's pauses, or the switch its",
            )
        off = [p for p in intent.priorities for side in ("np", "rp") if nic.values.get(f"ecn_{side}_{p}") == "0"]
        if off:
            yield error(
                "nic-ecn",
                nic.name,
                f"DCQCN off on {listed(off)}",
                "on",
                "marks cause no notification, or notifications no slower rate",
            )


def gids(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """gid: the GID in use is RoCE v1 or link-local, so that packets are not routed or not marked."""
    for nic in facts.nics.values():
        kind, gid = nic.values.get("gid_type", ""), nic.values.get("gid", "")
        if kind and "v2" not in kind.lower():
            yield error("gid", nic.name, f"{kind}", "RoCE v2", "RoCE v1 has no IP header, so no DSCP and no ECN")
        elif gid.lower().startswith("fe80"):
            yield error(
                "gid", nic.name, gid, "a GID of a routed address", "a link-local address does not leave its subnet"
            )


def libraries_use_the_class(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """nccl-class: NCCL or NVSHMEM mark their packets with a DSCP that no switch treats as lossless."""
    for key in ("NCCL_IB_TC", "NCCL_IB_FIFO_TC", "NVSHMEM_IB_TRAFFIC_CLASS"):
        said = facts.environment.get(key)
        if said is None and key == "NCCL_IB_FIFO_TC":
            continue  # NCCL takes NCCL_IB_TC then
        code = int(said) >> 2 if said is not None and said.isdigit() else 0
        if facts.environment and code not in intent.codes:
            good = sorted(intent.codes)
            yield error(
                "nccl-class",
                f"environment {key}",
                f"{said} (DSCP {code})" if said is not None else "not set (DSCP 0)",
                f"{type_of_service(good[0])} (DSCP {good[0]})" if good else "a lossless class",
                "its packets travel unprotected beside the lossless class",
            )


def adaptive_routing_needs_nics(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """adaptive-routing: packets come out of order at a NIC that takes every gap for loss."""
    if facts.environment.get("NCCL_IB_ADAPTIVE_ROUTING") != "1":
        return
    for nic in facts.nics.values():
        if nic.values.get("out_of_order") == "0":
            yield error(
                "adaptive-routing",
                nic.name,
                "go-back-N",
                "out-of-order placement on, or adaptive routing off",
                "every reordering is sent again as a loss",
            )


def counters(facts: FabricFacts, intent: Intent) -> Iterator[Finding]:
    """lossless-drops, pause-elsewhere: what `ethtool -S` counted shows that the settings do not hold."""
    for nic in facts.nics.values():
        for priority in range(8):
            drops = nic.counters.get(f"rx_prio{priority}_discards", 0)
            pauses = nic.counters.get(f"rx_prio{priority}_pause", 0)
            if drops and priority in intent.priorities:
                yield finding(
                    "warning",
                    "lossless-drops",
                    nic.name,
                    f"rx_prio{priority}_discards {drops:,}",
                    "0",
                    "a lossless class has dropped packets",
                )
            if pauses and priority not in intent.priorities:
                yield finding(
                    "warning",
                    "pause-elsewhere",
                    nic.name,
                    f"rx_prio{priority}_pause {pauses:,}",
                    "0",
                    "the switch pauses a class that should be lossy",
                )


HOST_RULES: tuple[Rule, ...] = (
    nic_classifies, gids, libraries_use_the_class, adaptive_routing_needs_nics, counters,
)  # fmt: skip
