// Convolution as an implicit GEMM with A and B swapped: y^T[k, pixels] = weight[k, taps and channels] * x^T. The
// weight is wgmma's first operand, so that few filters or few pixels still fill the 64 rows of a product. Persistent
// and warp-specialised.
//
//   a tile of y^T: FILTERS x TILE_N pixels            one stage of the ring (an iteration: DEPTH blocks of one tap, 128 bytes of channels)
//
//               TILE_N pixels                           +-----------------------------+
//             +----------------+                        | DEPTH x TILE_N pixels       |  TMA, im2col mode; with a halo not here:
//   filters   | warpgroup 0    | 64 or 128 rows         +-----------------------------+  a box of pixels is copied once for all nine taps
//             +----------------+                        | DEPTH x FILTERS filters     |  one bulk copy of packed weights
//             | warpgroup 1    |                        +-----------------------------+
//             +----------------+                        x STAGES                            [halo boxes x HALO_STAGES] [results] [inbox]
//
//   warpgroup 0 (copies)      threads 0 and 64: pixels, every other iteration ---+--> full[stage]  ---> multiplying warpgroups wait
//                             thread 32: weights --------------------------------+
//                             (halo: thread 0 --> halo_full[box], nine taps each)
//   warpgroups 1..CONSUMERS   wgmma; PENDING iterations later --------------------> empty[stage] ---> all copying threads wait
//                             then bias, residual, activation, store
//
// CLUSTER: blocks have the same pixels and different filters; each copies its share of the pixels to all, so
// empty[stage] counts all blocks. SPLIT: the blocks of a cluster share a tile, each with some of the iterations; they
// exchange their sums (cluster_reduce.cuh), and each stores the items that it owns. Halo: a tile is some rows of one
// image, HALO_PITCH columns each, of which the last ones are padding; pixels beyond its rows make their number a
// multiple of eight. SPARSE: a block is two sparse products. PLANES: a block is twelve products, body and correction
// (split_fp32). Parameters: igemm_swap_ab_config.cuh.
#include <igemm/igemm_swap_ab_fp32_store.cuh>
#include <igemm/igemm_swap_ab_producer.cuh>
#include <igemm/igemm_swap_ab_products.cuh>
#include <igemm/igemm_swap_ab_split_store.cuh>
#include <igemm/igemm_swap_ab_staged_store.cuh>

// The kernel's arguments that its parameters decide.
#if FP32_RESULTS
#define SCALE_ARGUMENTS , const float* __restrict__ x_scale, const float* __restrict__ weight_scales
#define GIVEN_SCALES , x_scale, weight_scales
#else
#define SCALE_ARGUMENTS
#define GIVEN_SCALES
#endif

#if WEIGHT_LAYOUT
#define WEIGHT_ARGUMENT const __grid_constant__ TensorMap weights
#define GIVEN_WEIGHTS &weights
#else
#define WEIGHT_ARGUMENT const unsigned char* weights
#define GIVEN_WEIGHTS weights
#endif

#if STAGED_STORE
#define RESULT_MAP_ARGUMENTS , const __grid_constant__ TensorMap y_map, const __grid_constant__ TensorMap residual_map
#define GIVEN_RESULT_MAPS &y_map, &residual_map
#else
#define RESULT_MAP_ARGUMENTS
#define GIVEN_RESULT_MAPS nullptr, nullptr
#endif

