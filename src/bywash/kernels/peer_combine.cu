// Combine: expert outputs back into slots that the token's source owns, added there in one fixed order.
//
// exact (EXACT 1): all pairs travel; the source adds them in k order with their weights. Bitwise rows.weighted_sum.
// stable, fast (EXACT 0): each computing rank adds its pairs of a token in k order in float32 and rounds once; the
// source adds the ranks' rows in rank order. Slots cannot overflow: their number is the source's own token count.
// stable where rows may be computed away from home (MIXED): tokens with such a row as in exact, see finish_open.
// The source never writes its own part to a slot: it is summed in registers when the others' parts are there.
// What travels unsummed may be in the slots before combine begins (`pushed`): experts wrote it there, beside their
// products. Then combine sends flags only. It begins when the grids ahead of it have ended, with all that they wrote,
// so whoever acquires a flag that it releases sees the experts' stores as if they were its own.
//
// An item is a piece of a token's row, small enough that a lane loads its vectors at once: what is left to finish when
// the wire falls silent is a round or two of items, so they must be small. A warp walks two lists of items: those it
// sends (other ranks' tokens) and those it finishes (own tokens), sends a round before finishes. It counts what it has
// sent to each rank in a word of its own in that rank's heap, {epoch | items}. Which warp sent an item, and as its how
// manieth, follows from the numbers of tokens alone, so whoever finishes an item waits for just that word: no barrier,
// no atomic, no last block.
//
// Nobody waits for ever: before a warp sets the flag of token t's send it finishes only tokens below t, and a finish of
// t needs only flags of t. So of all finishes that wait, one of the lowest token always goes on.
//
// Example: 2 ranks, 2,112 warps, 4,096 tokens in 7 pieces: warp 5 sends (token 0, piece 5), (token 302, piece 3),
// finishes (0, 5), sends (604, 1), finishes (302, 3)... and waits for the peer's warp 5 only.

#define OTHERS (RANKS > 1 ? RANKS - 1 : 1)
#define ROWS_AT_ONCE 4  // rows, and vectors of each, that a lane loads at once
#define VECS_AT_ONCE 4

// The pairs of a token that are to be read here, in k order, one for each of the first `count` lanes.
struct Pairs {
  u64 row;  // address of the expert's output
  float weight;
  u32 k;
  u32 count;  // the same in all lanes
#if MIXED
  bool open;  // the token's outputs travel unsummed
#endif
};

// Close the gaps: lanes with row 0 have nothing to read.
__device__ __forceinline__ Pairs packed(u64 row, float weight) {
  u32 there = __ballot_sync(ALL_LANES, row != 0);
  u32 rest = there;  // without its lowest bits, as many as this lane's number: its lane reads from the next one
#pragma unroll
  for (u32 i = 0; i < TOP_K; ++i)
    if (i < threadIdx.x % 32) rest &= rest - 1;
  u32 from = rest ? __ffs(rest) - 1 : 0;
  return {__shfl_sync(ALL_LANES, row, from), __shfl_sync(ALL_LANES, weight, from), from, (u32)__popc(there)};
}

__device__ __forceinline__ Pairs pairs_here(const Params& p, u32 source, u32 t) {
  u32 k = threadIdx.x % 32;
  u64 place_k = (source * p.max_tokens + t) * TOP_K + k, row = 0, pair = 0;
  float weight = 0;
  if (k < TOP_K) {
    int m = ((const int*)p.m_PK)[place_k];
    pair = load_relaxed(p.peer[p.rank] + p.at_pairs + 8 * place_k);
    weight = __uint_as_float((u32)(pair >> 32));
    if (m >= 0) row = p.y + m * ROW_BYTES;
  }
  Pairs found = packed(row, weight);
#if MIXED
  found.open = __ballot_sync(ALL_LANES, row && pair & OPEN_BIT) != 0;
#endif
  return found;
}

