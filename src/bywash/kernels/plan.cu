// The plan of a step on the device: one block, the same integers as balance/naive.py, which says what and why.
//
// Knows nothing of rows or peers: counts in, arrays out. `plan.py` launches it and defines the static shape: RANKS (at
// most 64), EXPERTS, SLOTS. No headers are included. A plan that moves nothing ends after one pass over the counts;
// else one warp tries to keep what the slots hold (plan_keep.cuh), others make one attempt each (plan_attempt.cuh), and
// the first that fits ends those after it. The first four, of which one nearly always fits, have a scheduler of the
// multiprocessor each; the others begin when these have failed, and those with targets in between when one of them fits.
//
// The digest is a sum over words, so that a word that changes costs one subtraction and one addition, and what nearly
// all words of rows_ER and fetch_RS are costs nothing: the host knows that part.

#define FIRST_ATTEMPTS 4  // those whose targets are not refined

#if SLOTS > 0

// Slots and rows of the pieces of one rank, by a warp; returns this lane's change of the digest.
__device__ u32 give_slots(const PlanParams& p, const PlanShared& s, u32 best, u32 rank) {
  u32 lane = threadIdx.x % 32, hash = 0, layer = (u32)p.layer, first_key = layer * EXPERTS;
  u32 had = s.left_R[rank], pieces = had - s.left_AR[best][rank];
  if (pieces == 0) return 0;
  int *keys = (int*)p.keys_RS + rank * SLOTS, *ages = (int*)p.ages_RS + rank * SLOTS;
  const u64* log = (const u64*)p.pieces + ((u64)best * RANKS + rank) * SLOTS;
  int key[SLOT_WORDS], age[SLOT_WORDS];
  u32 expert[SLOT_WORDS], missing[SLOT_WORDS];
#pragma unroll
  for (u32 j = 0; j < SLOT_WORDS; ++j) {
    u32 i = lane + 32 * j;
    key[j] = i < SLOTS ? keys[i] : -1, age[j] = i < SLOTS ? ages[i] : 0, expert[j] = missing[j] = 0;
    if (i >= pieces) continue;
    u64 piece = log[had - 1 - i];
    expert[j] = (u32)(piece >> 32);
    u32 at = expert[j] * RANKS + rank;
    ((u32*)p.rows_ER)[at] = (u32)piece;
    hash += plan_mixed((u32)piece, AT_ROWS + at) - plan_mixed(0, AT_ROWS + at);
  }
  for (u32 i = 0; i < pieces; ++i) {  // slots that have the expert first, so that none of them is taken
    int wanted = (int)(first_key + word_of<SLOT_WORDS>(expert, i));
    bool found = false;
#pragma unroll
    for (u32 j = 0; j < SLOT_WORDS; ++j)
      if (key[j] == wanted) found = true, age[j] = 0;
    if (!__any_sync(ALL_LANES, found)) missing[i / 32] |= 1u << i % 32;
  }
  for (u32 i = 0; i < pieces; ++i) {
    if (!(missing[i / 32] >> i % 32 & 1)) continue;
    int wanted = (int)(first_key + word_of<SLOT_WORDS>(expert, i));
    u32 worth[SLOT_WORDS], most = 0;
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
    u32 slot = lowest<SLOT_WORDS>(worth, __reduce_max_sync(ALL_LANES, most));
#pragma unroll
    for (u32 j = 0; j < SLOT_WORDS; ++j) {
      if (lane + 32 * j != slot) continue;
      u32 home = s.home_E[wanted - (int)first_key], at = rank * SLOTS + slot;
      hash += plan_mixed(wanted, AT_KEYS + at) - plan_mixed(key[j], AT_KEYS + at);
      hash += plan_mixed(home, AT_FETCH + at) - plan_mixed(~0u, AT_FETCH + at);
      key[j] = wanted, age[j] = 0, ((u32*)p.fetch_RS)[at] = home;
    }
  }
#pragma unroll
  for (u32 j = 0; j < SLOT_WORDS; ++j)
    if (lane + 32 * j < SLOTS) keys[lane + 32 * j] = key[j], ages[lane + 32 * j] = age[j];
  return hash;
}

