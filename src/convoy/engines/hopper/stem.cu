// An image of few channels, padded and put in an order in which a convolution's windows are rows of memory: z[image, group of rows,
// column, row of the group, channel], a group being as many rows as the filter steps. One block copies one group of rows.
//
// Given by the host: BYTES (2 or 4), C (channels of the image), VECTOR (of z), ROWS (of a group), DEPENDENT.

struct Sizes {
  int groups, columns, h, w, pad_h, pad_w;
};

#if BYTES == 2
typedef u16 Element;
#else
typedef u32 Element;
#endif

#define WORDS (ROWS * VECTOR * BYTES / 8)

extern "C" __global__ void __launch_bounds__(256) pad_image(const Element* x, u64* z, const __grid_constant__ Sizes s) {
#if DEPENDENT
  wait_for_forerunner();
  let_successor_start();
#endif
  int image = blockIdx.x / s.groups, top = (blockIdx.x - image * s.groups) * ROWS - s.pad_h;
  for (int column = threadIdx.x; column < s.columns; column += 256) {
    int from = column - s.pad_w;
    u64 words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      if (top + row < 0 || top + row >= s.h || from < 0 || from >= s.w) continue;
      const Element* pixel = x + (((long long)image * s.h + top + row) * s.w + from) * C;
#pragma unroll
      for (int c = 0; c < C; c++) words[(row * VECTOR + c) * BYTES / 8] |= (u64)pixel[c] << (row * VECTOR + c) * BYTES % 8 * 8;
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) z[((long long)blockIdx.x * s.columns + column) * WORDS + i] = words[i];
  }
}
