// The attempt that keeps what the slots hold: chains of ranks, by one warp. balance/naive_keep.py says what and why.
//
// Lies between plan_attempt.cuh and plan.cu. It runs beside the first attempts and leaves its result as attempt
// KEEP_SLOT, whose own warp has not begun then. Entries lie in shared memory, those of slots by rank, then those to fetch;
// which ranks a rank is reached from is a mask, so that a step of the search is one vote; excess is in registers.

#if SLOTS > 0

#define KEEP_SLOT (ATTEMPTS - 1)
#define NOBODY RANKS

struct Keep {
  u32 capacity, held, entries;
  int excess[WORDS];
  u32 came_from[WORDS], seen[WORDS];  // seen: a bit for each rank reached, alike in all lanes
  u32* stay_P;
  u64* there_P;                       // which ranks have an entry of the expert
  u8* left_R;
};

// The entry that moves rows over a link, and how many it may.
struct Link {
  u32 entry, most;
  bool out;
};

// Entries of the slots by rank, then slot; false if there are none, or too many.
__device__ __forceinline__ bool find_entries(PlanShared& s, Keep& k) {
  u32 lane = threadIdx.x % 32;
  k.held = 0;
#pragma unroll 1
  for (u32 base = 0; base < RANKS * SLOTS; base += 32) {
    u32 i = base + lane, rank = i / SLOTS;
    int place = i < RANKS * SLOTS ? s.held_RS[i] : -1;
    bool is = place >= 0 && s.home_P[max(place, 0)] != rank;
    u32 votes = __ballot_sync(ALL_LANES, is), at = k.held + __popc(votes & ((1u << lane) - 1));
    if (i < RANKS * SLOTS && i % SLOTS == 0) s.first_entry_R[rank] = (u16)min(at, (u32)KEEP_ENTRIES);
    if (is && at < KEEP_ENTRIES) {
      s.place_N[at] = (u16)place, s.rank_N[at] = (u8)rank, s.rows_N[at] = 0;
      atomicOr((u32*)&k.there_P[place] + rank / 32, 1u << rank % 32);
    }
    k.held += __popc(votes);
  }
  if (lane == 0) s.first_entry_R[RANKS] = (u16)min(k.held, (u32)KEEP_ENTRIES);
  __syncwarp();
  k.entries = k.held;
  return k.held > 0 && k.held <= KEEP_ENTRIES;
}

// Which ranks each rank can get rows from, as masks in shared memory.
__device__ __forceinline__ void find_links(PlanShared& s, const Keep& k) {
  u32 lane = threadIdx.x % 32;
  for (u32 i = lane; i < RANKS * WORDS; i += 32) s.from_RW[i] = 0;
  __syncwarp();
#pragma unroll 1
  for (u32 i = lane; i < k.entries; i += 32) {
    u32 place = s.place_N[i], rank = s.rank_N[i], rows = s.rows_N[i], home = s.home_P[place];
    if (k.stay_P[place] > 0 && rows < k.capacity && (rows > 0 || k.left_R[rank] > 0))
      atomicOr(&s.from_RW[rank * WORDS + home / 32], 1u << home % 32);
    if (rows > 0) atomicOr(&s.from_RW[home * WORDS + rank / 32], 1u << rank % 32);
  }
  __syncwarp();
}

// The end of a chain, `came_from` along it, or NOBODY: then `seen` are the ranks reached. `over` is false if none begins.
__device__ __forceinline__ u32 find_chain(const PlanShared& s, Keep& k, bool& over) {
  u32 lane = threadIdx.x % 32, links[WORDS][WORDS], last[WORDS];
  over = false;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
#pragma unroll
    for (u32 w = 0; w < WORDS; ++w) links[j][w] = lane + 32 * j < RANKS ? s.from_RW[(lane + 32 * j) * WORDS + w] : 0;
    k.came_from[j] = NOBODY;
    last[j] = k.seen[j] = __ballot_sync(ALL_LANES, k.excess[j] > 0);
    over |= last[j] != 0;
  }
  bool more = over;
  while (more) {
    u32 room[WORDS], next[WORDS], most = 0;
    more = false;
#pragma unroll
    for (u32 j = 0; j < WORDS; ++j) {
      u32 from = NOBODY;
#pragma unroll
      for (int w = WORDS - 1; w >= 0; --w)
        if (links[j][w] & last[w]) from = 32 * w + __ffs(links[j][w] & last[w]) - 1;
      bool is = from != NOBODY && !(k.seen[j] >> lane & 1);
      if (is) k.came_from[j] = from;
      room[j] = is && k.excess[j] < 0 ? -k.excess[j] : 0;
      most = max(most, room[j]);
      next[j] = __ballot_sync(ALL_LANES, is);
      more |= next[j] != 0;
    }
    most = __reduce_max_sync(ALL_LANES, most);
    if (most > 0) return lowest<WORDS>(room, most);
#pragma unroll
    for (u32 j = 0; j < WORDS; ++j) k.seen[j] |= next[j], last[j] = next[j];
  }
  return NOBODY;
}

