"""The kernels that `gpu_overlap.py` needs at its own sizes, by name. Importing this imports nothing heavy."""

HIDDEN, TOP_K, RANKS = 7168, 8, 2
NAMES = ["experts 2", "experts 1", *(f"{kind} {n}" for n in (64, 256, 16) for kind in ("peer", "gather", "router"))]
"""Longest first: experts by cluster, the others by their number of experts."""


def compile_job(name):
    """Into the cache. A shape that the exchange does not ask for costs time, nothing else."""
    import torch

    from bywash.exchange.allgather import compile_gather
    from bywash.kernels.compile import KernelShape, compile_kernels
    from bywash.kernels.experts import Tuning, compile_experts
    from bywash.kernels.router import compile_router

    kind, number = name.split()
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}"
    if kind == "experts":
        compile_experts(Tuning(cluster=int(number)))
    elif kind == "router":
        compile_router(int(number), TOP_K, HIDDEN, arch)
    else:
        shape = KernelShape(
            ranks=RANKS, experts=int(number), top_k=TOP_K, vecs=HIDDEN // 8, dtype="bfloat16", exact=False
        )
        (compile_kernels if kind == "peer" else compile_gather)(shape, arch)
