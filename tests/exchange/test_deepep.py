"""DeepEP's interface over our exchanges: a program written for it, on CPU ranks; on GPUs where there are some."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bywash.deepep as deep_ep
from bywash.deepep import layout, naive, works
from bywash.deepep.weights import join_weights, split_weights
from bywash.errors import ConfigError, RoutingError
from bywash.exchange.carrier import ranks_of_experts
from bywash.exchange.carrier_device import DeviceCarrier
from tests.exchange import deepep_steps
from tests.exchange.deepep_steps import Case
from tests.kernels import emulator

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CASES = {
    "readme": Case(),
    "expand": Case(expand=True, alignment=4),
    "no-sync": Case(sync=False, async_=True),
    "no-sync-expand": Case(sync=False, expand=True, alignment=8, hidden=33),
    "fp8": Case(fp8=True, hidden=200),
    "fp8-no-sync": Case(fp8=True, sync=False, hidden=264),
    "fp8-expand-packed": Case(fp8=True, packed_scales=True, hidden=1024, expand=True, alignment=16),
    "float32-odd": Case(dtype="float32", hidden=7, top_k=5, masked=0.0),
    "float16-top1": Case(dtype="float16", hidden=24, top_k=1),
    "all-to-one-expert": Case(one_expert=True, expand=True, alignment=2),
    "an-empty-rank": Case(empty_rank=1, async_=True),
    "all-masked": Case(masked=1.0),
}


ON_CPU = [(name, 2) for name in CASES] + [("readme", 3), ("expand", 3), ("all-to-one-expert", 3)]


@pytest.mark.parametrize(("name", "ranks"), ON_CPU)
def test_documented_examples_on_cpu_ranks(pools, name, ranks):
    found = pools(ranks).run(deepep_steps.run, CASES[name], 1, 3)
    assert all(rank == found[0] for rank in found)


class Ranks(emulator.Threads):
    """Threads that can also meet."""

    def rank(self, rank):
        members = super().rank(rank)
        members.share = lambda value, during: self.barrier.wait(200)
        return members


@pytest.fixture
def emulated_gpus(monkeypatch):
    if emulator.COMPILER is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    monkeypatch.setattr(works, "open_carrier", lambda group, *, cuda, **sizes: DeviceCarrier(group, **sizes))
    with emulator.emulated():
        yield Ranks(2, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.async_])
def test_documented_examples_on_emulated_gpus(emulated_gpus, name):
    emulated_gpus.run(deepep_steps.run, CASES[name], 1, 1)


@pytest.mark.slow
def test_repeated_calls_on_emulated_gpus(emulated_gpus):
    emulated_gpus.run(deepep_steps.repeated_calls, Case(), 7)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs that can access each other")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_documented_examples_on_gpus(pools, case):
    pools(2).run(deepep_steps.run, case, 1, 3, "cuda")


def test_dispatches_without_combine_and_two_combines_of_one(pools):
    extra = pools(2).run(deepep_steps.repeated_calls, Case(), 7)
    assert extra[0] == extra[1] > 0


def test_a_steady_loop_costs_no_extra_step(pools):
    assert pools(2).run(steady_loop) == [0, 0]


def steady_loop(group):
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8)
    x, ids = torch.ones(8, 16, dtype=torch.bfloat16), torch.arange(8)[:, None] % 4
    handle = None
    for _ in range(3):
        new = {"topk_idx": ids, "num_experts": 4} if handle is None else {"handle": handle}
        recv, _, _, handle, _ = buffer.dispatch(x, **new)
        out, _, _ = buffer.combine(recv, handle)
        assert torch.equal(out, x)
    return buffer.extra_steps


@pytest.mark.parametrize("before", [0, 1])
def test_a_rank_with_too_many_tokens_is_named_on_every_rank(pools, before):
    pool = pools(2)
    few, many = pool.run(deepep_steps.too_many_tokens, before)
    assert many == "ConfigError: deepep: rank 1 brings 9 tokens to a dispatch, num_max_tokens_per_rank is 8"
    assert few == f"{many} (found by rank 1)"


def test_a_dispatch_larger_than_all_before_it(pools):
    assert pools(2).run(deepep_steps.ever_larger) == [1, 1]


@pytest.mark.slow
def test_a_dispatch_larger_than_all_before_it_on_emulated_gpus(emulated_gpus):
    assert emulated_gpus.run(deepep_steps.ever_larger) == [2, 2]


@pytest.mark.slow
def test_a_rank_with_too_many_tokens_is_named_on_every_emulated_gpu(emulated_gpus):
    few, many = emulated_gpus.run(deepep_steps.too_many_tokens, 1)
    assert "rank 1 brings 9 tokens" in many
    assert few == (
        "ConfigError: exchange peer: rank 1 brought more tokens than the heap has room for; rank 1 told rank 0 while "
        "waiting for dispatched rows"
    )


def test_a_torch_process_group_and_bias(pools):
    pools(2).run(torch_group)


def torch_group(group):
    import torch.distributed as dist

    buffer = deep_ep.ElasticBuffer(dist.new_group(), num_max_tokens_per_rank=4, hidden=8, num_topk=2)
    assert buffer.num_bytes > 0
    assert buffer.get_logical_domain_size() == (1, 2)
    x, ids = torch.ones(4, 8, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
    recv, idx, weights, handle, _ = buffer.dispatch(x, topk_idx=ids, num_experts=2)
    assert weights is None
    assert idx.tolist() == [[0, -1] if group.rank == 0 else [-1, 0]] * 8
    out, none, _ = buffer.combine(recv, handle, bias=(x, 2 * x))
    assert none is None
    assert torch.equal(out, 5 * x)
    for call, name in (
        (lambda: buffer.all_gather(x), "all_gather"),
        (lambda: deep_ep.ElasticBuffer(group, num_cpu_bytes=1), "num_cpu_bytes"),
        (lambda: buffer.dispatch(x, topk_idx=ids, num_experts=3), "num_experts 3"),
        (lambda: buffer.dispatch(x, handle=handle, do_expand=True), "do_expand"),
        (lambda: buffer.dispatch(x.long(), topk_idx=ids, num_experts=2), "int64"),
        (lambda: buffer.combine(recv[1:], handle), "combine of"),
        (lambda: buffer.combine(recv.repeat(1, 3), handle), "left room for"),
        (lambda: buffer.combine(recv.to("meta"), handle), "on meta; the dispatch was on cpu"),
        (lambda: buffer.combine(recv, handle, bias=x[0]), r"a bias \[8\]"),
        (lambda: buffer.dispatch(x, topk_idx=ids.to("meta"), num_experts=2), "on cpu and meta"),
        (lambda: buffer.dispatch(x, handle=handle, cumulative_local_expert_recv_stats=ids[:1, 0]), "recv_stats"),
    ):
        with pytest.raises(ConfigError, match=name):
            call()
    with pytest.raises(RoutingError, match="names expert 2"):
        buffer.dispatch(x, topk_idx=ids + 1, num_experts=2)
    *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=torch.ones(4, 2), num_experts=2, do_expand=True)
    rows, weights = torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(9)
    with pytest.raises(ConfigError, match="combine of topk_weights"):
        buffer.combine(rows, handle, topk_weights=weights)
    buffer.combine(rows, handle, topk_weights=weights[:8])
    waited = []
    buffer._lane._last = SimpleNamespace(synchronize=lambda: waited.append(1))
    buffer.barrier()
    assert waited == [1], "a barrier waits for the stream of the last call"
    buffer.destroy()
    buffer.destroy()
    with pytest.raises(ConfigError, match="destroyed"):
        buffer.combine(rows, handle)


@given(
    rows=st.lists(st.lists(st.integers(-1, 4), min_size=3, max_size=3), max_size=9),
    alignment=st.sampled_from([1, 2, 5, 128]),
)
@settings(max_examples=60, deadline=None)
def test_layouts_match_the_loops(rows, alignment):
    rows = [[e if e not in row[:k] else -1 for k, e in enumerate(row)] for row in rows]
    local_NK = torch.tensor(rows, dtype=torch.int64).view(len(rows), 3)
    want = naive.expert_layout(rows, 5, alignment)
    plain, expanded = (layout.expert_layout(local_NK, 5, alignment, expand=e) for e in (False, True))
    assert plain.counts_L.tolist() == expanded.counts_L.tolist() == want["counts"]
    assert plain.psum_L.tolist() == want["plain"]
    assert expanded.psum_L.tolist() == want["expanded"]
    assert expanded.slots_NK.tolist() == want["slots"]
    assert layout.expanded_rows(5, alignment, len(rows), 3) >= (want["plain"][-1] if rows else 0)


@given(
    ids=st.lists(st.lists(st.integers(-1, 11), min_size=4, max_size=4, unique=True), max_size=6),
    ranks=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_ranks_of_experts(ids, ranks):
    local = 12 // ranks
    got = ranks_of_experts(torch.tensor(ids, dtype=torch.int64).view(len(ids), 4), local, ranks)
    width = min(4, ranks)
    for row, want in zip(got.tolist(), ({e // local for e in row if e >= 0} for row in ids), strict=True):
        assert row == sorted(want) + [-1] * (width - len(want))


@given(weights=st.lists(st.floats(2.0**-100, 2.0**100, width=32) | st.just(0.0), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_weights_in_pieces_lose_nothing(weights):
    weights_NK = torch.tensor([weights])
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(join_weights(split_weights(weights_NK, dtype)), weights_NK)
