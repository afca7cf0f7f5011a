// include/direct_device.cuh and include/plain_device.cuh on a CPU: clusters one after another, each of their threads one of the
// host's. Copies happen at once. What is copied or written beside its block's shared memory is counted as a fault.
#pragma once
#include <direct_config.cuh>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#include <pthread.h>
#include <unistd.h>
using std::fmaf;
struct Place { unsigned x; };
struct uint4 { unsigned x, y, z, w; };
struct Block { std::vector<char> memory; pthread_barrier_t barrier; std::atomic<int> wanted{0}, come{0}; };
static thread_local Place threadIdx, blockIdx;
static thread_local Block* here;
static std::vector<Block>* cluster;
static pthread_barrier_t meeting;
static std::atomic<int> faults{0};
#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
enum : int { LANES = 4 };
#define SHARED_MEMORY char* const shared_memory = (char*)(((uintptr_t)here->memory.data() + 15) / 16 * 16)
static inline void __syncthreads() { pthread_barrier_wait(&here->barrier); }
static inline float __uint_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
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
// Tensors that kernels may read: all else is a fault.
struct Readable { const char* from; size_t bytes; };
static std::vector<Readable> readable;
static inline void copy(void* to, const void* from, bool inside, size_t bytes) {
  SHARED_MEMORY;
  bool known = !inside;
  for (auto& r : readable) known |= (const char*)from >= r.from && (const char*)from + bytes <= r.from + r.bytes;
  if (!known || (char*)to < shared_memory || (char*)to + bytes > here->memory.data() + here->memory.size() || (uintptr_t)to % bytes || (inside && (uintptr_t)from % bytes)) {
    faults++;
    return;
  }
  if (inside) memcpy(to, from, bytes); else memset(to, 0, bytes);
}
template <class T> DEVICE T read(const T* from, bool inside) {
  bool known = !inside;
  for (auto& r : readable) known |= (const char*)from >= r.from && (const char*)(from + 1) <= r.from + r.bytes;
  if (!known) faults++;
  return known && inside ? *from : (T)0;
}
DEVICE void put(float* to, float v) {
  SHARED_MEMORY;
  if ((char*)to < shared_memory || (char*)(to + 1) > here->memory.data() + here->memory.size()) faults++;
  else *to = v;
}
DEVICE void cp_async_16(void* to, const void* from, bool inside) { copy(to, from, inside, 16); }
DEVICE void cp_async_commit_group() {}
DEVICE void cp_async_wait_all() {}
DEVICE void griddep_wait() {}
DEVICE void griddep_launch_dependents() {}
DEVICE void cluster_arrive_relaxed() {}
DEVICE void cluster_wait() { pthread_barrier_wait(&meeting); }
DEVICE void mbarrier_init_expect_tx(void*, int bytes) { here->wanted = bytes; }
DEVICE void st_async(float* to, int rank, const float* values, void*) {
  SHARED_MEMORY;
  Block& other = (*cluster)[rank];
  char* there = (char*)(((uintptr_t)other.memory.data() + 15) / 16 * 16) + ((char*)to - shared_memory);
  if (there + 4 * SEND_FLOATS > other.memory.data() + other.memory.size() || (uintptr_t)there % (4 * SEND_FLOATS)) faults++;
  else memcpy(there, values, 4 * SEND_FLOATS);
  other.come += 4 * SEND_FLOATS;
}
DEVICE void mbarrier_wait(void*) {
  for (long tries = 0; here->come < here->wanted; tries++) {
    if (tries == 50000000) { faults++; return; }
    std::this_thread::yield();
  }
}
template <typename Kernel> static int launch(int grid, int size, int threads, int room, Kernel kernel) {
  faults = 0;
  for (int first = 0; first < grid; first += size) {
    std::vector<Block> blocks(size);
    for (auto& block : blocks) { block.memory.assign(room + 16, (char)0xff); pthread_barrier_init(&block.barrier, nullptr, threads); }
    cluster = &blocks;
    pthread_barrier_init(&meeting, nullptr, threads * size);
    std::vector<std::thread> running;
    for (int rank = 0; rank < size; rank++)
      for (int t = 0; t < threads; t++)
        running.emplace_back([=, &blocks] { threadIdx = {(unsigned)t}; blockIdx = {(unsigned)(first + rank)}; here = &blocks[rank]; kernel(); });
    for (auto& thread : running) thread.join();
    for (auto& block : blocks) faults += block.come != block.wanted;
  }
  return faults;
}
