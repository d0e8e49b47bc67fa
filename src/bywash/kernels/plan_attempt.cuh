// Attempts of a plan on the device: what a plan reads and writes, and one warp's search for pieces.
//
// Knows nothing of launches; `plan.py` puts this file in front of plan.cu, whose comment says how the parts fit.
//
// An attempt keeps its ranks in registers, rank lane + 32 j in word j of a lane, and its experts in shared memory. A
// piece costs two warp reductions (the emptiest rank, the best donor) and one walk of each lane over its own experts.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

#define THREADS 512
#define ATTEMPTS 16
#define ALL_LANES 0xffffffffu
#define WORDS ((RANKS + 31) / 32)        // of a lane, for its ranks
#define SLOT_WORDS ((SLOTS + 31) / 32)   // of a lane, for its slots of one rank
#define MOST_AGE ((1 << 30) - 1)
#define AT_HOME (RANKS * EXPERTS)        // where in the digest each array begins
#define AT_ROWS (AT_HOME + EXPERTS)
#define AT_KEYS (AT_ROWS + RANKS * EXPERTS)
#define AT_FETCH (AT_KEYS + RANKS * SLOTS)

// Addresses, unless another type is named; every field is 8 bytes.
struct PlanParams {
  u64 counts_RE;   // int32 [RANKS, EXPERTS]
  u64 home_E;      // int32 [EXPERTS]
  u64 speeds_R;    // int32 [RANKS]
  u64 keys_RS;     // int32 [RANKS, SLOTS], in and out
  u64 ages_RS;     // int32 [RANKS, SLOTS], in and out
  u64 rows_ER;     // int32 [EXPERTS, RANKS], out
  u64 fetch_RS;    // int32 [RANKS, SLOTS], out
  u64 rows_R;      // int64 [RANKS], out
  u64 digest;      // u32, out
  u64 pieces;      // u64 [ATTEMPTS, RANKS * SLOTS], scratch: {expert:16 | rank:16 | rows:32}
  u64 capacity;    // number, and so on
  u64 alpha_1024;
  u64 fetch_rows;
  u64 use_rows;
  u64 layer;
  u64 layers;
  u64 keep;
};

struct PlanShared {
  u32 rows_E[EXPERTS];
  u16 home_E[EXPERTS];
  u16 by_home_E[EXPERTS];
  u32 first_R[RANKS + 1];
  u32 next_R[RANKS];
  u32 load_R[RANKS];
  u32 left_R[RANKS];
  short held_RS[RANKS * SLOTS + 1];
  u32 loads_AR[ATTEMPTS][RANKS];
  u32 stay_AE[ATTEMPTS][EXPERTS];
  u64 here_AE[ATTEMPTS][EXPERTS];  // which ranks have a piece of the expert
  u64 worst_A[ATTEMPTS];
  u32 pieces_A[ATTEMPTS];
  u32 won, best, hash;
};
extern __shared__ u64 plan_memory[];  // PlanShared

// One attempt's view of this lane's ranks.
struct Ranks {
  u32 load[WORDS], target[WORDS], left[WORDS], top;
  bool closed[WORDS];
};

__device__ __forceinline__ u32 plan_mixed(u32 word, u32 position) {  // as balance.digest32, position from 0
  u32 h = word + (position + 1) * 0x9E3779B9u;
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}

// A register of the lane that has `rank`; all lanes call.
__device__ __forceinline__ u32 of_rank(const u32* words, u32 rank) {
  u32 found = __shfl_sync(ALL_LANES, words[0], rank % 32);
#pragma unroll
  for (u32 i = 1; i < WORDS; ++i) {
    u32 other = __shfl_sync(ALL_LANES, words[i], rank % 32);
    found = rank / 32 == i ? other : found;
  }
  return found;
}

// The lowest number lane + 32 j whose `mine[j]` is set; the caller knows that there is one.
template <u32 N> __device__ __forceinline__ u32 lowest(const bool* mine) {
  u32 found = 0;
#pragma unroll
  for (int j = N - 1; j >= 0; --j) {
    u32 votes = __ballot_sync(ALL_LANES, mine[j]);
    if (votes) found = 32 * j + __ffs(votes) - 1;
  }
  return found;
}

__device__ u64 warp_max(u64 value) {
  u32 high = __reduce_max_sync(ALL_LANES, (u32)(value >> 32));
  u32 low = __reduce_max_sync(ALL_LANES, (u32)(value >> 32) == high ? (u32)value : 0);
  return (u64)high << 32 | low;
}

