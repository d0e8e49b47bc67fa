"""`peer` on real GPUs. Skipped without one; the layout and the errors are tested everywhere."""

import functools
import importlib.util

import pytest
import torch

from bywash.balance import Placement
from bywash.errors import ConfigError, PlanMismatchError, RankLostError
from bywash.exchange import open_exchange
from bywash.exchange.peer_errors import read_failure
from bywash.exchange.peer_layout import GENERATIONS, PeerLayout
from bywash.kernels.router import NOT_FINITE
from tests.exchange import peer_steps
from tests.ranks import RankPool

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
needs_gpu = pytest.mark.skipif(
    GPUS == 0 or importlib.util.find_spec("cuda.bindings" if GPUS else "json") is None,
    reason="needs a CUDA device and cuda-bindings; these tests run on GPU machines only",
)
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs that can access each other")

DEEPSEEK = {"experts": 64, "top_k": 8, "hidden": 7168, "dtype": "bfloat16", "mode": "fast", "tokens": 64}
SMALL = {"experts": 12, "top_k": 3, "dtype": "bfloat16", "tokens": 45}
CONFIGS = {
    "deepseek-like": DEEPSEEK,
    "exact": {"experts": 32, "top_k": 4, "hidden": 1024, "dtype": "bfloat16", "mode": "exact", "tokens": 96},
    "odd-f16": {"experts": 7, "top_k": 3, "hidden": 37, "dtype": "float16", "mode": "stable", "tokens": 33},
    "odd-f32": {"experts": 5, "top_k": 5, "hidden": 3, "dtype": "float32", "mode": "exact", "tokens": 50},
    "top1": {"experts": 16, "top_k": 1, "hidden": 520, "dtype": "bfloat16", "mode": "stable", "tokens": 200},
    "few-sms": {
        "experts": 300,
        "top_k": 10,
        "hidden": 256,
        "dtype": "bfloat16",
        "mode": "exact",
        "tokens": 64,
        "num_sms": 1,
    },
    "fp8": {**DEEPSEEK, "tokens": 32, "fp8": "amax"},
    "fp8-odd": {**SMALL, "hidden": 1000, "dtype": "float16", "mode": "exact", "fp8": "power-of-two"},
    "fp8-tiny": {**SMALL, "hidden": 24, "mode": "stable", "fp8": "amax"},
    "walk": {**SMALL, "hidden": 4104, "mode": "stable", "num_sms": 2},
}


@pytest.fixture(params=[pytest.param(1, id="one-gpu"), pytest.param(2, id="two-gpus", marks=needs_two)])
def devices(request):
    return request.param


@needs_gpu
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_random_steps_match_the_oracle_bit_for_bit(pools, devices, config):
    steps = 300 if config["hidden"] < 4096 else 100  # the oracle on the CPU is slow
    if devices == 1:
        steps = 40  # processes on one GPU take turns by time slice: milliseconds per wait
    seconds = pools(2).run(peer_steps.random_steps, devices, config, steps, 1000)
    print(f"{steps} steps in {max(seconds):.1f} s")


@needs_gpu
@needs_two
@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd-f16", "odd-f32"])
def test_ten_thousand_random_steps(pools, name):
    pools(2).run(peer_steps.random_steps, 2, CONFIGS[name], 10_000, 100_000)


@needs_gpu
@needs_two
@pytest.mark.parametrize("mode", ["exact", "stable"])
@pytest.mark.parametrize("num_sms", [0, 1, 60])
def test_long_steps(pools, mode, num_sms):
    config = {"experts": 12, "top_k": 2, "hidden": 72, "dtype": "bfloat16", "mode": mode, "tokens": 3000}
    pools(2).run(peer_steps.random_steps, 2, {**config, "num_sms": num_sms}, 20, 3000)


@needs_gpu
@needs_two
@pytest.mark.parametrize("fault", [0, 2, 3])
def test_each_wait_is_needed(fault):
    pool = RankPool(2, deadline_s=3.0)
    try:
        wrong, failures = zip(*pool.run(peer_steps.count_wrong_steps, 2, fault, 200), strict=True)
        print(f"fault {fault}: {wrong} of 200 steps wrong, {failures}")
        assert (max(wrong) > 0) == (fault > 0)
    finally:
        pool.close()


