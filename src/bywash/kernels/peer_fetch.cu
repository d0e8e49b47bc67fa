// Fetch: weights of foreign experts from their homes into this rank's slots, as plans say.
//
// Plans are made on the device, and a copy engine takes its addresses from the host, so blocks copy: each reads a
// peer's memory by 16 bytes a lane, FLIGHT of them at once. Few blocks are enough for the link, the rest of the GPU
// computes meanwhile. A checksum of what came is compared with that which the home made of its own weights: the sum of
// every 32-bit word times the odd number 2 i + 1 for its place i, modulo 2^64, so that blocks may add in any order and
// no change of one word goes unnoticed.

#if REAL_EXPERTS
#define FLIGHT 6

__device__ __forceinline__ u64 sum_of_vec(const Vec& v, u64 word) {
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += (u64)v.w[i] * (2 * (word + i) + 1);
  return sum;
}

// This thread's part of an expert, from place `from` (two weights, one after the other); stored at `to` unless that
// is 0. Returns its part of the checksum. Blocks take pieces of FLIGHT * THREADS vectors in turn.
__device__ __forceinline__ u64 copy_part(u64 from, u64 to, u64 bytes, u64 first_word) {
  u64 sum = 0, vecs = bytes / 16;
  for (u64 base = (u64)blockIdx.x * FLIGHT * THREADS; base < vecs; base += (u64)gridDim.x * FLIGHT * THREADS) {
    u64 at = base + threadIdx.x;
    Vec a[FLIGHT];
#pragma unroll
    for (int j = 0; j < FLIGHT; ++j) a[j] = load_rows(from + 16 * min(at + j * THREADS, vecs - 1));
#pragma unroll
    for (int j = 0; j < FLIGHT; ++j) {
      u64 vec = at + j * THREADS;
      if (vec >= vecs) continue;
      if (to) store_row(to + 16 * vec, a[j]);
      sum += sum_of_vec(a[j], first_word + 4 * vec);
    }
  }
  return sum;
}

__device__ __forceinline__ u64 warp_sum(u64 sum) {
#pragma unroll
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
  return sum;
}

__device__ __forceinline__ u64 copy_expert(const Elastic& layer, u64 gate, u64 down, u64 to_gate, u64 to_down) {
  u64 sum = copy_part(gate, to_gate, layer.gate_bytes, 0);
  return warp_sum(sum + copy_part(down, to_down, layer.down_bytes, layer.gate_bytes / 4));
}

// Checksums of this rank's own experts of a layer, once, when their weights are there. `sums` are 0 before.
extern "C" __global__ void __launch_bounds__(THREADS, 1) elastic_sum(const __grid_constant__ Params p) {
  begin_kernel();
  const Elastic& layer = elastic_of(p);
  u64 own = layer.home[p.rank];
  for (u64 l = 0; l < layer.own_experts; ++l) {
    u64 sum = copy_expert(layer, own + layer.gate_at + l * layer.gate_bytes,
                          own + layer.down_at + l * layer.down_bytes, 0, 0);
    if (threadIdx.x % 32 == 0) atomicAdd((u64*)(own + layer.sums_at) + l, sum);
  }
}

// Where slot s is to be filled from before a step of this layer, -1 for nothing to do.
__device__ __forceinline__ int missing_from(const Params& p, const Elastic& layer, u32 s) {
  int key = ((const int*)layer.keys_RS)[p.rank * GUESTS + s] - (int)layer.first_key;
  bool there = s < (u32)((const int*)layer.usable_R)[p.rank] && key >= 0 && key < REAL_EXPERTS;
  return there ? *(volatile int*)((int*)layer.missing_S + s) : -1;
}

__device__ __forceinline__ u64 place_at_home(const Params& p, const Elastic& layer, u32 s) {
  u32 key = ((const u32*)layer.keys_RS)[p.rank * GUESTS + s];
  return ((const u32*)layer.local_E)[key - (u32)layer.first_key];
}

// Fill the slots of this layer that are not filled yet. Nobody else uses them meanwhile: what was computed from them is
// over. A plan may have been followed by another before its step, so what is missing is kept until it is there.
// Two blocks of a multiprocessor, so that those of dispatch, which all have to be there at once, fit beside these.
extern "C" __global__ void __launch_bounds__(THREADS, 2) elastic_fetch(const __grid_constant__ Params p) {
  begin_kernel();
  if (!alive(p)) return;
  const Elastic& layer = elastic_of(p);
  u64* filling_S = (u64*)layer.filling_S;
  bool any = false;
  for (u32 s = 0; s < GUESTS; ++s) {
    int donor = missing_from(p, layer, s);
    if (donor < 0) continue;
    u64 from = layer.home[donor], local = place_at_home(p, layer, s);
    u64 sum = copy_expert(layer, from + layer.gate_at + local * layer.gate_bytes,
                          from + layer.down_at + local * layer.down_bytes, layer.slots_gate + s * layer.gate_bytes,
                          layer.slots_down + s * layer.down_bytes);
    if (threadIdx.x % 32 == 0) atomicAdd(filling_S + s, sum);
    any = true;
  }
  if (!any) return;
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = last_block((u32*)(filling_S + GUESTS));
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (u32 s = threadIdx.x; s < GUESTS; s += THREADS) {
    int donor = missing_from(p, layer, s);
    if (donor < 0) continue;
    u32 key = ((const u32*)layer.keys_RS)[p.rank * GUESTS + s];
    u64 expected = load_relaxed(layer.home[donor] + layer.sums_at + 8 * place_at_home(p, layer, s));
    if (*(volatile u64*)(filling_S + s) != expected) fail(p, SEND_ROWS, DAMAGED, 1u << donor, pack(key, s));
    filling_S[s] = 0, ((int*)layer.missing_S)[s] = -1;
    atomicAdd((u64*)layer.fetched, 1ull);
    atomicAdd((u64*)layer.fetched + 1, layer.gate_bytes + layer.down_bytes);
  }
}
#endif
