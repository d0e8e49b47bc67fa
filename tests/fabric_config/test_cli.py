import json

import click
import pytest
import typer

from bywash.cli.main import app
from bywash.errors import ConfigError
from tests.fabric_config.samples import DATA, EXAMPLES, needs_table
from tests.fabric_config.test_audit import SHOW


def bywash(*args):
    """Exit code of a command that ends as it should; its errors are raised."""
    try:
        return app([str(arg) for arg in ("fabric", *args)], standalone_mode=False) or 0
    except (typer.Exit, click.exceptions.Exit) as done:
        return done.exit_code


def printed(capsys):
    return json.loads(capsys.readouterr().out)


def test_prove_a_ring(capsys):
    assert bywash("prove", "--topology", "ring:switches=4,hosts=4", "--json", "-") == 3
    found = printed(capsys)
    assert found["deadlock_free"] is False
    (cycle,) = found["cycles"]
    assert [buffer["port"] for buffer in cycle["buffers"]] == ["sw0->sw1", "sw1->sw2", "sw2->sw3", "sw3->sw0"]
    assert all(len(buffer["flow"]) == 2 for buffer in cycle["buffers"])
    assert [cure["deadlock_free"] for cure in found["cures"]] == [True, True]


def test_prove_a_leaf_spine_and_a_values_file(capsys):
    assert bywash("prove", "--topology", "leaf-spine:hosts=16,leaves=4,spines=2", "--json", "-") == 0
    found = printed(capsys)
    assert found["deadlock_free"] is True
    assert found["cycles"] == []
    assert found["failures_proved"] == 8 + 6
    assert bywash("prove", "--values", EXAMPLES / "two-spine.yaml") == 0
    assert "deadlock-free" in capsys.readouterr().out


def test_prove_flows_and_paths(capsys):
    ring = ("prove", "--topology", "ring:switches=4,hosts=4")
    assert bywash(*ring, "--flow", "0-1", "--flow", "host1-host2") == 0
    first = "host0,sw0,sw1,sw2,sw3,host3"
    assert bywash(*ring, "--path", first) == 0
    capsys.readouterr()
    assert bywash(*ring, "--path", first, "--path", "host2,sw2,sw3,sw0,sw1,host1") == 3
    assert "HAZARD" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("prove",), "either --topology or --values"),
        (("prove", "--topology", "ring:switches=4", "--policy", "magic"), "--policy"),
        (("prove", "--topology", "ring:switches=4", "--failures", "all"), "--failures"),
        (("prove", "--topology", "ring:switches=2"), "at least 3"),
        (("prove", "--topology", "torus:x=2"), "kind"),
        (("prove", "--topology", "ring:switches=4", "--flow", "0"), "--flow"),
        (("headroom",), "values file, --asic, or --pg-lookup"),
        (("headroom", "--asic", "sn1"), "--asic"),
        (("headroom", "none.yaml"), "cannot read"),
        (("emit", "none.yaml", "--out", "x"), "cannot read"),
        (("audit", "no-such-directory"), "no directory"),
        (("audit", ".", "--fix", "x"), "--values"),
    ],
)
def test_bad_options_are_named(args, message):
    with pytest.raises(ConfigError, match=message):
        bywash(*args)


def test_headroom_of_one_port_prints_both_models(capsys):
    assert bywash("headroom", "--asic", "sn4700", "--gbps", 400, "--cable", 40) == 0
    text = capsys.readouterr().out
    assert "77824 B" in text
    assert "266240 B" in text


def test_headroom_of_a_fabric_shows_its_arithmetic(capsys):
    assert bywash("headroom", EXAMPLES / "two-spine.yaml") == 0
    text = capsys.readouterr().out
    for part in ("shared pool: memory", "any spread", "first pause", "cable 2 x 40 m x 400 Gb/s", "at most"):
        assert part in text


@needs_table
def test_headroom_holds_a_table_against_the_formula(capsys):
    assert bywash("headroom", "--pg-lookup", DATA / "pg_profile_lookup.csv", "--json", "-") == 0
    found = printed(capsys)
    assert (found["rows"], found["xoff_exact"], found["size_exact"]) == (78, 78, 76)
    assert len(found["findings"]) == 5


def test_emit_then_audit_then_mend(tmp_path, capsys):
    values, out = EXAMPLES / "two-spine.yaml", tmp_path / "out"
    assert bywash("emit", values, "--out", out) == 0
    assert {"plan.md", "rollout.md", "leaf0.json", "leaf0.patch.json", "server0.nic.sh", "server0.nccl.env"} <= {
        file.name for file in out.iterdir()
    }
    (out / "server0.txt").write_text(SHOW)
    assert bywash("audit", out, "--values", values) == 0
    leaf = json.loads((out / "leaf5.json").read_text())
    leaf["PORT_QOS_MAP"]["Ethernet0"]["pfc_enable"] = "4"
    (out / "leaf5.json").write_text(json.dumps(leaf))
    capsys.readouterr()
    assert bywash("audit", out, "--values", values, "--fix", tmp_path / "fix", "--json", "-") == 1
    found = printed(capsys)
    ids = {finding["id"] for finding in found["findings"]}
    assert ids == {"pfc-priority", "watchdog-off"}
    assert set(found["findings"][0]) == {"id", "severity", "where", "is", "should_be", "why"}
    assert found["patches"] == ["leaf5.patch.json"]
    (step,) = json.loads((tmp_path / "fix" / "leaf5.patch.json").read_text())
    assert step == {"op": "replace", "path": "/PORT_QOS_MAP/Ethernet0/pfc_enable", "value": "3"}


def test_emit_patches_against_what_switches_have(tmp_path):
    values, now, out = EXAMPLES / "two-spine.yaml", tmp_path / "now", tmp_path / "out"
    assert bywash("emit", values, "--out", now) == 0
    assert bywash("emit", values, "--out", out, "--current", now) == 0
    assert json.loads((out / "leaf0.patch.json").read_text()) == []


def test_audit_refuses_switches_that_the_values_do_not_have(tmp_path):
    (tmp_path / "x.json").write_text('{"DEVICE_METADATA": {"localhost": {"hostname": "elsewhere"}}}')
    with pytest.raises(ConfigError, match="elsewhere is not in the topology"):
        bywash("audit", tmp_path, "--values", EXAMPLES / "two-spine.yaml")
