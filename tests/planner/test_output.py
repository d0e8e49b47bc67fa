"""What a plan is written as: every file parses, they agree with each other, and plan.yaml reads back."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from bywash.cli.main import app
from bywash.cli.plan import older_files
from bywash.errors import BywashError, ConfigError
from bywash.fabric.config.values import load_values
from bywash.planner.cluster import parse_cluster
from bywash.planner.model import load_model_shape
from bywash.planner.output.folder import plan_files, plan_json
from bywash.planner.output.plan_file import load_plan_file, plan_file
from bywash.planner.output.text import headline, plan_text
from bywash.planner.plan import make_plan
from bywash.planner.target import Target, Workload
from bywash.routing.skew import TraceShape, uniform
from tests.planner.samples import cluster_of

WORK = Workload(prompt_tokens=256, output_tokens=128, chunk_tokens=256, sequences=16)
NODES = [("h0", "h100-small", 4, 400.0), ("h1", "h100-small", 4, 400.0)]
SMALL = {"h100-small": {"like": "h100", "memory_gb": 24.0}}


@pytest.fixture(scope="module")
def plan():
    return make_plan(cluster_of(*NODES, devices=SMALL), load_model_shape("mixtral-8x7b"), None, WORK, Target())


@pytest.fixture(scope="module")
def files(plan):
    return plan_files(plan)


def test_every_file_parses(files, tmp_path):
    for name, text in files.items():
        if name.endswith(".json"):
            json.loads(text)
        elif name.endswith(".yaml"):
            assert yaml.safe_load(text), name
        elif name.endswith(".sh"):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    expected = {"plan.txt", "plan.json", "plan.yaml", "cluster.txt", "fabric.yaml", "topology.yaml", "g0.lws.yaml"}
    assert expected <= set(files)
    assert {"fabric/leaf0.json", "fabric/h0.nccl.env", "fabric/h1.nic.sh", "fabric/rollout.md"} <= set(files)


def test_switch_files_are_those_of_the_values_file(files, plan, tmp_path):
    for name in ("fabric.yaml", "topology.yaml"):
        (tmp_path / name).write_text(files[name])
    values, topology = load_values(tmp_path / "fabric.yaml")
    assert topology.links == plan.cluster.topology.links
    from bywash.fabric.config.emit import files as emit
    from bywash.fabric.config.plan import make_plan as fabric_plan

    assert emit(fabric_plan(values, topology))["leaf0.json"] == files["fabric/leaf0.json"]


def test_launch_files_start_one_rank_for_each_device(files):
    lws = yaml.safe_load(files["g0.lws.yaml"])["spec"]["leaderWorkerTemplate"]
    container = lws["workerTemplate"]["spec"]["containers"][0]
    assert lws["size"] == 2
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert "--nproc-per-node 4" in container["command"][2]
    assert "#SBATCH --nodelist=h0,h1" in files["g0.slurm.sh"]
    assert "--nnodes 2" in files["g0.torchrun.sh"]
    assert "bywash run --plan plan.yaml --group g0" in files["g0.torchrun.sh"]
    assert "server0" not in files["fabric/rollout.md"]


def test_kubernetes_processes_have_the_environment_of_their_host(files, tmp_path):
    """The command as Kubernetes expands it, in a folder like the mounted one; torchrun tells its environment."""
    lws = yaml.safe_load(files["g0.lws.yaml"])["spec"]["leaderWorkerTemplate"]
    container = lws["workerTemplate"]["spec"]["containers"][0]
    assert {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}} in container["env"]
    making = "\n".join(line.removeprefix("#") for line in files["g0.lws.yaml"].splitlines()[:2])
    for name in ("plan.yaml", "fabric/h0.nccl.env", "fabric/h1.nccl.env"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files[name])
    given = subprocess.run(
        ["sh", "-c", making.replace("kubectl", "echo")], cwd=tmp_path, capture_output=True, text=True
    )
    mounted = [word.removeprefix("--from-file=") for word in given.stdout.split() if word.startswith("--from-file=")]
    assert mounted == ["plan.yaml", "fabric/h0.nccl.env", "fabric/h1.nccl.env"]
    pod = tmp_path / "pod"
    pod.mkdir()
    for name in mounted:
        (pod / Path(name).name).write_text(files[name])
    (pod / "torchrun").write_text("#!/bin/sh\nenv\n")
    (pod / "torchrun").chmod(0o755)
    shell, flag, command = container["command"]
    for host in ("h1", "h2"):  # of h2 the plan knows nothing
        expanded = command.replace("$(NODE)", host).replace("$(LWS_WORKER_INDEX)", "1")
        found = subprocess.run(
            [shell, flag, expanded.replace("$(LWS_LEADER_ADDRESS)", "h0")],
            cwd=pod, env={"PATH": f"{pod}:/usr/bin:/bin", "MODEL": "m"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        wanted = [line for line in files["fabric/h1.nccl.env"].splitlines() if line.startswith("NCCL")]
        assert wanted
        assert [line for line in wanted if line in found.stdout.splitlines()] == (wanted if host == "h1" else [])


def test_the_plan_file_reads_back(files, plan, tmp_path):
    (tmp_path / "plan.yaml").write_text(files["plan.yaml"])
    assert load_plan_file(tmp_path / "plan.yaml") == plan_file(plan)
    group = load_plan_file(tmp_path / "plan.yaml").group("g0")
    assert (group.ranks, len(group.home), group.hosts) == (8, 8, ["h0", "h1"])
    assert group.predicted.tokens_per_s == pytest.approx(plan.result.winner.tokens_per_s, abs=0.1)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("ranks: 8", "ranks: 0"), "plan.groups[0].ranks = 0"),
        (("home: [", "home: [99, "), "plan.groups[0].home[0] = 99: ranks are 0 to 7"),
        (("bywash_plan: 1", "bywash_plan: 2"), "plan.bywash_plan = 2"),
        (("bywash_plan: 1", "other: 1"), "is no plan"),
        (("ranks: 8", "wrong: 8"), "plan.groups[0].ranks: must be given"),
        (("schedule: together", "schedule: by-counts"), "plan.groups[0].node_schedule = by-counts: give the rate"),
        (("groups:", "groups: ["), "is no YAML"),
        (("cluster: small", "cluster: 2026-13-01"), "is no YAML"),
    ],
)
def test_an_edited_plan_is_told_what_is_wrong(files, tmp_path, edit, message):
    (tmp_path / "plan.yaml").write_text(files["plan.yaml"].replace(*edit, 1))
    with pytest.raises(ConfigError) as refused:
        load_plan_file(tmp_path / "plan.yaml")
    assert message in str(refused.value)


def test_the_text_has_winner_ranking_and_arithmetic(plan):
    text = plan_text(plan)
    assert text.startswith("winner: mixtral-8x7b on 8 of 8 devices in 1 group")
    for words in ("tokens/s", "[simulated]", "memory of h100-small", "rank", "switch settings", "[roofline]"):
        assert words in text
    assert plan.result.winner.outcomes[0].arithmetic in text


def test_an_infeasible_plan_says_what_binds_and_writes_no_plan_file():
    plan = make_plan(
        cluster_of(*NODES, devices=SMALL), load_model_shape("mixtral-8x7b"), None, WORK, Target(tpot_ms=0.01)
    )
    assert not plan.feasible
    assert headline(plan).startswith("infeasible: time between tokens: needs")
    assert "plan.yaml" not in plan_files(plan)


def test_numbers_of_a_model_without_room_are_json():
    data = {"nodes": [{"name": "a", "device": "small"}], "devices": {"small": {"like": "l40s", "memory_gb": 8}}}
    plan = make_plan(parse_cluster(data), load_model_shape("deepseek-v3"), None, WORK, Target())
    assert plan.result.binding[0].have == 0
    assert json.loads(json.dumps(plan_json(plan), allow_nan=False))["binding"][0]["excess"] is None


def test_slots_can_be_asked_for_with_a_trace_whose_steps_are_short():
    """Fewer rows of an expert than a copy of its weights is worth."""
    model = load_model_shape("olmoe")
    trace = uniform(TraceShape(num_experts=64, top_k=8, layers=16, tokens=32, steps=2), seed=0)
    cluster = parse_cluster({"nodes": [{"name": "a", "device": "h100", "devices": 2}]})
    work = WORK.model_copy(update={"slots": 2})
    (group,) = plan_file(make_plan(cluster, model, trace, work, Target())).groups
    assert group.slots == 2
    assert group.break_even > group.capacity_factor * 32 * 8 / 64
    assert group.predicted.rows_spilled == 0
    assert np.sum(group.predicted.rows_per_layer_and_rank) == 2 * 32 * 8 * 16


def run(*args):
    return CliRunner().invoke(app, ["plan", *map(str, args)])


@pytest.fixture
def cluster_file(tmp_path):
    data = {"name": "one", "nodes": [{"name": "a", "device": "h200", "devices": 2}]}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(data))
    return tmp_path / "cluster.yaml"


def test_the_command_writes_a_folder(cluster_file, tmp_path):
    options = ["--cluster", cluster_file, "--model", "olmoe", "--sequences", 8, "--prompt-tokens", 64]
    done = run(*options, "--out", tmp_path / "out", "--json", tmp_path / "numbers.json", "--trace", "prose")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "numbers.json").read_text())["feasible"]
    assert (tmp_path / "out" / "g0.torchrun.sh").stat().st_mode & 0o100
    assert "trace of another model (32 experts, top-4, 8 layers)" in done.output
    late = run(*options, "--tpot-ms", 0.001)
    assert late.exit_code == 3
    assert late.output.startswith("infeasible: time between tokens")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--cluster: must be given"),
        (["--cluster", "none.yaml"], "none.yaml: cannot read it"),
        (["--cluster", "{}", "--model", "gpt-9"], "--model gpt-9: no such file"),
        (["--cluster", "{}", "--prompt-tokens", 0], "workload.prompt_tokens = 0"),
        (["--cluster", "{}", "--tpot-ms", -1], "target.tpot_ms = -1"),
        (["--cluster", "{}", "--tpot-ms", "inf"], "target.tpot_ms = inf"),
        (["--cluster", "{}", "--jobs", 0], "--jobs 0"),
        (["--cluster", "{}", "--trace", "none.npz"], "none.npz"),
        (["--cluster", "{}", "--out", "{}"], "is no directory"),
        (["--cluster", "{}", "--out", "{}/below"], "is no directory"),
    ],
)
def test_options_that_make_no_sense_are_refused(cluster_file, args, message):
    done = run(*(str(arg).format(cluster_file) for arg in args))
    assert isinstance(done.exception, BywashError), done.output
    assert message in str(done.exception)


def test_files_of_an_earlier_plan_are_named(tmp_path):
    for name in ("plan.yaml", "g7.slurm.sh", "fabric/old.json", "cluster.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert older_files(tmp_path, {"plan.yaml": ""}) == ["fabric/old.json", "g7.slurm.sh"]


@pytest.mark.parametrize("options", [[], ["--slots", 0], ["--slots", 3]])
def test_slots_on_the_command_line_go_before_the_plans(files, tmp_path, options, monkeypatch):
    text = files["plan.yaml"].replace("slots: 0", "slots: 2").replace("capacity_factor: 0.0", "capacity_factor: 3.0")
    (tmp_path / "plan.yaml").write_text(text)
    seen = []
    monkeypatch.setattr("bywash.cli.run.start_run", seen.append)
    CliRunner().invoke(app, [str(arg) for arg in ("run", "--plan", tmp_path / "plan.yaml", *options)])
    slots = options[1] if options else 2
    assert (seen[0].slots, seen[0].capacity_factor) == (slots, 0.0)
    assert (seen[0].alpha is None) == (seen[0].break_even is None) == (slots == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", 3], "--ranks 3: the plan places experts on 8 ranks"),
        (["--speeds", "1,1"], "--speeds: the plan has its own placement"),
        (["--group", "g9"], "--group g9: the plan has groups g0"),
    ],
)
def test_a_run_that_contradicts_its_plan_is_refused(files, tmp_path, options, message):
    (tmp_path / "plan.yaml").write_text(files["plan.yaml"])
    args = ["run", "--plan", tmp_path / "plan.yaml", "--tokens", 1, *options]
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert isinstance(done.exception, BywashError)
    assert message in str(done.exception)