// Load and visit COUNT rows, from the i-th pair on.
template <int COUNT, typename Each>
__device__ __forceinline__ void visit_some(const Pairs& pairs, u32 i, u32 v, u32 end, Each each) {
  u64 row[COUNT];
  float weight[COUNT];
  u32 k[COUNT];
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    row[j] = __shfl_sync(ALL_LANES, pairs.row, i + j);
    weight[j] = __shfl_sync(ALL_LANES, pairs.weight, i + j);
    k[j] = __shfl_sync(ALL_LANES, pairs.k, i + j);
  }
  Vec a[COUNT][VECS_AT_ONCE];
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
#pragma unroll
    for (int u = 0; u < VECS_AT_ONCE; ++u) a[j][u] = load_rows(row[j] + 16ull * min(v + 32 * u, end - 1));
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
#pragma unroll
    for (int u = 0; u < VECS_AT_ONCE; ++u) each(u, i + j, k[j], weight[j], a[j][u]);
}

// The rows that are left, at most COUNT.
template <int COUNT, typename Each>
__device__ __forceinline__ void visit_rest(const Pairs& pairs, u32 i, u32 v, u32 end, Each each) {
  if constexpr (COUNT > 0) {
    if (pairs.count - i == COUNT)
      visit_some<COUNT>(pairs, i, v, end, each);
    else
      visit_rest<COUNT - 1>(pairs, i, v, end, each);
  }
}

// Visit vectors v, v + 32, ... of all rows: `each(u, i, k, weight, vector)` for vector u of a lane's VECS_AT_ONCE and
// the i-th row, in k order, COUNT rows loaded at once. Vectors past the end repeat the last one.
template <int COUNT, typename Each>
__device__ __forceinline__ void visit_rows(const Pairs& pairs, u32 v, u32 end, Each each) {
  u32 i = 0;
  for (; i + COUNT <= pairs.count; i += COUNT) visit_some<COUNT>(pairs, i, v, end, each);
  visit_rest<COUNT - 1>(pairs, i, v, end, each);
}

// Visit VECS_AT_ONCE * 32 vectors at a time: `tile(v)` with the first of each lane.
template <typename Tile>
__device__ __forceinline__ void visit_tiles(u32 first, u32 end, Tile tile) {
  for (u32 base = first; base < end; base += 32 * VECS_AT_ONCE) tile(base + threadIdx.x % 32);
}

// Store the sums of a lane's vectors.
__device__ __forceinline__ void store_sums(u64 to, u32 v, u32 end, float (*sum)[LANES_OF_VEC]) {
#pragma unroll
  for (int u = 0; u < VECS_AT_ONCE; ++u)
    if (v + 32 * u < end) store_row(to + 16ull * (v + 32 * u), rounded(sum[u]));
}

template <int COUNT = ROWS_AT_ONCE>
__device__ __forceinline__ void sum_rows(const Pairs& pairs, u32 v, u32 end, float (*sum)[LANES_OF_VEC]) {
#pragma unroll
  for (int u = 0; u < VECS_AT_ONCE; ++u) clear(sum[u]);
  visit_rows<COUNT>(pairs, v, end, [&](int u, u32, u32, float weight, const Vec& a) {
    add_weighted(sum[u], a, weight);
  });
}

#if EXACT || MIXED
// All pairs as they are, each to the slot of its k.
__device__ __forceinline__ void send_apart(const Pairs& pairs, u64 to, u32 first, u32 end) {
  visit_tiles(first, end, [&](u32 v) {
    visit_rows<ROWS_AT_ONCE>(pairs, v, end, [&](int u, u32, u32 k, float, const Vec& a) {
      if (v + 32 * u < end) store_row(to + k * ROW_BYTES + 16ull * (v + 32 * u), a);
    });
  });
}
#endif

// Send vectors first..end of what this rank computed for token t of `source`. False if it computed nothing.
__device__ __forceinline__ bool send_token(const Params& p, u32 source, u32 t, u32 first, u32 end) {
  Pairs pairs = pairs_here(p, source, t);
  if (pairs.count == 0) return false;
  u64 slots = slots_of(p, source, t);
#if EXACT
  send_apart(pairs, slots, first, end);
#else
#if MIXED
  if (pairs.open) {
    if (!p.pushed) send_apart(pairs, slots, first, end);
    return true;
  }
#endif
  u64 to = slots + p.rank * ROW_BYTES;
  visit_tiles(first, end, [&](u32 v) {
    float sum[VECS_AT_ONCE][LANES_OF_VEC];
    sum_rows(pairs, v, end, sum);
    store_sums(to, v, end, sum);
  });
#endif
  return true;
}

