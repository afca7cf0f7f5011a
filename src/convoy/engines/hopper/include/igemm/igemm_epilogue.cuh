// igemm.cu: how sums begin, what is added to them, and how they are stored. An item is one row of 32 filters; of a
// split, each item is stored by one block, the owner.
#pragma once
#include <activation.cuh>
#include <igemm/igemm_layout.cuh>
#include <lane_transpose.cuh>

enum : int {
  WIDTHS = (GROUPS + 3) / 4,  // items of a row
  ITEMS = PARTS * 2 * WIDTHS,
  MOST_OWNED = (ITEMS + SPLIT - 1) / SPLIT,
  // Items whose residuals are loaded at once: a load takes half a microsecond.
  BATCH = VALUE_BYTES == 4 ? (SPLIT > 2 ? SPLIT : 2) : (SPLIT > 4 ? SPLIT : 4),
};

// The residual of a lane's eight sums: sixteen bytes of half values, or four pairs of fp32.
struct PairsOfFloats { float2 group[4]; };
template <int BYTES> struct ResidualType { typedef PairsOfFloats Type; };
template <> struct ResidualType<2> { typedef uint4 Type; };
typedef ResidualType<VALUE_BYTES>::Type Residual;

DEVICE void load(uint4& added, int g, int pixel, int n0, int lane, const u16* __restrict__ residual,
                 const Sizes& sizes) {
  const u16* row = residual + (long long)pixel * sizes.k;
  int column = n0 + (4 * g + lane) * 8;  // of this lane's sixteen bytes
  added = make_uint4(0, 0, 0, 0);
  if (pixel < sizes.pixels && 4 * g + lane < GROUPS && column < sizes.k) added = *(const uint4*)(row + column);
}

DEVICE void load(PairsOfFloats& added, int g, int pixel, int n0, int lane, const float* __restrict__ residual,
                 const Sizes& sizes) {
  const float* row = residual + (long long)pixel * sizes.k;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int group = 4 * g + i, column = n0 + group * 8 + 2 * lane;
    added.group[i] = make_float2(0.f, 0.f);
    if (pixel < sizes.pixels && group < GROUPS && column < sizes.k) added.group[i] = *(const float2*)(row + column);
  }
}

// Stores groups 4g to 4g + 3, of eight filters each, of one row. A lane has two neighbours of each group; lanes
// exchange until each has the eight filters of one group.
DEVICE void store(float (&v)[8], const uint4& added, int g, int pixel, int n0, int lane, u16* __restrict__ y,
                  const Sizes& sizes) {
  bool inside = pixel < sizes.pixels;
  long long row = (long long)pixel * sizes.pitch;
  int column = n0 + (4 * g + lane) * 8;
  u32 words[4];
#if HAS_RESIDUAL
  u32 given[4] = {added.x, added.y, added.z, added.w};
  transpose_four_lanes(given, lane);
#endif
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float low = v[2 * i], high = v[2 * i + 1];
#if HAS_RESIDUAL
    low += half_to_float<BFLOAT>((u16)(given[i] & 0xffff));
    high += half_to_float<BFLOAT>((u16)(given[i] >> 16));
#endif
    words[i] = pack_pair<BFLOAT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
  }
  transpose_four_lanes(words, lane);
  bool mine = inside && 4 * g + lane < GROUPS && column < sizes.k;
  if (mine) *(uint4*)(y + row + column) = make_uint4(words[0], words[1], words[2], words[3]);
}

DEVICE void store(float (&v)[8], const PairsOfFloats& added, int g, int pixel, int n0, int lane, float* __restrict__ y,
                  const Sizes& sizes) {
  bool inside = pixel < sizes.pixels;
  long long row = (long long)pixel * sizes.pitch;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int group = 4 * g + i, column = n0 + group * 8 + 2 * lane;
    if (!inside || group >= GROUPS || column >= sizes.k) continue;
    float low = v[2 * i], high = v[2 * i + 1];
    if constexpr (HAS_RESIDUAL) {
      low += added.group[i].x;
      high += added.group[i].y;
    }
    *(float2*)(y + row + column) = make_float2(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
  }
}

// Sums begin with the bias (in one block of a split), so that adding it costs nothing where results are stored.
DEVICE void begin(float (&d)[PARTS][TILE_N / 2], int n0, int lane, const Value* __restrict__ bias, u32 rank,
                  const Sizes& sizes) {
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    float low = 0.f, high = 0.f;
    if constexpr (HAS_BIAS) {
      int column = n0 + group * 8 + 2 * lane;
      if ((SPLIT == 1 || rank == 0) && column < sizes.k) {
        if constexpr (VALUE_BYTES == 2) {
          u32 two = *(const u32*)(bias + column);
          low = half_to_float<BFLOAT>((u16)(two & 0xffff));
          high = half_to_float<BFLOAT>((u16)(two >> 16));
        } else {
          float2 two = *(const float2*)(bias + column);
          low = two.x;
          high = two.y;
        }
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      d[part][4 * group] = d[part][4 * group + 2] = low;
      d[part][4 * group + 1] = d[part][4 * group + 3] = high;
    }
  }
}

DEVICE int row_of(int item) { return item / (2 * WIDTHS) * 64 + item / WIDTHS % 2 * 8; }

// A lane's eight sums of an item.
DEVICE void take(float (&v)[8], const float (&d)[PARTS][TILE_N / 2], int item) {
  int part = item / (2 * WIDTHS), half = item / WIDTHS % 2, g = item % WIDTHS;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int group = 4 * g + i / 2;
    v[i] = group < GROUPS ? d[part][4 * group + 2 * half + i % 2] : 0.f;
  }
}

// Where an owner receives four sums of a thread from a rank: in the ring.
DEVICE u32 inbox(u32 stages, int consumer, int owned, u32 from, int quad, int thread) {
  return stages + ((((consumer * MOST_OWNED + owned) * SPLIT + from) * 2 + quad) * 128 + thread) * 16;
}

DEVICE u32 inbox_bytes(u32 rank) { return (ITEMS - rank + SPLIT - 1) / SPLIT * CONSUMERS * (SPLIT - 1) * 128 * 32; }

DEVICE void send_sums(const float (&d)[PARTS][TILE_N / 2], u32 stages, u32 arrived, u32 rank, int consumer,
                      int thread) {
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (item % SPLIT == rank) continue;
    float v[8];
    take(v, d, item);
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
      const float* four = v + 4 * quad;
      u32 to = inbox(stages, consumer, item / SPLIT, rank, quad, thread);
      st_async_v4(to, item % SPLIT, four[0], four[1], four[2], four[3], arrived);
    }
  }
}

// Adds in the order of the ranks, so that the bits do not depend on which block is first.
DEVICE void add_sums(float (&v)[8], u32 stages, u32 rank, int consumer, int owned, int thread) {
  float own[8];
#pragma unroll
  for (int i = 0; i < 8; i++) { own[i] = v[i]; v[i] = 0.f; }
#pragma unroll
  for (u32 from = 0; from < SPLIT; from++)
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
      float four[4] = {own[4 * quad], own[4 * quad + 1], own[4 * quad + 2], own[4 * quad + 3]};
      if (from != rank) ld_shared_v4(four, inbox(stages, consumer, owned, from, quad, thread));
#pragma unroll
      for (int i = 0; i < 4; i++) v[4 * quad + i] += four[i];
    }
}
