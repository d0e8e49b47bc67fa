"""Expert compute in Triton against its oracle: on a GPU if there is one, else in Triton's interpreter.

The interpreter computes bf16 wrongly, so CPU runs take fp16 and float32; it also loses a carry when it rounds to e4m3,
so what quantisation gives is compared on a GPU only.
"""

import importlib.util
import os
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from bywash.errors import ConfigError
from bywash.exchange import fp8_rows
from bywash.kernels import experts_naive as naive
from bywash.kernels.experts_naive import Fp8
from bywash.kernels.triton_experts import (
    GroupedProduct,
    Tiles,
    TritonExperts,
    check_out,
    check_rows,
    choose_tiles,
    fitted,
)
from bywash.kernels.triton_experts_fp8 import GroupedProductFp8, TritonExpertsFp8, choose_fp8_tiles, quantise_rows

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
TRITON = importlib.util.find_spec("triton") is not None
with_triton = pytest.mark.skipif(not TRITON, reason="triton is not installed")
with_gpu = pytest.mark.skipif(not (TRITON and GPU), reason="needs a GPU")
SMALL = Tiles(rows=64, main=32, tail=16, warps=4, stages=3)
SMALL_FP8 = Tiles(rows=128, main=64, tail=0, depth=128, warps=4, stages=3)
SMALL_PAIR = Tiles(rows=256, main=64, tail=0, depth=128, warps=8, stages=3)
COUNTS = ([1], [0, 0], [3, 0, 5], [33, 0, 1, 48, 70], [32, 49, 64])
SIZES = ((48, 32), (80, 112), (128, 64))


def case_of(counts, hidden, inner, dtype):
    generator = torch.Generator().manual_seed(sum(counts) + hidden)
    gate_up_LGD = torch.randn(len(counts), 2 * inner, hidden, generator=generator).mul(hidden**-0.5)
    down_LDF = torch.randn(len(counts), hidden, inner, generator=generator).mul(inner**-0.5)
    rows_PD = torch.randn(40, hidden, generator=generator)
    ends_L = torch.tensor(counts).cumsum(0).int()
    index_M = torch.randint(0, 40, (int(ends_L[-1]) + 5,), generator=generator, dtype=torch.int32)
    floats = (t.to(DEVICE, dtype) for t in (rows_PD, gate_up_LGD, down_LDF))
    return (*floats, index_M.to(DEVICE), ends_L.to(DEVICE))


