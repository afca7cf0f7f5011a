// Parameters of gated_1x1.cu besides those of the block in front (squeeze_excitation_config.cuh).
#pragma once

enum ProductParameter : int {
  FILTERS = 112,
  BLOCK_M = 64,  // pixels that a block computes at a time, of one image: a multiple of 16 · WARPS_M
  PASSES = 1,  // times BLOCK_M pixels that a block computes, one after the other
  BLOCK_N = 56,  // filters of a block: a multiple of 8
  WARPS_M = 4,  // warps along the pixels
  WARPS_K = 1,  // warps along the channels
  CHUNK = 80,  // channels of a stage: a multiple of 16 · WARPS_K
  STAGES = 3,  // of the ring of pixels, at least 2
  HAS_PRODUCT_BIAS = 1,
  ADDS_RESIDUAL = 0,
  RELU_AT_END = 0,
};
