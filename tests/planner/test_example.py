"""The shipped example at full size: 128 GPUs of three generations, DeepSeek-V3. Slow lane."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from bywash.cli.main import app
from tests.planner.test_cluster import EXAMPLES

pytestmark = pytest.mark.slow


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.mark.parametrize("traffic", [(), ("--trace", "mixed")], ids=["law", "trace"])
def test_all_files_are_written_and_pass_their_own_audit(tmp_path, traffic):
    cluster = EXAMPLES / "private-16x8-mixed.yaml"
    done = run("plan", "--cluster", cluster, "--model", "deepseek-v3", "--out", tmp_path, *traffic)
    assert done.exit_code == 0, done.output
    plan = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    hosts = [host for group in plan["groups"] for host in group["hosts"]]
    assert len(hosts) == len(set(hosts)) == 16
    numbers = json.loads((tmp_path / "plan.json").read_text())
    best = numbers["ranked"][0]["tokens_per_s"]
    assert all(one["tokens_per_s"] <= best for one in numbers["ranked"] if one["feasible"])
    for name in ("report.html", "fabric.yaml", "fabric/leaf7.json", "fabric/h200-3.nccl.env", "g0.slurm.sh"):
        assert (tmp_path / name).is_file(), name
    audit = run("fabric", "audit", tmp_path / "fabric", "--values", tmp_path / "fabric.yaml")
    assert audit.exit_code == 0, audit.output


def test_more_processes_find_the_same(tmp_path):
    for jobs in (1, 2):
        options = ("--model", "deepseek-v3", "--sequences", 64, "--jobs", jobs, "--json", tmp_path / f"{jobs}.json")
        done = run("plan", "--cluster", EXAMPLES / "private-16x8-mixed.yaml", *options)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()