// Loads and targets of this lane's ranks; every warp calls and gets the same.
__device__ void set_targets(const PlanParams& p, const PlanShared& s, u32 alpha_1024, Ranks& ranks) {
  u32 lane = threadIdx.x % 32, total = 0, speed = 0, mine[WORDS];
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 rank = lane + 32 * j;
    ranks.load[j] = rank < RANKS ? s.load_R[rank] : 0;
    mine[j] = rank < RANKS ? ((const u32*)p.speeds_R)[rank] : 0;
    total += ranks.load[j], speed += mine[j];
  }
  total = __reduce_add_sync(ALL_LANES, total), speed = __reduce_add_sync(ALL_LANES, speed);
  u64 whole = 1024ull * speed;
  u32 top = 0;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u64 share = ((u64)total * mine[j] * alpha_1024 + whole - 1) / whole;
    ranks.target[j] = share < total ? (u32)share : total;
    top = max(top, ranks.target[j]);
  }
  ranks.top = __reduce_max_sync(ALL_LANES, top);
}

__device__ __forceinline__ bool any_over(const Ranks& ranks) {
  bool over = false;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) over |= ranks.load[j] > ranks.target[j];
  return __any_sync(ALL_LANES, over);
}

#if SLOTS > 0  // without slots nothing can leave home

// What an attempt looks for at the moment.
struct Search {
  u32 rank, room, wanted, least, capacity;
  bool overdraw, fetching;
};

// How good it is to take rows of an expert (class << 30 | value, 0 for no use); `can` is how many may leave.
__device__ __forceinline__ u32 key_of(const Search& q, u32 stay, int excess, u32 left, u32 top, u32& can) {
  int too_much = max(excess, (int)stay - (int)q.capacity);
  can = q.overdraw ? stay : (u32)max(min((int)stay, too_much), 0);
  if (can < q.least) return 0;
  bool over = excess > 0 || stay > q.capacity;
  if (can >= q.wanted && over) return (3u << 30) + (u32)(excess + (int)top);
  if (can >= q.wanted && q.fetching && q.overdraw && left > 0) return (2u << 30) + (u32)(excess + (int)top);
  return over ? (1u << 30) + can : 0;
}

// The expert to take rows from, of those in the slots of q.rank; RANKS-independent order: the lowest slot on ties.
__device__ int best_held(const PlanShared& s, const Search& q, const Ranks& ranks, const u32* stay_E, const u64* here_E,
                         u32& can) {
  u32 lane = threadIdx.x % 32, best = 0, rows = 0;
  int expert = -1;
  for (u32 base = 0; base < SLOTS; base += 32) {
    int e = base + lane < SLOTS ? s.held_RS[q.rank * SLOTS + base + lane] : -1;
    u32 donor = e >= 0 ? s.home_E[e] : 0;
    u32 load = of_rank(ranks.load, donor), target = of_rank(ranks.target, donor), left = of_rank(ranks.left, donor);
    u32 mine = 0, key = 0;
    if (e >= 0 && donor != q.rank && !(here_E[e] >> q.rank & 1))
      key = key_of(q, stay_E[e], (int)load - (int)target, left, ranks.top, mine);
    u32 most = __reduce_max_sync(ALL_LANES, key);
    if (most <= best) continue;
    best = most;
    u32 winner = __ffs(__ballot_sync(ALL_LANES, key == most)) - 1;
    expert = __shfl_sync(ALL_LANES, e, winner), rows = __shfl_sync(ALL_LANES, mine, winner);
  }
  can = rows;
  return expert;
}

// The same of all experts: the largest one of each donor.
__device__ int best_owned(const PlanShared& s, const Search& q, const Ranks& ranks, const u32* stay_E,
                          const u64* here_E, u32& can) {
  u32 lane = threadIdx.x % 32, key[WORDS], mine[WORDS], best = 0;
  int largest[WORDS];
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 donor = lane + 32 * j, most = 0;
    key[j] = mine[j] = 0, largest[j] = -1;
    if (donor >= RANKS || donor == q.rank) continue;
    for (u32 i = s.first_R[donor]; i < s.first_R[donor + 1]; ++i) {
      u32 e = s.by_home_E[i], stay = stay_E[e];
      if (stay > most && !(here_E[e] >> q.rank & 1)) largest[j] = (int)e, most = stay;
    }
    int excess = (int)ranks.load[j] - (int)ranks.target[j];
    if (largest[j] >= 0) key[j] = key_of(q, most, excess, ranks.left[j], ranks.top, mine[j]);
    best = max(best, key[j]);
  }
  best = __reduce_max_sync(ALL_LANES, best);
  if (best == 0) return -1;
  bool wins[WORDS];
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) wins[j] = key[j] == best;
  u32 winner = lowest<WORDS>(wins);
  can = of_rank(mine, winner);
  return (int)of_rank((const u32*)largest, winner);
}

