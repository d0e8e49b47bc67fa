// Push: each token's row once to every rank that needs it, this one included, as it is or as e4m3 with scales.
//
// With FP8, each group of 128 columns has a float32 scale and its elements are sent as e4m3(x * inverse), rounded to
// nearest even: FP8 1: scale = amax / 448, inverse = 448 / amax; FP8 2: scale = the power of two at or above that,
// inverse = 1 / scale. amax is the largest magnitude of the group, at least 2^-110 so that no scale is 0. A NaN
// stays a NaN, alone; an infinity makes NaN of its group. `exchange/fp8_rows.py` is the same in torch, bit for bit.
// Rows that are quantised already are sent as they are, with their scales.
//
// Example, FP8 2: the group [3, -448, 0...] has amax 448, scale 1 and bytes 0x44, 0xfe, 0.

// The ranks that compute something for token t. Every lane of a warp calls and gets the same.
__device__ __forceinline__ u32 ranks_of_token(const Params& p, u32 t) {
  u32 mask = 0;
  for (u32 k = threadIdx.x % 32; k < TOP_K; k += 32) {
    i64 e = ((const i64*)p.ids)[(u64)t * TOP_K + k];
    if ((u64)e < EXPERTS) mask |= 1u << ((const u32*)p.rank_E)[e];
  }
  return __reduce_or_sync(ALL_LANES, mask);
}

// Call `store(heap)` for every rank in `mask`. Every rank begins with its neighbour, so that not all write to one.
template <typename Store>
__device__ __forceinline__ void to_ranks(const Params& p, u32 mask, Store store) {
#pragma unroll
  for (u32 i = 1; i <= RANKS; ++i) {
    u32 r = (p.rank + i) % RANKS;
    if (mask >> r & 1) store(p.peer[r]);
  }
}

// A warp's share of a row: vectors first..end of token t, which is the `place`-th row of every heap.
struct Piece {
  u32 t, first, end;
  u64 place;
};

// Visit 128 vectors at a time: `send(v, mask, four vectors)` for each lane's v, v + 32, v + 64, v + 96. The first loads
// are under way before it is known who needs the row: nearly every row is needed, and a small step is all latency.
template <typename Send>
__device__ __forceinline__ u32 push_piece(const Params& p, const Piece& piece, u64 from, Send send) {
  u32 mask = ALL_LANES;
  for (u32 base = piece.first; base < piece.end; base += 32 * 4) {
    u32 v = base + threadIdx.x % 32;
    Vec a[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = load_input(from + 16ull * min(v + 32 * j, piece.end - 1));
    if (base == piece.first) {
      mask = ranks_of_token(p, piece.t);
      if (v == 0) ((u32*)p.mask_T)[piece.t] = mask;
      if (!mask) return 0;
    }
    send(v, mask, a);
  }
  return mask;
}

// Rows of `SENT_VECS` as they are.
__device__ __forceinline__ u32 push_plain(const Params& p, const Piece& piece) {
  u64 to = p.at_rows + piece.place * SENT_BYTES;
  return push_piece(p, piece, p.x + piece.t * SENT_BYTES, [&](u32 v, u32 mask, const Vec* a) {
    to_ranks(p, mask, [&](u64 heap) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (v + 32 * j < piece.end) store_row(heap + to + 16ull * (v + 32 * j), a[j]);
    });
  });
}

#if FP8
// Two floats to two bytes of e4m3, the first in the low byte.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  u16 bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(high), "f"(low));
  return bytes;
#else
  u32 bytes = 0;
  for (int i = 0; i < 2; ++i) {
    u32 word = __float_as_uint(i ? high : low), magnitude = word & 0x7fffffffu, byte;
    if (magnitude > 0x7f800000u)
      byte = 0x7f;
    else if (magnitude < 0x3c800000u)  // below 2^-6: multiples of 2^-9
      byte = word >> 24 & 0x80 | __float2uint_rn(__uint_as_float(magnitude) * 512.0f);
    else
      byte = word >> 24 & 0x80 | min((magnitude + 0x7ffff + (magnitude >> 20 & 1)) - 0x3c000000u >> 20, 0x7eu);
    bytes |= byte << 8 * i;
  }
  return bytes;
#endif
}

// The largest magnitude among the 16 lanes that hold a group.
__device__ __forceinline__ float group_amax(const Vec& a) {
  float amax = 0;
#pragma unroll
  for (int i = 0; i < LANES_OF_VEC; ++i) amax = fmaxf(amax, fabsf(element(a, i)));
#pragma unroll
  for (int d = 8; d; d /= 2) amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, d));
  return fmaxf(amax, 0x1p-110f);
}

