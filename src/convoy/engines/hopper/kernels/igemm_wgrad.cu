// The gradient of a convolution's weight as an implicit GEMM: dweight[k, tap, c] = sum over pixels of dy[pixel, k] *
// x[pixel at tap, c].
//
//   a tile of dweight: filters x columns           one stage of the ring (an iteration of PIXELS pixels)
//
//              TILE_N columns                        dy: FILTERS / 64 boxes      x: TILE_N / 64 boxes
//              (64 channels of a tap each)           +---------+---------+       +---------+---------+
//            +-----------+-----------+               | PIXELS x 64 filters     | PIXELS x 64 channels
//   FILTERS  | warpgroup 0: 64 or 128 rows           | (as they lie in memory, 128 bytes a row)
//            +-----------+-----------+               +---------+---------+       +---------+---------+
//            | warpgroup 1           |
//            +-----------+-----------+               wgmma transposes both operands: sums over the rows of a box
//
//   warpgroup 0 (copies)      thread 0: x, im2col mode ---+--> full[stage]  ---> consumers wait
//                             thread 32: dy, boxes -------+
//   warpgroups 1..CONSUMERS   wgmma, then store ----------> empty[stage] ---> both copying threads wait
//
// Zeros take the place of all that lies outside the tensors. With SPLIT > 1, the blocks of a cluster share a tile,
// each with some of the pixels: when all have multiplied, they exchange their sums through the ring
// (cluster_reduce.cuh), and each stores a part of the tile. With FP32_SHARES, results are fp32 sums of several
// clusters for one tile, which another kernel adds.
#include <igemm/igemm_wgrad_layout.cuh>
#include <lane_transpose.cuh>
#include <tma.cuh>
#include <wgmma_instructions.cuh>

// Work items are ordered filters first, then columns: those that run at one time share their pixels.
DEVICE void produce_x(const TensorMap* x, const SmemLayout& smem, int first, int step, const Sizes& sizes) {
  Ring ring = {0, 0};
  griddep_wait();
  // Not earlier: with three kernels at one time, some multiprocessors would get two blocks of one
  griddep_launch_dependents();
  for (int work = first; work < sizes.work_items; work += step) {
    Tile tile(work, smem, sizes);
    Column at[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) at[i].find(tile.column + i, sizes);
    int held = sizes.columns - tile.column < COLUMNS ? sizes.columns - tile.column : COLUMNS;
    for (int i = 0; i < tile.count; i++) {
      u32 to = smem.stages + ring.stage * STAGE_BYTES + FILTERS / 64 * BOX_BYTES, bar = smem.full + 8 * ring.stage;
      int pixel = (tile.first + i) * PIXELS;
      int image, h, w;
      if constexpr (!X_HAS_PIXELS_OF_DY) {
        image = fast_div(pixel, sizes.pq_divisor);
        int rest = pixel - image * sizes.pq, line = fast_div(rest, sizes.q_divisor);
        h = line * sizes.stride_h - sizes.pad_h;
        w = (rest - line * sizes.q) * sizes.stride_w - sizes.pad_w;
      }
      mbarrier_wait(smem.empty + 8 * ring.stage, ring.phase ^ 1);
      mbarrier_arrive_expect_tx(bar, held * BOX_BYTES);
#pragma unroll
      for (int column = 0; column < COLUMNS; column++)
        if (column < held) {
          const Column& from = at[column];
          u32 box = to + column * BOX_BYTES;
          if constexpr (X_HAS_PIXELS_OF_DY) tma_load_4d(box, x, bar, from.c, pixel, 0, 0);
          else tma_load_im2col(box, x, bar, from.c, w, h, image, (u16)from.right, (u16)from.down);
        }
      ring.next();
    }
  }
}

DEVICE void produce_dy(const TensorMap* dy, const SmemLayout& smem, int first, int step, const Sizes& sizes) {
  Ring ring = {0, 0};
  griddep_wait();
  for (int work = first; work < sizes.work_items; work += step) {
    Tile tile(work, smem, sizes);
    for (int i = 0; i < tile.count; i++) {
      u32 to = smem.stages + ring.stage * STAGE_BYTES, bar = smem.full + 8 * ring.stage;
      mbarrier_wait(smem.empty + 8 * ring.stage, ring.phase ^ 1);
      mbarrier_arrive_expect_tx(bar, FILTERS / 64 * BOX_BYTES);
#pragma unroll
      for (int part = 0; part < FILTERS / 64; part++)
        tma_load_4d(to + part * BOX_BYTES, dy, bar, tile.filter + part * 64, (tile.first + i) * PIXELS, 0, 0);
      ring.next();
    }
  }
}

