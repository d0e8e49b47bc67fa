"""`bywash run` as a user calls it: through the command line, on real processes."""

import json
import shutil
from dataclasses import replace

import pytest

from bywash.cli.console import RunConsole
from bywash.cli.main import app
from bywash.cli.run import DEFAULT_PROMPTS, RunRequest, _job_options, _report
from bywash.errors import BywashError, CheckpointError, ConfigError
from bywash.models.check import CheckReport, check_run
from bywash.models.job import run_job
from bywash.models.presets import preset_directory
from bywash.models.stages import _causal_mask
from bywash.routing import RoutingTrace


def bywash(*args):
    app([str(a) for a in args], standalone_mode=False)


def run_checked(tmp_path, model, ranks, *more):
    out = tmp_path / f"{model}-{ranks}.json"
    bywash("run", "--model", model, "--ranks", ranks, "--tokens", 6, "--check", "--json", out, *more)
    return json.loads(out.read_text())


MODELS = {
    "qwen3-moe-tiny": ("auto", (1, 2, 4)),
    "mixtral-tiny": ("gloo", (1, 3)),
    "olmoe-tiny": ("shm", (1, 2)),
    "deepseek-v3-tiny": ("shm", (1, 4)),
    "gpt-oss-tiny": ("shm", (1, 2)),
}
"""Exchange and numbers of ranks: each number with some model in the default lane, with every model in the slow one."""


@pytest.mark.parametrize(
    ("model", "exchange", "sizes"),
    [
        *((model, exchange, sizes) for model, (exchange, sizes) in MODELS.items()),
        *(pytest.param(m, exchange, (1, 2, 3, 4), marks=pytest.mark.slow) for m, (exchange, _) in MODELS.items()),
    ],
)
def test_any_number_of_ranks_gives_the_logits_of_one_process(tmp_path, model, exchange, sizes):
    outcomes = {ranks: run_checked(tmp_path, model, ranks, "--exchange", exchange) for ranks in sizes}
    for ranks, outcome in outcomes.items():
        assert outcome["ranks"] == ranks
        assert outcome["model"] == model
        assert outcome["exchange"] == ("local" if ranks == 1 else "shm" if exchange == "auto" else exchange)
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


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("mixtral-tiny", "bfloat16"),
        ("olmoe-tiny", "bfloat16"),
        ("deepseek-v3-tiny", "bfloat16"),
        ("gpt-oss-tiny", "float16"),
    ],
)
def test_half_precision_is_bitwise_the_same_over_ranks_too(tmp_path, model, dtype):
    outcome = run_checked(tmp_path, model, 2, "--dtype", dtype)
    assert outcome["logits_identical"]
    assert outcome["router_identical"]


def test_fast_combine_moves_fewer_rows(tmp_path):
    exact = run_checked(tmp_path, "qwen3-moe-tiny", 2)
    fast = run_checked(tmp_path, "qwen3-moe-tiny", 2, "--combine", "fast")
    assert fast["rows_returned"] < exact["rows_returned"]
    assert fast["max_abs_logit_diff"] <= 1e-5


def test_an_emulated_link_is_labelled_and_changes_nothing_else(tmp_path):
    real = run_checked(tmp_path, "qwen3-moe-tiny", 2)
    slow = run_checked(tmp_path, "qwen3-moe-tiny", 2, "--link", "2Gbps", "--latency", "200us")
    assert real["emulated"] is None
    assert slow["emulated"] == "emulated link: 2 Gb/s, 200 us"
    assert slow["logits_sha256"] == real["logits_sha256"]


def test_trace_is_the_same_on_one_rank_and_on_three(tmp_path):
    traces = []
    for ranks in (1, 3):
        file = tmp_path / f"{ranks}.npz"
        bywash(
            "run",
            "--model",
            "qwen3-moe-tiny",
            "--ranks",
            ranks,
            "--tokens",
            3,
            "--trace",
            file,
            *["--topic", "a", "--topic", "b"] * 4,
        )
        traces.append(file.read_bytes())
    assert traces[0] == traces[1]
    trace = RoutingTrace.load(file)
    assert trace.steps == 3
    assert trace.topics == ("a", "b") * 4
    assert trace.top_k == 4


def test_prompts_and_topics_come_from_a_file(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "topic": "a"}\n\n{"prompt": "two", "topic": "b"}\n')
    bywash("trace", "record", "--out", tmp_path / "t.npz", "--ranks", 1, "--tokens", 2, "--prompts", file)
    trace = RoutingTrace.load(tmp_path / "t.npz")
    assert trace.topics == ("a", "b")
    assert trace.prompts == 2
    file.write_text('{"text": "one"}')
    with pytest.raises(ConfigError, match="--prompts"):
        bywash("run", "--prompts", file)


