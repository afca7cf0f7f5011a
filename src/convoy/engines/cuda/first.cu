// The first layer: few channels, a filter of stride 2 or 4 along the width; convolution, bias, activation and, with POOLED, a maximum of
// 3x3 with stride 2 behind it, in one launch. y^T[k, pixels] = weight · windows^T: a product's rows are filters, its columns one row of
// the convolution's results.
//
// Rows of the image lie in shared memory as four channels a pixel, zeros round them. Two pixels are sixteen bytes, a unit. The
// windows of neighbouring results begin a unit apart (stride 2) and overlap: without a swizzle an operand's eight rows of sixteen
// bytes follow each other, so the units of a row of the image are eight windows' first units, and one unit further on their second
// ones. With stride 4 every other unit lies in a plane of its own (PHASES 2). Nothing is copied for it.
//
// A warpgroup makes ROWS rows of y, one row of the convolution after another, from a ring of rows of the image that is its own: while
// products run, what the next row needs besides is put where the ring has room, and what the row after that needs is asked for.
// With POOLED, a row's results are rounded, two neighbouring ones to a word; the largest of three rows is kept, then a word's
// neighbour comes from the lane beside it. With PAIRED, up to 32 filters are there twice, the second time a row of y further down: R and
// STRIDE_H are those of both rows together.
//
// Given by the host: C, H, W (of x), K, R, STRIDE_H, PHASES, PAD_H, PAD_W, P, Q (of the convolution), BN (Q up to a multiple of 8), STEPS
// (pairs of units of a row of the filter), UNITS (of a plane of a row), PAIRED, POOLED, POOL_PAD, Y_ROWS, Y_COLUMNS, ROWS (even with
// PAIRED), WARPGROUPS, BLOCKS, TILES (of an image), PAIRS_READ (whether two pixels begin at four bytes), BF16, BIAS, ACTIVATION (a
// number), multiply_plain().

typedef u16 Value;
#define GROUPS (BN / 8)
#define AT_ONCE (PAIRED ? 2 : 1)  // rows of y of one product
#define CONV_ROWS (POOLED ? 2 * ROWS + 1 : ROWS / AT_ONCE)
#define PLANE_BYTES (UNITS * 16)
#define LINE_BYTES (PHASES * PLANE_BYTES)
#define LINES (R + STRIDE_H)  // of a ring: what one row of the convolution reads, and what the next one needs besides
#define RING_BYTES (LINES * LINE_BYTES)
#define PAIRS ((W + 1) / 2)
#define EACH ((STRIDE_H * PAIRS + 127) / 128)  // pairs of pixels that a thread brings for one more row
#define SLICE_BYTES 2048  // 64 filters by 16 values
#define WEIGHT_BYTES (R * STEPS * SLICE_BYTES)
#define STAGED_PIXELS ((POOLED ? (GROUPS + 1) / 2 : GROUPS) * 8)
#define THREADS (128 * WARPGROUPS)
#define LEAST (BF16 ? 0xFF80u : 0xFC00u)

// Two pixels of a row of the image, from an even column on, as words of two values each. Behind the last one anything may follow.
DEVICE void read_pair(u32 (&words)[C], const Value* __restrict__ x, int h, int column) {
  const Value* from = x + ((long long)h * W + column) * C;
#if PAIRS_READ
#pragma unroll
  for (int i = 0; i < C; i++) words[i] = ((const u32*)from)[i];
#else
  if (h == H - 1 && column + 2 >= W) {  // the tensor may end here
#pragma unroll
    for (int i = 0; i < C; i++) words[i] = 0;
#pragma unroll
    for (int i = 0; i < 2 * C; i++)
      if (column + i / C < W) words[i / 2] |= (u32)from[i] << 16 * (i % 2);
    return;
  }
  int odd = (int)((size_t)from >> 1 & 1);  // whether it begins in the middle of a word
  const u32* at = (const u32*)(from - odd);
  u32 low = at[0];
#pragma unroll
  for (int i = 0; i < C; i++) {
    u32 high = i + 1 < C || odd ? at[i + 1] : 0;
    words[i] = odd ? low >> 16 | high << 16 : low;
    low = high;
  }
#endif
}

DEVICE u32 value_at(const u32 (&words)[C], int i) { return words[i / 2] >> 16 * (i % 2) & 0xffff; }

DEVICE void put_pixel(u32 line, int column, const u32 (&words)[C], int first) {
  int place = column + PAD_W, unit = place / 2;
  if (unit / PHASES >= UNITS) return;  // no window reaches so far
  u32 values[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < C; i++) values[i] = value_at(words, first + i);
  store_eight_bytes(line + unit % PHASES * PLANE_BYTES + unit / PHASES * 16 + place % 2 * 8, values[0] | values[1] << 16, values[2] | values[3] << 16);
}