// Among the entries of `owner` with experts of `home`, the one that moves most: out to the owner, or back to the home.
__device__ __forceinline__ Link best_entry(const PlanShared& s, const Keep& k, u32 owner, u32 home, bool out) {
  u32 first = s.first_entry_R[owner], own = s.first_entry_R[owner + 1] - first, end = own + k.entries - k.held;
  Link best = {0, 0, out};
#pragma unroll 1
  for (u32 base = 0; base < end; base += 32) {
    u32 at = base + threadIdx.x % 32, i = at < own ? first + at : k.held + at - own, can = 0;
    if (at < end && s.rank_N[i] == owner) {
      u32 place = s.place_N[i], rows = s.rows_N[i];
      can = !out ? rows : rows > 0 || k.left_R[owner] > 0 ? min(k.stay_P[place], k.capacity - rows) : 0;
      if (s.home_P[place] != home) can = 0;
    }
    u32 most = __reduce_max_sync(ALL_LANES, can);
    if (most <= best.most) continue;
    best.most = most, best.entry = __shfl_sync(ALL_LANES, i, __ffs(__ballot_sync(ALL_LANES, can == most)) - 1);
  }
  return best;
}

__device__ __forceinline__ Link link_of(const PlanShared& s, const Keep& k, u32 giver, u32 taker) {
  Link link = best_entry(s, k, taker, giver, true);
  return link.most > 0 ? link : best_entry(s, k, giver, taker, false);
}

// Move what the chain can carry.
__device__ __forceinline__ void carry(PlanShared& s, Keep& k, u32 end) {
  u32 lane = threadIdx.x % 32, rank = end, excess[WORDS], rows = ~0u;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) excess[j] = (u32)k.excess[j];
  rows = -word_of<WORDS>(excess, end);
#pragma unroll 1
  for (u32 giver = word_of<WORDS>(k.came_from, rank); giver != NOBODY; giver = word_of<WORDS>(k.came_from, rank)) {
    Link link = link_of(s, k, giver, rank);
    if (lane == 0) s.link_R[rank] = (u16)(link.entry << 1 | link.out);
    rows = min(rows, link.most), rank = giver;
  }
  rows = min(rows, word_of<WORDS>(excess, rank));
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) k.excess[j] += (int)rows * ((lane + 32 * j == end) - (lane + 32 * j == rank));
#pragma unroll 1
  for (rank = end; true;) {
    u32 giver = word_of<WORDS>(k.came_from, rank);
    if (giver == NOBODY) break;
    if (lane == 0) {
      u32 entry = s.link_R[rank] >> 1, moved = s.link_R[rank] & 1 ? rows : -rows, before = s.rows_N[entry];
      s.rows_N[entry] = before + moved, k.stay_P[s.place_N[entry]] -= moved;
      k.left_R[s.rank_N[entry]] += (before > 0) - (before + moved > 0);
    }
    rank = giver;
  }
  __syncwarp();
}

// Add an entry that relieves most; false for none.
__device__ __forceinline__ bool add_fetch(const PlanParams& p, PlanShared& s, Keep& k) {
  u32 lane = threadIdx.x % 32, room[WORDS], most = 0, top = 0, *excess_R = s.loads_AR[KEEP_SLOT];
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    u32 rank = lane + 32 * j;
    room[j] = rank < RANKS && k.left_R[min(rank, (u32)RANKS - 1)] > 0 && k.excess[j] < 0 ? -k.excess[j] : 0;
    most = max(most, room[j]), top = max(top, k.excess[j] > 0 ? (u32)k.excess[j] : 0);
  }
  most = __reduce_max_sync(ALL_LANES, most), top = __reduce_max_sync(ALL_LANES, top);
  if (most == 0 || k.entries == k.held + KEEP_FETCHES) return false;
  u32 rank = lowest<WORDS>(room, most);
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j)
    if (lane + 32 * j < RANKS)
      excess_R[lane + 32 * j] = k.excess[j] > 0 ? (u32)k.excess[j] : k.seen[j] >> lane & 1 ? top : 0;
  __syncwarp();
  u32 gain = 0, hot = 0, expert = 0, limit = min(most, k.capacity);
