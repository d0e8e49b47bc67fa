// Combine: expert outputs back into slots that the token's source owns, added there in one fixed order.
//
// exact (EXACT 1): all pairs travel; the source adds them in k order with their weights. Bitwise rows.weighted_sum.
// stable, fast (EXACT 0): the computing rank adds its pairs of a token in k order in float32 and rounds once; the
// source adds the ranks' rows in rank order. Slots cannot overflow: their number is the source's own token count.
//
// A long step of `exact` goes in chunks of tokens with a flag each: half of the warps send chunk after chunk while the
// others sum what has arrived, then all sum the last TAIL chunks. `stable` and `fast` go as one chunk. Measured on two
// H200, 4,096 tokens: docs/benchmarks.md.

#define LONG_STEP 1024  // tokens from which on chunks and wide pieces pay; a chunk costs a fence and a flag

struct Chunk {
  u32 first, end;  // tokens
};

// Chunk c of a rank's tokens; later ones are empty when the step is short. Source and computing rank agree.
__device__ __forceinline__ Chunk chunk_of(u32 tokens, u32 c) {
  u32 width = tokens < LONG_STEP ? tokens : (tokens + CHUNKS - 1) / CHUNKS;
  return {min(c * width, tokens), min((c + 1) * width, tokens)};
}

// The pairs of a token that are to be read here, in k order, one for each of the first `count` lanes.
struct Pairs {
  u64 row;  // address of the expert's output
  float weight;
  u32 k;
  u32 count;  // the same in all lanes
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
  u64 place_k = (source * p.max_tokens + t) * TOP_K + k, row = 0;
  float weight = 0;
  if (k < TOP_K) {
    int m = ((const int*)p.m_PK)[place_k];
    weight = __uint_as_float((u32)(load_relaxed(p.peer[p.rank] + p.at_pairs + 8 * place_k) >> 32));
    if (m >= 0) row = p.y + m * ROW_BYTES;
  }
  return packed(row, weight);
}

// How many rows and how many vectors a lane loads at once. Long steps have many warps with work: eight loads each in
// flight suffice. Short steps are all latency: most tokens then need one round trip to memory.
template <int ROWS_, int TILE_>
struct Walk {
  static constexpr int ROWS = ROWS_, TILE = TILE_;
};
using LongWalk = Walk<2, 4>;
using ShortWalk = Walk<4, 4>;

// Load and visit COUNT rows from the i-th pair on; rows past the last pair repeat it and are not visited.
template <typename W, int COUNT, typename Each>
__device__ __forceinline__ void visit_some(const Pairs& pairs, u32 i, u32 v, u32 end, Each each) {
  u64 row[COUNT];
  float weight[COUNT];
  u32 k[COUNT];
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    u32 from = min(i + j, pairs.count - 1);
    row[j] = __shfl_sync(ALL_LANES, pairs.row, from);
    weight[j] = __shfl_sync(ALL_LANES, pairs.weight, from);
    k[j] = __shfl_sync(ALL_LANES, pairs.k, from);
  }
  Vec a[COUNT][W::TILE];
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
#pragma unroll
    for (int u = 0; u < W::TILE; ++u) a[j][u] = load_rows(row[j] + 16ull * min(v + 32 * u, end - 1));
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
    if (j == 0 || i + j < pairs.count) {
#pragma unroll
      for (int u = 0; u < W::TILE; ++u) each(u, v + 32 * u, k[j], weight[j], a[j][u]);
    }
}

// Visit vectors first..end of a token's rows, TILE * 32 at a time: `each(u, v, k, weight, vector)` in k order for vector
// u of a lane's TILE, then `last(v)` with the first of them. Vectors past the end repeat the last one.
template <typename W, typename Each, typename Last>
__device__ __forceinline__ void visit_rows(const Pairs& pairs, u32 first, u32 end, Each each, Last last) {
  for (u32 v = first + threadIdx.x % 32; v - threadIdx.x % 32 < end; v += 32 * W::TILE) {
    u32 i = 0;
    for (; i + W::ROWS <= pairs.count; i += W::ROWS) visit_some<W, W::ROWS>(pairs, i, v, end, each);
    if (i < pairs.count) visit_some<W, W::ROWS - 1>(pairs, i, v, end, each);
    last(v);
  }
}

// Store the sums of a lane's vectors and begin again at zero.
template <typename W>
__device__ __forceinline__ void store_sums(u64 to, u32 v, u32 end, float (*sum)[LANES_OF_VEC]) {
#pragma unroll
  for (int u = 0; u < W::TILE; ++u) {
    if (v + 32 * u < end) store_row(to + 16ull * (v + 32 * u), rounded(sum[u]));
    clear(sum[u]);
  }
}