// Sixteen channels of a lane's two filters, eight apart: an item of a warp. Half values: lanes exchange until each has
// sixteen bytes of one filter, and two lanes have a sector of 32 bytes.
DEVICE void store_item(const float* d, int item, int filter, const Tile& tile, int lane, const Sizes& sizes,
                       Value* __restrict__ dweight) {
  Column at;
  int column = tile.column + item % Reduce::PAIRS / 4;
  at.find(column, sizes);
  int c = at.c + item % Reduce::PAIRS % 4 * 16;
  if constexpr (FP32_SHARES) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int row = filter + i % 2 * 8, from = c + i / 2 * 8 + lane % 4 * 2;
      if (column >= sizes.columns || row >= sizes.k || from >= sizes.c) continue;
      long long place = (long long)(tile.share * sizes.k + row) * sizes.row + at.tap * sizes.c + from;
      *(float2*)(dweight + place) = make_float2(d[2 * i], d[2 * i + 1]);
    }
  } else {
    u32 words[4] = {pack_pair<BFLOAT>(d[0], d[1]), pack_pair<BFLOAT>(d[4], d[5]), pack_pair<BFLOAT>(d[2], d[3]),
                    pack_pair<BFLOAT>(d[6], d[7])};
    transpose_four_lanes(words, lane % 4);
    filter += lane % 4 / 2 * 8;
    c += lane % 2 * 8;
    if (column < sizes.columns && filter < sizes.k && c < sizes.c)
      *(uint4*)(dweight + (long long)filter * sizes.row + at.tap * sizes.c + c) =
          make_uint4(words[0], words[1], words[2], words[3]);
  }
}

DEVICE void consume(const SmemLayout& smem, int consumer, int first, int step, const Sizes& sizes,
                    Value* __restrict__ dweight) {
  int thread = threadIdx.x % 128, lane = thread % 32;
  Ring ring = {0, 0};
  griddep_wait();  // which may still read what is written here
  for (int work = first; work < sizes.work_items; work += step) {
    Tile tile(work, smem, sizes);
    float d[PARTS][TILE_N / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < TILE_N / 2; i++) d[part][i] = 0.f;
    u32 before = 0;  // the stage whose products may still be under way
    for (int i = 0; i < tile.count; i++) {
      u32 rows = smem.stage_word + ring.stage * (STAGE_BYTES / 16), columns = rows + FILTERS / 64 * BOX_WORDS;
      rows += consumer * PARTS * BOX_WORDS;
      mbarrier_try_then_wait(smem.full + 8 * ring.stage, ring.phase);
      wgmma_fence();
#pragma unroll
      for (int step16 = 0; step16 < PIXELS / 16; step16++)
#pragma unroll
        for (int part = 0; part < PARTS; part++) {  // 16 rows of 128 bytes each
          u64 a = smem_desc_transposed_of(rows + part * BOX_WORDS + step16 * 128);
          wgmma_transposed_ab(d[part], a, smem_desc_transposed_of(columns + step16 * 128));
        }
      wgmma_commit_group();
      wgmma_wait_group<1>();
      // One arrival a warp: a warp may end its products before the others of its group have begun to wait for the
      // stage.
      if (i && lane == 0) mbarrier_arrive(before);
      before = smem.empty + 8 * ring.stage;
      ring.next();
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int part = 0; part < PARTS; part++) fence_operand(d[part]);
    int filter = tile.filter + consumer * WARPGROUP_M + thread / 32 * 16 + lane / 4;
    if constexpr (SPLIT > 1) {
      // All blocks have multiplied: their rings are idle, and their barriers are initialised.
      cluster_arrive_relaxed();
      cluster_wait();
      Reduce::send(d, smem.stages, smem.arrived, smem.rank, consumer, thread);
      if (Reduce::inbox_bytes(smem.rank)) mbarrier_wait_acquire_cluster(smem.arrived, 0);
#pragma unroll
      for (int item = 0; item < Reduce::ITEMS; item++) {
        if (item % SPLIT != smem.rank) continue;
        int part = item / Reduce::PAIRS;
        Reduce::add(d[part], item, smem.stages, smem.rank, consumer, thread);
        store_item(&d[part][item % Reduce::PAIRS * 8], item, filter + part * 64, tile, lane, sizes, dweight);
      }
    } else {
      if (tile.count && lane == 0) mbarrier_arrive(before);
#pragma unroll
      for (int item = 0; item < Reduce::ITEMS; item++) {
        int part = item / Reduce::PAIRS;
        store_item(&d[part][item % Reduce::PAIRS * 8], item, filter + part * 64, tile, lane, sizes, dweight);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), MIN_BLOCKS_PER_SM)
igemm_wgrad(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy, Value* __restrict__ dweight,
            const __grid_constant__ Sizes sizes) {
  SHARED_MEMORY;
  SmemLayout smem;
  smem.place(opaque((shared_address(shared_memory) + 1023u) & ~1023u));
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(smem.full + 8 * i, 2);
      mbarrier_init(smem.empty + 8 * i, 4 * CONSUMERS);
    }
    if constexpr (SPLIT > 1) {
      mbarrier_init(smem.arrived, 1);
      mbarrier_arrive_expect_tx(smem.arrived, Reduce::inbox_bytes(smem.rank));
    }
    fence_mbarrier_init();
  }
  if (threadIdx.x == 64) prefetch_tensormap(&x);
  if (threadIdx.x == 96) prefetch_tensormap(&dy);
  __syncthreads();
  int group = threadIdx.x / 128, first = blockIdx.x / SPLIT, step = gridDim.x / SPLIT;
  if (group == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce_x(&x, smem, first, step, sizes);
    if (threadIdx.x == 32) produce_dy(&dy, smem, first, step, sizes);
    if constexpr (SPLIT > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(smem, CONSUMERS == 1 ? 0 : (int)warp_uniform(group - 1), first, step, sizes, dweight);
  }
}
