// igemm.cu: the sizes that the host gives, the layout of shared memory, and where a block's iterations read.
#pragma once
#include <igemm/igemm_config.cuh>
#include <ring.cuh>
#include <tma.cuh>

struct Sizes {
  int pixels, k, pitch, q, pq, tiles_n, work_items, channels, iterations, each, s, c_blocks, span_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  Divisor q_divisor, pq_divisor, tiles_n_divisor, s_divisor, c_blocks_divisor;
};

template <int BYTES> struct ValueType { typedef float Type; };
template <> struct ValueType<2> { typedef u16 Type; };
typedef ValueType<VALUE_BYTES>::Type Value;

enum : int {
  TILE_M = PINGPONG ? WARPGROUP_M : WARPGROUP_M * CONSUMERS,
  PARTS = WARPGROUP_M / 64,  // groups of 64 rows of a warpgroup
  A_BYTES = TILE_M * 128,
  STAGE_BYTES = A_BYTES + TILE_N * 128,
  CHANNELS = 128 / VALUE_BYTES,  // of an iteration
  SHARE = TILE_N / CLUSTER,  // filters that one block of a cluster copies
  GROUPS = TILE_N / 8,  // of eight filters
};

typedef RingPosition<STAGES> Ring;

// This block's iterations of a tile: all of them, or its share.
DEVICE int first_of(u32 rank, const Sizes& sizes) { return SPLIT == 1 ? 0 : (int)rank * sizes.each; }
DEVICE int count_of(u32 rank, const Sizes& sizes) {
  int left = sizes.iterations - first_of(rank, sizes);
  return SPLIT == 1 || left < sizes.each ? left : sizes.each;
}

// Where an iteration reads: channels from c on, at a filter tap so far right and down. Counted up instead of computed:
// the copying thread has to keep up with the products.
struct Place {
  int c, tap, right, down;
  DEVICE_MEMBER void begin(u32 rank, const Sizes& sizes) {
    c = tap = right = down = 0;
    if constexpr (SPLIT > 1) {
      int at = first_of(rank, sizes);
      tap = fast_div(at, sizes.c_blocks_divisor);
      c = (at - tap * sizes.c_blocks) * CHANNELS;
      int row = fast_div(tap, sizes.s_divisor);
      right = (tap - row * sizes.s) * sizes.dilation_w;
      down = row * sizes.dilation_h;
    }
  }
  DEVICE_MEMBER void next(const Sizes& sizes) {
    c += CHANNELS;
    if (c < sizes.channels) return;
    c = 0;
    tap++;
    right += sizes.dilation_w;
    if (right >= sizes.span_w) { right = 0; down += sizes.dilation_h; }
  }
};
