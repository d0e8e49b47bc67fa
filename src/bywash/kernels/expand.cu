// What a grouped product that cannot gather needs around it: the rows of every pair side by side before, SwiGLU between
// its two halves. Both stop at the last pair, which only the device knows: torch's own operations would go on to the
// capacity, twice the work where routing is uniform.
//
// Names: M pairs, P places, VECS_D and VECS_F 16-byte vectors of a row of D hidden and of F intermediate elements.
// DTYPE 1 is bfloat16, 2 is float16.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

#define THREADS 256
#define UNROLL 4

struct __align__(16) Vec {
  u32 w[4];
};

__device__ __forceinline__ float low(u32 word) {
#if DTYPE == 1
  return __uint_as_float(word << 16);
#else
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)word));
  return f;
#endif
}

__device__ __forceinline__ float high(u32 word) {
#if DTYPE == 1
  return __uint_as_float(word & 0xffff0000u);
#else
  return low(word >> 16);
#endif
}

__device__ __forceinline__ u32 rounded(float first, float second) {
  u32 word;
#if DTYPE == 1
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#endif
  return word;
}

__device__ __forceinline__ float swiglu(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// out[m] = rows[index[m]]: one warp per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const Vec* rows, const u32* index, const u32* pairs, Vec* out, u32 vecs) {
  u32 warps = gridDim.x * (THREADS / 32), lane = threadIdx.x % 32, count = *pairs;
  for (u32 m = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; m < count; m += warps) {
    const Vec* from = rows + (u64)index[m] * vecs;
    Vec* to = out + (u64)m * vecs;
    for (u32 v = lane; v - lane < vecs; v += 32 * UNROLL) {
      Vec held[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) held[u] = from[min(v + 32 * u, vecs - 1)];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u)
        if (v + 32 * u < vecs) to[v + 32 * u] = held[u];
    }
  }
}

// h[m] = silu(gate_up[m, first half]) * gate_up[m, second half], in float32, rounded once.
extern "C" __global__ void __launch_bounds__(THREADS)
    multiply_gate(const Vec* gate_up, const u32* pairs, Vec* h, u32 vecs) {
  u64 count = (u64)*pairs * vecs, step = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
    u64 at = i / vecs * 2 * vecs + i % vecs;
    Vec gate = gate_up[at], up = gate_up[at + vecs], out;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      out.w[j] = rounded(swiglu(low(gate.w[j]), low(up.w[j])), swiglu(high(gate.w[j]), high(up.w[j])));
    h[i] = out;
  }
}
