// The plan of a step on the device: one block, the same integers as balance/naive.py, which says what and why.
//
// Knows nothing of rows or peers: counts in, arrays out. `plan.py` launches it and defines the static shape: RANKS (at
// most 64), EXPERTS, SLOTS. No headers are included. A plan that moves nothing ends after one pass over the counts;
// else one warp tries to keep what the slots hold (plan_keep.cuh), others make one attempt each (plan_attempt.cuh), and
// the first that fits, in the order of their turns, ends those after it. The first four, with what slots hold and
// afresh, of which one nearly always fits, run beside the one that keeps slots; the others begin when these have failed,
// those with targets in between when one of them fits. Where slots hold nothing, no attempt is made afresh.
//
// One block waits long for memory, so a plan that moves nothing waits once: every read is under way before the first
// is used. It does not clear rows_ER, where the plan before left everything at home. The digest is a sum over words, so
// that a word that changes costs one subtraction and one addition, and what nearly all words of rows_ER and fetch_RS
// are costs nothing: the host knows that part. Counts cost it a multiplication each, to be weighed.

#define FIRST_PART 4  // of the turns, the first 1 / FIRST_PART, whose targets are not refined

// What a thread reads of the state before it waits for anything: one read takes as long as all of them.
struct State {
  u32 home[EXPERT_WORDS], hot[EXPERT_WORDS], expert[EXPERT_WORDS], first, speed, away;
  int key[KEY_WORDS], age[KEY_WORDS];
};

__device__ __forceinline__ void read_state(const PlanParams& p, State& state) {
  u32 thread = threadIdx.x;
  state.away = *(const u32*)p.away;
  if (thread < RANKS) state.speed = ((const u32*)p.speeds_R)[thread];
  if (thread <= RANKS) state.first = ((const u32*)p.first_R)[thread];
#pragma unroll
  for (u32 j = 0; j < EXPERT_WORDS; ++j) {
    u32 e = thread + THREADS * j;
    if (e >= EXPERTS) continue;
    state.home[j] = ((const u32*)p.home_E)[e], state.expert[j] = ((const u32*)p.expert_P)[e];
    state.hot[j] = ((const u32*)p.hot_LE)[(u32)p.layer * EXPERTS + e];
  }
#pragma unroll
  for (u32 j = 0; j < KEY_WORDS; ++j) {
    u32 i = thread + THREADS * j;
    if (i < RANKS * SLOTS) state.key[j] = ((const int*)p.keys_RS)[i], state.age[j] = ((const int*)p.ages_RS)[i];
  }
}

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

// What the attempts begin from: experts by place, what the slots hold, the largest expert of each rank. Returns whether
// a slot holds an expert of the layer.
__device__ bool prepare(const PlanParams& p, PlanShared& s, const State& state) {
  bool holds = false;
  if (threadIdx.x <= RANKS) s.first_R[threadIdx.x] = (u16)state.first;
#pragma unroll
  for (u32 j = 0; j < EXPERT_WORDS; ++j) {
    u32 place = threadIdx.x + THREADS * j;
    if (place >= EXPERTS) continue;
    u32 e = state.expert[j];
    s.expert_P[place] = (u16)e, s.place_E[e] = (u16)place, s.home_P[place] = s.home_E[e];
    s.stay_AP[0][place] = s.rows_E[e];
  }
#pragma unroll
  for (u32 j = 0; j < KEY_WORDS; ++j) {
    u32 i = threadIdx.x + THREADS * j;
    if (i >= RANKS * SLOTS) continue;
    int key = state.key[j];
    bool own = key >= 0 && (u32)key / EXPERTS == (u32)p.layer;
    s.held_RS[i] = own ? (short)((u32)key % EXPERTS) : -1;
    if (own) s.holds_R[i / SLOTS] = 1, holds = true;
    if (key < 0 || own || (u32)state.age[j] >= p.keep) atomicAdd(&s.left_R[i / SLOTS], 1);
  }
  holds = __syncthreads_or(holds);
  for (u32 i = threadIdx.x; i < RANKS * SLOTS; i += THREADS)
    if (s.held_RS[i] >= 0) s.held_RS[i] = (short)s.place_E[s.held_RS[i]];
  for (u32 rank = threadIdx.x / 32; rank < RANKS; rank += THREADS / 32) {
    u32 most, place = largest(s, s.stay_AP[0], rank, EXPERTS, 0, most);
    if (threadIdx.x % 32 == 0) s.largest_R[rank] = (u16)place;
  }
  __syncthreads();
  return holds;
}

// Where the bisection between the targets of the winner, at place `won`, and of the attempt before it ends: a place.
__device__ __forceinline__ u32 bisected(const PlanShared& s, u32 won) {
  u32 fails = 0, fitting = 16;
  while (fitting - fails > 1) {
    u32 middle = (fails + fitting) / 2;
    if (s.fits >> middle & 1) fitting = middle;
    else fails = middle;
  }
  return fitting == 16 ? won : fitting <= won ? fitting - 1 : fitting;
}

