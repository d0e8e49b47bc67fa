// The plan of a step on the device: one block, the same integers as balance/naive.py, which says what and why.
//
// Knows nothing of rows or peers: counts in, arrays out. `plan.py` launches it and defines the static shape: RANKS (at
// most 64), EXPERTS, SLOTS. No headers are included. A plan that moves nothing ends after one pass over the counts; else
// each of the 16 warps makes one attempt (plan_attempt.cuh), and the first that fits ends those after it.
//
// The digest is a sum over words, so that a word that changes costs one subtraction and one addition.

#if SLOTS > 0

// Experts by home, ascending within each: `first_R` and `by_home_E`, by warp 0.
__device__ void sort_by_home(PlanShared& s) {
  u32 lane = threadIdx.x % 32, base = 0;
  for (u32 j = 0; j < WORDS; ++j) {
    u32 rank = lane + 32 * j, count = rank < RANKS ? s.next_R[rank] : 0, sum = count;
    for (u32 d = 1; d < 32; d *= 2) {
      u32 below = __shfl_up_sync(ALL_LANES, sum, d);
      if (lane >= d) sum += below;
    }
    if (rank < RANKS) s.first_R[rank] = s.next_R[rank] = base + sum - count;
    base += __shfl_sync(ALL_LANES, sum, 31);
  }
  if (lane == 0) s.first_R[RANKS] = base;
  __syncwarp();
  for (u32 at = 0; at < EXPERTS; at += 32) {
    u32 e = at + lane, home = e < EXPERTS ? s.home_E[e] : RANKS;
    u32 same = __match_any_sync(ALL_LANES, home), before = __popc(same & ((1u << lane) - 1));
    u32 place = e < EXPERTS ? s.next_R[home] + before : 0;
    __syncwarp();
    if (e < EXPERTS) {
      s.by_home_E[place] = (u16)e;
      if (before == 0) s.next_R[home] += __popc(same);
    }
    __syncwarp();
  }
}

// Slots for the pieces of one rank, by a warp; returns this lane's change of the digest.
__device__ u32 give_slots(const PlanParams& p, const u64* log, u32 pieces, u32 rank) {
  u32 lane = threadIdx.x % 32, hash = 0, layer = (u32)p.layer, first_key = layer * EXPERTS;
  int *keys = (int*)p.keys_RS + rank * SLOTS, *ages = (int*)p.ages_RS + rank * SLOTS;
  int key[SLOT_WORDS], age[SLOT_WORDS];
#pragma unroll
  for (u32 j = 0; j < SLOT_WORDS; ++j) {
    bool real = lane + 32 * j < SLOTS;
    key[j] = real ? keys[lane + 32 * j] : -1, age[j] = real ? ages[lane + 32 * j] : 0;
  }
  for (u32 fill = 0; fill < 2; ++fill) {
    for (u32 base = 0; base < pieces; base += 32) {
      u64 piece = base + lane < pieces ? log[base + lane] : ~0ull;
      for (u32 votes = __ballot_sync(ALL_LANES, (piece >> 32 & 0xffff) == rank); votes; votes &= votes - 1) {
        int wanted = (int)(first_key + (u32)(__shfl_sync(ALL_LANES, piece, __ffs(votes) - 1) >> 48));
        bool found = false;
#pragma unroll
        for (u32 j = 0; j < SLOT_WORDS; ++j) {
          if (key[j] == wanted) found = true, age[j] = 0;
        }
        if (__any_sync(ALL_LANES, found) || !fill) continue;
        u32 worth[SLOT_WORDS], most = 0;
        bool is[SLOT_WORDS];
#pragma unroll
        for (u32 j = 0; j < SLOT_WORDS; ++j) {
          bool other = key[j] >= 0 && (u32)key[j] / EXPERTS != layer;
          worth[j] = key[j] < 0                                        ? 3u << 30
                     : age[j] == 0 || (other && (u32)age[j] < p.keep)  ? 0
                     : (u32)age[j] >= p.layers                         ? (2u << 30) + age[j]
                                                                       : (1u << 30) + (u32)p.layers - age[j];
          if (lane + 32 * j >= SLOTS) worth[j] = 0;
          most = max(most, worth[j]);
        }
        most = __reduce_max_sync(ALL_LANES, most);
#pragma unroll
        for (u32 j = 0; j < SLOT_WORDS; ++j) is[j] = worth[j] == most;
        u32 slot = lowest<SLOT_WORDS>(is);
#pragma unroll
        for (u32 j = 0; j < SLOT_WORDS; ++j) {
          if (lane + 32 * j != slot) continue;
          u32 home = ((const u32*)p.home_E)[wanted - (int)first_key], at = rank * SLOTS + slot;
          hash += plan_mixed(wanted, AT_KEYS + at) - plan_mixed(key[j], AT_KEYS + at);
          hash += plan_mixed(home, AT_FETCH + at) - plan_mixed(~0u, AT_FETCH + at);
          key[j] = wanted, age[j] = 0, ((u32*)p.fetch_RS)[at] = home;
        }
      }
    }
  }
#pragma unroll
  for (u32 j = 0; j < SLOT_WORDS; ++j)
    if (lane + 32 * j < SLOTS) keys[lane + 32 * j] = key[j], ages[lane + 32 * j] = age[j];
  return hash;
}

