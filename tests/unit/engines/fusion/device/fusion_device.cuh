// fusion_device.cuh on a CPU: blocks one after another, a block's threads as contexts of one of the host's that take turns at
// barriers.
#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdlib>
#include <cstring>

#define DEVICE static inline
#define KERNEL(threads) static void
#define SHARED static
#define UNROLL
#define UNROLL_4
#define RESTRICT __restrict__

struct Half { unsigned short bits; };
struct BFloat { unsigned short bits; };

template <class To, class From> static inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
static inline float to_float(float v) { return v; }
static inline float to_float(Half v) { return (float)as<_Float16>(v.bits); }
static inline float to_float(BFloat v) { return as<float>((unsigned)v.bits << 16); }
template <class T> static inline T from_float(float v);
template <> inline float from_float<float>(float v) { return v; }
template <> inline Half from_float<Half>(float v) { return {as<unsigned short>((_Float16)v)}; }
template <> inline BFloat from_float<BFloat>(float v) {
  unsigned bits = as<unsigned>(v);
  if (v != v) return {0x7fc0};
  return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static inline float from_bits(unsigned bits) { return as<float>(bits); }
static inline float exponential(float v) { return expf(v); }
static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }

// ---- A block.
static const int MOST_THREADS = 1024, STACK = 1 << 16;
static ucontext_t contexts[MOST_THREADS], scheduler;
static char *stacks;
static float exchange[MOST_THREADS];
static unsigned current_thread, current_block;
static bool ended[MOST_THREADS];
static void (*body)(void **);
static void **body_arguments;

static inline unsigned thread_index() { return current_thread; }
static inline unsigned block_index() { return current_block; }
static inline void block_sync() { swapcontext(&contexts[current_thread], &scheduler); }
static inline float shfl_xor(float v, int distance) {
  unsigned own = current_thread;
  exchange[own] = v;
  block_sync();
  float found = exchange[own ^ distance];
  block_sync();
  return found;
}
static inline void begin_kernel() {}

static void run_thread() {
  body(body_arguments);
  ended[current_thread] = true;
  swapcontext(&contexts[current_thread], &scheduler);
}

static void launch(int blocks, int threads, void (*kernel)(void **), void **arguments) {
  if (!stacks) stacks = (char *)malloc((size_t)MOST_THREADS * STACK);
  body = kernel;
  body_arguments = arguments;
  for (current_block = 0; current_block < (unsigned)blocks; current_block++) {
    for (int t = 0; t < threads; t++) {
      ended[t] = false;
      getcontext(&contexts[t]);
      contexts[t].uc_stack.ss_sp = stacks + (size_t)t * STACK;
      contexts[t].uc_stack.ss_size = STACK;
      contexts[t].uc_link = &scheduler;
      makecontext(&contexts[t], run_thread, 0);
    }
    for (int left = threads; left;)
      for (int t = 0; t < threads; t++) {
        if (ended[t]) continue;
        current_thread = t;
        swapcontext(&scheduler, &contexts[t]);
        left -= ended[t];
      }
  }
}