// Send one piece of what this rank computed for token t of `source`.
template <typename W>
__device__ __forceinline__ void send_token(const Params& p, u32 source, u32 t, u32 first, u32 end) {
  Pairs pairs = pairs_here(p, source, t);
  if (pairs.count == 0) return;
#if EXACT
  u64 to = p.peer[source] + p.at_slots + (u64)t * TOP_K * ROW_BYTES;
  visit_rows<W>(
      pairs, first, end,
      [&](int, u32 v, u32 k, float, const Vec& a) {
        if (v < end) store_row(to + k * ROW_BYTES + 16ull * v, a);
      },
      [](u32) {});
#else
  u64 to = p.peer[source] + p.at_slots + ((u64)t * RANKS + p.rank) * ROW_BYTES;
  float sum[W::TILE][LANES_OF_VEC] = {};
  visit_rows<W>(
      pairs, first, end, [&](int u, u32, u32, float weight, const Vec& a) { add_weighted(sum[u], a, weight); },
      [&](u32 v) { store_sums<W>(to, v, end, sum); });
#endif
}

// Send a chunk of every source's tokens. Sources alternate, so that remote and local writes mix; the neighbour first.
template <typename W>
__device__ void send_chunk(const Params& p, u32 c, u32 worker, u32 workers) {
  const u32 sources = EXACT && RANKS > 1 ? RANKS - 1 : RANKS;  // exact reads this rank's own outputs in place
  u32 most = 0;
  for (u32 i = 0; i < sources; ++i) {
    Chunk chunk = chunk_of(((const u32*)p.tokens_R)[(p.rank + 1 + i) % RANKS], c);
    most = max(most, chunk.end - chunk.first);
  }
  u32 pieces = pieces_of_row(sources * most, workers), width = (VECS + pieces - 1) / pieces;
  for (u32 item = worker; item < sources * most * pieces; item += workers) {
    u32 piece = item % pieces, s = (p.rank + 1 + item / pieces % sources) % RANKS;
    Chunk chunk = chunk_of(((const u32*)p.tokens_R)[s], c);
    u32 t = chunk.first + item / pieces / sources;
    if (t < chunk.end) send_token<W>(p, s, t, piece * width, min((piece + 1) * width, (u32)VECS));
  }
}

// Count a warp as done with a chunk; the last of the `senders` warps of all blocks releases the chunk to all ranks.
__device__ void release_chunk(const Params& p, u32 c, bool final, u32 epoch, u32* warps_done, u32 senders) {
  State* state = (State*)p.state;
  u32 lane = threadIdx.x % 32;
  bool last = false;
  __syncwarp();
  if (lane == 0) {
    fence_system();
    last = atomicAdd(&warps_done[c], 1) == senders - 1;
    if (last) {
      fence_device();
      last = atomicInc(&state->chunk_done[c], gridDim.x - 1) == gridDim.x - 1;
      fence_device();
    }
  }
  if (!__shfl_sync(ALL_LANES, last, 0)) return;
  if (lane < RANKS) store_release(p.peer[lane] + p.at_out_flags + 8 * (c * RANKS + p.rank), pack(epoch, 0));
  if (lane == 0 && final) state->outputs_epoch = epoch;  // every block has read the old one: all take part
}

// Wait, as a warp, for every rank's outputs of a chunk. After a failure it returns soon and the sums are of no use.
__device__ __forceinline__ void await_chunk(const Params& p, u32 c, u32 epoch) {
  u32 r = threadIdx.x % 32;
  if (r < RANKS) await(p, RECEIVE_OUTPUTS, p.at_out_flags + 8ull * (c * RANKS + r), epoch, r);
  __syncwarp();
}

#if EXACT
// Sum one piece of an own token; `ready()` is called before the first slot is read.
template <typename W, typename Ready>
__device__ __forceinline__ void sum_token(const Params& p, u32 t, u32 first, u32 end, Ready ready) {
  u64 slots = p.peer[p.rank] + p.at_slots + (u64)t * TOP_K * ROW_BYTES, k = threadIdx.x % 32, row = 0;
  float weight_k = 0, sum[W::TILE][LANES_OF_VEC] = {};
  if (k < TOP_K && ((const i64*)p.ids)[t * TOP_K + k] >= 0) {
    int m = ((const int*)p.m_PK)[(p.rank * p.max_tokens + t) * TOP_K + k];
    row = m >= 0 ? p.y + m * ROW_BYTES : slots + k * ROW_BYTES;
    weight_k = ((const float*)p.weights)[t * TOP_K + k];
  }
  Pairs pairs = packed(row, weight_k);
  ready();
  visit_rows<W>(
      pairs, first, end, [&](int u, u32, u32, float weight, const Vec& a) { add_weighted(sum[u], a, weight); },
      [&](u32 v) { store_sums<W>(p.out + t * ROW_BYTES, v, end, sum); });
}
#else
// The same from one row of each rank in `mask`, in rank order.
template <typename W, typename Ready>
__device__ __forceinline__ void sum_token(const Params& p, u32 t, u32 first, u32 end, Ready ready) {
  constexpr int UNROLL = RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1;
  u64 slots = p.peer[p.rank] + p.at_slots + (u64)t * RANKS * ROW_BYTES, to = p.out + t * ROW_BYTES;
  u32 mask = ((const u32*)p.mask_T)[t], some = mask ? __ffs(mask) - 1 : 0;
  ready();
  for (u32 v = first + threadIdx.x % 32; v < end; v += 32 * UNROLL) {
    Vec a[UNROLL][RANKS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u)
#pragma unroll
      for (u32 r = 0; r < RANKS; ++r) {
        // Where nothing came, load what another sent once more (see load_rows) and leave it out below.
        u32 from = mask >> r & 1 ? r : some;
        a[u][r] = load_rows(slots + from * ROW_BYTES + 16ull * min(v + 32 * u, end - 1));
      }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float sum[LANES_OF_VEC] = {};
#pragma unroll
      for (u32 r = 0; r < RANKS; ++r)
        if (mask >> r & 1) add_plain(sum, a[u][r]);
      if (v + 32 * u < end) store_row(to + 16ull * (v + 32 * u), rounded(sum));
    }
  }
}
#endif

