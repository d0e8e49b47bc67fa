// Attempts of a plan on the device: what a plan reads and writes, and one warp's search for pieces.
//
// Knows nothing of launches; `plan.py` puts this file in front of plan.cu, whose comment says how the parts fit.
//
// A *place* is an expert's number when experts are sorted by home. An attempt keeps its ranks in registers, rank
// lane + 32 j in word j of a lane, each with its largest expert, and its experts in shared memory, by place. A piece
// costs two warp reductions (the emptiest rank, the best donor) and one over the donor's experts: its largest is new.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define THREADS 512
#define ATTEMPTS 16
#define TURNS (2 * ATTEMPTS)  // of attempts, where slots hold anything: with it, and afresh
#define ALL_LANES 0xffffffffu
#define WORDS ((RANKS + 31) / 32)        // of a lane, for its ranks
#define EXPERT_WORDS ((EXPERTS + THREADS - 1) / THREADS)  // of a thread, for its experts
#define KEY_WORDS (RANKS * SLOTS / THREADS + 1)           // of a thread, for its slots of all ranks
#define SLOT_WORDS ((SLOTS + 31) / 32)   // of a lane, for its slots of one rank
#define READ_WORDS (EXPERTS % 4 == 0 ? 4 : 1)  // counts in one read
#define COLUMNS (EXPERTS / READ_WORDS)
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define GROUPS (COLUMNS > THREADS ? 1 : LEAST(LEAST(THREADS / COLUMNS, RANKS), ATTEMPTS))  // of threads, for counts
#define MOST_AGE ((1 << 30) - 1)
#define HOT_PLANS 32
#define MOST_HOT_ROWS (1 << 25)
#define KEEP_ENTRIES 256
#define KEEP_MOVES 24
#define KEEP_FETCHES 16
#define AT_ROWS (2 * EXPERTS)             // where in the digest each array begins; weighed counts and homes come first
#define AT_KEYS (AT_ROWS + RANKS * EXPERTS)
#define AT_FETCH (AT_KEYS + RANKS * SLOTS)

// Addresses, unless another type is named; every field is 8 bytes.
struct PlanParams {
  u64 counts_RE;   // int32 [RANKS, EXPERTS], from a multiple of 16
  u64 home_E;      // int32 [EXPERTS]
  u64 speeds_R;    // int32 [RANKS]
  u64 keys_RS;     // int32 [RANKS, SLOTS], in and out
  u64 ages_RS;     // int32 [RANKS, SLOTS], in and out
  u64 hot_LE;      // int32 [layers, EXPERTS], in and out
  u64 away;        // u32, in and out: 0 if rows_ER is 0 but for homes; at first anything else
  u64 rows_ER;     // int32 [EXPERTS, RANKS], out
  u64 fetch_RS;    // int32 [RANKS, SLOTS], out
  u64 rows_R;      // int64 [RANKS], out
  u64 digest;      // u32, out
  u64 expert_P;    // int32 [EXPERTS], experts sorted by home, then number
  u64 first_R;     // int32 [RANKS + 1], each rank's first place
  u64 pieces;      // u64 [ATTEMPTS, RANKS, SLOTS], scratch: {expert:32 | rows:32}, a rank's last piece first
  u64 capacity;    // number, and so on
  u64 alpha_1024;
  u64 fetch_rows;
  u64 use_rows;
  u64 layer;
  u64 layers;
  u64 keep;
  u64 empty_hash;  // the digest's part of home_E, rows_ER = 0 and fetch_RS = -1
};

