// first_layer.cu: rows of the image in shared memory, four channels a pixel with zeros around them. A chunk is sixteen
// bytes: two pixels of half values or one of fp32. An item is what a thread reads at once: the pixels of a chunk.
#pragma once
#include <first_layer_config.cuh>
#include <ptx.cuh>

#if VALUE_BYTES == 2
typedef u16 Value;
DEVICE float value_to_float(Value v) { return half_to_float<BFLOAT>(v); }
#else
typedef float Value;
DEVICE float value_to_float(Value v) { return v; }
#endif

enum : int {
  LINES = FILTER_ROWS + STRIDE_H,  // of a ring: the rows of x that one product reads, and those that the next one adds
  PLANE_BYTES = CHUNKS * 16,
  LINE_BYTES = PHASES * PLANE_BYTES,
  RING_BYTES = LINES * LINE_BYTES,
  CHUNK_PIXELS = 4 / VALUE_BYTES,
  LINE_ITEMS = (X_COLUMNS + CHUNK_PIXELS - 1) / CHUNK_PIXELS,
  EACH = (STRIDE_H * LINE_ITEMS + 127) / 128,  // items that a thread brings for one more product
};

#if VALUE_BYTES == 2
// Two pixels of a row of the image, from an even column on, as words of two values each. Anything may follow the last
// pixel.
DEVICE void read_item(u32 (&words)[X_CHANNELS], const Value* __restrict__ x, int h, int column) {
  const Value* from = x + ((long long)h * X_COLUMNS + column) * X_CHANNELS;
  if constexpr (PIXEL_PAIRS_ALIGNED) {
#pragma unroll
    for (int i = 0; i < X_CHANNELS; i++) words[i] = ((const u32*)from)[i];
  } else {
    if (h == X_ROWS - 1 && column + 2 >= X_COLUMNS) {  // the tensor may end here
#pragma unroll
      for (int i = 0; i < X_CHANNELS; i++) words[i] = 0;
#pragma unroll
      for (int i = 0; i < 2 * X_CHANNELS; i++)
        if (column + i / X_CHANNELS < X_COLUMNS) words[i / 2] |= (u32)from[i] << 16 * (i % 2);
      return;
    }
    int odd = (int)((size_t)from >> 1 & 1);  // whether it begins in the middle of a word
    const u32* at = (const u32*)(from - odd);
    u32 low = at[0];
#pragma unroll
    for (int i = 0; i < X_CHANNELS; i++) {
      u32 high = i + 1 < X_CHANNELS || odd ? at[i + 1] : 0;
      words[i] = odd ? low >> 16 | high << 16 : low;
      low = high;
    }
  }
}

DEVICE u32 value_at(const u32 (&words)[X_CHANNELS], int i) { return words[i / 2] >> 16 * (i % 2) & 0xffff; }

DEVICE void put_pixel(u32 chunk, int place, const u32 (&words)[X_CHANNELS], int first) {
  u32 values[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < X_CHANNELS; i++) values[i] = value_at(words, first + i);
  st_shared_v2(chunk + place % 2 * 8, values[0] | values[1] << 16, values[2] | values[3] << 16);
}
#else
// One pixel.
DEVICE void read_item(u32 (&words)[X_CHANNELS], const Value* __restrict__ x, int h, int column) {
#pragma unroll
  for (int i = 0; i < X_CHANNELS; i++)
    words[i] = ((const u32*)x)[((long long)h * X_COLUMNS + column) * X_CHANNELS + i];
}

DEVICE void put_pixel(u32 chunk, int, const u32 (&words)[X_CHANNELS], int) {
  u32 values[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < X_CHANNELS; i++) values[i] = round_to_tf32(words[i]);
  st_shared_v4(chunk, make_uint4(values[0], values[1], values[2], values[3]));
}
#endif

// An item, from a column of its row on.
DEVICE void put_item(u32 line, int column, const u32 (&words)[X_CHANNELS]) {
#pragma unroll
  for (int i = 0; i < CHUNK_PIXELS; i++) {
    int place = column + i + PAD_W, chunk = place / CHUNK_PIXELS;
    // Pixels that no window reaches are left out, and those behind the row's end.
    if (chunk / PHASES < CHUNKS && (i == 0 || column + i < X_COLUMNS))
      put_pixel(line + chunk % PHASES * PLANE_BYTES + chunk / PHASES * 16, place, words, i * X_CHANNELS);
  }
}

// Loads this thread's items of the next STRIDE_H rows of the image, from `line` on; zeros for rows outside the image.
DEVICE void fetch(u32 (&words)[EACH][X_CHANNELS], const Value* __restrict__ x, int line, int thread) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    int i = thread + 128 * e, row = i / LINE_ITEMS, h = line + row;
    if (i < STRIDE_H * LINE_ITEMS && h >= 0 && h < X_ROWS) {
      read_item(words[e], x, h, (i - row * LINE_ITEMS) * CHUNK_PIXELS);
    } else {
#pragma unroll
      for (int c = 0; c < X_CHANNELS; c++) words[e][c] = 0;
    }
  }
}

// Stores them to the ring's rows from `slot` on.
DEVICE void put(u32 ring, const u32 (&words)[EACH][X_CHANNELS], int slot, int thread) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    int i = thread + 128 * e, row = i / LINE_ITEMS, column = (i - row * LINE_ITEMS) * CHUNK_PIXELS, at = slot + row;
    if (i >= STRIDE_H * LINE_ITEMS) continue;
    u32 line = ring + (at < LINES ? at : at - LINES) * LINE_BYTES;
    put_item(line, column, words[e]);
  }
}

// The rows of x that the first product reads, from `line` of the image on.
DEVICE void fill(u32 ring, const Value* __restrict__ x, int line, int thread) {
#pragma unroll 4
  for (int i = thread; i < FILTER_ROWS * LINE_ITEMS; i += 128) {
    int row = i / LINE_ITEMS, column = (i - row * LINE_ITEMS) * CHUNK_PIXELS, h = line + row;
    if (h < 0 || h >= X_ROWS) continue;  // zeros are there already
    u32 words[X_CHANNELS];
    read_item(words, x, h, column);
    put_item(ring + row * LINE_BYTES, column, words);
  }
}
