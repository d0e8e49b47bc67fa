// Which tile a block computes: the kernel's parameters, what lies where, the walk over tiles, the drawing of them.
//
// `expert_gemm.cu` says what tiles are, names the letters and the macros that `experts.py` defines; it loads and
// multiplies.

#define CONSUMERS 2  // warpgroups that multiply; each has 128 weight rows
#define CONSUMER_THREADS (CONSUMERS * 128)
#define THREADS (CONSUMER_THREADS + 128)
#define TOKEN_THREADS 96  // that load tokens, twelve rows at a time; 32 more load weights
#define TOKEN_ROWS (TOKEN_THREADS / 8)
#define WARPS (THREADS / 32)
#define STEP_K 64  // 128 bytes, the widest swizzle
#define GROUP (CLUSTER * MAX_N)
#define READ_ONCE (CLUSTER == 1)
#define ALL_BLOCKS ((1 << CLUSTER) - 1)
#define HALF_BYTES (128 * 128)
#define WEIGHT_BYTES (2 * HALF_BYTES)
#define TOKEN_BYTES (MAX_N * 128)
#define STAGE_BYTES (WEIGHT_BYTES + TOKEN_BYTES)
#define CHUNK 32  // tokens that a warpgroup writes out at a time
#define CHUNK_PITCH(columns) ((columns) * 2 + 16)  // 16 bytes more, so that eight rows lie in different banks
#define OWN_ROWS(n) (((n) + 127) / 128)  // rows of y of which a thread of a warpgroup knows the address
#define CHUNK_BYTES (CHUNK * CHUNK_PITCH(128))
#define PASSES ((MAX_N + TOKEN_ROWS - 1) / TOKEN_ROWS)

struct Params {
  TensorMap weights[2];  // of the two stages: boxes of 64 values by 128 rows in the order of shared memory
  u64 rows;              // bf16 [P, row_vecs * 8]
  u64 row_vecs;          // number: 16-byte vectors from one row to the next
  u64 places;            // number: P
  u64 index;             // int32 [at least M]
  u64 pairs;             // number: length of the index
  u64 ends;              // int32 [L]
  u64 h;                 // bf16 [M, F]
  u64 y;                 // bf16 [M, D]
  u64 targets;           // addresses [at least M]: of the row that y[m] is written to, 0 for y itself; 0 for no targets
  u64 hidden;            // number: D
  u64 inner;             // number: F
  u64 experts;           // number: L, of which those from `first` on are computed here
  u64 state;             // u32 [3 + L]: AT_TICKETS, AT_DONE, AT_FAULTS, then parts of h that are written, per expert
  u64 first_stage;       // number
  u64 last_stage;        // number
  u64 first;             // number: groups before it are not computed, and the weights begin with its own
};

// Where things lie in the state. All are zero between launches, but faults stay until the host has read them.
#define AT_TICKETS 0
#define AT_DONE 1
#define AT_FAULTS 2
#define AT_PARTS 3
#define FAULT_ENDS 1
#define FAULT_PLACE 2

// Where things lie in shared memory, from a multiple of 1,024.
#define AT_CHUNKS (STAGES * STAGE_BYTES)
#define AT_FULL (AT_CHUNKS + CONSUMERS * CHUNK_BYTES)
#define AT_EMPTY (AT_FULL + 8 * STAGES)
#define AT_TICKET_FULL (AT_EMPTY + 8 * STAGES)
#define AT_TICKET_EMPTY (AT_TICKET_FULL + 16)
#define AT_TICKET (AT_TICKET_EMPTY + 16)
static_assert(AT_TICKET + 8 + 1024 <= SHARED_BYTES, "experts.py asks for too little shared memory");

struct Tile {
  u32 stage;
  u32 expert;
  u32 column;  // in units of a tile's columns
  u32 n;       // tokens of this block's part, with padding
  u32 first;   // m of the first
  int rows;    // how many are real; may be none
  u32 end;     // one past the expert's last m
  u32 parts;   // of h, that the expert's stage 0 writes
};

struct Ring {
  u32 at = 0, parity = 0;
  __device__ __forceinline__ void next(u32 places) {
    if (++at == places) at = 0, parity ^= 1;
  }
};

__device__ __forceinline__ u32 up(u32 value, u32 unit) { return (value + unit - 1) / unit; }

__device__ __forceinline__ u32 columns_of(const Params& p, u32 stage) { return stage ? p.hidden : p.inner; }

__device__ __forceinline__ u32 sum_of(const Params& p, u32 stage) { return stage ? p.inner : p.hidden; }

// Finds tiles by number; numbers only grow, so it walks the experts once.
struct Finder {
  u32 stage, expert, before = 0;

  __device__ __forceinline__ bool find(const Params& p, u32 number, u32 block, Tile& tile) {
    const int* ends = (const int*)p.ends;
    while (true) {
      if (expert == p.experts) {
        if (stage == p.last_stage) return false;
        ++stage, expert = (u32)p.first;
      }
      u32 end = min((u32)ends[expert], (u32)p.pairs), start = expert ? min((u32)ends[expert - 1], end) : 0;
      u32 groups = up(end - start, GROUP), columns = up(columns_of(p, stage), stage ? 256 : 128);
      if (number - before < groups * columns) {
        u32 here = number - before;
        u32 n = up(up(end - start, groups * CLUSTER), 8) * 8;
        u32 first = start + (here % groups * CLUSTER + block) * n;
        int rows = (int)end - (int)first;
        tile = {stage, expert, here / groups, n, first, rows < (int)n ? rows : (int)n, end};
        tile.parts = groups * up(p.inner, 128) * CLUSTER * CONSUMERS;
        return true;
      }
      before += groups * columns, ++expert;
    }
  }
};

// The next tile's number, drawn by one thread of the cluster for all its warps, a tile ahead.
struct Tickets {
  u32 shared;
  Ring ring;

  __device__ __forceinline__ void draw(const Params& p, Ring& places) {
    barrier_wait_cluster(shared + AT_TICKET_EMPTY + 8 * places.at, places.parity ^ 1);
    u32 number = atomicAdd((u32*)p.state + AT_TICKETS, 1u);
    for (u32 block = 0; block < CLUSTER; ++block) {
      store_in_cluster(in_block(shared + AT_TICKET + 4 * places.at, block), number);
      barrier_arrive_cluster(in_block(shared + AT_TICKET_FULL + 8 * places.at, block));
    }
    places.next(2);
  }

  __device__ __forceinline__ u32 take() {
    barrier_wait_cluster(shared + AT_TICKET_FULL + 8 * ring.at, ring.parity);
    u32 number = load_shared(shared + AT_TICKET + 4 * ring.at);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive_cluster(in_block(shared + AT_TICKET_EMPTY + 8 * ring.at, 0));
    ring.next(2);
    return number;
  }
};
