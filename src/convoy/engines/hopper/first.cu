// The first layer: few channels, a filter with a stride along the width; convolution, bias, activation and, with POOLED, a maximum of 3x3
// with stride 2 behind it, in one launch. y^T[k, pixels] = weight · windows^T: a product's rows are filters, its columns one row of the
// convolution's results.
//
// Rows of the image lie in shared memory as four channels a pixel, zeros round them (first_image.cuh). Sixteen bytes, a unit, are two
// pixels of halves or one of fp32. Without a swizzle an operand's eight rows of sixteen bytes follow each other. Where windows of
// neighbouring results begin a unit apart, the units of a row of the image are eight windows' first units, and one unit further on their
// second ones: they overlap, and nothing is copied for it. Where they begin PHASES units apart, every PHASES-th unit lies in a plane of its own.
//
// A warpgroup makes ROWS rows of y, one row of the convolution after another, from a ring of rows of the image that is its own: while
// products run, what the next row needs besides is put where the ring has room, and what the row after that needs is asked for.
// With POOLED the largest of three rows is kept, then a column's neighbour comes from the lane beside it (first_half.cuh, first_full.cuh).
// With PAIRED, up to 32 filters are there twice, the second time a row of y further down: R and STRIDE_H are those of both rows together.
//
// Given by the host: BYTES (of a value, 2 or 4), C, H, W (of x), K, R, STRIDE_H, PHASES, PAD_H, PAD_W, P, Q (of the convolution), BN (Q up to a
// multiple of 8), STEPS (pairs of units of a row of the filter), UNITS (of a plane of a row), PAIRED, POOLED, POOL_PAD, Y_ROWS, Y_COLUMNS, ROWS
// (even with PAIRED), WARPGROUPS, BLOCKS, TILES (of an image), PAIRS_READ (whether two pixels begin at four bytes), BF16, BIAS, ACTIVATION (a
// number), multiply_plain().

#define SLICE_BYTES 2048  // 64 filters by 32 bytes
#define WEIGHT_BYTES (R * STEPS * SLICE_BYTES)
#define CONV_ROWS (POOLED ? 2 * ROWS + 1 : ROWS / AT_ONCE)
#define THREADS (128 * WARPGROUPS)

// Begins one row of the convolution, whose first row of the image lies in the ring's `slot`.
DEVICE void convolve(float (&d)[BN / 2], const float (&bias)[2], u32 weights, u32 ring, int slot) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) d[i] = bias[i / 2 % 2];
  products_begin();
#pragma unroll
  for (int r = 0; r < R; r++) {
    u32 line = ring + (slot + r < LINES ? slot + r : slot + r - LINES) * LINE_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      multiply_plain(d, plain_operand(weights + (r * STEPS + step) * SLICE_BYTES, SLICE_BYTES / 2, 128),
               plain_operand(line + 2 * step % PHASES * PLANE_BYTES + 2 * step / PHASES * 16, PHASES == 1 ? 16 : PLANE_BYTES, 128));
  }
  products_commit();
}

// A warpgroup's rows of y, from the convolution's row `first` on.
DEVICE void make_rows(u32 ring, u32 weights, u32 staged, int who, int first, int y_row, const float (&bias)[2], const Value* __restrict__ x,
                      Value* __restrict__ y, int pitch) {
  int thread = threadIdx.x % 128, line = first * STRIDE_H - PAD_H + R, slot = 0;
  u32 words[EACH][C];
  Row rows;
  float d[BN / 2];
  fill(ring, x, line - R, thread);
  fetch(words, x, line, thread);
  rows.begin();
#pragma unroll 1
  for (int j = 0; j < CONV_ROWS; j++) {
    publish_writes();  // products read what was written here
    group_meet(who - 1);
    convolve(d, bias, weights, ring, slot);
    if (j + 1 < CONV_ROWS) put(ring, words, slot + R < LINES ? slot + R : slot + R - LINES, thread);
    slot = slot + STRIDE_H < LINES ? slot + STRIDE_H : slot + STRIDE_H - LINES;
    products_wait<0>();
    keep(d);
    Row made;
    made.take(d, first + j >= 0 && first + j < P, thread);
    line += STRIDE_H;
    if (j + 2 < CONV_ROWS) fetch(words, x, line, thread);
    int row = POOLED ? y_row + j / 2 - 1 : y_row + j * AT_ONCE;
    bool whole = !POOLED || (j > 0 && j % 2 == 0);
    rows.add(made);
    if (!whole) continue;
    if (row >= Y_ROWS) return;
    rows.store(staged, who, thread, row, y, pitch);
    rows = made;  // a window's last row is the next one's first
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
first_layer(const Value* __restrict__ x, const unsigned char* __restrict__ packed, Value* __restrict__ y, const Value* __restrict__ bias, int pitch) {
  SHARED_MEMORY;
  u32 staged = opaque((shared_address(shared_memory) + 127u) & ~127u), weights = staged + WARPGROUPS * RESULT_BYTES, rings = weights + WEIGHT_BYTES;
  for (int i = threadIdx.x; i < WEIGHT_BYTES / 16; i += THREADS) store_sixteen_bytes(weights + i * 16, ((const uint4*)packed)[i]);
  for (int i = threadIdx.x; i < WARPGROUPS * RING_BYTES / 16; i += THREADS) store_sixteen_bytes(rings + i * 16, make_uint4(0, 0, 0, 0));
  int who = (int)uniform(threadIdx.x / 128), filter = threadIdx.x % (128 / AT_ONCE) / 32 * 16 + threadIdx.x % 32 / 4;
  float added[2] = {0.f, 0.f};
#if BIAS
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (filter + 8 * half < K) added[half] = widened(bias[filter + 8 * half]);
#endif
  publish_writes();
  __syncthreads();
  int index = blockIdx.x / TILES, y_row = ((blockIdx.x - index * TILES) * WARPGROUPS + who) * ROWS;
  if (y_row >= Y_ROWS) return;
  wait_for_forerunner();
  let_successor_start();
  make_rows(rings + who * RING_BYTES, weights, staged + who * RESULT_BYTES, who, (POOLED ? 2 * y_row : y_row / AT_ONCE) - POOL_PAD, y_row, added,
            x + (long long)index * H * W * C, y + (long long)index * Y_ROWS * Y_COLUMNS * pitch, pitch);
}
