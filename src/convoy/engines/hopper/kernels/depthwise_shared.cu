// Depthwise convolution, NHWC, half types, from a tile in shared memory. A block has 64 channels of TILE_ROWS output
// rows of TILE_IMAGES images. One tensor copy brings all pixels that these see, with zeros for those outside the
// image. A lane has two channels; a warp has STRIP output columns and goes down BAND_ROWS output rows, with sums in
// registers (depthwise_sums.cuh).
//
//    shared memory: TILE_IMAGES x LINES x COLUMNS pixels, 128 bytes (64 channels) each; behind them the weights of a
//    filter that registers do not hold, as fp32
//
//      +-------- COLUMNS --------+
//      | strip 0 | strip 1 | ... |  band 0: warp 0, warp 1, ...
//      |         |         |     |
//      +---------+---------+-----+
//      | strip 0 | strip 1 | ... |  band 1: the next warps
//      +---------+---------+-----+
//
//    thread 0: one TMA copy ---> mbarrier ---> all warps wait once; then nobody waits for anybody
//
// Parameters: depthwise_shared_config.cuh.
#include <activation.cuh>
#include <depthwise_shared_config.cuh>
#include <depthwise_sums.cuh>
#include <tma.cuh>

enum : int {
  LINES = (TILE_ROWS - 1) * STRIDE_H + FILTER_R,  // input rows of a tile
  COLUMNS = (Y_COLUMNS - 1) * STRIDE_W + FILTER_S,  // input columns of a tile
  TILE_BYTES = TILE_IMAGES * LINES * COLUMNS * 128,
  TAPS = FILTER_R * FILTER_S,
  WEIGHTS_IN_SHARED = TAPS > 25,  // else each lane holds its own in registers
  TAP_BYTES = 64 * 4,
  WEIGHT_BYTES = WEIGHTS_IN_SHARED ? TAPS * TAP_BYTES : 0,
  HELD = WEIGHTS_IN_SHARED ? 1 : TAPS,
  STRIPS = (Y_COLUMNS + STRIP - 1) / STRIP,
  BANDS = (TILE_ROWS + BAND_ROWS - 1) / BAND_ROWS,
  WARPS = TILE_IMAGES * STRIPS * BANDS,
};

// Value c of a pair.
DEVICE float value_of(u32 pair, int c) { return half_to_float<BFLOAT>((u16)(pair >> 16 * c & 0xffff)); }

// An input row of a strip. Columns outside the tile belong to results that are not stored.
DEVICE void load_row(u32 (&row)[SEEN], u32 at, int column) {
#pragma unroll
  for (int j = 0; j < SEEN; j++) row[j] = column + j < COLUMNS ? ld_shared_u32(at + j * 128) : 0;
}