// Attempts, then the best one's pieces; returns this thread's change of the digest.
__device__ u32 spill(const PlanParams& p, PlanShared& s) {
  u32 hash = 0, warp = threadIdx.x / 32;
  const int *keys = (const int*)p.keys_RS, *ages = (const int*)p.ages_RS;
  for (u32 i = threadIdx.x; i < RANKS * SLOTS; i += THREADS) {
    bool own = keys[i] >= 0 && (u32)keys[i] / EXPERTS == (u32)p.layer;
    s.held_RS[i] = own ? (short)((u32)keys[i] % EXPERTS) : -1;
    if (keys[i] < 0 || own || (u32)ages[i] >= p.keep) atomicAdd(&s.left_R[i / SLOTS], 1);
  }
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) atomicAdd(&s.next_R[s.home_E[e]], 1);
  __syncthreads();
  if (warp == 0) sort_by_home(s);
  __syncthreads();
  attempt(p, s, warp);
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 best = s.won;
    if (best == ATTEMPTS) {
      best = 0;
      for (u32 a = 1; a < ATTEMPTS; ++a) best = s.worst_A[a] < s.worst_A[best] ? a : best;
    }
    s.best = best;
  }
  __syncthreads();
  u32 best = s.best, pieces = s.pieces_A[best], *rows_ER = (u32*)p.rows_ER;
  const u64* log = (const u64*)p.pieces + (u64)best * RANKS * SLOTS;
  for (u32 i = threadIdx.x; i < pieces; i += THREADS) {
    u64 piece = log[i];
    u32 at = (u32)(piece >> 48) * RANKS + (u32)(piece >> 32 & 0xffff), rows = (u32)piece;
    rows_ER[at] = rows;
    hash += plan_mixed(rows, AT_ROWS + at) - plan_mixed(0, AT_ROWS + at);
  }
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    u32 at = e * RANKS + s.home_E[e], stay = s.stay_AE[best][e];
    if (stay == s.rows_E[e]) continue;
    rows_ER[at] = stay;
    hash += plan_mixed(stay, AT_ROWS + at) - plan_mixed(s.rows_E[e], AT_ROWS + at);
  }
  for (u32 r = threadIdx.x; r < RANKS; r += THREADS) s.load_R[r] = s.loads_AR[best][r];
  for (u32 rank = warp; rank < RANKS; rank += THREADS / 32) hash += give_slots(p, log, pieces, rank);
  return hash;
}

#endif

// Counts and directory in, everything at home out; returns this thread's part of the digest.
__device__ u32 plan_at_home(const PlanParams& p, PlanShared& s) {
  u32 hash = 0;
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    u32 home = ((const u32*)p.home_E)[e];
    s.rows_E[e] = 0, s.home_E[e] = (u16)home;
    hash += plan_mixed(home, AT_HOME + e);
  }
  for (u32 r = threadIdx.x; r < RANKS; r += THREADS) s.load_R[r] = s.left_R[r] = s.next_R[r] = 0;
  if (threadIdx.x == 0) s.won = ATTEMPTS, s.hash = 0;
  __syncthreads();
#pragma unroll 8
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS) {
    u32 count = ((const u32*)p.counts_RE)[i];
    if (count) atomicAdd(&s.rows_E[i % EXPERTS], count);
    hash += plan_mixed(count, i);
  }
  for (int i = (int)threadIdx.x; i < RANKS * SLOTS; i += THREADS) {
    int* age = (int*)p.ages_RS + i;
    *age = min(*age + 1, MOST_AGE), ((int*)p.fetch_RS)[i] = -1;
    hash += plan_mixed(((const u32*)p.keys_RS)[i], AT_KEYS + i) + plan_mixed(~0u, AT_FETCH + i);
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) atomicAdd(&s.load_R[s.home_E[e]], s.rows_E[e]);
#pragma unroll 4
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS) {
    u32 e = i / RANKS, rows = s.home_E[e] == i % RANKS ? s.rows_E[e] : 0;
    ((u32*)p.rows_ER)[i] = rows;
    hash += plan_mixed(rows, AT_ROWS + i);
  }
  return hash;
}

// The whole plan by one block of THREADS threads, with room for a PlanShared in `plan_memory`.
__device__ void make_plan(const PlanParams& p) {
  PlanShared& s = *(PlanShared*)plan_memory;
  u32 hash = plan_at_home(p, s);
  __syncthreads();
  bool above = false;
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) above |= s.rows_E[e] > (u32)p.capacity;
  Ranks ranks;
  set_targets(p, s, (u32)p.alpha_1024, ranks);
#if SLOTS > 0
  bool over = any_over(ranks);  // by itself: all lanes vote
  if (__syncthreads_or(over || above)) hash += spill(p, s);
#endif
  hash = __reduce_add_sync(ALL_LANES, hash);
  if (threadIdx.x % 32 == 0) atomicAdd(&s.hash, hash);
  __syncthreads();
  for (u32 r = threadIdx.x; r < RANKS; r += THREADS) ((u64*)p.rows_R)[r] = s.load_R[r];
  if (threadIdx.x == 0) *(u32*)p.digest = s.hash;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) plan_step(PlanParams p) { make_plan(p); }

// How much dynamic shared memory `plan_step` needs: read by the host once.
extern "C" __device__ u32 plan_shared_bytes = sizeof(PlanShared);
