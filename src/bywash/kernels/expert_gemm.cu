// The experts of one rank on Hopper: y[m] = (silu(x Wg^T) * (x Wu^T)) Wd^T with x = rows[index[m]], in one kernel.
//
// Names: D hidden, F intermediate, L experts here, M pairs (row, expert) by expert. Stage 0 computes h [M, F], stage 1
// computes y [M, D] from h. K is what a stage sums over: D, then F.
//
// Operands are swapped: weights are wgmma's 64-row side, always full; tokens are the n side, in steps of 8, so that 261
// rows cost 272 and not 384. A tile is 256 weight rows by GROUP = CLUSTER * MAX_N tokens at most. An expert's tokens
// are split evenly into groups, and a group evenly over the blocks of the cluster: n is known from the count.
// The blocks of a cluster load half of the weights each and multicast them. Tokens are gathered by cp.async, which
// takes any row address; TMA cannot gather on Hopper. Another warp loads weights, and runs ahead while tokens wait.
// The loading threads themselves make tokens visible to wgmma: 6 % less time than a fence in the multiplying
// warpgroups where steps are short (8 experts of 128 rows), the same elsewhere.
// In stage 0 the weight rows of a tile interleave in eights: 8 of gate, 8 of up, for the same 8 columns of h; a thread
// then holds gate and up of the same value, and SwiGLU needs no exchange.
// Tiles are ordered by stage, expert, columns, tokens, and clusters draw them in that order (`Tickets`): weights are
// read from memory once, late clusters take fewer, and a tile of stage 1 waits only for tiles drawn before it.
// A row's sum has one fixed order over K, 16 at a time, whatever n, tile or cluster it falls in, so its bits depend
// neither on other rows nor on CLUSTER and MAX_N.
// A single block is for experts whose tokens fit one tile: their weights are read once, so neither they nor the outputs
// are kept in the L2 cache: 5 % less time there. With a cluster, groups share weights in L2, and it costs 1 to 4 %.
//
// A row of y may go elsewhere, also into a peer's memory: where `targets` has an address for it. So rows that another
// GPU adds up travel while products run. It is the caller who knows that they may be written, and who tells the peer.
//
// Counts and places from outside are checked: what lies outside is read as something that lies inside, and reported.
//
// `experts.py` puts hopper.cuh, the wgmma instructions and expert_tiles.cuh in front, and defines CLUSTER (1 or 2),
// MAX_N (a multiple of 8), STAGES, PRODUCER_REGISTERS, CONSUMER_REGISTERS and SHARED_BYTES. No token count or matrix
// size is static.

// --- loading: a warp for weights, three for tokens; each side follows tiles and ring by itself ---

__device__ __forceinline__ void report(const Params& p, u32 fault) { atomicOr((u32*)p.state + AT_FAULTS, fault); }

__device__ __forceinline__ void check_ends(const Params& p) {
  const int* ends = (const int*)p.ends;
  for (u32 i = threadIdx.x % 32; i < p.experts; i += 32)
    if ((i ? (u32)ends[i - 1] : 0) > (u32)ends[i] || (u32)ends[i] > p.pairs) report(p, FAULT_ENDS);
}

__device__ __forceinline__ void load_weight_step(const Params& p, const Tile& tile, u32 k, u32 to, u32 full, u32 block,
                                                 u64 policy) {
  barrier_expect(full, WEIGHT_BYTES);
  u32 expert = tile.expert - (u32)p.first;
  for (u32 half = CLUSTER == 2 ? block : 0; half < 2; half += CLUSTER) {
    u32 at = to + half * HALF_BYTES, row = tile.column * 2 + half;
    if (tile.stage == 0)
      tma_load(at, p.weights[0], full, ALL_BLOCKS, policy, k * STEP_K, 0, 0, row * 8, expert);
    else
      tma_load(at, p.weights[1], full, ALL_BLOCKS, policy, k * STEP_K, row * 128, expert, 0, 0);
  }
}