// The lane's two weights of a tap; `filter` is where its own begin in shared memory.
DEVICE Floats weight_of(const Floats (&held)[HELD], u32 filter, int tap) {
  if constexpr (WEIGHTS_IN_SHARED) {
    Floats found;
    ld_shared_v2(found.v, filter + tap * TAP_BYTES);
    return found;
  } else {
    return held[tap];
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS_PER_SM)
depthwise_shared(const __grid_constant__ TensorMap x, const Floats* __restrict__ w, u32* __restrict__ y,
                 const u32* __restrict__ residual, const u32* __restrict__ bias) {
  SHARED_MEMORY;
  const int parts = (Y_CHANNELS + 63) / 64, tiles = (Y_ROWS + TILE_ROWS - 1) / TILE_ROWS;
  int part = blockIdx.x % parts, tile = blockIdx.x / parts % tiles;
  int image = blockIdx.x / parts / tiles * TILE_IMAGES;
  u32 shared = opaque((shared_address(shared_memory) + 127u) & ~127u), bar = shared + TILE_BYTES + WEIGHT_BYTES;
  int warp = (int)warp_uniform(threadIdx.x / 32), pair = part * 32 + threadIdx.x % 32;  // of channels
  bool there = pair < Y_CHANNELS / 2;
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
  }
  Floats held[HELD], first = {};
  u32 filter = shared + TILE_BYTES + threadIdx.x % 32 * 8;
  if constexpr (WEIGHTS_IN_SHARED) {
    const u32* bits = reinterpret_cast<const u32*>(w) + 2 * pair;
    for (int tap = warp; tap < TAPS; tap += WARPS)
      st_shared_v2(filter + tap * TAP_BYTES, there ? bits[tap * Y_CHANNELS] : 0, there ? bits[tap * Y_CHANNELS + 1] : 0);
  }
  __syncthreads();
  if constexpr (!WEIGHTS_IN_SHARED) {
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) held[tap] = there ? w[tap * (Y_CHANNELS / 2) + pair] : Floats{};
  }
  if constexpr (HAS_BIAS) {
    if (there) first = {value_of(bias[pair], 0), value_of(bias[pair], 1)};
  }
  griddep_wait();
  griddep_launch_dependents();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(bar, TILE_BYTES);
    tma_load_4d_no_swizzle(shared, &x, bar, part * 64, -PAD_W, tile * TILE_ROWS * STRIDE_H - PAD_H, image);
  }
  int strip = warp % STRIPS * STRIP, band = warp / STRIPS % BANDS * BAND_ROWS, own = warp / STRIPS / BANDS;
  int left = strip * STRIDE_W;
  u32 at = shared + ((own * LINES + band * STRIDE_H) * COLUMNS + left) * 128 + threadIdx.x % 32 * 4;
  image += own;
  mbarrier_wait(bar, 0);
  if (image >= BATCH) return;
  u32 next[SEEN];
  load_row(next, at, left);
  float sums[IN_FLIGHT][STRIP][2] = {};
#pragma unroll 1
  for (int from = 0; from < INPUT_ROWS; from += PERIOD) {
#pragma unroll
    for (int u = 0; u < PERIOD; u++) {
      int i = from + u;
      if (i >= INPUT_ROWS) break;
      float in[SEEN][2];
#pragma unroll
      for (int j = 0; j < SEEN; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) in[j][c] = value_of(next[j], c);
      at += COLUMNS * 128;
      if (i + 1 < INPUT_ROWS && band * STRIDE_H + i + 1 < LINES) load_row(next, at, left);
#pragma unroll
      for (int r = 0; r < FILTER_R; r++) {
        if (!meets(u, r)) continue;
        if (i < r || i - r >= BAND_ROWS * STRIDE_H) continue;  // an output row of another band
#pragma unroll
        for (int s = 0; s < FILTER_S; s++)
          add_tap(sums[slot_of(u, r)], in, weight_of(held, filter, r * FILTER_S + s), r, s, first.v);
      }
      if (!ends(u, i)) continue;
      int down = band + (i - (FILTER_R - 1)) / STRIDE_H, row = tile * TILE_ROWS + down,
          slot = slot_of(u, FILTER_R - 1);
      if (!there || down >= TILE_ROWS || row >= Y_ROWS) continue;
      long long place = (((long long)image * Y_ROWS + row) * Y_COLUMNS + strip) * (Y_CHANNELS / 2) + pair;
#pragma unroll
      for (int t = 0; t < STRIP; t++) {
        if (strip + t >= Y_COLUMNS) continue;
        float v[2] = {sums[slot][t][0], sums[slot][t][1]};
        if constexpr (HAS_RESIDUAL) {
          u32 more = residual[place + (long long)t * (Y_CHANNELS / 2)];
          v[0] += value_of(more, 0);
          v[1] += value_of(more, 1);
        }
        y[place + (long long)t * (Y_CHANNELS / 2)] =
            pack_pair<BFLOAT>(activate<ACTIVATION>(v[0]), activate<ACTIVATION>(v[1]));
      }
    }
  }
}
