// All-gather / reduce-scatter by copy engine: what is left for kernels. The engine moves every rank's rows, ids and
// weights to every rank, and every rank's partial sums back; kernels raise and await the flags around that, build the
// same index as dispatch does, and add. Compiled behind common.cuh, with its `Params`; what is named at_* there lies at
// the offsets of `allgather.py`, with one flag for each rank.
//
// Names: L experts of this rank, C chunks of CHUNK pairs (place * TOP_K + k, valid or not), W warps of a block.

#define CHUNK 1024  // pairs of one block of count_pairs and place_pairs
#define SCANNED 16  // chunks whose counts a thread of scan_counts loads at once
#define TILE 4       // vectors of a row that a lane loads at once

struct Gather {
  u64 local;       // number: L
  u64 chunks;      // number: C
  u64 counts_CL;   // u32 [C, L]: pairs of each chunk, then where each chunk's begin among the expert's
  u64 partial;     // rows [RANKS, max_tokens, VECS]: sums for other ranks, before they are copied
  u64 at_ids;      // offset of int64 [P, TOP_K]
  u64 at_weights;  // offset of float [P, TOP_K]
};

extern __shared__ u32 counts_WL[];  // pairs of each warp, then the next m of each warp

__device__ __forceinline__ u64 heap(const Params& p) { return p.peer[p.rank]; }

// One block: the rows of this rank are where they belong; say so, with how many are real and how many were copied.
extern "C" __global__ void announce_rows(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  State* state = (State*)p.state;
  u32 epoch = epoch_after(state->rows_epoch), tokens = *(const u32*)p.tokens, r = threadIdx.x;
  if (!alive(p)) return;
  for (u32 i = r; i < RANKS * EXPERTS; i += blockDim.x) ((u32*)p.counts_RE)[i] = 0;
  if (tokens > p.room) {
    if (r == 0) fail(p, SEND_ROWS, TOO_MANY_TOKENS, 1u << p.rank, tokens);
    return;
  }
  if (r < RANKS) {
    store_relaxed(p.peer[r] + p.at_headers + 8 * p.rank, pack(epoch, (u32)p.room));
    store_release(p.peer[r] + p.at_row_flags + 8 * p.rank, pack(epoch, tokens));
  }
  __syncthreads();
  if (r == 0) state->rows_epoch = epoch;
}

// Wait for every rank's rows; its real tokens go to `tokens_R`. False after a failure. Every block calls.
__device__ bool await_rows(const Params& p, u32* tokens_R) {
  u32 epoch = *(volatile u32*)&((State*)p.state)->rows_epoch, r = threadIdx.x;
  if (!alive(p)) return false;
  bool ok = true;
  if (r < RANKS) {
    u64 flag = await(p, RECEIVE_ROWS, p.at_row_flags + 8 * r, epoch, r);
    u32 room = (u32)load_relaxed(heap(p) + p.at_headers + 8 * r);
    ok = flag != 0 && room == (u32)p.room;
    if (flag && !ok) fail(p, RECEIVE_ROWS, MISMATCH, 1u << r, pack(room, (u32)p.room));
    tokens_R[r] = (u32)flag;
    if (blockIdx.x == 0) ((u32*)p.tokens_R)[r] = (u32)flag;
  }
  return !__syncthreads_or(!ok);
}

// The expert of a pair of the whole capacity, -1 where there is none.
__device__ __forceinline__ i64 expert_of(const Params& p, const Gather& g, const u32* tokens_R, u32 at, u32* source) {
  u32 place = at / TOP_K, s = place / (u32)p.max_tokens;
  *source = s;
  if (s >= RANKS || place % (u32)p.max_tokens >= tokens_R[s]) return -1;
  i64 e = (i64)load_relaxed(heap(p) + g.at_ids + 8ull * at);
  if ((u64)e < EXPERTS) return e;
  if (e != -1) fail(p, RECEIVE_ROWS, BAD_EXPERT, 1u << s, (u64)e);
  return -1;
}

