import json
from dataclasses import replace

import pytest

from bywash.errors import ConfigError
from bywash.fabric.config import yang
from bywash.fabric.config.checks import check
from bywash.fabric.config.emit import files
from bywash.fabric.config.rollout import patch, rollout
from bywash.fabric.config.sonic import config_db
from tests.fabric_config.broken import BROKEN
from tests.fabric_config.samples import FABRICS, SMALL, apply_patch, configs_of, plan_of, yang_models


@pytest.mark.parametrize("fabric", FABRICS)
def test_every_emitted_file_passes_the_structural_checks(fabric):
    for name, config in configs_of(fabric).items():
        assert check(name, config) == []


@pytest.mark.parametrize("fabric", FABRICS)
def test_every_emitted_file_loads_in_sonics_yang_models(fabric):
    models = yang_models()
    configs = configs_of(fabric)
    assert configs
    for name, config in configs.items():
        assert models.validate(config) == [], name


def test_there_are_thirty_broken_files():
    assert len(BROKEN) >= 30
    assert len({one.name for one in BROKEN}) == len(BROKEN)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda one: one.name)
def test_a_broken_file_is_refused_with_the_right_finding(broken):
    config = configs_of("two-spine")["leaf0"]
    broken.spoil(config)
    findings = check("leaf0", config)
    assert {finding.id for finding in findings} == {broken.id}
    assert all(broken.where in finding.where for finding in findings)


@pytest.mark.parametrize("broken", [one for one in BROKEN if one.yang], ids=lambda one: one.name)
def test_yang_refuses_it_as_well(broken):
    models = yang_models()
    config = configs_of("two-spine")["leaf0"]
    broken.spoil(config)
    findings = models.validate(config)
    assert findings
    assert findings[0].why


def test_yang_names_tables_and_fields_it_does_not_know():
    models = yang_models()
    config = configs_of("two-spine")["leaf0"]
    config["SPELLBOOK"] = {"a": {"b": "c"}}
    config["BUFFER_POOL"]["ingress_lossless_pool"]["colour"] = "red"
    assert {finding.where for finding in models.validate(config)} == {
        "SPELLBOOK",
        "BUFFER_POOL|ingress_lossless_pool.colour",
    }


def test_yang_without_models_is_an_error_that_says_what_to_give(tmp_path):
    if yang.libyang_missing():
        pytest.skip(yang.libyang_missing())
    with pytest.raises(yang.ConfigError, match="--yang-dir"):
        yang.YangModels(tmp_path)


@pytest.mark.parametrize("fabric", FABRICS)
def test_all_files_of_a_fabric_say_the_same(fabric):
    """One values file feeds switches, NICs and NCCL: priority, DSCP and CNP agree everywhere."""
    plan = plan_of(fabric)
    made = files(plan)
    values = plan.values
    codes = {str(code): str(one.priority) for one in values.lossless for code in one.dscp}
    for name, config in configs_of(fabric).items():
        assert codes.items() <= config["DSCP_TO_TC_MAP"]["ROCE"].items(), name
        assert config["DSCP_TO_TC_MAP"]["ROCE"][str(values.cnp.dscp)] == str(values.cnp.priority)
        for port in config["PORT"]:
            assert config["PORT_QOS_MAP"][port]["pfc_enable"] == ",".join(map(str, values.priorities))
    for code, priority in codes.items():
        assert f"setting dscp:eth0:{code} {priority}" in made["server0.nic.sh"]
        for switch in plan.switches:
            if switch.rule.os == "cumulus":
                assert f"nv set qos mapping roce dscp {code} switch-priority {priority}" in made[f"{switch.name}.nv"]
    service = str(values.lossless[0].dscp[0] << 2 | 2)
    assert f"NCCL_IB_TC={service}\n" in made["server0.nccl.env"]
    assert f"NVSHMEM_IB_TRAFFIC_CLASS={service}\n" in made["server0.nccl.env"]


@pytest.mark.parametrize("name", ["../leaf", "a/b", ".leaf", "-leaf", "le af", "x" * 300])
def test_a_switch_name_that_is_no_file_name_is_refused(name):
    plan = plan_of(SMALL)
    odd = replace(plan, switches=(plan.switches[0], replace(plan.switches[1], name=name)))
    with pytest.raises(ConfigError, match="gives its files their names"):
        files(odd)


def test_emitting_twice_gives_the_same_files():
    plan = plan_of("rail-mixed")
    assert files(plan) == files(plan)


