// A residual block of three convolutions as one kernel: y = act(conv1x1(act(conv3x3(act(conv1x1(x))))) + residual), stride 1.
// Filters are the rows of every product, pixels its columns. Nothing between the convolutions leaves shared memory.
//
//   an item: some rows of an image, all columns, in passes of PASS_ROWS rows from top to bottom
//
//   x, rows below the window       first result, the window                second result        y
//   +------------------+    1x1    +------------------------+             +-------------+      +------------------+
//   | PASS_ROWS        | --------> | 2 rows of the last pass |    3x3     | PASS_ROWS   | 1x1  | PASS_ROWS        |
//   | in the ring      |           | PASS_ROWS new rows      | ---------> |             | ---> | in the ring      |
//   +------------------+           +------------------------+             +-------------+ + residual -----------+
//
// A pass computes the first convolution once for each row: the window keeps two rows. Only where an item begins,
// a pass of the first convolution alone computes them. Rows of the window are WIDTH + 1 pixels apart, the first of them
// zero, and a tap is the same product from another pixel on. Rows outside the image are zeros in the window.
//
//   warpgroup 0        thread 0: pixels by TMA, for each pass all channels of x, then those of the residual -> x_full
//                      thread 32: weights, chunk after chunk in the order of the products; or all of them once
//   warpgroups 1..     wgmma, ROWS rows each; they meet where one reads what another has stored
//
// The ring's stages of the residual become those of y: sums are added in place, and a TMA copy takes them to memory.
// AHEAD: products of the next 64 channels of y run while these are stored. CLUSTER: each block copies a share of every
// chunk of weights to all blocks. Parameters: bottleneck_config.cuh.
#include <bottleneck/bottleneck_producer.cuh>
#include <bottleneck/bottleneck_products.cuh>
#include <bottleneck/bottleneck_store.cuh>

// Stages of y that are being copied are given back one block of channels later.
DEVICE void return_stage(const SmemLayout& smem, int stage) {
  bulk_wait_group_read();
  for (int i = 0; i < 4; i++) mbarrier_arrive(smem.x_empty + 8 * stage);
}

// What the blocks of 64 channels of y have in common.
struct LastConvolution {
  const float* bias;
  const TensorMap* y;
  int row, image, consumer, thread;
  int given_back;  // the stage that is being copied to y

  template <int COUNT>
  DEVICE_MEMBER int start(float (&d)[COUNT], int block, ReadPosition& at, const SmemLayout& smem) {
    return start_last(d, at, smem, consumer, bias + block * 64, thread / 32, thread % 32);
  }
  // Stores the sums of `block`; all but LEFT groups of products have to end before.
  template <int LEFT, int COUNT>
  DEVICE_MEMBER void store(float (&d)[COUNT], int block, int weights, ReadPosition& at, const SmemLayout& smem) {
    wgmma_wait_group<LEFT>();
    release_weights(smem, weights, thread % 32);
    fence_operand(d);
    u32 pixels = wait_for_pixels(at, smem);
    store_last(d, pixels, consumer, thread / 32, thread % 32);
    fence_proxy_async();
    warpgroup_sync(consumer);
    if (thread == 0) {
      if (block > 0) return_stage(smem, given_back);
      tma_store_4d(y, pixels + consumer * OWN_BYTES, block * 64, 0, row + consumer * ROWS, image);
      bulk_commit_group();
    }
    given_back = at.x.stage;
    at.x.next();
  }
};

