// Parameters of igemm_swap_ab.cu and block_sparse.cu. Each build replaces this file with its own numbers
// (nvrtc_source.config_header); these are one configuration that ships, so that an editor and a compiler can open the
// kernels by themselves. The parameters that decide which arguments a kernel has are macros; the others are constants.
#pragma once

#define FP32_RESULTS 0  // 1: bias, residual and y are fp32, and each lane stores its own sums
// Results go through shared memory and tensor copies: 1 some of their own, 2 the ring's (one tile a block).
#define STAGED_STORE 0
// 0 packed on the host; 1 [k, taps, c] as it lies; 2 the same for a gradient of x: wgmma transposes it.
#define WEIGHT_LAYOUT 0
#define SPARSE 0  // 1: 2:4 weights, two values of every four channels with metadata that says which two

enum Parameter : int {
  WARPGROUP_M = 64,  // filters of a multiplying warpgroup: 64 or 128
  TILE_N = 128,  // pixels of a tile: a multiple of 8 * CLUSTER
  STAGES = 4,  // of the ring
  CONSUMERS = 2,  // multiplying warpgroups
  CLUSTER = 1,  // blocks of a cluster with the same pixels and different filters; 1 where SPLIT is more
  SPLIT = 1,  // blocks of a cluster that share a tile, each with some of the taps and channels
  DEPTH = 1,  // blocks of an iteration: each is one tap and 128 bytes of channels
  MIN_BLOCKS_PER_SM = 1,  // 2: the next kernel's weights arrive while this one ends
  STORE_PIXELS = 128,  // pixels of one tensor copy of results
  HALO_PITCH = 0,  // 3x3, stride 1: columns of a row of pixels that all nine taps read in shared memory; 0: no halo
  HALO_PIXELS = 128,  // pixels of a tile that lie in its rows
  HALO_ROWS = 0,  // of a box: the rows of a tile and their neighbours
  HALO_STAGES = 0,  // boxes of pixels in shared memory
  PLANES = 1,  // 2: x and weight are two planes of half values each, high and low (strict fp32)
  VALUE_BYTES = 2,  // of an operand's value
  BFLOAT = 0,  // bf16, else fp16
  HAS_BIAS = 1,
  HAS_RESIDUAL = 1,
  ACTIVATION = 1,  // enum Activation
  PRODUCER_REGISTERS = 40,
  CONSUMER_REGISTERS = 232,
};
