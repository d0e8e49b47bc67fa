"""The kernels around an engine's rows: compiled everywhere; on emulated GPUs against the same in torch, bit for bit."""

import pytest
import torch

from bywash.deepep.layout import expert_layout, local_ids
from bywash.deepep.weights import PIECES, join_weights, split_weights
from bywash.exchange.carrier import Arrived, distinct_ranks, ranks_of_experts
from bywash.exchange.device_rows import DeviceRows, Owners
from bywash.exchange.payload import RowFormat, RowParts
from bywash.kernels.rows import compile_rows
from tests.kernels import emulator

SIZES = {
    "bf16": (7, 40, torch.bfloat16, 0, 3, 3),
    "odd-bytes": (5, 33, torch.bfloat16, 0, 2, 2),
    "e4m3-scales": (6, 36, torch.float8_e4m3fn, 3, 4, 2),
    "float32": (4, 9, torch.float32, 0, 1, 3),
    "no-tokens": (0, 16, torch.bfloat16, 0, 2, 2),
}
EXPERTS = 4  # of each rank


@pytest.fixture
def emulated_gpu():
    if emulator.COMPILER is None:
        pytest.skip("needs g++ to compile the kernels for the CPU")
    with emulator.emulated():
        yield


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_compiles_without_a_gpu(arch):
    pytest.importorskip("cuda.core")
    assert compile_rows(arch).startswith(b"\x7fELF")


def made(tokens, columns, dtype, scales, top_k, ranks):
    random = torch.Generator().manual_seed(tokens + columns)
    ids = torch.rand(tokens, EXPERTS * ranks, generator=random).argsort(dim=1)[:, :top_k]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.3, -1).contiguous()
    x = torch.randn(tokens, columns, generator=random).to(dtype)
    scales_TG = torch.rand(tokens, scales, generator=random) if scales else None
    return x, scales_TG, ids, torch.rand(ids.shape, generator=random)


@pytest.mark.parametrize("name", SIZES)
def test_packing_and_reading_equal_torch(emulated_gpu, name):
    tokens, columns, dtype, scales, top_k, ranks = SIZES[name]
    x, scales_TG, ids, weights = made(*SIZES[name])
    form = RowFormat(columns=columns, dtype=dtype, scales=scales, top_k=top_k)
    row_bytes, rank, alignment = -(-form.bytes // 16) * 16 + 16, ranks - 1, 3
    numbers = torch.arange(tokens, dtype=torch.int32) + 100
    parts = RowParts(x_ND=x, scales_NG=scales_TG, source_N=numbers, ids_NK=ids.int(), weights_NK=weights)
    want = form.pack(parts, row_bytes)
    rows, summary = DeviceRows(form), torch.full((ranks + 2 * EXPERTS + 1,), 77, dtype=torch.int32)
    owners = Owners(ranks=ranks, per_rank=EXPERTS)
    got, ranks_TJ = rows.pack(x, scales_TG, ids, weights, owners, row_bytes=row_bytes, source=100, summary=summary)
    assert torch.equal(got[:, : form.bytes][:, used_bytes(form)], want[:, : form.bytes][:, used_bytes(form)])
    assert torch.equal(ranks_TJ, ranks_of_experts(ids, EXPERTS, ranks))

    here = torch.flip((ranks_TJ == rank).any(dim=1).nonzero()[:, 0], dims=(0,)).int()
    from_R = torch.zeros(ranks, 2, dtype=torch.int32)[:, 1]  # with a stride, as counts_RE has it
    from_R[0] = here.numel()
    room = here.numel() + 3
    arrived = Arrived(rows_PB=got, at_N=torch.cat([here, here.new_zeros(3)]), from_R=from_R, rows=None)
    local = torch.full((room, top_k), 9)
    metadata, stats = torch.zeros((room, 2 + top_k), dtype=torch.int32), torch.ones(EXPERTS, dtype=torch.int32)
    rows.read(
        arrived,
        local,
        first=rank * EXPERTS,
        experts=EXPERTS,
        metadata=metadata,
        summary=summary,
        alignment=alignment,
        stats_L=stats,
    )
    count = here.numel()
    want_local = local_ids(ids[here.long()], rank * EXPERTS, EXPERTS, count)
    layout = expert_layout(want_local, EXPERTS, alignment, expand=False)
    assert torch.equal(local[:count], want_local)
    assert bool((local[count:] == -1).all())
    assert summary[:ranks].tolist() == [count] * ranks
    assert torch.equal(summary[ranks : ranks + EXPERTS], layout.counts_L)
    assert torch.equal(summary[ranks + EXPERTS : -1], layout.psum_L)
    assert torch.equal(stats, layout.counts_L + 1)
    assert torch.equal(metadata[:count, 0], here + 100)
    assert metadata[:, 1].tolist() == list(range(room))
    assert bool((metadata[:, 2:] == -1).all())

    copied, copied_scales, copied_weights = rows.copy(arrived, room, weighted=True, ids_NK=local, column_major=True)
    assert torch.equal(copied[:count].view(torch.uint8), x[here.long()].view(torch.uint8))
    assert bool((copied[count:].view(torch.uint8) == 0).all())
    assert torch.equal(copied_weights[:count], weights[here.long()].masked_fill(want_local < 0, 0))
    if scales:
        assert torch.equal(copied_scales[:count], scales_TG[here.long()])
        assert copied_scales.stride(0) == 1


def used_bytes(form):
    """Bytes of a row that mean something: not those that fill the last word of its values."""
    used = torch.ones(form.bytes, dtype=torch.bool)
    used[form.columns * form.dtype.itemsize : form.value_bytes] = False
    return used


def test_owners_by_table_and_ids_that_are_no_expert(emulated_gpu):
    form = RowFormat(columns=8, dtype=torch.bfloat16, top_k=3)
    x, weights = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(3, 3)
    rank_E, ids = torch.tensor([2, 0, 2, 1]), torch.tensor([[0, 1, 2], [3, -1, 0], [1, 4, -7]], dtype=torch.int32)
    owners = Owners(ranks=3, rank_E=rank_E)
    _, ranks_TJ = DeviceRows(form).pack(x, None, ids, weights, owners, row_bytes=48, source=0)
    assert torch.equal(ranks_TJ[:2], distinct_ranks(torch.tensor([[2, 0, 2], [1, -1, 2]]), 3))
    assert ranks_TJ[2, 0] == 3  # no such rank: the exchange names it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_there_and_back_equal_torch(emulated_gpu, dtype):
    random = torch.Generator().manual_seed(3)
    rows = DeviceRows(RowFormat(columns=9, dtype=dtype, top_k=2))
    y, weights = torch.randn(6, 9, generator=random).to(dtype), torch.rand(6, 2, generator=random)
    ids = torch.tensor([[0, 1], [-1, 2], [3, -1], [-1, -1], [0, 2], [5, 5]])
    carried = rows.pack_outputs(y, torch.tensor([2, 3], dtype=torch.int32), 24, ids_NK=ids, weights=weights)
    pieces = split_weights(weights.masked_fill(ids < 0, 0), dtype)
    assert torch.equal(carried[:5, :9], y[:5])
    assert torch.equal(carried[:5, 9 : 9 + 2 * PIECES], pieces[:5])
    assert bool((carried[:5, 9 + 2 * PIECES :] == 0).all())
    out, back = rows.unpack_outputs(carried[:5], 9, weighted=True)
    assert torch.equal(out, y[:5])
    assert torch.equal(back, join_weights(pieces[:5]))
