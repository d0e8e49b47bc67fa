// Flags that a copy engine carries, for all-gather / reduce-scatter without any kernel beside the experts.
//
// An expert kernel takes every multiprocessor, so a kernel that only raises a flag would wait for its end. Here a kernel
// on the compute stream writes the words that say "my rows (sums) of this epoch are there" into local memory beforehand,
// and the copy engine carries them behind the payload, in stream order. Compiled behind gather.cu; `moves.py` calls it.

#define AT_HEADER 0
#define AT_ROWS 1
#define AT_OUTPUTS 2

// One block: begin a step. The words for peers wait in `words`; this rank's own flags are set at once.
extern "C" __global__ void prepare_rows(const __grid_constant__ Params p, const __grid_constant__ Gather g, u64 words) {
  State* state = (State*)p.state;
  u32 epoch = epoch_after(state->rows_epoch), tokens = *(const u32*)p.tokens, r = threadIdx.x;
  if (!alive(p)) return;
  for (u32 i = r; i < RANKS * EXPERTS; i += blockDim.x) ((u32*)p.counts_RE)[i] = 0;
  if (tokens > p.room) {
    if (r == 0) fail(p, SEND_ROWS, TOO_MANY_TOKENS, 1u << p.rank, tokens);
    return;
  }
  __syncthreads();  // everybody has read the old epoch
  if (r != 0) return;
  u64 header = pack(epoch, (u32)p.room), flag = pack(epoch, tokens);
  ((u64*)words)[AT_HEADER] = header;
  ((u64*)words)[AT_ROWS] = flag;
  store_relaxed(heap(p) + p.at_headers + 8 * p.rank, header);
  store_release(heap(p) + p.at_row_flags + 8 * p.rank, flag);
  state->rows_epoch = epoch;
}

// The sums of the other ranks' tokens, into `partial`: what they wait for. Own tokens are added where they are needed.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_others(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  if (!alive(p)) return;
  u32 workers = gridDim.x * WARPS, room = (u32)p.room;
  for (u32 item = blockIdx.x * WARPS + threadIdx.x / 32; item < (RANKS - 1) * room; item += workers) {
    u32 other = item / room;
    sum_token(p, g, other + (other >= p.rank), item % room, g.partial);
  }
}

// Own tokens: this rank's sum, rounded as if it had travelled, and the others' as they came, in rank order.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_own(const __grid_constant__ Params p, const __grid_constant__ Gather g) {
  if (!await_outputs(p)) return;
  u32 tokens = ((const u32*)p.tokens_R)[p.rank], lane = threadIdx.x % 32, workers = gridDim.x * WARPS;
  for (u32 t = blockIdx.x * WARPS + threadIdx.x / 32; t < tokens; t += workers) {
    Pairs pairs = pairs_of(p, g, (u32)p.rank * (u32)p.max_tokens + t);
    for (u32 v = lane; v - lane < VECS; v += 32 * TILE) {
      float own[TILE][LANES_OF_VEC] = {}, sum[TILE][LANES_OF_VEC] = {};
      add_pairs(p, pairs, v, own);
      for (u32 r = 0; r < RANKS; ++r) {
        if (r != p.rank) {
          add_slot(p, r, t, v, sum);
          continue;
        }
#pragma unroll
        for (int u = 0; u < TILE; ++u) add_plain(sum[u], rounded(own[u]));
      }
      store_sums(p.out + t * ROW_BYTES, v, sum);
    }
  }
}

// One thread: the sums behind this kernel on its stream are complete.
extern "C" __global__ void
    prepare_outputs(const __grid_constant__ Params p, const __grid_constant__ Gather g, u64 words) {
  State* state = (State*)p.state;
  if (threadIdx.x != 0 || failed(p)) return;
  u64 flag = pack(epoch_after(state->outputs_epoch), 0);
  ((u64*)words)[AT_OUTPUTS] = flag;
  store_release(heap(p) + p.at_out_flags + 8 * p.rank, flag);
  state->outputs_epoch = (u32)(flag >> 32);
}

// One block each, for measurements of the movement alone: wait as count_pairs and sum_outputs do, and do nothing.
extern "C" __global__ void wait_rows(const __grid_constant__ Params p, const __grid_constant__ Gather g, u64 words) {
  __shared__ u32 tokens_R[RANKS];
  await_rows(p, tokens_R);
}

extern "C" __global__ void wait_outputs(const __grid_constant__ Params p, const __grid_constant__ Gather g, u64 words) {
  await_outputs(p);
}
