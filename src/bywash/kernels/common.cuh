// What every kernel of the `peer` exchange shares: parameters, flags, waiting with a deadline, row arithmetic.
//
// Knows nothing of processes: a peer is an address. `compile.py` puts this file in front of each kernel file and
// defines the static shape: RANKS, EXPERTS, TOP_K, VECS (16-byte vectors of a row), DTYPE (0 float32, 1 bfloat16,
// 2 float16), FP8 (how rows are sent: 0 as they are, 1 or 2 as e4m3 with scales, see peer_push.cu) and EXACT. With
// REAL_EXPERTS, GUESTS and MIXED above 0 the layer is elastic: see peer_assign.cu. No token count is static. No headers
// are included, so NVRTC needs no CUDA toolkit.
//
// Names: T tokens of this rank, P = RANKS * max_tokens places for received rows (place = source * max_tokens + token),
// M pairs (row, expert) computed here, sorted by expert, then source, then token.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define THREADS 512
#define WARPS (THREADS / 32)
#define ALL_LANES 0xffffffffu
#define MAX_BLOCKS 256  // of a grid: peers have room for a flag of each block, and of each of its warps
#define MAX_WARPS (MAX_BLOCKS * WARPS)
#define ROW_BYTES (VECS * 16ull)
#define GROUPS ((VECS + 15) / 16)  // of 128 columns, with a scale each, when rows are sent as e4m3
#if FP8
#define SENT_VECS ((VECS + 1) / 2)
#else
#define SENT_VECS VECS
#endif
#define SENT_BYTES (SENT_VECS * 16ull)
#if EXACT || MIXED && TOP_K > RANKS
#define SLOTS_OF_TOKEN TOP_K  // rows that a source has room for, for the outputs of one token
#else
#define SLOTS_OF_TOKEN RANKS
#endif
#define SCALE_BYTES ((GROUPS + 3) / 4 * 16ull)  // of a row
#ifndef FAULT
#define FAULT 0  // tests only: leave out 1 the release of flags, 2 the wait for outputs, 3 the wait for rows
#endif

// Every field is 8 bytes; `launch.py` reads the names from here. Addresses, unless another type is named.
struct Params {
  u64 rank;          // number
  u64 max_tokens;    // number: rows of one source's region
  u64 room;          // number: rows that `x` and `out` have, at most max_tokens
  u64 counts_first;  // number: 1 waits for all counts and plans before the release flag, 0 sends under state.digest
  u64 replan;        // number: 1 makes the next step's plan from this step's counts (with counts_first 0)
  u64 failure;       // Failure, one per exchange
  u64 state;         // State, one per generation
  u64 x;             // rows [T, VECS]; e4m3 rows [T, SENT_VECS] if `scales` is given
  u64 scales;        // float [T, GROUPS], 0 unless the rows are quantised already
  u64 ids;           // int64 [T, TOP_K], -1 for none
  u64 weights;       // float [T, TOP_K]
  u64 tokens;        // int32, T: on the device, so that a captured graph replays with another
  u64 rank_E;        // int32 [EXPERTS], who computes each expert
  u64 slot_E;        // int32 [EXPERTS], position among this rank's experts, -1 elsewhere
  u64 counts_RE;     // int32 [RANKS, EXPERTS], out
  u64 starts_E;      // int32 [EXPERTS + 1], out: first m of each expert, total last
  u64 ends_L;        // int32 [this rank's experts], out: one past the last m of each, as grouped GEMMs want it
  u64 tokens_R;      // int32 [RANKS], out
  u64 index_M;       // int32, out: place of the row that m reads
  u64 pair_M;        // int32, out: place * TOP_K + k
  u64 target_M;      // u64, out: where the output of m goes that travels unsummed, see target_of; 0 for y
  u64 m_PK;          // int32 [P, TOP_K], out: m of each pair computed here, -1 elsewhere
  u64 mask_T;        // u32 [T], out: which ranks compute something for the token
  u64 y;             // rows [M, VECS], expert outputs in the order of index_M
  u64 pushed;        // number: 1 if the experts wrote what has a target there, 0 if all outputs are in `y`
  u64 out;           // rows [T, VECS]
  u64 capacity;      // number: rows of each expert's batch
  u64 index_LC;      // int32 [this rank's experts, capacity], out: place of the row, -1 past the expert's last
  u64 counts_L;      // int32 [this rank's experts], out
  u64 real_ids;      // int64 [T, TOP_K], as the router gave them; `ids` then are virtual (elastic, as all that follow)
  u64 open_T;        // u32 [T], whether some pair of the token is computed away from home
  u64 home_TK;       // int32 [T, TOP_K], the home of each pair's expert, -1 for none
  u64 elastic;       // Elastic, one per layer
  u64 wave;          // number: which part of the step this is
  u64 at_abort;      // offsets in every rank's heap from here on: u64 [RANKS], {code | ranks at fault}
  u64 at_cells;      // u64 [RANKS, EXPERTS], {epoch | count}
  u64 at_headers;    // u64 [RANKS], {epoch | tokens}
  u64 at_row_flags;  // u64 [RANKS, MAX_BLOCKS], {epoch | plan digest}: what that block of that source sent may be read
  u64 at_out_flags;  // u64 [RANKS, MAX_WARPS], {epoch | items}: how many items that warp of that rank has sent here
  u64 at_pairs;      // u64 [P, TOP_K], {weight | expert:12 | position:20}
  u64 at_rows;       // rows [P, SENT_VECS]
  u64 at_scales;     // float [P, SCALE_BYTES / 4], one for each group of 128 columns, if FP8
  u64 at_slots;      // rows [max_tokens, SLOTS_OF_TOKEN, VECS], owned by the source of the token
  u64 at_real_cells; // u64 [RANKS, REAL_EXPERTS], {epoch | count} of experts as the router names them
  u64 peer[RANKS];   // every rank's heap as mapped here
};

