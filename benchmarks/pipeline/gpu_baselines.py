"""What our steps are compared with: the same layer in plain torch, eagerly, around an exchange by NCCL."""

import statistics
import traceback

import torch
from benchmarks.moe.layer_baselines import AllGatherLayer, ByHandLayer, GroupedMlp
from torch.nn import functional as F

from bywash.kernels.add_norm import EPSILON
from bywash.moe.pipeline.attention_cuda import Attention

NAMES = {"by hand": ByHandLayer, "all-gather": AllGatherLayer}


class PlainLayer:
    """Norm, attention, residual, norm, router, experts across ranks, shared expert, residual. Weights of layer 0."""

    def __init__(self, bench, moe):
        self._moe, self._weights, self._sizes = moe, bench.weights, bench.sizes
        heads = bench.sizes.attention
        self._attention = heads and Attention(heads, bench.weights.attention[:1], bench.sizes.tokens)
        if heads and heads.cached:
            self._attention.cache_LNPV.normal_()

    def __call__(self, x_TD):
        weights = self._weights
        if self._attention is not None:
            mixed = torch.empty_like(x_TD)
            self._attention(0, self._norm(x_TD, weights.attention_norm[0]), mixed)
            x_TD = x_TD + mixed
        h_TD = self._norm(x_TD, weights.norm[0])
        best = F.linear(h_TD, weights.router[0]).float().topk(self._sizes.top_k, dim=1)
        x_TD = x_TD + self._moe(h_TD, best.indices, best.values.softmax(1))
        if self._sizes.shared_inner:
            gate, up = F.linear(h_TD, weights.shared_gate_up[0][0]).chunk(2, dim=1)
            x_TD = x_TD + F.linear(F.silu(gate) * up, weights.shared_down[0][0])
        return x_TD

    def _norm(self, x_TD, weight_D):
        return F.rms_norm(x_TD, x_TD.shape[1:], weight_D, EPSILON)


def baselines(bench, nccl, rounds, ours=None):
    """Milliseconds a layer of each baseline, printed beside `ours`; forgets all variants first, for their memory."""
    sizes, mlp = bench.sizes, GroupedMlp(bench.weights.gate_up[0], bench.weights.down[0])
    bench.forget()
    found = {}
    for name, kind in NAMES.items():
        if not bench.has(1.5, f"baseline {name}"):
            break
        try:
            layer = PlainLayer(bench, kind(nccl, bench.rank, bench.group.ranks, sizes.experts, mlp))
            times = [timed(bench, layer) for _ in range(rounds + 1)][1:]
            found[name] = ms = statistics.median(times)
            faster = f"; ours, {ours:.3f}, is {ms / ours:.2f} times as fast" if ours else ""
            bench.log(
                f"  baseline {name}: {ms:.3f} ms a layer ({min(times):.3f} to {max(times):.3f}), "
                f"MFU {bench.mfu(ms):.4f}{faster}"
            )
        except Exception:
            print(f"rank {bench.rank}: baseline {name}:\n{traceback.format_exc(limit=-4)}", flush=True)
        torch.cuda.empty_cache()
    bench.results["baselines, ms a layer"] = found


def timed(bench, layer):
    """Milliseconds of the slower rank, a mean over the part's number of calls."""
    bench.meet()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(bench.options.calls):
        layer(bench.inputs[0])
    end.record()
    end.synchronize()
    return max(bench.gathered(begin.elapsed_time(end) / bench.options.calls))