template <typename W>
__device__ void sum_chunk(const Params& p, u32 c, u32 tokens, u32 epoch, u32 worker, u32 workers) {
  Chunk chunk = chunk_of(tokens, c);
  u32 count = chunk.end - chunk.first;
  // Chunk 0 is waited for even when it is empty: then the peers have done with the last rows that came from here.
  if (count == 0 && c > 0) return;
  bool waited = false;
  auto ready = [&]() {
    if (!waited) await_chunk(p, c, epoch);
    waited = true;
  };
  u32 pieces = pieces_of_row(count, workers), width = (VECS + pieces - 1) / pieces;
  for (u32 item = worker; item < count * pieces; item += workers) {
    u32 piece = item % pieces, t = chunk.first + item / pieces;
    sum_token<W>(p, t, piece * width, min((piece + 1) * width, (u32)VECS), ready);
  }
  ready();
}

// Send, sum, or both; both at once when there are several chunks. Nobody waits for a chunk before having sent it, and
// senders never wait before they have sent all, so ranks cannot wait for each other in a circle.
template <typename W>
__device__ __forceinline__ void combine_chunks(const Params& p, bool sends, bool sums, u32 epoch, u32 chunks,
                                               u32* warps_done) {
  u32 warp = threadIdx.x / 32, block = blockIdx.x, blocks = gridDim.x, tokens = ((const u32*)p.tokens_R)[p.rank];
  bool divided = sends && sums && chunks > 1;
  u32 senders = divided ? SENDERS : WARPS, summers = WARPS - SENDERS;
  if (sends && warp < senders)
    for (u32 c = 0; c < chunks; ++c) {
      send_chunk<W>(p, c, block * senders + warp, blocks * senders);
      release_chunk(p, c, c == chunks - 1, epoch, warps_done, senders);
    }
  if (!sums) return;
  u32 tail = divided ? chunks - min(TAIL, chunks) : 0;
  if (divided && warp >= SENDERS)
    for (u32 c = 0; c < tail; ++c)
      sum_chunk<W>(p, c, tokens, epoch, block * summers + warp - SENDERS, blocks * summers);
  for (u32 c = tail; c < chunks; ++c) sum_chunk<W>(p, c, tokens, epoch, block * WARPS + warp, blocks * WARPS);
}

__device__ void combine(const Params& p, bool sends, bool sums, u32 epoch) {
  __shared__ u32 warps_done[CHUNKS];
  if (threadIdx.x < CHUNKS) warps_done[threadIdx.x] = 0;
  u32 most = 0;  // ranks may differ in chunks; each waits only for those of its own tokens
  for (u32 s = 0; s < RANKS; ++s) most = max(most, ((const u32*)p.tokens_R)[s]);
  if (!alive(p)) return;
  if (most < LONG_STEP)
    combine_chunks<ShortWalk>(p, sends, sums, epoch, 1, warps_done);
  else
    combine_chunks<LongWalk>(p, sends, sums, epoch, CHUNKS, warps_done);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine_send(const __grid_constant__ Params p) {
  combine(p, true, false, epoch_after(*(volatile u32*)&((State*)p.state)->outputs_epoch));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) combine_receive(const __grid_constant__ Params p) {
  combine(p, false, true, *(volatile u32*)&((State*)p.state)->outputs_epoch);
}

// Both halves in one launch; see dispatch_both.
extern "C" __global__ void __launch_bounds__(THREADS, 1) combine_both(const __grid_constant__ Params p) {
  combine(p, true, true, epoch_after(*(volatile u32*)&((State*)p.state)->outputs_epoch));
}
