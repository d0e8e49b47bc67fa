"""The audit: what it finds, and that it finds nothing else."""

import json

import pytest

from bywash.errors import ConfigError
from bywash.fabric.config.audit import audit, read_directory
from bywash.fabric.config.audit_model import nic_facts, read_environment
from bywash.fabric.config.emit import files
from bywash.fabric.config.headroom import read_lookup
from bywash.fabric.config.rollout import patch
from tests.fabric_config.samples import DATA, FABRICS, SMALL, apply_patch, configs_of, needs_table, plan_of

SHOW = """\
interface=eth0
device=mlx5_0
mtu=9000
DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:3 dscp:31,30,29,28,27,26,25,24,
\tprio:6 dscp:55,54,53,52,51,50,49,48,
Cable len: 5
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   0   0   0
tc: 0 ratelimit: unlimited, tsa: ets, bw: 10%
cnp_dscp=48
cnp_priority=6
ecn_np_3=1
ecn_rp_3=1
traffic_class=106
cma_roce_tos=106
gid_index=3
gid_type=RoCE v2
gid=0000:0000:0000:0000:0000:ffff:0a00:0001
adaptive_retransmission=1
out_of_order=0
     rx_prio3_pause: 12
     rx_prio3_discards: 0
     rx_prio0_pause: 0
"""
ENV = "NCCL_IB_TC=106\nNCCL_IB_ADAPTIVE_ROUTING=0\nexport NVSHMEM_IB_TRAFFIC_CLASS='106'\n"
LEAF = "leaf3"
PG = "pg_lossless_400000_5m_profile"


def nics(text=SHOW, name="server0"):
    """The given server, and two sound ones: most must be right where nobody says what was meant."""
    all_of_them = nic_facts(name, text) + nic_facts("server1", SHOW) + nic_facts("server2", SHOW)
    return {nic.name: nic for nic in all_of_them}


def run(configs=None, text=SHOW, env=ENV, with_values=True):
    plan = plan_of(SMALL) if with_values else None
    return audit(configs or configs_of(SMALL), nics(text), read_environment(env), plan=plan)


def spoil(table, key, **fields):
    configs = configs_of(SMALL)
    configs[LEAF][table][key] |= fields
    return configs


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("with_values", [True, False])
def test_what_was_emitted_passes(fabric, with_values):
    plan = plan_of(fabric)
    assert audit(configs_of(fabric), {}, {}, plan=plan if with_values else None) == []


@pytest.mark.parametrize("with_values", [True, False])
def test_a_sound_fabric_with_nics_and_jobs_passes(with_values):
    assert run(with_values=with_values) == []


def ecn_above_xoff():
    high = {"green_min_threshold": "30000000", "green_max_threshold": "40000000"}
    return spoil("WRED_PROFILE", "ROCE_400G", **high), SHOW


def headroom_of_5_m_on_300_m():
    return configs_of(SMALL), SHOW


def dscp_map_mismatch():
    return spoil("DSCP_TO_TC_MAP", "ROCE", **{"26": "0"}), SHOW


def pfc_on_the_wrong_priority():
    return spoil("PORT_QOS_MAP", "Ethernet0", pfc_enable="4", pfcwd_sw_enable="4"), SHOW


def watchdog_off():
    return spoil("PORT_QOS_MAP", "Ethernet0", pfcwd_sw_enable=""), SHOW


def asymmetric_alpha():
    return spoil("BUFFER_PROFILE", PG, dynamic_th="2"), SHOW


def unmapped_group():
    return spoil("TC_TO_PRIORITY_GROUP_MAP", "ROCE", **{"3": "2"}), SHOW


def nic_not_trusting_dscp():
    return configs_of(SMALL), SHOW.replace("trust state: dscp", "trust state: pcp")


def mixed_mtu():
    return spoil("PORT", "Ethernet8", mtu="1500"), SHOW


def wrong_cnp_priority():
    return configs_of(SMALL), SHOW.replace("cnp_priority=6", "cnp_priority=3")


