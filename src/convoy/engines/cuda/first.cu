// The first layer: few channels, a filter of stride 2 or 4 along the width; convolution, bias, activation and, with POOLED, a maximum of
// 3x3 with stride 2 behind it, in one launch. y^T[k, pixels] = weight · windows^T: a product's rows are filters, its columns one row of
// the convolution's results.
//
// A block holds the rows of the image that it needs, four channels a pixel, zeros round them. Two pixels are sixteen bytes, a unit. The
// windows of neighbouring results begin a unit apart (stride 2) and overlap: without a swizzle an operand's eight rows of sixteen
// bytes follow each other, so the units of a row of the image are eight windows' first units, and one unit further on their second
// ones. With stride 4 every other unit lies in a plane of its own (PHASES 2). Nothing is copied for it.
//
// A warpgroup makes ROWS rows of y, one row of the convolution after another. With POOLED, a row's results are rounded, two
// neighbouring ones to a word; the largest of three rows is kept, then a word's neighbour comes from the lane beside it.
//
// Given by the host: C, H, W (of x), K, R, STRIDE_H, PHASES, PAD_H, PAD_W, P, Q (of the convolution), BN (Q up to a multiple of 8), STEPS
// (pairs of units of a row of the filter), UNITS (of a plane of a row), POOLED, POOL_PAD, Y_ROWS, Y_COLUMNS, ROWS, WARPGROUPS, BLOCKS,
// TILES (of an image), PAIRS_READ (whether two pixels begin at four bytes), BF16, BIAS, ACTIVATION (a number), multiply_plain().

typedef u16 Value;
#define GROUPS (BN / 8)
#define STEP (POOLED ? 2 * ROWS : ROWS)  // rows of the convolution from one warpgroup to the next
#define CONV_ROWS (POOLED ? 2 * ROWS + 1 : ROWS)
#define IMAGE_ROWS (((WARPGROUPS - 1) * STEP + CONV_ROWS - 1) * STRIDE_H + R)
#define PLANE_BYTES (UNITS * 16)
#define LINE_BYTES (PHASES * PLANE_BYTES)
#define IMAGE_BYTES (IMAGE_ROWS * LINE_BYTES)
#define SLICE_BYTES 2048  // 64 filters by 16 values
#define WEIGHT_BYTES (R * STEPS * SLICE_BYTES)
#define STAGED_PIXELS ((POOLED ? (GROUPS + 1) / 2 : GROUPS) * 8)
#define THREADS (128 * WARPGROUPS)
#define LEAST (BF16 ? 0xFF80u : 0xFC00u)

