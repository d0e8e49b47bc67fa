// Enough of CUDA to run the exchange's kernels on a CPU: a block is an OS thread, its threads are fibers that take turns,
// warp and block operations are barriers between fibers. Memory is the process's own, so several ranks are several
// parameter blocks in one process. Order of stores is x86's, so missing fences are not noticed; index arithmetic, races
// for a place, lost flags and deadlocks are.

#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <sched.h>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __CUDA_ARCH__ 800

// Switching stacks: ucontext does two system calls each time, so x86-64 has its own way, ten times quicker.
#if defined(__x86_64__)
struct Context {
  void* stack;
};
extern "C" void switch_stack(void** from, void* to);
asm(R"(
.text
.local switch_stack
switch_stack:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
inline void switch_to(Context& from, Context& to) { switch_stack(&from.stack, to.stack); }
inline void make(Context& context, char* stack, size_t size, void (*start)()) {
  void** top = (void**)((uintptr_t)(stack + size) / 16 * 16);
  *--top = nullptr;  // keeps the alignment that a call would leave
  *--top = (void*)start;
  context.stack = top - 6;
}
#else
using Context = ucontext_t;
inline void switch_to(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make(Context& context, char* stack, size_t size, void (*start)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = size;
  makecontext(&context, start, 0);
}
#endif

struct Index {
  unsigned x;
};
struct Fiber {
  Context context;
  Index thread;
  bool done;
};
constexpr int kThreads = 512, kWarps = kThreads / 32;

struct Barrier {
  int arrived = 0, expected = 0;
  unsigned turn = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  Context scheduler;
  Barrier whole, warps[kWarps];
  uint64_t words[kThreads];
  int reduced = 0;
  Index index, grid;
  const void* kernel;
  const void* params;
};

static thread_local Block* block;
static thread_local Fiber* fiber;

#define threadIdx (fiber->thread)
#define blockIdx (block->index)
#define gridDim (block->grid)

inline void pass_turn() { switch_to(fiber->context, block->scheduler); }

inline void leave(Barrier& b) {
  --b.expected;
  if (b.arrived && b.arrived == b.expected) {
    b.arrived = 0;
    ++b.turn;
  }
}

inline void arrive(Barrier& b) {
  unsigned turn = b.turn;
  if (++b.arrived == b.expected) {
    b.arrived = 0;
    ++b.turn;
    return;
  }
  while (b.turn == turn) pass_turn();
}

inline Barrier& my_warp() { return block->warps[fiber->thread.x / 32]; }
inline uint64_t* warp_words() { return block->words + fiber->thread.x / 32 * 32; }
inline void __syncwarp() { arrive(my_warp()); }
inline void __syncthreads() { arrive(block->whole); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline int __syncthreads_or(int value) {
  __syncthreads();
  block->reduced = 0;
  __syncthreads();
  block->reduced |= value;
  __syncthreads();
  int result = block->reduced;
  __syncthreads();
  return result;
}

// What every lane of the warp gave, to a function of them.
template <typename T, typename F>
inline auto among(T value, F f) {
  uint64_t word = 0;
  memcpy(&word, &value, sizeof value);
  warp_words()[fiber->thread.x % 32] = word;
  arrive(my_warp());
  T all[32];
  for (int i = 0; i < 32; ++i) memcpy(&all[i], &warp_words()[i], sizeof value);
  auto result = f(all, fiber->thread.x % 32);
  arrive(my_warp());
  return result;
}

template <typename T>
T __shfl_sync(unsigned, T v, unsigned from) {
  return among(v, [&](T* all, unsigned) { return all[from % 32]; });
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, unsigned mask) {
  return among(v, [&](T* all, unsigned lane) { return all[lane ^ mask]; });
}
template <typename T>
T __shfl_up_sync(unsigned, T v, unsigned by) {
  return among(v, [&](T* all, unsigned lane) { return all[lane >= by ? lane - by : lane]; });
}
inline unsigned __ballot_sync(unsigned, int v) {
  return among(v, [](int* all, unsigned) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(all[i] != 0) << i;
    return bits;
  });
}
inline int __any_sync(unsigned mask, int v) { return __ballot_sync(mask, v) != 0; }
inline unsigned __match_any_sync(unsigned, unsigned v) {
  return among(v, [](unsigned* all, unsigned lane) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(all[i] == all[lane]) << i;
    return bits;
  });
}
inline unsigned __reduce_or_sync(unsigned, unsigned v) {
  return among(v, [](unsigned* all, unsigned) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= all[i];
    return bits;
  });
}
inline unsigned __reduce_add_sync(unsigned, unsigned v) {
  return among(v, [](unsigned* all, unsigned) {
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += all[i];
    return sum;
  });
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
template <typename A, typename B>
inline std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
inline std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}
template <typename T, typename By>
T atomicAdd(T* p, By by) {
  return __atomic_fetch_add(p, (T)by, __ATOMIC_SEQ_CST);
}
inline unsigned atomicInc(unsigned* p, unsigned most) {
  unsigned old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (!__atomic_compare_exchange_n(p, &old, old >= most ? 0 : old + 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return old;
}
inline unsigned long long atomicCAS(unsigned long long* p, unsigned long long old, unsigned long long now) {
  __atomic_compare_exchange_n(p, &old, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}
template <typename To, typename From>
inline To bits_as(From v) {
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline unsigned __float2uint_rn(float v) { return (unsigned)std::nearbyint(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

// Bodies of the functions that are PTX on a GPU.
template <typename T>
inline T emulated_load(unsigned long long address) {
  T v;
  memcpy(&v, (const void*)address, sizeof v);
  return v;
}
inline unsigned long long emulated_now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}
inline float half_to_float(unsigned short h) {
  _Float16 f;
  memcpy(&f, &h, 2);
  return f;
}
inline unsigned half_bits(float f) {
  _Float16 h = (_Float16)f;
  unsigned short bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline unsigned bfloat_bits(float f) {
  unsigned u = __float_as_uint(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}

struct Params;
typedef void (*Kernel)(const Params);

static void run_fiber();