struct PlanShared {
  u64 here_AP[ATTEMPTS][EXPERTS];  // which ranks have a piece of the expert; before the attempts, what add_counts says
  u64 worst_T[TURNS];
  u32 stay_AP[ATTEMPTS][EXPERTS];
  u32 loads_AR[ATTEMPTS][RANKS];
  u32 rows_E[EXPERTS];
  u32 speed_R[RANKS];
  u32 load_R[RANKS];
  u32 left_R[RANKS];
  u16 first_R[RANKS + 1];
  u16 largest_R[RANKS];            // the place of each rank's largest expert
  u16 expert_P[EXPERTS];
  u16 place_E[EXPERTS];
  short held_RS[RANKS * SLOTS + 1];  // the place of the expert in a slot, -1 for none of this layer
  u8 home_E[EXPERTS];
  u8 home_P[EXPERTS];
  u8 left_AR[ATTEMPTS][RANKS];
  u8 holds_R[RANKS];               // whether a slot of the rank has an expert of this layer
  int won;                         // the first turn that fits, -1 for the attempt that keeps slots
  u32 fits, hash;                  // fits: a bit for each refined target
  // of the attempt that keeps slots, N entries
  u32 rows_N[KEEP_ENTRIES + KEEP_FETCHES];
  u32 from_RW[RANKS * WORDS];
  u16 place_N[KEEP_ENTRIES + KEEP_FETCHES];
  u16 first_entry_R[RANKS + 1];
  u16 link_R[RANKS];
  u8 rank_N[KEEP_ENTRIES + KEEP_FETCHES];
};
extern __shared__ u64 plan_memory[];  // PlanShared

__device__ __forceinline__ u32 plan_mixed(u32 word, u32 position) {  // as balance.digest32, position from 0
  u32 h = word + (position + 1) * 0x9E3779B9u;
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h ^ h >> 16;
}

__device__ __forceinline__ u32 weight_of(u32 rank) {  // as balance.naive.weighed_naive
  u32 spread = (rank + 1) * 0x9E3779B9u;
  return spread ^ spread >> 16 | 1;
}

// The word of one number, the same in all lanes, from the lane that has it. A sum: of a choice between two words the
// compiler makes one read through a chosen address, and then keeps the words in memory.
template <u32 N> __device__ __forceinline__ u32 word_of(const u32* words, u32 number) {
  u32 word = words[0];
#pragma unroll
  for (u32 j = 1; j < N; ++j) word += (words[j] - word) * (number / 32 == j);
  return __shfl_sync(ALL_LANES, word, number % 32);
}

// The lowest number lane + 32 j whose `words[j]` is `value`; the caller knows that there is one.
template <u32 N> __device__ __forceinline__ u32 lowest(const u32* words, u32 value) {
  u32 found = 0;
#pragma unroll
  for (int j = N - 1; j >= 0; --j) {
    u32 votes = __ballot_sync(ALL_LANES, words[j] == value);
    if (votes) found = 32 * j + __ffs(votes) - 1;
  }
  return found;
}

__device__ u64 warp_max(u64 value) {
  u32 high = __reduce_max_sync(ALL_LANES, (u32)(value >> 32));
  u32 low = __reduce_max_sync(ALL_LANES, (u32)(value >> 32) == high ? (u32)value : 0);
  return (u64)high << 32 | low;
}

// This lane's ranks, and what they have together.
struct Ranks {
  u32 load[WORDS], speed[WORDS], total, speeds;
};

__device__ __forceinline__ void read_ranks(const PlanShared& s, Ranks& ranks) {
  u32 lane = threadIdx.x % 32, total = 0, speeds = 0;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 rank = lane + 32 * j;
    ranks.load[j] = rank < RANKS ? s.load_R[rank] : 0;
    ranks.speed[j] = rank < RANKS ? s.speed_R[rank] : 0;
    total += ranks.load[j], speeds += ranks.speed[j];
  }
  ranks.total = __reduce_add_sync(ALL_LANES, total), ranks.speeds = __reduce_add_sync(ALL_LANES, speeds);
}

// ceil(total x speed x alpha / speeds), at most all rows: what a rank of this lane should have.
__device__ __forceinline__ u32 target_of(const Ranks& ranks, u32 j, u32 alpha_1024) {
  u64 whole = 1024ull * ranks.speeds, share = ((u64)ranks.total * ranks.speed[j] * alpha_1024 + whole - 1) / whole;
  return share < ranks.total ? (u32)share : ranks.total;
}

