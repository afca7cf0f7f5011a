// first_layer.cu, results in fp32: from a row of products to y. A warp stores eight filters of four pixels at a time,
// 32 bytes each, without shared memory.
#pragma once
#include <activation.cuh>
#include <first_layer_image.cuh>

enum : int {
  GROUPS = TILE_N / 8,  // of eight pixels
  AT_ONCE = PAIRED ? 2 : 1,  // rows of y of one product
  RESULT_BYTES = 0,
};
enum : u32 { LEAST_FLOAT = 0xff800000u };  // minus infinity

// A lane's two filters of one row, or of the maximum of some rows, as products leave them: of eight columns two of
// each filter.
struct ResultRow {
  float values[TILE_N / 2];

  DEVICE_MEMBER void begin() {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) values[i] = u32_as_float(LEAST_FLOAT);
  }

  // Columns that the row does not have are less than every value.
  DEVICE_MEMBER void take(const float (&d)[TILE_N / 2], bool inside, int thread) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) {
      values[i] = d[i];
      if (POOLED && (!inside || i / 4 * 8 + 8 > CONV_Q) && (!inside || i / 4 * 8 + thread % 4 * 2 + i % 2 >= CONV_Q))
        values[i] = u32_as_float(LEAST_FLOAT);
    }
  }

  DEVICE_MEMBER void add(const ResultRow& made) {
#pragma unroll
    for (int i = 0; i < TILE_N / 2; i++) values[i] = POOLED ? max_nan(values[i], made.values[i]) : made.values[i];
  }

  // Of a group and one of the filters: the maximum of this lane's two columns and of the one beside them.
  DEVICE_MEMBER float pooled(int half, int g, int thread) const {
    int own = thread % 4, lane = thread % 32, i = 4 * g + 2 * half;
    float beside;
    if constexpr (POOL_PAD) {
      float given = values[i + 1];
      // For the lane to the right: the column to the left of its two.
      if (own == 3) given = g > 0 ? values[g > 0 ? i - 3 : 0] : u32_as_float(LEAST_FLOAT);
      beside = u32_as_float(shfl(float_as_u32(given), lane - own + (own + 3) % 4));
    } else {
      float given = values[i];
      if (own == 0) given = g + 1 < GROUPS ? values[g + 1 < GROUPS ? i + 4 : 0] : u32_as_float(LEAST_FLOAT);
      beside = u32_as_float(shfl(float_as_u32(given), lane - own + (own + 1) % 4));
    }
    return max_nan(max_nan(values[i], values[i + 1]), beside);
  }

  DEVICE_MEMBER void store(u32, int, int thread, int row, Value* __restrict__ y, int pitch) const {
    int down = AT_ONCE == 2 ? thread / 64 : 0, filter = thread % (128 / AT_ONCE) / 32 * 16 + thread % 32 / 4;
    Value* to = y + (long long)(row + down) * Y_COLUMNS * pitch + filter;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      bool there = row + down < Y_ROWS && filter + 8 * half < FILTERS;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        if constexpr (POOLED) {
          float v = activate<ACTIVATION>(pooled(half, g, thread));
          int column = g * 4 + thread % 4;
          if (there && column < Y_COLUMNS) to[(long long)column * pitch + 8 * half] = v;
        } else {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int column = g * 8 + thread % 4 * 2 + i;
            float v = values[4 * g + 2 * half + i];
            if (there && column < Y_COLUMNS) to[(long long)column * pitch + 8 * half] = activate<ACTIVATION>(v);
          }
        }
      }
    }
  }
};
