"""The layer on real GPUs. Skipped without one; the parts that need none are in test_device_experts.py."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.moe import device_steps
from tests.moe.common import Case

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(
    GPUS == 0 or importlib.util.find_spec("cuda.bindings" if GPUS else "json") is None,
    reason="needs a CUDA device and cuda-bindings; these tests run on GPU machines only",
)
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs that can access each other")

SHAPES = {
    "wide": {"experts": 16, "top_k": 4, "hidden": 1024, "inner": 512, "tokens": 300},
    "odd": {"experts": 7, "top_k": 3, "hidden": 144, "inner": 48, "tokens": 70},
    "top1": {"experts": 9, "top_k": 1, "hidden": 512, "inner": 256, "tokens": 33},
}
BACKENDS = [
    "grouped_mm",
    "triton",
    pytest.param(
        "hopper",
        marks=pytest.mark.skipif(
            GPUS == 0 or torch.cuda.get_device_capability()[0] != 9, reason="the kernel is for sm_90"
        ),
    ),
]


@pytest.fixture(params=[pytest.param(1, id="one-gpu"), pytest.param(2, id="two-gpus", marks=needs_two)])
def devices(request):
    return request.param


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_random_steps_match_the_oracle(pools, devices, shape, backend, mode):
    config = {**shape, "dtype": "bfloat16", "mode": mode}
    pools(2).run(device_steps.layer_steps, devices, backend, config, 12 if devices == 2 else 4, 500)


@pytest.mark.skipif(
    GPUS == 0 or torch.cuda.get_device_capability() < (8, 9), reason="e4m3 products need compute capability 8.9"
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_e4m3_rows_through_e4m3_experts_match_the_oracle(pools, devices, shape):
    pools(2).run(device_steps.fp8_layer_steps, devices, shape, 8 if devices == 2 else 3, 600)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_layer_over_all_gather_matches_the_oracle(pools, devices, shape):
    pools(2).run(device_steps.gather_layer_steps, devices, shape, 8 if devices == 2 else 3, 700)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_of_two_layers_with_router_replays(pools, devices, backend, mode):
    config = {**SHAPES["wide"], "dtype": "bfloat16", "mode": mode}
    pools(2).run(device_steps.layer_replays, devices, backend, config, 30 if devices == 2 else 5, 800)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("combine", ["exact", "stable", "fast"])
def test_expert_parallel_over_peer(pools, devices, combine, dtype):
    case = Case(
        hidden=160,
        inner=64,
        experts=11,
        top_k=4,
        tokens=(70, 0) if combine == "stable" else (70, 33),
        dtype=getattr(torch, dtype),
        combine=combine,
        seed=7,
    )
    print(combine, dtype, pools(2).run(device_steps.expert_parallel_step, devices, case))


@pytest.mark.parametrize(
    ("model", "dtype", "combine"),
    [
        ("bywash-tiny", "float32", "exact"),
        ("bywash-tiny", "bfloat16", "fast"),
        ("deepseek-v3-tiny", "float32", "exact"),
        ("gpt-oss-tiny", "float32", "stable"),
        ("mixtral-tiny", "bfloat16", "exact"),
    ],
)
def test_a_model_over_peer_agrees_with_transformers_on_the_same_gpu(pools, model, dtype, combine):
    """In every way of overlapping; where bits are promised, with those of the serial run."""
    pytest.importorskip("transformers", minversion="5.23")
    from bywash.models.check import check_run
    from bywash.models.job import JobOptions
    from bywash.models.presets import model_directory

    # In 16 bits a rounding can flip a router's choice, and what is judged is a mean over tokens: take many.
    generator = np.random.default_rng(3)
    prompts = tuple(tuple(generator.integers(5, 99, length).tolist()) for length in (30, 3, 41, 22, 17, 36, 28, 9))
    options = JobOptions(
        directory=str(model_directory(model)),
        prompts=prompts,
        new_tokens=6,
        micro_batch=2,
        exchange="auto",
        combine=combine,
        link=None,
        dtype=dtype,
        speeds=(),
        stop_ids=(),
        deadline_s=60.0,
        check=True,
        trace=True,
    )
    serial = {}
    for overlap in ("off", "microbatch", "tile", "shared"):
        results = pools(2).run(device_steps.model_job, replace(options, overlap=overlap, timeline=True))
        assert {(r.exchange, r.device) for r in results} == {("peer", "cuda")}
        tokens = {p: ids for r in results for p, ids in r.generation.tokens.items()}
        logits = {p: part for r in results for p, part in r.generation.prefill_logits.items()}
        mismatches = sum(r.router_mismatches or 0 for r in results)
        report = check_run(replace(options, device="cuda"), tokens, logits, mismatches)
        print(model, dtype, combine, overlap, results[0].experts_by, report, results[0].prefill_usage)
        assert not report.failures(combine)
        serial = serial or logits
        assert all(span.start_ns <= span.end_ns for span in results[0].spans)
        if combine != "fast":
            assert all(torch.equal(logits[prompt], serial[prompt]) for prompt in serial)