// Also draws the tickets. In stage 1 it fills the ring while the tokens' side still waits for h.
__device__ __forceinline__ void load_weights(const Params& p, u32 shared, u32 block) {
  bool leads = threadIdx.x % 32 == 0, draws = leads && block == 0;
  u64 policy = READ_ONCE ? policy_evict_first() : policy_evict_normal();
  Ring ring, places;
  Tickets tickets{shared};
  Finder finder{(u32)p.first_stage, (u32)p.first};
  Tile tile;
  if (draws) tickets.draw(p, places);
  if (blockIdx.x == 0) check_ends(p);
  while (finder.find(p, tickets.take(), block, tile)) {
    if (draws) tickets.draw(p, places);
    u32 steps = up(sum_of(p, tile.stage), STEP_K);
    for (u32 k = 0; k < steps; ++k) {
      barrier_wait(shared + AT_EMPTY + 8 * ring.at, ring.parity ^ 1);
      u32 full = shared + AT_FULL + 8 * ring.at;
      if (leads) load_weight_step(p, tile, k, shared + ring.at * STAGE_BYTES, full, block, policy);
      ring.next(STAGES);
    }
  }
}

__device__ __forceinline__ void wait_for_h(const Params& p, const Tile& tile) {
  while (load_acquire((const u32*)p.state + AT_PARTS + tile.expert) < tile.parts) {
  }
}

__device__ __forceinline__ u32 place_of(const Params& p, u32 m) {
  u32 place = ((const u32*)p.index)[m];
  if (place < p.places) return place;
  report(p, FAULT_PLACE);
  return 0;
}

// All copies of this thread but the last `left` groups: visible to wgmma, and said so.
template <int left>
__device__ __forceinline__ void arrive_with_copies(u32 full) {
  copies_wait<left>();
  fence_for_wgmma();
  barrier_arrive(full);
}

__device__ __forceinline__ void load_tokens(const Params& p, u32 shared, u32 block) {
  u32 thread = threadIdx.x % 128 - 32, piece = thread % 8, row = thread / 8;
  u32 to = WEIGHT_BYTES + row * 128 + ((piece ^ (row % 8)) << 4);
  Ring ring;
  Tickets tickets{shared};
  Finder finder{(u32)p.first_stage, (u32)p.first};
  Tile tile;
  while (finder.find(p, tickets.take(), block, tile)) {
    if (tile.stage == 1 && p.first_stage == 0) {
      if (thread == 0) wait_for_h(p, tile);
      sync_named(1, TOKEN_THREADS);
    }
    u64 base = tile.stage ? p.h : p.rows;
    u32 vecs = tile.stage ? p.inner / 8 : p.row_vecs, sum = sum_of(p, tile.stage);
    u32 from[PASSES];
#pragma unroll
    for (u32 i = 0; i < PASSES; ++i) {
      u32 m = min(tile.first + row + TOKEN_ROWS * i, tile.end - 1);
      from[i] = (tile.stage ? m : place_of(p, m)) * vecs + piece;
    }
    u32 last = 0;
    for (u32 k = 0; k < up(sum, STEP_K); ++k) {
      u32 stage = shared + ring.at * STAGE_BYTES, full = shared + AT_FULL + 8 * ring.at;
      barrier_wait(shared + AT_EMPTY + 8 * ring.at, ring.parity ^ 1);
      u32 bytes = k * STEP_K + piece * 8 < sum ? 16 : 0;
      u64 source = base + k * (STEP_K * 2);
#pragma unroll
      for (u32 i = 0; i < PASSES; ++i)  // twelve rows on, the swizzle differs by four pieces
        if (row + TOKEN_ROWS * i < tile.n)
          copy_async16(stage + (to ^ i % 2 * 64) + i * TOKEN_ROWS * 128, source + from[i] * 16ull, bytes);
      copies_commit();
      if (k) arrive_with_copies<1>(last);
      last = full;
      ring.next(STAGES);
    }
    arrive_with_copies<0>(last);
  }
}

// --- multiplying: two warpgroups, each 128 weight rows (two wgmma) by n tokens ---

__device__ __forceinline__ float swiglu(float gate, float value) {
  return __fdividef(gate, 1.f + __expf(-gate)) * value;
}

// Every warp for itself: wgmma's wait speaks of the rows of one warp only.
__device__ __forceinline__ void release(u32 empty) {
  if (threadIdx.x % 32 < CLUSTER) barrier_arrive_remote(in_block(empty, threadIdx.x % 32));
}

