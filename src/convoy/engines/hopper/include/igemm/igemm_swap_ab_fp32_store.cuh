// igemm_swap_ab.cu, results in fp32: each lane stores its own sums, four bytes each; eight lanes have neighbouring
// filters of one pixel.
#pragma once
#include <igemm/igemm_swap_ab_layout.cuh>

#if FP32_RESULTS
// Of planes: 1 / s of x, and of every filter of the weight.
struct Scales { const float *x, *weight; };

// Where a lane's sums of a part belong: a warp's sixteen filters from `filter` on, of which the lane has its own and
// the one eight below.
struct Target {
  int pixel0, filter;
  Corner tile;
};

// A column of the tile as a pixel of y, or -1.
DEVICE int pixel_of(const Target& to, int column, const Sizes& sizes) {
  if constexpr (HAS_HALO) {
    int row = to.tile.row + column / ROW_PITCH, x = column % ROW_PITCH;
    return column < HALO_PIXELS && x < sizes.q && row < sizes.p ? (to.tile.image * sizes.p + row) * sizes.q + x : -1;
  } else {
    int pixel = to.pixel0 + column;
    return pixel < sizes.pixels ? pixel : -1;
  }
}

// The factors of a filter's sums, and its bias: planes are scaled, so their sums cannot begin with the bias.
struct Finish { float x, factor[2], bias[2]; };
DEVICE Finish finish_of(int filter, const Scales& scales, const Value* __restrict__ bias, const Sizes& sizes) {
  Finish found = {1.f, {1.f, 1.f}, {0.f, 0.f}};
  if constexpr (PLANES == 2) {
    found.x = *scales.x;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (filter + 8 * half >= sizes.k) continue;
      found.factor[half] = scales.weight[filter + 8 * half];
      if constexpr (HAS_BIAS) found.bias[half] = bias[filter + 8 * half];
    }
  }
  return found;
}

// A lane has eight sums of two groups of eight pixels. Sum i: two neighbouring pixels of each of two filters, of each
// group.
DEVICE void load_eight(float (&more)[8], int g, const Target& to, int lane, const Value* __restrict__ residual,
                       const Sizes& sizes) {
  int own = 0;
  // Opaque: the compiler would compute the places of all columns before the first product, and keep them in registers.
  if constexpr (HAS_RESIDUAL) own = (int)opaque(lane % 4 * 2);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    more[i] = 0.f;
    if constexpr (HAS_RESIDUAL) {
      int group = g + i / 4, half = i / 2 % 2, pixel = pixel_of(to, group * 8 + own + i % 2, sizes);
      int filter = to.filter + half * 8;
      bool inside = group < GROUPS && pixel >= 0 && filter < sizes.k;
      if (inside) more[i] = residual[(long long)pixel * sizes.k + filter];
    }
  }
}

DEVICE void store_eight(const float (&d)[TILE_N / 2], int g, const float (&more)[8], const Target& to, int lane,
                        const Finish& finish, const Sizes& sizes, Value* __restrict__ y) {
  int own = (int)opaque(lane % 4 * 2);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int group = g + i / 4, half = i / 2 % 2, pixel = pixel_of(to, group * 8 + own + i % 2, sizes);
    int filter = to.filter + half * 8;
    bool inside = group < GROUPS && pixel >= 0 && filter < sizes.k;
    if (!inside) continue;
    float v = d[4 * (g + i / 4) % (TILE_N / 2) + i % 4];
    // One factor after the other: their product may be no normal number.
    if constexpr (PLANES == 2) v = v * finish.x * finish.factor[half] + finish.bias[half];
    y[(long long)pixel * sizes.pitch + filter] = activate<ACTIVATION>(v + more[i]);
  }
}

enum : int {
  ASKED = PARTS == 1 ? 2 : 1,  // pairs of groups whose residuals are loaded together, as registers allow
};

// A warp's sixteen filters of a part, by all pixels of the tile. Residuals are loaded for some groups at a time,
// before these are stored: a load behind a store waits for it.
DEVICE void store_fp32(const float (&d)[TILE_N / 2], const Target& to, int lane, const Finish& finish,
                       const Sizes& sizes, Value* __restrict__ y, const Value* __restrict__ residual) {
#pragma unroll
  for (int first = 0; first < GROUPS; first += 2 * ASKED) {
    float more[ASKED][8];
#pragma unroll
    for (int i = 0; i < ASKED; i++) load_eight(more[i], first + 2 * i, to, lane, residual, sizes);
#pragma unroll
    for (int i = 0; i < ASKED; i++)
      if (first + 2 * i < GROUPS) store_eight(d, first + 2 * i, more[i], to, lane, finish, sizes, y);
  }
}

// With SPLIT: the items that this block owns.
DEVICE void store_owned_fp32(float (&d)[PARTS][TILE_N / 2], const SmemLayout& smem, int consumer, int thread,
                             const Target& to, const Finish (&finish)[PARTS], const Sizes& sizes,
                             Value* __restrict__ y, const Value* __restrict__ residual) {
  int lane = thread % 32;
  if (Reduce::inbox_bytes(smem.rank)) mbarrier_wait_acquire_cluster(smem.arrived, 0);
#pragma unroll
  for (int item = 0; item < Reduce::ITEMS; item++) {
    if (item % SPLIT != smem.rank) continue;
    int part = item / Reduce::PAIRS, g = item % Reduce::PAIRS * 2;
    Target own = {to.pixel0, to.filter + part * 64, to.tile};
    float more[8];
    load_eight(more, g, own, lane, residual, sizes);
    Reduce::add(d[part], item, smem.sums, smem.rank, consumer, thread);
    store_eight(d[part], g, more, own, lane, finish[part], sizes, y);
  }
}
#endif