// What the attempts begin from: experts by place, what the slots hold, the largest expert of each rank.
__device__ void prepare(const PlanParams& p, PlanShared& s) {
  const int *keys = (const int*)p.keys_RS, *ages = (const int*)p.ages_RS;
  for (u32 r = threadIdx.x; r <= RANKS; r += THREADS) s.first_R[r] = (u16)((const u32*)p.first_R)[r];
  for (u32 i = threadIdx.x; i < EXPERTS; i += THREADS) {
    u32 e = ((const u32*)p.expert_P)[i];
    s.expert_P[i] = (u16)e, s.place_E[e] = (u16)i, s.home_P[i] = s.home_E[e];
    s.stay_AP[0][i] = s.rows_E[e];
  }
  for (u32 i = threadIdx.x; i < RANKS * SLOTS; i += THREADS) {
    int key = keys[i];
    bool own = key >= 0 && (u32)key / EXPERTS == (u32)p.layer;
    s.held_RS[i] = own ? (short)((u32)key % EXPERTS) : -1;
    if (own) s.holds_R[i / SLOTS] = 1;
    if (key < 0 || own || (u32)ages[i] >= p.keep) atomicAdd(&s.left_R[i / SLOTS], 1);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < RANKS * SLOTS; i += THREADS)
    if (s.held_RS[i] >= 0) s.held_RS[i] = (short)s.place_E[s.held_RS[i]];
  for (u32 rank = threadIdx.x / 32; rank < RANKS; rank += THREADS / 32) {
    u32 most, place = largest(s, s.stay_AP[0], rank, EXPERTS, 0, most);
    if (threadIdx.x % 32 == 0) s.largest_R[rank] = (u16)place;
  }
  __syncthreads();
}

// Where the bisection between the targets of `won` and the attempt before it ends: a place in shared memory.
__device__ __forceinline__ u32 bisected(const PlanShared& s, u32 won) {
  u32 fails = 0, fitting = 16;
  while (fitting - fails > 1) {
    u32 middle = (fails + fitting) / 2;
    if (s.fits >> middle & 1) fitting = middle;
    else fails = middle;
  }
  return fitting == 16 ? won : fitting <= won ? fitting - 1 : fitting;
}

// The place of the attempt that wins, made by the whole block in up to three rounds. In the third, if attempt `won` is to
// be refined, all 15 targets between are tried at once, at the places of those that did not win.
__device__ __forceinline__ u32 best_attempt(const PlanParams& p, PlanShared& s) {
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, won = ATTEMPTS;
#pragma unroll 1
  for (u32 round = 0; round < 3; ++round) {
    bool between = round == 2, mine = between ? warp != won : (warp < FIRST_ATTEMPTS) == (round == 0);
    u32 step = warp < won ? warp + 1 : warp, alpha = alpha_of(p, warp);
    if (between) alpha = alpha_of(p, won - 1), alpha += (alpha_of(p, won) - alpha) * step / 16;
    bool fits = mine && attempt(p, s, warp, alpha, between || warp > 0, (int)(between ? won : warp));
    if (fits && lane == 0) {
      if (between) atomicOr(&s.fits, 1u << step);
      else atomicMin(&s.won, (int)warp);
    }
    if (round == 0 && warp == FIRST_ATTEMPTS) fits = keep_slots(p, s);
    bool found = __syncthreads_or(fits);
    if (s.won < FIRST_ATTEMPTS || (round == 1 && !found)) break;
    won = (u32)s.won;
  }
  if (s.won < 0) return KEEP_SLOT;
  if (s.won < FIRST_ATTEMPTS) return (u32)s.won;
  if (s.won < ATTEMPTS) return bisected(s, won);
  u32 best = 0;
  for (u32 a = 1; a < ATTEMPTS; ++a) best = s.worst_A[a] < s.worst_A[best] ? a : best;
  return best;
}

// Attempts, then the best one's pieces; returns this thread's change of the digest.
__device__ u32 spill(const PlanParams& p, PlanShared& s) {
  u32 hash = 0;
  prepare(p, s);
  u32 best = best_attempt(p, s);
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    u32 at = e * RANKS + s.home_E[e], stay = s.stay_AP[best][s.place_E[e]];
    if (stay == s.rows_E[e]) continue;
    ((u32*)p.rows_ER)[at] = stay;
    hash += plan_mixed(stay, AT_ROWS + at) - plan_mixed(s.rows_E[e], AT_ROWS + at);
  }
  for (u32 r = threadIdx.x; r < RANKS; r += THREADS) s.load_R[r] = s.loads_AR[best][r];
  for (u32 rank = threadIdx.x / 32; rank < RANKS; rank += THREADS / 32) hash += give_slots(p, s, best, rank);
  return hash;
}

