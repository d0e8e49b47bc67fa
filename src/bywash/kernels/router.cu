// Router: logits = x W^T, the top-k of each token, and the softmax of those, in one kernel for any number of tokens.
//
// A block takes 16 tokens and all E experts; its warps split K (the hidden size) evenly and their sums are added in warp
// order. Both are fixed by the shape alone, so a token's result has the same bits whatever tokens stand beside it: a step
// routes alike whole or in micro-batches. Equal logits go to the lower expert id. A token with a logit that is not finite
// gets NOT_FINITE for every id, which every exchange refuses, rather than a choice among what is left.
//
// `router.py` defines EXPERTS, TOP_K, HIDDEN (a multiple of 16) and NOT_FINITE.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef long long i64;
#define WARPS 8
#define TOKENS 16
#define ALL_LANES 0xffffffffu
#define COLUMNS ((EXPERTS + 7) / 8 * 8)
#define STEPS (HIDDEN / 16)

// d += a b, 16 x 8 with K = 16, bfloat16 to float32.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 load(u64 address) { return *(const u32*)address; }

// This warp's share of K for 16 tokens from `first` on; rows past the last repeat it.
__device__ void warp_logits(u64 x, u64 weights, u32 first, u32 tokens, float (&d)[COLUMNS / 8][4]) {
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;
  u64 row0 = x + 2ull * min(first + group, tokens - 1) * HIDDEN, row1 = x + 2ull * min(first + group + 8, tokens - 1) * HIDDEN;
  u32 begin = STEPS * warp / WARPS, end = STEPS * (warp + 1) / WARPS;
#pragma unroll 2
  for (u32 step = begin; step < end; ++step) {
    u32 k = step * 16 + pair;
    u32 a[4] = {load(row0 + 2 * k), load(row1 + 2 * k), load(row0 + 2 * (k + 8)), load(row1 + 2 * (k + 8))};
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      u64 column = weights + 2ull * min(n * 8 + group, EXPERTS - 1) * HIDDEN;
      multiply(d[n], a, load(column + 2 * k), load(column + 2 * (k + 8)));
    }
  }
}

// One warp: whether all of a token's logits are numbers.
__device__ __forceinline__ bool finite(const float* logits_E) {
  bool good = true;
  for (u32 e = threadIdx.x % 32; e < EXPERTS; e += 32) good &= fabsf(logits_E[e]) < 1e30f;  // false for NaN
  return __all_sync(ALL_LANES, good);
}

// One warp: the best TOP_K of a token's logits, best first, and the softmax over them.
__device__ void choose(float* logits_E, u64 ids, u64 weights_K) {
  u32 lane = threadIdx.x % 32;
  if (!finite(logits_E)) {
    for (u32 k = lane; k < TOP_K; k += 32) ((i64*)ids)[k] = NOT_FINITE, ((float*)weights_K)[k] = 0;
    return;
  }
  float best_here[TOP_K], top = 0, total = 0;
#pragma unroll
  for (int k = 0; k < TOP_K; ++k) {
    float best = -1e30f;
    u32 at = EXPERTS;
    for (u32 e = lane; e < EXPERTS; e += 32)
      if (logits_E[e] > best) best = logits_E[e], at = e;
#pragma unroll
    for (u32 d = 16; d; d /= 2) {
      float other = __shfl_xor_sync(ALL_LANES, best, d);
      u32 where = __shfl_xor_sync(ALL_LANES, at, d);
      if (other > best || (other == best && where < at)) best = other, at = where;
    }
    if (k == 0) top = best;
    best_here[k] = __expf(best - top);
    total += best_here[k];
    if (lane == 0) {
      ((u64*)ids)[k] = at;
      logits_E[at] = -1e30f;
    }
    __syncwarp();
  }
#pragma unroll
  for (int k = 0; k < TOP_K; ++k)
    if (lane == 0) ((float*)weights_K)[k] = best_here[k] / total;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) route(u64 x, u64 weights, u64 ids, u64 weights_TK, u64 tokens) {
  __shared__ float logits[TOKENS][COLUMNS + 1];
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TOKENS;
  float d[COLUMNS / 8][4] = {};
  warp_logits(x, weights, first, (u32)tokens, d);
  for (u32 turn = 0; turn < WARPS; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = logits[lane / 4 + i / 2 * 8][n * 8 + lane % 4 * 2 + i % 2];
          sum = turn ? sum + d[n][i] : d[n][i];
        }
    }
    __syncthreads();
  }
  for (u32 t = warp; t < TOKENS; t += WARPS)
    if (first + t < tokens)
      choose(logits[t], ids + 8ull * (first + t) * TOP_K, weights_TK + 4ull * (first + t) * TOP_K);
}
