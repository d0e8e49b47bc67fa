// Dispatch: count, plan, push each token once to every rank that needs it, build the gather index on arrival.
//
// A row goes to the place (source, token) of the destination's heap. The place needs no count from anybody, so rows
// leave at once while block 0 counts, exchanges counts and plans; regions are sparse, which costs address space only.
// The source also sends each pair's position among its own pairs of that expert. With the counts of all sources the
// destination then knows where the pair belongs in the expert-sorted index: no sort, no atomics, always the same order.
//
// Example: rank 0 sends tokens 0, 1, 2 to experts [5], [5], [6] of rank 1: positions 0, 1, 0. If rank 1 itself has one
// pair for expert 5, then starts are 5 -> 0, 6 -> 3 and index_M = [place(0,0), place(0,1), place(1,..), place(0,2)].

#define NO_PAIR 0xfff00000ull
#define MAX_POSITION 0xfffffu
extern __shared__ u32 shared_words[];  // WARPS * EXPERTS counts, later RANKS * EXPERTS starts

__device__ __forceinline__ u32 mixed(u32 word, u32 position) {  // as balance.digest32
  u32 h = word + position * 0x9E3779B9u;
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}

// The sum of `part` over the block. Every thread calls.
__device__ u32 block_sum(u32 part) {
  __shared__ u32 total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  part = __reduce_add_sync(ALL_LANES, part);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, part);
  __syncthreads();
  return total;
}

// One block waits for all counts and makes the plan of the step: today every expert stays at rank_E, so the plan is
// its digest. Each cell carries its epoch: no flag, nothing to reset.
__device__ void plan_from_counts(const Params& p, Phase phase, u32 epoch) {
  u32 hash = 0;
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS)
    hash += mixed((u32)await(p, phase, p.at_cells + 8ull * i, epoch, i / EXPERTS), i + 1);
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS)
    hash += mixed(((const u32*)p.rank_E)[e], RANKS * EXPERTS + e + 1);
  hash = block_sum(hash);
  if (threadIdx.x == 0) ((State*)p.state)->digest = hash;
}

// Count pairs per expert in `counts_WE`, one row per warp, each warp over consecutive tokens.
__device__ void count_pairs(const Params& p, u32* counts_WE, u32 first, u32 last) {
  const i64* ids = (const i64*)p.ids;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (u32 at = first + lane; at < last; at += 32 * 8) {
    i64 e[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) e[j] = at + 32 * j < last ? ids[at + 32 * j] : -1;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if ((u64)e[j] < EXPERTS)
        atomicAdd(&counts_WE[warp * EXPERTS + e[j]], 1);
      else if (e[j] != -1)
        fail(p, SEND_ROWS, BAD_EXPERT, 1u << p.rank, (u64)e[j]);
    }
  }
}

// Send every pair's expert, position and weight to the rank that computes it, "no pair" to the others. Positions
// follow the token order: within a warp by matching lanes, between warps by the prefix in `next_WE`.
__device__ void send_pairs(const Params& p, u32* next_WE, u32 first, u32 last) {
  const i64* ids = (const i64*)p.ids;
  const u32* weights = (const u32*)p.weights;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32* next_E = next_WE + warp * EXPERTS;
  u64 region = p.at_pairs + 8ull * p.rank * p.max_tokens * TOP_K;
  i64 upcoming = first + lane < last ? ids[first + lane] : -1;
  for (u32 base = first; base < last; base += 32) {
    u32 at = base + lane;
    i64 e = upcoming;
    upcoming = at + 32 < last ? ids[at + 32] : -1;
    bool valid = (u64)e < EXPERTS;
    u32 same = __match_any_sync(ALL_LANES, valid ? (u32)e : EXPERTS + lane);
    u32 before = __popc(same & ((1u << lane) - 1));
    u32 position = valid ? next_E[e] + before : 0;
    __syncwarp();
    if (valid && before == 0) next_E[e] += __popc(same);
    __syncwarp();
    if (at >= last) continue;
    u64 pair = pack(weights[at], (u32)e << 20 | position);
    u32 to = valid ? ((const u32*)p.rank_E)[e] : RANKS;
    for (u32 r = 0; r < RANKS; ++r) *(u64*)(p.peer[r] + region + 8ull * at) = r == to ? pair : NO_PAIR;
  }
}

