"""`bywash fabric tune`, end to end."""

import json

import pytest
import yaml

from bywash.errors import ConfigError
from bywash.fabric.config.values import load_values
from tests.fabric_config.test_cli import bywash
from tests.fabric_tune.samples import SMALL


@pytest.fixture
def values(tmp_path):
    path = tmp_path / "fabric.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def test_tune_a_pattern_then_emit(values, tmp_path, capsys):
    out = tmp_path / "tuned.yaml"
    arguments = ("--traffic", "incast:receiver=0,bytes=400000", "--budget", 20, "--jobs", 1)
    assert bywash("tune", values, "--out", out, "--json", "-", *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["search_cases"]) == len(found["heldout_cases"]) == 6
    assert not set(found["search_cases"]) & set(found["heldout_cases"])
    assert load_values(out)[0].marking.kmin_bytes == found["tuned"]["kmin_bytes"]
    assert bywash("emit", out, "--out", tmp_path / "made") == 0
    config = json.loads((tmp_path / "made" / "leaf0.json").read_text())
    assert config["WRED_PROFILE"]["ROCE_100G"]["green_min_threshold"] == str(found["tuned"]["kmin_bytes"])


def test_tune_a_trace_holds_out_layers_or_draws(values, capsys):
    arguments = ("--trace", "prose", "--tokens", 64, "--hidden", 1024, "--budget", 20, "--jobs", 1)
    assert bywash("tune", values, *arguments) == 0
    text = capsys.readouterr().out
    assert "held-out cases" in text
    assert "tuned against SONiC and ConnectX defaults" in text


def test_scenario_files_are_cases(values, tmp_path, capsys):
    paths = []
    for number in range(4):
        path = tmp_path / f"s{number}.yaml"
        traffic = [{"kind": "alltoall", "bytes": 20_000 * (number + 1)}]
        path.write_text(yaml.safe_dump({"topology": {"kind": "single-switch", "hosts": 8}, "traffic": traffic}))
        paths += ["--scenario", path]
    assert bywash("tune", values, *paths, "--budget", 20, "--jobs", 1, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert [name[-7:] for name in found["search_cases"]] == ["s0.yaml", "s2.yaml"]
    assert [name[-7:] for name in found["heldout_cases"]] == ["s1.yaml", "s3.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give traffic with --trace, --traffic or --scenario"),
        (("--traffic", "alltoall"), "--traffic alltoall: traffic.*bytes: must be given"),
        (("--traffic", "nothing:bytes=1"), "--traffic nothing:bytes=1: traffic"),
        (("--trace", "prose", "--traffic", "alltoall:bytes=1"), "not both"),
        (("--trace", "prose", "--tokens", 0), "--tokens 0"),
        (("--trace", "prose", "--jobs", 0), "--jobs 0: must be 1 to 256"),
        (("--traffic", "alltoall:bytes=1", "--budget", 1), "budget = 1"),
        (("--traffic", "alltoall:bytes=1", "--pause-budget", 2), "pause_budget = 2"),
        (("--traffic", "alltoall:bytes=1", "--out", "/nowhere/x.yaml"), "--out /nowhere/x.yaml"),
        (("--sending", "--traffic", "alltoall:bytes=9000,schedule=rotated"), "has a schedule of its own"),
    ],
)
def test_wrong_options_are_one_sentence(values, arguments, message):
    with pytest.raises(ConfigError, match=message):
        bywash("tune", values, "--jobs", 1, *arguments)
