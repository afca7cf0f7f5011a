// An inverted residual block, NHWC, half values, in one launch (docs/kernels/chains.md):
//
//   y = project(act(depthwise(act(expand(x) + b1)) + b2)) + b3 + x      1x1, 3x3 or 5x5 of stride 1 or 2, 1x1
//
// A block of threads has a tile of y and all channels inside, SLICE of them at a time:
//
//      shared memory                             registers of a warp
//        x        [POSITIONS][CHANNELS]  --->  A \  product, bias, activation
//        weights  [STAGES][a slice]      --->  B /     |
//        window   [POSITIONS][SLICE]   <---------------+    nothing outside the image, where the window stays zero
//           |
//           +-- 8 channels of 16 pixels, moved by a tap --->  A \  product with the taps on the diagonal, bias, activation
//                                                                |
//                                                                v  the result of the product has the place of the next one's A
//                                             weights ---> B /  product: sums of y, which stay until the last slice
//
// The depthwise filter is a product too: of each 8 channels with a diagonal matrix for each tap. ldmatrix takes eight pixels of 16
// bytes from anywhere, so a tap is another address. It is an eighth full, and still faster than conversions and additions on the
// ordinary cores; going down a column, rows are kept in registers. The weights of the first slices are under way before the wait for
// the kernel in front: nobody writes them. The blocks of a cluster share a tile: each has some of the slices, and then adds up the
// sums of all for some of the pixels. Parameters: inverted_residual_config.cuh.
#include <inverted_residual/expand_and_filter.cuh>

typedef float Sums[ROWS][BLOCK_N / 8][4];

// A warp's part of the last convolution's sums, from a slice.
DEVICE void filter_and_project(Sums& sums, u32 stage, u32 window) {
  const int lane = threadIdx.x % 32;
  filter_slice(stage, window, [&](int step, const u32(&filtered)[ROWS][4]) {
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; n += 2) {
      u32 b[4];
      const u32 last = stage + LAST_AT + (n * 8 + lane % 8) * WINDOW_PITCH + lane / 8 % 2 * 16 + step * 32;
      if (n + 1 < BLOCK_N / 8) ldmatrix_x4(b, last + lane / 16 * 8 * WINDOW_PITCH);
      else ldmatrix_x2(b, last);
#pragma unroll
      for (int row = 0; row < ROWS; row++) {
        mma_16x8x16<BFLOAT>(sums[row][n], filtered[row], b[0], b[1]);
        if (n + 1 < BLOCK_N / 8) mma_16x8x16<BFLOAT>(sums[row][n + 1], filtered[row], b[2], b[3]);
      }
    }
  });
}

// A warp's sums, to shared memory: [WARPS_K][unit][row][column of the octet].
DEVICE void keep(u32 base, const Sums& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = (warp / PAIRS * 2 * PAIRS + warp % PAIRS * 2) * (ROWS * 8) + lane / 4;
#pragma unroll
  for (int row = 0; row < ROWS; row++)
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; n++)
#pragma unroll
      for (int unit = 0; unit < 2; unit++) {
        u32 to = base + WEIGHTS + (first + (unit * ROWS + row) * 8) * SUM_PITCH + (n * 8 + lane % 4 * 2) * 4;
        st_shared_v2(to, float_as_u32(sums[row][n][unit * 2]), float_as_u32(sums[row][n][unit * 2 + 1]));
      }
}

// The sums of all warps along the channels, in one order, with bias and residual. Blocks of a cluster take turns.
DEVICE void store(u32 base, const Tile& tile, const uint4* __restrict__ bias, uint4* __restrict__ y) {
  enum : int { VECTORS = BLOCK_N / 8, UNIT_ROWS = 2 * PAIRS * ROWS * 8 };
  const int top = (tile.top + TAPS / 2) / STRIDE, left = (tile.left + TAPS / 2) / STRIDE;
  for (u32 i = tile.rank * BLOCK_THREADS + threadIdx.x; i < TILE_ROWS * TILE_COLUMNS * VECTORS; i += CLUSTER * BLOCK_THREADS) {
    const int pixel = i / VECTORS, column = pixel % TILE_COLUMNS, row = pixel / TILE_COLUMNS;
    const int filter = tile.part * BLOCK_N + i % VECTORS * 8;
    if (top + row >= OUT_HEIGHT || left + column >= OUT_WIDTH || filter >= FILTERS) continue;
    int place = ((row / ROWS * OCTETS + column / 8) * ROWS + row % ROWS) * 8 + column % 8;
    const uint4 low = bias[filter / 4], high = bias[filter / 4 + 1];
    float v[8] = {u32_as_float(low.x), u32_as_float(low.y), u32_as_float(low.z), u32_as_float(low.w),
                  u32_as_float(high.x), u32_as_float(high.y), u32_as_float(high.z), u32_as_float(high.w)};
#pragma unroll
    for (int k = 0; k < CLUSTER * WARPS_K; k++)
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const u32 at = base + WEIGHTS + (k % WARPS_K * UNIT_ROWS + place) * SUM_PITCH + (i % VECTORS * 8 + j) * 4;
        float four[4];
        if constexpr (CLUSTER == 1) ld_shared_v4(four, at);
        else ld_shared_cluster_v4(four, at, k / WARPS_K);
#pragma unroll
        for (int l = 0; l < 4; l++) v[j + l] += four[l];
      }
    if constexpr (HAS_RESIDUAL) {
      uint4 x = ld_shared_v4(base + ((row + TAPS / 2) * IN_COLUMNS + column + TAPS / 2) * X_PITCH + filter * 2);
      const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += half_to_float<BFLOAT>((u16)(pairs[j / 2] >> 16 * (j % 2) & 0xffff));
    }
    long long at = ((long long)tile.image * OUT_HEIGHT + top + row) * OUT_WIDTH + left + column;
    y[(at * FILTERS + filter) / 8] = {pack_pair<BFLOAT>(v[0], v[1]), pack_pair<BFLOAT>(v[2], v[3]), pack_pair<BFLOAT>(v[4], v[5]),
                                      pack_pair<BFLOAT>(v[6], v[7])};
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS)
    inverted_residual(const Half* __restrict__ x, const unsigned char* __restrict__ weights, const uint4* __restrict__ bias,
                      uint4* __restrict__ y) {
  SHARED_MEMORY;
  const Tile tile;
  const u32 base = shared_address(shared_memory);
  Sums sums = {};
  each_slice(base, tile, x, weights, [&](int, u32 stage, u32 window) { filter_and_project(sums, stage, window); });
  __syncthreads();
  keep(base, sums);
  if constexpr (CLUSTER == 1) __syncthreads();
  else cluster_sync();
  store(base, tile, bias, y);
  if constexpr (CLUSTER > 1) {  // a block's sums are there until all have read them
    cluster_arrive_relaxed();
    cluster_wait();
  }
}