SEEDS = [
    (ecn_above_xoff, "ecn-after-pfc", f"{LEAF} WRED_PROFILE|ROCE_400G"),
    (dscp_map_mismatch, "dscp-map", f"{LEAF} DSCP_TO_TC_MAP"),
    (pfc_on_the_wrong_priority, "pfc-priority", f"{LEAF} PORT_QOS_MAP|Ethernet0"),
    (watchdog_off, "watchdog-off", f"{LEAF} PORT_QOS_MAP|Ethernet0"),
    (asymmetric_alpha, "asymmetric-alpha", f"{LEAF} BUFFER_PROFILE|{PG}"),
    (unmapped_group, "unmapped-pg", f"{LEAF} BUFFER_PG|Ethernet0|2"),
    (nic_not_trusting_dscp, "nic-trust", "server0"),
    (mixed_mtu, "mtu-mixed", f"{LEAF} PORT|Ethernet8"),
    (wrong_cnp_priority, "cnp-priority", "server0"),
]


@pytest.mark.parametrize("with_values", [True, False], ids=["values", "majority"])
@pytest.mark.parametrize(("seed", "id_", "where"), SEEDS, ids=[seed.__name__ for seed, _, _ in SEEDS])
def test_a_seeded_fault_is_found_and_nothing_else(seed, id_, where, with_values):
    configs, text = seed()
    (finding,) = run(configs, text, with_values=with_values)
    assert finding.id == id_
    assert finding.where.startswith(where)
    assert finding.is_ != finding.should_be
    assert finding.why


def test_headroom_for_5_m_on_a_cable_of_300_m_is_found_and_nothing_else():
    """The topology knows the cable; the leaf was set up for a short one."""
    from bywash.fabric.config.emit import sonic_configs
    from bywash.fabric.config.plan import make_plan
    from bywash.fabric.config.values import parse_values

    data = {"switches": [{"asic": "sn4700"}], "topology": "leaf-spine:hosts=8,leaves=4,spines=2,gbps=400,length_m=5"}
    long = make_plan(*parse_values(data | {"topology": data["topology"] + ",uplink_length_m=300"}))
    configs = sonic_configs(long)
    configs["leaf1"]["CABLE_LENGTH"]["AZURE"]["Ethernet16"] = "5m"
    configs["leaf1"]["BUFFER_PG"]["Ethernet16|3"]["profile"] = PG
    (finding,) = audit(configs, {}, {}, plan=long)
    assert finding.id == "headroom-short"
    assert finding.where == f"leaf1 BUFFER_PROFILE|{PG} (Ethernet16)"
    assert "CABLE_LENGTH 5 m" in finding.is_
    assert "373,760" in finding.should_be  # the formula's
    assert "562,176" in finding.should_be or "dynamic model would take" in finding.should_be
    assert "300 m" in finding.why


def test_faults_of_many_ports_are_one_finding():
    configs = configs_of(SMALL)
    for port in configs[LEAF]["PORT"]:
        configs[LEAF]["PORT_QOS_MAP"][port]["pfcwd_sw_enable"] = ""
    (finding,) = run(configs)
    assert finding.where.endswith("and 5 more")


MORE = [
    ("gid_type=RoCE v2", "gid_type=IB/RoCE v1", ENV, "gid"),
    ("gid=0000:0000:0000:0000:0000:ffff:0a00:0001", "gid=fe80:0000::1", ENV, "gid"),
    ("enabled     0   0   0   1", "enabled     0   0   0   0", ENV, "nic-pfc"),
    ("prio:3 dscp:31,30,29,28,27,26", "prio:2 dscp:31,30,29,28,27,26", ENV, "nic-dscp"),
    ("ecn_rp_3=1", "ecn_rp_3=0", ENV, "nic-ecn"),
    ("mtu=9000", "mtu=9500", ENV, "mtu-mixed"),
    ("rx_prio3_discards: 0", "rx_prio3_discards: 9", ENV, "lossless-drops"),
    ("rx_prio0_pause: 0", "rx_prio0_pause: 9", ENV, "pause-elsewhere"),
    ("", "", ENV.replace("NCCL_IB_TC=106", "NCCL_IB_TC=0"), "nccl-class"),
    ("", "", ENV.replace("'106'", "'128'"), "nccl-class"),
]


@pytest.mark.parametrize(
    ("old", "new", "env", "id_"), MORE, ids=[f"{id_} {new or env[:12]}" for _, new, env, id_ in MORE]
)
def test_hosts_and_jobs_are_held_against_the_switches(old, new, env, id_):
    text = SHOW.replace(old, new) if old else SHOW
    assert {finding.id for finding in run(text=text, env=env)} == {id_}