#endif

__device__ __forceinline__ void read_words(u64 address, u32 (&words)[1]) { words[0] = *(const u32*)address; }
__device__ __forceinline__ void read_words(u64 address, u32 (&words)[4]) {
  uint4 four = *(const uint4*)address;
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// Rows of each expert into `rows_E`, N experts at a time; returns this thread's part of the digest.
template <u32 N> __device__ __forceinline__ u32 add_counts(const PlanParams& p, PlanShared& s) {
  const u32 columns = EXPERTS / N, groups = THREADS > columns ? THREADS / columns : 1;
  u32 hash = 0;
  for (u32 i = threadIdx.x; i < columns * groups; i += THREADS) {
    u32 column = i % columns * N, sums[N] = {};
#pragma unroll 8
    for (u32 rank = i / columns; rank < RANKS; rank += groups) {
      u32 at = rank * EXPERTS + column, counts[N];
      read_words(p.counts_RE + 4ull * at, counts);
#pragma unroll
      for (u32 n = 0; n < N; ++n) sums[n] += counts[n], hash += plan_mixed(counts[n], at + n);
    }
#pragma unroll
    for (u32 n = 0; n < N; ++n)
      if (sums[n]) atomicAdd(&s.rows_E[column + n], sums[n]);
  }
  return hash;
}

// Counts and directory in, everything at home out; returns this thread's part of the digest.
__device__ u32 plan_at_home(const PlanParams& p, PlanShared& s) {
  u32 hash = 0;
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) s.rows_E[e] = 0;
  for (u32 r = threadIdx.x; r < RANKS; r += THREADS) s.load_R[r] = s.left_R[r] = s.holds_R[r] = 0;
  if (threadIdx.x == 0) s.won = ATTEMPTS, s.fits = 0, s.hash = (u32)p.empty_hash;
  __syncthreads();
#if EXPERTS % 4 == 0
  hash += p.counts_RE % 16 ? add_counts<1>(p, s) : add_counts<4>(p, s);
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS / 4; i += THREADS) ((uint4*)p.rows_ER)[i] = uint4{0, 0, 0, 0};
#else
  hash += add_counts<1>(p, s);
  for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS) ((u32*)p.rows_ER)[i] = 0;
#endif
  u32 hot[EXPERT_WORDS], *hot_E = (u32*)p.hot_LE + (u32)p.layer * EXPERTS;
#pragma unroll
  for (u32 j = 0; j < EXPERT_WORDS; ++j) {
    u32 e = threadIdx.x + THREADS * j;
    if (e >= EXPERTS) continue;
    u32 home = ((const u32*)p.home_E)[e];
    hot[j] = hot_E[e], s.home_E[e] = (u8)home;
    hash += plan_mixed(home, AT_HOME + e);
  }
  for (int i = (int)threadIdx.x; i < RANKS * SLOTS; i += THREADS) {
    int* age = (int*)p.ages_RS + i;
    *age = min(*age + 1, MOST_AGE), ((int*)p.fetch_RS)[i] = -1;
    hash += plan_mixed(((const u32*)p.keys_RS)[i], AT_KEYS + i);
  }
  __syncthreads();
#pragma unroll
  for (u32 j = 0; j < EXPERT_WORDS; ++j) {
    u32 e = threadIdx.x + THREADS * j;
    if (e >= EXPERTS) continue;
    u32 rows = s.rows_E[e], at = e * RANKS + s.home_E[e];
    hot_E[e] = hot[j] - hot[j] / HOT_PLANS + min(rows, (u32)MOST_HOT_ROWS);
    if (rows == 0) continue;
    atomicAdd(&s.load_R[s.home_E[e]], rows);
    ((u32*)p.rows_ER)[at] = rows;
    hash += plan_mixed(rows, AT_ROWS + at) - plan_mixed(0, AT_ROWS + at);
  }
  return hash;
}

// The whole plan by one block of THREADS threads, with room for a PlanShared in `plan_memory`.
__device__ void make_plan(const PlanParams& p) {
  PlanShared& s = *(PlanShared*)plan_memory;
  u32 hash = plan_at_home(p, s);
  __syncthreads();
#if SLOTS > 0
  Ranks ranks;
  read_ranks(p, s, ranks);
  bool over = over_target(ranks, (u32)p.alpha_1024);
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) over |= s.rows_E[e] > (u32)p.capacity;
  if (__syncthreads_or(over)) hash += spill(p, s);
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
