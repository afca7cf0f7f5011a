// Parameters of inverted_residual.cu and expand_depthwise.cu.
#pragma once

enum BlockParameter : int {
  CHANNELS = 24,  // of x: a multiple of 8, as those inside and the filters
  FILTERS = 24,  // of y: without a last convolution, the channels inside
  HEIGHT = 56,  // of x
  WIDTH = 56,
  TAPS = 3,  // side of the depthwise filter: 3 or 5
  STRIDE = 1,  // of the depthwise convolution: 1 or 2
  FIRST_ACTIVATION = 2,
  SECOND_ACTIVATION = 2,
  HAS_RESIDUAL = 1,  // x is added to y
  BFLOAT = 0,
  DEPENDENT = 1,
};

enum TileParameter : int {
  OCTETS = 2,  // of neighbouring columns of y
  ROWS = 4,  // of y in a unit, which is ROWS rows of an octet: a warp filters two units at a time
  BANDS = 2,  // units one below the other
  WARPS_K = 1,  // warps that share two units: each has every WARPS_K-th step of 16 channels inside
  SLICE = 48,  // channels inside that are expanded at a time: a multiple of 16 · WARPS_K
  SLICES = 3,
  WINDOWS = 1,  // of expanded values: with 2, a slice is expanded while the slice before it is filtered
  STAGES = 2,  // of the ring of weights: more than WINDOWS
  EXPAND_M = 2,  // tiles of 16 pixels that a warp expands at a time
  EXPAND_N = 1,  // warps that share such tiles, each with a part of the slice: a multiple of 16 channels
  CLUSTER = 1,  // blocks of a tile, each with a part of the slices; more than one from capability 9.0 on
  SHARE = 1,  // likewise, without a cluster: they have no sums in common
  BLOCK_N = 24,  // filters of a block: a multiple of 8; 0 without a last convolution
  MIN_BLOCKS = 1,  // of a multiprocessor, for which the compiler keeps registers
};