def quantised(x_PD):
    """As the exchange delivers rows: those of the scales are whole 16-byte vectors."""
    values, scales_PC = fp8_rows.quantise_rows(x_PD)
    apart = scales_PC.new_full((len(scales_PC), -(-scales_PC.shape[1] // 4) * 4), torch.nan)
    apart[:, : scales_PC.shape[1]] = scales_PC
    return Fp8(values=values, scales=apart[:, : scales_PC.shape[1]])


def quantised_weights(gate_up_LGD, down_LDF):
    return naive.quantise_gate_up_naive(gate_up_LGD), naive.quantise_weights_naive(down_LDF)


# --- the oracle -----------------------------------------------------------------------------------------------------


def test_oracle_is_one_pair_at_a_time():
    rows_PD, gate_up_LGD, down_LDF, index_M, ends_L = (t.cpu() for t in case_of([2, 0, 3], 48, 32, torch.float64))
    expected = []
    for m, expert in enumerate([0, 0, 2, 2, 2]):
        gate, up = (gate_up_LGD[expert] @ rows_PD[index_M[m]]).chunk(2)
        expected.append(down_LDF[expert] @ (F.silu(gate) * up))
    y_MD = naive.experts_naive(rows_PD, index_M, ends_L, gate_up_LGD, down_LDF, round_to=torch.float32)
    torch.testing.assert_close(y_MD, torch.stack(expected).float(), rtol=1e-4, atol=1e-5)


@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_oracle_is_a_mixture_of_experts(tokens, experts, top_k, seed):
    """Routed, sorted and summed again: the layer that every token computes for itself."""
    generator = torch.Generator().manual_seed(seed)
    gate_up_LGD = torch.randn(experts, 32, 16, generator=generator)
    down_LDF = torch.randn(experts, 16, 16, generator=generator)
    x_TD, logits_TE = (torch.randn(tokens, n, generator=generator) for n in (16, experts))
    weights_TK, ids_TK = logits_TE.softmax(1).topk(min(top_k, experts))
    expected = torch.zeros(tokens, 16)
    for expert in range(experts):
        weight_T = torch.where(ids_TK == expert, weights_TK, 0).sum(1)
        gate, up = F.linear(x_TD, gate_up_LGD[expert]).chunk(2, 1)
        expected += weight_T[:, None] * F.linear(F.silu(gate) * up, down_LDF[expert])
    order_M = ids_TK.flatten().argsort(stable=True)
    token_M = order_M // ids_TK.shape[1]
    ends_L = torch.bincount(ids_TK.flatten(), minlength=experts).cumsum(0).int()
    y_MD = naive.experts_naive(x_TD, token_M.int(), ends_L, gate_up_LGD, down_LDF, round_to=torch.float32)
    y_TD = torch.zeros(tokens, 16).index_add_(0, token_M, y_MD * weights_TK.flatten()[order_M, None])
    torch.testing.assert_close(y_TD, expected, rtol=1e-4, atol=1e-3)


def test_quantised_weights_keep_blocks_apart():
    weight_LND = torch.ones(2, 200, 150)
    weight_LND[1, 128:, 128:] = 1000.0
    quantised = naive.quantise_weights_naive(weight_LND)
    assert quantised.scales.shape == (2, 2, 2)
    torch.testing.assert_close(naive.dequantise_weights_naive(quantised), weight_LND)
    assert naive.quantise_gate_up_naive(weight_LND).scales.shape == (2, 2, 2)


def test_fp8_oracle_is_near_the_exact_one():
    rows_PD, gate_up_LGD, down_LDF, index_M, ends_L = (t.cpu() for t in case_of([20, 0, 30], 256, 256, torch.float32))
    exact = naive.experts_naive(rows_PD, index_M, ends_L, gate_up_LGD, down_LDF, round_to=torch.float32)
    weights = quantised_weights(gate_up_LGD, down_LDF)
    y_MD = naive.experts_fp8_naive(quantised(rows_PD), index_M, ends_L, *weights)
    assert (y_MD - exact).norm() / exact.norm() < 0.07


# --- Triton ---------------------------------------------------------------------------------------------------------


@with_triton
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("hidden", "inner"), SIZES, ids=lambda n: str(n))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16] if GPU else [torch.float16], ids=str)
def test_agrees_with_the_oracle(counts, hidden, inner, dtype):
    rows_PD, gate_up_LGD, down_LDF, index_M, ends_L = case_of(counts, hidden, inner, dtype)
    out_MD = torch.full((len(index_M), hidden), 7.0, dtype=dtype, device=DEVICE)
    experts = TritonExperts(gate_up_LGD, down_LDF, pairs=len(index_M), tiles=(SMALL, SMALL))
    assert experts(rows_PD, index_M, ends_L, out_MD) is out_MD
    expected = naive.experts_naive(rows_PD, index_M, ends_L, gate_up_LGD, down_LDF, round_to=dtype)
    pairs = len(expected)
    torch.testing.assert_close(out_MD[:pairs].float(), expected, rtol=0, atol=0.02 * float(rows_PD.abs().max()) / 4)
    assert (out_MD[pairs:] == 7).all()


@with_triton
@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 40, 48, 49, 63])
def test_a_row_has_the_same_bits_in_every_tile(size):
    dtype = torch.bfloat16 if GPU else torch.float16
    rows_PD, gate_up_LGD, down_LDF, _, _ = case_of([70, 1], 80, 48, dtype)
    experts = TritonExperts(gate_up_LGD, down_LDF, pairs=80, tiles=(SMALL, SMALL))

    def compute(places):
        ends_L = torch.tensor([0, len(places)], dtype=torch.int32, device=DEVICE)
        return experts(rows_PD, torch.tensor(places, dtype=torch.int32, device=DEVICE), ends_L)[: len(places)]

    whole = compute([m % 40 for m in range(80)])
    assert torch.equal(compute([(m + 7) % 40 for m in range(size)]), whole[7 : 7 + size])


