"""`bywash run --overlap`: the bits and the trace of the serial run, on real models and processes."""

import json

import numpy as np
import pytest

from bywash.cli.main import app
from bywash.errors import ConfigError
from bywash.exchange import Link
from bywash.models.overlap import JobShape, overlap_for
from bywash.moe.pipeline import SERIAL, Split
from bywash.routing import RoutingTrace

TRACE_FIELDS = ("ids_NLK", "weights_NLK", "step_tokens_S", "token_prompt_N", "token_position_N")
IDS = [f"{seed},{seed * 7 % 300},{seed * 31 % 300}" + ",9" * (seed % 4) for seed in range(1, 8)]


def run(tmp_path, name, *more):
    files = {kind: tmp_path / f"{name}.{kind}" for kind in ("json", "npz", "trace")}
    prompts = [part for ids in IDS for part in ("--prompt-ids", ids)]
    outputs = ["--json", files["json"], "--trace", files["npz"], "--timeline", files["trace"]]
    app([str(a) for a in ("run", "--tokens", 4, *prompts, *outputs, *more)], standalone_mode=False)
    return json.loads(files["json"].read_text()), files


@pytest.mark.parametrize(
    ("model", "ranks", "exchange"),
    [("deepseek-v3-tiny", 2, "shm"), ("gpt-oss-tiny", 3, "gloo"), ("qwen3-moe-tiny", 2, "shm")],
)
def test_overlapped_runs_give_the_logits_and_the_trace_of_serial_ones(tmp_path, model, ranks, exchange):
    common = ("--model", model, "--ranks", ranks, "--exchange", exchange, "--micro-batch", 1, "--check")
    serial, serial_files = run(tmp_path, "off", *common)
    for mode in ("microbatch", "tile", "shared"):
        outcome, files = run(tmp_path, mode, *common, "--overlap", mode)
        assert outcome["tokens_identical"]
        assert outcome["logits_identical"]
        assert outcome["router_identical"]
        for same in ("logits_sha256", "tokens", "rows_sent", "rows_returned", "rows_per_layer_and_rank"):
            assert outcome[same] == serial[same]
        assert outcome["overlap"]["mode"] == mode
        assert outcome["overlap"]["decode"]["why"] == "asked for"
        assert 0 <= outcome["overlap"]["prefill"]["exposed_fraction"] <= 1
        ours, theirs = (RoutingTrace.load(f["npz"]) for f in (files, serial_files))
        for field in TRACE_FIELDS:
            np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
        bars = [e for e in json.loads(files["trace"].read_text())["traceEvents"] if e["ph"] == "X"]
        assert {e["args"]["step"] for e in bars} == {0, 1, 2, 3}
        assert {e["pid"] for e in bars} == set(range(ranks))
        assert {e["tid"] for e in bars} == {0, 1}
        assert sum(e["args"]["bytes"] for e in bars) == outcome["wire_bytes"]
    assert serial["overlap"]["prefill"]["hidden_share"] == 0


def test_auto_over_a_slow_link_says_why(tmp_path):
    """bywash-tiny with 64 tokens a prompt over a link at which its communication takes about as long as its compute."""
    prompts = [part for n in range(8) for part in ("--prompt-ids", ",".join(str(n + i) for i in range(64)))]
    out = tmp_path / "a.json"
    options = ["--ranks", "2", "--tokens", "2", "--micro-batch", "1", "--overlap", "auto", "--link", "1Gbps"]
    app(["run", *prompts, *options, "--check", "--json", str(out)], standalone_mode=False)
    outcome = json.loads(out.read_text())
    assert outcome["logits_identical"]
    assert "micro-batches" in outcome["overlap"]["prefill"]["split"]
    assert "against serial" in outcome["overlap"]["prefill"]["why"]
    assert outcome["overlap"]["prefill"]["hidden_share"] > 0


class TinyModel:
    hidden, top_k, num_experts = 64, 2, 8

    def layer_shape(self):
        return {"item_bytes": 4, "intermediate": 128, "shared_intermediate": 0, "attention_weights": 4096}


def job(**changes):
    base = {"ranks": 2, "batches": 4, "batch_prompts": 2, "length": 64, "combine": "exact", "device": "cpu"}
    return JobShape(**{**base, "link": Link(rate_gbps=0.1, latency_us=5), **changes})


@pytest.mark.parametrize(
    ("mode", "changes", "split", "why"),
    [
        ("off", {}, SERIAL, "asked for"),
        ("microbatch", {"link": None}, Split(lanes=2), "asked for"),
        ("microbatch", {"batches": 1}, Split(lanes=2), "lower --micro-batch"),
        ("tile", {"link": None}, Split(chunks=2), "asked for"),
        ("shared", {"link": None}, Split(), "asked for"),
        ("tile", {"link": None, "device": "cuda"}, Split(chunks=2), "asked for"),
        ("auto", {"link": None}, SERIAL, "nothing to hide"),
        ("auto", {"ranks": 1}, SERIAL, "nothing is sent"),
        ("auto", {"device": "cuda"}, SERIAL, "on GPUs"),
    ],
)
def test_what_needs_no_estimate(mode, changes, split, why):
    found = overlap_for(mode, TinyModel(), job(**changes))
    assert (found.prefill, found.decode) == (split, split)
    assert why in found.why_prefill


def test_prefill_and_decode_are_decided_apart():
    found = overlap_for("auto", TinyModel(), job(length=512, link=Link(rate_gbps=1, latency_us=5)))
    assert found.prefill.overlapped
    assert found.decode == SERIAL


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "--overlap", "sideways"], "--overlap sideways: choose one of off, microbatch, tile, shared, auto"),
        (["run", "--timeline", "/no/such/dir/t.json"], "--timeline /no/such/dir/t.json"),
        (["bench", "layer", "--splits", "two"], "--splits 'two'"),
        (["bench", "layer", "--splits", "0x1"], "--splits 0x1: give at least 1 of each"),
        (["bench", "layer", "--ranks", "1"], "--ranks 1: one rank sends nothing"),
        (["bench", "layer", "--heads", "3"], "--heads 3: must divide --hidden 512"),
        (["bench", "layer", "--topk", "9"], "--topk 9: there are only 4 experts"),
        (["bench", "layer", "--rounds", "0"], "--rounds 0"),
        (["bench", "layer", "--hidden", "8000000"], "of memory are available"),
        (["bench", "layer", "--link", "1kbps"], "--link '1kbps'"),
    ],
)
def test_mistakes_are_named(args, message):
    with pytest.raises(ConfigError) as caught:
        app(args, standalone_mode=False)
    assert message in str(caught.value)
