// Parameters of depthwise_shared.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header);
// these are one configuration that ships, so that an editor and a compiler can open the kernel by itself.
#pragma once

enum Parameter : int {
  BFLOAT = 0,  // bf16, else fp16
  Y_CHANNELS = 672,
  Y_ROWS = 14,
  Y_COLUMNS = 14,
  FILTER_R = 5,
  FILTER_S = 5,
  STRIDE_H = 1,
  STRIDE_W = 1,
  PAD_H = 2,
  PAD_W = 2,
  BATCH = 32,
  LANE_CHANNELS = 2,  // channels of a thread
  TILE_ROWS = 14,  // output rows of a block
  TILE_IMAGES = 1,  // images of a block
  STRIP = 7,  // output columns of a warp
  BAND_ROWS = 7,  // output rows that a warp goes down
  HAS_BIAS = 1,
  HAS_RESIDUAL = 0,
  ACTIVATION = 3,  // enum Activation
  MIN_BLOCKS_PER_SM = 2,
};
