"""A program written for DeepEP 2, after the examples of its README and the meanings its documentation gives, in our own
words; the tests run it on CPU ranks and on GPUs. Every rank can make every rank's inputs, so that the oracle needs no
communication."""

from dataclasses import dataclass

import torch
from torch import Tensor

import bywash.deepep as deep_ep
from bywash.deepep import naive
from bywash.errors import BywashError
from bywash.exchange.fp8_rows import quantise_rows


@dataclass(frozen=True, kw_only=True)
class Case:
    tokens: int = 23  # rank r brings r fewer
    hidden: int = 40
    experts: int = 12
    top_k: int = 3
    dtype: str = "bfloat16"
    fp8: bool = False
    packed_scales: bool = False
    alignment: int = 1
    expand: bool = False
    sync: bool = True
    async_: bool = False
    masked: float = 0.2
    one_expert: bool = False
    empty_rank: int = -1


def inputs(case: Case, rank: int, seed: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """One rank's x, scales, ids and weights, on the CPU."""
    made = torch.Generator().manual_seed(1000 * seed + rank)
    tokens = 0 if rank == case.empty_rank else max(1, case.tokens - rank)
    x = torch.randn(tokens, case.hidden, generator=made).to(getattr(torch, case.dtype))
    scales = None
    if case.fp8:
        x, scales = quantise_rows(x)
        if case.packed_scales:
            scales = torch.randint(-(2**31), 2**31 - 1, (tokens, -(-case.hidden // 512)), generator=made).int()
    ids = torch.rand(tokens, case.experts, generator=made).argsort(dim=1)[:, : case.top_k]
    if case.one_expert:
        ids = torch.full_like(ids, -1)
        ids[:, case.top_k - 1] = case.experts - 1
    ids = ids.masked_fill(torch.rand(ids.shape, generator=made) < case.masked, -1)
    weights = torch.rand(ids.shape, generator=made)
    return x, scales, ids, weights


class Expected:
    """What rank `me` must receive, row by row in plain loops."""

    def __init__(self, case: Case, me: int, ranks: int, seed: int) -> None:
        local = case.experts // ranks
        rows, self.from_R = [], []
        for source in range(ranks):
            x, scales, ids, weights = inputs(case, source, seed)
            before = len(rows)
            for t in range(x.shape[0]):
                here = [int(e) - me * local if int(e) // local == me and int(e) >= 0 else -1 for e in ids[t]]
                if any(e >= 0 for e in here):
                    kept = [float(w) if e >= 0 else 0.0 for w, e in zip(weights[t], here, strict=True)]
                    rows.append((source * case.tokens + t, x[t], None if scales is None else scales[t], here, kept))
            self.from_R.append(len(rows) - before)
        self.rows = rows
        self.source = [row[0] for row in rows]
        self.x = [row[1] for row in rows]
        self.scales = [row[2] for row in rows]
        self.local = [row[3] for row in rows]
        self.weights = [row[4] for row in rows]
        self.layout = naive.expert_layout(self.local, local, case.alignment)


def outputs_for(sources: list[int], local: list[list[int]], first: int, hidden: int) -> Tensor:
    """[N, K, D] float32: an output for each pair, a function of the token and the global expert alone."""
    token = torch.tensor(sources).view(-1, 1, 1)
    expert = torch.tensor(local).view(token.shape[0], -1, 1) + first
    values = torch.sin(token * 0.7 + expert * 1.3 + torch.arange(hidden) * 0.01)
    return torch.where(expert - first >= 0, values, 0.0)


def per_rank_sum(y_NKD: Tensor, dtype: torch.dtype) -> Tensor:
    """In k order in float32 of values that were rounded before, rounded once."""
    total = torch.zeros(y_NKD.shape[0], y_NKD.shape[2])
    for k in range(y_NKD.shape[1]):
        total += y_NKD[:, k].to(dtype).float()
    return total.to(dtype)


def expected_combine(case: Case, me: int, ranks: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Each rank's rounded sum, added in rank order in float32, rounded once."""
    _, _, ids, _ = inputs(case, me, seed)
    local, total = case.experts // ranks, torch.zeros(ids.shape[0], case.hidden)
    for rank in range(ranks):
        here = torch.where((ids >= 0) & (ids // local == rank), ids - rank * local, -1)
        sources = [me * case.tokens + t for t in range(ids.shape[0])]
        if sources:
            y = outputs_for(sources, here.tolist(), rank * local, case.hidden)
            total += per_rank_sum(y, dtype).float()
    return total.to(dtype)


def run(group, case: Case, seed: int, steps: int, device: str = "cpu") -> dict[str, int]:
    """`steps` dispatches and combines through one buffer, all results against the oracle, bit for bit."""
    if device == "cuda":
        torch.cuda.set_device(group.rank % torch.cuda.device_count())
    with torch.inference_mode():
        buffer = deep_ep.ElasticBuffer(
            group,
            num_max_tokens_per_rank=case.tokens,
            hidden=case.hidden,
            num_topk=case.top_k,
            use_fp8_dispatch=case.fp8,
            num_gpu_timeout_secs=20,
            explicitly_destroy=True,
        )
        for step in range(steps):
            _one_step(buffer, case, seed + step, device)
        buffer.check()
        extra = buffer.extra_steps
        buffer.barrier()
        buffer.destroy()
    return {"extra": extra}


def _one_step(buffer: deep_ep.ElasticBuffer, case: Case, seed: int, device: str) -> None:
    me, ranks = buffer.rank_idx, buffer.num_ranks
    x, scales, ids, weights = (None if t is None else t.to(device) for t in inputs(case, me, seed))
    stats = torch.zeros(case.experts // ranks, dtype=torch.int32, device=device)
    previous = buffer.capture() if case.async_ else None
    recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
        x if scales is None else (x, scales),
        topk_idx=ids.to(deep_ep.topk_idx_t),
        topk_weights=weights,
        cumulative_local_expert_recv_stats=stats,
        num_experts=case.experts,
        expert_alignment=case.alignment,
        previous_event=previous,
        async_with_compute_stream=case.async_,
        allocate_on_comm_stream=case.async_,
        do_cpu_sync=case.sync,
        do_expand=case.expand,
        use_tma_aligned_col_major_sf=case.expand or not case.sync,
    )
    if case.async_:
        with event:
            pass
    want = Expected(case, me, ranks, seed)
    check_received(case, want, recv_x, recv_idx, recv_weights, handle, stats)
    check_combine(buffer, case, want, handle, recv_weights, seed, device)
    check_cached(buffer, case, handle, recv_x, x, scales)


def check_received(case, want, recv_x, recv_idx, recv_weights, handle, stats) -> None:
    rows, layout = len(want.rows), want.layout
    recv_scales = None
    if case.fp8:
        recv_x, recv_scales = recv_x
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == torch.tensor(want.from_R).cumsum(0).tolist()
    assert stats.tolist() == layout["counts"]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == layout["expanded" if case.expand else "plain"]
    if case.sync:
        aligned = [-(-count // case.alignment) * case.alignment for count in layout["counts"]]
        assert handle.num_recv_tokens_per_expert_list == aligned
        assert recv_x.shape[0] == (sum(aligned) if case.expand else rows)
    else:
        assert handle.num_recv_tokens == case.tokens * len(want.from_R)
    metadata = handle.recv_src_metadata[:rows].cpu()
    assert metadata[:, 0].tolist() == want.source
    if not case.expand:
        same(recv_x[:rows], want.x)
        assert recv_idx[:rows].tolist() == want.local
        same(recv_weights[:rows], [torch.tensor(w) for w in want.weights])
        if recv_scales is not None:
            same(recv_scales[:rows], want.scales)
        return
    assert recv_idx is None
    assert metadata[:, 2:].tolist() == layout["slots"]
    for n, slots in enumerate(layout["slots"]):
        for k, slot in enumerate(slots):
            if slot >= 0:
                same(recv_x[slot : slot + 1], [want.x[n]])
                assert recv_weights[slot].item() == torch.tensor(want.weights[n][k]).item()
                if recv_scales is not None:
                    same(recv_scales[slot : slot + 1], [want.scales[n]])


def check_combine(buffer, case, want, handle, recv_weights, seed, device) -> None:
    me, ranks, local = buffer.rank_idx, buffer.num_ranks, case.experts // buffer.num_ranks
    dtype = torch.bfloat16 if case.fp8 else getattr(torch, case.dtype)
    size = handle.num_expanded_tokens if case.expand else handle.num_recv_tokens
    y = torch.full((size, case.hidden), torch.nan, dtype=dtype)  # whatever is not a row must not be read
    if want.rows:
        y_NKD = outputs_for(want.source, want.local, me * local, case.hidden)
        if case.expand:
            for n, slots in enumerate(want.layout["slots"]):
                for k, slot in enumerate(slots):
                    if slot >= 0:
                        y[slot] = y_NKD[n, k].to(dtype)
        else:
            y[: len(want.rows)] = per_rank_sum(y_NKD, dtype)
    back = None if case.dtype == "float16" else recv_weights
    out, out_weights, event = buffer.combine(
        y.to(device), handle=handle, topk_weights=back, async_with_compute_stream=case.async_
    )
    if case.async_:
        event.current_stream_wait()
    same(out, list(expected_combine(case, me, ranks, seed, dtype)))
    if back is not None:
        _, _, ids, weights = inputs(case, me, seed)
        same(out_weights, list(torch.where(ids >= 0, weights, 0.0)))


def check_cached(buffer, case, handle, recv_x, x, scales) -> None:
    """The same routing again: other rows arrive at the same places."""
    again = x if scales is None else (x, scales)
    cached_x, _, none, handle2, _ = buffer.dispatch(again, handle=handle, do_expand=case.expand)
    assert none is None
    assert handle2 is handle
    rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    if case.expand:
        places = handle.recv_src_metadata[:rows, 2:]
        places = places[places >= 0].long()
    else:
        places = torch.arange(rows, device=handle.recv_src_metadata.device)
    for first, second in zip(*(t if case.fp8 else (t,) for t in (recv_x, cached_x)), strict=True):
        assert torch.equal(as_bits(first)[places], as_bits(second)[places])


def repeated_calls(group, case: Case, seed: int, device: str = "cpu") -> int:
    """Dispatches that are never combined, two combines of one dispatch: still the right sums. Gives the extra steps."""
    if device == "cuda":
        torch.cuda.set_device(group.rank % torch.cuda.device_count())
    with torch.inference_mode():
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=case.tokens, num_gpu_timeout_secs=20)
        handles, want = [], [Expected(case, group.rank, group.ranks, seed + n) for n in range(4)]
        for n in range(4):
            x, _, ids, weights = (None if t is None else t.to(device) for t in inputs(case, group.rank, seed + n))
            *_, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_experts=case.experts)
            handles.append(handle)
        for n in (1, 3, 0, 2, 2):
            y = torch.zeros(0, case.hidden)
            if want[n].rows:
                first = group.rank * case.experts // group.ranks
                y = per_rank_sum(outputs_for(want[n].source, want[n].local, first, case.hidden), torch.bfloat16)
            out, _, _ = buffer.combine(y.bfloat16().to(device), handle=handles[n])
            same(out, list(expected_combine(case, group.rank, group.ranks, seed + n, torch.bfloat16)))
        buffer.check()
        extra = buffer.extra_steps
        buffer.barrier()
        buffer.destroy()
        return extra


def uniform(buffer, tokens: int, **options):
    """A dispatch of `tokens` rows of ones, each to the first expert of every rank."""
    x = torch.ones(tokens, 16, dtype=torch.bfloat16)
    ids = (2 * torch.arange(buffer.num_ranks)).repeat(tokens, 1)
    return buffer.dispatch(x, topk_idx=ids, num_experts=2 * buffer.num_ranks, **options)


def too_many_tokens(group, before: int) -> str:
    """Rank 1 brings more tokens than were announced, after some good steps: each rank's error."""
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8)
    for _ in range(before):
        recv, *_, handle, _ = uniform(buffer, 8)
        buffer.combine(recv, handle)
    try:
        uniform(buffer, 9 if group.rank == 1 else 8)
    except BywashError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def ever_larger(group) -> int:
    """Dispatches for more tokens than the ones before, combines in another order. Gives the carriers opened."""
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=4)
    got = [uniform(buffer, tokens, num_max_tokens_per_rank=tokens) for tokens in (4, 9, 3)]
    for n in (1, 2, 0):
        recv, *_, handle, _ = got[n]
        assert recv.shape[0] == buffer.num_ranks * (4, 9, 3)[n]
        out, _, _ = buffer.combine(recv, handle)
        assert torch.equal(out, torch.full_like(out, buffer.num_ranks))
    buffer.check()
    opened = len(list(buffer._works))
    buffer.destroy()
    return opened


def same(got: Tensor, want: list[Tensor]) -> None:
    """Bit for bit."""
    assert got.shape[0] == len(want), f"{got.shape[0]} rows, not {len(want)}"
    if want:
        expected = torch.stack([as_bits(row) for row in want])
        got = as_bits(got.contiguous()).cpu()
        assert torch.equal(got, expected), f"{int((got != expected).sum())} of {got.numel()} values differ"


def as_bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        tensor = tensor + 0.0  # a sum makes +0 of -0
    return tensor.view(kinds[tensor.dtype.itemsize])
