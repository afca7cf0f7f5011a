// What the kernels of inverted residual blocks share: copies of x and of the weights, the first convolution, the depthwise filter, and
// the turns over the slices of the channels inside.
#pragma once
#include <inverted_residual/inverted_residual_layout.cuh>

DEVICE void load_weights(u32 base, const Tile& tile, const unsigned char* __restrict__ weights, int slice) {
  u32 stage = base + WEIGHTS + slice % STAGES * STAGE_BYTES;
  const unsigned char* from = weights + (long long)(tile.part * SLICES + tile.first + slice) * STAGE_BYTES;
#pragma unroll 4
  for (int i = threadIdx.x; i < STAGE_BYTES / 16; i += BLOCK_THREADS) cp_async_16(stage + i * 16, from + i * 16, true);
}

// Some vectors of a position of x, or zeros.
DEVICE void load_position(u32 base, const Tile& tile, const Half* __restrict__ x, u32 position, bool there, int from, int to) {
  const int pixel = (tile.image * HEIGHT + tile.row(position)) * WIDTH + tile.column(position);
#pragma unroll
  for (int channel = from; channel < to; channel += 8) {
    const bool inside = there && channel < CHANNELS;
    cp_async_16(base + position * X_PITCH + channel * 2, x + (inside ? pixel * CHANNELS + channel : 0), inside);
  }
}

// The tile of x with its halo; which of its positions the image has; and zeros in the windows where it has none: nobody writes there
// later. Of few channels a thread copies all.
DEVICE void load_pixels(u32 base, const Tile& tile, const Half* __restrict__ x) {
  enum : int { VECTORS = DEPTH / 8, FEW = VECTORS <= 4 };
  for (u32 i = threadIdx.x; i < (POSITIONS + 31) / 32 * 32; i += BLOCK_THREADS) {
    const bool there = tile.has(i);
    const u32 mask = ballot(there);
    if (i % 32 == 0) st_shared_u32(base + MASKS + i / 8, mask);
    if (FEW && i < POSITIONS) load_position(base, tile, x, i, there, 0, DEPTH);
    if (there || i >= POSITIONS) continue;
#pragma unroll
    for (int window = 0; window < WINDOWS; window++)
#pragma unroll
      for (int vector = 0; vector < SLICE / 8; vector++)
        st_shared_v4(base + WINDOW + window * WINDOW_BYTES + i * WINDOW_PITCH + vector * 16, uint4{0, 0, 0, 0});
  }
  if constexpr (!FEW)
#pragma unroll 4
    for (u32 i = threadIdx.x; i < POSITIONS * VECTORS; i += BLOCK_THREADS) {
      const u32 position = i / VECTORS, channel = i % VECTORS * 8;
      load_position(base, tile, x, position, tile.has(position), channel, channel + 8);
    }
}

