// Assign: which virtual expert computes each pair, from the plan. Four small kernels around `plan_step`.
//
// Counts first: `elastic_count` exchanges the counts of real experts, plan_step plans, `elastic_table` turns the plan
// into a table, `elastic_assign` writes a virtual id for each pair, dispatch runs on those. Under the plan of the step
// before (decode), `elastic_assign` comes first, and `elastic_recount` learns the counts from what dispatch received,
// for the next plan: no second exchange of counts.
//
// An expert's pairs are ordered by source, then token: `balance/pieces.py` says the same in numpy.
//
// Example: 5 pairs of expert 0 with rows_ER[0] = [3, 2], of which source 0 has 4 and source 1 has 1. Rank 1's slot 0
// has the expert, PER_RANK is 3 with one slot. Source 0's pairs go to virtual experts 0, 0, 0, 5, source 1's to 5.

#if REAL_EXPERTS
#define AT_ONCE 8  // loads of a thread in flight; one after the other they would be most of the time

// Count this rank's pairs of each expert, send the counts to everybody, wait for everybody's.
extern "C" __global__ void __launch_bounds__(THREADS, 1) elastic_count(const __grid_constant__ Params p) {
  begin_kernel();
  __shared__ u32 count_E[REAL_EXPERTS];
  __shared__ bool last;
  const Elastic& layer = elastic_of(p);
  State* state = (State*)p.state;
  u32 epoch = epoch_after(*(volatile u32*)&state->counts_epoch);
  if (!alive(p)) return;
  for (u32 e = threadIdx.x; e < REAL_EXPERTS; e += THREADS) count_E[e] = 0;
  __syncthreads();
  u32 pairs = min((u32)max(*(const int*)p.tokens, 0), (u32)p.room) * TOP_K;
  for (u32 at = blockIdx.x * THREADS + threadIdx.x; at < pairs; at += gridDim.x * THREADS) {
    i64 e = ((const i64*)p.real_ids)[at];
    if ((u64)e < REAL_EXPERTS) atomicAdd(&count_E[e], 1u);
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < REAL_EXPERTS; e += THREADS)
    if (count_E[e]) atomicAdd((u32*)layer.counts_E + e, count_E[e]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = last_block(&state->counts_done);
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (u32 e = threadIdx.x; e < REAL_EXPERTS; e += THREADS) {
    u32 count = *(volatile u32*)((u32*)layer.counts_E + e);
    ((u32*)layer.counts_E)[e] = 0;
    for (u32 r = 0; r < RANKS; ++r)
      store_relaxed(p.peer[r] + p.at_real_cells + 8 * (p.rank * REAL_EXPERTS + e), pack(epoch, count));
  }
  if (threadIdx.x == 0) state->counts_epoch = epoch;
  for (u32 i = threadIdx.x; i < RANKS * REAL_EXPERTS; i += THREADS)
    ((u32*)layer.counts_RE)[i] = (u32)await(p, SEND_ROWS, p.at_real_cells + 8ull * i, epoch, i / REAL_EXPERTS);
}

// The virtual expert that rank r computes rows of expert e with; -1 if the directory has no usable slot with it.
__device__ __forceinline__ int virtual_at(const Elastic& layer, u32 e, u32 r) {
  if (r == ((const u32*)layer.home_E)[e]) return r * PER_RANK + ((const u32*)layer.local_E)[e];
  for (u32 s = 0; s < (u32)((const int*)layer.usable_R)[r]; ++s)
    if (((const u32*)layer.keys_RS)[r * GUESTS + s] == (u32)layer.first_key + e) return r * PER_RANK + OWN + s;
  return -1;
}

// One split's record, by one thread. Rows for a rank without a usable slot stay at home: `back_R` counts them.
__device__ void fill_split(const Params& p, const Elastic& layer, Split& split, u32 e, u32* back_R) {
  u32 base = 0, running = 0, home = ((const u32*)layer.home_E)[e];
  for (u32 q = 0; q < p.rank; ++q) base += ((const u32*)layer.counts_RE)[q * REAL_EXPERTS + e];
  split.expert = e, split.base = base, split.limit = ((const u32*)layer.counts_RE)[p.rank * REAL_EXPERTS + e];
  for (u32 r = 0; r < RANKS; ++r) {
    u32 rows = ((const u32*)layer.rows_ER)[e * RANKS + r];
    int at = rows || r == home ? virtual_at(layer, e, r) : -1;
    if (at < 0 && rows) atomicAdd(&back_R[home], rows);
    split.ends_R[r] = running += rows;
    split.virtual_R[r] = at < 0 ? (int)(home * PER_RANK + ((const u32*)layer.local_E)[e]) : at;
    split.key_R[r] = at < 0 || r == home ? -1 : (int)((u32)layer.first_key + e);
  }
}

// How many parts the step has, and this rank's tokens in each.
__device__ void cut_step(const Params& p, const Elastic& layer, const u32* back_R) {
  i64 given = *(const int*)p.tokens, most = 0;
  if (given < 0 || given > (i64)p.room) {
    fail(p, SEND_ROWS, TOO_MANY_TOKENS, 1u << p.rank, (u64)given);
    given = 0;
  }
  for (u32 r = 0; r < RANKS; ++r) most = max(most, ((const i64*)layer.rows_R)[r] + (i64)back_R[r]);
  bool whole = layer.most_waves == 1 || most <= (i64)layer.capacity;
  *(u32*)layer.waves = whole ? 1 : (u32)layer.most_waves;
  for (u32 w = 0; w < (u32)layer.most_waves; ++w) {
    i64 left = max(given - (i64)(w * layer.chunk), (i64)0);
    ((int*)layer.tokens_W)[w] = whole ? (w ? 0 : (int)given) : (int)min(left, (i64)layer.chunk);
  }
}

// From the plan just made to the table of the layer's next step. One block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) elastic_table(const __grid_constant__ Params p) {
  begin_kernel();
  __shared__ u32 splits, back_R[RANKS];
  const Elastic& layer = elastic_of(p);
  Table& table = *(Table*)layer.table;
  if (threadIdx.x == 0) splits = 0;
  if (threadIdx.x < RANKS) back_R[threadIdx.x] = 0;
  __syncthreads();
  for (u32 e = threadIdx.x; e < REAL_EXPERTS; e += THREADS) {
    u32 rows = 0, home = ((const u32*)layer.home_E)[e];
#pragma unroll
    for (u32 q = 0; q < RANKS; ++q) rows += ((const u32*)layer.counts_RE)[q * REAL_EXPERTS + e];
    int index = -1;
    if (((const u32*)layer.rows_ER)[e * RANKS + home] != rows && GUESTS) index = (int)atomicAdd(&splits, 1u);
    table.split_E[e] = index;
    if (index >= 0) fill_split(p, layer, table.split[index], e, back_R);
  }
  for (u32 s = threadIdx.x; s < GUESTS; s += THREADS) {
    int donor = ((const int*)layer.fetch_RS)[p.rank * GUESTS + s];
    if (donor >= 0) ((int*)layer.missing_S)[s] = donor;
  }
  __syncthreads();
  if (threadIdx.x == 0) table.splits = splits, table.digest = *(const u32*)layer.digest;
  if (threadIdx.x == 32 && p.counts_first) cut_step(p, layer, back_R);
}

