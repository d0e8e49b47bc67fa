"""One layer of a variant against float32 oracles on a few tokens: each stage from what it was really given."""

import functools

import torch
import torch.distributed as dist
from benchmarks.moe.layer_baselines import sample_outputs
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from bywash.kernels.add_norm import add_norm_naive
from bywash.kernels.router import router_naive
from bywash.moe.pipeline import Kind, build_schedule
from bywash.moe.pipeline.attention_cuda import BACKENDS, Attention, attention_naive
from bywash.moe.pipeline.shared_cuda import open_shared

SAMPLE, TOLERANCE = 8, 3e-2


def check_oracle(bench, variant):
    """Run layer 0 eagerly, on all tokens of all ranks, for a variant in one part, and print a verdict.

    Attention, experts and shared expert are judged by what they add (in `x + added` the rounding of x would count as
    error); norms, router and residual by their own oracles. What tokens attend to is the sample itself, being the
    first of a sequence, or in decode a cache.
    """
    forward, weights, layer = variant.forward, bench.weights, 0
    schedule, part, lane, kept = (
        build_schedule([bench.sizes.form], forward.split),
        forward.parts[0],
        forward.lanes[0],
        [],
    )

    def work(op):
        forward(op)
        if op.kind == Kind.ROUTE:  # without attention `finish` puts the next layer's there
            kept.append(part.rows_TD[: part.count].clone())

    variant.feed(0)
    bench.meet()
    forward.begin()
    bench.executor.run(schedule, work)
    forward.end()
    variant.check()
    x, rows_TD, found = bench.inputs[0][:SAMPLE], kept[0], {}
    rows = rows_TD[:SAMPLE]
    if lane.attention is None:
        expected = add_norm_naive(x, weight_D=weights.norm[layer])[1]
    else:
        mixed = forward._mixed_TD[:SAMPLE]
        h = add_norm_naive(x, weight_D=weights.attention_norm[layer])[1]
        found["attention"] = apart(mixed, attend(lane.attention, weights.attention[layer], h))
        x, expected = add_norm_naive(x, mixed, weight_D=weights.norm[layer])
    found["norm"] = apart(rows, expected)
    ids, shares = router_naive(rows_TD, weights.router[layer], bench.sizes.top_k)
    head = slice(0, part.count)
    alike = float((part.ids_TK[head].sort(1).values == ids[head].sort(1).values).all(1).float().mean())
    nearest = float((part.weights_TK[head] - shares[head]).abs().max())
    found["experts"] = apart(part.out_TD[:SAMPLE], experts(bench, part, rows, layer))
    if part.shared_TD is not None:
        one = [(rows, torch.zeros_like(part.ids_TK[:SAMPLE, :1]), torch.ones(SAMPLE, 1, device="cuda"))]
        shared = sample_outputs(one, SAMPLE, weights.shared_gate_up[layer], weights.shared_down[layer], 0)[0]
        found["shared expert"] = apart(part.shared_TD[:SAMPLE], shared)
    added = None if part.shared_TD is None else part.shared_TD[:SAMPLE]
    x = add_norm_naive(x, part.out_TD[:SAMPLE], added, weight_D=weights.norm[layer])[0]
    exact = torch.equal(forward.output_TD[:SAMPLE], x)
    everyone = bench.gathered((found, exact))
    good = all(bits and max(errors.values()) < TOLERANCE for errors, bits in everyone) and alike > 0.99
    errors_R = [{name: round(one, 5) for name, one in errors.items()} for errors, _ in everyone]
    bench.log(
        f"  oracle, layer 0, {variant.name}: {'ok' if good else 'WRONG'}; part of its norm by which each differs "
        f"{errors_R}, residual exact {[bits for _, bits in everyone]}; router picks as torch for {alike:.4%} of "
        f"tokens, weights within {nearest:.2g}"
    )
    bench.results[f"oracle, {variant.name}"] = {"ok": good, "errors": errors_R, "router": alike}
    bench.meet()


def check_repeats(bench, calls=20):
    """Whether stages of a decode step give the same bits every time, and how long they take: fused attention by each
    backend, attention as the stack has it, and the shared expert."""
    sizes, tokens, size = bench.sizes.attention, bench.sizes.tokens, bench.sizes.attention.head_size
    generator = torch.Generator(device="cuda").manual_seed(1)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    q = draw(tokens, sizes.kv_heads, sizes.heads // sizes.kv_heads, size)  # as the stack has it
    kv = draw(tokens, sizes.cached + 1, 2, sizes.kv_heads, size)
    k, v = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    h, count = draw(tokens, bench.sizes.hidden), torch.full((1,), tokens, dtype=torch.int32, device="cuda")
    whole = Attention(sizes, bench.weights.attention[:1], tokens)
    whole.cache_LNPV.normal_(generator=generator)
    pair = bench.weights.shared_gate_up[0], bench.weights.shared_down[0]
    expert = open_shared([pair], tokens, one_part=True)[0]

    def fused(backend):
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v)

    def attention():
        out = torch.empty_like(h)
        whole(0, h, out)
        return out

    def shared():
        out = torch.empty_like(h)
        expert(h, count, out, first=0, last=1)
        return out

    stages = {backend.name: functools.partial(fused, backend) for backend in BACKENDS}
    stages |= {"the stack's attention": attention, "the shared expert": shared}
    for name, stage in stages.items():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        try:
            first = stage().clone()
            begin.record()
            outs = [stage() for _ in range(calls)]
            end.record()
            end.synchronize()
            alike = sum(torch.equal(out, first) for out in outs)
            text = f"{alike} of {calls} calls alike, {begin.elapsed_time(end) / calls * 1e3:.0f} us"
        except RuntimeError as error:
            text = f"does not run: {str(error).splitlines()[0][:120]}"
        bench.log(f"  one decode step, {name}: {text}")
    bench.meet()


def attend(attention, weights, h):
    """The sample's attention in float32: the beginning of sequence 0, or one token of each of the first sequences."""
    sizes = attention.sizes
    if sizes.sequence > 1:
        return attention_naive(sizes, weights, h, attention.cache_LNPV.new_zeros(0, sizes.kv_size).float())
    caches = attention.cache_LNPV[0, : len(h), : sizes.cached].float()
    return torch.cat([attention_naive(sizes, weights, row[None], cache) for row, cache in zip(h, caches)])


def experts(bench, part, rows, layer):
    """The routed experts' sum for this rank's sample, each rank computing what lies with it."""
    mine = [t[:SAMPLE].cpu() for t in (rows, part.ids_TK, part.weights_TK)]
    inputs_R = [[t.cuda() for t in parts] for parts in bench.gathered(mine)]
    weights, first = bench.weights, bench.rank * bench.local
    share = sample_outputs(inputs_R, SAMPLE, weights.gate_up[layer], weights.down[layer], first).cpu()
    dist.all_reduce(share)
    return share[bench.rank].cuda()


def apart(found, expected):
    """The largest difference of a row, as a part of that row's norm."""
    difference = (found.float() - expected.float()).norm(dim=1)
    return float((difference / expected.float().norm(dim=1).clamp(min=1e-20)).max())