#pragma unroll 1
  for (u32 place = lane; place < EXPERTS; place += 32) {
    u32 can = min(min(k.stay_P[place], excess_R[s.home_P[place]]), limit), e = s.expert_P[place];
    if (can < gain || can == 0 || k.there_P[place] >> rank & 1) continue;
    u32 heat = ((const u32*)p.hot_LE)[(u32)p.layer * EXPERTS + e];
    if (can > gain || heat > hot || (heat == hot && e < expert)) gain = can, hot = heat, expert = e;
  }
  most = __reduce_max_sync(ALL_LANES, gain);
  if (most < (u32)p.fetch_rows) return false;
  u32 hottest = __reduce_max_sync(ALL_LANES, gain == most ? hot : 0);
  expert = ~__reduce_max_sync(ALL_LANES, gain == most && hot == hottest ? ~expert : 0);
  u32 place = s.place_E[expert];
  if (lane == 0) {
    s.place_N[k.entries] = (u16)place, s.rank_N[k.entries] = (u8)rank, s.rows_N[k.entries] = 0;
    k.there_P[place] |= 1ull << rank;
  }
  ++k.entries;
  __syncwarp();
  return true;
}

// Leave loads and pieces as an attempt does; false if a piece is below its break-even.
__device__ __forceinline__ bool leave_pieces(const PlanParams& p, PlanShared& s, const Keep& k, const Ranks& ranks) {
  u32 lane = threadIdx.x % 32;
  u64* log = (u64*)p.pieces + (u64)KEEP_SLOT * RANKS * SLOTS;
  bool small = false;
  for (u32 i = lane; i < k.entries; i += 32)
    small |= s.rows_N[i] > 0 && s.rows_N[i] < (u32)(i < k.held ? p.use_rows : p.fetch_rows);
  if (__any_sync(ALL_LANES, small)) return false;
#pragma unroll 1
  for (u32 rank = lane; rank < RANKS; rank += 32) {
    u32 at = rank * SLOTS + s.left_R[rank], first = s.first_entry_R[rank], own = s.first_entry_R[rank + 1] - first;
    for (u32 n = 0; n < own + k.entries - k.held; ++n) {
      u32 i = n < own ? first + n : k.held + n - own;
      if (s.rank_N[i] == rank && s.rows_N[i] > 0) log[--at] = (u64)s.expert_P[s.place_N[i]] << 32 | s.rows_N[i];
    }
  }
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j)
    if (lane + 32 * j < RANKS) s.loads_AR[KEEP_SLOT][lane + 32 * j] = target_of(ranks, j, (u32)p.alpha_1024) + k.excess[j];
  return true;
}

// The whole attempt by one warp. Returns whether it fits: then it wins, whatever the others find.
__device__ bool keep_slots(const PlanParams& p, PlanShared& s) {
  u32 lane = threadIdx.x % 32;
  Ranks ranks;
  Keep k;
  k.capacity = (u32)p.capacity, k.stay_P = s.stay_AP[KEEP_SLOT], k.there_P = s.here_AP[KEEP_SLOT];
  k.left_R = s.left_AR[KEEP_SLOT];
  read_ranks(s, ranks);
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) {
    k.excess[j] = (int)ranks.load[j] - (int)target_of(ranks, j, (u32)p.alpha_1024);
    if (lane + 32 * j < RANKS) k.left_R[lane + 32 * j] = (u8)s.left_R[lane + 32 * j];
  }
  for (u32 i = lane; i < EXPERTS; i += 32) k.stay_P[i] = s.rows_E[s.expert_P[i]], k.there_P[i] = 0;
  __syncwarp();
  if (!find_entries(s, k)) return false;
  bool over = true;
#pragma unroll 1
  for (u32 move = 0; move < KEEP_MOVES; ++move) {
    find_links(s, k);
    u32 end = find_chain(s, k, over);
    if (!over) break;
    if (end != NOBODY) carry(s, k, end);
    else if (!add_fetch(p, s, k)) return false;
  }
  over = false;
#pragma unroll
  for (u32 j = 0; j < WORDS; ++j) over |= k.excess[j] > 0;
  for (u32 i = lane; i < EXPERTS; i += 32) over |= k.stay_P[i] > k.capacity;
  if (__any_sync(ALL_LANES, over) || !leave_pieces(p, s, k, ranks)) return false;
  if (lane == 0) atomicMin(&s.won, -1);
  return true;
}

#endif
