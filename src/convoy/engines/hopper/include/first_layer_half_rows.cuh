// first_layer.cu, results in half types: from a row of products to y, through shared memory. A word has two
// neighbouring results.
#pragma once
#include <activation.cuh>
#include <first_layer_image.cuh>

enum : int {
  GROUPS = TILE_N / 8,  // of eight pixels
  AT_ONCE = PAIRED ? 2 : 1,  // rows of y of one product
  STAGED_PIXELS = (POOLED ? (GROUPS + 1) / 2 : GROUPS) * 8,
  RESULT_BYTES = STAGED_PIXELS * 128,
};
enum : u32 { LEAST = BFLOAT ? 0xFF80u : 0xFC00u };  // minus infinity

// Matrices of eight filters by eight pixels, transposed, to where a pixel has its filters side by side.
DEVICE void put_pair(u32 staged, int pair, int thread, const u32 (&words)[4], bool both) {
  int row = thread % 8, eight = thread / 32 * 2 + thread / 8 % 2;
  // A word has one lane's results of two groups: the columns of a matrix are those of the one and the other in turn.
  if constexpr (POOLED) row = row % 2 * 4 + row / 2;
  int pixel = pair * 16 + thread / 16 % 2 * 8 + row;
  u32 at = staged + pixel * 128 + ((eight ^ pixel % 8) << 4);
  if (both) stmatrix_x4_trans(at, words); else stmatrix_x2_trans(at, words);
}

// Rows of y from `row` on, as sixteen bytes a thread.
DEVICE void copy_out(u32 staged, int consumer, int thread, int row, Value* __restrict__ y, int pitch) {
  const int each = FILTERS / 8, line = Y_COLUMNS * each;
  warpgroup_sync(consumer - 1);
#pragma unroll 4
  for (int i = thread; i < AT_ONCE * line; i += 128) {
    int down = i / line, pixel = (i - down * line) / each, eight = i % each;
    if (row + down >= Y_ROWS) break;
    *(uint4*)(y + ((long long)(row + down) * Y_COLUMNS + pixel) * pitch + eight * 8) =
        ld_shared_v4(staged + pixel * 128 + ((down * 4 + eight ^ pixel % 8) << 4));
  }
}

// Of a group: the maximum of this lane's two columns and of the one beside them, in the low half.
DEVICE u32 pooled(const u32 (&rows)[GROUPS], int g, int thread) {
  int own = thread % 4, lane = thread % 32;
  u32 none = LEAST | LEAST << 16, given = rows[g], beside;
  if constexpr (POOL_PAD) {
    // For the lane to the right: the column to the left of its two.
    if (own == 3) given = g > 0 ? rows[g > 0 ? g - 1 : 0] : none;
    beside = shfl(given, lane - own + (own + 3) % 4) >> 16;
  } else {
    if (own == 0) given = g + 1 < GROUPS ? rows[g + 1 < GROUPS ? g + 1 : g] : none;
    beside = shfl(given, lane - own + (own + 1) % 4);
  }
  return max_nan_pair<BFLOAT>(max_nan_pair<BFLOAT>(rows[g], rows[g] >> 16), beside) & 0xffff;
}

DEVICE u32 activate_pair(u32 word) {
  return pack_pair<BFLOAT>(activate<ACTIVATION>(half_to_float<BFLOAT>((u16)(word & 0xffff))),
                           activate<ACTIVATION>(half_to_float<BFLOAT>((u16)(word >> 16))));
}

// Word i of `put_pair`: half of the filters, and either a group's two columns or the pooled columns of two groups.
DEVICE u32 given_word(const u32 (&rows)[2][GROUPS], int pair, int i, int thread) {
  const int half = i % 2;
  if constexpr (POOLED) {
    const int g = pair * 4 + i / 2 * 2;
    u32 low = g < GROUPS ? pooled(rows[half], g < GROUPS ? g : 0, thread) : 0;
    u32 high = g + 1 < GROUPS ? pooled(rows[half], g + 1 < GROUPS ? g + 1 : 0, thread) : 0;
    return activate_pair(low | high << 16);
  } else {
    const int g = pair * 2 + i / 2;
    return g < GROUPS ? rows[half][g < GROUPS ? g : 0] : 0;
  }
}

DEVICE void store_rows(const u32 (&rows)[2][GROUPS], u32 staged, int consumer, int thread, int row,
                       Value* __restrict__ y, int pitch) {
  const int each = POOLED ? 4 : 2;  // groups of a pair
#pragma unroll
  for (int pair = 0; pair < (GROUPS + each - 1) / each; pair++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = given_word(rows, pair, i, thread);
    put_pair(staged, pair, thread, words, pair * each + each / 2 < GROUPS);
  }
  copy_out(staged, consumer, thread, row, y, pitch);  // all have read it before they meet again, for the next row
}

// A lane's two filters of one row, or of the maximum of some rows.
struct ResultRow {
  u32 words[2][GROUPS];

  DEVICE_MEMBER void begin() {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) words[half][g] = LEAST | LEAST << 16;
  }

  // Columns that the row does not have are less than every value.
  DEVICE_MEMBER void take(const float (&d)[TILE_N / 2], bool inside, int thread) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        float low = d[4 * g + 2 * half], high = d[4 * g + 2 * half + 1];
        // With a pooling behind it, the activation follows the maximum.
        u32 word = POOLED ? pack_pair<BFLOAT>(low, high)
                          : pack_pair<BFLOAT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
        if (POOLED && (!inside || g * 8 + 8 > CONV_Q)) {
          int column = g * 8 + thread % 4 * 2;
          if (!inside || column >= CONV_Q) word = word & 0xffff0000 | LEAST;
          if (!inside || column + 1 >= CONV_Q) word = word & 0xffff | LEAST << 16;
        }
        words[half][g] = word;
      }
  }

  DEVICE_MEMBER void add(const ResultRow& made) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
        words[half][g] = POOLED ? max_nan_pair<BFLOAT>(words[half][g], made.words[half][g]) : made.words[half][g];
  }

  DEVICE_MEMBER void store(u32 staged, int consumer, int thread, int row, Value* __restrict__ y, int pitch) const {
    store_rows(words, staged, consumer, thread, row, y, pitch);
  }
};
