// Kernels whose rows are filters and whose results are half values: from a warp's sums to y, sixteen bytes a lane.
//
// A warp has sixteen filters. Of two groups of eight pixels a lane stores, or reads of the residual, eight filters of
// one pixel.
#pragma once
#include <igemm/igemm_swap_ab_sums.cuh>
#include <lane_transpose.cuh>

#if !FP32_RESULTS
enum : int {
  AT_ONCE = 4,  // pairs of groups whose residuals are loaded together
};

struct Place { int pixel, filter; bool inside; };
DEVICE Place place(int g, int pixel0, int filter0, int lane, int pixels, int k) {
  int part = lane % 4, pixel = pixel0 + (g + part / 2) * 8 + lane / 4, filter = filter0 + part % 2 * 8;
  return {pixel, filter, g + part / 2 < GROUPS && pixel < pixels && filter < k};
}

// Two groups as half values, with the residual added: words of two neighbouring pixels of a filter.
DEVICE void finish(u32 (&words)[4], const float (&d)[TILE_N / 2], int g, const u32 (&added)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int group = g + i / 2, half = i % 2;
    float low = 0.f, high = 0.f;
    if (group < GROUPS) { low = d[4 * group + 2 * half]; high = d[4 * group + 2 * half + 1]; }
    if constexpr (HAS_RESIDUAL) {
      low += half_to_float<BFLOAT>((u16)(added[i] & 0xffff));
      high += half_to_float<BFLOAT>((u16)(added[i] >> 16));
    }
    words[i] = pack_pair<BFLOAT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
  }
}

// Sixteen bytes of residual that a lane loaded, rearranged to the lane's own sums.
DEVICE void spread(u32 (&added)[4], uint4 more, int lane) {
  added[0] = more.x, added[1] = more.y, added[2] = more.z, added[3] = more.w;
  if constexpr (HAS_RESIDUAL) {
    transpose_four_lanes(added, lane % 4);
#pragma unroll
    for (int i = 0; i < 4; i++) added[i] = movmatrix_trans(added[i]);
  }
}

DEVICE void store_groups(const float (&d)[TILE_N / 2], int g, uint4 more, const Place& to, int lane, int pitch,
                         Value* __restrict__ y) {
  u32 words[4], added[4];
  spread(added, more, lane);
  finish(words, d, g, added);
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = movmatrix_trans(words[i]);
  transpose_four_lanes(words, lane % 4);
  if (to.inside)
    *(uint4*)(y + (long long)to.pixel * pitch + to.filter) = make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp's sixteen filters of a part, by all pixels of the tile. Residuals are loaded for some groups at a time,
// before these are stored: a load behind a store waits for it.
DEVICE void store_sums(const float (&d)[TILE_N / 2], int pixel0, int filter0, int lane, int pixels, int k, int pitch,
                       Value* __restrict__ y, const Value* __restrict__ residual) {
#pragma unroll
  for (int first = 0; first < GROUPS; first += 2 * AT_ONCE) {
    Place to[AT_ONCE];
    uint4 more[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      to[i] = place(first + 2 * i, pixel0, filter0, lane, pixels, k);
      more[i] = make_uint4(0, 0, 0, 0);
      if constexpr (HAS_RESIDUAL) {
        if (to[i].inside) more[i] = *(const uint4*)(residual + (long long)to[i].pixel * k + to[i].filter);
      }
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (first + 2 * i < GROUPS) store_groups(d, first + 2 * i, more[i], to[i], lane, pitch, y);
  }
}
#endif
