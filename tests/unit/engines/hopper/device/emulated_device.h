// A GPU on a CPU: each GPU thread is a fiber, and they run in turn on one host thread. The files of this folder have the names of
// hopper/include's and stand in front
// of them; their functions mean what the PTX manual says. Copies and products happen at once, which is one of the orders that a device
// may choose. Bytes for another block of the cluster arrive as late as possible: when somebody waits for them. A block that ends before
// they have arrived is a fault. The tests define EMULATED_VALUE_BYTES and EMULATED_BFLOAT, the type of an operand's values.
#ifndef EMULATED_DEVICE_H  // and no pragma: the precompiled header has another path
#define EMULATED_DEVICE_H
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

typedef uint32_t u32;
typedef uint64_t u64;
typedef uint16_t u16;
struct uint3_ { unsigned x, y, z; };
struct uint2 { u32 x, y; };
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

static void wait_until(std::function<bool()> holds);  // lets the other fibers run meanwhile

struct Meeting {  // a barrier of so many threads
  int wanted, here = 0;
  long round = 0;
  explicit Meeting(int n) : wanted(n) {}
  void meet() {
    long mine = round;
    if (++here == wanted) { here = 0; ++round; return; }
    wait_until([this, mine] { return round != mine; });
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
  std::vector<std::unique_ptr<Warp>> warps;
  std::unique_ptr<Meeting> all;
};
struct Cluster { std::vector<std::unique_ptr<Block>> blocks; std::unique_ptr<Meeting> all; };

static uint3_ threadIdx, blockIdx, gridDim;  // of the fiber that runs
static Block* here;
static Cluster* cluster;
static u32 my_rank;
static int faults = 0;

struct Fiber {
  static constexpr size_t STACK_BYTES = 256 << 10;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  uint3_ thread_index, block_index;
  u32 rank;
  std::function<bool()> holds;  // what it waits for; empty: nothing
  bool ended = false;
};
static ucontext_t scheduler;
static Fiber* current;
static std::function<void()> body;  // of every fiber

static void wait_until(std::function<bool()> holds) {
  if (holds()) return;
  current->holds = std::move(holds);
  swapcontext(&current->context, &scheduler);
}
static void begin_fiber() {
  body();
  current->ended = true;
  swapcontext(&current->context, &scheduler);
}
// Runs the fibers of a cluster until all have ended, warp after warp in an order that is drawn anew in each pass. If all that are left
// wait, nothing can ever happen again: that is a fault, and they are given up.
static void run_fibers(std::vector<std::unique_ptr<Fiber>>& fibers, Cluster& c) {
  static std::minstd_rand draw(1);
  std::vector<size_t> warps(fibers.size() / 32 + (fibers.size() % 32 != 0));
  for (size_t i = 0; i < warps.size(); i++) warps[i] = i;
  for (bool moved = true; moved;) {
    moved = false;
    std::shuffle(warps.begin(), warps.end(), draw);
    for (size_t warp : warps)
      for (size_t i = 32 * warp; i < std::min(32 * (warp + 1), fibers.size()); i++) {
        Fiber& fiber = *fibers[i];
        if (fiber.ended || (fiber.holds && !fiber.holds())) continue;
        fiber.holds = nullptr;
        current = &fiber;
        threadIdx = fiber.thread_index;
        blockIdx = fiber.block_index;
        my_rank = fiber.rank;
        here = c.blocks[fiber.rank].get();
        cluster = &c;
        swapcontext(&scheduler, &fiber.context);
        moved = true;
      }
  }
  for (auto& fiber : fibers) faults += !fiber->ended;
}

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

static inline void settle(Bar& bar) {
  if (bar.pending == 0 && bar.bytes == 0) {
    bar.phase ^= 1;
    bar.pending = bar.count;
  }
}
static inline void counted(Block* b, u32 at, int arrivals, long bytes) {
  auto found = b->bars.find(at);
  if (found == b->bars.end() || found->second.pending < arrivals) { faults++; return; }
  found->second.pending -= arrivals;
  found->second.bytes += bytes;
  settle(found->second);
}
static inline void change(Block* b, u32 at, int arrivals, long bytes) { counted(b, at, arrivals, bytes); }
// In this block at once, in another when somebody waits for it.
static inline void reach(Block* b, u32 bar, std::function<void()> happens) {
  if (!b->running) faults++;
  else if (b == here || b->waiting[bar]) happens();
  else b->under_way[bar].push_back(happens);
}
// A thread ends; with a block's last one all that is still under way to it hits nobody ("cluster target block not present").
static inline void leave() {
  if (--here->running) return;
  for (auto& entry : here->under_way) faults += entry.second.size();
}
static inline u32 swizzled(u32 a) { return a ^ (((a >> 7) & 7) << 4); }
static inline void together() { here->warps[threadIdx.x / 32]->meeting.meet(); }  // what .sync says: the lanes of a warp are here
#endif
