// All-gather / reduce-scatter by copy engine: what is left for kernels. The engine moves every rank's rows, ids and
// weights to every rank, and every rank's partial sums back; kernels raise and await the flags around that, build the
// same index as dispatch does, and add. Compiled behind common.cuh, with its `Params`; what is named at_* there lies at
// the offsets of `allgather.py`, with one flag for each rank.
//
// Names: L experts of this rank, C chunks of CHUNK pairs (place * TOP_K + k, valid or not), W warps of a block.

#define CHUNK 1024  // pairs of one block of count_pairs and place_pairs
#define TILE 4      // vectors that a lane loads at once

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
    u32 run = 0;
    for (u32 c = 0; c < g.chunks; ++c) {
      u32* count = (u32*)g.counts_CL + c * local + l;
      u32 here = *count;
      *count = run;
      run += here;
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

// What this rank computed for each token of each rank, added in k order and rounded once, as combine does: this rank's
// own into its slots, the others' into `partial`. One warp per token.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_partial(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  if (!alive(p)) return;
  u32 lane = threadIdx.x % 32, workers = gridDim.x * WARPS, room = (u32)p.room;
  for (u32 item = blockIdx.x * WARPS + threadIdx.x / 32; item < RANKS * room; item += workers) {
    u32 s = item / room, t = item % room, place = s * (u32)p.max_tokens + t;
    if (t >= ((const u32*)p.tokens_R)[s]) continue;
    u64 to = (s == p.rank ? heap(p) + p.at_slots : g.partial) + place * ROW_BYTES;
    int m = lane < TOP_K ? ((const int*)p.m_PK)[place * TOP_K + lane] : -1;
    float weight = 0;
    if (lane < TOP_K) weight = ((const float*)(heap(p) + g.at_weights))[place * TOP_K + lane];
    u32 there = __ballot_sync(ALL_LANES, m >= 0);
    for (u32 v = lane; v - lane < VECS; v += 32 * TILE) {
      float sum[TILE][LANES_OF_VEC] = {};
      for (u32 left = there; left; left &= left - 1) {
        u32 k = __ffs(left) - 1;
        u64 row = p.y + __shfl_sync(ALL_LANES, m, k) * ROW_BYTES;
        float w = __shfl_sync(ALL_LANES, weight, k);
        Vec a[TILE];
#pragma unroll
        for (int u = 0; u < TILE; ++u) a[u] = load_rows(row + 16ull * min(v + 32 * u, VECS - 1));
#pragma unroll
        for (int u = 0; u < TILE; ++u) add_weighted(sum[u], a[u], w);
      }
#pragma unroll
      for (int u = 0; u < TILE; ++u)
        if (v + 32 * u < VECS) store_row(to + 16ull * (v + 32 * u), rounded(sum[u]));
    }
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

// Add every rank's partial sum of each own token, in rank order. Every block waits for all of them.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_outputs(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  u32 epoch = *(volatile u32*)&((State*)p.state)->outputs_epoch, lane = threadIdx.x % 32, workers = gridDim.x * WARPS;
  if (!alive(p)) return;
  bool ok = true;
  if (threadIdx.x < RANKS) ok = await(p, RECEIVE_OUTPUTS, p.at_out_flags + 8 * threadIdx.x, epoch, threadIdx.x) != 0;
  if (__syncthreads_or(!ok)) return;
  u32 tokens = ((const u32*)p.tokens_R)[p.rank];
  u64 slots = heap(p) + p.at_slots, next = p.max_tokens * ROW_BYTES;
  for (u32 t = blockIdx.x * WARPS + threadIdx.x / 32; t < tokens; t += workers)
    for (u32 v = lane; v - lane < VECS; v += 32 * TILE) {
      float sum[TILE][LANES_OF_VEC] = {};
      for (u32 r = 0; r < RANKS; ++r) {
        Vec a[TILE];
#pragma unroll
        for (int u = 0; u < TILE; ++u)
          a[u] = load_rows(slots + r * next + t * ROW_BYTES + 16ull * min(v + 32 * u, VECS - 1));
#pragma unroll
        for (int u = 0; u < TILE; ++u) add_plain(sum[u], a[u]);
      }
#pragma unroll
      for (int u = 0; u < TILE; ++u)
        if (v + 32 * u < VECS) store_row(p.out + t * ROW_BYTES + 16ull * (v + 32 * u), rounded(sum[u]));
    }
}