def test_adaptive_routing_with_go_back_n_nics():
    findings = run(env=ENV.replace("ROUTING=0", "ROUTING=1"))
    assert {finding.id for finding in findings} == {"adaptive-routing"}
    assert run(text=SHOW.replace("out_of_order=0", "out_of_order=1"), env=ENV) == []


def test_marking_left_off_is_found_although_yang_accepts_it():
    (finding,) = run(spoil("WRED_PROFILE", "ROCE_400G", wred_green_enable="false"))
    assert finding.id == "ecn-off"


def test_xoff_0_is_found_although_yang_accepts_it():
    (finding,) = run(spoil("BUFFER_PROFILE", PG, xoff="0"))
    assert finding.id == "headroom-short"


def test_a_cnp_in_a_lossless_class_on_a_switch():
    (finding,) = run(spoil("DSCP_TO_TC_MAP", "ROCE", **{"48": "3"}))
    assert finding.id == "cnp-priority"


def test_a_pool_larger_than_the_memory():
    (finding,) = run(spoil("BUFFER_POOL", "ingress_lossless_pool", size="60800000"))
    assert finding.id == "pool-overcommitted"


def test_one_profile_for_two_speeds():
    configs = configs_of("rail-mixed")
    for key, row in configs["rail0"]["QUEUE"].items():
        if "wred_profile" in row and key.startswith("Ethernet0|"):
            row["wred_profile"] = "ROCE_400G"
    findings = audit(configs, {}, {}, plan=plan_of("rail-mixed"))
    assert "thresholds-by-speed" in {finding.id for finding in findings}


def test_a_short_cable_length_under_the_dynamic_model():
    configs = configs_of("fat-tree")
    configs["edge0"]["CABLE_LENGTH"]["AZURE"]["Ethernet0"] = "5m"
    (finding,) = audit(configs, {}, {}, plan=plan_of("fat-tree"))
    assert (finding.id, finding.is_, finding.should_be) == ("cable-length", "5 m", "40 m")


def test_neighbours_say_how_long_a_cable_is_when_no_values_do():
    configs = configs_of(SMALL)
    configs[LEAF]["DEVICE_NEIGHBOR"] = {"Ethernet32": {"name": "spine0", "port": "Ethernet24"}}
    configs[LEAF]["CABLE_LENGTH"]["AZURE"]["Ethernet32"] = "5m"
    configs[LEAF]["BUFFER_PG"]["Ethernet32|3"]["profile"] = PG
    findings = audit(configs, {}, {})
    assert [(one.id, one.where) for one in findings] == [("headroom-short", f"{LEAF} BUFFER_PROFILE|{PG} (Ethernet32)")]


@needs_table
def test_the_users_table_is_taken_before_the_formula():
    table = read_lookup(DATA / "pg_profile_lookup.csv")
    assert audit(configs_of(SMALL), {}, {}, plan=plan_of(SMALL), table=table) == []


def test_the_patch_of_an_audit_mends_all_it_can():
    wanted = configs_of(SMALL)
    for seed, _, where in SEEDS:
        configs, _text = seed()
        if where.startswith(LEAF):
            configs[LEAF] = apply_patch(configs[LEAF], patch(configs[LEAF], wanted[LEAF]))
            assert audit(configs, {}, {}, plan=plan_of(SMALL)) == []


def test_a_directory_as_emitted_is_read_back(tmp_path):
    for name, text in files(plan_of(SMALL)).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "server0.txt").write_text(SHOW)
    configs, found, environment = read_directory(tmp_path)
    assert set(configs) == set(configs_of(SMALL))
    assert list(found) == ["server0"]
    assert environment["NCCL_IB_TC"] == "106"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("leaf0.json", "{", "no JSON"), ("leaf0.json", "[]", "object of tables"), ("note.md", "", "neither")],
)
def test_what_cannot_be_read_is_an_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_directory(tmp_path)


def test_rubbish_in_a_table_is_a_finding_not_a_crash():
    for table in ("PORT", "BUFFER_PROFILE", "PORT_QOS_MAP", "WRED_PROFILE", "BUFFER_PG", "CABLE_LENGTH", "PFC_WD"):
        for rubbish in ("text", [1, 2], {"x": "y"}, {"x": {"pool": None}}, None):
            configs = configs_of(SMALL)
            configs[LEAF][table] = rubbish
            json.dumps([finding.as_json() for finding in audit(configs, {}, {})])
