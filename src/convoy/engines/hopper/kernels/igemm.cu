// Convolution as an implicit GEMM: y[pixels, k] = x[pixels, taps and channels] * weight^T. Persistent and
// warp-specialised; TMA's im2col mode gathers the pixels of a filter tap, so that a tile may have any length and cross
// rows and images.
//
//   a tile of y: TILE_M pixels x TILE_N filters       one stage of the ring (an iteration: one tap, 128 bytes of channels)
//
//               TILE_N filters                          +---------------------------+
//             +----------------+                        | A: TILE_M pixels          |  rows of 128 bytes,
//   pixels    | warpgroup 0    | 64 or 128 rows         +---------------------------+  128-byte swizzle
//             +----------------+                        | B: TILE_N filters         |
//             | warpgroup 1    |                        +---------------------------+
//             +----------------+                        x STAGES
//
//   warpgroup 0 (copies)       thread 0: pixels (im2col) ---+--> full[stage]  ---> multiplying warpgroups wait
//                              thread 32: filters ----------+
//   warpgroups 1..CONSUMERS    wgmma; one iteration later ------> empty[stage] ---> both copying threads wait
//
// PINGPONG: each multiplying warpgroup has tiles of its own; turns[i] lets warpgroup i begin its tile when the one
// before has waited for all of its stages, and one stores while the other multiplies. CLUSTER 2: two blocks have the
// same filters and different pixels; each copies half of the filters to both, so empty[stage] counts both. SPLIT: the
// blocks of a cluster share a tile, each with some of the iterations; they exchange their sums through the ring, and
// each stores a part of the tile. Work items are ordered filters first: those that run at one time share their pixels.
#include <igemm/igemm_epilogue.cuh>
#include <wgmma.cuh>
#include <wgmma_instructions.cuh>

DEVICE void produce_pixels(const TensorMap* x, u32 stages, u32 full, u32 empty, u32 rank, int first, int step,
                           const Sizes& sizes) {
  Ring ring = {0, 0};
  int count = count_of(rank, sizes);
  for (int work = first; work < sizes.work_items; work += step) {
    int tile = fast_div(work, sizes.tiles_n_divisor);
    int pixel = (CLUSTER == 1 ? tile : tile * CLUSTER + (int)rank) * TILE_M;
    int image = fast_div(pixel, sizes.pq_divisor), rest = pixel - image * sizes.pq;
    int line = fast_div(rest, sizes.q_divisor);
    int h = line * sizes.stride_h - sizes.pad_h, w = (rest - line * sizes.q) * sizes.stride_w - sizes.pad_w;
    Place place;
    place.begin(rank, sizes);
    for (int i = 0; i < count; i++) {
      mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      u32 bar = full + 8 * ring.stage;
      mbarrier_arrive_expect_tx(bar, A_BYTES);
      tma_load_im2col(stages + ring.stage * STAGE_BYTES, x, bar, place.c, w, h, image, (u16)place.right,
                      (u16)place.down);
      place.next(sizes);
      ring.next();
    }
  }
}

DEVICE void produce_filters(const TensorMap* weight, u32 stages, u32 full, u32 empty, u32 rank, int first, int step,
                            const Sizes& sizes) {
  Ring ring = {0, 0};
  int count = count_of(rank, sizes);
  for (int work = first; work < sizes.work_items; work += step) {
    int tile = fast_div(work, sizes.tiles_n_divisor);
    int n0 = (work - tile * sizes.tiles_n) * TILE_N;
    Place place;
    place.begin(rank, sizes);
    for (int i = 0; i < count; i++) {
      u32 b = stages + ring.stage * STAGE_BYTES + A_BYTES;
      mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      u32 bar = full + 8 * ring.stage;
      mbarrier_arrive_expect_tx(bar, TILE_N * 128);
      if constexpr (CLUSTER == 1) {
        tma_load_3d(b, weight, bar, place.c, place.tap, n0);
      } else {
        int own = (int)rank * SHARE;
        tma_load_3d_multicast(b + rank * SHARE * 128, weight, bar, place.c, place.tap, n0 + own, (1 << CLUSTER) - 1);
      }
      place.next(sizes);
      ring.next();
    }
  }
  if (CLUSTER > 1) wait_until_empty(ring, empty);
}

// The weight was written before the kernel in front began: the first tile's filters are brought to L2 while that
// kernel still runs.
DEVICE void prefetch_filters(const TensorMap* weight, u32 rank, int first, const Sizes& sizes) {
  int count = count_of(rank, sizes), tile = fast_div(first, sizes.tiles_n_divisor);
  Place place;
  place.begin(rank, sizes);
  if (first >= sizes.work_items) return;
  for (int i = 0; i < count; i++) {
    tma_prefetch_3d(weight, place.c, place.tap, (first - tile * sizes.tiles_n) * TILE_N);
    place.next(sizes);
  }
}

// One arrival a warp: a warp may end its products before the others of its group have begun to wait for the stage.
DEVICE void release(u32 bar, int lane) {
  if constexpr (CLUSTER == 1) {
    if (lane == 0) mbarrier_arrive(bar);
  } else {
    if (lane < CLUSTER) mbarrier_arrive_cluster(bar, lane);
  }
}

