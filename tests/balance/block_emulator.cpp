// One CUDA block on a CPU thread, so that plan.cu can be run and compared where there is no GPU.
//
// Every CUDA thread is a fiber. A warp function (shuffle, vote, reduction) waits until all 32 lanes of the warp call the
// same one, a barrier until all threads do; lanes that call different ones end the process with a message, where a GPU
// would hang or be wrong. Threads run in turn between such calls, so races between them are not found.
// The test compiles this with KERNEL_FILE, the kernel's text without what only a GPU compiler knows. x86-64 Linux only.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)

struct alignas(16) uint4 { unsigned x, y, z, w; };
typedef unsigned long long Word;
static const int BLOCK = 512, WARP = 32;
static const size_t STACK = 1 << 16;
static void* scheduler;
static void* fibers[BLOCK];
static char* stacks[BLOCK];
static bool finished[BLOCK];
static int current;

extern "C" void switch_fiber(void** save, void* to);
asm(".text\n.globl switch_fiber\nswitch_fiber:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

static struct { struct { operator unsigned() const { return current; } } x; } threadIdx;
static void wait_turn() { int me = current; switch_fiber(&fibers[me], scheduler); }

static struct Warp { Word in[WARP], out[WARP]; int calls[WARP], arrived; unsigned round; } warps[BLOCK / WARP];

template <class F> static Word together(int call, Word value, F combine) {
  Warp& warp = warps[current / WARP];
  int lane = current % WARP;
  unsigned round = warp.round;
  warp.in[lane] = value, warp.calls[lane] = call;
  if (++warp.arrived == WARP) {
    for (int other : warp.calls)
      if (other != call) fprintf(stderr, "lanes of warp %d call %d and %d\n", current / WARP, call, other), abort();
    combine(warp.in, warp.out);
    warp.arrived = 0, ++warp.round;
  } else {
    while (warp.round == round) wait_turn();
  }
  return warp.out[lane];
}

template <class F> static Word folded(int call, Word value, F fold) {
  return together(call, value, [fold](Word* in, Word* out) {
    Word total = in[0];
    for (int i = 1; i < WARP; ++i) total = fold(total, in[i]);
    std::fill(out, out + WARP, total);
  });
}
static unsigned __reduce_max_sync(unsigned, unsigned v) { return folded(1, v, [](Word a, Word b) { return std::max(a, b); }); }
static unsigned __reduce_add_sync(unsigned, unsigned v) { return folded(2, v, [](Word a, Word b) { return a + b; }); }
static bool __any_sync(unsigned, bool v) { return folded(3, v, [](Word a, Word b) { return a | b; }); }
static unsigned __ballot_sync(unsigned, bool v) {
  return folded(4, (Word)v << current % WARP, [](Word a, Word b) { return a | b; });
}
static void __syncwarp() { folded(5, 0, [](Word, Word) { return Word(0); }); }
static unsigned __match_any_sync(unsigned, unsigned v) {
  return together(6, v, [](Word* in, Word* out) {
    for (int i = 0; i < WARP; ++i) {
      out[i] = 0;
      for (int j = 0; j < WARP; ++j) out[i] |= (Word)(in[i] == in[j]) << j;
    }
  });
}
template <class T> static T shuffled(int call, T value, unsigned from) {
  static unsigned sources[BLOCK];
  Word bits = 0;
  memcpy(&bits, &value, sizeof value);
  sources[current] = from;
  const unsigned* mine = sources + current / WARP * WARP;
  bits = together(call, bits, [mine](Word* in, Word* out) { for (int i = 0; i < WARP; ++i) out[i] = in[mine[i] % WARP]; });
  memcpy(&value, &bits, sizeof value);
  return value;
}
template <class T> T __shfl_sync(unsigned, T value, unsigned from) { return shuffled(7, value, from); }
template <class T> T __shfl_up_sync(unsigned, T value, unsigned by) {
  unsigned lane = current % WARP;
  return shuffled(8, value, lane >= by ? lane - by : lane);
}

static int at_barrier, any_true, barrier_result;
static unsigned barrier_round;
static int __syncthreads_or(int v) {
  unsigned round = barrier_round;
  any_true |= v != 0;
  if (++at_barrier == BLOCK) barrier_result = any_true, any_true = at_barrier = 0, ++barrier_round;
  else while (barrier_round == round) wait_turn();
  return barrier_result;
}
static void __syncthreads() { __syncthreads_or(0); }

static int __ffs(unsigned v) { return __builtin_ffs(v); }
static int __popc(unsigned v) { return __builtin_popcount(v); }
template <class T> static T atomicAdd(T* at, unsigned v) { T old = *at; *at += v; return old; }
template <class T> static T atomicMin(T* at, unsigned v) { T old = *at; *at = std::min(old, (T)v); return old; }
template <class T> static T atomicOr(T* at, unsigned v) { T old = *at; *at |= v; return old; }
using std::max;
using std::min;

#include KERNEL_FILE

static PlanParams parameters;
static void run_thread() {
  plan_step(parameters);
  finished[current] = true;
  wait_turn();
}

extern "C" void run_plan(const PlanParams* given) {
  static PlanShared shared;
  memset(&shared, 0xa5, sizeof shared);  // what a block finds in shared memory is anything
  plan_memory = (u64*)&shared, parameters = *given;
  for (int i = 0; i < BLOCK; ++i) {
    if (!stacks[i]) stacks[i] = (char*)malloc(STACK);
    void** top = (void**)(stacks[i] + STACK - 64);
    *--top = nullptr, *--top = (void*)run_thread;
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fibers[i] = top, finished[i] = false;
  }
  for (int left = BLOCK; left;) {
    left = 0;
    for (current = 0; current < BLOCK; ++current) {
      if (finished[current]) continue;
      switch_fiber(&scheduler, fibers[current]);
      left += !finished[current];
    }
  }
}
