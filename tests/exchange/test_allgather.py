"""All-gather by copy engine: on real GPUs where there are any; layout, compilation and errors everywhere."""

import importlib.util
import re

import pytest
import torch

from bywash.balance import Placement
from bywash.errors import ConfigError, RankLostError
from bywash.exchange.allgather import CHUNK, SOURCES, AllGatherDevice, GatherLayout, compile_gather, read_gather_failure
from bywash.exchange.peer_layout import GENERATIONS, PeerLayout
from bywash.kernels.compile import KernelShape, kernel_source
from tests.exchange import gather_steps
from tests.ranks import RankPool

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_gpu = pytest.mark.skipif(
    GPUS == 0 or importlib.util.find_spec("cuda.bindings" if GPUS else "json") is None,
    reason="needs a CUDA device and cuda-bindings",
)
two_gpus = pytest.param(2, id="two-gpus", marks=pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"))

CONFIGS = {
    "wide": {"experts": 64, "top_k": 8, "hidden": 1024, "dtype": "bfloat16", "tokens": 200},
    "odd-f16": {"experts": 7, "top_k": 3, "hidden": 37, "dtype": "float16", "tokens": 33},
    "odd-f32": {"experts": 5, "top_k": 5, "hidden": 3, "dtype": "float32", "tokens": 50},
    "many-experts": {"experts": 1500, "top_k": 4, "hidden": 64, "dtype": "bfloat16", "tokens": 600},
}


def layout_of(**changes):
    sizes = {"ranks": 2, "experts": 8, "top_k": 2, "tokens": 10, "hidden": 5, "exact": False}
    return PeerLayout(**{**sizes, "dtype": torch.bfloat16, **changes})


@needs_gpu
@pytest.mark.parametrize("devices", [pytest.param(1, id="one-gpu"), two_gpus])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_steps_match_the_oracle_bit_for_bit(pools, ranks, devices, config):
    pools(ranks).run(gather_steps.gather_steps, devices, config, 40 if devices == 2 else 8, 1000)


@needs_gpu
@pytest.mark.parametrize("devices", [pytest.param(1, id="one-gpu"), two_gpus])
def test_one_graph_replays_for_any_count_and_routing(pools, devices):
    pools(2).run(gather_steps.gather_replays, devices, CONFIGS["wide"], 40 if devices == 2 else 6, 2000)


@needs_gpu
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("rows", "ConfigError", r"brought"),
        ("expert", "ConfigError", "rank 1 .* (expert id 8|named no expert)"),
        ("dies", "RankLostError", "rank 1"),
    ],
)
def test_mistakes_and_losses_are_named_and_the_process_survives(how, kind, words):
    pool = RankPool(2, deadline_s=3.0)
    try:
        pool.send(gather_steps.gather_mistakes, [(max(1, min(GPUS, 2)), how)] * 2)
        got, text, alive = pool.receive(0)
        assert got == kind, text
        assert re.search(words, text), text
        assert alive == 1000.0
    finally:
        pool.close()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_compiles_without_a_gpu(arch):
    pytest.importorskip("cuda.core")
    shape = KernelShape(ranks=4, experts=256, top_k=8, vecs=896, dtype="bfloat16", exact=False)
    assert compile_gather(shape, arch).startswith(b"\x7fELF")


def test_chunk_size_agrees_with_the_source():
    assert f"#define CHUNK {CHUNK}" in kernel_source(SOURCES)


def test_parts_do_not_overlap_and_are_aligned():
    layout = GatherLayout(sizes=layout_of(tokens=33, hidden=37))
    starts = sorted({at for g in range(GENERATIONS) for at in layout.offsets(g).values()} | {layout.heap_bytes})
    assert len(starts) == 1 + GENERATIONS * 7 + 1
    assert all(start % 256 == 0 for start in starts)
    at = layout.offsets(1)
    assert at["at_weights"] - at["at_ids"] >= 8 * 2 * 33 * 2
    assert at["at_slots"] - at["at_rows"] >= 2 * 33 * 80
    assert layout.heap_bytes - at["at_slots"] >= 2 * 33 * 80


@pytest.mark.parametrize("changes", [{"exact": True}, {"fp8": "amax"}])
def test_what_has_no_sums_to_scatter_is_refused(changes):
    with pytest.raises(ConfigError, match="only `fast` and `stable`, and rows as they are"):
        AllGatherDevice(None, layout_of(**changes), Placement.equal(8, 2).home_E)


@pytest.mark.skipif(GPUS > 0, reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_is_needed():
    with pytest.raises(ConfigError, match="no CUDA device"):
        AllGatherDevice(None, layout_of(), Placement.equal(8, 2).home_E)


class Alone:
    rank, ranks, deadline_s = 0, 3, 1.0

    def late(self, ranks, during):
        return RankLostError(f"rank {ranks} late while {during}", ranks)


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ([2, 0b10, 5 << 32 | 7, 1, 0], ConfigError, "rank 1 brought 5 rows to a step, rank 0 brought 7"),
        ([4, 0b100, 12, 1, 0], ConfigError, "rank 2 was given expert id 12"),
        ([1, 0b100, 0, 1, 0], RankLostError, "waiting for dispatched rows"),
    ],
)
def test_failures_on_the_device_become_errors(words, kind, text):
    with pytest.raises(kind, match=text):
        raise read_gather_failure(words, Alone())


def test_no_failure_is_no_error():
    assert read_gather_failure([0, 0, 0, 0, 10], Alone()) is None
