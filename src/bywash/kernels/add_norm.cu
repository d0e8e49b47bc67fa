// Residual and norm in one pass over the rows: x += a + b, then h = x / rms(x) * weight, all bfloat16, sums in float32.
//
// `add_norm.py` defines HIDDEN (a multiple of 8) and calls it. One block for each row; nothing depends on other rows.

typedef unsigned long long u64;
typedef unsigned int u32;

#define THREADS 256
#define WARPS (THREADS / 32)
#define VECS (HIDDEN / 8)
#define EACH ((VECS + THREADS - 1) / THREADS)  // vectors of a thread

struct __align__(16) Vec {
  u32 w[4];
};

__device__ __forceinline__ Vec load(u64 row, u32 v) { return *(const Vec*)(row + 16ull * v); }

__device__ __forceinline__ float element(const Vec& v, int i) {
  return __uint_as_float(i % 2 ? v.w[i / 2] & 0xffff0000u : v.w[i / 2] << 16);
}

__device__ __forceinline__ Vec rounded(const float* f) {
  Vec v;
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
  return v;
}

__device__ float block_sum(float value) {
  __shared__ float sum_W[WARPS];
#pragma unroll
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) sum_W[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += sum_W[w];
  return total;
}

// Addresses; a, b, tokens, and h with its weight may each be 0. `h` may not lie where x, a or b do. Nothing is added to
// rows from *tokens on, where a and b may hold anything.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_norm(u64 x, u64 a, u64 b, u64 tokens, u64 weight, u64 h, float epsilon) {
  u64 at = (u64)blockIdx.x * VECS * 16;
  if (tokens && (int)blockIdx.x >= *(const int*)tokens) a = b = 0;
  Vec kept[EACH];
  float square = 0;
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    u32 v = threadIdx.x + e * THREADS;
    if (v >= VECS) continue;
    Vec vx = load(x + at, v), va = {}, vb = {};
    if (a) va = load(a + at, v);
    if (b) vb = load(b + at, v);
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = element(vx, i) + (element(va, i) + element(vb, i));
    kept[e] = rounded(f);
    if (a || b) *(Vec*)(x + at + 16ull * v) = kept[e];
#pragma unroll
    for (int i = 0; i < 8; ++i) square += element(kept[e], i) * element(kept[e], i);
  }
  if (!h) return;
  float scale = rsqrtf(block_sum(square) / HIDDEN + epsilon);
#pragma unroll
  for (int e = 0; e < EACH; ++e) {
    u32 v = threadIdx.x + e * THREADS;
    if (v >= VECS) continue;
    Vec w = load(weight, v);
    float f[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = element(kept[e], i) * scale * element(w, i);
    *(Vec*)(h + at + 16ull * v) = rounded(f);
  }
}
