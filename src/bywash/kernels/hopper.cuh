// What Hopper (sm_90a) has beyond older GPUs, as thin functions: barriers in shared memory, tensor memory access (TMA),
// warpgroup products (wgmma), clusters. No headers are included, so NVRTC needs no CUDA toolkit.
//
// Knows nothing of experts. Addresses in shared memory are 32-bit (`u32`), in global memory 64-bit.
// Facts are from the PTX ISA 8.x: sections "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async".

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

// 128 bytes made by cuTensorMapEncodeTiled, passed as part of a kernel's parameters.
struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address in the shared memory of another block of the cluster.
__device__ __forceinline__ u32 in_block(u32 address, u32 block) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
  return mapped;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void store_in_cluster(u32 mapped, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(mapped), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ u64 load_shared64(u32 address) {
  u64 value;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared64(u32 address, u64 value) {
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

// Some threads of a block: `name` 1 to 15, 0 is __syncthreads.
__device__ __forceinline__ void sync_named(u32 name, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// --- barriers: a phase ends when all arrivals came and all announced bytes were written ---

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// For what another block of the cluster wrote by ordinary stores. Costs an invalidation of L1.
__device__ __forceinline__ void barrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// One arrival that also announces bytes that TMA will write.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// On a barrier of any block of the cluster; `mapped` comes from `in_block`. Says that what wgmma read may be
// overwritten, and no more: a release to the cluster compiles to a fence of the whole device, hundreds of cycles in the
// main loop.
__device__ __forceinline__ void barrier_arrive_remote(u32 mapped) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// The same, after this thread's ordinary stores.
__device__ __forceinline__ void barrier_arrive_cluster(u32 mapped) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// --- between blocks of the grid ---

__device__ __forceinline__ u32 load_acquire(const u32* from) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(u32* to, u32 value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// Returns what was there before.
__device__ __forceinline__ u32 add_acquire_release(u32* to, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}

// --- copies between global and shared memory ---

// 16 bytes; `bytes` 0 writes zeros and reads nothing.
__device__ __forceinline__ void copy_async16(u32 to, u64 from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int left>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
}

// What ordinary writes (and `copy_async16`) left in shared memory, seen by this thread, may then be read by wgmma.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 16 bytes from shared to global memory; if `stream`, they are the first to leave the caches.
template <bool stream>
__device__ __forceinline__ void copy_vec(u64 to, u32 from) {
  u32 w0, w1, w2, w3;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w0), "=r"(w1), "=r"(w2), "=r"(w3)
               : "r"(from)
               : "memory");
  if (stream)
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w0), "r"(w1), "r"(w2), "r"(w3)
                 : "memory");
  else
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w0), "r"(w1), "r"(w2), "r"(w3) : "memory");
}

__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&map) : "memory");
}

// How the L2 cache treats what is loaded: as ever, or as the first to go.
__device__ __forceinline__ u64 policy_evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ u64 policy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A box of a 5-dimensional tensor, to the same place in every block of `mask`, each of whose barriers counts the bytes.
__device__ __forceinline__ void tma_load(u32 to, const TensorMap& map, u32 barrier, u16 mask, u64 policy, int c0,
                                         int c1, int c2, int c3, int c4) {
  if (mask == 1) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
        "%3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"((u64)&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "l"(policy)
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_"
        "hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8, %9;" ::"r"(to),
        "l"((u64)&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "h"(mask), "l"(policy)
        : "memory");
  }
}

// --- wgmma: 128 threads multiply 64 x 16 by 16 x n from shared memory into registers ---
// `Wgmma<n>::run(d, a, b, add)` is generated by `experts.py`, since the instruction names every register.
// Thread t of the warpgroup holds, for row 16 (t / 32) + t % 32 / 4 and columns 8 j + 2 (t % 4) + {0, 1}:
// d[4 j + {0, 1}]; eight rows below: d[4 j + {2, 3}].

template <int n>
struct Wgmma;

// Rows of 64 16-bit values (128 bytes), 16-byte pieces of row r at piece ^ (r % 8): what TMA's 128-byte swizzle writes.
// Groups of eight rows are 1,024 bytes apart, and the start is a multiple of that. The next 16 values of K are 32 bytes
// on, that is +2.
__device__ __forceinline__ u64 wgmma_operand(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int left>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// Keeps the compiler from moving or copying an accumulator across this line.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }

// Two 8 x 8 tiles of 16-bit values, transposed on the way: lane i (0 to 15) gives the address of column i % 8 of tile
// i / 8.
__device__ __forceinline__ void store_transposed(u32 address, u32 tile0, u32 tile1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(tile0), "r"(tile1)
               : "memory");
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <int registers>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
