// Router: logits = x W^T, the top-k of each token, and the softmax of those, in one kernel for any number of tokens.
//
// A block takes TOKENS tokens and all E experts; its warps split K (the hidden size) evenly and their sums are added in
// warp order. All of it is fixed by the shape alone, so a token's result has the same bits whatever tokens stand beside
// it: a step routes alike whole or in micro-batches. Equal logits go to the lower expert id. A token with a logit that is
// not finite gets NOT_FINITE for every id, which every exchange refuses, rather than a choice among what is left.
//
// Which of its K values a thread multiplies when does not matter as long as x and W agree. So a thread takes 8 neighbours
// of a row, one load of 16 bytes, where the instruction's own order would need four loads of 4.
//
// `router.py` defines EXPERTS, TOP_K, HIDDEN (a multiple of 8), NOT_FINITE, WARPS, TOKENS (a multiple
// of 16) and UNROLL.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef long long i64;
#define ALL_LANES 0xffffffffu
#define COLUMNS ((EXPERTS + 7) / 8 * 8)
#define TILES (TOKENS / 16)
#define STEPS ((HIDDEN + 31) / 32)

struct Eight {
  u32 w[4];
};

// d += a b, 16 x 8 with K = 16, bfloat16 to float32.
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Eight values from k on; past the end of a row zeros.
__device__ __forceinline__ Eight load(u64 row, u32 k) {
  Eight v = {};
  if (HIDDEN % 32 == 0 || k < HIDDEN)
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(row + 2ull * k));
  return v;
}

// This warp's share of K for TOKENS tokens from `first` on; rows past the last repeat it.
__device__ void warp_logits(u64 x, u64 weights, u32 first, u32 tokens, float (&d)[TILES][COLUMNS / 8][4]) {
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, eighth = lane % 4 * 8;
  u64 row[2 * TILES];
#pragma unroll
  for (int i = 0; i < 2 * TILES; ++i) row[i] = x + 2ull * min(first + group + 8 * i, tokens - 1) * HIDDEN;
  u32 begin = STEPS * warp / WARPS, end = STEPS * (warp + 1) / WARPS;
#pragma unroll UNROLL
  for (u32 step = begin; step < end; ++step) {
    u32 k = step * 32 + eighth;
    Eight a[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) a[i] = load(row[i], k);
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; ++n) {
      Eight b = load(weights + 2ull * min(n * 8 + group, EXPERTS - 1) * HIDDEN, k);
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int h = 0; h < 4; h += 2)
          multiply(d[i][n], a[2 * i].w[h], a[2 * i + 1].w[h], a[2 * i].w[h + 1], a[2 * i + 1].w[h + 1], b.w[h],
                   b.w[h + 1]);
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
  float d[TILES][COLUMNS / 8][4] = {};
  warp_logits(x, weights, first, (u32)tokens, d);
  for (u32 turn = 0; turn < WARPS; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int j = 0; j < TILES * (COLUMNS / 8) * 4; ++j) {
        int i = j % 4, n = j / 4 % (COLUMNS / 8), tile = j / 4 / (COLUMNS / 8);
        float& sum = logits[tile * 16 + lane / 4 + i / 2 * 8][n * 8 + lane % 4 * 2 + i % 2];
        sum = turn ? sum + d[tile][n][i] : d[tile][n][i];
      }
    }
    __syncthreads();
  }
  for (u32 t = warp; t < TOKENS; t += WARPS)
    if (first + t < tokens)
      choose(logits[t], ids + 8ull * (first + t) * TOP_K, weights_TK + 4ull * (first + t) * TOP_K);
}
