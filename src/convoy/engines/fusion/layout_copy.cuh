// Copies of images between nchw and nhwc: of each image, a matrix of channels and pixels is turned. Macros: IMAGES, CHANNELS,
// PIXELS; TO_NHWC; FEW: whether there are few channels; WIDTH: elements of a vector; TILE; THREADS. Value is the type.
#pragma once

#if FEW
// A thread takes WIDTH columns of all rows, or WIDTH rows of all columns: vectors on both sides, turned in registers.
template <int COUNT> DEVICE void turn(const Value* x, Value* y, unsigned group) {
  const unsigned image = group / (PIXELS / WIDTH), first = group % (PIXELS / WIDTH) * WIDTH;
  const Value* planes = (TO_NHWC ? x : y) + image * (COUNT * PIXELS) + first;
  const unsigned pixels = (image * PIXELS + first) * COUNT;
  Vector<Value, WIDTH> plane[COUNT], packed[COUNT];
  if (TO_NHWC) {
    UNROLL for (int c = 0; c < COUNT; ++c) plane[c] = *reinterpret_cast<const Vector<Value, WIDTH>*>(planes + c * PIXELS);
    UNROLL for (int k = 0; k < COUNT * WIDTH; ++k) packed[k / WIDTH].value[k % WIDTH] = plane[k % COUNT].value[k / COUNT];
    UNROLL for (int c = 0; c < COUNT; ++c) *reinterpret_cast<Vector<Value, WIDTH>*>(y + pixels + c * WIDTH) = packed[c];
  } else {
    UNROLL for (int c = 0; c < COUNT; ++c)
      packed[c] = *reinterpret_cast<const Vector<Value, WIDTH>*>(x + pixels + c * WIDTH);
    UNROLL for (int k = 0; k < COUNT * WIDTH; ++k) plane[k % COUNT].value[k / COUNT] = packed[k / WIDTH].value[k % WIDTH];
    UNROLL for (int c = 0; c < COUNT; ++c)
      *reinterpret_cast<Vector<Value, WIDTH>*>(const_cast<Value*>(planes) + c * PIXELS) = plane[c];
  }
}
KERNEL(THREADS) layout_copy(const Value* x, Value* y) {
  begin_kernel();
  const unsigned group = block_index() * THREADS + thread_index();
  if (group < IMAGES * (PIXELS / WIDTH)) turn<CHANNELS>(x, y, group);
}
#else
// A block turns a tile of TILE x TILE elements in shared memory.
KERNEL(THREADS) layout_copy(const Value* x, Value* y) {
  SHARED Value tile[TILE][TILE + 2];
  begin_kernel();
  const unsigned rows = TO_NHWC ? CHANNELS : PIXELS, columns = TO_NHWC ? PIXELS : CHANNELS;
  const unsigned down = (rows + TILE - 1) / TILE, across = (columns + TILE - 1) / TILE;
  const unsigned image = block_index() / (down * across), place = block_index() % (down * across);
  const unsigned row = place / across * TILE, column = place % across * TILE;
  const unsigned at = thread_index() % TILE, first = thread_index() / TILE;
  x += image * (CHANNELS * PIXELS);
  y += image * (CHANNELS * PIXELS);
  UNROLL for (unsigned r = first; r < TILE; r += THREADS / TILE)
    if (row + r < rows && column + at < columns) tile[r][at] = x[(row + r) * columns + column + at];
  block_sync();
  UNROLL for (unsigned c = first; c < TILE; c += THREADS / TILE)
    if (column + c < columns && row + at < rows) y[(column + c) * rows + row + at] = tile[at][c];
}
#endif
