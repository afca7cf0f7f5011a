// igemm_swap_ab.cu with SPLIT: each block adds and stores the items that it owns (cluster_reduce.cuh).
#pragma once
#include <igemm/igemm_swap_ab_staged_store.cuh>

#if !FP32_RESULTS
// Where a lane's residual of an item is, and its result where that is not staged.
DEVICE Place place_of(int item, int pixel0, int filter0, int lane, int work, const Sizes& sizes) {
  Place at = place(item % Reduce::PAIRS * 2, pixel0, filter0 + item / Reduce::PAIRS * 64, lane, sizes.pixels, sizes.k);
  if constexpr (HAS_HALO) {
    Corner tile = corner(work, sizes);
    int column = at.pixel - pixel0, row = tile.row + column / ROW_PITCH;
    at.inside = column < HALO_PIXELS && column % ROW_PITCH < sizes.q && row < sizes.p && at.filter < sizes.k;
    at.pixel = (tile.image * sizes.p + row) * sizes.q + column % ROW_PITCH;
  }
  return at;
}

// Residuals are loaded before the sums of the other blocks have arrived.
DEVICE void store_owned(float (&d)[PARTS][TILE_N / 2], const SmemLayout& smem, int consumer, int thread, int work,
                        int pixel0, int filter0, const Sizes& sizes, Value* __restrict__ y,
                        const Value* __restrict__ residual) {
  int lane = thread % 32;
  u32 rank = smem.rank;
#pragma unroll
  for (int from = 0; from < Reduce::ITEMS; from += AT_ONCE * SPLIT) {
    uint4 more[AT_ONCE];
#pragma unroll
    for (int item = from; item < from + AT_ONCE * SPLIT && item < Reduce::ITEMS; item++) {
      if (item % SPLIT != rank) continue;
      more[(item - from) / SPLIT] = make_uint4(0, 0, 0, 0);
      if constexpr (HAS_RESIDUAL) {
        Place at = place_of(item, pixel0, filter0, lane, work, sizes);
        if (at.inside)
          more[(item - from) / SPLIT] = *(const uint4*)(residual + (long long)at.pixel * sizes.k + at.filter);
      }
    }
    if (from == 0 && Reduce::inbox_bytes(rank)) mbarrier_wait_acquire_cluster(smem.arrived, 0);
#pragma unroll
    for (int item = from; item < from + AT_ONCE * SPLIT && item < Reduce::ITEMS; item++) {
      if (item % SPLIT != rank) continue;
      int part = item / Reduce::PAIRS, g = item % Reduce::PAIRS * 2;
      Reduce::add(d[part], item, smem.sums, rank, consumer, thread);
#if STAGED_STORE
      u32 words[4], added[4];
      spread(added, more[(item - from) / SPLIT], lane);
      finish(words, d[part], g, added);
      put_groups(staged_row(smem.staged + (consumer * Reduce::MOST_OWNED + item / SPLIT) * 2048, thread), g, words);
#else
      Place at = place_of(item, pixel0, filter0, lane, work, sizes);
      store_groups(d[part], g, more[(item - from) / SPLIT], at, lane, sizes.pitch, y);
#endif
    }
  }
}
#endif

// The items that the warpgroup has put together in shared memory: one tensor copy for STORE_PIXELS pixels.
DEVICE void copy_owned(const SmemLayout& smem, int consumer, int thread, const Corner& to, int k, const TensorMap* y) {
  fence_proxy_async();
  warpgroup_sync(consumer);
  if (thread) return;
  for (int item = smem.rank; item < Reduce::ITEMS; item += SPLIT) {
    int filter = to.filter + item / Reduce::PAIRS * 64;
    for (int column = item % Reduce::PAIRS * 16;
         column < item % Reduce::PAIRS * 16 + 16 && column < TILE_N && filter < k; column += STORE_PIXELS)
      tma_store_4d(y, smem.staged + (consumer * Reduce::MOST_OWNED + item / SPLIT) * 2048 + column % 16 * 128, filter,
                   HAS_HALO ? column % ROW_PITCH : to.column + column, HAS_HALO ? to.row + column / ROW_PITCH : 0,
                   to.image);
  }
  bulk_commit_group();
}