// Whether every slot that the table names still has its key: another layer's plan may have taken it since. The
// directory is the same everywhere, so all ranks find the same. Every thread calls.
__device__ bool slots_are_there(const Elastic& layer, const Table& table) {
  bool gone = false;
  for (u32 i = threadIdx.x; i < table.splits * RANKS; i += THREADS) {
    const Split& split = table.split[i / RANKS];
    u32 r = i % RANKS;
    if (split.key_R[r] < 0) continue;
    u32 s = split.virtual_R[r] - r * PER_RANK - OWN;
    gone |= ((const int*)layer.keys_RS)[r * GUESTS + s] != split.key_R[r];
  }
  return !__syncthreads_or(gone);
}

// Pairs first..last of this warp: a virtual id for each. `next_I`: how many earlier pairs each split has.
__device__ void assign_pairs(const Params& p, const Elastic& layer, const Table& table, u32* next_I, bool splits,
                             u32 first, u32 last) {
  const i64* ids = (const i64*)p.real_ids;
  for (u32 base = first; base < last; base += 32) {
    u32 at = base + threadIdx.x % 32;
    i64 e = at < last ? ids[at] : -1;
    bool valid = (u64)e < REAL_EXPERTS;
    if (!valid && e != -1) fail(p, SEND_ROWS, BAD_EXPERT, 1u << p.rank, (u64)e);
    int index = splits && valid ? table.split_E[e] : -1, home = valid ? ((const int*)layer.home_E)[e] : -1;
    int to = valid ? home * (int)PER_RANK + ((const int*)layer.local_E)[e] : -1;
    if (__any_sync(ALL_LANES, index >= 0)) {
      u32 same = __match_any_sync(ALL_LANES, index >= 0 ? (u32)index : MOST_SPLITS + threadIdx.x % 32);
      u32 before = __popc(same & ((1u << threadIdx.x % 32) - 1));
      u32 position = index >= 0 ? next_I[index] + before : 0;
      __syncwarp();
      if (index >= 0 && before == 0) next_I[index] += __popc(same);
      __syncwarp();
      if (index >= 0 && position < table.split[index].limit) {
        const Split& split = table.split[index];
        u32 r = 0, place = split.base + position;
        while (r < RANKS - 1 && place >= split.ends_R[r]) ++r;
        to = split.virtual_R[r];
      }
    }
    if (at >= last) continue;
    ((i64*)p.ids)[at] = to;
    ((int*)p.home_TK)[at] = home;
    if (MIXED && valid && to / (int)PER_RANK != home) ((u32*)p.open_T)[at / TOP_K] = 1;
  }
}

