// Rows of the image as the first layer's kernel holds them (first.cu): sixteen bytes, a unit, are two pixels of halves or one of fp32, four
// channels each. An item is what a thread reads at once: as many pixels as a unit has.
#define LINES (R + STRIDE_H)  // of a ring: what one row of the convolution reads, and what the next one needs besides
#define PLANE_BYTES (UNITS * 16)
#define LINE_BYTES (PHASES * PLANE_BYTES)
#define RING_BYTES (LINES * LINE_BYTES)
#define PIXELS (4 / BYTES)  // of a unit
#define ITEMS ((W + PIXELS - 1) / PIXELS)
#define EACH ((STRIDE_H * ITEMS + 127) / 128)  // items that a thread brings for one more row

#if BYTES == 2
// Two pixels of a row of the image, from an even column on, as words of two values each. Behind the last one anything may follow.
DEVICE void read_item(u32 (&words)[C], const Value* __restrict__ x, int h, int column) {
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

DEVICE void put_pixel(u32 unit, int place, const u32 (&words)[C], int first) {
  u32 values[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < C; i++) values[i] = value_at(words, first + i);
  store_eight_bytes(unit + place % 2 * 8, values[0] | values[1] << 16, values[2] | values[3] << 16);
}
#else
// One pixel.
DEVICE void read_item(u32 (&words)[C], const Value* __restrict__ x, int h, int column) {
#pragma unroll
  for (int i = 0; i < C; i++) words[i] = ((const u32*)x)[((long long)h * W + column) * C + i];
}

DEVICE void put_pixel(u32 unit, int, const u32 (&words)[C], int) {
  u32 values[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < C; i++) values[i] = rounded_to_tf32(words[i]);
  store_sixteen_bytes(unit, make_uint4(values[0], values[1], values[2], values[3]));
}
#endif

// An item, from a column of its row on.
DEVICE void put_item(u32 line, int column, const u32 (&words)[C]) {
#pragma unroll
  for (int i = 0; i < PIXELS; i++) {
    int place = column + i + PAD_W, unit = place / PIXELS;
    // What no window reaches is left out, and what the row has not.
    if (unit / PHASES < UNITS && (i == 0 || column + i < W)) put_pixel(line + unit % PHASES * PLANE_BYTES + unit / PHASES * 16, place, words, i * C);
  }
}

// This thread's items of the next STRIDE_H rows of the image from `line` on; zeros for rows that it has not.
DEVICE void fetch(u32 (&words)[EACH][C], const Value* __restrict__ x, int line, int thread) {
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    int i = thread + 128 * e, row = i / ITEMS, h = line + row;
    if (i < STRIDE_H * ITEMS && h >= 0 && h < H) {
      read_item(words[e], x, h, (i - row * ITEMS) * PIXELS);
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
    int i = thread + 128 * e, row = i / ITEMS, column = (i - row * ITEMS) * PIXELS, at = slot + row;
    if (i >= STRIDE_H * ITEMS) continue;
    u32 line = ring + (at < LINES ? at : at - LINES) * LINE_BYTES;
    put_item(line, column, words[e]);
  }
}

// The first R rows, from `line` of the image on.
DEVICE void fill(u32 ring, const Value* __restrict__ x, int line, int thread) {
#pragma unroll 4
  for (int i = thread; i < R * ITEMS; i += 128) {
    int row = i / ITEMS, column = (i - row * ITEMS) * PIXELS, h = line + row;
    if (h < 0 || h >= H) continue;  // zeros are there already
    u32 words[C];
    read_item(words, x, h, column);
    put_item(ring + row * LINE_BYTES, column, words);
  }
}

