// Depthwise convolution from a tile in shared memory, NHWC, halves: a block has 64 channels of TILE output rows of IMAGES images. One copy
// brings every pixel that these see, with zeros for what lies outside, 128 bytes each. A lane has two channels; a warp has STRIP output columns
// and goes down ROWS output rows, as in depthwise.cu: it reads an input row of its strip once, widens it once, and adds it to all output
// rows that see it.
//
// Given by the host: BF16, C, P, Q, R, S, STRIDE_H, STRIDE_W, PAD_H, PAD_W, TILE, IMAGES, N, STRIP, ROWS, BIAS, RESIDUAL, ACTIVATION (a number), BLOCKS (on
// a multiprocessor, at least).

#define LINES ((TILE - 1) * STRIDE_H + R)      // rows of a tile
#define COLUMNS ((Q - 1) * STRIDE_W + S)       // of a tile
#define TILE_BYTES (IMAGES * LINES * COLUMNS * 128)
#define STRIPS ((Q + STRIP - 1) / STRIP)
#define BANDS ((TILE + ROWS - 1) / ROWS)
#define WARPS (IMAGES * STRIPS * BANDS)
#define HALVES_OF(word, c) unpack((u16)((word) >> 16 * (c) & 0xffff))

// A row of a strip; what lies beyond the tile belongs to results that are not stored.
DEVICE void load_row(u32 (&row)[SEEN], u32 at, int column) {
#pragma unroll
  for (int j = 0; j < SEEN; j++) row[j] = column + j < COLUMNS ? shared_word(at + j * 128) : 0;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
depthwise_tile(const __grid_constant__ Map x, const Floats* __restrict__ w, u32* __restrict__ y, const u32* __restrict__ residual, const u32* __restrict__ bias) {
  SHARED_MEMORY;
  const int parts = (C + 63) / 64, tiles = (P + TILE - 1) / TILE;
  int part = blockIdx.x % parts, tile = blockIdx.x / parts % tiles, image = blockIdx.x / parts / tiles * IMAGES;
  u32 shared = opaque((shared_address(shared_memory) + 127u) & ~127u), bar = shared + TILE_BYTES;
  int warp = (int)uniform(threadIdx.x / 32), pair = part * 32 + threadIdx.x % 32;  // of channels
  bool there = pair < C / 2;
  if (threadIdx.x == 0) {
    barrier_init(bar, 1);
    barrier_init_done();
  }
  __syncthreads();
  Floats weights[R * S], first = {};
#pragma unroll
  for (int tap = 0; tap < R * S; tap++) weights[tap] = there ? w[tap * (C / 2) + pair] : Floats{};
#if BIAS
  if (there) first = {HALVES_OF(bias[pair], 0), HALVES_OF(bias[pair], 1)};
#endif
  wait_for_forerunner();
  let_successor_start();
  if (threadIdx.x == 0) {
    barrier_expect(bar, TILE_BYTES);
    copy_plain_box(shared, &x, bar, part * 64, -PAD_W, tile * TILE * STRIDE_H - PAD_H, image);
  }
  int strip = warp % STRIPS * STRIP, band = warp / STRIPS % BANDS * ROWS, own = warp / STRIPS / BANDS;
  int left = strip * STRIDE_W;
  u32 at = shared + ((own * LINES + band * STRIDE_H) * COLUMNS + left) * 128 + threadIdx.x % 32 * 4;
  image += own;
  barrier_wait(bar, 0);
  if (image >= N) return;
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
        for (int c = 0; c < 2; c++) in[j][c] = HALVES_OF(next[j], c);
      at += COLUMNS * 128;
      if (i + 1 < INPUT_ROWS && band * STRIDE_H + i + 1 < LINES) load_row(next, at, left);
#pragma unroll
      for (int r = 0; r < R; r++) {
        if (!SEES(u, r)) continue;
        if (i < r || i - r >= ROWS * STRIDE_H) continue;  // an output row of another band
#pragma unroll
        for (int s = 0; s < S; s++) add_tap(sums[SLOT(u, r)], in, weights[r * S + s], r, s, first.v);
      }
      if (!ENDS(u, i)) continue;
      int down = band + (i - (R - 1)) / STRIDE_H, row = tile * TILE + down, slot = SLOT(u, R - 1);
      if (!there || down >= TILE || row >= P) continue;
      long long place = (((long long)image * P + row) * Q + strip) * (C / 2) + pair;
#pragma unroll
      for (int t = 0; t < STRIP; t++) {
        if (strip + t >= Q) continue;
        float v[2] = {sums[slot][t][0], sums[slot][t][1]};
#if RESIDUAL
        u32 more = residual[place + (long long)t * (C / 2)];
        v[0] += HALVES_OF(more, 0);
        v[1] += HALVES_OF(more, 1);
#endif
        y[place + (long long)t * (C / 2)] = pack(activated(v[0]), activated(v[1]));
      }
    }
  }
}
