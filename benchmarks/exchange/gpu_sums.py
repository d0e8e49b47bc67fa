"""How near the sums of all-gather / reduce-scatter (gather.cu, gather_words.cu) come to the memory's rate, on one GPU.

    PYTHONPATH=src:. python benchmarks/exchange/gpu_sums.py

Two ranks' worth of tokens with uniform routing; nothing is exchanged. Prints microseconds and the bytes that must be
read and written over that time, beside the rate of a copy, for several grids.
"""

import argparse
import ctypes

import torch
from benchmarks.moe.layer_baselines import device_copy, rate

from bywash.exchange.allgather import compile_gather
from bywash.exchange.peer_layout import FAILURE_WORDS, STATE_WORDS
from bywash.kernels.compile import THREADS, WARPS, KernelShape
from bywash.kernels.launch import Kernels, launch

RANKS, EXPERTS, TOP_K, HIDDEN = 2, 64, 8, 7168


def inputs(tokens):
    """Pairs of rank 0 in random order, as the index would have them, and everything else that the kernels read."""
    places, generator = RANKS * tokens, torch.Generator().manual_seed(0)
    ids = torch.rand(places, EXPERTS, generator=generator).topk(TOP_K).indices
    here = ids < EXPERTS // RANKS
    m_PK = torch.full((places, TOP_K), -1, dtype=torch.int32)
    order = ids[here].argsort(stable=True)
    m_M = torch.empty(len(order), dtype=torch.int32)
    m_M[order] = torch.arange(len(order), dtype=torch.int32)
    m_PK[here] = m_M
    y = torch.randn(len(order), HIDDEN, device="cuda").bfloat16()
    return m_PK.cuda(), y, here.view(RANKS, -1).sum(1).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    tokens = parser.parse_args().tokens
    m_PK, y, pairs_R = inputs(tokens)
    row, places = 2 * HIDDEN, RANKS * tokens
    sizes = {"at_out_flags": 256, "at_weights": 4 * places * TOP_K, "at_slots": places * row}
    heap = torch.zeros(sum(sizes.values()), dtype=torch.uint8, device="cuda")
    heap[:16].view(torch.int64).fill_(1 << 32)
    at = {"at_out_flags": 0, "at_weights": 256, "at_slots": 256 + sizes["at_weights"]}
    heap[256 : 256 + sizes["at_weights"]].view(torch.float32).uniform_()
    state = torch.ones(STATE_WORDS, dtype=torch.int32, device="cuda")
    failure = torch.zeros(FAILURE_WORDS, dtype=torch.int64, device="cuda")
    tokens_R = torch.full((RANKS,), tokens, dtype=torch.int32, device="cuda")
    partial, out = (torch.zeros(n, HIDDEN, dtype=torch.bfloat16, device="cuda") for n in (places, tokens))
    tensors = {"failure": failure, "state": state, "y": y, "m_PK": m_PK, "tokens_R": tokens_R, "out": out}
    values = {name: tensor.data_ptr() for name, tensor in tensors.items()} | at
    values |= {"rank": 0, "max_tokens": tokens, "room": tokens}
    amount = {"sum_others": row * (pairs_R[1] + tokens), "sum_own": row * (pairs_R[0] + RANKS * tokens)}
    copied = rate(*device_copy())
    print(f"{torch.cuda.get_device_name()}, {tokens} tokens a rank, copy {copied / 1e12:.2f} TB/s", flush=True)
    shape = KernelShape(ranks=RANKS, experts=EXPERTS, top_k=TOP_K, vecs=HIDDEN // 8, dtype="bfloat16", exact=False)
    major, minor = torch.cuda.get_device_capability()
    sms, first = torch.cuda.get_device_properties(0).multi_processor_count, {}
    code = compile_gather(shape, f"sm_{major}{minor}")
    kernels = Kernels(code, shape)
    parameters = kernels.parameters(values, [heap.data_ptr()] * RANKS)
    gather = (ctypes.c_uint64 * 6)(EXPERTS // RANKS, 1, 0, partial.data_ptr(), 0, at["at_weights"])
    for name, wanted in amount.items():
        for each in (1, 2, 3, 4):

            def call(name=name, each=each):
                shared, function = 4 * WARPS * EXPERTS // RANKS, kernels.function(name)
                launch(function, each * sms, THREADS, (parameters, gather), name, "sums", shared_bytes=shared)

            found = rate(call, wanted, rounds=6)
            result = (out if name == "sum_own" else partial).clone()
            bits = "same" if torch.equal(result, first.setdefault(name, result)) else "OTHER"
            print(
                f"  {name:10} {each} blocks an SM: {wanted / found * 1e6:7.1f} us, {found / 1e12:.2f} TB/s, "
                f"{found / copied:.2f} of a copy, {bits} bits",
                flush=True,
            )
    print("failure words", failure.tolist())


if __name__ == "__main__":
    main()
