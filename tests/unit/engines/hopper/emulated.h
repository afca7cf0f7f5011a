// The device of engines/cuda on a CPU: the names of hopper.cuh with the meaning that the PTX manual gives them, each GPU thread a
// thread of the host. Copies and products happen at once, which is one of the orders that the device may choose; what goes to
// another block of the cluster comes there as late as it may: when somebody waits for it. A block that ends before has a fault.
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

// What a tensor map says: dimensions from the innermost out. Pixels: c, w, h, n, with the corners and steps of im2col mode.
struct Map {
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
DEVICE void barrier_init(u32 bar, u32 count) {
  std::lock_guard<std::mutex> l(here->m);
  Bar b;
  b.count = b.pending = count;
  here->bars[bar] = b;
}
DEVICE void barrier_init_done() {}
DEVICE void barrier_expect(u32 bar, u32 bytes) { change(here, bar, 1, bytes); }
DEVICE void barrier_arrive(u32 bar) { change(here, bar, 1, 0); }
DEVICE void barrier_arrive_at(u32 bar, u32 rank) {
  Block* b = cluster->blocks[rank].get();
  reach(b, bar, [=] { counted(b, bar, 1, 0); });
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  std::unique_lock<std::mutex> l(here->m);
  Bar& b = here->bars.at(bar);
  here->waiting[bar]++;
  for (auto& parcel = here->under_way[bar]; !parcel.empty(); parcel.pop_front()) parcel.front()();
  // The wait ends when the phase of this parity is over: the phase that runs has the other.
  if (!here->c.wait_for(l, std::chrono::seconds(20), [&] { return b.phase != parity; })) { faults++; std::abort(); }
  here->waiting[bar]--;
}
DEVICE void cluster_sync() { cluster->all->meet(); }
DEVICE u32 cluster_rank() { return my_rank; }

static inline u32 swizzled(u32 a) { return a ^ (((a >> 7) & 7) << 4); }
static inline void put(Block* b, u32 to, const uint8_t* from, int count) {  // sixteen bytes at a time, as the swizzle moves them
  for (int i = 0; i < count; i += 16) {
    uint8_t* p = b->memory.data() + swizzled(to + i);
    if (from) std::memcpy(p, from + i, 16); else std::memset(p, 0, 16);
  }
}
// One row of 128 bytes: channels from c on, as many as there are, zeros behind them.
static inline void row(Block* b, u32 to, const Map* m, const uint8_t* at, int c, bool inside) {
  for (int i = 0; i < 128; i += 16) {
    bool real = inside && (c + i / BYTES) < m->size[0];
    put(b, to + i, real ? at + (long long)c * BYTES + i : nullptr, 16);
  }
}
static inline void pixels(Block* b, u32 to, const Map* m, int c, int w, int h, int n, u16 right, u16 down) {
  if (right > 255 || down > 255 || m->low[0] < -128 || m->high[0] > 127) faults++;
  for (int i = 0; i < m->rows; i++) {
    long long x = w + right, y = h + down;
    bool inside = x >= 0 && x < m->size[1] && y >= 0 && y < m->size[2] && n < m->size[3];
    row(b, to + i * 128, m, m->base + n * m->stride[3] + y * m->stride[2] + x * m->stride[1], c, inside);
    w += m->step[0];
    if (w >= m->size[1] + m->high[0]) {
      w = m->low[0];
      h += m->step[1];
      if (h >= m->size[2] + m->high[1]) { h = m->low[1]; n++; }
    }
  }
}
DEVICE void copy_pixels(u32 to, const Map* m, u32 bar, int c, int w, int h, int n, u16 right, u16 down) {
  pixels(here, to, m, c, w, h, n, right, down);
  change(here, bar, 0, -(long)m->rows * 128);
}
DEVICE void copy_weights_to_all(u32 to, const Map* m, u32 bar, int c, int tap, int k, u16 ranks) {
  for (u32 rank = 0; rank < cluster->blocks.size(); rank++) {
    if (!(ranks >> rank & 1)) continue;
    Block* b = cluster->blocks[rank].get();
    reach(b, bar, [=, m = *m] {
      for (int i = 0; i < m.rows; i++)
        row(b, to + i * 128, &m, m.base + (k + i) * m.stride[2] + tap * m.stride[1], c, k + i < m.size[2]);
      counted(b, bar, 0, -(long)m.rows * 128);
    });
  }
}
DEVICE void copy_weights(u32 to, const Map* m, u32 bar, int c, int tap, int k) {
  copy_weights_to_all(to, m, bar, c, tap, k, (u16)(1 << my_rank));
}

DEVICE void prefetch_map(const Map*) {}
DEVICE void prefetch_weights(const Map* m, int c, int tap, int k) {
  if (c < 0 || c >= m->size[0] || tap < 0 || tap >= m->size[1] || k < 0 || k >= m->size[2]) faults++;
}
DEVICE void send(u32 to, u32 rank, float a, float b, float c, float d, u32 bar) {
  Block* peer = cluster->blocks[rank].get();
  if (to % 16 || to + 16 > bar) { faults++; return; }  // barriers lie behind the ring
  reach(peer, bar, [=] {
    float four[4] = {a, b, c, d};
    std::memcpy(peer->memory.data() + to, four, 16);
    counted(peer, bar, 0, -16);
  });
}
DEVICE void receive(float (&v)[4], u32 from) { std::memcpy(v, here->memory.data() + from, 16); }
DEVICE void barrier_wait_peers(u32 bar, u32 parity) { barrier_wait(bar, parity); }
DEVICE void cluster_meet() { cluster_sync(); }

DEVICE u64 operand(u32 address) { return address; }
static inline void together() { here->warps[threadIdx.x / 32]->meeting.meet(); }  // what .sync says: the lanes of a warp are here
DEVICE void products_begin() { together(); }
DEVICE void products_commit() { together(); }
template <int LEFT> DEVICE void products_wait() { together(); }
template <int COUNT> DEVICE void registers_more() {}
template <int COUNT> DEVICE void registers_fewer() {}
DEVICE void wait_for_forerunner() {}
DEVICE void let_successor_start() {}
DEVICE u32 swap_lanes(u32 value, int mask) {
  Warp& w = *here->warps[threadIdx.x / 32];
  int lane = threadIdx.x % 32;
  w.words[lane] = value;
  w.meeting.meet();
  u32 got = w.words[lane ^ mask];
  w.meeting.meet();
  return got;
}
static inline float bits(u32 b) { float f; std::memcpy(&f, &b, 4); return f; }
static inline u32 of(float f) { u32 b; std::memcpy(&b, &f, 4); return b; }
#if BF16
DEVICE float unpack(u16 b) { return bits((u32)b << 16); }
static inline u16 narrow(float f) { u32 b = of(f); return (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16); }
#else
DEVICE float unpack(u16 b) {
  int e = (b >> 10) & 31, m = b & 1023;
  float v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.f + m, e - 25) : std::ldexp((float)m, -24);
  return b & 0x8000 ? -v : v;
}
static inline u16 narrow(float f) {
  u16 sign = of(f) >> 16 & 0x8000;
  float v = std::fabs(f);
  if (std::isnan(f)) return 0x7fff;
  if (v >= 65520.f) return sign | 0x7c00;
  if (v == 0.f) return sign;
  int e;
  std::frexp(v, &e);
  int shift = std::max(e - 11, -24);
  long m = std::lrint(std::ldexp(v, -shift));
  if (m == 2048) { m = 1024; shift++; }
  return sign | (shift == -24 && m < 1024 ? m : ((shift + 25) << 10 | (m & 1023)));
}
#endif
DEVICE u32 pack(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }

static inline float element(u32 at, int index) {
  const uint8_t* p = here->memory.data() + swizzled(at + index * BYTES);
#if BYTES == 2
  u16 v;
  std::memcpy(&v, p, 2);
  return unpack(v);
#else
  float v;
  std::memcpy(&v, p, 4);
  return v;
#endif
}
// One lane's share of D[64, BN] += A · B^T over 32 bytes: rows lane/4 and eight below, two neighbouring columns of each eight.
DEVICE void multiply(float (&d)[BN / 2], u64 a, u64 b) {
  int t = threadIdx.x % 128, top = t / 32 * 16 + t % 32 / 4;
  for (int i = 0; i < BN / 2; i++) {
    int r = top + (i / 2 % 2) * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    for (int k = 0; k < 32 / BYTES; k++)
      d[i] += element((u32)a + r * 128, k) * element((u32)b + column * 128, k);
  }
}
