// What an engine's rows need before and after they travel: packed with what goes along, taken apart again, outputs put
// beside weights that travel back. Each kernel is one launch for what would be a dozen of torch's operations; how many
// rows are real may be known on the device only. Pure copies and integers but for weights, which are cut and added as
// `deepep/weights.py` does it. Knows nothing of ranks' memory.
//
// THREADS of a block is given. A packed row: values (whole words), scales, source, ids, weights; `exchange/payload.py` is the same in torch.
//
// Names: T rows to send, N rows received, K experts per token, J ranks of a token, R ranks, L experts of this rank,
// D values of a row, W columns of a carried output row. One block for a row, unless said otherwise.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define ALL_LANES 0xffffffffu
#define HELD 2048   // experts whose counts a block holds in shared memory
#define PIECES 3    // of a weight, see deepep/weights.py

// Every field is 8 bytes; `rows.py` reads the names from here. Addresses, unless another type is named; 0 for none.
struct Params {
  u64 rows;          // number: T or N, rows that there is room for
  u64 from_R;        // int32, with stride `from_stride`: rows that came from each rank; only so many are real
  u64 from_stride;   // number
  u64 ranks;         // number: R
  u64 top_k;         // number: K
  u64 top_ranks;     // number: J
  u64 packed;        // packed rows
  u64 packed_bytes;  // number: from one to the next
  u64 at_N;          // int32 [N]: which packed row each one is
  u64 x;             // rows as they are, contiguous
  u64 value_bytes;   // number: of a row
  u64 scales;        // 4-byte words
  u64 scale_count;   // number: of a row
  u64 scale_row;     // number: words from one row's to the next row's
  u64 scale_column;  // number: words from one scale of a row to the next
  u64 source;        // number: of the first row to send
  u64 ids;           // integers of `id_bytes` [T or N, K]
  u64 id_bytes;      // number: 4 or 8
  u64 weights;       // float [T or N, K]
  u64 ranks_TJ;      // int64 [T, J], out: the ranks of each token, ascending, -1 for none
  u64 owner_E;       // int64 [experts_all], the rank of each expert; without it rank r owns the r-th part
  u64 experts_all;   // number
  u64 first_expert;  // number: ids are counted from it
  u64 experts;       // number: L; ids past it become -1
  u64 metadata;      // int32 [N, 2 + K], out
  u64 summary;       // int32: rows up to each rank [R], rows of each expert [L], those aligned and summed [L], 1 word
  u64 alignment;     // number
  u64 stats;         // int32 [L], added to
  u64 is_float;      // number: columns are float32, else 2 bytes wide and, where weights travel, bfloat16
  u64 columns;       // number: W
};

struct Vec {
  u32 w[4];
};

// Both rows stand at multiples of what they are moved by. The whole block calls.
__device__ __forceinline__ void copy_row(u64 to, u64 from, u64 bytes) {
  u64 all = to | from | bytes;
  if (all % 16 == 0) {
    u32 vecs = bytes / 16;
    for (u32 v = threadIdx.x; v < vecs; v += 2 * THREADS) {
      Vec first = ((const Vec*)from)[v], second = ((const Vec*)from)[min(v + THREADS, vecs - 1)];
      ((Vec*)to)[v] = first;
      if (v + THREADS < vecs) ((Vec*)to)[v + THREADS] = second;
    }
  } else if (all % 4 == 0) {
    for (u32 i = threadIdx.x; i < bytes / 4; i += THREADS) ((u32*)to)[i] = ((const u32*)from)[i];
  } else {
    for (u32 i = threadIdx.x; i < bytes; i += THREADS) ((unsigned char*)to)[i] = ((const unsigned char*)from)[i];
  }
}

__device__ __forceinline__ void clear_row(u64 to, u64 bytes) {
  if ((to | bytes) % 16 == 0)
    for (u32 v = threadIdx.x; v < bytes / 16; v += THREADS) ((Vec*)to)[v] = Vec{};
  else
    for (u32 i = threadIdx.x; i < bytes; i += THREADS) ((unsigned char*)to)[i] = 0;
}

// Where the parts of a packed row begin.
struct Places {
  u64 scales, source, ids, weights;
};

__device__ __forceinline__ Places places_of(const Params& p) {
  u64 scales = (p.value_bytes + 3) / 4 * 4, source = scales + 4 * p.scale_count;
  return {scales, source, source + 4, source + 4 + 4 * p.top_k};
}

__device__ __forceinline__ i64 id_at(const Params& p, u64 i) {
  return p.id_bytes == 8 ? ((const i64*)p.ids)[i] : ((const int*)p.ids)[i];
}

__device__ __forceinline__ void set_id(const Params& p, u64 i, i64 id) {
  if (p.id_bytes == 8)
    ((i64*)p.ids)[i] = id;
  else
    ((int*)p.ids)[i] = (int)id;
}

