"""The router kernel: compiled everywhere, run where there is a GPU."""

import pytest
import torch

from bywash.errors import ConfigError
from bywash.kernels.router import NOT_FINITE, Router, _check, compile_router, router_naive

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("shape", [(7, 3, 144), (64, 8, 7168), (256, 8, 7168)], ids=str)
def test_it_compiles(tmp_path, arch, shape):
    assert compile_router(*shape, arch, cache=tmp_path)[:4] == b"\x7fELF"


@pytest.mark.parametrize("shape", [(8, 2, 100), (8, 9, 64), (300, 8, 64)], ids=str)
def test_sizes_that_it_does_not_compute_are_named(tmp_path, shape):
    with pytest.raises(ConfigError, match="multiple of 8"):
        compile_router(*shape, "sm_90a", cache=tmp_path)


def test_tensors_that_it_cannot_read_are_named():
    flat = torch.zeros(1 + 3 * 64, dtype=torch.bfloat16)
    good = flat[:-1].view(3, 64), torch.zeros(7, 64).bfloat16(), torch.zeros(3, 2).long(), torch.zeros(3, 2)
    _check(*good, 7, 2, 64)
    wrong = {
        "x: .*at a multiple of 16": (0, flat[1:].view(3, 64)),
        "x: torch.float32": (0, good[0].float()),
        "router: weights: ": (1, good[1].T.contiguous().T),
        "ids: torch.int32": (2, good[2].int()),
        r"their weights: .*\[2, 2\]": (3, good[3][:2]),
    }
    for words, (at, tensor) in wrong.items():
        with pytest.raises(ConfigError, match=words):
            _check(*good[:at], tensor, *good[at + 1 :], 7, 2, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 16, 333])
@pytest.mark.parametrize("shape", [(7, 3, 136), (16, 1, 512), (64, 8, 7168), (256, 8, 7168)], ids=str)
def test_it_agrees_with_torch_and_a_token_does_not_see_its_neighbours(shape, tokens):
    experts, top_k, hidden = shape
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    weights_ED = (torch.randn(experts, hidden, device="cuda", generator=generator) * hidden**-0.5).bfloat16()
    router = Router(*shape)

    def routed(rows):
        ids = torch.full((rows.shape[0], top_k), -1, dtype=torch.int64, device="cuda")
        weights = torch.zeros(rows.shape[0], top_k, device="cuda")
        router(rows, weights_ED, ids, weights)
        return ids, weights

    ids, weights = routed(x)
    expected_ids, expected = router_naive(x, weights_ED, top_k)
    same = (ids == expected_ids).all(1)  # near-ties may swap
    assert same.float().mean() >= 0.98
    torch.testing.assert_close(weights[same], expected[same], rtol=1e-3, atol=1e-4)
    alone = routed(x[-1:].contiguous())
    assert torch.equal(alone[0], ids[-1:])
    assert torch.equal(alone[1], weights[-1:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_token_without_finite_logits_gets_no_expert_and_the_others_theirs(value):
    generator = torch.Generator(device="cuda").manual_seed(5)
    x = torch.randn(20, 64, device="cuda", generator=generator).bfloat16()
    weights_ED = torch.randn(7, 64, device="cuda", generator=generator).bfloat16()
    x[3, 0] = value
    ids, weights = torch.zeros(20, 2, dtype=torch.int64, device="cuda"), torch.ones(20, 2, device="cuda")
    Router(7, 2, 64)(x, weights_ED, ids, weights)
    others = torch.arange(20, device="cuda") != 3
    assert ids[3].tolist() == [NOT_FINITE] * 2
    assert weights[3].tolist() == [0, 0]
    assert torch.equal(ids[others], router_naive(x[others], weights_ED, 2)[0])