def test_trace_record_is_short_for_run(tmp_path):
    bywash("trace", "record", "--out", tmp_path / "t.npz", "--ranks", 1, "--tokens", 2, "--prompt", "one")
    assert RoutingTrace.load(tmp_path / "t.npz").steps == 2


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (["--ranks", 0], ConfigError, "--ranks 0"),
        (["--tokens", 0], ConfigError, "--tokens 0"),
        (["--exchange", "carrier-pigeon"], ConfigError, "--exchange carrier-pigeon: choose one of"),
        (["--link", "fast"], ConfigError, "--link 'fast': must be a rate such as 200Gbps"),
        (["--latency", "5us"], ConfigError, "--latency 5us: give --link too"),
        (["--link", "1Gbps", "--exchange", "gloo", "--ranks", 2], ConfigError, "only shm between ranks of one host"),
        (["--combine", "sum"], ConfigError, "--combine sum"),
        (["--dtype", "int8"], ConfigError, "--dtype int8"),
        (["--prompt-ids", "1,x"], ConfigError, "--prompt-ids '1,x'"),
        (["--topic", "a"], ConfigError, "--topic is given 1 times for 8 prompts"),
        (["--deadline", "0"], ConfigError, "--deadline 0"),
        (["--json", "/no/such/dir/out.json"], ConfigError, "its directory does not exist"),
        (["--model", "/no/such/model", "--ranks", 1], CheckpointError, "no such directory, and no preset"),
        (["--prompt-ids", "1,264", "--ranks", 1], ConfigError, "token 264 is outside the vocabulary 0..263"),
        (["--tokens", 500, "--ranks", 1], ConfigError, "need 543 positions, the model has 512"),
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


def request_of(**fields):
    return RunRequest(prompts=tuple((text, None) for text in DEFAULT_PROMPTS), **fields)


def test_the_check_names_what_is_wrong():
    good = CheckReport(
        tokens_identical=True,
        tokens_identical_transformers=True,
        logits_identical=True,
        max_abs_logit_diff=1e-6,
        max_abs_logit=1.0,
        token_diff_to_float32=None,
        transformers_token_diff_to_float32=None,
        logits_sha256="",
        router_identical=True,
        tolerance=1e-5,
    )
    assert good.failures("exact") == []
    assert "own router" in replace(good, router_identical=False).failures("fast")[0]
    assert "more than 1e-05" in replace(good, max_abs_logit_diff=float("nan")).failures("fast")[0]
    assert "not bitwise" in replace(good, logits_identical=False).failures("exact")[0]
    assert "ids differ" in replace(good, tokens_identical=False).failures("exact")[0]
    assert replace(good, logits_identical=False).failures("fast") == []
    half = replace(good, max_abs_logit_diff=0.9, token_diff_to_float32=0.03, tolerance=0.05)
    assert half.failures("exact") == []
    assert "distance from float32" in replace(half, token_diff_to_float32=0.06).failures("fast")[0]


@pytest.mark.parametrize("damage", ["logits", "tokens", "router"])
def test_a_run_that_went_wrong_fails_its_check(tmp_path, damage):
    """The real check on a real run whose results were then spoilt."""
    request = request_of(model="qwen3-moe-tiny", ranks=1, tokens=3, check=True, json=str(tmp_path / "out.json"))
    options = _job_options(request)
    result = run_job(options, None)
    if damage == "logits":
        spoilt = result.generation.prefill_logits[2].clone()
        spoilt[0, 5] += 1e-4
        result.generation.prefill_logits[2] = spoilt
    elif damage == "tokens":
        result.generation.tokens[1][2] ^= 1
    else:
        result.router_mismatches = 1
    with RunConsole(quiet=True) as console, pytest.raises(BywashError, match="the check failed"):
        _report(request, options, [result], console)
    assert json.loads((tmp_path / "out.json").read_text())["tokens_identical"] == (damage != "tokens")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_sees_a_model_computed_wrongly(tmp_path, monkeypatch, dtype):
    """Ignoring Mixtral's sliding window keeps most tokens right; the check must still notice."""
    config = {**json.loads((preset_directory("mixtral-tiny") / "config.json").read_text()), "sliding_window": 12}
    model = shutil.copytree(preset_directory("mixtral-tiny"), tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    request = request_of(model=str(model), ranks=1, tokens=2, check=True, dtype=dtype)
    options = _job_options(request)
    for ignored in (False, True):
        if ignored:
            monkeypatch.setattr("bywash.models.stages._causal_mask", lambda batch, window: _causal_mask(batch, None))
        result = run_job(options, None)
        generation = result.generation
        report = check_run(options, generation.tokens, generation.prefill_logits, result.router_mismatches)
        assert bool(report.failures("exact")) == ignored


def test_stop_ids_come_from_generation_config_too(tmp_path):
    model = shutil.copytree(preset_directory("qwen3-moe-tiny"), tmp_path / "model")
    free = run_job(_job_options(request_of(model=str(model), tokens=5)), None).generation.tokens
    stop = free[0][1]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 319]}))
    options = _job_options(request_of(model=str(model), tokens=5))
    assert options.stop_ids == (stop, 319)
    assert run_job(options, None).generation.tokens[0] == free[0][: free[0].index(stop) + 1]
