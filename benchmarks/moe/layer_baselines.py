"""What `layer.py` compares with, in the same run: whole MoE layers in plain torch and NCCL, and the machine's ceilings.

Shapes: T tokens per rank, K experts per token, D hidden, F intermediate, G = 2F, L experts of this rank, M pairs here.
"""

import torch
from benchmarks.exchange.gpu_baselines import AllGather, ByHand
from torch.nn import functional as F

from bywash.exchange.fp8_rows import dequantise_rows, quantise_rows
from bywash.kernels.experts_naive import Fp8, dequantise_gate_up_naive, dequantise_weights_naive

DENSE = 8192
COPY_BYTES = 2 << 30


class GroupedMlp:
    """torch's grouped products with SiLU and product as separate kernels, on rows that lie expert by expert."""

    def __init__(self, gate_up_LGD, down_LDF):
        self.inner = down_LDF.shape[2]
        self.gate_up_LDG, self.down_LFD = gate_up_LGD.transpose(1, 2), down_LDF.transpose(1, 2)

    def __call__(self, rows_MD, ends_L):
        gate_up = F.grouped_mm(rows_MD, self.gate_up_LDG, offs=ends_L)
        return F.grouped_mm(F.silu(gate_up[:, : self.inner]) * gate_up[:, self.inner :], self.down_LFD, offs=ends_L)


class ByHandLayer:
    """argsort, host splits, `all_to_all_single` of one row per (token, expert), grouped products, and back."""

    def __init__(self, nccl, rank, ranks, experts, mlp):
        self.exchange, self.mlp = ByHand(nccl, rank, ranks, experts), mlp

    def __call__(self, x_TD, ids_TK, weights_TK):
        rows_MD, state = self.exchange.dispatch(x_TD, ids_TK, weights_TK)
        return self.exchange.combine(self.mlp(rows_MD, state[-1]), state, weights_TK)


class AllGatherLayer:
    """All-gather rows and routing, grouped products on the pairs of this rank's experts, reduce-scatter."""

    def __init__(self, nccl, rank, ranks, experts, mlp):
        self.exchange, self.mlp = AllGather(nccl, rank, ranks, experts), mlp

    def __call__(self, x_TD, ids_TK, weights_TK):
        rows_ND, state = self.exchange.dispatch(x_TD, ids_TK, weights_TK)
        order, ends, _ = state
        pairs = int(ends[-2])  # a host sync; without it everything would run at the full capacity
        y_MD = self.mlp(rows_ND[order[:pairs] // ids_TK.shape[1]], ends[:-1].int())
        return self.exchange.combine(y_MD, state, pairs)


def dense_product():
    """A call that multiplies two DENSE x DENSE bf16 matrices, and its floating-point operations."""
    a, b = (torch.randn(DENSE, DENSE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b.T, out=out), 2 * DENSE**3


def dense_product_fp8():
    """The same in e4m3 with one scale for each matrix: the rate of the tensor cores, whatever the scaling."""
    a, b = (torch.randn(DENSE, DENSE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    call = torch._scaled_mm
    return lambda: call(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True), 2 * DENSE**3


def device_copy():
    """A call that copies within the device's memory, and the bytes that it reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * COPY_BYTES


def rate(call, amount, rounds=10):
    """`amount` per second of a call, best of `rounds`."""
    best = 0.0
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        best = max(best, amount / (begin.elapsed_time(end) * 1e-3))
    return best


def sample_outputs(inputs_R, sample, gate_up, down, first_expert):
    """This rank's share of the float32 outputs of the first `sample` tokens of every rank: [R, sample, D].

    The sum over ranks is the oracle: one expert and one token at a time, in float32, sharing nothing with what is
    measured. With weights as `Fp8`, rows and intermediates go through e4m3 too.
    """
    fp8 = isinstance(gate_up, Fp8)
    local, _, hidden = (gate_up.values if fp8 else gate_up).shape
    total = torch.zeros(len(inputs_R), sample, hidden, device="cuda")
    for source, (x, ids, weights) in enumerate(inputs_R):
        for token in range(sample):
            for k in range(ids.shape[1]):
                slot = int(ids[token, k]) - first_expert
                if 0 <= slot < local:
                    y = (_expert_fp8 if fp8 else _expert)(x[token], gate_up, down, slot)
                    total[source, token] += weights[token, k] * y
    return total


def _expert(x_D, gate_up_LGD, down_LDF, slot):
    gate, up = (gate_up_LGD[slot].float() @ x_D.float()).chunk(2)
    return down_LDF[slot].float() @ (F.silu(gate) * up)


def _expert_fp8(x_D, gate_up, down, slot):
    here = slice(slot, slot + 1)
    gate_up_GD = dequantise_gate_up_naive(Fp8(values=gate_up.values[here], scales=gate_up.scales[here]))[0]
    down_DF = dequantise_weights_naive(Fp8(values=down.values[here], scales=down.scales[here]))[0]
    gate, up = (gate_up_GD @ _through_e4m3(x_D)).chunk(2)
    return down_DF @ _through_e4m3((F.silu(gate) * up).bfloat16())


def _through_e4m3(x_D):
    return dequantise_rows(*quantise_rows(x_D[None]))[0]