// Whether a rank of this lane is above its target, without a division: load > ceil(x / y) where (load - 1) y >= x.
__device__ __forceinline__ bool over_target(const Ranks& ranks, u32 alpha_1024) {
  bool over = false;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u64 share = (u64)ranks.total * ranks.speed[j] * alpha_1024, whole = 1024ull * ranks.speeds;
    over |= ranks.load[j] > 0 && (ranks.load[j] - 1) * whole >= share;
  }
  return over;
}

#if SLOTS > 0  // without slots nothing can leave home

// What one warp's attempt knows: of this lane's ranks, and of the step.
struct Attempt {
  u32 target[WORDS], left[WORDS], most[WORDS], place[WORDS];  // most: the rows of the rank's largest expert
  int excess[WORDS];                                          // load minus target
  u64 here[WORDS];                                            // of the largest expert
  bool closed[WORDS], overdraw;
  int turn;                                                   // it gives up when one of an earlier turn fits
  u32 number, capacity, least, top, above;                    // number: whose place in shared memory it uses
  u32* stay_P;
  u64 *here_P, *log;
};

// The rank to fill, and from where.
struct Move {
  u32 rank, room, left, donor, place, stay, can;
};

// How good it is to take rows of an expert (class << 30 | value, 0 for no use); `can` is how many may leave.
template <bool FETCHING>
__device__ __forceinline__ u32 key_of(const Attempt& a, const Move& m, u32 stay, int excess, bool refilled, u32& can) {
  int too_much = max(excess, (int)stay - (int)a.capacity);
  can = a.overdraw ? stay : (u32)max(min((int)stay, too_much), 0);
  // as many as each of the recipient's slots must take: can >= min(ceil(room / left), capacity)
  bool fills = can >= a.capacity || (u64)can * m.left >= m.room;
  u32 value = (u32)(excess + (int)a.top);
  if (too_much > 0) value = fills ? (3u << 30) + value : (1u << 30) + can;
  else value = FETCHING && fills && refilled ? (2u << 30) + value : 0;
  return can < a.least ? 0 : value;
}

// The expert to take rows from, of those in the slots of m.rank; the lowest slot on ties. False for none.
__device__ __forceinline__ bool best_held(const PlanShared& s, const Attempt& a, Move& m) {
  u32 lane = threadIdx.x % 32, best = 0;
#pragma unroll 1
  for (u32 base = 0; base < SLOTS; base += 32) {
    int held = base + lane < SLOTS ? s.held_RS[m.rank * SLOTS + base + lane] : -1;
    u32 place = max(held, 0), donor = s.home_P[place], stay = a.stay_P[place], key = 0, can = 0;
    int excess = __shfl_sync(ALL_LANES, a.excess[0], donor % 32);
#pragma unroll
    for (u32 j = 1; j < WORDS; ++j) {
      int other = __shfl_sync(ALL_LANES, a.excess[j], donor % 32);
      excess = donor / 32 == j ? other : excess;
    }
    if (held >= 0 && donor != m.rank && !(a.here_P[place] >> m.rank & 1))
      key = key_of<false>(a, m, stay, excess, false, can);
    u32 most = __reduce_max_sync(ALL_LANES, key);
    if (most <= best) continue;
    u32 winner = __ffs(__ballot_sync(ALL_LANES, key == most)) - 1;
    best = most, m.donor = __shfl_sync(ALL_LANES, donor, winner), m.place = __shfl_sync(ALL_LANES, place, winner);
    m.stay = __shfl_sync(ALL_LANES, stay, winner), m.can = __shfl_sync(ALL_LANES, can, winner);
  }
  return best > 0;
}

