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
#if MIXED
#define OPEN_BIT 0x80000u  // of a pair: its token's outputs travel unsummed
#define MAX_POSITION 0x7ffffu
#else
#define MAX_POSITION 0xfffffu
#endif
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
// its digest. Each cell carries its epoch: no flag, nothing to reset. False in threads whose wait was given up.
__device__ bool plan_from_counts(const Params& p, Phase phase, u32 epoch) {
  u32 hash = 0;
  bool good = true;
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS) {
    u64 cell = await(p, phase, p.at_cells + 8ull * i, epoch, i / EXPERTS);
    good &= cell != 0;  // epochs are never 0
    hash += mixed((u32)cell, i + 1);
  }
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS)
    hash += mixed(((const u32*)p.rank_E)[e], RANKS * EXPERTS + e + 1);
  hash = block_sum(hash);
  if (threadIdx.x == 0) ((State*)p.state)->digest = hash;
  return good;
}

// Count pairs per expert in `counts_WE`, one row per warp, each warp over consecutive tokens. False for a bad id.
__device__ bool count_pairs(const Params& p, u32* counts_WE, u32 first, u32 last) {
  const i64* ids = (const i64*)p.ids;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  bool good = true;
  for (u32 at = first + lane; at < last; at += 32 * 8) {
    i64 e[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) e[j] = at + 32 * j < last ? ids[at + 32 * j] : -1;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if ((u64)e[j] < EXPERTS)
        atomicAdd(&counts_WE[warp * EXPERTS + e[j]], 1);
      else if (e[j] != -1) {
        fail(p, SEND_ROWS, BAD_EXPERT, 1u << p.rank, (u64)e[j]);
        good = false;
      }
    }
  }
  return good;
}

// Send every pair's expert, position and weight to the rank that computes it, "no pair" to the others. Positions
// follow the token order: within a warp by matching lanes, between warps by the prefix in `next_WE`.
__device__ void send_pairs(const Params& p, u32* next_WE, const unsigned char* rank_E, u32 first, u32 last) {
  const i64* ids = (const i64*)p.ids;
  const u32* weights = (const u32*)p.weights;
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32* next_E = next_WE + warp * EXPERTS;
  u64 region = p.at_pairs + 8ull * p.rank * p.max_tokens * TOP_K;
  i64 next_id = first + lane < last ? ids[first + lane] : -1;
  u32 next_weight = first + lane < last ? weights[first + lane] : 0;
#if MIXED
  const u32* open_T = (const u32*)p.open_T;
  u32 next_open = first + lane < last ? open_T[(first + lane) / TOP_K] : 0;
#endif
  for (u32 base = first; base < last; base += 32) {
    u32 at = base + lane, weight = next_weight;
    i64 e = next_id;
    next_id = at + 32 < last ? ids[at + 32] : -1;
    next_weight = at + 32 < last ? weights[at + 32] : 0;
#if MIXED
    u32 open = next_open;
    next_open = at + 32 < last ? open_T[(at + 32) / TOP_K] : 0;
#endif
    bool valid = (u64)e < EXPERTS;
    u32 same = __match_any_sync(ALL_LANES, valid ? (u32)e : EXPERTS + lane);
    u32 before = __popc(same & ((1u << lane) - 1));
    u32 position = valid ? next_E[e] + before : 0;
    __syncwarp();
    if (valid && before == 0) next_E[e] += __popc(same);
    __syncwarp();
    if (at >= last) continue;
    u64 pair = pack(weight, (u32)e << 20 | position);
#if MIXED
    if (open) pair |= OPEN_BIT;
#endif
    u32 to = valid ? rank_E[e] : RANKS;
    for (u32 r = 0; r < RANKS; ++r) *(u64*)(p.peer[r] + region + 8ull * at) = r == to ? pair : NO_PAIR;
  }
}

// Counts of each warp to counts of all warps before it, in place; the totals go to everybody.
__device__ void send_counts(const Params& p, u32* counts_WE, u32 epoch) {
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    u32 count_W[WARPS], running = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) count_W[w] = counts_WE[w * EXPERTS + e];
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      counts_WE[w * EXPERTS + e] = running;
      running += count_W[w];
    }
    for (u32 r = 0; r < RANKS; ++r)
      store_relaxed(p.peer[r] + p.at_cells + 8 * (p.rank * EXPERTS + e), pack(epoch, running));
  }
}

