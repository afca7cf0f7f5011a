// Parameters of igemm_wgrad.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header); these
// are one configuration that ships, so that an editor and a compiler can open the kernel by itself.
#pragma once

enum Parameter : int {
  WARPGROUP_M = 64,  // filters of a multiplying warpgroup: 64 or 128
  TILE_N = 128,  // columns of a tile: a multiple of 64
  PIXELS = 64,  // of an iteration: 64 or 128
  STAGES = 4,  // of the ring
  CONSUMERS = 2,  // multiplying warpgroups
  SPLIT = 1,  // blocks of a cluster that share a tile, each with some of the pixels
  MIN_BLOCKS_PER_SM = 1,
  FP32_SHARES = 0,  // 1: results are fp32, the sums of several clusters for one tile, which another kernel adds
  X_HAS_PIXELS_OF_DY = 0,  // 1: the pixels of x are those of dy, so x is copied as plain boxes, too
  BFLOAT = 1,  // bf16, else fp16
  PRODUCER_REGISTERS = 40,
  CONSUMER_REGISTERS = 232,
};