// Leaves the last step in flight and returns the barrier that it will release.
template <int n>
__device__ __forceinline__ u32 multiply(u32 shared, u32 group, Ring& ring, u32 steps, float (&sum)[2][n / 2]) {
#pragma unroll
  for (int i = 0; i < n; ++i) pin(sum[i / (n / 2)][i % (n / 2)] = 0.f);
  u32 last = 0;
  for (u32 k = 0; k < steps; ++k) {
    u32 stage = shared + ring.at * STAGE_BYTES;
    barrier_wait(shared + AT_FULL + 8 * ring.at, ring.parity);
    u64 weights = wgmma_operand(stage + group * HALF_BYTES), tokens = wgmma_operand(stage + WEIGHT_BYTES);
    wgmma_begin();
#pragma unroll
    for (u32 i = 0; i < STEP_K / 16; ++i) {
      Wgmma<n>::run(sum[0], weights + 2 * i, tokens + 2 * i);
      Wgmma<n>::run(sum[1], weights + (64 * 128 >> 4) + 2 * i, tokens + 2 * i);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (k) release(last);
    last = shared + AT_EMPTY + 8 * ring.at;
    ring.next(STAGES);
  }
  return last;
}

// Where the outputs of every 128th of the tile's tokens go, from this thread's on.
template <int n>
__device__ __forceinline__ void find_rows(const Params& p, const Tile& tile, u64 (&rows)[OWN_ROWS(n)]) {
#pragma unroll
  for (int j = 0; j < OWN_ROWS(n); ++j) {
    u32 m = min(tile.first + threadIdx.x % 128 + 128 * j, tile.end - 1);
    u64 target = p.targets ? ((const u64*)p.targets)[m] : 0;
    rows[j] = target ? target : p.y + (u64)m * p.hidden * 2;
  }
}

// Transposes through shared memory, so that a token's columns are written side by side. The last tokens may be padding.
// In stage 1 the address of a token's row stands behind its columns, in the 16 bytes that nobody else uses.
template <int n, int stage>
__device__ __forceinline__ void write_out(const Params& p, const Tile& tile, u32 chunks, u32 group,
                                          const float (&sum)[2][n / 2], const u64 (&rows)[OWN_ROWS(n)]) {
  constexpr u32 columns = stage ? 128 : 64, vecs = columns / 8, pitch = CHUNK_PITCH(columns);
  u32 thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, right = lane / 8 % 2;
  u32 buffer = chunks + group * CHUNK_BYTES;
  u32 to = buffer + lane % 8 * pitch + (stage ? warp * 16 + right * 8 : right * 32 + warp * 8) * 2;
  u32 width = columns_of(p, stage), column = (tile.column * CONSUMERS + group) * columns;
  u64 h = p.h + ((u64)tile.first * width + column) * 2;
#pragma unroll
  for (int chunk = 0; chunk < (n + CHUNK - 1) / CHUNK; ++chunk) {
    sync_named(2 + group, 128);
#pragma unroll
    for (int j = chunk * 4; j < chunk * 4 + 4 && j < n / 8; ++j) {
      u32 at = to + j % 4 * 8 * pitch;
      const float *a = &sum[0][4 * j], *b = &sum[1][4 * j];
      if (stage == 0) {
        store_transposed(at, pack_bf16(swiglu(a[0], a[2]), swiglu(a[1], a[3])),
                         pack_bf16(swiglu(b[0], b[2]), swiglu(b[1], b[3])));
      } else {
        store_transposed(at, pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]));
        store_transposed(at + 128, pack_bf16(b[0], b[1]), pack_bf16(b[2], b[3]));
      }
    }
    if (stage && warp == chunk % 4) store_shared64(buffer + lane * pitch + columns * 2, rows[chunk / 4]);
    sync_named(2 + group, 128);
#pragma unroll
    for (u32 i = 0; i < CHUNK * vecs / 128; ++i) {
      u32 row = (thread + i * 128) / vecs, vec = thread % vecs;
      if (chunk * CHUNK + (int)row >= tile.rows || column + vec * 8 >= width) continue;
      u64 at = stage ? load_shared64(buffer + row * pitch + columns * 2) + column * 2
                     : h + (u64)(chunk * CHUNK + row) * width * 2;
      copy_vec<stage && READ_ONCE>(at + vec * 16, buffer + row * pitch + vec * 16);
    }
  }
}