enum Code {
  NONE = 0,
  LATE = 1,
  MISMATCH = 2,
  TOO_MANY_TOKENS = 3,
  BAD_EXPERT = 4,
  TOLD = 5,
  OVER_CAPACITY = 6,
  DAMAGED = 7
};
enum Phase { SEND_ROWS = 0, RECEIVE_ROWS = 1, SEND_OUTPUTS = 2, RECEIVE_OUTPUTS = 3 };

struct Failure {
  u64 code;         // Code; the first finder wins
  u64 ranks;        // bit mask of the ranks at fault
  u64 detail;       // other digest, token count, expert id, or who told
  u64 phase;        // Phase
  u64 deadline_ns;  // of every wait
};

// Kernels read and advance the epochs themselves, so a captured graph can replay. Counters wrap to 0 by themselves.
struct State {
  u32 rows_epoch;           // of the last step whose rows were sent
  u32 outputs_epoch;        // of the last step whose outputs were sent
  u32 digest;               // of the plan that the next rows are sent under
  u32 rows_done;            // blocks that have sent their rows
  u32 outputs_done;         // blocks that have begun to send outputs
  u32 counts_epoch;         // of the last counts of real experts that were sent
  u32 counts_done;          // blocks that have counted
};

struct Vec {
  u32 w[4];
};

__device__ __forceinline__ u64 load_acquire(u64 address) {
  u64 word;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return word;
}

__device__ __forceinline__ u64 load_relaxed(u64 address) {
  u64 word;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return word;
}

__device__ __forceinline__ void store_relaxed(u64 address, u64 word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

__device__ __forceinline__ void store_release(u64 address, u64 word) {
#if FAULT == 1
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
#else
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
#endif
}

// A kernel launched early (see launch.py) may not touch memory before the kernel ahead of it has ended; then the one
// behind it may be made ready. Nothing happens otherwise.
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads of rows are never under a condition: behind one, the compiler copies each result to another register at once
// and so waits for it, and two loads are in flight, not eight. Past the end, lanes load the last vector again.

// Inputs of this rank: nobody writes them during the kernel, so the read-only path is safe.
__device__ __forceinline__ Vec load_input(u64 address) {
  Vec v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(address));
  return v;
}

// Rows that a peer or an earlier kernel wrote: read once, L1 is passed by. Volatile keeps it behind the wait for the
// flag; no clobber, so that loads stay in flight together.
__device__ __forceinline__ Vec load_rows(u64 address) {
  Vec v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(address));
  return v;
}

__device__ __forceinline__ void store_row(u64 address, const Vec& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]),
               "r"(v.w[3])
               : "memory");
}

__device__ __forceinline__ u64 now_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ u64 pack(u32 high, u32 low) { return (u64)high << 32 | low; }

// Remember the first failure and tell every rank, so that survivors agree without a supervisor.
__device__ void fail(const Params& p, Phase phase, Code code, u32 ranks, u64 detail) {
  Failure* failure = (Failure*)p.failure;
  if (atomicCAS(&failure->code, (u64)NONE, (u64)code) != NONE) return;
  failure->ranks = ranks;
  failure->detail = detail;
  failure->phase = phase;
  if (code == TOLD) return;
  for (int r = 0; r < RANKS; ++r)
    if (r != (int)p.rank) store_release(p.peer[r] + p.at_abort + 8 * p.rank, pack(code, ranks));
}

