"""The pipeline on real GPUs. Skipped without one; what needs none is at the end."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from bywash.errors import ConfigError
from bywash.moe.pipeline import Split
from bywash.moe.pipeline.attention_cuda import AttentionSizes
from bywash.moe.pipeline.run_cuda import CudaExecutor
from bywash.moe.pipeline.stack_cuda import devices_needed, part_tokens
from bywash.moe.pipeline.stack_sizes import StackSizes
from tests.pipeline import cuda_steps

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_gpus = pytest.mark.skipif(
    GPUS < 2 or importlib.util.find_spec("cuda.bindings" if GPUS else "json") is None,
    reason="needs two CUDA devices that can access each other, and cuda-bindings",
)


@needs_gpus
@pytest.mark.parametrize("way", cuda_steps.WAYS)
def test_every_split_gives_the_bits_of_the_serial_schedule(pools, way):
    assert pools(2).run(cuda_steps.soak, 2, way, 60, 11) == [60, 60]


@needs_gpus
@pytest.mark.slow
@pytest.mark.parametrize("way", cuda_steps.WAYS)
def test_soak(pools, way):
    for seed in range(10):  # a call has a time limit
        assert pools(2).run(cuda_steps.soak, 2, way, 340, 1000 + seed) == [340, 340]


@needs_gpus
@pytest.mark.parametrize("kinds", cuda_steps.NEEDED, ids=" to ".join)
def test_without_one_kind_of_semaphore_it_fails(pools, kinds):
    assert any(found != "nothing" for found in pools(2).run(cuda_steps.soak_without, 2, kinds, 40))


@pytest.mark.parametrize(
    "split", [Split(lanes=3), Split(chunks=4), Split(lanes=2, chunks=3), Split(overlapped=False)], ids=str
)
@pytest.mark.parametrize("tokens", [1, 7, 8192])
def test_parts_cover_every_token_once_in_order(split, tokens):
    sizes = StackSizes(layers=1, experts=4, top_k=2, hidden=64, inner=64, tokens=tokens)
    parts = sizes.parts(split)
    assert [t for part in parts for t in range(tokens)[part]] == list(range(tokens))
    assert len(parts) == split.lanes * split.chunks <= 2 * devices_needed(split) <= len(parts) + 1
    assert part_tokens(sizes, split) == max(len(range(tokens)[part]) for part in parts)


def test_lanes_hold_whole_sequences():
    heads = AttentionSizes(heads=2, kv_heads=1, head_size=8, sequence=10)
    sizes = StackSizes(layers=1, experts=4, top_k=2, hidden=64, inner=64, tokens=70, attention=heads)
    assert sizes.lanes(Split(lanes=3)) == [slice(0, 20), slice(20, 40), slice(40, 70)]
    assert sizes.parts(Split(lanes=2, chunks=2)) == [slice(0, 15), slice(15, 30), slice(30, 50), slice(50, 70)]
    with pytest.raises(ConfigError, match=r"7 sequences of 10 tokens for 8 micro-batches"):
        sizes.lanes(Split(lanes=8))
    with pytest.raises(ConfigError, match=r"are not whole sequences of 10"):
        replace(sizes, tokens=71).lanes(Split(lanes=2))


@pytest.mark.skipif(GPUS > 0, reason="this machine has a GPU")
def test_without_a_gpu_the_error_names_the_way_that_needs_none():
    with pytest.raises(ConfigError, match="ThreadExecutor"):
        CudaExecutor()
