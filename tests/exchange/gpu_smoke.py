import time, torch

torch.zeros(1, device="cuda")
t = time.time()
from bywash.kernels import KernelShape, load_kernels
from bywash.kernels.driver import driver, check

for exact in (False, True):
    k = load_kernels(KernelShape(ranks=2, experts=256, top_k=8, vecs=896, dtype="bfloat16", exact=exact))
    d = driver()
    A = d.CUfunction_attribute
    for n in ("dispatch_both", "combine_both"):
        f = k._function(n)
        print(
            exact,
            n,
            "regs",
            check(d.cuFuncGetAttribute(A.CU_FUNC_ATTRIBUTE_NUM_REGS, f), ""),
            "local",
            check(d.cuFuncGetAttribute(A.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, f), ""),
            "smem",
            check(d.cuFuncGetAttribute(A.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, f), ""),
        )
print("smoke", time.time() - t)
