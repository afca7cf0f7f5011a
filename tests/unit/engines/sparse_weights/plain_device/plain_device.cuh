// include/plain_device.cuh on a CPU: blocks one after another, each thread of a block one of the host's.
#pragma once
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>
#include <pthread.h>
using std::fmaf;
struct Place { unsigned x; };
static thread_local Place threadIdx, blockIdx;
static pthread_barrier_t barrier;
#define DEVICE static inline
#define SHARED static
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
static inline void __syncthreads() { pthread_barrier_wait(&barrier); }
template <bool HALF> struct StoredValue { typedef float Type; };
template <> struct StoredValue<true> { typedef unsigned short Type; };
static inline float to_float(float v) { return v; }
static inline float to_float(unsigned short v) { _Float16 h; memcpy(&h, &v, 2); return (float)h; }
template <class Stored> static inline Stored from_float(float v) { return v; }
template <> inline unsigned short from_float<unsigned short>(float v) {
  _Float16 h = (_Float16)v;
  unsigned short s;
  memcpy(&s, &h, 2);
  return s;
}
template <typename Kernel> static void launch(int grid, int threads, Kernel kernel) {
  pthread_barrier_init(&barrier, nullptr, threads);
  std::vector<std::thread> running;
  for (int t = 0; t < threads; t++)
    running.emplace_back([=] {
      threadIdx = {(unsigned)t};
      for (int block = 0; block < grid; block++) { blockIdx = {(unsigned)block}; kernel(); __syncthreads(); }
    });
  for (auto& thread : running) thread.join();
  pthread_barrier_destroy(&barrier);
}
