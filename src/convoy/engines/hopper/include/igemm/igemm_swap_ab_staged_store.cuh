// igemm_swap_ab.cu, results through shared memory: a warpgroup's 64 filters by the pixels of a tile, in rows of 128
// bytes in the 128-byte swizzle, then one tensor copy. A residual arrives by the same way while products run, at the
// place of the results.
#pragma once
#include <igemm/igemm_swap_ab_half_store.cuh>
#include <igemm/igemm_swap_ab_layout.cuh>
#include <tma.cuh>

#if STAGED_STORE
// The row of eight filters that a lane gives of the first sixteen pixels: two groups of pixels by two of filters.
DEVICE u32 staged_row(u32 staged, int thread) {
  int lane = thread % 32, row = lane % 8 + lane / 16 * 8, eight = thread / 32 * 2 + lane / 8 % 2;
  return staged + row * 128 + ((eight ^ lane % 8) << 4);
}

DEVICE void put_groups(u32 at, int g, const u32 (&words)[4]) {
  if (g + 1 < GROUPS) stmatrix_x4_trans(at, words); else stmatrix_x2_trans(at, words);
}

// Starts the copy of a warpgroup's residual.
DEVICE void load_residual(u32 staged, u32 bar, const Corner& from, int k, const TensorMap* residual) {
  u32 bytes = 0;
#pragma unroll
  for (int part = 0; part < PARTS; part++) bytes += from.filter + part * 64 < k ? HALO_PIXELS * 128 : 0;
  mbarrier_arrive_expect_tx(bar, bytes);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    int filter = from.filter + part * 64;
    if (filter < k)
      tma_load_4d(staged + part * TILE_N * 128, residual, bar, filter, from.column, from.row, from.image);
  }
}

// A warpgroup's sums to y; each part of 64 filters as soon as it is there.
DEVICE void store_staged(const float (&d)[PARTS][TILE_N / 2], u32 staged, int consumer, int thread, const Corner& to,
                         int k, const TensorMap* y) {
  u32 at = staged_row(staged, thread);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
#pragma unroll
    for (int g = 0; g < GROUPS; g += 2) {
      u32 words[4], added[4] = {0, 0, 0, 0}, place = at + (part * TILE_N + g * 8) * 128;
      if constexpr (HAS_RESIDUAL) {
        if (g + 1 < GROUPS) ldmatrix_x4_trans(added, place); else ldmatrix_x2_trans(added, place);
      }
      finish(words, d[part], g, added);
      put_groups(place, g, words);
    }
    fence_proxy_async();
    warpgroup_sync(consumer);
    if (thread == 0 && to.filter + part * 64 < k) {
      tma_store_4d(y, staged + part * TILE_N * 128, to.filter + part * 64, to.column, to.row, to.image);
      bulk_commit_group();
    }
  }
}
#endif