DEVICE void consume(const SmemLayout& smem, int consumer, int first, int step, Value* __restrict__ y,
                    const Value* __restrict__ residual, const Value* __restrict__ bias, const TensorMap* y_map,
                    const TensorMap* residual_map, const Sizes& sizes SCALE_ARGUMENTS) {
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, count = count_of(smem.rank, sizes);
  ReadPosition at = {}, done = {};
#if STAGED_STORE
  u32 staged = smem.staged + consumer * PARTS * TILE_N * 128, given = smem.given + 8 * consumer, round = 0;
#endif
  for (int work = first; work < sizes.work_items; work += step) {
    int tile = fast_div(work, sizes.groups_divisor), pixel0 = tile * TILE_N, group = work - tile * sizes.groups;
    if (CLUSTER > 1) group = group * CLUSTER + (int)smem.rank;
    int filter0 = group * FILTERS + consumer * WARPGROUP_M + warp * 16;
    Sums sums;
    // Of a split, the first block adds the bias: for the others k is 0. Planes get their bias at the end.
    begin(sums.d, filter0, lane, PLANES == 1 && (SPLIT == 1 || smem.rank == 0) ? sizes.k : 0, bias);
#if FP32_RESULTS
    if constexpr (PLANES == 2) begin_correction(sums, filter0, lane, bias);
#endif
    if (work == first) griddep_wait();
    Corner to = corner(work, sizes);
    to.filter = group * FILTERS + consumer * WARPGROUP_M;
#if STAGED_STORE == 1
    if constexpr (SPLIT == 1 && HAS_RESIDUAL) {
      if (thread == 0) {
        bulk_wait_group_read();
        load_residual(staged, given, to, sizes.k, residual_map);
      }
    }
#endif
    if constexpr (PLANES == 2) multiply_planes(sums, at, done, smem, count, consumer, thread, lane);
    else multiply_tile(sums, at, done, smem, count, consumer, thread, lane);
#if STAGED_STORE == 2
    consumers_sync<CONSUMERS>();  // nobody reads the ring any more, and nothing comes to it
    if constexpr (SPLIT == 1 && HAS_RESIDUAL) {
      if (thread == 0) load_residual(staged, given, to, sizes.k, residual_map);
    }
#endif
#if FP32_RESULTS
    Finish finish[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      finish[part] = finish_of(filter0 + part * 64 + lane / 4, {x_scale, weight_scales}, bias, sizes);
#endif
    if constexpr (SPLIT > 1) {
      cluster_wait();  // the others' barriers are initialised
      Reduce::send(sums.d, smem.sums, smem.arrived, smem.rank, consumer, thread);
#if FP32_RESULTS
      store_owned_fp32(sums.d, smem, consumer, thread, {pixel0, filter0 + lane / 4, to}, finish, sizes, y, residual);
#else
      store_owned(sums.d, smem, consumer, thread, work, pixel0, filter0, sizes, y, residual);
#endif
    } else {
      while (done.ring.stage != at.ring.stage) done.release_and_next(smem, lane);
    }
#if STAGED_STORE
    if constexpr (SPLIT > 1) {
      copy_owned(smem, consumer, thread, to, sizes.k, y_map);
    } else {
      if constexpr (HAS_RESIDUAL) {
        // The residual is there, and so the last tile's store has read its shared memory
        mbarrier_wait(given, round++ & 1);
      } else if (round++) {
        if (thread == 0) bulk_wait_group_read();
        warpgroup_sync(consumer);
      }
      store_staged(sums.d, staged, consumer, thread, to, sizes.k, y_map);
    }
#else
    if constexpr (SPLIT == 1) {
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
#if FP32_RESULTS
        store_fp32(sums.d[part], {pixel0, filter0 + part * 64 + lane / 4, to}, lane, finish[part], sizes, y, residual);
#else
        store_sums(sums.d[part], pixel0, filter0 + part * 64, lane, sizes.pixels, sizes.k, sizes.pitch, y, residual);
#endif
      }
    }
#endif
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), MIN_BLOCKS_PER_SM)
    igemm_swap_ab(const __grid_constant__ TensorMap x, WEIGHT_ARGUMENT, Value* __restrict__ y,
                  const Value* __restrict__ residual, const Value* __restrict__ bias,
                  const __grid_constant__ Sizes sizes RESULT_MAP_ARGUMENTS SCALE_ARGUMENTS) {
  SHARED_MEMORY;
  SmemLayout smem;
  smem.place(opaque((shared_address(shared_memory) + 1023u) & ~1023u));
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(smem.full + 8 * i, HAS_HALO ? 1 : 2);
      mbarrier_init(smem.empty + 8 * i, 4 * CONSUMERS * CLUSTER);
    }
#pragma unroll
    for (int i = 0; i < HALO_STAGES; i++) {
      mbarrier_init(smem.halo_full + 8 * i, 1);
      mbarrier_init(smem.halo_empty + 8 * i, 4 * CONSUMERS);
    }
    if constexpr (STAGED_STORE && HAS_RESIDUAL && SPLIT == 1) {
#pragma unroll
      for (int i = 0; i < CONSUMERS; i++) mbarrier_init(smem.given + 8 * i, 1);
    }
    if constexpr (SPLIT > 1) {
      mbarrier_init(smem.arrived, 1);
      mbarrier_arrive_expect_tx(smem.arrived, Reduce::inbox_bytes(smem.rank));
    }
    fence_mbarrier_init();
  }
  if (threadIdx.x == 64) prefetch_tensormap(&x);
#if STAGED_STORE
  if (threadIdx.x == 96) {
    prefetch_tensormap(&y_map);
    if (HAS_RESIDUAL && SPLIT == 1) prefetch_tensormap(&residual_map);
  }
#endif
  if (CLUSTER == 1) __syncthreads(); else cluster_sync_relaxed();
  if constexpr (SPLIT > 1) cluster_arrive_relaxed();
  int group = threadIdx.x / 128, first = blockIdx.x / (CLUSTER * SPLIT), step = gridDim.x / (CLUSTER * SPLIT);
  if (group == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if constexpr (HAS_HALO) {
      if (threadIdx.x == 0) produce_halos(&x, smem, first, step, sizes);
    } else {
      if (threadIdx.x == 0 || (COPIERS == 2 && threadIdx.x == 64))
        produce_pixels(&x, smem, threadIdx.x / 64, first, step, sizes);
    }
    if (threadIdx.x == 32) produce_weights(GIVEN_WEIGHTS, smem, first, step, sizes);
    if constexpr (SPLIT > 1) cluster_wait();
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(smem, CONSUMERS == 1 ? 0 : (int)warp_uniform(group - 1), first, step, y, residual, bias, GIVEN_RESULT_MAPS,
            sizes GIVEN_SCALES);
  }
#if STAGED_STORE
  bulk_wait_group_read();  // here and not in the branch above, where ptxas would not count on the branch's registers
#endif
}
