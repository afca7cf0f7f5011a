// The first layer: few channels, a filter with a stride along the width; convolution, bias, activation and, with
// POOLED, a maximum of 3x3 with stride 2 behind it, in one launch. y^T[k, pixels] = weight * windows^T: the rows of a
// product are filters, its columns one row of the convolution's results.
//
//   one row of results: 64 filters x TILE_N pixels     shared memory of a block
//
//             one row of the convolution                 +--------------------------------------------+
//           +----------------------------+               | weight: FILTER_ROWS x STEPS slices of 2 KB |  read by all warpgroups
//   64 rows | 64 filters, or 2 x 32 with |               +--------------------------------------------+
//           | PAIRED (two rows of y)     |               | per warpgroup: ring of LINES rows of x     |  four channels a pixel, zeros around
//           +----------------------------+               | per warpgroup: one row of results          |  (half types)
//                                                        +--------------------------------------------+
//
//   Windows overlap: without a swizzle, an operand is eight rows of sixteen bytes (chunks) that follow each other. Where neighbouring
//   windows begin one chunk apart, the chunks of a row of x are eight windows' first chunks, and one chunk further on their second ones:
//   nothing is copied for it. Where windows begin PHASES chunks apart, every PHASES-th chunk lies in a plane of its own.
//
//   each warpgroup alone, for its WARPGROUP_ROWS rows of y:
//     fill the ring --> sync --> start products --> put the fetched rows of x --> wait for products --> fetch the next rows of x --> store
//                        ^                                                                                                          |
//                        +----------------------------------------------------------------------------------------------------------+
//   Only its own four warps wait for each other; warpgroups share nothing but the weight.
//
// With POOLED, the maximum of three rows is kept in registers, then a column's neighbour comes from the lane beside it
// (first_layer_half_rows.cuh, first_layer_fp32_rows.cuh). Parameters: first_layer_config.cuh.
#include <first_layer_config.cuh>
#include <wgmma.cuh>
#include <wgmma_instructions.cuh>
#if VALUE_BYTES == 2
#include <first_layer_half_rows.cuh>
#else
#include <first_layer_fp32_rows.cuh>
#endif

enum : int {
  SLICE_BYTES = 2048,  // 64 filters by 32 bytes
  WEIGHT_BYTES = FILTER_ROWS * STEPS * SLICE_BYTES,
  CONV_ROWS = POOLED ? 2 * WARPGROUP_ROWS + 1 : WARPGROUP_ROWS / AT_ONCE,  // products of a warpgroup
  THREADS = 128 * WARPGROUPS,
};

// Starts the products of one row of the convolution, whose first row of x lies in the ring's `slot`.
DEVICE void convolve(float (&d)[TILE_N / 2], const float (&bias)[2], u32 weights, u32 ring, int slot) {
#pragma unroll
  for (int i = 0; i < TILE_N / 2; i++) d[i] = bias[i / 2 % 2];
  wgmma_fence();
#pragma unroll
  for (int r = 0; r < FILTER_ROWS; r++) {
    u32 line = ring + (slot + r < LINES ? slot + r : slot + r - LINES) * LINE_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u64 filters = smem_desc_no_swizzle(weights + (r * STEPS + step) * SLICE_BYTES, SLICE_BYTES / 2, 128);
      u32 window = line + 2 * step % PHASES * PLANE_BYTES + 2 * step / PHASES * 16;
      wgmma(d, filters, smem_desc_no_swizzle(window, PHASES == 1 ? 16 : PLANE_BYTES, 128));
    }
  }
  wgmma_commit_group();
}

// A warpgroup's rows of y, from the convolution's row `first` on.
DEVICE void make_rows(u32 ring, u32 weights, u32 staged, int consumer, int first, int y_row, const float (&bias)[2],
                      const Value* __restrict__ x, Value* __restrict__ y, int pitch) {
  int thread = threadIdx.x % 128, line = first * STRIDE_H - PAD_H + FILTER_ROWS, slot = 0;
  u32 words[EACH][X_CHANNELS];
  ResultRow rows;
  float d[TILE_N / 2];
  fill(ring, x, line - FILTER_ROWS, thread);
  fetch(words, x, line, thread);
  rows.begin();
#pragma unroll 1
  for (int j = 0; j < CONV_ROWS; j++) {
    fence_proxy_async();  // products read what was written here
    warpgroup_sync(consumer - 1);
    convolve(d, bias, weights, ring, slot);
    if (j + 1 < CONV_ROWS)
      put(ring, words, slot + FILTER_ROWS < LINES ? slot + FILTER_ROWS : slot + FILTER_ROWS - LINES, thread);
    slot = slot + STRIDE_H < LINES ? slot + STRIDE_H : slot + STRIDE_H - LINES;
    wgmma_wait_group<0>();
    fence_operand(d);
    ResultRow made;
    made.take(d, first + j >= 0 && first + j < CONV_P, thread);
    line += STRIDE_H;
    if (j + 2 < CONV_ROWS) fetch(words, x, line, thread);
    int row = POOLED ? y_row + j / 2 - 1 : y_row + j * AT_ONCE;
    bool whole = !POOLED || (j > 0 && j % 2 == 0);
    rows.add(made);
    if (!whole) continue;
    if (row >= Y_ROWS) return;
    rows.store(staged, consumer, thread, row, y, pitch);
    rows = made;  // a window's last row is the next one's first
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
first_layer(const Value* __restrict__ x, const unsigned char* __restrict__ packed, Value* __restrict__ y,
            const Value* __restrict__ bias, int pitch) {
  SHARED_MEMORY;
  u32 staged = opaque((shared_address(shared_memory) + 127u) & ~127u);
  u32 weights = staged + WARPGROUPS * RESULT_BYTES, rings = weights + WEIGHT_BYTES;
  for (int i = threadIdx.x; i < WEIGHT_BYTES / 16; i += THREADS)
    st_shared_v4(weights + i * 16, ((const uint4*)packed)[i]);
  for (int i = threadIdx.x; i < WARPGROUPS * RING_BYTES / 16; i += THREADS)
    st_shared_v4(rings + i * 16, make_uint4(0, 0, 0, 0));
  int consumer = (int)warp_uniform(threadIdx.x / 128);
  int filter = threadIdx.x % (128 / AT_ONCE) / 32 * 16 + threadIdx.x % 32 / 4;
  float added[2] = {0.f, 0.f};
  if constexpr (HAS_BIAS) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (filter + 8 * half < FILTERS) added[half] = value_to_float(bias[filter + 8 * half]);
  }
  fence_proxy_async();
  __syncthreads();
  int index = blockIdx.x / TILES, y_row = ((blockIdx.x - index * TILES) * WARPGROUPS + consumer) * WARPGROUP_ROWS;
  if (y_row >= Y_ROWS) return;
  griddep_wait();
  griddep_launch_dependents();
  make_rows(rings + consumer * RING_BYTES, weights, staged + consumer * RESULT_BYTES, consumer,
            (POOLED ? 2 * y_row : y_row / AT_ONCE) - POOL_PAD, y_row, added,
            x + (long long)index * X_ROWS * X_COLUMNS * X_CHANNELS, y + (long long)index * Y_ROWS * Y_COLUMNS * pitch,
            pitch);
}