// The attempt of a turn, and whether it is afresh: as balance.naive.TURNS. Where slots hold nothing, each is made once.
__device__ __forceinline__ u32 number_of(u32 turn, bool holds) {
  return !holds ? turn : turn < 4 ? turn % 2 : turn / 2;
}
__device__ __forceinline__ bool is_afresh(u32 turn, bool holds) { return holds && (turn < 4 ? turn >= 2 : turn % 2); }

// The place of the attempt that wins, made by the whole block in rounds, each turn at its number modulo ATTEMPTS. After
// one that fits, if it is to be refined, all 15 targets between are tried at once, at the places of those that did not
// win. If none fits, the one that came nearest is made again where another had its place after it.
__device__ __forceinline__ u32 best_attempt(const PlanParams& p, PlanShared& s, bool holds) {
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, won = TURNS;
  u32 turns = holds ? TURNS : ATTEMPTS, first = turns / FIRST_PART;
  bool found = false;
#pragma unroll 1
  for (u32 round = 0; true; ++round) {
    bool search = won == TURNS, mine = (warp == won % ATTEMPTS) != found;
    u32 turn = won, step = ATTEMPTS;
    if (search) turn = ATTEMPTS * round + warp - (warp < first ? 0 : ATTEMPTS), mine = turn < turns;
    else if (found) step = warp < won % ATTEMPTS ? warp + 1 : warp;
    u32 number = number_of(turn, holds), alpha = alpha_of(p, number);
    if (step < ATTEMPTS) alpha = alpha_of(p, number - 1), alpha += (alpha_of(p, number) - alpha) * step / ATTEMPTS;
    u64 worst = mine ? attempt(p, s, warp, alpha, number > 0, is_afresh(turn, holds), turn) : ~0ull;
    bool fits = worst == 0;
    if (lane == 0 && mine && search) s.worst_T[turn] = worst;
    if (lane == 0 && fits) {
      if (search) atomicMin(&s.won, (int)turn);
      else atomicOr(&s.fits, 1u << step);
    }
    if (round == 0 && warp == TURNS / FIRST_PART) fits = keep_slots(p, s);
    fits = __syncthreads_or(fits);
    if (!search) break;
    if (fits) {
      found = true, won = (u32)s.won;
      if ((int)won < (int)first) break;
    } else if (round == turns / ATTEMPTS) {
      won = 0;
      for (turn = 1; turn < turns; ++turn) won = s.worst_T[turn] < s.worst_T[won] ? turn : won;
      if (won + ATTEMPTS >= turns) break;
    }
  }
  if (!found) return won % ATTEMPTS;
  if ((int)won < (int)first) return (int)won < 0 ? KEEP_SLOT : won;
  return bisected(s, won % ATTEMPTS);
}

// Attempts, then the best one's pieces; returns this thread's change of the digest.
__device__ u32 spill(const PlanParams& p, PlanShared& s, const State& state) {
  u32 hash = 0;
  bool holds = prepare(p, s, state);
  u32 best = best_attempt(p, s, holds);
  for (u32 e = threadIdx.x; e < EXPERTS; e += THREADS) {
    u32 at = e * RANKS + s.home_E[e], stay = s.stay_AP[best][s.place_E[e]];
    if (stay == s.rows_E[e]) continue;
    ((u32*)p.rows_ER)[at] = stay;
    hash += plan_mixed(stay, AT_ROWS + at) - plan_mixed(s.rows_E[e], AT_ROWS + at);
  }
  if (threadIdx.x < RANKS) s.load_R[threadIdx.x] = s.loads_AR[best][threadIdx.x];
  for (u32 rank = threadIdx.x / 32; rank < RANKS; rank += THREADS / 32) hash += give_slots(p, s, best, rank);
  return hash;
}

#endif