__device__ __forceinline__ bool failed(const Params& p) { return *(volatile u64*)p.failure != NONE; }

// Whether to give up a wait that began at `since`; says why to everybody. Kept out of the spin, which stays short.
__device__ __noinline__ bool give_up(const Params& p, Phase phase, u32 source, u64 since) {
  if (failed(p)) return true;
  for (u32 r = 0; r < RANKS; ++r) {
    u64 told = load_relaxed(p.peer[p.rank] + p.at_abort + 8 * r);
    if (told) {
      fail(p, phase, TOLD, (u32)told, pack(r, (u32)(told >> 32)));
      return true;
    }
  }
  if (now_ns() - since < ((Failure*)p.failure)->deadline_ns) return false;
  fail(p, phase, LATE, 1u << source, 0);
  return true;
}

// Spin on a word of this rank's own heap until it belongs to `epoch` and its low half is at least `least`; 0 when the
// wait was given up.
__device__ __forceinline__ u64 await(const Params& p, Phase phase, u64 offset, u32 epoch, u32 source, u32 least = 0) {
  u64 address = p.peer[p.rank] + offset, word = load_acquire(address);
#if FAULT == 2
  if (phase == RECEIVE_OUTPUTS) return pack(epoch, (u32)word);
#endif
  if ((u32)(word >> 32) == epoch && (u32)word >= least) return word;
  u64 since = now_ns();
  for (u32 spins = 1;; ++spins) {
    word = load_acquire(address);
    if ((u32)(word >> 32) == epoch && (u32)word >= least) return word;
    if (spins % 256 == 0 && give_up(p, phase, source, since)) return 0;
  }
}

__device__ __forceinline__ u32 epoch_after(u32 epoch) { return epoch == 0xffffffffu ? 1 : epoch + 1; }

// True in the last block that counts itself in; `counter` is 0 again afterwards. One thread of each block calls.
__device__ __forceinline__ bool last_block(u32* counter) { return atomicInc(counter, gridDim.x - 1) == gridDim.x - 1; }

// The slots of token t of `source`, in its heap.
__device__ __forceinline__ u64 slots_of(const Params& p, u32 source, u32 t) {
  return p.peer[source] + p.at_slots + (u64)t * SLOTS_OF_TOKEN * ROW_BYTES;
}

// Whether the exchange still works. Every thread of a block calls and gets the same answer.
__device__ __forceinline__ bool alive(const Params& p) { return !__syncthreads_or(failed(p)); }

// Split rows over warps: pieces of at most `widest` vectors, smaller ones when there are fewer rows than warps, and at
// least two of a row so that the last round of rows leaves few warps idle.
__device__ __forceinline__ u32 pieces_of_row(u32 rows, u32 workers, u32 widest) {
  u32 pieces = max(max(rows ? workers / rows : 1, 2u), (VECS + widest - 1) / widest);
  return min(pieces, (VECS + 31u) / 32);
}

#if DTYPE == 0
#define LANES_OF_VEC 4
#else
#define LANES_OF_VEC 8
#endif

__device__ __forceinline__ float element(const Vec& v, int i) {
#if DTYPE == 0
  return __uint_as_float(v.w[i]);
#elif DTYPE == 1
  return __uint_as_float(i % 2 ? v.w[i / 2] & 0xffff0000u : v.w[i / 2] << 16);
#else
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)(v.w[i / 2] >> (i % 2 * 16))));
  return f;
#endif
}

__device__ __forceinline__ Vec rounded(const float* sum) {
  Vec v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if DTYPE == 0
    v.w[i] = __float_as_uint(sum[i]);
#elif DTYPE == 1
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
#endif
  }
  return v;
}

// sum += v * weight as the CPU does it: a product, then an addition, each rounded. Never contracted to one FMA.
__device__ __forceinline__ void add_weighted(float* sum, const Vec& v, float weight) {
#pragma unroll
  for (int i = 0; i < LANES_OF_VEC; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(element(v, i), weight));
}

__device__ __forceinline__ void clear(float* sum) {
#pragma unroll
  for (int i = 0; i < LANES_OF_VEC; ++i) sum[i] = 0;
}

__device__ __forceinline__ void add_plain(float* sum, const Vec& v) {
#pragma unroll
  for (int i = 0; i < LANES_OF_VEC; ++i) sum[i] = __fadd_rn(sum[i], element(v, i));
}
