"""`bywash run` as a user calls it: through the command line, on real processes."""

import json

import pytest

from bywash.cli.main import app
from bywash.errors import BywashError, CheckpointError, ConfigError
from bywash.routing import RoutingTrace


def bywash(*args):
    app([str(a) for a in args], standalone_mode=False)


def run_checked(tmp_path, model, ranks, *more):
    out = tmp_path / f"{model}-{ranks}.json"
    bywash("run", "--model", model, "--ranks", ranks, "--tokens", 6, "--check", "--json", out, *more)
    return json.loads(out.read_text())


@pytest.mark.parametrize("model", ["qwen3-moe-tiny", "mixtral-tiny"])
def test_any_number_of_ranks_gives_the_logits_of_one_process(tmp_path, model):
    outcomes = {ranks: run_checked(tmp_path, model, ranks) for ranks in (1, 2, 3, 4)}
    for ranks, outcome in outcomes.items():
        assert outcome["ranks"] == ranks
        assert outcome["model"] == model
        assert outcome["tokens_identical"]
        assert outcome["tokens_identical_transformers"]
        assert outcome["router_identical"]
        assert outcome["max_abs_logit_diff"] <= 1e-5
        assert outcome["imbalance_max_over_mean"] >= 1
        assert outcome["tokens_per_s"] > 0
        assert (outcome["rows_sent"] > 0) == (ranks > 1)
        assert (outcome["wire_bytes"] > 0) == (ranks > 1)
    assert len({outcome["logits_sha256"] for outcome in outcomes.values()}) == 1
    assert len({outcome["logical_bytes"] for outcome in outcomes.values()}) == 1
    totals = [sum(map(sum, outcome["rows_per_layer_and_rank"])) for outcome in outcomes.values()]
    assert len(set(totals)) == 1


def test_fewer_prompts_than_ranks_and_uneven_experts(tmp_path):
    """Ranks without prompts take part; ranks get experts in proportion to their speed."""
    ids = "--prompt-ids", "5,9,300,2"
    outcome = run_checked(tmp_path, "qwen3-moe-tiny", 3, *ids, "--speeds", "2,0,1")
    assert outcome["experts_per_rank"] == [11, 0, 5]
    assert outcome["tokens_identical"]
    assert outcome["logits_identical"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_bitwise_the_same_over_ranks_too(tmp_path, dtype):
    outcome = run_checked(tmp_path, "mixtral-tiny", 2, "--dtype", dtype)
    assert outcome["logits_identical"]
    assert outcome["router_identical"]


def test_fast_combine_moves_fewer_rows(tmp_path):
    exact = run_checked(tmp_path, "qwen3-moe-tiny", 2)
    fast = run_checked(tmp_path, "qwen3-moe-tiny", 2, "--combine", "fast")
    assert fast["rows_returned"] < exact["rows_returned"]
    assert fast["max_abs_logit_diff"] <= 1e-5


def test_trace_is_the_same_on_one_rank_and_on_three(tmp_path):
    traces = []
    for ranks in (1, 3):
        file = tmp_path / f"{ranks}.npz"
        bywash("run", "--ranks", ranks, "--tokens", 3, "--trace", file, *["--topic", "a", "--topic", "b"] * 4)
        traces.append(file.read_bytes())
    assert traces[0] == traces[1]
    trace = RoutingTrace.load(file)
    assert trace.steps == 3
    assert trace.topics == ("a", "b") * 4
    assert trace.top_k == 4


def test_trace_record_is_short_for_run(tmp_path):
    bywash("trace", "record", "--out", tmp_path / "t.npz", "--ranks", 1, "--tokens", 2, "--prompt", "one")
    assert RoutingTrace.load(tmp_path / "t.npz").steps == 2


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (["--ranks", 0], ConfigError, "--ranks 0"),
        (["--tokens", 0], ConfigError, "--tokens 0"),
        (["--exchange", "carrier-pigeon"], ConfigError, "--exchange carrier-pigeon: choose one of"),
        (["--combine", "sum"], ConfigError, "--combine sum"),
        (["--dtype", "int8"], ConfigError, "--dtype int8"),
        (["--prompt-ids", "1,x"], ConfigError, "--prompt-ids '1,x'"),
        (["--topic", "a"], ConfigError, "--topic is given 1 times for 8 prompts"),
        (["--deadline", "0"], ConfigError, "--deadline 0"),
        (["--json", "/no/such/dir/out.json"], ConfigError, "its directory does not exist"),
        (["--model", "/no/such/model", "--ranks", 1], CheckpointError, "no such directory, and no preset"),
        (["--prompt-ids", "1,320", "--ranks", 1], ConfigError, "token 320 is outside the vocabulary 0..319"),
        (["--prompt", "", "--ranks", 1], ConfigError, "prompt 0 is empty"),
        (["--speeds", "1,2", "--ranks", 1], ConfigError, "--speeds names 2 ranks, the job has 1"),
        (["--exchange", "local", "--ranks", 2], ConfigError, "--exchange local is for one rank"),
    ],
)
def test_mistakes_get_one_clear_error(args, error, message):
    with pytest.raises(error) as caught:
        bywash("run", *args)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_failed_check_is_an_error(tmp_path, monkeypatch):
    from bywash.models.check import CheckReport

    good = CheckReport(
        tokens_identical=True,
        tokens_identical_transformers=True,
        logits_identical=True,
        max_abs_logit_diff=1e-6,
        max_abs_logit=1.0,
        logits_sha256="",
        router_identical=True,
        tolerance=1e-5,
    )
    assert good.failures("exact") == []
    from dataclasses import replace

    assert "own router" in replace(good, router_identical=False).failures("fast")[0]
    assert "more than 1e-05" in replace(good, max_abs_logit_diff=float("nan")).failures("fast")[0]
    assert "not bitwise" in replace(good, logits_identical=False).failures("exact")[0]
    assert replace(good, logits_identical=False).failures("fast") == []
    assert BywashError.exit_code == 1