// Two pixels of the image, from an even column on, as words of two values each.
DEVICE void read_pair(u32 (&words)[C], const Value* __restrict__ line, int column) {
#if PAIRS_READ
  const u32* from = (const u32*)(line + column * C);
#pragma unroll
  for (int i = 0; i < C; i++) words[i] = from[i];
#else
#pragma unroll
  for (int i = 0; i < C; i++) words[i] = 0;
#pragma unroll
  for (int i = 0; i < 2 * C; i++)
    if (column + i / C < W) words[i / 2] |= (u32)line[column * C + i] << 16 * (i % 2);
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

// The rows of the image from `first` on; zeros are there already.
DEVICE void fill(u32 image, const Value* __restrict__ x, int first) {
  const int pairs = (W + 1) / 2;
#pragma unroll 4
  for (int i = threadIdx.x; i < IMAGE_ROWS * pairs; i += THREADS) {
    int row = i / pairs, column = (i - row * pairs) * 2, h = first + row;
    if (h < 0 || h >= H) continue;
    u32 words[C];
    read_pair(words, x + (long long)h * W * C, column);
    put_pixel(image + row * LINE_BYTES, column, words, 0);
    if (column + 1 < W) put_pixel(image + row * LINE_BYTES, column + 1, words, C);
  }
}

// One row of the convolution, whose first row of the image lies at `lines`.
DEVICE void convolve(float (&d)[BN / 2], const float (&bias)[2], u32 weights, u32 lines) {
#pragma unroll
  for (int i = 0; i < BN / 2; i++) d[i] = bias[i / 2 % 2];
  products_begin();
#pragma unroll
  for (int r = 0; r < R; r++)
#pragma unroll
    for (int step = 0; step < STEPS; step++)
      multiply_plain(d, plain_operand(weights + (r * STEPS + step) * SLICE_BYTES, SLICE_BYTES / 2, 128),
               plain_operand(lines + r * LINE_BYTES + step * (32 / PHASES), PHASES == 1 ? 16 : PLANE_BYTES, 128));
  products_commit();
  products_wait<0>();
  keep(d);
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

// One row of y, as sixteen bytes a thread.
DEVICE void copy_out(u32 staged, int who, int thread, Value* __restrict__ y, int pitch) {
  group_meet(who - 1);
  for (int i = thread; i < Y_COLUMNS * (K / 8); i += 128) {
    int pixel = i / (K / 8), eight = i % (K / 8);
    *(uint4*)(y + (long long)pixel * pitch + eight * 8) = load_sixteen_bytes(staged + pixel * 128 + ((eight ^ pixel % 8) << 4));
  }
  group_meet(who - 1);
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

DEVICE void store_row(const u32 (&rows)[2][GROUPS], u32 staged, int who, int thread, Value* __restrict__ y, int pitch) {
  const int each = POOLED ? 4 : 2;  // groups of a pair
#pragma unroll
  for (int pair = 0; pair < (GROUPS + each - 1) / each; pair++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = given_word(rows, pair, i, thread);
    put_pair(staged, pair, thread, words, pair * each + each / 2 < GROUPS);
  }
  copy_out(staged, who, thread, y, pitch);
}

// A warpgroup's rows of y, from the convolution's row `first` on.
DEVICE void make_rows(u32 image, u32 weights, u32 staged, int who, int first, int y_row, const float (&bias)[2], Value* __restrict__ y, int pitch) {
  int thread = threadIdx.x % 128;
  float d[BN / 2];
  u32 rows[2][GROUPS];
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int g = 0; g < GROUPS; g++) rows[half][g] = LEAST | LEAST << 16;
#pragma unroll 1
  for (int j = 0; j < CONV_ROWS; j++) {
    bool inside = first + j >= 0 && first + j < P;
    if (inside) convolve(d, bias, weights, image + j * STRIDE_H * LINE_BYTES);
    u32 made[2][GROUPS];
    round_row(made, d, inside, thread);
    int row = POOLED ? y_row + j / 2 - 1 : y_row + j;
    bool whole = !POOLED || (j > 0 && j % 2 == 0);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) rows[half][g] = POOLED ? largest(rows[half][g], made[half][g]) : made[half][g];
    if (!whole) continue;
    if (row >= Y_ROWS) return;
    store_row(rows, staged, who, thread, y + (long long)row * Y_COLUMNS * pitch, pitch);
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
  u32 staged = opaque((shared_address(shared_memory) + 127u) & ~127u), weights = staged + WARPGROUPS * STAGED_PIXELS * 128, image = weights + WEIGHT_BYTES;
  for (int i = threadIdx.x; i < WEIGHT_BYTES / 16; i += THREADS) store_sixteen_bytes(weights + i * 16, ((const uint4*)packed)[i]);
  for (int i = threadIdx.x; i < IMAGE_BYTES / 16; i += THREADS) store_sixteen_bytes(image + i * 16, make_uint4(0, 0, 0, 0));
  int who = (int)uniform(threadIdx.x / 128), filter = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  float added[2] = {0.f, 0.f};
#if BIAS
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (filter + 8 * half < K) added[half] = unpack(bias[filter + 8 * half]);
#endif
  __syncthreads();
  int index = blockIdx.x / TILES, y_row = (blockIdx.x - index * TILES) * WARPGROUPS * ROWS;
  int first = (POOLED ? 2 * y_row : y_row) - POOL_PAD;
  wait_for_forerunner();
  fill(image, x + (long long)index * H * W * C, first * STRIDE_H - PAD_H);
  let_successor_start();
  publish_writes();  // products read what was written here
  __syncthreads();
  make_rows(image + who * STEP * STRIDE_H * LINE_BYTES, weights, staged + who * STAGED_PIXELS * 128, who, first + who * STEP, y_row + who * ROWS,
            added, y + (long long)index * Y_ROWS * Y_COLUMNS * pitch, pitch);
}
