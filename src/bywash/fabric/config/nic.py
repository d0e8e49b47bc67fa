"""NICs: one bash script per server that sets DSCP trust, PFC, DCQCN, RoCE ToS and adaptive retransmission.

The script is idempotent, has a dry run and an undo, and can print what `audit` reads. For mlx5 NICs, with NVIDIA's own
tools and sysfs files. Template: `templates/nic.sh`. The values are the plan's.
"""

from string import Template

from bywash.fabric.config.expand import template_text
from bywash.fabric.config.plan import FabricPlan, NicPlan

ECT0 = 2
"""The ECN bits of a packet that may be marked, in the two low bits of the traffic class byte."""


class _Script(Template):
    delimiter = "@"


def type_of_service(dscp: int) -> int:
    """The byte that carries a DSCP with ECT(0): 26 is 106. NCCL and NVSHMEM call it traffic class."""
    return dscp << 2 | ECT0


def nic_script(plan: FabricPlan, nics: tuple[NicPlan, ...]) -> str:
    """The script of one server, for all of its NICs."""
    values = plan.values
    return _Script(template_text("nic.sh")).substitute(
        fabric=values.name,
        priorities=" ".join(map(str, values.priorities)),
        gid_index=values.nic.gid_index,
        shows="\n".join(f"  show {nic.interface} {nic.device}" for nic in nics),
        settings="\n".join(_settings(plan, nic) for nic in nics),
    )


def servers(plan: FabricPlan) -> dict[int, tuple[NicPlan, ...]]:
    """NICs by the server they sit in."""
    found: dict[int, list[NicPlan]] = {}
    for nic in plan.nics:
        found.setdefault(nic.server, []).append(nic)
    return {server: tuple(nics) for server, nics in found.items()}


def _settings(plan: FabricPlan, nic: NicPlan) -> str:
    values, name = plan.values, nic.interface
    ecn = f"sys:{name}:class/net/{name}/ecn"
    mask = ",".join("1" if priority in values.priorities else "0" for priority in range(8))
    tos = type_of_service(values.lossless[0].dscp[0])
    lines = [
        f"# {nic.host}: {nic.gbps:g} Gb/s, {nic.cable_m} m",
        f"setting mtu:{name} {values.nic.mtu_bytes}",
        f"setting trust:{name} dscp",
        f"setting pfc:{name} {mask}",
    ]
    lines += [f"setting dscp:{name}:{code} {one.priority}" for one in values.lossless for code in one.dscp]
    lines += [f"setting dscp:{name}:{values.cnp.dscp} {values.cnp.priority}"]
    for priority in values.priorities:
        lines += [f"setting {ecn}/roce_np/enable/{priority} 1", f"setting {ecn}/roce_rp/enable/{priority} 1"]
    lines += [
        f"setting {ecn}/roce_np/cnp_dscp {values.cnp.dscp}",
        f"setting {ecn}/roce_np/cnp_802p_prio {values.cnp.priority}",
        f"setting {ecn}/roce_np/min_time_between_cnps {values.dcqcn.cnp_interval_us}",
        f"setting {ecn}/roce_rp/dce_tcp_g {values.dcqcn.alpha_g}",
        f"setting {ecn}/roce_rp/dce_tcp_rtt {values.dcqcn.alpha_timer_us}",
        f"setting {ecn}/roce_rp/rate_reduce_monitor_period {values.dcqcn.cut_interval_us}",
        f"setting {ecn}/roce_rp/rpg_time_reset {values.dcqcn.increase_timer_us}",
        f"setting {ecn}/roce_rp/rpg_byte_reset {values.dcqcn.byte_counter_bytes}",
        f"setting {ecn}/roce_rp/rpg_threshold {values.dcqcn.fast_recovery_steps}",
        f"setting {ecn}/roce_rp/rpg_ai_rate {nic.increase_mbps}",
        f"setting {ecn}/roce_rp/rpg_hai_rate {10 * nic.increase_mbps}",
        f"setting tos:{nic.device} {tos}",
        f"setting tclass:{nic.device} {tos}",
        f"setting accl:{nic.device}:roce_adp_retrans_en 1",
    ]
    if values.nic.out_of_order:
        lines.append(f"setting accl:{nic.device}:adaptive_routing_forced_en 1")
    if plan.rotation is not None:
        lines.insert(
            1,
            f"# First bursts are not controlled: at most {plan.rotation} senders at once to one receiver, or "
            f"{plan.pace_gbps:g} Gb/s each of {values.incast}; an exchange in rotation keeps to that.",
        )
    return "\n".join(lines)
