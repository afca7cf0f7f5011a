// Parameters of first_layer.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header); these
// are one configuration that ships, so that an editor and a compiler can open the kernel by itself.
#pragma once

#define VALUE_BYTES 2  // of a value of x and y: 2 are half values, 4 are fp32 with TF32 products

enum Parameter : int {
  X_CHANNELS = 3,  // up to 4
  X_ROWS = 224,
  X_COLUMNS = 224,
  FILTERS = 64,  // up to 64, or 32 with PAIRED
  FILTER_ROWS = 7,  // of a product: with PAIRED those of both rows of y together
  STRIDE_H = 2,  // rows of x from one product to the next
  PHASES = 1,  // chunks of sixteen bytes from one window to the next; each phase lies in a plane of its own
  PAD_H = 3,
  PAD_W = 3,
  CONV_P = 112,  // rows of the convolution's result
  CONV_Q = 112,  // columns of the convolution's result
  TILE_N = 112,  // CONV_Q up to a multiple of 8
  STEPS = 4,  // pairs of chunks of a row of the filter
  CHUNKS = 119,  // of a plane of a row of x
  PAIRED = 0,  // 1: a product has the filters twice, the second time for the next row of y
  POOLED = 0,  // 1: a maximum of 3x3 with stride 2 follows
  POOL_PAD = 0,
  Y_ROWS = 112,
  Y_COLUMNS = 112,
  WARPGROUP_ROWS = 4,  // rows of y that a warpgroup makes: even with PAIRED
  WARPGROUPS = 2,  // of a block
  MIN_BLOCKS_PER_SM = 2,
  TILES = 14,  // blocks of an image
  PIXEL_PAIRS_ALIGNED = 1,  // two pixels of half values begin at a multiple of four bytes
  BFLOAT = 0,  // bf16, else fp16
  HAS_BIAS = 1,
  ACTIVATION = 1,  // enum Activation
};