// Block 0: counts to everybody, then the pairs, then the plan.
__device__ void count_and_plan(const Params& p, u32 epoch, u32 tokens) {
  u32* counts_WE = shared_words;
  for (u32 i = threadIdx.x; i < WARPS * EXPERTS; i += THREADS) counts_WE[i] = 0;
  if (threadIdx.x < RANKS)
    store_relaxed(p.peer[threadIdx.x] + p.at_headers + 8 * p.rank, pack(epoch, tokens));
  __syncthreads();
  u32 warp = threadIdx.x / 32, pairs = tokens * TOP_K;
  u32 share = (tokens + WARPS - 1) / WARPS * TOP_K;
  u32 first = min(warp * share, pairs), last = min(first + share, pairs);
  count_pairs(p, counts_WE, first, last);
  __syncthreads();
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    u32 running = 0;
    for (u32 w = 0; w < WARPS; ++w) {
      u32 count = counts_WE[w * EXPERTS + e];
      counts_WE[w * EXPERTS + e] = running;
      running += count;
    }
    for (u32 r = 0; r < RANKS; ++r)
      store_relaxed(p.peer[r] + p.at_cells + 8 * (p.rank * EXPERTS + e), pack(epoch, running));
  }
  __syncthreads();
  send_pairs(p, counts_WE, first, last);
  if (p.counts_first) plan_from_counts(p, SEND_ROWS, epoch);
}

// The ranks that compute something for token t. Every lane of a warp calls and gets the same.
__device__ __forceinline__ u32 ranks_of_token(const Params& p, u32 t) {
  u32 mask = 0;
  for (u32 k = threadIdx.x % 32; k < TOP_K; k += 32) {
    i64 e = ((const i64*)p.ids)[(u64)t * TOP_K + k];
    if ((u64)e < EXPERTS) mask |= 1u << ((const u32*)p.rank_E)[e];
  }
  return __reduce_or_sync(ALL_LANES, mask);
}

// Warps read pieces of rows once and store them to every rank that needs them, this one included. The first loads are
// under way before it is known who needs the row: nearly every row is needed, and a small step is all latency.
__device__ void push_rows(const Params& p, u32 tokens, u32 worker, u32 workers) {
  u32 lane = threadIdx.x % 32, pieces = pieces_of_row(tokens, workers), width = (VECS + pieces - 1) / pieces;
  for (u32 item = worker; item < tokens * pieces; item += workers) {
    u32 t = item / pieces, piece = item % pieces, end = min((piece + 1) * width, (u32)VECS), mask = ALL_LANES;
    u64 from = p.x + t * ROW_BYTES, to = p.at_rows + (p.rank * p.max_tokens + t) * ROW_BYTES;
    for (u32 base = piece * width; base < end; base += 32 * 4) {
      u32 v = base + lane;
      Vec a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = load_input(from + 16ull * min(v + 32 * j, end - 1));
      if (base == piece * width) {
        mask = ranks_of_token(p, t);
        if (base == 0 && lane == 0) ((u32*)p.mask_T)[t] = mask;
        if (!mask) break;
      }
#pragma unroll
      for (u32 i = 1; i <= RANKS; ++i) {
        u32 r = (p.rank + i) % RANKS;  // every rank begins with its neighbour, so that not all write to one
        if (!(mask >> r & 1)) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (v + 32 * j < end) store_row(p.peer[r] + to + 16ull * (v + 32 * j), a[j]);
      }
    }
  }
}

// True in the one block that finishes last; what all blocks wrote before is then ordered. Every thread calls.
__device__ __forceinline__ bool last_to_send(State* state) {
  __shared__ u32 last;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    last = atomicInc(&state->rows_done, gridDim.x - 1) == gridDim.x - 1;
    fence_device();
  }
  __syncthreads();
  return last;
}

// Returns the epoch of the step. Every thread calls.
__device__ u32 send_rows(const Params& p) {
  State* state = (State*)p.state;
  u32 epoch = epoch_after(*(volatile u32*)&state->rows_epoch);
  i64 given = *(const int*)p.tokens;
  if (!alive(p)) return epoch;
  if (given < 0 || given > (i64)p.room) {
    if (threadIdx.x == 0) fail(p, SEND_ROWS, TOO_MANY_TOKENS, 1u << p.rank, (u64)given);
    given = 0;
  }
  u32 tokens = given, planners = gridDim.x > 1 ? 1 : 0;
  if (blockIdx.x == 0) count_and_plan(p, epoch, tokens);
  if (blockIdx.x >= planners)
    push_rows(p, tokens, (blockIdx.x - planners) * WARPS + threadIdx.x / 32, (gridDim.x - planners) * WARPS);
  if (last_to_send(state)) {
    u32 digest = *(volatile u32*)&state->digest;
    if (threadIdx.x < RANKS && !failed(p))
      store_release(p.peer[threadIdx.x] + p.at_row_flags + 8 * p.rank, pack(epoch, digest));
    if (threadIdx.x == 0) state->rows_epoch = epoch;
  }
  return epoch;
}