def test_the_two_buffer_models_differ_where_they_must():
    traditional, dynamic = configs_of("two-spine")["leaf0"], configs_of("fat-tree")["edge0"]
    assert traditional["BUFFER_PG"]["Ethernet0|3"]["profile"] == "pg_lossless_400000_5m_profile"
    assert "size" in traditional["BUFFER_POOL"]["ingress_lossless_pool"]
    assert dynamic["BUFFER_PG"]["Ethernet0|3"]["profile"] == "NULL"
    assert "size" not in dynamic["BUFFER_POOL"]["ingress_lossless_pool"]
    assert dynamic["LOSSLESS_TRAFFIC_PATTERN"]["AZURE"] == {"mtu": "1024", "small_packet_percentage": "100"}


def test_a_patch_from_nothing_makes_the_file():
    config = configs_of("two-spine")["leaf0"]
    assert apply_patch({}, patch({}, config)) == config


def test_a_patch_of_what_holds_already_is_empty():
    config = configs_of("rail-mixed")["rail0"]
    assert patch(config, config) == []


def test_a_patch_mends_what_differs_and_leaves_the_rest():
    wanted = configs_of("two-spine")["leaf0"]
    current = configs_of("two-spine")["leaf0"]
    current["BGP_NEIGHBOR"] = {"10.0.0.1": {"asn": "65001"}}
    current["PORT"]["Ethernet0"] |= {"alias": "etp1", "lanes": "3,2,1,0", "mtu": "1500"}
    current["BUFFER_PG"]["Ethernet0|3-4"] = {"profile": "old"}
    current["WRED_PROFILE"]["ROCE_400G"]["green_min_threshold"] = "7"
    current["PORT_QOS_MAP"]["Ethernet8"]["pfc_enable"] = "4"
    del current["PFC_WD"]["Ethernet16"]
    steps = patch(current, wanted)
    mended = apply_patch(current, steps)
    assert mended["BGP_NEIGHBOR"] == current["BGP_NEIGHBOR"]
    assert mended["PORT"]["Ethernet0"] == wanted["PORT"]["Ethernet0"] | {"alias": "etp1", "lanes": "3,2,1,0"}
    for table in ("BUFFER_PG", "WRED_PROFILE", "PORT_QOS_MAP", "PFC_WD"):
        assert mended[table] == wanted[table]
    assert patch(mended, wanted) == []


def test_within_a_patch_nothing_refers_to_what_comes_later():
    wanted = configs_of("two-spine")["leaf0"]
    tables = [step["path"].split("/")[1] for step in patch({}, wanted)]
    for earlier, later in (
        ("BUFFER_POOL", "BUFFER_PROFILE"),
        ("BUFFER_PROFILE", "BUFFER_PG"),
        ("WRED_PROFILE", "QUEUE"),
    ):
        assert tables.index(earlier) < tables.index(later)
    assert tables[-1] == "PORT_QOS_MAP"


def test_rollout_goes_from_the_top_down_and_nics_come_last():
    steps = rollout(plan_of("fat-tree"))
    names = [step.device for step in steps]
    assert names[0] == "core0"
    assert names.index("core15") < names.index("agg0") < names.index("edge0")
    assert names[-2:] == ["servers 0 to 127", "jobs"]


def test_adaptive_routing_on_sonic_is_a_clear_word_and_no_table():
    made = files(plan_of("rail-mixed"))
    assert "no table for adaptive routing" in made["rollout.md"]
    assert not any("ARS" in table for table in json.loads(made["rail0.json"]))
    assert "adaptive-routing enable on" in made["spine0.nv"]


def test_cumulus_commands_have_no_unfilled_place_and_weights_sum_to_100():
    text = files(plan_of("rail-mixed"))["spine0.nv"]
    assert "{" not in text
    assert "## " not in text
    shares = [int(line.split()[-1]) for line in text.splitlines() if "bw-percent" in line]
    assert sum(shares) == 100
    assert text.count("qos pfc-watchdog") == 16


def test_ports_may_be_named_by_the_user():
    from bywash.fabric.config.plan import make_plan
    from bywash.fabric.config.values import parse_values

    names = [f"Ethernet{4 * i}" for i in range(3, 9)]
    values, topology = parse_values(
        {
            "topology": "leaf-spine:hosts=8,leaves=2,spines=2,gbps=100,delay_ns=100",
            "switches": [{"match": "leaf*", "asic": "sn3700", "ports": names}, {"asic": "sn3700"}],
        }
    )
    plan = make_plan(values, topology)
    assert list(config_db(plan, plan.switch("leaf1"))["PORT"]) == names
