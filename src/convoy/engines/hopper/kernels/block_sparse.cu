// Convolution with blocks of zeros as an implicit GEMM: y^T[k, pixels] = weight[k, pieces] * x[pieces, pixels]. A
// piece is one tap and eight channels; a tile of filters has a list of the pieces in which any of its filters has a
// value, eight to an iteration.
//
//   a tile of y^T: FILTERS x TILE_N pixels            one stage of the ring (an iteration: eight pieces)
//
//               TILE_N pixels                           +--------------------------+
//             +----------------+                        | TILE_N pixels            |  gathered by cp.async, sixteen bytes (a piece of
//   filters   | warpgroup 0    | 64 or 128 rows         +--------------------------+  a pixel) at a time, 128-byte swizzle
//             +----------------+                        | FILTERS filters          |  one bulk copy: packed in the order of the lists
//             | warpgroup 1    |                        +--------------------------+
//             +----------------+                        x STAGES
//
//   warpgroup 0 (copies)      128 threads gather pixels, and arrive LAG iterations later --+--> full[stage] ---> consumers wait
//                             thread 0 also copies weights --------------------------------+
//   warpgroups 1..CONSUMERS   wgmma; one iteration later --------------------------------> empty[stage] ---> the copying threads wait
#include <igemm/igemm_swap_ab_half_store.cuh>
#include <ring.cuh>
#include <tma.cuh>
#include <wgmma.cuh>
#include <wgmma_instructions.cuh>

struct Sizes {
  int pixels, k, pitch, q, pq, h, w, c, work_items, tiles;
  int stride_h, stride_w, pad_h, pad_w;
  Divisor q_divisor, pq_divisor, tiles_divisor;
};
struct Tile { int first, last, filter, unused; };  // iterations of a tile of filters, and its first filter

enum : int {
  FILTERS = WARPGROUP_M * CONSUMERS,
  PIXEL_BYTES = TILE_N * 128,
  CHUNK_BYTES = FILTERS * 128,
  STAGE_BYTES = PIXEL_BYTES + CHUNK_BYTES,
  PIECES = 8,
  EACH = TILE_N / 16,  // pixels of a copying thread
  LAG = STAGES >= 5 ? 3 : STAGES - 2,  // iterations whose gathers may be under way
};

typedef RingPosition<STAGES> Ring;

// Where a pixel's first tap lies; a pixel that does not exist lies outside the image.
struct Origin { int row, column, place; };

DEVICE Origin origin(int pixel, const Sizes& sizes) {
  int image = fast_div(pixel, sizes.pq_divisor), rest = pixel - image * sizes.pq;
  int line = fast_div(rest, sizes.q_divisor);
  Origin found = {line * sizes.stride_h - sizes.pad_h, (rest - line * sizes.q) * sizes.stride_w - sizes.pad_w, 0};
  found.place = (image * sizes.h + found.row) * sizes.w + found.column;
  if (pixel >= sizes.pixels) found.row = -(1 << 20);
  return found;
}