// Eight elements to eight bytes; `scale` is the group's.
__device__ __forceinline__ void quantise(const Vec& a, u32* bytes, float* scale) {
  float amax = group_amax(a);
#if FP8 == 1
  *scale = __fdiv_rn(amax, 448.0f);
  float inverse = __fdiv_rn(448.0f, amax);
#else
  *scale = __uint_as_float((__float_as_uint(__fdiv_rn(amax, 448.0f)) + 0x7fffffu) & 0x7f800000u);
  float inverse = __fdiv_rn(1.0f, *scale);
#endif
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float q[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) q[j] = __fmul_rn(element(a, 4 * i + j), inverse);
    bytes[i] = e4m3_pair(q[0], q[1]) | e4m3_pair(q[2], q[3]) << 16;
  }
}

// A lane has half a vector of bytes from each of its four loads. Neighbours swap, so that even lanes hold whole vectors
// of the first (third) load and odd lanes of the second (fourth): every store writes 256 bytes in a row, twice.
__device__ __forceinline__ u32 push_quantised(const Params& p, const Piece& piece) {
  u64 to = p.at_rows + piece.place * SENT_BYTES, scales_to = p.at_scales + piece.place * SCALE_BYTES;
  u32 lane = threadIdx.x % 32;
  return push_piece(p, piece, p.x + piece.t * ROW_BYTES, [&](u32 v, u32 mask, const Vec* a) {
    bool odd = lane % 2;
    u32 bytes[4][2];
    float scale[4], scale_of_lane = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      quantise(a[j], bytes[j], &scale[j]);
      if (v + 32 * j >= piece.end) bytes[j][0] = bytes[j][1] = 0;
      // Lane l < 8 sends the scale of the l-th group: lanes hold their own half's, the other half's is 16 lanes away.
      float other = __shfl_xor_sync(ALL_LANES, scale[j], 16);
      if (lane / 2 == j) scale_of_lane = odd ? other : scale[j];
    }
    Vec whole[2];
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 kept = odd ? bytes[2 * j + 1][i] : bytes[2 * j][i];
        u32 got = __shfl_xor_sync(ALL_LANES, odd ? bytes[2 * j][i] : bytes[2 * j + 1][i], 1);
        whole[j].w[i] = odd ? got : kept;
        whole[j].w[2 + i] = odd ? kept : got;
      }
    u32 first = odd ? v + 31 : v;  // of the two vectors that this lane now holds
    to_ranks(p, mask, [&](u64 heap) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (first + 64 * j < piece.end) store_row(heap + to + 8ull * (first + 64 * j), whole[j]);
      if (lane < 8 && v - lane + 16 * lane < piece.end)
        *(float*)(heap + scales_to + 4ull * ((v - lane) / 16 + lane)) = scale_of_lane;
    });
  });
}

__device__ __forceinline__ void push_scales(const Params& p, const Piece& piece, u32 mask) {
  const float* from = (const float*)p.scales + (u64)piece.t * GROUPS;
  for (u32 g = threadIdx.x % 32; g < GROUPS; g += 32) {
    float scale = from[g];
    to_ranks(p, mask, [&](u64 heap) { *(float*)(heap + p.at_scales + piece.place * SCALE_BYTES + 4ull * g) = scale; });
  }
}
#endif

// Warps take pieces of rows in turn.
__device__ void push_rows(const Params& p, u32 tokens, u32 worker, u32 workers) {
  bool quantises = FP8 && !p.scales;
  u32 vecs = quantises ? VECS : SENT_VECS, pieces = pieces_of_row(tokens, workers, VECS);
  u32 width = (vecs + pieces - 1) / pieces;
  if (quantises) width = (width + 15) / 16 * 16;  // whole groups
  for (u32 item = worker; item < tokens * pieces; item += workers) {
    u32 t = item / pieces, first = item % pieces * width;
    if (first >= vecs) continue;
    Piece piece = {t, first, min(first + width, vecs), p.rank * p.max_tokens + t};
#if FP8
    if (quantises) {
      push_quantised(p, piece);
      continue;
    }
    u32 mask = push_plain(p, piece);
    if (first == 0) push_scales(p, piece, mask);
#else
    push_plain(p, piece);
#endif
  }
}