// The same of all experts: the largest one of each donor that m.rank has no piece of.
__device__ __forceinline__ bool best_owned(const PlanShared& s, const Attempt& a, Move& m) {
  u32 key[WORDS], stay[WORDS], place[WORDS], can[WORDS], best = 0;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 donor = threadIdx.x % 32 + 32 * j;
    bool refilled = a.overdraw && a.left[j] > 0;
    stay[j] = a.most[j], place[j] = a.place[j];
    key[j] = key_of<true>(a, m, stay[j], a.excess[j], refilled, can[j]);
    if (donor == m.rank) key[j] = 0;
    if (key[j] && a.here[j] >> m.rank & 1) {  // rare; a smaller expert is never better, so that 0 stays 0
      stay[j] = 0;
#pragma unroll 1
      for (u32 i = s.first_R[donor]; i < s.first_R[donor + 1]; ++i)
        if (a.stay_P[i] > stay[j] && !(a.here_P[i] >> m.rank & 1)) place[j] = i, stay[j] = a.stay_P[i];
      key[j] = key_of<true>(a, m, stay[j], a.excess[j], refilled, can[j]);
    }
    best = max(best, key[j]);
  }
  best = __reduce_max_sync(ALL_LANES, best);
  if (best == 0) return false;
  m.donor = lowest<WORDS>(key, best);
  m.place = word_of<WORDS>(place, m.donor), m.stay = word_of<WORDS>(stay, m.donor);
  m.can = word_of<WORDS>(can, m.donor);
  return true;
}

// The largest of one rank's experts, the lowest on ties: its place; `most` is its rows. `changed` has `rows` now.
__device__ __forceinline__ u32 largest(const PlanShared& s, const u32* stay_P, u32 rank, u32 changed, u32 rows,
                                       u32& most) {
  u32 first = s.first_R[rank], end = s.first_R[rank + 1], place = first;
  most = 0;
#pragma unroll 1
  for (u32 base = first; base < end; base += 32) {
    u32 i = base + threadIdx.x % 32, mine = i == changed ? rows : i < end ? stay_P[i] : 0;
    u32 high = __reduce_max_sync(ALL_LANES, mine);
    if (high <= most) continue;
    most = high, place = base + __ffs(__ballot_sync(ALL_LANES, mine == high)) - 1;
  }
  return place;
}

// Carry a move out.
__device__ __forceinline__ void take(const PlanShared& s, Attempt& a, const Move& m) {
  u32 lane = threadIdx.x % 32, rows = min(min(m.can, m.room), a.capacity), stay = m.stay - rows, most;
  u32 place = largest(s, a.stay_P, m.donor, m.place, stay, most);
  if (lane == 0) {
    a.stay_P[m.place] = stay, a.here_P[m.place] |= 1ull << m.rank;
    a.log[m.rank * SLOTS + m.left - 1] = (u64)s.expert_P[m.place] << 32 | rows;
  }
  __syncwarp();
  u64 here = a.here_P[place];
  a.above -= m.stay > a.capacity && stay <= a.capacity;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    if (lane + 32 * j == m.donor) a.excess[j] -= rows, a.most[j] = most, a.place[j] = place, a.here[j] = here;
    if (lane + 32 * j == m.rank) a.excess[j] += rows, a.left[j] -= 1;
  }
}

// Pieces into slots that have the expert, or into any: until all fits, nothing moves, or an earlier attempt fits.
template <bool FETCHING> __device__ __forceinline__ void move_pieces(const PlanShared& s, Attempt& a) {
  while (true) {
    u32 room[WORDS], most = 0;
    bool over = a.above > 0, beaten = *(volatile const int*)&s.won < a.turn;
#pragma unroll
    for (u32 j = 0; j < WORDS; ++j) {
      over |= a.excess[j] > 0;
      room[j] = a.left[j] > 0 && !a.closed[j] && a.excess[j] < 0 ? -a.excess[j] : 0;
      most = max(most, room[j]);
    }
    u32 overs = __ballot_sync(ALL_LANES, over), stops = __ballot_sync(ALL_LANES, beaten);
    Move m;
    m.room = __reduce_max_sync(ALL_LANES, most);
    if (!overs || stops || m.room < a.least) break;
    m.rank = lowest<WORDS>(room, m.room), m.left = word_of<WORDS>(a.left, m.rank);
    if (FETCHING ? best_owned(s, a, m) : best_held(s, a, m)) {
      take(s, a, m);
      continue;
    }
#pragma unroll
    for (u32 j = 0; j < WORDS; ++j) a.closed[j] |= threadIdx.x % 32 + 32 * j == m.rank;
  }
}