#if EXACT
// Sum vectors first..end of an own token; `ready(ranks)` waits for these ranks, before the first slot is read.
template <typename Ready>
__device__ __forceinline__ void finish_token(const Params& p, u32 t, u32 first, u32 end, Ready ready) {
  u64 slots = slots_of(p, p.rank, t), k = threadIdx.x % 32, row = 0;
  float weight_k = 0;
  if (k < TOP_K && ((const i64*)p.ids)[t * TOP_K + k] >= 0) {
    int m = ((const int*)p.m_PK)[(p.rank * p.max_tokens + t) * TOP_K + k];
    row = m >= 0 ? p.y + m * ROW_BYTES : slots + k * ROW_BYTES;
    weight_k = ((const float*)p.weights)[t * TOP_K + k];
  }
  Pairs pairs = packed(row, weight_k);
  ready(((const u32*)p.mask_T)[t]);
  visit_tiles(first, end, [&](u32 v) {
    float sum[VECS_AT_ONCE][LANES_OF_VEC];
    sum_rows(pairs, v, end, sum);
    store_sums(p.out + t * ROW_BYTES, v, end, sum);
  });
}
#else
#if MIXED
// A token of which some pair was computed away from home: its pairs came unsummed, and are summed here as their homes
// would have done, each home's sum rounded, then in the order of homes. The same bits, wherever they were computed.
template <typename Ready>
__device__ __forceinline__ void finish_open(const Params& p, u32 t, u32 first, u32 end, Ready ready) {
  u64 slots = slots_of(p, p.rank, t), k = threadIdx.x % 32, row = 0;
  float weight_k = 0;
  int home = -1;
  if (k < TOP_K) home = ((const int*)p.home_TK)[t * TOP_K + k];
  if (home >= 0) {
    int m = ((const int*)p.m_PK)[(p.rank * p.max_tokens + t) * TOP_K + k];
    row = m >= 0 ? p.y + m * ROW_BYTES : slots + k * ROW_BYTES;
    weight_k = ((const float*)p.weights)[t * TOP_K + k];
  }
  ready(((const u32*)p.mask_T)[t]);
  visit_tiles(first, end, [&](u32 v) {
    float total[VECS_AT_ONCE][LANES_OF_VEC], sum[VECS_AT_ONCE][LANES_OF_VEC];
#pragma unroll
    for (int u = 0; u < VECS_AT_ONCE; ++u) clear(total[u]);
    for (int r = 0; r < RANKS; ++r) {
      Pairs here = packed(home == r ? row : 0, weight_k);
      if (here.count == 0) continue;
      sum_rows<2>(here, v, end, sum);  // two rows at once: two sums and four rows need more registers than there are
#pragma unroll
      for (int u = 0; u < VECS_AT_ONCE; ++u) add_plain(total[u], rounded(sum[u]));
    }
    store_sums(p.out + t * ROW_BYTES, v, end, total);
  });
}
#endif