@with_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_rows_have_the_same_bits_whatever_the_tiles(fp8):
    """Ranks with other numbers of experts choose other tiles, and `exact` and `stable` ask for the same bits."""
    rows_PD, gate_up_LGD, down_LDF, index_M, ends_L = case_of([300, 0, 1, 17, 130], 512, 384, torch.bfloat16)
    if fp8:
        rows, weights = quantised(rows_PD), quantised_weights(gate_up_LGD, down_LDF)
        choices = {choose_fp8_tiles(usual) for usual in (8, 257)} | {(SMALL_PAIR, SMALL_FP8)}
        inputs = (rows.values, rows.scales, index_M, ends_L)
    else:
        weights, inputs = (gate_up_LGD, down_LDF), (rows_PD, index_M, ends_L)
        choices = {choose_tiles(usual) for usual in (8, 130, 257, 1030)} | {(SMALL, SMALL)}
    kind, pairs = (TritonExpertsFp8 if fp8 else TritonExperts), int(ends_L[-1])
    usual, *others = [kind(*weights, pairs=len(index_M), tiles=tiles)(*inputs)[:pairs] for tiles in choices]
    for y_MD in others:
        assert torch.equal(y_MD, usual)


@with_gpu
@pytest.mark.parametrize("tiles", [choose_fp8_tiles(8), choose_fp8_tiles(257)], ids=["one", "pair"])
def test_an_fp8_row_has_the_same_bits_in_every_tile(tiles):
    rows_PD, gate_up_LGD, down_LDF, _, _ = case_of([300], 272, 144, torch.bfloat16)
    rows, weights = quantised(rows_PD), quantised_weights(gate_up_LGD, down_LDF)
    experts = TritonExpertsFp8(*weights, pairs=300, tiles=tiles)

    def compute(places_M):
        ends_L = torch.tensor([len(places_M)], dtype=torch.int32, device=DEVICE)
        return experts(rows.values, rows.scales, places_M, ends_L)[: len(places_M)]

    places_M = (torch.arange(300, device=DEVICE) % 40).int()
    whole = compute(places_M)
    for size in (1, 16, 31, 33, 63, 64, 65, 127, 128, 129, 193):
        assert torch.equal(compute(places_M[7 : 7 + size]), whole[7 : 7 + size]), size


def fp8_product(weight_LNK, x_PK, index_M, ends_L):
    """float32 [M, N], not gated."""
    ends = ends_L.tolist()
    places = [index_M[start:end].long() for start, end in zip([0, *ends], ends)]
    return torch.cat([x_PK[place_m] @ weight.T for place_m, weight in zip(places, weight_LNK)])


def swiglu(gate_up_MG):
    gate, up = gate_up_MG.chunk(2, 1)
    return F.silu(gate) * up


# Hopper sums e4m3 products in about 14 bits.
NEAR = {"rtol": 2e-3, "atol": 2e-3}