// Block 0: counts to everybody, then the pairs, then the plan. False in threads that found something wrong.
__device__ bool count_and_plan(const Params& p, u32 epoch, u32 tokens) {
  __shared__ unsigned char rank_E[EXPERTS];
  u32* counts_WE = shared_words;
  if (threadIdx.x < RANKS)
    store_relaxed(p.peer[threadIdx.x] + p.at_headers + 8 * p.rank, pack(epoch, tokens));
  for (u32 i = threadIdx.x; i < WARPS * EXPERTS; i += THREADS) counts_WE[i] = 0;
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) rank_E[e] = ((const u32*)p.rank_E)[e];
  __syncthreads();
  u32 warp = threadIdx.x / 32, pairs = tokens * TOP_K;
  u32 share = (tokens + WARPS - 1) / WARPS * TOP_K;
  u32 first = min(warp * share, pairs), last = min(first + share, pairs);
  bool good = count_pairs(p, counts_WE, first, last);
  __syncthreads();
  send_counts(p, counts_WE, epoch);
  __syncthreads();
  send_pairs(p, counts_WE, rank_E, first, last);
  return p.counts_first ? good & plan_from_counts(p, SEND_ROWS, epoch) : good;
}

// Release what this block has sent to every rank, unless it is block 0 and something is wrong: without its flag the
// peers read nothing. Each block has a flag of its own, so no block waits for another. Every thread calls.
__device__ void release_rows(const Params& p, u32 epoch, bool good) {
  State* state = (State*)p.state;
  good = !__syncthreads_or(!good);
  u32 digest = *(volatile u32*)&state->digest;
  if (threadIdx.x < RANKS && good)
    store_release(p.peer[threadIdx.x] + p.at_row_flags + 8 * (p.rank * MAX_BLOCKS + blockIdx.x), pack(epoch, digest));
  // All blocks have read the old epoch.
  if (threadIdx.x == THREADS - 1 && last_block(&state->rows_done)) state->rows_epoch = epoch;
}

// Returns the epoch of the step. Every thread calls.
__device__ u32 send_rows(const Params& p) {
  u32 epoch = epoch_after(*(volatile u32*)&((State*)p.state)->rows_epoch);
  i64 given = *(const int*)p.tokens;
  bool good = given >= 0 && given <= (i64)p.room;
  if (!alive(p)) return epoch;
  if (!good && threadIdx.x == 0) fail(p, SEND_ROWS, TOO_MANY_TOKENS, 1u << p.rank, (u64)given);
  u32 tokens = good ? given : 0, planners = gridDim.x > 1 ? 1 : 0;
  if (blockIdx.x == 0) good &= count_and_plan(p, epoch, tokens);
  if (blockIdx.x >= planners)
    push_rows(p, tokens, (blockIdx.x - planners) * WARPS + threadIdx.x / 32, (gridDim.x - planners) * WARPS);
  release_rows(p, epoch, good);
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
    for (u32 e = threadIdx.x; e <= EXPERTS; e += THREADS) ((u32*)p.starts_E)[e] = start_E[e];
}

// What the experts have to do, or that they have nothing to do: in a part that does not take place, and after a
// failure. By block 0, once rows of every source have come: experts that push write into slots of the sources, and a
// source that has not begun this step may still read them. Whatever else is wrong, no earlier step can be harmed.
__device__ void give_experts(const Params& p, bool good) {
  if (blockIdx.x) return;
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    int l = ((const int*)p.slot_E)[e];
    if (l >= 0) ((u32*)p.ends_L)[l] = good ? ((const u32*)p.starts_E)[e + 1] : 0;
  }
}

#if EXACT || MIXED
// Where the output of a pair goes that travels unsummed to another rank: the slot of its k. Experts that push (see
// expert_gemm.cu) write it there, and combine has nothing to send for it.
__device__ __forceinline__ u64 target_of(const Params& p, u32 source, u32 at, u32 pair) {
#if !EXACT
  if (!(pair & OPEN_BIT)) return 0;
#endif
  return source == p.rank ? 0 : slots_of(p, source, at / TOP_K) + at % TOP_K * ROW_BYTES;
}
#endif