// The same from own outputs and one row of each other rank, in rank order.
template <typename Ready>
__device__ __forceinline__ void finish_token(const Params& p, u32 t, u32 first, u32 end, Ready ready) {
#if MIXED
  if (((const u32*)p.open_T)[t]) return finish_open(p, t, first, end, ready);
#endif
  u64 slots = slots_of(p, p.rank, t);
  u32 others = ((const u32*)p.mask_T)[t] & ~(1u << p.rank), lane = threadIdx.x % 32;
  // Two terms give the same bits in either order.
  u32 below = RANKS > 2 ? __popc(others & ((1u << p.rank) - 1)) : 0;
  Pairs own = pairs_here(p, p.rank, t);
  Pairs theirs = packed(others >> lane & 1 ? slots + lane * ROW_BYTES : 0, 1.0f);
  visit_tiles(first, end, [&](u32 v) {
    float sum[VECS_AT_ONCE][LANES_OF_VEC];
    Vec mine[VECS_AT_ONCE];
    sum_rows(own, v, end, sum);
#pragma unroll
    for (int u = 0; u < VECS_AT_ONCE; ++u) {
      mine[u] = rounded(sum[u]);
      clear(sum[u]);
      // Where this rank computed nothing, `mine` is 0 and adding it changes no bit: sums from 0 on are never -0.
      if (below == 0) add_plain(sum[u], mine[u]);
    }
    if (v < first + 32) ready(others);
    constexpr int at_once = OTHERS < ROWS_AT_ONCE ? OTHERS : ROWS_AT_ONCE;
    visit_rows<at_once>(theirs, v, end, [&](int u, u32 i, u32, float, const Vec& a) {
      if (RANKS > 2 && below > 0 && i == below) add_plain(sum[u], mine[u]);
      add_plain(sum[u], a);
    });
    if (RANKS > 2 && below > 0 && below == theirs.count)
#pragma unroll
      for (int u = 0; u < VECS_AT_ONCE; ++u) add_plain(sum[u], mine[u]);
    store_sums(p.out + t * ROW_BYTES, v, end, sum);
  });
}
#endif

// How the work is divided; the same on every rank, since all know the token counts and have as many warps.
struct Division {
  u32 workers, worker;  // warps of all blocks; consecutive items lie in different blocks
  u32 most;             // tokens of the rank with most
  u32 pieces, width;    // of a row
};

__device__ __forceinline__ Division divide(const Params& p) {
  u32 workers = gridDim.x * WARPS, most = 0;
#pragma unroll
  for (u32 s = 0; s < RANKS; ++s) most = max(most, ((const u32*)p.tokens_R)[s]);
  u32 pieces = pieces_of_row(OTHERS * most, workers, 32 * VECS_AT_ONCE);
  return {workers, threadIdx.x / 32 * gridDim.x + blockIdx.x, most, pieces, (VECS + pieces - 1) / pieces};
}

// The i-th item is piece i % pieces of a token of the ranks that follow in turn; the neighbour first. Returns the rank
// that it was sent to, RANKS for none.
__device__ __forceinline__ u32 send_item(const Params& p, const Division& d, u32 i) {
  u32 piece = i % d.pieces, s = (p.rank + 1 + i / d.pieces % OTHERS) % RANKS, t = i / d.pieces / OTHERS;
  if (t >= ((const u32*)p.tokens_R)[s]) return RANKS;
  return send_token(p, s, t, piece * d.width, min((piece + 1) * d.width, (u32)VECS)) ? s : RANKS;
}

__device__ __forceinline__ void release_item(const Params& p, const Division& d, u32 i, u32 to, u32 epoch) {
  if (to == RANKS) return;
  __syncwarp();
  if (threadIdx.x % 32) return;
  store_release(p.peer[to] + p.at_out_flags + 8ull * (p.rank * MAX_WARPS + d.worker), pack(epoch, i / d.workers + 1));
}

__device__ __forceinline__ void finish_item(const Params& p, const Division& d, u32 i, u32 epoch) {
  u32 piece = i % d.pieces, t = i / d.pieces, r = threadIdx.x % 32;
  finish_token(p, t, piece * d.width, min((piece + 1) * d.width, (u32)VECS), [&](u32 ranks) {
    if (RANKS > 1 && ranks >> r & 1 && r != p.rank) {
      u32 sent = (t * OTHERS + (p.rank + RANKS - 1 - r) % RANKS) * d.pieces + piece;  // its number at rank r
      u64 flag = p.at_out_flags + 8ull * (r * MAX_WARPS + sent % d.workers);
      await(p, RECEIVE_OUTPUTS, flag, epoch, r, sent / d.workers + 1);
    }
    __syncwarp();
  });
}

