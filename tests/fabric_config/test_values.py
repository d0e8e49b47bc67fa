import pytest

from bywash.errors import ConfigError
from bywash.fabric.config.expand import expand_lines, expand_tree
from bywash.fabric.config.headroom import read_lookup
from bywash.fabric.config.plan import make_plan
from bywash.fabric.config.values import load_values, parse_values, topology_of
from tests.fabric_config.samples import DATA, FABRICS, needs_table, plan_of

SMALL = {
    "topology": "leaf-spine:hosts=8,leaves=4,spines=2,gbps=100,length_m=5",
    "switches": [{"asic": "sn3700"}],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"switches": [{"asic": "sn9999"}]}, r"switches\[0\].asic: no ASIC 'sn9999'"),
        ({"switches": [{"match": "spine*", "asic": "sn3700"}]}, "no entry matches leaf0"),
        ({"switches": []}, "switches"),
        ({"switches": [{"hwsku": "X"}]}, r"switches\[0\]: give asic"),
        ({"colour": "red"}, "colour: there is no such field"),
        ({"mtu_bytes": 100}, "mtu_bytes = 100"),
        ({"sending": {"active": 2, "pace_by_counts": 1.05}}, "sending.*give one"),
        ({"lossless": [{"priority": 3}, {"priority": 3, "dscp": [27]}]}, "share a priority"),
        ({"lossless": [{"priority": 3, "dscp": [64]}]}, "64: must be 0 to 63"),
        ({"cnp": {"priority": 3}}, "must not wait behind a pause"),
        ({"cnp": {"dscp": 26}}, "stands twice"),
        ({"adaptive_routing": True}, "out_of_order"),
        ({"watchdog": {"detection_ms": 100, "poll_ms": 400}}, "poll_ms or more"),
        ({"nic": {"mtu_bytes": 9216}, "mtu_bytes": 4000}, "exceeds"),
        ({"topology": "leaf-spine:hosts=7,leaves=4,spines=2"}, "topology.hosts = 7"),
        ({"dynamic_th": 8}, "dynamic_th = 8"),
        ({"lossless": [{"name": "Bad Name"}]}, r"lossless\[0\].name"),
    ],
)
def test_a_wrong_field_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(*parse_values(SMALL | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "leaf-spine:hosts=8,leaves=4,spines=2,gbps=800"}, "leaf0: sn3700: no port of 800"),
        ({"switches": [{"asic": "sn3700", "ports": ["Ethernet0"]}]}, "names 1 ports"),
        ({"topology": "leaf-spine:hosts=8,leaves=4,spines=2,gbps=100,length_m=40000"}, "leaf0: headroom does not fit"),
        ({"switches": [{"hwsku": "X", "platform": "y", "buffer_bytes": 32_000_000}]}, "no headroom formula"),
    ],
)
def test_a_plan_that_cannot_be_names_the_switch_and_the_arithmetic(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(*parse_values(SMALL | changes))


@needs_table
def test_an_asic_without_a_formula_takes_the_users_table():
    table = read_lookup(DATA / "pg_profile_lookup.csv")
    rule = {"hwsku": "Accton-AS7116-54X-R0", "platform": "x86_64-accton_as7116_54x-r0", "buffer_bytes": 32_000_000}
    plan = make_plan(*parse_values(SMALL | {"switches": [rule]}), table)
    headroom = plan.switches[0].headrooms[0].headroom
    assert headroom.xoff_bytes == next(
        row.headroom.xoff_bytes
        for row in table.rows
        if (row.sku, row.gbps, row.cable_m) == ("Accton-AS7116-54X-R0", 100, 5)
    )


@pytest.mark.parametrize("fabric", FABRICS)
def test_memory_adds_up_on_every_switch(fabric):
    plan = plan_of(fabric)
    for switch in plan.switches:
        assert (
            switch.pool_bytes + switch.reserved_bytes
            <= switch.asic.buffer_bytes
            < switch.pool_bytes + switch.reserved_bytes + 1024
        )
        for wred in switch.wreds:
            assert wred.marking.kmin_bytes < wred.marking.kmax_bytes <= wred.marking.first_pause_bytes


def test_a_loop_of_two_hops_by_hand():
    """Sender, leaf, spine, leaf, receiver: four links of 25 ns; 9,216 B frames out, 90 B back; 5 us of NICs."""
    plan = make_plan(*parse_values(SMALL))
    out = 4 * (25 + 9216 * 8 / 100)
    back = 4 * (25 + 90 * 8 / 100)
    assert plan.loop_us == pytest.approx((out + back) / 1000 + 5)


def test_inputs_of_a_port_follow_the_routes():
    """A leaf's host port hears both uplinks and the other host; a spine's port the three other leaves."""
    plan = make_plan(*parse_values(SMALL))
    text = "\n".join(plan.switch("leaf0").wreds[0].marking.lines)
    assert "300 Gb/s arrive" in text
    assert "300 Gb/s arrive" in "\n".join(plan.switch("spine0").wreds[0].marking.lines)


def test_a_ring_takes_its_hosts_all_in_all():
    assert topology_of("ring:switches=4,hosts=8", "--topology").hosts == 8
    with pytest.raises(ConfigError, match="multiple of the 4 switches"):
        topology_of("ring:switches=4,hosts=6", "--topology")


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_values(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="no YAML"):
        load_values(tmp_path / "bad.yaml")


def test_templates_repeat_what_they_name():
    lists = {"port": ["a", "b"], "queue": [1, 2]}
    tree = {"{port}|{queue}": {"x": "{port}{n}"}, "fixed": {"{queue}": "q"}, "EMPTY": {"{port}": {}}}
    assert expand_tree(tree, {"n": 7}, lists) == {
        "a|1": {"x": "a7"},
        "a|2": {"x": "a7"},
        "b|1": {"x": "b7"},
        "b|2": {"x": "b7"},
        "fixed": {"1": "q", "2": "q"},
    }
    assert expand_lines("## not me\nport {port}\nn {n}\n", {"n": 7}, lists) == "port a\nport b\nn 7\n"