// Everything at home, targets as high as this attempt's. `afresh`: slots are not used for what they hold.
__device__ __forceinline__ void begin(const PlanParams& p, PlanShared& s, const Ranks& ranks, Attempt& a, u32 alpha,
                                      bool afresh) {
  u32 lane = threadIdx.x % 32, top = 0, above = 0;
  a.capacity = (u32)p.capacity, a.stay_P = s.stay_AP[a.number], a.here_P = s.here_AP[a.number];
  a.log = (u64*)p.pieces + (u64)a.number * RANKS * SLOTS;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 rank = lane + 32 * j;
    a.target[j] = target_of(ranks, j, alpha);
    a.excess[j] = (int)ranks.load[j] - (int)a.target[j];
    a.left[j] = rank < RANKS ? s.left_R[rank] : 0, a.place[j] = rank < RANKS ? s.largest_R[rank] : 0, a.here[j] = 0;
    a.most[j] = rank < RANKS && s.first_R[rank] < s.first_R[rank + 1] ? s.rows_E[s.expert_P[a.place[j]]] : 0;
    a.closed[j] = afresh || rank >= RANKS || !s.holds_R[rank];
    top = max(top, a.target[j]);
  }
  for (u32 i = lane; i < EXPERTS; i += 32) {
    u32 rows = s.rows_E[s.expert_P[i]];
    a.stay_P[i] = rows, a.here_P[i] = 0, above += rows > a.capacity;
  }
  a.top = __reduce_max_sync(ALL_LANES, top), a.above = __reduce_add_sync(ALL_LANES, above);
  __syncwarp();
}

// The target of an attempt, as alpha.
__device__ __forceinline__ u32 alpha_of(const PlanParams& p, u32 number) {
  u32 step = number > 1 ? number - 1 : 0, alpha = (u32)p.alpha_1024;
  return alpha + alpha * step * step / 256;
}

// One warp's attempt; leaves its loads, what stays at home and its pieces at place `number`. Returns 0 if it fits, else
// the worst load relative to speed.
__device__ u64 attempt(const PlanParams& p, PlanShared& s, u32 number, u32 alpha, bool overdraw, bool afresh,
                       u32 turn) {
  u32 lane = threadIdx.x % 32;
  Ranks ranks;
  Attempt a;
  a.number = number, a.overdraw = overdraw, a.turn = (int)turn;
  read_ranks(s, ranks);
  begin(p, s, ranks, a, alpha, afresh);
  a.least = (u32)p.use_rows;
  move_pieces<false>(s, a);
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) a.closed[j] = false;
  a.least = (u32)p.fetch_rows;
  move_pieces<true>(s, a);
  bool over = a.above > 0;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 rank = lane + 32 * j;
    over |= a.excess[j] > 0;
    if (rank < RANKS) s.loads_AR[number][rank] = a.target[j] + a.excess[j], s.left_AR[number][rank] = (u8)a.left[j];
  }
  if (!__any_sync(ALL_LANES, over)) return 0;
  u64 worst = 0;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u64 value = (u64)(a.target[j] + a.excess[j]) * ranks.speeds / max(1u, ranks.speed[j]);
    worst = value > worst ? value : worst;
  }
  return warp_max(worst);
}

#endif
