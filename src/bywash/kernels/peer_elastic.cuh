// Elastic layers: the records that `peer_assign.cu` and `peer_fetch.cu` work with, one of each per layer.
//
// REAL_EXPERTS above 0 makes the exchange elastic: rows of an expert may be computed away from its home, as a plan says
// (plan.cu). Each rank then has PER_RANK groups: its own experts, then GUESTS slots for foreign weights. A group is a
// *virtual expert*, its number rank * PER_RANK + group, and EXPERTS counts those. Dispatch, index and combine know only
// virtual experts and stay as they are; what makes them elastic is `assign`, which gives each pair its virtual expert.
//
// A *split* is an expert of which some rows leave home. A *wave* is a part of a step: a step whose rows do not fit the
// buffers of some rank is done in parts of at most `chunk` tokens of each rank, one after the other.

#if REAL_EXPERTS
#define PER_RANK (EXPERTS / RANKS)
#define OWN (PER_RANK - GUESTS)
#define MOST_SPLITS (RANKS * GUESTS > 0 ? RANKS * GUESTS : 1)

// Every field is 8 bytes; `peer_elastic.py` reads the names from here. Addresses, unless another type is named.
struct Elastic {
  u64 first_key;    // number: the layer's first key in the directory
  u64 home_E;       // int32 [REAL_EXPERTS], the home of each
  u64 local_E;      // int32 [REAL_EXPERTS], its place among its home's experts
  u64 rows_ER;      // int32 [REAL_EXPERTS, RANKS], of the plan just made
  u64 rows_R;       // int64 [RANKS], likewise
  u64 keys_RS;      // int32 [RANKS, GUESTS], the directory
  u64 fetch_RS;     // int32 [RANKS, GUESTS], of the plan just made
  u64 digest;       // u32, of the plan just made
  u64 usable_R;     // int32 [RANKS], slots that are there; those from this number on have no memory
  u64 counts_RE;    // int32 [RANKS, REAL_EXPERTS], what is planned from
  u64 counts_E;     // u32 [REAL_EXPERTS], being counted; 0 between launches
  u64 table;        // Table, of the layer's next step
  u64 waves;        // u32, out: parts of the step
  u64 tokens_W;     // int32 [most_waves], out: tokens of this rank in each
  u64 most_waves;   // number
  u64 chunk;        // number: tokens of a rank in a part, where there are several
  u64 capacity;     // number: pairs that the buffers of a rank hold
  u64 own_experts;  // number: this rank's own experts of the layer
  u64 gate_bytes;   // number: of the first weight of an expert
  u64 down_bytes;   // number: of the second
  u64 gate_at;      // offset in every rank's weights of the layer's first weights [OWN]
  u64 down_at;      // likewise of the second
  u64 sums_at;      // likewise of the checksums, u64 [OWN]
  u64 slots_gate;   // this rank's slots, first weights
  u64 slots_down;   // likewise second
  u64 missing_S;    // int32 [GUESTS], whom to copy from what the directory says this slot has; -1 if it is there
  u64 filling_S;    // u64 [GUESTS + 1]: checksums of what is being copied, and blocks that are done; 0 between launches
  u64 fetched;      // u64 [2]: copies made, bytes
  u64 home[RANKS];  // every rank's weights as mapped here
};

// Where the pairs of a split go: pair number n of it, over all sources, to the first rank with n < ends_R.
struct Split {
  u32 expert;
  u32 base;            // pairs of earlier sources
  u32 limit;           // pairs of this source that the plan counted; those beyond stay at home
  int key_R[RANKS];    // of the directory, that the slot must have; -1 at home and where no row goes
  u32 ends_R[RANKS];
  int virtual_R[RANKS];
};

struct Table {
  u32 digest;  // of the plan
  u32 splits;
  int split_E[REAL_EXPERTS + 1];  // index into `split`, -1 where all rows stay at home, and for ids that are none
  Split split[MOST_SPLITS];
};

__device__ __forceinline__ const Elastic& elastic_of(const Params& p) { return *(const Elastic*)p.elastic; }

// Whether this part of the step takes place; the same on all ranks.
__device__ __forceinline__ bool takes_part(const Params& p) {
  return p.wave == 0 || p.wave < *(volatile u32*)elastic_of(p).waves;
}
#else
__device__ __forceinline__ bool takes_part(const Params& p) { return true; }
#endif
