"""The kernels that `gpu_overlap.py` needs, by name: kind, then what is compiled in. Imports nothing heavy by itself."""

HIDDEN, TOP_K = 7168, 8
EXPERTS_OF_TWO = {"A": 64, "Z": 64, "A2": 64, "C": 64, "C2": 64, "D": 64, "B": 256, "E": 16}
"""By part, with two ranks; in proportion with more."""
KINDS = ("peer", "gather")


def names_for(parts, ranks, *, small=False):
    """Longest first: experts by cluster, exchanges by ranks, experts, top-k and hidden; the soak's are small."""
    shapes = {(EXPERTS_OF_TWO[part] * ranks // 2, TOP_K, HIDDEN) for part in parts if part in EXPERTS_OF_TWO}
    if small:
        shapes = {(8 * ranks, TOP_K, 512)}
    shapes |= {(12, top_k, 512) for top_k in (1, 4) if "S" in parts}
    found = ["experts 2", "experts 1"]
    found += [f"{kind} {ranks} {e} {k} {d}" for kind in KINDS for e, k, d in sorted(shapes)]
    found += [f"router {e} {k} {d}" for e, k, d in sorted(shapes)]
    return [*found, *sorted({f"norm {hidden}" for _, _, hidden in shapes})]


def compile_job(name):
    """Into the cache. A shape that the exchange does not ask for costs time, nothing else."""
    import torch

    from bywash.exchange.allgather import compile_gather
    from bywash.kernels.add_norm import compile_add_norm
    from bywash.kernels.compile import KernelShape, compile_kernels
    from bywash.kernels.experts import Tuning, compile_experts
    from bywash.kernels.router import compile_router

    kind, *numbers = name.split()
    major, minor = torch.cuda.get_device_capability()
    arch, numbers = f"sm_{major}{minor}", [int(number) for number in numbers]
    if kind == "experts":
        compile_experts(Tuning(cluster=numbers[0]))
    elif kind == "norm":
        compile_add_norm(numbers[0], arch)
    elif kind == "router":
        compile_router(*numbers, arch)
    else:
        ranks, experts, top_k, hidden = numbers
        shape = KernelShape(ranks=ranks, experts=experts, top_k=top_k, vecs=hidden // 8, dtype="bfloat16", exact=False)
        (compile_kernels if kind == "peer" else compile_gather)(shape, arch)