@needs_gpu
@needs_two
@pytest.mark.parametrize(("ranks", "fp8"), [(3, "off"), (4, "amax")])
@pytest.mark.parametrize("mode", ["exact", "stable"])
def test_more_ranks_than_gpus(pools, ranks, fp8, mode):
    config = {"experts": 18, "top_k": 4, "hidden": 264, "dtype": "bfloat16", "mode": mode, "tokens": 40, "fp8": fp8}
    pools(ranks).run(peer_steps.random_steps, 2, config, 40, 5000)


@needs_gpu
@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_one_graph_replays_for_any_count_and_routing(pools, devices, mode):
    config = {"experts": 16, "top_k": 3, "hidden": 512, "dtype": "bfloat16", "mode": mode, "tokens": 60}
    pools(2).run(peer_steps.graph_replays, devices, config, 100 if devices == 2 else 15, 7000)


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"backend": "aot_eager"}], ids=str)
def test_layers_under_torch_compile(pools, devices, options):
    config = {"experts": 16, "top_k": 3, "hidden": 520, "dtype": "bfloat16", "mode": "stable", "tokens": 60}
    run = functools.partial(peer_steps.compiled_layers, **options)
    pools(2).run(run, devices, config, 12 if devices == 2 else 6, 8000)


@needs_gpu
@pytest.mark.parametrize("mode", ["exact", "stable"])
def test_exchange_interface(pools, devices, mode):
    pools(2).run(peer_steps.through_the_interface, devices, mode, 20, 9000)


@needs_gpu
def test_a_killed_rank_is_named_within_the_deadline_and_the_process_survives(devices):
    pool = RankPool(2, deadline_s=3.0)
    try:
        pool.send(peer_steps.lose_rank_one, [(devices,)] * 2)
        kind, ranks, text, seconds, alive = pool.receive(0)
        assert (kind, ranks) == ("RankLostError", [1]), text
        assert "gone" in text
        assert seconds < 5.0
        assert alive == 1000.0
    finally:
        pool.close()


@needs_gpu
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("plan", "PlanMismatchError", "planned this step differently"),
        ("tokens", "ConfigError", "tokens"),
        ("expert", "ConfigError", "expert"),
        ("capacity", "ConfigError", "batch"),
    ],
)
def test_mistakes_end_in_the_same_error_on_every_rank(devices, how, kind, words):
    pool = RankPool(2, deadline_s=5.0)
    try:
        for got, text in pool.run(peer_steps.fail_on_purpose, devices, how):
            assert got == kind, text
            assert words in text or "named no expert" in text, text
    finally:
        pool.close()


@pytest.mark.skipif(GPUS > 0, reason="this machine has a GPU")
def test_without_a_gpu_or_its_packages_the_error_says_what_is_needed():
    group = type("Group", (), {"rank": 0, "ranks": 2, "deadline_s": 1.0})()
    with pytest.raises(ConfigError, match=r"bywash\[cuda\]|no CUDA device"):
        open_exchange("peer", group)