// How many pairs of each split come before each warp's, in `counts_WI`. Warps have pairs `first`..`last`; `begin` is the
// block's first pair. Every thread calls.
__device__ void count_earlier(const Params& p, const Table& table, u32* counts_WI, u32 begin, u32 first, u32 last) {
  __shared__ u32 earlier_I[MOST_SPLITS];
  const i64* ids = (const i64*)p.real_ids;
  for (u32 i = threadIdx.x; i < MOST_SPLITS; i += THREADS) earlier_I[i] = 0;
  for (u32 i = threadIdx.x; i < WARPS * MOST_SPLITS; i += THREADS) counts_WI[i] = 0;
  __syncthreads();
  for (u32 at = threadIdx.x; at < begin; at += AT_ONCE * THREADS) {
    i64 e[AT_ONCE];
    int index[AT_ONCE];
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j) e[j] = ids[min(at + j * THREADS, begin - 1)];
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j) index[j] = table.split_E[min((u64)e[j], (u64)REAL_EXPERTS)];
#pragma unroll
    for (u32 j = 0; j < AT_ONCE; ++j)
      if (index[j] >= 0 && at + j * THREADS < begin) atomicAdd(&earlier_I[index[j]], 1u);
  }
  for (u32 at = first + threadIdx.x % 32; at < last; at += 32) {
    i64 e = ids[at];
    int index = (u64)e < REAL_EXPERTS ? table.split_E[e] : -1;
    if (index >= 0) atomicAdd(&counts_WI[threadIdx.x / 32 * MOST_SPLITS + index], 1u);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < table.splits; i += THREADS) {
    u32 running = earlier_I[i];
    for (u32 w = 0; w < WARPS; ++w) {
      u32 count = counts_WI[w * MOST_SPLITS + i];
      counts_WI[w * MOST_SPLITS + i] = running;
      running += count;
    }
  }
  __syncthreads();
}

// Blocks take consecutive tokens, and so do a block's warps. What comes before a block it counts itself: all the
// counting that a plan without splits needs is none.
extern "C" __global__ void __launch_bounds__(THREADS, 1) elastic_assign(const __grid_constant__ Params p) {
  begin_kernel();
  if (!alive(p)) return;
  const Elastic& layer = elastic_of(p);
  const Table& table = *(const Table*)layer.table;
  u32 tokens = min((u32)max(*(const int*)p.tokens, 0), (u32)p.room);
  u32 share = (tokens + gridDim.x - 1) / gridDim.x, begin = min(blockIdx.x * share, tokens);
  u32 end = min(begin + share, tokens), warp_share = (share + WARPS - 1) / WARPS;
  u32 first = min(begin + threadIdx.x / 32 * warp_share, end), last = min(first + warp_share, end);
  if (MIXED)
    for (u32 t = begin + threadIdx.x; t < end; t += THREADS) ((u32*)p.open_T)[t] = 0;
  bool splits = slots_are_there(layer, table) && table.splits;  // also: zeros are written before ones
  if (splits) count_earlier(p, table, shared_words, begin * TOP_K, first * TOP_K, last * TOP_K);
  u32* next_I = shared_words + threadIdx.x / 32 * MOST_SPLITS;
  assign_pairs(p, layer, table, next_I, splits, first * TOP_K, last * TOP_K);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    ((State*)p.state)->digest = table.digest;
    if (!p.counts_first) *(u32*)layer.waves = 1, ((int*)layer.tokens_W)[0] = *(const int*)p.tokens;
  }
}

// The counts of real experts from those of virtual ones, after a dispatch. One block.
extern "C" __global__ void __launch_bounds__(THREADS, 1) elastic_recount(const __grid_constant__ Params p) {
  begin_kernel();
  const Elastic& layer = elastic_of(p);
  const Table& table = *(const Table*)layer.table;
  for (u32 i = threadIdx.x; i < RANKS * REAL_EXPERTS; i += THREADS) {
    u32 e = i % REAL_EXPERTS, home = ((const u32*)layer.home_E)[e];
    const u32* counts_V = (const u32*)p.counts_RE + (u64)(i / REAL_EXPERTS) * EXPERTS;
    u32 count = counts_V[home * PER_RANK + ((const u32*)layer.local_E)[e]];
    int index = table.split_E[e];
    if (index >= 0)
      for (u32 r = 0; r < RANKS; ++r)
        if (table.split[index].key_R[r] >= 0) count += counts_V[table.split[index].virtual_R[r]];
    ((u32*)layer.counts_RE)[i] = count;
  }
}
#endif