@with_triton
@pytest.mark.parametrize("tiles", [SMALL_FP8, SMALL_PAIR], ids=["one", "pair"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [(144, 160), (128, 256), (272, 16)], ids=str)
def test_fp8_products_agree_with_the_oracle(counts, hidden, inner, tiles):
    """In float32, where nothing is rounded after the product."""
    rows_PD, gate_up_LGD, down_LDF, index_M, ends_L = case_of(counts, hidden, inner, torch.float32)
    pairs, rows = int(ends_L[-1]), quantised(rows_PD)
    gate_up, down = quantised_weights(gate_up_LGD, down_LDF)
    h_MF, y_MD = (torch.full((pairs + 5, n), 7.0, device=DEVICE) for n in (inner, hidden))
    GroupedProductFp8(gate_up, gated=True, tiles=tiles)(rows, index_M, ends_L, h_MF)
    x_PD = fp8_rows.dequantise_rows(rows.values, rows.scales)
    expected = swiglu(fp8_product(naive.dequantise_gate_up_naive(gate_up), x_PD, index_M, ends_L))
    torch.testing.assert_close(h_MF[:pairs], expected, **NEAR)
    assert (h_MF[pairs:] == 7).all()
    h = quantised(h_MF)
    GroupedProductFp8(down, gated=False, tiles=tiles)(h, index_M, ends_L, y_MD)
    h_MF = fp8_rows.dequantise_rows(h.values, h.scales)
    every = torch.arange(pairs, device=DEVICE)
    expected = fp8_product(naive.dequantise_weights_naive(down), h_MF, every, ends_L)
    torch.testing.assert_close(y_MD[:pairs], expected, **NEAR)
    assert (y_MD[pairs:] == 7).all()


@with_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantised_rows_have_the_bits_of_the_oracle(dtype):
    x_PD = torch.randn(333, 912, device=DEVICE).mul(20).to(dtype)
    x_PD[5], x_PD[6, 200], x_PD[7, 300], x_PD[8] = 0, torch.nan, torch.inf, 2.0**-20
    count = torch.tensor([330], dtype=torch.int32, device=DEVICE)
    rows, (values, scales) = quantise_rows(x_PD, count), fp8_rows.quantise_rows(x_PD)
    assert torch.equal(rows.scales[:330], scales[:330])
    assert torch.equal(rows.values[:330].view(torch.uint8), values[:330].view(torch.uint8))
    on_cpu, scales_on_cpu = fp8_rows.quantise_rows(x_PD.cpu())
    assert torch.equal(scales.cpu(), scales_on_cpu)
    assert torch.equal(values.cpu().view(torch.uint8), on_cpu.view(torch.uint8))


@with_gpu
@pytest.mark.parametrize(
    "tiles", [(SMALL_FP8, SMALL_FP8), (SMALL_PAIR, SMALL_PAIR), None], ids=["one", "pair", "chosen"]
)
@pytest.mark.parametrize(("hidden", "inner"), [(272, 144), (512, 384)], ids=str)
def test_fp8_experts_agree_with_the_oracle(hidden, inner, tiles):
    """An intermediate that rounds the other way in bf16 can go on to the next e4m3 number, 1/8 away. So each stage is
    compared from what the kernel gave it: only a step of bf16 is then between both."""
    rows_PD, gate_up_LGD, down_LDF, index_M, ends_L = case_of([300, 0, 1, 130, 70], hidden, inner, torch.bfloat16)
    pairs, rows = int(ends_L[-1]), quantised(rows_PD)
    weights = quantised_weights(gate_up_LGD, down_LDF)
    experts = TritonExpertsFp8(*weights, pairs=len(index_M), tiles=tiles)
    out_MD = torch.full((len(index_M), hidden), 7.0, dtype=torch.bfloat16, device=DEVICE)
    assert experts(rows.values, rows.scales, index_M, ends_L, out_MD) is out_MD
    assert (out_MD[pairs:] == 7).all()
    h_MF, h = experts._h_MF[:pairs], experts._h
    x_PD = fp8_rows.dequantise_rows(rows.values, rows.scales)
    expected = swiglu(fp8_product(naive.dequantise_gate_up_naive(weights[0]), x_PD, index_M, ends_L))
    torch.testing.assert_close(h_MF.float(), expected, rtol=2**-8, atol=2e-3)
    values, scales = fp8_rows.quantise_rows(h_MF)
    assert torch.equal(h.values[:pairs].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(h.scales[:pairs], scales)
    every = torch.arange(pairs, device=DEVICE)
    h_MF = fp8_rows.dequantise_rows(values, scales)
    expected = fp8_product(naive.dequantise_weights_naive(weights[1]), h_MF, every, ends_L)
    torch.testing.assert_close(out_MD[:pairs].float(), expected, rtol=2**-8, atol=2e-3)
    whole = naive.experts_fp8_naive(rows, index_M, ends_L, *weights)
    assert (out_MD[:pairs].float() - whole).norm() / whole.norm() < 0.01


@with_gpu
def test_a_captured_graph_replays_for_other_counts():
    rows_PD, gate_up_LGD, down_LDF, index_M, ends_L = case_of([10, 0, 60], 128, 64, torch.bfloat16)
    experts = TritonExperts(gate_up_LGD, down_LDF, pairs=len(index_M))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_MD = experts(rows_PD, index_M, ends_L)
    for ends in ([0, 70, 70], [1, 2, 3], [0, 0, 0], [33, 34, 75]):
        ends_L.copy_(torch.tensor(ends))
        graph.replay()
        expected = naive.experts_naive(rows_PD, index_M, ends_L, gate_up_LGD, down_LDF, round_to=torch.bfloat16)
        torch.testing.assert_close(y_MD[: len(expected)].float(), expected, rtol=0, atol=0.02)


# --- errors and choices ---------------------------------------------------------------------------------------------


def test_without_triton_the_module_imports_and_construction_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="pip install triton"):
        GroupedProduct(torch.zeros(1, 64, 64).bfloat16(), gated=True, tiles=SMALL)


@pytest.mark.parametrize(("hidden", "inner", "named"), [(40, 32, "40"), (32, 24, "24")])
def test_sizes_that_do_not_fit_are_named(hidden, inner, named):
    _, gate_up_LGD, down_LDF, _, _ = case_of([1], hidden, inner, torch.float16)
    with pytest.raises(ConfigError, match=rf"size of {named} .* multiple of 16"):
        TritonExperts(gate_up_LGD, down_LDF, pairs=8, tiles=(SMALL, SMALL))
    with pytest.raises(ConfigError, match=rf"size of {named} .* multiple of 16"):
        TritonExpertsFp8(*quantised_weights(gate_up_LGD, down_LDF), pairs=8, tiles=(SMALL_FP8, SMALL_FP8))


def test_weights_that_do_not_fit_are_named():
    _, gate_up_LGD, down_LDF, _, _ = case_of([3], 48, 32, torch.float16)
    with pytest.raises(ConfigError, match="gate_up is float16"):
        TritonExperts(gate_up_LGD[:, :32], down_LDF, pairs=8)
    with pytest.raises(ConfigError, match="contiguous bfloat16 or float16"):
        TritonExperts(gate_up_LGD.float(), down_LDF.float(), pairs=8, tiles=(SMALL, SMALL))
    gate_up, down = quantised_weights(gate_up_LGD, down_LDF)
    with pytest.raises(ConfigError, match="contiguous float8_e4m3fn"):
        TritonExpertsFp8(
            Fp8(values=gate_up_LGD, scales=gate_up.scales), Fp8(values=down_LDF, scales=down.scales), pairs=8,
            tiles=(SMALL_FP8, SMALL_FP8),
        )  # fmt: skip
    with pytest.raises(ConfigError, match=r"scales of weights are torch.float32 \[1, 1, 1\] .* float32 \[1, 2, 1\]"):
        TritonExpertsFp8(
            Fp8(values=gate_up.values, scales=gate_up.scales[:, :1]), down, pairs=8, tiles=(SMALL_FP8, SMALL_FP8)
        )


def test_inputs_that_do_not_fit_are_named():
    rows_PD, _, _, index_M, _ = case_of([3], 48, 32, torch.float16)
    fits = {"dtype": torch.float16, "hidden": 48, "pairs": 8}
    check_rows(rows_PD, index_M=index_M, **fits)
    with pytest.raises(ConfigError, match="rows of 48"):
        check_rows(rows_PD.float(), index_M=index_M, **fits)
    with pytest.raises(ConfigError, match="index is int64"):
        check_rows(rows_PD, index_M=index_M.long(), **fits)
    with pytest.raises(ConfigError, match="at most 8 pairs"):
        check_rows(rows_PD, index_M=index_M.repeat(2), **fits)
    with pytest.raises(ConfigError, match="strides"):
        check_rows(rows_PD.T.contiguous().T, index_M=index_M, **fits)
    with pytest.raises(ConfigError, match="out is float16"):
        check_out(rows_PD[:, :16], torch.float16, 48)


@pytest.mark.parametrize("rows", [0.5, 20, 100, 256, 5000])
def test_chosen_tiles_are_ones_that_kernels_accept(rows):
    for tiles in (*choose_tiles(rows), *choose_fp8_tiles(rows)):
        for size in (tiles.rows, tiles.main, tiles.depth, tiles.tail or 1):
            assert size & (size - 1) == 0
        assert tiles.rows in (64, 128, 256)
        assert tiles.main >= 32
        assert tiles.tail <= tiles.main // 2
    for tiles in choose_tiles(rows):
        assert fitted(tiles, element_bytes=2, shared_bytes=232448) == tiles
    for tiles in choose_fp8_tiles(rows):
        assert (tiles.tail, tiles.depth) == (0, 128)
        assert fitted(tiles, element_bytes=1, shared_bytes=232448) == tiles


def test_tiles_shrink_to_the_shared_memory_of_a_gpu():
    long = Tiles(rows=128, main=256, tail=32)
    a100 = fitted(long, element_bytes=2, shared_bytes=166912)
    assert (a100.stages, a100.main, a100.tail) == (3, 256, 32)
    consumer = fitted(long, element_bytes=2, shared_bytes=101376)
    assert (consumer.stages, consumer.main, consumer.tail) == (2, 128, 32)
    tiny = fitted(long, element_bytes=2, shared_bytes=49152)
    assert (tiny.stages, tiny.main, tiny.tail) == (2, 32, 16)