// A thread copies one of an iteration's eight pieces, of every sixteenth pixel: eight neighbouring threads often read
// neighbouring channels. The thread arrives at the stage's barrier LAG iterations later.
DEVICE void produce(const Value* x, const Tile* tiles, const int* __restrict__ pieces, const unsigned char* weights,
                    u32 stages, u32 full, u32 empty, const Sizes& sizes) {
  Ring ring = {0, 0}, landed = {0, 0};
  int thread = threadIdx.x, mine = thread % PIECES, row0 = thread / PIECES, under_way = 0;
  for (int work = blockIdx.x; work < sizes.work_items; work += gridDim.x) {
    int at = fast_div(work, sizes.tiles_divisor);
    Tile tile = tiles[at];
    int pixel0 = (work - at * sizes.tiles) * TILE_N;
    Origin origins[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) origins[i] = origin(pixel0 + row0 + 16 * i, sizes);
    int next = tile.first < tile.last ? pieces[tile.first * PIECES + mine] : -1;
    for (int iteration = tile.first; iteration < tile.last; iteration++) {
      int piece = next;  // -1, or rows down, columns right and a channel in eight, eight and fifteen bits
      int down = piece >> 23, right = piece >> 15 & 255, channel = piece & 32767;
      // The next piece is loaded while this one is gathered.
      if (iteration + 1 < tile.last) next = pieces[(iteration + 1) * PIECES + mine];
      u32 to = stages + ring.stage * STAGE_BYTES + row0 * 128 + ((mine ^ (row0 & 7)) << 4),
          bar = full + 8 * ring.stage;
      mbarrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      if (thread == 0) {
        mbarrier_arrive_expect_tx(bar, CHUNK_BYTES);
        bulk_load(stages + ring.stage * STAGE_BYTES + PIXEL_BYTES, weights + (long long)iteration * CHUNK_BYTES,
                  CHUNK_BYTES, bar);
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        int row = origins[i].row + down, column = origins[i].column + right;
        bool inside = piece >= 0 && (unsigned)row < (unsigned)sizes.h && (unsigned)column < (unsigned)sizes.w;
        const Value* from =
            x + (inside ? (long long)(origins[i].place + down * sizes.w + right) * sizes.c + channel : 0);
        cp_async_16(to + i * 16 * 128, from, inside);
      }
      cp_async_commit_group();
      ring.next();
      if (under_way < LAG) { under_way++; continue; }
      cp_async_wait_group<LAG>();
      mbarrier_arrive(full + 8 * landed.stage);
      landed.next();
    }
  }
  cp_async_wait_group<0>();
  for (; under_way > 0; under_way--, landed.next()) mbarrier_arrive(full + 8 * landed.stage);
}

DEVICE void consume(const Tile* tiles, u32 stages, u32 full, u32 empty, int consumer, Value* __restrict__ y,
                    const Value* __restrict__ residual, const Value* __restrict__ bias, const Sizes& sizes) {
  Ring ring = {0, 0};
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  for (int work = blockIdx.x; work < sizes.work_items; work += gridDim.x) {
    int at = fast_div(work, sizes.tiles_divisor);
    Tile tile = tiles[at];
    int filter0 = tile.filter + consumer * WARPGROUP_M + warp * 16;
    float d[PARTS][TILE_N / 2];
    begin(d, filter0, lane, sizes.k, bias);
    u32 before = 0;
    for (int iteration = tile.first; iteration < tile.last; iteration++) {
      u32 pixels = stages + ring.stage * STAGE_BYTES, weights = pixels + PIXEL_BYTES + consumer * WARPGROUP_M * 128;
      mbarrier_wait(full + 8 * ring.stage, ring.phase);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; step++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
          wgmma(d[part], smem_desc_sw128(weights + part * 8192 + step * 32), smem_desc_sw128(pixels + step * 32));
      wgmma_commit_group();
      wgmma_wait_group<1>();
      if (before && lane == 0) mbarrier_arrive(before);
      before = empty + 8 * ring.stage;
      ring.next();
    }
    wgmma_wait_group<0>();
    if (before && lane == 0) mbarrier_arrive(before);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      store_sums(d[part], (work - at * sizes.tiles) * TILE_N, filter0 + part * 64, lane, sizes.pixels, sizes.k,
                 sizes.pitch, y, residual);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
block_sparse(const Value* x, const Tile* tiles, const int* pieces, const unsigned char* weights, Value* __restrict__ y,
             const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes sizes) {
  SHARED_MEMORY;
  u32 base = opaque((shared_address(shared_memory) + 1023u) & ~1023u);
  u32 full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      mbarrier_init(full + 8 * i, 128 + 1);
      mbarrier_init(empty + 8 * i, 4 * CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  griddep_wait();
  griddep_launch_dependents();
  int group = threadIdx.x / 128;
  if (group == 0) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce(x, tiles, pieces, weights, base, full, empty, sizes);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(tiles, base, full, empty, group - 1, y, residual, bias, sizes);
  }
}
