// bottleneck.cu: the products of the three convolutions. Filters are the rows of a product, pixels its columns.
#pragma once
#include <bottleneck/bottleneck_layout.cuh>
#include <wgmma_instructions.cuh>

// Where a multiplying warpgroup is in both rings. Resident weights have no ring: `weights.stage` is the chunk.
struct ReadPosition {
  XRing x;
  WeightRing weights;
  DEVICE_MEMBER void begin_pass() {
    if (RESIDENT) weights.stage = 0;
  }
  DEVICE_MEMBER void next_weights() {
    if (RESIDENT) weights.stage++; else weights.next();
  }
};

DEVICE u32 wait_for_weights(const ReadPosition& at, const SmemLayout& smem) {
  mbarrier_try_then_wait(smem.weights_full + 8 * at.weights.stage, RESIDENT ? 0 : at.weights.phase);
  return smem.weights + at.weights.stage * CHUNK_BYTES;
}
DEVICE u32 wait_for_pixels(const ReadPosition& at, const SmemLayout& smem) {
  mbarrier_try_then_wait(smem.x_full + 8 * at.x.stage, at.x.phase);
  return smem.x + at.x.stage * X_BYTES;
}
// One arrival a warp: a warp may end its products before the others of its group have begun to wait for the stage.
DEVICE void release_weights(const SmemLayout& smem, int stage, int lane) {
  if constexpr (RESIDENT) return;
  u32 bar = smem.weights_empty + 8 * stage;
  if constexpr (CLUSTER == 1) {
    if (lane == 0) mbarrier_arrive(bar);
  } else {
    if (lane < CLUSTER) mbarrier_arrive_cluster(bar, lane);
  }
}
DEVICE void release_pixels(const SmemLayout& smem, int stage, int lane) {
  if (lane == 0) mbarrier_arrive(smem.x_empty + 8 * stage);
}

// Sums of 64 filters begin with their biases. A lane has two rows, eight filters apart.
template <int COUNT> DEVICE void begin_sums(float (&d)[COUNT], const float* __restrict__ bias, int warp, int lane) {
  float upper = bias[warp * 16 + lane / 4], lower = bias[warp * 16 + lane / 4 + 8];
#pragma unroll
  for (int i = 0; i < COUNT; i++) d[i] = i / 2 % 2 ? lower : upper;
}

// d += 64 filters by COUNT * 2 pixels, over 64 channels.
template <int COUNT> DEVICE void multiply_block(float (&d)[COUNT], u32 filters, u32 pixels) {
#pragma unroll
  for (int k = 0; k < 4; k++) wgmma(d, smem_desc_sw128(filters + k * 32), smem_desc_sw128(pixels + k * 32));
}

// 1x1, of rows that follow those of the second convolution's window by one pass.
template <int COUNT>
DEVICE void multiply_first(float (&d)[MID_BLOCKS][COUNT], ReadPosition& at, const SmemLayout& smem, int consumer,
                           int lane) {
  int x_before = 0, weights_before = 0;
  for (int i = 0; i < IN_BLOCKS; i++) {
    u32 filters = wait_for_weights(at, smem), pixels = wait_for_pixels(at, smem) + consumer * OWN_BYTES;
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < MID_BLOCKS; part++) multiply_block(d[part], filters + part * 8192, pixels);
    wgmma_commit_group();
    if (i > 0) {  // the products before these have ended
      wgmma_wait_group<1>();
      release_pixels(smem, x_before, lane);
      release_weights(smem, weights_before, lane);
    }
    x_before = at.x.stage;
    weights_before = at.weights.stage;
    at.x.next();
    at.next_weights();
  }
  wgmma_wait_group<0>();
  release_pixels(smem, x_before, lane);
  release_weights(smem, weights_before, lane);
#pragma unroll
  for (int part = 0; part < MID_BLOCKS; part++) fence_operand(d[part]);
}

// 3x3: each tap reads the first result at another pixel.
template <int COUNT>
DEVICE void multiply_second(float (&d)[MID_BLOCKS][COUNT], ReadPosition& at, const SmemLayout& smem, int consumer,
                            int lane) {
  int weights_before = 0;
  u32 row = smem.first + consumer * ROWS * PITCH * 128;
  for (int r = 0; r < 3; r++, row += PITCH * 128)
    for (int s = 0; s < 3; s++) {
#pragma unroll
      for (int block = 0; block < MID_BLOCKS; block++) {
        u32 filters = wait_for_weights(at, smem), pixels = row + s * 128 + block * FIRST_BYTES;
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < MID_BLOCKS; part++) multiply_block(d[part], filters + part * 8192, pixels);
        wgmma_commit_group();
        if (r + s + block > 0) {
          wgmma_wait_group<1>();
          release_weights(smem, weights_before, lane);
        }
        weights_before = at.weights.stage;
        at.next_weights();
      }
    }
  wgmma_wait_group<0>();
  release_weights(smem, weights_before, lane);
#pragma unroll
  for (int part = 0; part < MID_BLOCKS; part++) fence_operand(d[part]);
}

// 1x1: starts the products of 64 filters of the last convolution; the stage of their weights.
template <int COUNT>
DEVICE int start_last(float (&d)[COUNT], ReadPosition& at, const SmemLayout& smem, int consumer,
                      const float* __restrict__ bias, int warp, int lane) {
  int stage = at.weights.stage;
  begin_sums(d, bias, warp, lane);
  u32 filters = wait_for_weights(at, smem), pixels = smem.second + consumer * OWN_BYTES;
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < MID_BLOCKS; block++)
    multiply_block(d, filters + block * 8192, pixels + block * SECOND_BYTES);
  wgmma_commit_group();
  at.next_weights();
  return stage;
}