// This thread's pairs of the next STRIDE_H rows of the image from `line` on; zeros for rows that it has not.
DEVICE void fetch(u32 (&words)[EACH][C], const Value* __restrict__ x, int line, int thread) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    int i = thread + 128 * e, row = i / PAIRS, h = line + row;
    if (i < STRIDE_H * PAIRS && h >= 0 && h < H) {
      read_pair(words[e], x, h, (i - row * PAIRS) * 2);
    } else {
#pragma unroll
      for (int c = 0; c < C; c++) words[e][c] = 0;
    }
  }
}

// Puts them to the ring's rows from `slot` on.
DEVICE void put(u32 ring, const u32 (&words)[EACH][C], int slot, int thread) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    int i = thread + 128 * e, row = i / PAIRS, column = (i - row * PAIRS) * 2, at = slot + row;
    if (i >= STRIDE_H * PAIRS) continue;
    u32 line = ring + (at < LINES ? at : at - LINES) * LINE_BYTES;
    put_pixel(line, column, words[e], 0);
    if (column + 1 < W) put_pixel(line, column + 1, words[e], C);
  }
}

// The first R rows, from `line` of the image on.
DEVICE void fill(u32 ring, const Value* __restrict__ x, int line, int thread) {
#pragma unroll 4
  for (int i = thread; i < R * PAIRS; i += 128) {
    int row = i / PAIRS, column = (i - row * PAIRS) * 2, h = line + row;
    if (h < 0 || h >= H) continue;  // zeros are there already
    u32 words[C];
    read_pair(words, x, h, column);
    put_pixel(ring + row * LINE_BYTES, column, words, 0);
    if (column + 1 < W) put_pixel(ring + row * LINE_BYTES, column + 1, words, C);
  }
}

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
               plain_operand(line + step * (32 / PHASES), PHASES == 1 ? 16 : PLANE_BYTES, 128));
  }
  products_commit();
}

// A row's results, two neighbouring ones to a word, of this lane's two filters. What the row has not is less than everything.
DEVICE void round_row(u32 (&words)[2][GROUPS], const float (&d)[BN / 2], bool inside, int thread) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      float low = d[4 * g + 2 * half], high = d[4 * g + 2 * half + 1];
      u32 word = POOLED ? pack(low, high) : pack(activated(low), activated(high));
      if (POOLED && (!inside || g * 8 + 8 > Q)) {
        int column = g * 8 + thread % 4 * 2;
        if (!inside || column >= Q) word = word & 0xffff0000 | LEAST;
        if (!inside || column + 1 >= Q) word = word & 0xffff | LEAST << 16;
      }
      words[half][g] = word;
    }
}

// Matrices of eight filters by eight pixels, transposed, to where a pixel has its filters side by side.
DEVICE void put_pair(u32 staged, int pair, int thread, const u32 (&words)[4], bool both) {
  int row = thread % 8, eight = thread / 32 * 2 + thread / 8 % 2;
#if POOLED
  row = row % 2 * 4 + row / 2;  // a word has one lane's results of two groups: a matrix's columns are those of one and the other in turn
#endif
  int pixel = pair * 16 + thread / 16 % 2 * 8 + row;
  u32 at = staged + pixel * 128 + ((eight ^ pixel % 8) << 4);
  if (both) put_matrices(at, words); else put_two_matrices(at, words);
}

// Rows of y from `row` on, as sixteen bytes a thread.
DEVICE void copy_out(u32 staged, int who, int thread, int row, Value* __restrict__ y, int pitch) {
  const int each = K / 8, line = Y_COLUMNS * each;
  group_meet(who - 1);
#pragma unroll 4
  for (int i = thread; i < AT_ONCE * line; i += 128) {
    int down = i / line, pixel = (i - down * line) / each, eight = i % each;
    if (row + down >= Y_ROWS) break;
    *(uint4*)(y + ((long long)(row + down) * Y_COLUMNS + pixel) * pitch + eight * 8) =
        load_sixteen_bytes(staged + pixel * 128 + ((down * 4 + eight ^ pixel % 8) << 4));
  }
}

#if POOLED
// Of a group: the largest of this lane's two columns and of the one beside them, in the low half.
DEVICE u32 pooled(const u32 (&rows)[GROUPS], int g, int thread) {
  int own = thread % 4, lane = thread % 32;
  u32 none = LEAST | LEAST << 16, given = rows[g];
#if POOL_PAD
  if (own == 3) given = g > 0 ? rows[g > 0 ? g - 1 : 0] : none;  // to the right, the column to the left of the next two
  u32 beside = lane_value(given, lane - own + (own + 3) % 4) >> 16;
#else
  if (own == 0) given = g + 1 < GROUPS ? rows[g + 1 < GROUPS ? g + 1 : g] : none;
  u32 beside = lane_value(given, lane - own + (own + 1) % 4);
#endif
  return largest(largest(rows[g], rows[g] >> 16), beside) & 0xffff;
}

DEVICE u32 activated_pair(u32 word) { return pack(activated(unpack((u16)(word & 0xffff))), activated(unpack((u16)(word >> 16)))); }
#endif

