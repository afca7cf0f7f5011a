// bottleneck.cu: the sizes that the host gives, the layout of shared memory, the rings, and the order of the work.
#pragma once
#include <activation.cuh>
#include <bottleneck/bottleneck_config.cuh>
#include <ring.cuh>
#include <tma.cuh>
#include <wgmma.cuh>

struct Sizes {
  int rounds;  // items of a cluster's blocks
  int passes;  // of an item, without the one that computes only the first convolution
  int segments;  // of an image: each an item
  int height;
  Divisor segments_divisor;
};

enum : int {
  OWN_PIXELS = ROWS * WIDTH,  // of a warpgroup in a pass
  PASS_ROWS = ROWS * CONSUMERS,
  PITCH = WIDTH + 1,  // pixels from row to row of the first result: the zero right of a row is the one left of the next
  WINDOW_ROWS = PASS_ROWS + 2,  // of the first result, that a pass of the second convolution reads
  SPAN = ((ROWS - 1) * PITCH + WIDTH + 7) / 8 * 8,  // columns of the second product: rows with the zeros between them
  X_BYTES = PASS_ROWS * WIDTH * 128,  // of a stage: 64 channels of a pass's pixels
  OWN_BYTES = OWN_PIXELS * 128,
  // One zero more than the rows have, and what the last product reads beyond its rows
  FIRST_PIXELS = WINDOW_ROWS * PITCH + 9,
  FIRST_BYTES = (FIRST_PIXELS * 128 + 1023) / 1024 * 1024,  // 64 channels of the first result
  SECOND_BYTES = OWN_BYTES * CONSUMERS,  // 64 channels of the second result
  SPARE_BYTES = 1024,  // rows for columns that are no pixels
  CHUNK_BYTES = MID_BLOCKS * 64 * 128,  // of weights
  SHARE_BYTES = CHUNK_BYTES / CLUSTER,
  CHUNKS = IN_BLOCKS + 9 * MID_BLOCKS + OUT_BLOCKS,
  X_ARRIVALS = 4 * CONSUMERS,
};

// Addresses in shared memory, and the rank of this block in its cluster.
struct SmemLayout {
  u32 x, first, second, spare, weights, x_full, x_empty, weights_full, weights_empty, rank;
  DEVICE_MEMBER void place(u32 base) {
    x = base;
    first = x + X_STAGES * X_BYTES;
    second = first + MID_BLOCKS * FIRST_BYTES;
    spare = second + MID_BLOCKS * SECOND_BYTES;
    weights = spare + SPARE_BYTES;
    x_full = weights + WEIGHT_STAGES * CHUNK_BYTES;
    x_empty = x_full + 8 * X_STAGES;
    weights_full = x_empty + 8 * X_STAGES;
    weights_empty = weights_full + 8 * WEIGHT_STAGES;
    rank = CLUSTER == 1 ? 0 : cluster_ctarank();
  }
};

typedef RingPosition<X_STAGES> XRing;
typedef RingPosition<WEIGHT_STAGES> WeightRing;

// The rows that an item computes: from `row` on, of one image. The blocks of a cluster have an item each in every round,
// so that they copy as many weights; items beyond the last image read zeros and write nothing.
struct Item { int image, row; };
DEVICE Item item_of(int round, u32 rank, const Sizes& sizes) {
  int item = CLUSTER == 1 ? round : round * CLUSTER + (int)rank;
  int image = fast_div(item, sizes.segments_divisor);
  return {image, (item - image * sizes.segments) * sizes.passes * PASS_ROWS};
}

// The address of eight channels of a pixel: rows of 128 bytes in the 128-byte swizzle, from a multiple of 1024 on.
DEVICE u32 eight_at(u32 base, int pixel, int eight) { return base + pixel * 128 + ((eight ^ (pixel & 7)) << 4); }