DEVICE void consume(u32 stages, u32 full, u32 empty, u32 turns, u32 arrived, u32 rank, int consumer, int first,
                    int step, Value* __restrict__ y, const Value* __restrict__ residual,
                    const Value* __restrict__ bias, const Sizes& sizes) {
  Ring ring = {0, 0};
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, turn = 0, own = 0,
      count = count_of(rank, sizes);
  for (int work = first; work < sizes.work_items; work += step) {
    if (PINGPONG && turn++ % CONSUMERS != consumer) {
      ring.skip(count);
      continue;
    }
    int tile = fast_div(work, sizes.tiles_n_divisor), n0 = (work - tile * sizes.tiles_n) * TILE_N;
    float d[PARTS][TILE_N / 2];
    begin(d, n0, lane % 4, bias, rank, sizes);
    int row0 = PINGPONG ? 0 : consumer * WARPGROUP_M;
    // A wait knows a stage's round by its parity alone: this group begins when the one before has waited for all of
    // its own stages.
    if constexpr (PINGPONG) mbarrier_wait(turns + 8 * consumer, (own++ & 1) ^ (consumer == 0));
    u32 before = 0;
    for (int i = 0; i < count; i++) {
      u32 a = stages + ring.stage * STAGE_BYTES, b = a + A_BYTES;
      mbarrier_wait(full + 8 * ring.stage, ring.phase);
      wgmma_fence();
#pragma unroll
      for (int step_k = 0; step_k < 4; step_k++)
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          u64 rows = smem_desc_sw128(a + (row0 + part * 64) * 128 + step_k * 32);
          wgmma(d[part], rows, smem_desc_sw128(b + step_k * 32));
        }
      wgmma_commit_group();
      if (i > 0) {  // the products before these have ended: their stage is free
        wgmma_wait_group<1>();
        release(before, lane);
      }
      before = empty + 8 * ring.stage;
      ring.next();
    }
    if constexpr (PINGPONG) {
      if (lane == 0) mbarrier_arrive(turns + 8 * ((consumer + 1) % CONSUMERS));
    }
    wgmma_wait_group<0>();
    if (SPLIT == 1) release(before, lane);  // of a split nothing else is loaded: a cluster has one tile
    int pixel = (CLUSTER == 1 ? tile : tile * CLUSTER + (int)rank) * TILE_M + row0 + warp * 16 + lane / 4;
    if constexpr (SPLIT > 1) {
      cluster_sync_relaxed();  // all have multiplied: nobody reads the ring any more
      send_sums(d, stages, arrived, rank, consumer, thread);
      if (inbox_bytes(rank)) mbarrier_wait_acquire_cluster(arrived, 0);
    }
#pragma unroll
    for (int from = 0; from < ITEMS; from += BATCH) {
      Residual added[BATCH];
      if constexpr (HAS_RESIDUAL) {
#pragma unroll
        for (int item = from; item < from + BATCH && item < ITEMS; item++)
          if (SPLIT == 1 || item % SPLIT == rank)
            load(added[item - from], item % WIDTHS, pixel + row_of(item), n0, lane % 4, residual, sizes);
      }
#pragma unroll
      for (int item = from; item < from + BATCH && item < ITEMS; item++) {
        if (SPLIT > 1 && item % SPLIT != rank) continue;
        float v[8];
        take(v, d, item);
        if constexpr (SPLIT > 1) add_sums(v, stages, rank, consumer, item / SPLIT, thread);
        store(v, added[item - from], item % WIDTHS, pixel + row_of(item), n0, lane % 4, y, sizes);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
igemm(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, Value* __restrict__ y,
      const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes sizes) {
  SHARED_MEMORY;
  u32 stages = opaque((shared_address(shared_memory) + 1023u) & ~1023u);
  u32 full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES, turns = empty + 8 * STAGES;
  u32 arrived = turns + 8 * CONSUMERS, rank = CLUSTER * SPLIT == 1 ? 0 : cluster_ctarank();
  if (threadIdx.x == 0) {
    prefetch_tensormap(&x);
    prefetch_tensormap(&weight);
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(full + 8 * i, 2);
      mbarrier_init(empty + 8 * i, (PINGPONG ? 4 : 4 * CONSUMERS) * CLUSTER);
    }
    for (int i = 0; i < CONSUMERS; i++) mbarrier_init(turns + 8 * i, 4);
    if constexpr (SPLIT > 1) {
      mbarrier_init(arrived, 1);
      mbarrier_arrive_expect_tx(arrived, inbox_bytes(rank));
    }
    fence_mbarrier_init();
  }
  if (CLUSTER == 1) __syncthreads(); else cluster_sync_relaxed();
  int group = threadIdx.x / 128, first = blockIdx.x / (CLUSTER * SPLIT), step = gridDim.x / (CLUSTER * SPLIT);
  if (group == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 64) prefetch_filters(&weight, rank, first, sizes);
    griddep_wait();
    griddep_launch_dependents();
    if (threadIdx.x == 0) produce_pixels(&x, stages, full, empty, rank, first, step, sizes);
    if (threadIdx.x == 32) produce_filters(&weight, stages, full, empty, rank, first, step, sizes);
    if (SPLIT > 1) cluster_sync_relaxed();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    griddep_wait();
    griddep_launch_dependents();
    consume(stages, full, empty, turns, arrived, rank, group - 1, first, step, y, residual, bias, sizes);
  }
}