// Count the pairs of this block's chunk by warp and local expert, in shared memory.
__device__ void count_chunk(const Params& p, const Gather& g, const u32* tokens_R, bool report) {
  u32 warp = threadIdx.x / 32, first = blockIdx.x * CHUNK + warp * (CHUNK / WARPS), local = (u32)g.local, s;
  for (u32 i = threadIdx.x; i < WARPS * local; i += THREADS) counts_WL[i] = 0;
  __syncthreads();
  for (u32 at = first + threadIdx.x % 32; at < first + CHUNK / WARPS; at += 32) {
    i64 e = expert_of(p, g, tokens_R, at, &s);
    if (e < 0) continue;
    if (report) atomicAdd((u32*)p.counts_RE + s * EXPERTS + e, 1);
    int slot = ((const int*)p.slot_E)[e];
    if (slot >= 0) atomicAdd(&counts_WL[warp * local + slot], 1);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    count_pairs(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  __shared__ u32 tokens_R[RANKS];
  if (!await_rows(p, tokens_R)) return;
  count_chunk(p, g, tokens_R, true);
  for (u32 l = threadIdx.x; l < g.local; l += THREADS) {
    u32 total = 0;
    for (u32 w = 0; w < WARPS; ++w) total += counts_WL[w * g.local + l];
    ((u32*)g.counts_CL)[blockIdx.x * g.local + l] = total;
  }
}

// One block: where each chunk's pairs of an expert begin, and where each expert's end.
extern "C" __global__ void __launch_bounds__(THREADS)
    scan_counts(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  __shared__ u32 sums[THREADS];
  if (!alive(p)) return;
  u32 local = (u32)g.local, tid = threadIdx.x, each = (local + THREADS - 1) / THREADS, mine = 0;
  u32 first = min(tid * each, local), last = min(first + each, local);
  for (u32 l = first; l < last; ++l) {
    u32 run = 0, *count = (u32*)g.counts_CL + l;
    for (u32 c = 0; c < g.chunks; c += SCANNED) {
      u32 here[SCANNED];  // loaded together: one at a time, each would wait for the memory
#pragma unroll
      for (u32 i = 0; i < SCANNED; ++i) here[i] = c + i < g.chunks ? count[(c + i) * local] : 0;
#pragma unroll
      for (u32 i = 0; i < SCANNED; ++i) {
        if (c + i < g.chunks) count[(c + i) * local] = run;
        run += here[i];
      }
    }
    ((u32*)p.ends_L)[l] = run;
    mine += run;
  }
  sums[tid] = mine;
  for (u32 step = 1; step < THREADS; step *= 2) {
    __syncthreads();
    u32 before = tid >= step ? sums[tid - step] : 0;
    __syncthreads();
    sums[tid] += before;
  }
  u32 run = sums[tid] - mine;
  for (u32 l = first; l < last; ++l) ((u32*)p.ends_L)[l] = run += ((u32*)p.ends_L)[l];
  __syncthreads();
  // An expert of another rank begins where the one before it that lives here ends.
  for (u32 e = tid; e <= EXPERTS; e += THREADS) {
    int before = (int)e - 1;
    while (before >= 0 && ((const int*)p.slot_E)[before] < 0) --before;
    ((u32*)p.starts_E)[e] = before < 0 ? 0 : ((const u32*)p.ends_L)[((const int*)p.slot_E)[before]];
  }
}

// Give every pair its place in the index: by expert, then source, then token, as dispatch does.
extern "C" __global__ void __launch_bounds__(THREADS)
    place_pairs(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  if (!alive(p)) return;
  const u32* tokens_R = (const u32*)p.tokens_R;
  count_chunk(p, g, tokens_R, false);
  u32 local = (u32)g.local, warp = threadIdx.x / 32, lane = threadIdx.x % 32, s;
  for (u32 l = threadIdx.x; l < local; l += THREADS) {
    u32 next = (l ? ((const u32*)p.ends_L)[l - 1] : 0) + ((const u32*)g.counts_CL)[blockIdx.x * local + l];
    for (u32 w = 0; w < WARPS; ++w) {
      u32 count = counts_WL[w * local + l];
      counts_WL[w * local + l] = next;
      next += count;
    }
  }
  __syncthreads();
  u32* next_L = counts_WL + warp * local;
  u32 first = blockIdx.x * CHUNK + warp * (CHUNK / WARPS), capacity = RANKS * (u32)p.max_tokens * TOP_K;
  for (u32 at = first + lane; at - lane < first + CHUNK / WARPS; at += 32) {
    i64 e = expert_of(p, g, tokens_R, at, &s);
    int slot = e < 0 ? -1 : ((const int*)p.slot_E)[e];
    u32 same = __match_any_sync(ALL_LANES, slot >= 0 ? (u32)slot : local + lane);
    u32 before = __popc(same & ((1u << lane) - 1)), m = slot >= 0 ? next_L[slot] + before : 0;
    __syncwarp();
    if (slot >= 0 && before == 0) next_L[slot] += __popc(same);
    __syncwarp();
    if (slot >= 0) ((u32*)p.index_M)[m] = at / TOP_K;
    if (at < capacity) ((int*)p.m_PK)[at] = slot >= 0 ? (int)m : -1;
  }
}

// A token's pairs computed here, by lane: m (-1 for none) and weight of pair k in lane k; `there` has a bit for each.
struct Pairs {
  int m;
  float weight;
  u32 there;
};

__device__ __forceinline__ Pairs pairs_of(const Params& p, const Gather& g, u32 place) {
  u32 lane = threadIdx.x % 32;
  Pairs pairs = {-1, 0, 0};
  if (lane < TOP_K) {
    pairs.m = ((const int*)p.m_PK)[place * TOP_K + lane];
    pairs.weight = ((const float*)(heap(p) + g.at_weights))[place * TOP_K + lane];
  }
  pairs.there = __ballot_sync(ALL_LANES, pairs.m >= 0);
  return pairs;
}

// The pairs' outputs, added in k order: TILE vectors of the row, 32 apart, from v on, whose loads are in flight together.
__device__ __forceinline__ void add_pairs(const Params& p, const Pairs& pairs, u32 v, float (*sum)[LANES_OF_VEC]) {
  for (u32 left = pairs.there; left; left &= left - 1) {
    u32 k = __ffs(left) - 1;
    u64 row = p.y + __shfl_sync(ALL_LANES, pairs.m, k) * ROW_BYTES;
    float weight = __shfl_sync(ALL_LANES, pairs.weight, k);
    Vec a[TILE];
#pragma unroll
    for (int u = 0; u < TILE; ++u) a[u] = load_rows(row + 16ull * min(v + 32 * u, VECS - 1));
#pragma unroll
    for (int u = 0; u < TILE; ++u) add_weighted(sum[u], a[u], weight);
  }
}

__device__ __forceinline__ void store_sums(u64 to, u32 v, const float (*sum)[LANES_OF_VEC]) {
#pragma unroll
  for (int u = 0; u < TILE; ++u)
    if (v + 32 * u < VECS) store_row(to + 16ull * (v + 32 * u), rounded(sum[u]));
}

// What this rank computed for token t of rank s, added in k order and rounded once, as combine does. One warp.
__device__ void sum_token(const Params& p, const Gather& g, u32 s, u32 t, u64 sums) {
  u32 lane = threadIdx.x % 32, place = s * (u32)p.max_tokens + t;
  if (t >= ((const u32*)p.tokens_R)[s]) return;
  Pairs pairs = pairs_of(p, g, place);
  for (u32 v = lane; v - lane < VECS; v += 32 * TILE) {
    float sum[TILE][LANES_OF_VEC] = {};
    add_pairs(p, pairs, v, sum);
    store_sums(sums + place * ROW_BYTES, v, sum);
  }
}

// The sums of every token: this rank's own into its slots, the others' into `partial`.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_partial(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  if (!alive(p)) return;
  u32 workers = gridDim.x * WARPS, room = (u32)p.room;
  for (u32 item = blockIdx.x * WARPS + threadIdx.x / 32; item < RANKS * room; item += workers) {
    u32 s = item / room;
    sum_token(p, g, s, item % room, s == p.rank ? heap(p) + p.at_slots : g.partial);
  }
}

// One block: this rank's partial sums are where they belong.
extern "C" __global__ void announce_outputs(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  State* state = (State*)p.state;
  u32 epoch = epoch_after(state->outputs_epoch);
  if (!alive(p)) return;
  if (threadIdx.x < RANKS) store_release(p.peer[threadIdx.x] + p.at_out_flags + 8 * p.rank, pack(epoch, 0));
  __syncthreads();
  if (threadIdx.x == 0) state->outputs_epoch = epoch;
}

// Wait for the sums of every rank. False after a failure. Every block calls.
__device__ bool await_outputs(const Params& p) {
  u32 epoch = *(volatile u32*)&((State*)p.state)->outputs_epoch;
  if (!alive(p)) return false;
  bool ok = true;
  if (threadIdx.x < RANKS) ok = await(p, RECEIVE_OUTPUTS, p.at_out_flags + 8 * threadIdx.x, epoch, threadIdx.x) != 0;
  return !__syncthreads_or(!ok);
}

// Add rank r's partial sums, as they came, of own token t: TILE vectors from v on.
__device__ __forceinline__ void add_slot(const Params& p, u32 r, u32 t, u32 v, float (*sum)[LANES_OF_VEC]) {
  u64 row = heap(p) + p.at_slots + (r * p.max_tokens + t) * ROW_BYTES;
  Vec a[TILE];
#pragma unroll
  for (int u = 0; u < TILE; ++u) a[u] = load_rows(row + 16ull * min(v + 32 * u, VECS - 1));
#pragma unroll
  for (int u = 0; u < TILE; ++u) add_plain(sum[u], a[u]);
}

// Add every rank's partial sum of each own token, in rank order. Every block waits for all of them.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_outputs(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  if (!await_outputs(p)) return;
  u32 tokens = ((const u32*)p.tokens_R)[p.rank], lane = threadIdx.x % 32, workers = gridDim.x * WARPS;
  for (u32 t = blockIdx.x * WARPS + threadIdx.x / 32; t < tokens; t += workers)
    for (u32 v = lane; v - lane < VECS; v += 32 * TILE) {
      float sum[TILE][LANES_OF_VEC] = {};
      for (u32 r = 0; r < RANKS; ++r) add_slot(p, r, t, v, sum);
      store_sums(p.out + t * ROW_BYTES, v, sum);
    }
}
