// A GPU on a CPU: each GPU thread is a thread of the host. The files of this folder have the names of hopper/include's and stand in front
// of them; their functions mean what the PTX manual says. Copies and products happen at once, which is one of the orders that a device
// may choose. Bytes for another block of the cluster arrive as late as possible: when somebody waits for them. A block that ends before
// they have arrived is a fault. The tests define EMULATED_VALUE_BYTES and EMULATED_BFLOAT, the type of an operand's values.
#pragma once
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

typedef uint32_t u32;
typedef uint64_t u64;
typedef uint16_t u16;
struct uint3_ { unsigned x, y, z; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
static inline uint4 make_uint4(u32 a, u32 b, u32 c, u32 d) { return {a, b, c, d}; }
static inline float2 make_float2(float a, float b) { return {a, b}; }

// A tensor map: dimensions from the innermost out. Of pixels: c, w, h, n, with the corners and steps of im2col mode.
struct TensorMap {
  const uint8_t* base;
  long long size[4], stride[4];  // elements, bytes
  int low[2], high[2], step[2];  // w, h: corners of the box of base pixels, and from one to the next
  int rows, channels;            // of one copy
  int box[4];                    // of one copy of a plain box
};

struct Meeting {  // a barrier of so many threads
  std::mutex m;
  std::condition_variable c;
  int wanted, here = 0;
  long round = 0;
  explicit Meeting(int n) : wanted(n) {}
  void meet() {
    std::unique_lock<std::mutex> l(m);
    long mine = round;
    if (++here == wanted) { here = 0; ++round; c.notify_all(); return; }
    c.wait(l, [&] { return round != mine; });
  }
};
struct Bar { int count = 0, pending = 0; long bytes = 0; u32 phase = 0; };
struct Warp { Meeting meeting{32}; u32 words[32]; };
struct Block {
  std::vector<uint8_t> memory;
  std::map<u32, Bar> bars;
  std::map<u32, std::deque<std::function<void()>>> under_way;  // from other blocks, by the barrier that counts it
  std::map<u32, int> waiting;                                  // threads, by barrier
  int running = 0;                                             // threads; the memory is gone with the last
  std::mutex m;
  std::condition_variable c;
  std::vector<std::unique_ptr<Warp>> warps;
  std::unique_ptr<Meeting> all;
};
struct Cluster { std::vector<std::unique_ptr<Block>> blocks; std::unique_ptr<Meeting> all; };

static thread_local uint3_ threadIdx, blockIdx, gridDim;
static thread_local Block* here;
static thread_local Cluster* cluster;
static thread_local u32 my_rank;
static std::atomic<int> faults{0};

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define __global__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __grid_constant__
#define SHARED_MEMORY uint8_t* shared_memory = here->memory.data()
static inline u32 shared_address(const void*) { return 64; }  // not aligned: the kernel has to round up
static inline u32 opaque(u32 value) { return value; }
static inline void __syncthreads() { here->all->meet(); }

static inline void settle(Block* b, Bar& bar) {
  if (bar.pending == 0 && bar.bytes == 0) {
    bar.phase ^= 1;
    bar.pending = bar.count;
    b->c.notify_all();
  }
}
static inline void counted(Block* b, u32 at, int arrivals, long bytes) {
  auto found = b->bars.find(at);
  if (found == b->bars.end() || found->second.pending < arrivals) { faults++; return; }
  found->second.pending -= arrivals;
  found->second.bytes += bytes;
  settle(b, found->second);
}
static inline void change(Block* b, u32 at, int arrivals, long bytes) {
  std::lock_guard<std::mutex> l(b->m);
  counted(b, at, arrivals, bytes);
}
// In this block at once, in another when somebody waits for it.
static inline void reach(Block* b, u32 bar, std::function<void()> happens) {
  std::lock_guard<std::mutex> l(b->m);
  if (!b->running) faults++;
  else if (b == here || b->waiting[bar]) happens();
  else b->under_way[bar].push_back(happens);
}
// A thread ends; with a block's last one all that is still under way to it hits nobody ("cluster target block not present").
static inline void leave() {
  std::lock_guard<std::mutex> l(here->m);
  if (--here->running) return;
  for (auto& entry : here->under_way) faults += entry.second.size();
}
static inline u32 swizzled(u32 a) { return a ^ (((a >> 7) & 7) << 4); }
static inline void together() { here->warps[threadIdx.x / 32]->meeting.meet(); }  // what .sync says: the lanes of a warp are here
