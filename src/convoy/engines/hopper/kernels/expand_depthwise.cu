// A 1x1 convolution and the depthwise convolution behind it, NHWC, half values, in one launch (docs/kernels/chains.md):
//
//   y = act(depthwise(act(expand(x) + b1)) + b2)      1x1, 3x3 or 5x5 of stride 1 or 2
//
// The first two thirds of inverted_residual.cu, which shows the window and the diagonal products. A block of threads has a tile of y
// and some slices of its channels; blocks have no sums in common, so any number of them may share a tile (SHARE).
//
// Channels lie in the window in another order than in y: of 16, place 8 i + 2 j + k has channel 4 j + 2 i + k. The packed weights have
// that order, so nobody moves a value for it. A lane's four values of a pixel then are neighbours, and four lanes write 32 bytes.
// Parameters: inverted_residual_config.cuh, with BLOCK_N = 0.
#include <inverted_residual/expand_and_filter.cuh>

static_assert(CLUSTER == 1, "blocks have no sums in common");

// Some of the 16 channels of a step, of the pixels of both units that the image has.
DEVICE void store(const Tile& tile, int first, const u32 (&filtered)[ROWS][4], uint2* __restrict__ y) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, channel = first + lane % 4 * 4;
  if (channel >= FILTERS) return;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int unit = warp % PAIRS * 2 + i, column = (tile.left + TAPS / 2) / STRIDE + unit % OCTETS * 8 + lane / 4;
    const int top = (tile.top + TAPS / 2) / STRIDE + unit / OCTETS * ROWS;
    if (column >= OUT_WIDTH) continue;
    uint2* to = y + (((tile.image * OUT_HEIGHT + top) * OUT_WIDTH + column) * FILTERS + channel) / 4;
#pragma unroll
    for (int row = 0; row < ROWS; row++)
      if (top + row < OUT_HEIGHT) to[row * (OUT_WIDTH * FILTERS / 4)] = uint2{filtered[row][i], filtered[row][2 + i]};
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS)
    expand_depthwise(const Half* __restrict__ x, const unsigned char* __restrict__ weights, uint2* __restrict__ y) {
  SHARED_MEMORY;
  const Tile tile;
  each_slice(shared_address(shared_memory), tile, x, weights, [&](int slice, u32 stage, u32 window) {
    filter_slice(stage, window, [&](int step, const u32(&filtered)[ROWS][4]) {
      store(tile, (tile.first + slice) * SLICE + step * 16, filtered, y);
    });
  });
}