// The flag of a send waits for its stores to arrive, and the warp with it. In a long step the last send before a finish
// gets its flag behind that finish, which gives the stores their time; not if the finish is of the same token or a
// later one, for then it may wait for a warp that waits for this flag. In a step of two rounds nobody has that time.
__device__ __forceinline__ void walk(const Params& p, const Division& d, bool sends, bool finishes, u32 epoch) {
  u32 to_send = sends && RANKS > 1 ? OTHERS * d.most * d.pieces : 0;
  u32 to_finish = finishes ? ((const u32*)p.tokens_R)[p.rank] * d.pieces : 0;
  u32 ahead = d.workers / d.pieces + 1;  // tokens in a round
  bool is_long = to_send > 2 * d.workers;
  u32 next = d.worker, i = d.worker, sent = 0, to = RANKS;  // `sent` has no flag yet while `to` is a rank
  auto send_is_next = [&] {
    return next < to_send && (i >= to_finish || next / (d.pieces * OTHERS) <= i / d.pieces + ahead);
  };
  for (bool sending = send_is_next(); sending || i < to_finish;) {
    bool late = is_long && sending;
    if (sending) {
      to = send_item(p, d, sent = next);
      next += d.workers;
    } else {
      finish_item(p, d, i, epoch);
      i += d.workers;
    }
    sending = send_is_next();
    if (late && !sending && i < to_finish && sent / (d.pieces * OTHERS) > i / d.pieces) continue;
    release_item(p, d, sent, to, epoch);
    to = RANKS;
  }
}

// Warp 0 tells every rank that this one has begun to combine, so has read the rows that came, and hears it from each.
__device__ __forceinline__ void tell_all(const Params& p, const Division& d, u32 epoch) {
  if (d.worker == 0 && threadIdx.x < RANKS)
    store_release(p.peer[threadIdx.x] + p.at_out_flags + 8ull * (p.rank * MAX_WARPS), pack(epoch, 0));
  __syncwarp();
}

// Where nothing is left to send, every warp says at once that all its items are there, however many. Not one function
// with the above: then `combine_both` needs more registers than there are.
__device__ __forceinline__ void tell_all_sent(const Params& p, const Division& d, u32 epoch) {
  u32 lane = threadIdx.x % 32;
  if (lane < RANKS)
    store_release(p.peer[lane] + p.at_out_flags + 8ull * (p.rank * MAX_WARPS + d.worker), pack(epoch, ~0u));
  __syncwarp();
}

__device__ __forceinline__ void hear_all(const Params& p, const Division& d, u32 epoch) {
  if (d.worker == 0 && threadIdx.x < RANKS)
    await(p, RECEIVE_OUTPUTS, p.at_out_flags + 8ull * (threadIdx.x * MAX_WARPS), epoch, threadIdx.x);
}

__device__ void combine(const Params& p, bool sends, bool finishes, u32 epoch) {
  State* state = (State*)p.state;
  Division d = divide(p);
  bool all_sent = EXACT && p.pushed;
  if (!alive(p)) return;
  if (sends) {
    if (all_sent)
      tell_all_sent(p, d, epoch);
    else
      tell_all(p, d, epoch);
    // The last warp is the one with least to do. All warps of all blocks have read the old epoch: see `alive`.
    if (threadIdx.x == THREADS - 1 && last_block(&state->outputs_done)) state->outputs_epoch = epoch;
  }
  walk(p, d, sends && !all_sent, finishes, epoch);
  if (finishes) hear_all(p, d, epoch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine_send(const __grid_constant__ Params p) {
  begin_kernel();
  if (!takes_part(p)) return;
  combine(p, true, false, epoch_after(*(volatile u32*)&((State*)p.state)->outputs_epoch));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine_receive(const __grid_constant__ Params p) {
  begin_kernel();
  if (!takes_part(p)) return;
  combine(p, false, true, *(volatile u32*)&((State*)p.state)->outputs_epoch);
}

// Both halves in one launch; see dispatch_both.
extern "C" __global__ void __launch_bounds__(THREADS, 1) combine_both(const __grid_constant__ Params p) {
  begin_kernel();
  if (!takes_part(p)) return;
  combine(p, true, true, epoch_after(*(volatile u32*)&((State*)p.state)->outputs_epoch));
}