DEVICE void last_convolution(LastConvolution& last, ReadPosition& at, const SmemLayout& smem) {
  float d[OWN_PIXELS / 2];
  if constexpr (AHEAD) {
    float other[OWN_PIXELS / 2];
    int weights = last.start(d, 0, at, smem);
    // Unrolled: around a loop's end, ptxas finds no registers for products that are under way
#pragma unroll
    for (int pair = 0; pair < (OUT_BLOCKS - 1) / 2; pair++) {
      int second = last.start(other, 2 * pair + 1, at, smem);
      last.store<1>(d, 2 * pair, weights, at, smem);
      weights = last.start(d, 2 * pair + 2, at, smem);
      last.store<1>(other, 2 * pair + 1, second, at, smem);
    }
    if constexpr (OUT_BLOCKS % 2 == 0) {
      int second = last.start(other, OUT_BLOCKS - 1, at, smem);
      last.store<1>(d, OUT_BLOCKS - 2, weights, at, smem);
      last.store<0>(other, OUT_BLOCKS - 1, second, at, smem);
    } else {
      last.store<0>(d, OUT_BLOCKS - 1, weights, at, smem);
    }
  } else {
#pragma unroll 1
    for (int block = 0; block < OUT_BLOCKS; block++) {
      int weights = last.start(d, block, at, smem);
      last.store<0>(d, block, weights, at, smem);
    }
  }
  if (last.thread == 0) return_stage(smem, last.given_back);
}

DEVICE void consume(const SmemLayout& smem, int consumer, int first, int step, const float* __restrict__ bias,
                    const TensorMap* y, const Sizes& sizes) {
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  ReadPosition at = {};
  clear_first(smem, consumer * 128 + thread);
  for (int round = first; round < sizes.rounds; round += step) {
    Item item = item_of(round, smem.rank, sizes);
    for (int pass = -1; pass < sizes.passes; pass++) {
      int row = item.row + pass * PASS_ROWS;
      at.begin_pass();
      {
        float d[MID_BLOCKS][OWN_PIXELS / 2];
#pragma unroll
        for (int part = 0; part < MID_BLOCKS; part++) begin_sums(d[part], bias + part * 64, warp, lane);
        multiply_first(d, at, smem, consumer, lane);
        consumers_sync<CONSUMERS>();  // the window has moved
        store_first(d, smem, consumer, row + 1, sizes.height, warp, lane);
      }
      fence_proxy_async();
      consumers_sync<CONSUMERS>();
      if (pass >= 0) {
        float d[MID_BLOCKS][SPAN / 2];
#pragma unroll
        for (int part = 0; part < MID_BLOCKS; part++)
          begin_sums(d[part], bias + (MID_BLOCKS + part) * 64, warp, lane);
        multiply_second(d, at, smem, consumer, lane);
        store_second(d, smem, consumer, warp, lane);
        fence_proxy_async();
        consumers_sync<CONSUMERS>();  // nobody reads the window any more
      }
      carry_rows(smem, consumer * 128 + thread);
      fence_proxy_async();
      if (pass >= 0) {
        LastConvolution last = {bias + 2 * MID_BLOCKS * 64, y, row, item.image, consumer, thread, 0};
        last_convolution(last, at, smem);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
    bottleneck(const __grid_constant__ TensorMap x, const unsigned char* __restrict__ weights,
               const float* __restrict__ bias, const __grid_constant__ TensorMap residual,
               const __grid_constant__ TensorMap y, const __grid_constant__ Sizes sizes) {
  SHARED_MEMORY;
  SmemLayout smem;
  smem.place(opaque((shared_address(shared_memory) + 1023u) & ~1023u));
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; i++) {
      mbarrier_init(smem.x_full + 8 * i, 1);
      mbarrier_init(smem.x_empty + 8 * i, X_ARRIVALS);
    }
    for (int i = 0; i < WEIGHT_STAGES; i++) {
      mbarrier_init(smem.weights_full + 8 * i, 1);
      mbarrier_init(smem.weights_empty + 8 * i, 4 * CONSUMERS * CLUSTER);
    }
    fence_mbarrier_init();
    prefetch_tensormap(&x);
    if (HAS_RESIDUAL) prefetch_tensormap(&residual);
    prefetch_tensormap(&y);
  }
  if (CLUSTER == 1) __syncthreads(); else cluster_sync_relaxed();
  int group = threadIdx.x / 128, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (group == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 32) produce_weights(weights, smem, first, step, sizes);
    if (threadIdx.x == 0) {
      griddep_wait();
      griddep_launch_dependents();
      produce_pixels(&x, &residual, smem, first, step, sizes);
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddep_wait();
    consume(smem, CONSUMERS == 1 ? 0 : (int)warp_uniform(group - 1), first, step, bias, &y, sizes);
  }
}
