"""The Hopper expert kernel without a GPU: it compiles for sm_90a, Python and the source agree, bad input is named."""

import re
from importlib.resources import files

import pytest
import torch

from bywash.errors import ConfigError
from bywash.kernels.compile import compiler_version
from bywash.kernels.experts import FIELDS, THREADS, HopperExperts, Tuning, compile_experts, wgmma_source

SOURCE = "".join((files("bywash.kernels") / name).read_text() for name in ("expert_tiles.cuh", "expert_gemm.cu"))


def needs_compiler():
    pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bywash[cuda]'")
    try:
        compiler_version()
    except ConfigError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("cluster", [1, 2])
def test_compiles(cluster, tmp_path):
    needs_compiler()
    code = compile_experts(Tuning(cluster=cluster, max_n=16), cache=tmp_path)
    assert code[:4] == b"\x7fELF"
    assert b"experts" in code


@pytest.mark.slow
def test_compiles_as_used(tmp_path):
    needs_compiler()
    assert compile_experts(Tuning(), cache=tmp_path)[:4] == b"\x7fELF"


def test_parameters_and_block_size_agree_with_the_source():
    body = SOURCE[SOURCE.index("struct Params {") :]
    assert tuple(re.findall(r"^  u64 (\w+);", body[: body.index("};")], re.MULTILINE)) == FIELDS
    assert "#define THREADS (CONSUMER_THREADS + 128)" in SOURCE
    assert "#define CONSUMER_THREADS (CONSUMERS * 128)" in SOURCE
    assert "#define CONSUMERS 2" in SOURCE
    assert THREADS == 3 * 128


def test_every_macro_is_used():
    for name, _ in Tuning().macros():
        assert re.search(rf"\b{name}\b", SOURCE)


@pytest.mark.parametrize("n", [8, 16, 160])
def test_a_product_names_every_register_once(n):
    text = wgmma_source(n)
    assert f"m64n{n}k16" in text
    assert [int(i) for i in re.findall(r"d\[(\d+)\]", text)] == list(range(n // 2))
    assert [int(i) for i in re.findall(r"%(\d+)", text)] == list(range(n // 2 + 2))


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"cluster": 3}, "cluster 1 or 2"),
        ({"max_n": 12}, "multiple of 8"),
        ({"max_n": 168}, "up to 160"),
    ],
)
def test_bad_choices_are_named(choice, said):
    with pytest.raises(ConfigError, match=said):
        Tuning(**choice)


def test_all_that_is_asked_for_fits():
    """An H100 gives a block 232,448 bytes of shared memory, and three warpgroups 504 registers a lane."""
    for cluster in (1, 2):
        macros = dict(Tuning(cluster=cluster).macros())
        assert int(macros["SHARED_BYTES"]) <= 232_448
        assert int(macros["PRODUCER_REGISTERS"]) + 2 * int(macros["CONSUMER_REGISTERS"]) <= 504


@pytest.mark.parametrize(("rows", "cluster"), [(0.5, 1), (128, 1), (160, 1), (161, 2), (5000, 2)])
def test_two_blocks_share_weights_when_tokens_need_more_than_one_tile(rows, cluster):
    assert Tuning.choose(rows) == Tuning(cluster=cluster)


@pytest.mark.parametrize(
    ("gate_up", "down", "said"),
    [
        ((2, 32, 16), (2, 16, 16), "on a GPU"),
        ((2, 32, 16), (2, 16, 8), "gate_up"),
        ((2, 16, 12), (2, 12, 8), "multiples of 8"),
        ((2, 16), (2, 16, 8), "gate_up"),
        ((0, 16, 8), (0, 8, 8), "not 0"),
    ],
)
def test_bad_weights_are_named(gate_up, down, said):
    with pytest.raises(ConfigError, match=said):
        HopperExperts(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in (gate_up, down)), pairs=8)
