// bottleneck.cu: the threads that copy.
#pragma once
#include <bottleneck/bottleneck_layout.cuh>

// A stage of 64 channels of a pass's pixels, from `row` of the image on. Rows outside the image arrive as zeros.
DEVICE void load_pixels(const TensorMap* from, const SmemLayout& smem, XRing& ring, int channel, int row, int image) {
  u32 bar = smem.x_full + 8 * ring.stage;
  mbarrier_wait(smem.x_empty + 8 * ring.stage, ring.phase ^ 1);
  mbarrier_arrive_expect_tx(bar, X_BYTES);
  tma_load_4d(smem.x + ring.stage * X_BYTES, from, bar, channel, 0, row, image);
  ring.next();
}

// A stage that nothing is copied to: the last convolution's results are put there.
DEVICE void give_stage(const SmemLayout& smem, XRing& ring) {
  mbarrier_wait(smem.x_empty + 8 * ring.stage, ring.phase ^ 1);
  mbarrier_arrive(smem.x_full + 8 * ring.stage);
  ring.next();
}

DEVICE void produce_pixels(const TensorMap* x, const TensorMap* residual, const SmemLayout& smem, int first, int step,
                           const Sizes& sizes) {
  XRing ring = {0, 0};
  for (int round = first; round < sizes.rounds; round += step) {
    Item item = item_of(round, smem.rank, sizes);
    for (int pass = -1; pass < sizes.passes; pass++) {
      int row = item.row + pass * PASS_ROWS;
      for (int i = 0; i < IN_BLOCKS; i++) load_pixels(x, smem, ring, i * 64, row + 1, item.image);
      if (pass < 0) continue;
      for (int i = 0; i < OUT_BLOCKS; i++) {
        if constexpr (HAS_RESIDUAL) load_pixels(residual, smem, ring, i * 64, row, item.image);
        else give_stage(smem, ring);
      }
    }
  }
}

// This block's share of a chunk of weights, to all blocks of the cluster.
DEVICE void load_weights(const unsigned char* weights, const SmemLayout& smem, int stage, int chunk) {
  u32 bar = smem.weights_full + 8 * stage, to = smem.weights + stage * CHUNK_BYTES;
  mbarrier_arrive_expect_tx(bar, CHUNK_BYTES);
  if constexpr (CLUSTER == 1) {
    bulk_load(to, weights + chunk * CHUNK_BYTES, CHUNK_BYTES, bar);
  } else {
    u32 own = smem.rank * SHARE_BYTES;
    bulk_load_multicast(to + own, weights + chunk * CHUNK_BYTES + own, SHARE_BYTES, bar, (1 << CLUSTER) - 1);
  }
}

// The weights were packed long ago: their copies wait for no kernel in front.
DEVICE void produce_weights(const unsigned char* weights, const SmemLayout& smem, int first, int step,
                            const Sizes& sizes) {
  if constexpr (RESIDENT) {
    for (int chunk = 0; chunk < CHUNKS; chunk++) load_weights(weights, smem, chunk, chunk);
    if constexpr (CLUSTER > 1)  // a block's memory must be there until its peers' copies have arrived
      for (int chunk = 0; chunk < CHUNKS; chunk++) mbarrier_wait(smem.weights_full + 8 * chunk, 0);
  } else {
    WeightRing ring = {0, 0};
    for (int round = first; round < sizes.rounds; round += step)
      for (int pass = -1; pass < sizes.passes; pass++) {
        int chunks = pass < 0 ? (int)IN_BLOCKS : (int)CHUNKS;
        for (int chunk = 0; chunk < chunks; chunk++) {
          mbarrier_wait(smem.weights_empty + 8 * ring.stage, ring.phase ^ 1);
          load_weights(weights, smem, ring.stage, chunk);
          ring.next();
        }
      }
    if constexpr (CLUSTER > 1) wait_until_empty(ring, smem.weights_empty);
  }
}