// Where a warpgroup is: its place in the ring of loaded steps, and in the list of tiles.
struct Progress {
  u32 shared, block, group;
  Ring ring;
  Tickets tickets;
  Finder finder;
};

// Looks for the next tile and for where outputs go while the last products run, since that waits for memory. False if
// there is no next tile.
template <int n>
__device__ __forceinline__ bool compute_tile(const Params& p, const Tile& tile, Progress& at, Tile& next) {
  float sum[2][n / 2];
  u64 rows[OWN_ROWS(n)] = {};
  u32 last = multiply<n>(at.shared, at.group, at.ring, up(sum_of(p, tile.stage), STEP_K), sum);
  bool more = at.finder.find(p, at.tickets.take(), at.block, next);
  if (tile.stage) find_rows<n>(p, tile, rows);
  wgmma_wait<0>();
  release(last);
#pragma unroll
  for (int i = 0; i < n; ++i) pin(sum[i / (n / 2)][i % (n / 2)]);
  if (tile.stage == 0)
    write_out<n, 0>(p, tile, at.shared + AT_CHUNKS, at.group, sum, rows);
  else
    write_out<n, 1>(p, tile, at.shared + AT_CHUNKS, at.group, sum, rows);
  return more;
}

// Says that this warpgroup's part of h can be read.
__device__ __forceinline__ void publish(const Params& p, const Tile& tile, u32 group) {
  sync_named(2 + group, 128);
  if (threadIdx.x % 128 == 0) add_release((u32*)p.state + AT_PARTS + tile.expert, 1);
}

template <int n>
__device__ __forceinline__ bool choose_n(const Params& p, const Tile& tile, Progress& at, Tile& next) {
  if (tile.n == n) return compute_tile<n>(p, tile, at, next);
  if constexpr (n > 8) return choose_n<n - 8>(p, tile, at, next);
  return false;
}

__device__ __forceinline__ void compute_tiles(const Params& p, u32 shared, u32 block) {
  u32 group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so that the compiler knows it to be the same in a warp
  Progress at{shared, block, group, {}, {shared}, {(u32)p.first_stage, (u32)p.first}};
  Tile tile, next;
  bool more = at.finder.find(p, at.tickets.take(), block, tile);
  while (more) {
    more = choose_n<MAX_N>(p, tile, at, next);
    if (tile.stage == 0) publish(p, tile, at.group);
    tile = next;
  }
}

// The last block leaves the counters as it found them, so that the next launch, or a graph's replay, starts afresh.
__device__ __forceinline__ void reset(const Params& p) {
  u32* state = (u32*)p.state;
  if (add_acquire_release(state + AT_DONE, 1) + 1 < gridDim.x) return;
  for (u32 i = 0; i < AT_PARTS + (u32)p.experts; ++i)
    if (i != AT_FAULTS) state[i] = 0;
}

extern "C" __global__ __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) void experts(
    const __grid_constant__ Params p) {
  extern __shared__ unsigned char memory[];
  u32 shared = ((u32)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024, block = cluster_rank();
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < STAGES; ++i) {
      barrier_init(shared + AT_FULL + 8 * i, 1 + TOKEN_THREADS);
      barrier_init(shared + AT_EMPTY + 8 * i, CONSUMERS * 4 * CLUSTER);
    }
    for (u32 i = 0; i < 2; ++i) {
      barrier_init(shared + AT_TICKET_FULL + 8 * i, 1);
      barrier_init(shared + AT_TICKET_EMPTY + 8 * i, WARPS * CLUSTER);
    }
    barrier_init_fence();
    tma_prefetch_map(p.weights[0]);
    tma_prefetch_map(p.weights[1]);
  }
  cluster_sync();
  if (threadIdx.x >= CONSUMER_THREADS) {
    keep_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x < CONSUMER_THREADS + 32)
      load_weights(p, shared, block);
    else
      load_tokens(p, shared, block);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    compute_tiles(p, shared, block);
  }
  cluster_sync();  // a block's shared memory must outlive what its peers send there
  if (threadIdx.x == 0) reset(p);
}
