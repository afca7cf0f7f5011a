// include/ptx.cuh on the emulated device.
#pragma once
#include <emulated_device.h>

DEVICE void mbarrier_init(u32 bar, u32 count) {
  Bar b;
  b.count = b.pending = count;
  here->bars[bar] = b;
}
DEVICE void fence_mbarrier_init() {}
DEVICE void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) { change(here, bar, 1, bytes); }
DEVICE void mbarrier_arrive(u32 bar) { change(here, bar, 1, 0); }
DEVICE void mbarrier_arrive_cluster(u32 bar, u32 rank) {
  Block* b = cluster->blocks[rank].get();
  reach(b, bar, [=] { counted(b, bar, 1, 0); });
}
DEVICE void mbarrier_wait(u32 bar, u32 parity) {
  Bar& b = here->bars.at(bar);
  here->waiting[bar]++;
  for (auto& parcel = here->under_way[bar]; !parcel.empty(); parcel.pop_front()) parcel.front()();
  // The wait ends when the phase of this parity is over: the phase that runs has the other.
  wait_until([&b, parity] { return b.phase != parity; });
  here->waiting[bar]--;
}
DEVICE u32 cluster_ctarank() { return my_rank; }

DEVICE void mbarrier_wait_acquire_cluster(u32 bar, u32 parity) { mbarrier_wait(bar, parity); }
DEVICE void cluster_sync_relaxed() { cluster->all->meet(); }
DEVICE void cluster_arrive_relaxed() {}
DEVICE void cluster_wait() { cluster_sync_relaxed(); }  // later than the device may go on, and every thread has to come
DEVICE void st_async_v4(u32 to, u32 rank, float a, float b, float c, float d, u32 bar) {
  Block* peer = cluster->blocks[rank].get();
  if (to % 16 || to + 16 > bar) { faults++; return; }  // barriers lie behind the ring
  reach(peer, bar, [=] {
    float four[4] = {a, b, c, d};
    std::memcpy(peer->memory.data() + to, four, 16);
    counted(peer, bar, 0, -16);
  });
}
DEVICE void ld_shared_v4(float (&v)[4], u32 from) { std::memcpy(v, here->memory.data() + from, 16); }
DEVICE void fence_proxy_async() {}
template <int COUNT> DEVICE void setmaxnreg_inc() {}
template <int COUNT> DEVICE void setmaxnreg_dec() {}
DEVICE void griddep_wait() {}
DEVICE void griddep_launch_dependents() {}
DEVICE u32 shfl_xor(u32 value, int mask) {
  Warp& w = *here->warps[threadIdx.x / 32];
  int lane = threadIdx.x % 32;
  w.words[lane] = value;
  w.meeting.meet();
  u32 got = w.words[lane ^ mask];
  w.meeting.meet();
  return got;
}
DEVICE void ld_shared_v2(float (&v)[2], u32 at) {
  if (at % 8) faults++;
  std::memcpy(v, here->memory.data() + at, 8);
}
DEVICE u32 ld_shared_u32(u32 at) { u32 v; std::memcpy(&v, here->memory.data() + at, 4); return v; }
DEVICE u32 warp_uniform(u32 value) { return value; }
DEVICE void mbarrier_try_then_wait(u32 bar, u32 parity) { mbarrier_wait(bar, parity); }
static inline u32 from_lane(u32 value, int lane) {
  Warp& w = *here->warps[threadIdx.x / 32];
  w.words[threadIdx.x % 32] = value;
  w.meeting.meet();
  u32 got = w.words[lane];
  w.meeting.meet();
  return got;
}
DEVICE u32 movmatrix_trans(u32 v) {
  int lane = threadIdx.x % 32, column = lane / 4, row = lane % 4 * 2;
  u32 low = from_lane(v, row * 4 + column / 2), high = from_lane(v, (row + 1) * 4 + column / 2);
  int shift = column % 2 * 16;
  return (low >> shift & 0xffff) | (high >> shift & 0xffff) << 16;
}
DEVICE void st_shared_v2(u32 to, u32 a, u32 b) {
  if (to % 8) faults++;
  u32 v[2] = {a, b};
  std::memcpy(here->memory.data() + to, v, 8);
}
DEVICE void st_shared_v4(u32 to, uint4 v) { if (to % 16) faults++; std::memcpy(here->memory.data() + to, &v, 16); }
DEVICE uint4 ld_shared_v4(u32 from) { uint4 v; if (from % 16) faults++; std::memcpy(&v, here->memory.data() + from, 16); return v; }
static std::map<std::pair<Block*, int>, std::unique_ptr<Meeting>> groups;
static void some_meet(int who, int threads) {
  auto& found = groups[{here, who}];
  if (!found) found = std::make_unique<Meeting>(threads);
  found->meet();
}
DEVICE void warpgroup_sync(int who) {
  if ((int)threadIdx.x / 128 != who + 1) faults++;
  some_meet(who, 128);
}
template <int WARPGROUPS> DEVICE void consumers_sync() { some_meet(3, 128 * WARPGROUPS); }
// Matrices of half values, transposed, to rows of sixteen bytes and back: lane 8·m + r gives row r of matrix m.
template <typename Element> static void matrices(u32 at, int count, Element each) {
  int lane = threadIdx.x % 32;
  for (int m = 0; m < count; m++)
    for (int j = 0; j < 2; j++) {
      u32 row = from_lane(at, 8 * m + lane % 4 * 2 + j);
      if (row % 16) faults++;
      each(m, j, here->memory.data() + row + lane / 4 * 2);
    }
}
DEVICE void put_some(u32 at, const u32 (&v)[4], int count) {
  matrices(at, count, [&](int m, int j, uint8_t* to) { u16 half = (u16)(v[m] >> 16 * j); std::memcpy(to, &half, 2); });
}
DEVICE void get_some(u32 (&v)[4], u32 at, int count) {
  u32 got[4] = {0, 0, 0, 0};
  matrices(at, count, [&](int m, int j, uint8_t* from) { u16 half; std::memcpy(&half, from, 2); got[m] |= (u32)half << 16 * j; });
  for (int m = 0; m < count; m++) v[m] = got[m];
  together();
}
DEVICE void stmatrix_x4_trans(u32 at, const u32 (&v)[4]) { put_some(at, v, 4); }
DEVICE void stmatrix_x2_trans(u32 at, const u32 (&v)[4]) { put_some(at, v, 2); }
DEVICE void ldmatrix_x4_trans(u32 (&v)[4], u32 at) { get_some(v, at, 4); }
DEVICE void ldmatrix_x2_trans(u32 (&v)[4], u32 at) { get_some(v, at, 2); }
static inline float bits(u32 b) { float f; std::memcpy(&f, &b, 4); return f; }
static inline u32 of(float f) { u32 b; std::memcpy(&b, &f, 4); return b; }
template <bool BFLOAT> DEVICE float half_to_float(u16 b) {
  if (BFLOAT) return bits((u32)b << 16);
  int e = (b >> 10) & 31, m = b & 1023;
  float v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.f + m, e - 25) : std::ldexp((float)m, -24);
  return b & 0x8000 ? -v : v;
}
template <bool BFLOAT> static inline u16 narrow(float f) {
  if (BFLOAT) {
    u32 b = of(f);
    return (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
  }
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
template <bool BFLOAT> DEVICE u32 pack_pair(float low, float high) {
  return narrow<BFLOAT>(low) | (u32)narrow<BFLOAT>(high) << 16;
}
DEVICE u32 shfl(u32 value, int lane) { return from_lane(value, lane); }
template <bool BFLOAT> static inline u16 larger(u16 a, u16 b) {
  float x = half_to_float<BFLOAT>(a), y = half_to_float<BFLOAT>(b);
  return std::isnan(x) ? a : std::isnan(y) ? b : x > y ? a : b;
}
template <bool BFLOAT> DEVICE u32 max_nan_pair(u32 a, u32 b) {
  return larger<BFLOAT>((u16)a, (u16)b) | (u32)larger<BFLOAT>((u16)(a >> 16), (u16)(b >> 16)) << 16;
}
DEVICE float max_nan(float x, float y) { return std::isnan(x) ? x : std::isnan(y) ? y : x > y ? x : y; }
DEVICE u32 float_as_u32(float v) { return of(v); }
DEVICE float u32_as_float(u32 b) { return bits(b); }
DEVICE u32 round_to_tf32(u32 b) { return (b + 0x1000) & ~0x1fffu; }