// The rank with a free slot that is most below its target, by at least q.least; false for none.
__device__ bool emptiest(const Ranks& ranks, Search& q) {
  u32 room[WORDS], most = 0;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    bool open = ranks.left[j] > 0 && !ranks.closed[j] && ranks.target[j] > ranks.load[j];
    room[j] = open ? ranks.target[j] - ranks.load[j] : 0;
    most = max(most, room[j]);
  }
  q.room = __reduce_max_sync(ALL_LANES, most);
  if (q.room < q.least) return false;
  bool is[WORDS];
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) is[j] = room[j] == q.room;
  q.rank = lowest<WORDS>(is);
  u32 left = of_rank(ranks.left, q.rank);
  q.wanted = min(max((q.room + left - 1) / left, q.least), q.capacity);
  return true;
}

// One warp's attempt; leaves its loads, what stays at home, and its pieces.
__device__ void attempt(const PlanParams& p, PlanShared& s, u32 number) {
  u32 lane = threadIdx.x % 32, *stay_E = s.stay_AE[number], pieces = 0, above = 0;
  u64 *here_E = s.here_AE[number], *log = (u64*)p.pieces + (u64)number * RANKS * SLOTS;
  u32 step = number > 1 ? number - 1 : 0, alpha = (u32)p.alpha_1024;
  Ranks ranks;
  set_targets(p, s, alpha + alpha * step * step / 256, ranks);
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) ranks.left[j] = lane + 32 * j < RANKS ? s.left_R[lane + 32 * j] : 0;
  for (u32 e = lane; e < EXPERTS; e += 32) {
    stay_E[e] = s.rows_E[e], here_E[e] = 0;
    above += s.rows_E[e] > (u32)p.capacity;
  }
  above = __reduce_add_sync(ALL_LANES, above);
  __syncwarp();
  Search q;
  q.capacity = (u32)p.capacity, q.overdraw = number > 0;
  for (u32 pass = 0; pass < 2; ++pass) {
    q.fetching = pass, q.least = (u32)(pass ? p.fetch_rows : p.use_rows);
#pragma unroll
    for (u32 j = 0; j < WORDS; ++j) ranks.closed[j] = false;
    while (above > 0 || any_over(ranks)) {
      bool beaten = *(volatile u32*)&s.won < number;  // by an attempt that comes first and fits
      if (__any_sync(ALL_LANES, beaten) || !emptiest(ranks, q)) break;
      u32 can = 0;
      int expert = pass ? best_owned(s, q, ranks, stay_E, here_E, can) : best_held(s, q, ranks, stay_E, here_E, can);
      if (expert < 0) {
#pragma unroll
        for (u32 j = 0; j < WORDS; ++j) ranks.closed[j] |= lane + 32 * j == q.rank;
        continue;
      }
      u32 rows = min(min(can, q.room), q.capacity), stay = stay_E[expert], donor = s.home_E[expert];
      above -= stay > q.capacity && stay - rows <= q.capacity;
#pragma unroll
      for (u32 j = 0; j < WORDS; ++j) {
        if (lane + 32 * j == donor) ranks.load[j] -= rows;
        if (lane + 32 * j == q.rank) ranks.load[j] += rows, ranks.left[j] -= 1;
      }
      __syncwarp();
      if (lane == 0) {
        stay_E[expert] = stay - rows, here_E[expert] |= 1ull << q.rank;
        log[pieces] = (u64)expert << 48 | (u64)q.rank << 32 | rows;
      }
      __syncwarp();
      ++pieces;
    }
  }
  bool fits = above == 0 && !any_over(ranks);
  u64 worst = 0;
  u32 speed = 0;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) speed += lane + 32 * j < RANKS ? ((const u32*)p.speeds_R)[lane + 32 * j] : 0;
  speed = __reduce_add_sync(ALL_LANES, speed);
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 rank = lane + 32 * j;
    if (rank >= RANKS) continue;
    s.loads_AR[number][rank] = ranks.load[j];
    u64 value = (u64)ranks.load[j] * speed / max(1u, ((const u32*)p.speeds_R)[rank]);
    worst = value > worst ? value : worst;
  }
  worst = warp_max(worst);
  if (lane == 0) {
    s.worst_A[number] = worst, s.pieces_A[number] = pieces;
    if (fits) atomicMin(&s.won, number);
  }
}

#endif
