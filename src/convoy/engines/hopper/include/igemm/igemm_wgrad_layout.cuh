// igemm_wgrad.cu: the sizes that the host gives, the layout of shared memory, and the part of the sum that a block
// computes.
#pragma once
#include <cluster_reduce.cuh>
#include <igemm/igemm_wgrad_config.cuh>
#include <ring.cuh>
#include <wgmma.cuh>

struct Sizes {
  int k, c, row, q, pq, work_items, tiles_k, tiles_n, columns, c_blocks, s, each, more;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  Divisor q_divisor, pq_divisor, tiles_k_divisor, tiles_n_divisor, c_blocks_divisor, s_divisor;
};

template <bool FP32> struct ResultType { typedef float Type; };
template <> struct ResultType<false> { typedef u16 Type; };
typedef ResultType<FP32_SHARES>::Type Value;

enum : int {
  PARTS = WARPGROUP_M / 64,  // groups of 64 rows of a warpgroup
  COLUMNS = TILE_N / 64,  // groups of 64 channels of a tile
  FILTERS = WARPGROUP_M * CONSUMERS,
  BOX_BYTES = PIXELS * 128,
  BOX_WORDS = BOX_BYTES / 16,
  STAGE_BYTES = FILTERS / 64 * BOX_BYTES + COLUMNS * BOX_BYTES,
};

typedef RingPosition<STAGES> Ring;
typedef ClusterReduce<SPLIT, CONSUMERS, PARTS, TILE_N> Reduce;

// Addresses in shared memory, and the rank of this block in its cluster. Sums from other blocks arrive in the ring.
struct SmemLayout {
  u32 stages, full, empty, arrived, rank, stage_word;
  DEVICE_MEMBER void place(u32 base) {
    stages = base;
    full = stages + STAGES * STAGE_BYTES;
    empty = full + 8 * STAGES;
    arrived = empty + 8 * STAGES;
    stage_word = smem_desc_low_transposed(stages, BOX_BYTES);
    rank = SPLIT == 1 ? 0 : cluster_ctarank();
  }
};

// One tile of the gradient, and this block's iterations of its sum. The shares of two blocks differ by one iteration
// at most.
struct Tile {
  int filter, column, share, first, count;  // the first filter, and the first group of 64 channels, over all taps
  DEVICE_MEMBER Tile(int work, const SmemLayout& smem, const Sizes& sizes) {
    int rest = fast_div(work, sizes.tiles_k_divisor);
    share = fast_div(rest, sizes.tiles_n_divisor);
    filter = (work - rest * sizes.tiles_k) * FILTERS;
    column = (rest - share * sizes.tiles_n) * COLUMNS;
    int part = share * SPLIT + (int)smem.rank;
    first = part * sizes.each + (part < sizes.more ? part : sizes.more);
    count = sizes.each + (part < sizes.more);
  }
};

// Where 64 channels of x are read: from channel c on, at a filter tap so far right and down.
struct Column {
  int tap, c, right, down;
  DEVICE_MEMBER void find(int column, const Sizes& sizes) {
    tap = fast_div(column, sizes.c_blocks_divisor);
    int row = fast_div(tap, sizes.s_divisor);
    c = (column - tap * sizes.c_blocks) * 64;
    right = (tap - row * sizes.s) * sizes.dilation_w;
    down = row * sizes.dilation_h;
  }
};