def layout_of(**changes):
    config = {"ranks": 2, "experts": 8, "top_k": 2, "tokens": 10, "hidden": 5, "exact": True}
    return PeerLayout(**{**config, "dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("exact", [True, False])
def test_parts_do_not_overlap_and_are_aligned(exact):
    layout = layout_of(exact=exact)
    starts = sorted({start for g in range(GENERATIONS) for start in layout.offsets(g).values()} | {layout.heap_bytes})
    assert len(starts) == 1 + GENERATIONS * 7 + 1  # without fp8 the part for scales is empty
    assert all(start % 256 == 0 for start in starts)
    at = layout.offsets(0)
    assert at["at_slots"] - at["at_rows"] >= layout.places * layout.vecs * 16
    slots = layout.offsets(1)["at_cells"] - at["at_slots"]
    assert slots >= layout.tokens * (layout.top_k if exact else layout.ranks) * layout.vecs * 16


def test_rows_are_padded_to_vectors():
    assert (layout_of().vecs, layout_of().padded) == (1, 8)
    assert (layout_of(hidden=7168).vecs, layout_of(hidden=7168).padded) == (896, 7168)


def test_fp8_rows_have_half_the_bytes_and_a_scale_for_each_128_columns():
    layout = layout_of(hidden=7168, fp8="amax")
    assert (layout.sent_bytes, layout.groups, layout.scale_bytes) == (7168, 56, 224)
    at = layout.offsets(0)
    assert at["at_scales"] - at["at_rows"] == layout.places * 7168 + 7168 % 256
    odd = layout_of(hidden=137, fp8="power-of-two")
    assert (odd.vecs, odd.sent_bytes, odd.groups, odd.scale_bytes) == (18, 144, 2, 16)
    with pytest.raises(ConfigError, match="fp8 rows are made from bfloat16 or float16"):
        layout_of(dtype=torch.float32, fp8="amax")


def test_few_rows_take_few_multiprocessors():
    sms = {tokens: layout_of(tokens=tokens, hidden=7168).multiprocessors(132) for tokens in (1, 128, 256, 4096)}
    assert sms == {1: 8, 128: 56, 256: 112, 4096: 132}


def test_too_many_pairs_are_refused():
    with pytest.raises(ConfigError, match="131073 tokens x top-8"):
        layout_of(tokens=131073, top_k=8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float64}, "rows of torch.float64; float32, bfloat16 or float16"),
        ({"fp8": "e5m2"}, "fp8 'e5m2': choose one of off, amax, power-of-two"),
        ({"hidden": 0}, "hidden size 0"),
    ],
)
def test_layouts_that_no_kernel_computes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        layout_of(**changes)


def test_what_an_exchange_is_opened_with_must_fit_its_layout():
    layout = layout_of()
    layout.check_use(2, "exact")
    layout.check_home(Placement.equal(8, 2).home_E)
    with pytest.raises(ConfigError, match="a layout for 2 ranks in a group of 3"):
        layout.check_use(3, "exact")
    with pytest.raises(ConfigError, match="combine 'fast' in a layout with exact=True"):
        layout.check_use(2, "fast")
    for home_E in (Placement.equal(7, 2).home_E, Placement.equal(8, 3).home_E, Placement.equal(8, 2).home_E - 1):
        with pytest.raises(ConfigError, match="8 of 0 to 1 are needed"):
            layout.check_home(home_E)


class Alone:
    rank, ranks, deadline_s = 0, 3, 1.0

    def late(self, ranks, during):
        return RankLostError(f"rank {ranks} late while {during}", ranks)


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        ([1, 0b100, 0, 1, 0], RankLostError, "waiting for dispatched rows"),
        ([2, 0b10, 5 << 32 | 7, 1, 0], PlanMismatchError, "0x00000005 there, 0x00000007 on rank 0"),
        ([3, 1, 99, 0, 0], ConfigError, "99 tokens"),
        ([4, 1, 12, 0, 0], ConfigError, "expert id 12"),
        ([4, 1, 2**64 - 7, 0, 0], ConfigError, "expert id -7"),
        ([4, 1, 2**64 + NOT_FINITE, 0, 0], ConfigError, "rank 0 computed logits that are not finite"),
        ([6, 1, 7 << 32 | 300, 1, 0], ConfigError, "300 rows for expert 7, more than the capacity"),
        ([5, 0b100, 2 << 32 | 6, 3, 0], ConfigError, "rank 2 had more rows for an expert"),
        ([5, 0b100, 1 << 32 | 1, 3, 0], RankLostError, "rank 2 did not arrive .* rank 1 told rank 0"),
        ([5, 0b100, 1 << 32 | 2, 3, 0], PlanMismatchError, "rank 2 planned"),
        ([5, 0b100, 2 << 32 | 3, 3, 0], ConfigError, "rank 2 brought more tokens"),
    ],
)
def test_failures_on_the_device_become_errors(words, kind, text):
    error = read_failure(words, Alone())
    assert isinstance(error, kind)
    with pytest.raises(kind, match=text):
        raise error


def test_no_failure_is_no_error():
    assert read_failure([0, 0, 0, 0, 10], Alone()) is None