__device__ __forceinline__ void read_words(const u32* from, u32 (&words)[1]) { words[0] = *from; }
__device__ __forceinline__ void read_words(const u32* from, u32 (&words)[4]) {
  uint4 four = *(const uint4*)from;
  words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// The counts of each expert, added {weighed:32 | rows:32}: each group of threads adds those of every GROUPS-th rank.
__device__ __forceinline__ void add_counts(const PlanParams& p, PlanShared& s) {
#pragma unroll
  for (u32 i = threadIdx.x; i < (COLUMNS * GROUPS + THREADS - 1) / THREADS * THREADS; i += THREADS) {
    u32 group = i / COLUMNS, column = i % COLUMNS * READ_WORDS;
    if (group >= GROUPS) continue;
    u32 rows[READ_WORDS] = {}, weighed[READ_WORDS] = {};
#pragma unroll 8
    for (u32 j = 0; j < (RANKS + GROUPS - 1) / GROUPS; ++j) {
      u32 rank = group + GROUPS * j, weight = weight_of(rank), counts[READ_WORDS];
      if (RANKS % GROUPS && rank >= RANKS) break;
      read_words((const u32*)p.counts_RE + rank * EXPERTS + column, counts);
#pragma unroll
      for (u32 n = 0; n < READ_WORDS; ++n) rows[n] += counts[n], weighed[n] += weight * counts[n];
    }
#pragma unroll
    for (u32 n = 0; n < READ_WORDS; ++n) s.here_AP[group][column + n] = (u64)weighed[n] << 32 | rows[n];
  }
}

// All slots a plan older, nothing to fetch; returns this thread's part of the digest.
__device__ __forceinline__ u32 age_slots(const PlanParams& p, State& state) {
  u32 hash = 0;
#pragma unroll
  for (u32 j = 0; j < KEY_WORDS; ++j) {
    u32 i = threadIdx.x + THREADS * j;
    if (i >= RANKS * SLOTS) continue;
    state.age[j] = min(state.age[j] + 1, MOST_AGE);
    ((int*)p.ages_RS)[i] = state.age[j], ((int*)p.fetch_RS)[i] = -1;
    hash += plan_mixed((u32)state.key[j], AT_KEYS + i);
  }
  return hash;
}

// Everything at home; returns this thread's part of the digest. `above` if an expert is above its capacity.
__device__ __forceinline__ u32 stay_home(const PlanParams& p, PlanShared& s, const State& state, bool& above) {
  u32 hash = 0;
#pragma unroll
  for (u32 j = 0; j < EXPERT_WORDS; ++j) {
    u32 e = threadIdx.x + THREADS * j;
    if (e >= EXPERTS) continue;
    u32 home = state.home[j], at = e * RANKS + home, hot = state.hot[j];
    u64 added = 0;  // fewer than 2^29 rows: nothing is carried to what is weighed
#pragma unroll
    for (u32 group = 0; group < GROUPS; ++group) added += s.here_AP[group][e];
    u32 rows = (u32)added;
    ((u32*)p.hot_LE)[(u32)p.layer * EXPERTS + e] = hot - hot / HOT_PLANS + min(rows, (u32)MOST_HOT_ROWS);
    ((u32*)p.rows_ER)[at] = rows, s.rows_E[e] = rows, s.home_E[e] = (u8)home;
    if (rows > 0) atomicAdd(&s.load_R[home], rows);
    above |= rows > (u32)p.capacity;
    hash += plan_mixed((u32)(added >> 32), e) + plan_mixed(rows, AT_ROWS + at) - plan_mixed(0, AT_ROWS + at);
  }
  return hash;
}

__device__ __forceinline__ void add_to_digest(PlanShared& s, u32 hash) {
  hash = __reduce_add_sync(ALL_LANES, hash);
  if (threadIdx.x % 32 == 0) atomicAdd(&s.hash, hash);
}

// Counts and directory in, everything at home out. Returns whether an expert is above its capacity.
__device__ bool plan_at_home(const PlanParams& p, PlanShared& s, State& state) {
  bool above = false;
  if (threadIdx.x < RANKS) s.load_R[threadIdx.x] = s.left_R[threadIdx.x] = s.holds_R[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.won = TURNS, s.fits = 0, s.hash = (u32)p.empty_hash;
  add_counts(p, s);
  if (threadIdx.x < RANKS) s.speed_R[threadIdx.x] = state.speed;
  if (state.away) {
#if EXPERTS % 4 == 0
    for (u32 i = threadIdx.x; i < RANKS * EXPERTS / 4; i += THREADS) ((uint4*)p.rows_ER)[i] = uint4{0, 0, 0, 0};
#else
    for (u32 i = threadIdx.x; i < RANKS * EXPERTS; i += THREADS) ((u32*)p.rows_ER)[i] = 0;
#endif
  }
  u32 hash = age_slots(p, state);
  __syncthreads();
  hash += stay_home(p, s, state, above);
  add_to_digest(s, hash);
  return __syncthreads_or(above);
}

// The whole plan by one block of THREADS threads, with room for a PlanShared in `plan_memory`.
__device__ void make_plan(const PlanParams& p) {
  PlanShared& s = *(PlanShared*)plan_memory;
  State state;
  read_state(p, state);
  bool over = plan_at_home(p, s, state);
#if SLOTS > 0
  Ranks ranks;
  read_ranks(s, ranks);
  over |= __any_sync(ALL_LANES, over_target(ranks, (u32)p.alpha_1024));  // alike in all warps: each sees all ranks
  if (over) {
    add_to_digest(s, spill(p, s, state));
    __syncthreads();
  }
#endif
  if (threadIdx.x < RANKS) ((u64*)p.rows_R)[threadIdx.x] = s.load_R[threadIdx.x];
  if (threadIdx.x == 0) *(u32*)p.digest = s.hash, *(u32*)p.away = over;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) plan_step(PlanParams p) { make_plan(p); }

// How much dynamic shared memory `plan_step` needs: read by the host once.
extern "C" __device__ u32 plan_shared_bytes = sizeof(PlanShared);
