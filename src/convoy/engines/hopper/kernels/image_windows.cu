// An image of few channels, padded and put in an order in which the windows of a convolution are rows of memory:
// z[image, group of rows, column, row of the group, channel], a group having as many rows as the filter steps.
//
//   x: rows top ... top + GROUP_ROWS - 1         z: one group, one column
//
//     . . p p p p .       a block copies          +-----------+-----------+
//     . . q q q q .       one group of rows  ---> | p: VECTOR | q: VECTOR |   zeros outside the image
//                                                 +-----------+-----------+
//
//   A thread copies every 256th column; nobody waits for anybody. Parameters: image_windows_config.cuh.
#include <image_windows_config.cuh>
#include <ptx.cuh>

struct Sizes {
  int groups, columns, h, w, pad_h, pad_w;
};

template <int BYTES> struct ElementType { typedef u32 Type; };
template <> struct ElementType<2> { typedef u16 Type; };
typedef ElementType<VALUE_BYTES>::Type Element;

enum : int { WORDS = GROUP_ROWS * VECTOR * VALUE_BYTES / 8 };  // of a column

extern "C" __global__ void __launch_bounds__(256)
image_windows(const Element* x, u64* z, const __grid_constant__ Sizes sizes) {
  griddep_wait();
  griddep_launch_dependents();
  int image = blockIdx.x / sizes.groups, top = (blockIdx.x - image * sizes.groups) * GROUP_ROWS - sizes.pad_h;
  for (int column = threadIdx.x; column < sizes.columns; column += 256) {
    int from = column - sizes.pad_w;
    u64 words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = 0;
#pragma unroll
    for (int row = 0; row < GROUP_ROWS; row++) {
      if (top + row < 0 || top + row >= sizes.h || from < 0 || from >= sizes.w) continue;
      const Element* pixel = x + (((long long)image * sizes.h + top + row) * sizes.w + from) * X_CHANNELS;
#pragma unroll
      for (int c = 0; c < X_CHANNELS; c++)
        words[(row * VECTOR + c) * VALUE_BYTES / 8] |= (u64)pixel[c] << (row * VECTOR + c) * VALUE_BYTES % 8 * 8;
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) z[((long long)blockIdx.x * sizes.columns + column) * WORDS + i] = words[i];
  }
}