// From the counts: where each expert's pairs of each source begin in the index, in `starts_RE`.
__device__ void find_starts(const Params& p, u32 epoch, u32* starts_RE) {
  __shared__ u32 start_E[EXPERTS + 1];
  const u32* rank_E = (const u32*)p.rank_E;
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS) {
    bool mine = rank_E[i % EXPERTS] == p.rank;
    u32 count = 0;
    if (mine || blockIdx.x == 0) count = (u32)await(p, RECEIVE_ROWS, p.at_cells + 8ull * i, epoch, i / EXPERTS);
    if (blockIdx.x == 0) ((u32*)p.counts_RE)[i] = count;
    starts_RE[i] = mine ? count : 0;
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    u32 running = 0;
    for (u32 s = 0; s < RANKS; ++s) {
      u32 count = starts_RE[s * EXPERTS + e];
      starts_RE[s * EXPERTS + e] = running;
      running += count;
    }
    start_E[e] = running;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const u32 share = (EXPERTS + 31) / 32;
    u32 first = min(threadIdx.x * share, (u32)EXPERTS), last = min(first + share, (u32)EXPERTS), sum = 0;
    for (u32 e = first; e < last; ++e) sum += start_E[e];
    u32 upto = sum;
    for (u32 d = 1; d < 32; d *= 2) {
      u32 left = __shfl_up_sync(ALL_LANES, upto, d);
      if (threadIdx.x >= d) upto += left;
    }
    u32 running = upto - sum;
    for (u32 e = first; e < last; ++e) {
      u32 count = start_E[e];
      start_E[e] = running;
      running += count;
    }
    if (threadIdx.x == 31) start_E[EXPERTS] = upto;
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS) starts_RE[i] += start_E[i % EXPERTS];
  if (blockIdx.x == 0)
    for (u32 e = threadIdx.x; e <= EXPERTS; e += THREADS) {
      ((u32*)p.starts_E)[e] = start_E[e];
      if (e < EXPERTS && ((const int*)p.slot_E)[e] >= 0) ((u32*)p.ends_L)[((const int*)p.slot_E)[e]] = start_E[e + 1];
    }
}

// Wait for every source's rows; the plan is compared before anything else of the message is read.
__device__ bool await_rows(const Params& p, u32 epoch, u32* tokens_R) {
  __shared__ u32 digest_R[RANKS];
  u32 r = threadIdx.x % 32;
  if (threadIdx.x < 32 && r < RANKS)
#if FAULT == 3
    digest_R[r] = 0;
#else
    digest_R[r] = (u32)await(p, RECEIVE_ROWS, p.at_row_flags + 8ull * r, epoch, r);
#endif
  if (threadIdx.x / 32 == 1 && r < RANKS) {  // headers carry their epoch too: another warp waits at the same time
    tokens_R[r] = (u32)await(p, RECEIVE_ROWS, p.at_headers + 8ull * r, epoch, r);
    if (blockIdx.x == 0) ((u32*)p.tokens_R)[r] = tokens_R[r];
  }
  if (!alive(p)) return false;
  bool differs = threadIdx.x < RANKS && digest_R[threadIdx.x] != digest_R[p.rank];
  if (differs) fail(p, RECEIVE_ROWS, MISMATCH, 1u << threadIdx.x, pack(digest_R[threadIdx.x], digest_R[p.rank]));
  return !__syncthreads_or(differs);
}

__device__ void receive_rows(const Params& p, u32 epoch) {
  __shared__ u32 tokens_R[RANKS];
  u32* starts_RE = shared_words;
  find_starts(p, epoch, starts_RE);
  if (!await_rows(p, epoch, tokens_R)) return;
  u32 most = 0;
  for (u32 s = 0; s < RANKS; ++s) most = max(most, tokens_R[s]);
  u32 width = most * TOP_K;
  for (u32 i = blockIdx.x * THREADS + threadIdx.x; i < RANKS * width; i += gridDim.x * THREADS) {
    u32 s = i / width, at = i % width;
    if (at >= tokens_R[s] * TOP_K) continue;
    u64 place_k = s * p.max_tokens * TOP_K + at;
    u32 pair = (u32)load_relaxed(p.peer[p.rank] + p.at_pairs + 8 * place_k), e = pair >> 20;
    int m = -1;
    if (e < EXPERTS) {
      m = starts_RE[s * EXPERTS + e] + (pair & MAX_POSITION);
      ((u32*)p.index_M)[m] = place_k / TOP_K;
      ((u32*)p.pair_M)[m] = place_k;
    }
    ((int*)p.m_PK)[place_k] = m;
  }
  if (blockIdx.x == 0 && p.replan && !p.counts_first) plan_from_counts(p, RECEIVE_ROWS, epoch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_send(const __grid_constant__ Params p) { send_rows(p); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_receive(const __grid_constant__ Params p) {
  u32 epoch = *(volatile u32*)&((State*)p.state)->rows_epoch;
  if (alive(p)) receive_rows(p, epoch);
}

// Both halves in one launch. Blocks that wait occupy their SM, so the grid must fit the device at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_both(const __grid_constant__ Params p) {
  u32 epoch = send_rows(p);
  if (alive(p)) receive_rows(p, epoch);
}