// What a word of `put_pair` is: half of the filters, and either a group's two columns or two groups' pooled ones.
DEVICE u32 given_word(const u32 (&rows)[2][GROUPS], int pair, int i, int thread) {
  const int half = i % 2;
#if POOLED
  const int g = pair * 4 + i / 2 * 2;
  u32 low = g < GROUPS ? pooled(rows[half], g < GROUPS ? g : 0, thread) : 0;
  u32 high = g + 1 < GROUPS ? pooled(rows[half], g + 1 < GROUPS ? g + 1 : 0, thread) : 0;
  return activated_pair(low | high << 16);
#else
  const int g = pair * 2 + i / 2;
  return g < GROUPS ? rows[half][g < GROUPS ? g : 0] : 0;
#endif
}

DEVICE void store_rows(const u32 (&rows)[2][GROUPS], u32 staged, int who, int thread, int row, Value* __restrict__ y, int pitch) {
  const int each = POOLED ? 4 : 2;  // groups of a pair
#pragma unroll
  for (int pair = 0; pair < (GROUPS + each - 1) / each; pair++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = given_word(rows, pair, i, thread);
    put_pair(staged, pair, thread, words, pair * each + each / 2 < GROUPS);
  }
  copy_out(staged, who, thread, row, y, pitch);  // all have read it before they meet again, for the next row
}

// A warpgroup's rows of y, from the convolution's row `first` on.
DEVICE void make_rows(u32 ring, u32 weights, u32 staged, int who, int first, int y_row, const float (&bias)[2], const Value* __restrict__ x,
                      Value* __restrict__ y, int pitch) {
  int thread = threadIdx.x % 128, line = first * STRIDE_H - PAD_H + R, slot = 0;
  u32 words[EACH][C], rows[2][GROUPS];
  float d[BN / 2];
  fill(ring, x, line - R, thread);
  fetch(words, x, line, thread);
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int g = 0; g < GROUPS; g++) rows[half][g] = LEAST | LEAST << 16;
#pragma unroll 1
  for (int j = 0; j < CONV_ROWS; j++) {
    publish_writes();  // products read what was written here
    group_meet(who - 1);
    convolve(d, bias, weights, ring, slot);
    if (j + 1 < CONV_ROWS) put(ring, words, slot + R < LINES ? slot + R : slot + R - LINES, thread);
    slot = slot + STRIDE_H < LINES ? slot + STRIDE_H : slot + STRIDE_H - LINES;
    products_wait<0>();
    keep(d);
    u32 made[2][GROUPS];
    round_row(made, d, first + j >= 0 && first + j < P, thread);
    line += STRIDE_H;
    if (j + 2 < CONV_ROWS) fetch(words, x, line, thread);
    int row = POOLED ? y_row + j / 2 - 1 : y_row + j * AT_ONCE;
    bool whole = !POOLED || (j > 0 && j % 2 == 0);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) rows[half][g] = POOLED ? largest(rows[half][g], made[half][g]) : made[half][g];
    if (!whole) continue;
    if (row >= Y_ROWS) return;
    store_rows(rows, staged, who, thread, row, y, pitch);
    // A window's last row is the next one's first.
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) rows[half][g] = made[half][g];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
first_layer(const Value* __restrict__ x, const unsigned char* __restrict__ packed, Value* __restrict__ y, const Value* __restrict__ bias, int pitch) {
  SHARED_MEMORY;
  u32 staged = opaque((shared_address(shared_memory) + 127u) & ~127u), weights = staged + WARPGROUPS * STAGED_PIXELS * 128, rings = weights + WEIGHT_BYTES;
  for (int i = threadIdx.x; i < WEIGHT_BYTES / 16; i += THREADS) store_sixteen_bytes(weights + i * 16, ((const uint4*)packed)[i]);
  for (int i = threadIdx.x; i < WARPGROUPS * RING_BYTES / 16; i += THREADS) store_sixteen_bytes(rings + i * 16, make_uint4(0, 0, 0, 0));
  int who = (int)uniform(threadIdx.x / 128), filter = threadIdx.x % (128 / AT_ONCE) / 32 * 16 + threadIdx.x % 32 / 4;
  float added[2] = {0.f, 0.f};
#if BIAS
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (filter + 8 * half < K) added[half] = unpack(bias[filter + 8 * half]);
#endif
  publish_writes();
  __syncthreads();
  int index = blockIdx.x / TILES, y_row = ((blockIdx.x - index * TILES) * WARPGROUPS + who) * ROWS;
  if (y_row >= Y_ROWS) return;
  wait_for_forerunner();
  let_successor_start();
  make_rows(rings + who * RING_BYTES, weights, staged + who * STAGED_PIXELS * 128, who, (POOLED ? 2 * y_row : y_row / AT_ONCE) - POOL_PAD, y_row, added,
            x + (long long)index * H * W * C, y + (long long)index * Y_ROWS * Y_COLUMNS * pitch, pitch);
}
