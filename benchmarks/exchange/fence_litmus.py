"""Is a flag for a peer allowed to go without a release? Message passing between two GPUs, with and without.

    PYTHONPATH=src:. python benchmarks/exchange/fence_litmus.py

Blocks of GPU 0 write rows into GPU 1's memory, then a flag; blocks of GPU 1 wait for the flag and look at the rows. A
word older than the flag is a violation: a receiver would compute with rows of an earlier step. Prints the messages sent
and the violations for each way of setting the flag. With release and acquire the count must be 0; what the others show
depends on the machine, and a 0 there proves nothing.
"""

import argparse
import ctypes
import time

import torch

from bywash.kernels.compile import compile_source
from bywash.kernels.launch import launch, load_functions

THREADS, FLAG_BYTES, LINE = 512, 8, 128
WAYS = ("relaxed, a block's flag", "release, a block's flag", "relaxed, a warp's flag", "release, a warp's flag")
SOURCE = """
typedef unsigned long long u64;
typedef unsigned int u32;
__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ void store(u64 a, u64 w) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(a), "l"(w) : "memory");
}
__device__ void release(u64 a, u64 w) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(a), "l"(w) : "memory");
}
__device__ u64 load(u64 a) {
  u64 w; asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(w) : "l"(a) : "memory"); return w;
}
__device__ u64 acquire(u64 a) {
  u64 w; asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(w) : "l"(a) : "memory"); return w;
}
// True when the word has come; every wait ends after two seconds.
__device__ bool wait(u64 a, u64 i, bool ordered) {
  u64 since = now();
  while ((ordered ? acquire(a) : load(a)) < i) if (now() - since > 2000000000ull) return false;
  return true;
}
#define WARP (threadIdx.x / 32)
#define FLAG(flags) (flags + 128ull * (blockIdx.x * 16 + (PER_WARP ? WARP : 0)))

extern "C" __global__ void __launch_bounds__(512)
produce(u64 rows, u64 flags, u64 acks, u64 rounds, u64 vecs, u64 bad) {
  u64 row = rows + 16 * vecs * blockIdx.x;
  for (u64 i = 1; i <= rounds; ++i) {
    for (u64 v = threadIdx.x; v < vecs; v += 512)
      asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" :: "l"(row + 16 * v), "r"((u32)i) : "memory");
    if (PER_WARP) __syncwarp(); else __syncthreads();
    if (threadIdx.x % (PER_WARP ? 32 : 512) == 0) { if (RELEASE) release(FLAG(flags), i); else store(FLAG(flags), i); }
    if (__syncthreads_or(threadIdx.x == 0 && !wait(acks + 128ull * blockIdx.x, i, true))) return;
  }
}

extern "C" __global__ void __launch_bounds__(512)
consume(u64 rows, u64 flags, u64 acks, u64 rounds, u64 vecs, u64 bad) {
  u64 row = rows + 16 * vecs * blockIdx.x;
  u32 old = 0;
  for (u64 i = 1; i <= rounds; ++i) {
    bool come = threadIdx.x % (PER_WARP ? 32 : 512) != 0 || wait(FLAG(flags), i, RELEASE);
    if (PER_WARP) __syncwarp(); else __syncthreads();
    for (u64 v = threadIdx.x; v < vecs; v += 512) {
      u32 a, b, c, d;
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(row + 16 * v) : "memory");
      old += a != (u32)i || b != (u32)i || c != (u32)i || d != (u32)i;
    }
    if (__syncthreads_or(!come)) break;
    if (threadIdx.x == 0) release(acks + 128ull * blockIdx.x, i);
  }
  if (old) atomicAdd((u64*)bad, (u64)old);
}
"""


def start(device, name, way, blocks, *words):
    torch.cuda.set_device(device)
    major, minor = torch.cuda.get_device_capability()
    macros = [("RELEASE", str(way % 2)), ("PER_WARP", str(way // 2))]
    code = compile_source(SOURCE, macros, f"sm_{major}{minor}", name="litmus", what="fence litmus")
    (function,) = load_functions(code, (name,), "fence litmus")
    launch(function, blocks, THREADS, [ctypes.c_uint64(word) for word in words], name, "fence litmus")


def violations(way, blocks, rounds, row_bytes):
    """(vectors that were older than their flag, seconds, messages that did not arrive)."""
    rows = torch.zeros(blocks * row_bytes, dtype=torch.uint8, device="cuda:1")
    flags = torch.zeros(blocks * 16 * LINE, dtype=torch.uint8, device="cuda:1")
    acks = torch.zeros(blocks * LINE, dtype=torch.uint8, device="cuda:0")
    bad = torch.zeros(1, dtype=torch.int64, device="cuda:1")
    words = rows.data_ptr(), flags.data_ptr(), acks.data_ptr(), rounds, row_bytes // 16, bad.data_ptr()
    for device in (0, 1):
        torch.cuda.synchronize(device)
    began = time.monotonic()
    start(1, "consume", way, blocks, *words)
    start(0, "produce", way, blocks, *words)
    for device in (0, 1):
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - began
    arrived = acks.view(blocks, LINE)[:, :FLAG_BYTES].contiguous().view(torch.int64).sum()
    return int(bad), seconds, blocks * rounds - int(arrived)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="messages of each block")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        raise SystemExit("needs two GPUs that can access each other")
    for a, b in ((0, 1), (1, 0)):  # torch opens peer access with the first copy
        torch.ones(1, device=f"cuda:{a}").to(f"cuda:{b}")
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    for row_bytes in (8192, 65536):
        for way, name in enumerate(WAYS):
            rounds = options.rounds * 8192 // row_bytes
            bad, seconds, lost = violations(way, blocks, rounds, row_bytes)
            print(
                f"{row_bytes:6} B rows, {name:24} {blocks * rounds:>10,} messages in {seconds:5.1f} s: "
                f"{bad:,} of {blocks * rounds * row_bytes // 16:,} vectors too old, {lost} lost",
                flush=True,
            )


if __name__ == "__main__":
    main()