// Rows that are real, of those there is room for.
__device__ __forceinline__ u32 real_rows(const Params& p) {
  if (!p.from_R) return p.rows;
  u64 total = 0;
  for (u32 s = 0; s < p.ranks; ++s) total += ((const u32*)p.from_R)[s * p.from_stride];
  return min(total, p.rows);
}

// The ranks of token t, by one warp. An id that is no expert gives a rank that does not exist, for the exchange to name.
__device__ void find_ranks(const Params& p, u32 t) {
  u32 lane = threadIdx.x % 32, mask = 0;
  i64 wrong = -1;
  for (u32 k = lane; k < p.top_k; k += 32) {
    i64 e = id_at(p, (u64)t * p.top_k + k), r = -1;
    if (e >= 0 && p.owner_E) r = e < (i64)p.experts_all ? ((const i64*)p.owner_E)[e] : (i64)p.ranks;
    if (e >= 0 && !p.owner_E) r = e / (i64)p.experts;
    if (r >= (i64)p.ranks)
      wrong = r;
    else if (r >= 0)
      mask |= 1u << r;
  }
  mask = __reduce_or_sync(ALL_LANES, mask);
  u32 lanes = __ballot_sync(ALL_LANES, wrong >= 0);
  wrong = __shfl_sync(ALL_LANES, wrong, lanes ? __ffs(lanes) - 1 : 0);
  if (lane >= p.top_ranks) return;
  for (u32 j = 0; j < lane; ++j) mask &= mask - 1;
  i64 rank = mask ? __ffs(mask) - 1 : -1;
  ((i64*)p.ranks_TJ)[t * p.top_ranks + lane] = lane == 0 && wrong >= 0 ? wrong : rank;
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_rows(const __grid_constant__ Params p) {
  Places at = places_of(p);
  if (p.summary && blockIdx.x == 0)
    for (u32 i = threadIdx.x; i <= p.ranks + 2 * p.experts; i += THREADS) ((u32*)p.summary)[i] = 0;
  for (u32 t = blockIdx.x; t < p.rows; t += gridDim.x) {
    u64 to = p.packed + t * p.packed_bytes;
    if (threadIdx.x < 32) find_ranks(p, t);
    copy_row(to, p.x + t * p.value_bytes, p.value_bytes);
    for (u32 g = threadIdx.x; g < p.scale_count; g += THREADS)
      ((u32*)(to + at.scales))[g] = ((const u32*)p.scales)[t * p.scale_row + g * p.scale_column];
    if (threadIdx.x == 0) *(u32*)(to + at.source) = (u32)p.source + t;
    for (u32 k = threadIdx.x; k < p.top_k; k += THREADS) {
      u64 i = (u64)t * p.top_k + k;
      ((int*)(to + at.ids))[k] = (int)id_at(p, i);
      if (p.weights) ((u32*)(to + at.weights))[k] = ((const u32*)p.weights)[i];
    }
  }
}

// One block, the last: rows of each expert to sums of them, rounded up to the alignment.
__device__ void sum_experts(const Params& p) {
  __shared__ u32 sums[THREADS];
  volatile u32* counts = (u32*)p.summary + p.ranks;
  u32 tid = threadIdx.x, local = p.experts, each = (local + THREADS - 1) / THREADS, mine = 0, aligned = p.alignment;
  u32 first = min(tid * each, local), last = min(first + each, local);
  for (u32 l = first; l < last; ++l) mine += (counts[l] + aligned - 1) / aligned * aligned;
  sums[tid] = mine;
  for (u32 step = 1; step < THREADS; step *= 2) {
    __syncthreads();
    u32 before = tid >= step ? sums[tid - step] : 0;
    __syncthreads();
    sums[tid] += before;
  }
  u32 run = sums[tid] - mine;
  for (u32 l = first; l < last; ++l) {
    u32 count = counts[l];
    counts[local + l] = run += (count + aligned - 1) / aligned * aligned;
    if (p.stats) ((u32*)p.stats)[l] += count;
  }
}

// Ids, metadata and sums of what arrived; a thread for each (row, k).
extern "C" __global__ void __launch_bounds__(THREADS) read_rows(const __grid_constant__ Params p) {
  __shared__ u32 held[HELD];
  __shared__ u32 is_last;
  Places at = places_of(p);
  u32 tid = threadIdx.x, real = real_rows(p), local = p.experts;
  u32* total_L = (u32*)p.summary + p.ranks;
  u32* counts_L = local <= HELD ? held : total_L;
  if (local <= HELD)
    for (u32 l = tid; l < local; l += THREADS) held[l] = 0;
  __syncthreads();
  u64 step = (u64)gridDim.x * THREADS;
  for (u64 i = (u64)blockIdx.x * THREADS + tid; i < p.rows * p.top_k; i += step) {
    u32 n = i / p.top_k, k = i % p.top_k;
    u64 from = n < real ? p.packed + ((const u32*)p.at_N)[n] * p.packed_bytes : 0;
    i64 id = from ? ((const int*)(from + at.ids))[k] - (i64)p.first_expert : -1;
    if (id < 0 || id >= (i64)p.experts) id = -1;
    set_id(p, i, id);
    if (p.summary && id >= 0) atomicAdd(&counts_L[id], 1u);
    if (!p.metadata) continue;
    int* row = (int*)p.metadata + n * (2 + p.top_k);
    row[2 + k] = -1;
    if (k == 0) {
      row[0] = from ? *(const int*)(from + at.source) : -1;
      row[1] = n;
    }
  }
  if (!p.summary) return;
  __syncthreads();
  if (local <= HELD)
    for (u32 l = tid; l < local; l += THREADS)
      if (held[l]) atomicAdd(&total_L[l], held[l]);
  if (blockIdx.x == 0 && tid == 0)
    for (u32 s = 0, upto = 0; s < p.ranks; ++s)
      ((u32*)p.summary)[s] = upto += ((const u32*)p.from_R)[s * p.from_stride];
  __threadfence();
  __syncthreads();
  if (tid == 0) is_last = atomicInc(total_L + 2 * local, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (is_last) sum_experts(p);
}

// Values, scales and weights of what arrived, zeros past the real rows; weights of ids below 0, if given, become 0.
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(const __grid_constant__ Params p) {
  Places at = places_of(p);
  u32 real = real_rows(p);
  for (u32 n = blockIdx.x; n < p.rows; n += gridDim.x) {
    bool here = n < real;
    u64 from = here ? p.packed + ((const u32*)p.at_N)[n] * p.packed_bytes : 0, to = p.x + n * p.value_bytes;
    if (here)
      copy_row(to, from, p.value_bytes);
    else
      clear_row(to, p.value_bytes);
    for (u32 g = threadIdx.x; g < p.scale_count; g += THREADS)
      ((u32*)p.scales)[n * p.scale_row + g * p.scale_column] = here ? ((const u32*)(from + at.scales))[g] : 0;
    if (p.weights)
      for (u32 k = threadIdx.x; k < p.top_k; k += THREADS) {
        u64 i = (u64)n * p.top_k + k;
        bool kept = here && (!p.ids || id_at(p, i) >= 0);
        ((u32*)p.weights)[i] = kept ? ((const u32*)(from + at.weights))[k] : 0;
      }
  }
}

__device__ __forceinline__ u32 nearest_bfloat(float f) {  // to nearest, ties to even
  u32 word = __float_as_uint(f);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return word + 0x7fffu + (word >> 16 & 1) >> 16;
}

// What is left of a weight's `piece`-th part, as bits of the columns' type; all of it in the first part if that is float.
__device__ __forceinline__ u32 weight_piece(const Params& p, float rest, u32 piece) {
  if (p.is_float) return piece ? 0 : __float_as_uint(rest);
  u32 bits = nearest_bfloat(rest);
  for (u32 i = 0; i < piece; ++i) {
    rest -= __uint_as_float(bits << 16);
    bits = nearest_bfloat(rest);
  }
  return bits;
}

// Outputs [N, D] to rows as they are carried [N, W]: weights in pieces behind the values, then zeros.
extern "C" __global__ void __launch_bounds__(THREADS) pack_outputs(const __grid_constant__ Params p) {
  u32 real = real_rows(p), size = p.is_float ? 4 : 2, first = p.value_bytes / size;
  for (u32 n = blockIdx.x; n < real; n += gridDim.x) {
    u64 to = p.packed + n * p.packed_bytes;
    copy_row(to, p.x + n * p.value_bytes, p.value_bytes);
    for (u32 c = first + threadIdx.x; c < p.columns; c += THREADS) {
      u32 j = c - first, bits = 0;
      if (p.weights && j < PIECES * p.top_k) {
        u64 i = (u64)n * p.top_k + j % p.top_k;
        if (id_at(p, i) >= 0) bits = weight_piece(p, ((const float*)p.weights)[i], j / p.top_k);
      }
      if (p.is_float)
        ((u32*)to)[c] = bits;
      else
        ((u16*)to)[c] = (u16)bits;
    }
  }
}

// Sums [T, W] as they came back to [T, D], and weights from their pieces.
extern "C" __global__ void __launch_bounds__(THREADS) unpack_outputs(const __grid_constant__ Params p) {
  for (u32 t = blockIdx.x; t < p.rows; t += gridDim.x) {
    u64 from = p.packed + t * p.packed_bytes, pieces = from + p.value_bytes;
    copy_row(p.x + t * p.value_bytes, from, p.value_bytes);
    if (!p.weights) continue;
    for (u32 k = threadIdx.x; k < p.top_k; k += THREADS) {
      float part[PIECES];
      for (u32 i = 0; i < PIECES; ++i) {
        u32 at = i * p.top_k + k;
        part[i] = p.is_float ? ((const float*)pieces)[at] : __uint_as_float((u32)((const u16*)pieces)[at] << 16);
      }
      ((float*)p.weights)[(u64)t * p.top_k + k] = part[0] + part[1] + part[2];
    }
  }
}