// Wait for every block of every source; the plan, which block 0 sends, is compared before anything else of the message
// is read.
__device__ bool await_rows(const Params& p, u32 epoch, u32* tokens_R) {
  __shared__ u32 digest_R[RANKS];
  if (threadIdx.x >= THREADS - RANKS) {  // headers carry their epoch too
    u32 r = threadIdx.x - (THREADS - RANKS);
    tokens_R[r] = (u32)await(p, RECEIVE_ROWS, p.at_headers + 8ull * r, epoch, r);
    if (blockIdx.x == 0) ((u32*)p.tokens_R)[r] = tokens_R[r];
  }
  for (u32 i = threadIdx.x; i < RANKS * gridDim.x; i += THREADS) {
    u32 r = i % RANKS, block = i / RANKS;
#if FAULT == 3
    u64 word = 0;
#else
    u64 word = await(p, RECEIVE_ROWS, p.at_row_flags + 8ull * (r * MAX_BLOCKS + block), epoch, r);
#endif
    if (block == 0) digest_R[r] = (u32)word;
  }
  if (!alive(p)) return false;
  bool differs = threadIdx.x < RANKS && digest_R[threadIdx.x] != digest_R[p.rank];
  if (differs) fail(p, RECEIVE_ROWS, MISMATCH, 1u << threadIdx.x, pack(digest_R[threadIdx.x], digest_R[p.rank]));
  return !__syncthreads_or(differs);
}

// False if something is wrong.
__device__ bool receive_rows(const Params& p, u32 epoch) {
  __shared__ u32 tokens_R[RANKS];
  u32* starts_RE = shared_words;
  find_starts(p, epoch, starts_RE);
  if (!await_rows(p, epoch, tokens_R)) return false;
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
#if EXACT || MIXED
      ((u64*)p.target_M)[m] = target_of(p, s, at, pair);
#endif
    }
    ((int*)p.m_PK)[place_k] = m;
  }
  if (blockIdx.x == 0 && p.replan && !p.counts_first) plan_from_counts(p, RECEIVE_ROWS, epoch);
  return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_send(const __grid_constant__ Params p) {
  begin_kernel();
  if (!takes_part(p)) return;
  send_rows(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_receive(const __grid_constant__ Params p) {
  begin_kernel();
  if (!takes_part(p)) return give_experts(p, false);
  u32 epoch = *(volatile u32*)&((State*)p.state)->rows_epoch;
  give_experts(p, alive(p) && receive_rows(p, epoch));
}

// Both halves in one launch. Blocks that wait occupy their SM, so the grid must fit the device at once.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_both(const __grid_constant__ Params p) {
  begin_kernel();
  if (!takes_part(p)) return give_experts(p, false);
  u32 epoch = send_rows(p);
  give_experts(p, alive(p) && receive_rows(p, epoch));
}

// For GEMMs over a batch of the same number of rows for every expert: the places of each expert's rows, and its count.
// m_PK then points into outputs [this rank's experts, capacity], so that combine takes them as they are.
extern "C" __global__ void __launch_bounds__(THREADS, 1) dispatch_batch(const __grid_constant__ Params p) {
  begin_kernel();
  if (!alive(p)) return;
  for (u32 e = blockIdx.x; e < EXPERTS; e += gridDim.x) {
    int l = ((const int*)p.slot_E)[e];
    if (l < 0) continue;
    u32 start = ((const u32*)p.starts_E)[e], count = ((const u32*)p.starts_E)[e + 1] - start;
    if (threadIdx.x == 0) {
      ((u32*)p.counts_L)[l] = count;
      if (count > p.capacity) fail(p, RECEIVE_ROWS, OVER_CAPACITY, 1u << p.rank, pack(e, count));
    }
    for (u32 c = threadIdx.x; c < p.capacity; c += THREADS) {
      ((int*)p.index_LC)[l * p.capacity + c] = c < count ? ((const int*)p.index_M)[start + c] : -1;
      if (c < count) ((u32*)p.m_PK)[((const u32*)p.pair_M)[start + c]] = l * p.capacity + c;
    }
  }
}