// The first convolution of a slice.
DEVICE void expand(u32 base, u32 stage, u32 window) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int item = warp; item < EXPAND_ITEMS; item += WARPS) {
    const int first = item / EXPAND_N * EXPAND_M, column = item % EXPAND_N * EXPAND_COLUMNS;
    const u32 filter = stage + (column + lane / 16 * 8 + lane % 8) * X_PITCH + lane / 8 % 2 * 16;
    const u32 there = ld_shared_u32(base + MASKS + first / 2 * 4) >> first % 2 * 16;
    float v[EXPAND_M][EXPAND_COLUMNS / 8][4];
#pragma unroll
    for (int n = 0; n < EXPAND_COLUMNS / 8; n++) {
      float bias[2];
      ld_shared_v2(bias, stage + BIAS_AT + (column + n * 8 + lane % 4 * 2) * 4);
#pragma unroll
      for (int m = 0; m < EXPAND_M; m++) v[m][n][0] = v[m][n][2] = bias[0], v[m][n][1] = v[m][n][3] = bias[1];
    }
    u32 pixel[EXPAND_M];
#pragma unroll
    for (int m = 0; m < EXPAND_M; m++) {
      int position = (first + m) * 16 + lane % 16;
      pixel[m] = base + (position < POSITIONS ? position : POSITIONS - 1) * X_PITCH + lane / 16 * 16;
    }
#pragma unroll(EXPAND_UNROLL)
    for (int step = 0; step < DEPTH / 16; step++) {
      u32 a[EXPAND_M][4];
#pragma unroll
      for (int m = 0; m < EXPAND_M; m++) ldmatrix_x4(a[m], pixel[m] + step * 32);
#pragma unroll
      for (int n = 0; n < EXPAND_COLUMNS / 8; n += 2) {
        u32 b[4];
        ldmatrix_x4(b, filter + n * 8 * X_PITCH + step * 32);
#pragma unroll
        for (int m = 0; m < EXPAND_M; m++) {
          mma_16x8x16<BFLOAT>(v[m][n], a[m], b[0], b[1]);
          mma_16x8x16<BFLOAT>(v[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < EXPAND_M; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 to = window + ((first + m) * 16 + half * 8 + lane / 4) * WINDOW_PITCH + column * 2 + lane % 4 * 4;
        if (there >> (m * 16 + half * 8 + lane / 4) & 1)
#pragma unroll
          for (int n = 0; n < EXPAND_COLUMNS / 8; n++)
            st_shared_u32(to + n * 16, activate_pair<BFLOAT, FIRST_ACTIVATION>(v[m][n][half * 2], v[m][n][half * 2 + 1]));
      }
  }
}

// Eight channels of a row of the window for both units, moved by each tap of a row of the filter.
DEVICE void load_row(u32 (&seen)[TAPS][2], u32 at) {
#pragma unroll
  for (int tap = 0; tap < TAPS; tap += 2) {
    u32 v[4];
    if (tap + 1 < TAPS) ldmatrix_x4(v, at + shift(tap) * WINDOW_PITCH);
    else ldmatrix_x2(v, at + shift(tap) * WINDOW_PITCH);
    seen[tap][0] = v[0], seen[tap][1] = v[1];
    if (tap + 1 < TAPS) seen[tap + 1][0] = v[2], seen[tap + 1][1] = v[3];
  }
}

// The depthwise convolution of 8 channels, down the rows of two units. `at`: the lane's row of the window for ldmatrix; `taps`: the
// lane's two channels; `diagonal`: of these, the one that the lane multiplies by, or none.
DEVICE void filter(u32 (&filtered)[ROWS][4], int eight, u32 at, u32 taps, u32 bias, u32 diagonal) {
  enum : int { COUNT = TAPS * TAPS };
  u32 weight[TAP_WORDS], seen[(ROWS - 1) * STRIDE + TAPS][TAPS][2];
#pragma unroll
  for (int i = 0; i < TAP_WORDS; i += 4) {
    uint4 four = ld_shared_v4(taps + i * 4);
    weight[i] = four.x & diagonal, weight[i + 1] = four.y & diagonal, weight[i + 2] = four.z & diagonal, weight[i + 3] = four.w & diagonal;
  }
  float added[2];
  ld_shared_v2(added, bias);
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
#pragma unroll
    for (int i = row ? (row - 1) * STRIDE + TAPS : 0; i < row * STRIDE + TAPS; i++) load_row(seen[i], at + i * IN_COLUMNS * WINDOW_PITCH);
    float d[4] = {added[0], added[1], added[0], added[1]};
#pragma unroll
    for (int i = 0; i + 1 < COUNT; i += 2) {
      const u32(&low)[2] = seen[row * STRIDE + i / TAPS][i % TAPS], (&high)[2] = seen[row * STRIDE + (i + 1) / TAPS][(i + 1) % TAPS];
      const u32 a[4] = {low[0], low[1], high[0], high[1]};
      mma_16x8x16<BFLOAT>(d, a, weight[i], weight[i + 1]);
    }
    const u32(&last)[2] = seen[row * STRIDE + TAPS - 1][TAPS - 1];
    mma_16x8x8<BFLOAT>(d, last[0], last[1], weight[COUNT - 1]);
    filtered[row][eight * 2] = activate_pair<BFLOAT, SECOND_ACTIVATION>(d[0], d[1]);
    filtered[row][eight * 2 + 1] = activate_pair<BFLOAT, SECOND_ACTIVATION>(d[2], d[3]);
  }
}

// A warp's steps of 16 channels of a slice: `use(step, filtered)` takes the results of the depthwise convolution, in the lanes of
// `mma_16x8x16`'s first operand: of each row a pixel of both units, and of each eight channels two.
template <typename Use> DEVICE void filter_slice(u32 stage, u32 window, Use use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = warp % PAIRS * 2 + lane / 8 % 2, pair = lane / 8;
  const u32 diagonal = lane % 4 != pair ? 0u : lane / 4 % 2 ? 0xffff0000u : 0x0000ffffu;
  const u32 at = window + (unit / OCTETS * (ROWS * STRIDE * IN_COLUMNS) + unit % OCTETS * 8 + lane % 8 + lane / 16 * shift(1)) * WINDOW_PITCH;
#pragma unroll 1
  for (int step = warp / PAIRS; step < SLICE / 16; step += WARPS_K) {
    u32 filtered[ROWS][4];
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
      const int channel = step * 16 + eight * 8;
      filter(filtered, eight, at + channel * 2, stage + TAPS_AT + (channel / 2 + pair) * (TAP_WORDS * 4),
             stage + BIAS_AT + (SLICE + channel + lane % 4 * 2) * 4, diagonal);
    }
    use(step, filtered);
  }
}

// The block's slices, one after the other: weights are copied ahead, the slice is expanded, and `use(slice, stage, window)` filters it.
template <typename Use>
DEVICE void each_slice(u32 base, const Tile& tile, const Half* __restrict__ x, const unsigned char* __restrict__ weights, Use use) {
#pragma unroll
  for (int slice = 0; slice < AHEAD; slice++)
    if (slice < tile.slices) load_weights(base, tile, weights, slice);
  if constexpr (DEPENDENT) {
    griddep_wait();
    griddep_launch_dependents();
  }
  load_pixels(base, tile, x);
  cp_async_commit_group();
#pragma unroll 1
  for (int slice = 0; slice < tile.slices + WINDOWS - 1; slice++) {
    if (slice == 0) cp_async_wait_group<0>();
    else cp_async_wait_group<AHEAD - 1>();
    __syncthreads();  // this slice's weights are there; nobody reads the stage and the window that are filled next
    if (slice + AHEAD < tile.slices) load_weights(base, tile, weights, slice + AHEAD);
    cp_async_commit_group();
    if (slice < tile.slices)
      expand(base, base + WEIGHTS + slice % STAGES * STAGE_BYTES, base + WINDOW + slice % WINDOWS * WINDOW_BYTES);
    if constexpr (WINDOWS == 1) __syncthreads();
    const int before = slice - (WINDOWS - 1);
    if (before >= 0) use(before, base + WEIGHTS + before % STAGES * STAGE_BYTES, base + WINDOW + before % WINDOWS * WINDOW_BYTES);
  }
}
