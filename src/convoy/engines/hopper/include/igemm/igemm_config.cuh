// Parameters of igemm.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header); these are
// one configuration that ships, so that an editor and a compiler can open the kernel by itself.
#pragma once

#define HAS_RESIDUAL 1  // a macro: an unused local array would change the order of registers

enum Parameter : int {
  WARPGROUP_M = 64,  // pixels of a multiplying warpgroup: 64 or 128
  TILE_N = 128,  // filters of a tile: a multiple of 8
  STAGES = 4,  // of the ring
  CONSUMERS = 2,  // multiplying warpgroups
  PINGPONG = 0,  // 1: each warpgroup has tiles of its own, in turn; one stores while another multiplies
  CLUSTER = 1,  // blocks of a cluster with the same filters and different pixels; 1 where SPLIT is more
  SPLIT = 1,  // blocks of a cluster that share a tile, each with some of the taps and channels
  VALUE_BYTES = 2,  // of x, weight and y: 2 are half values, 4 are fp32 with TF32 products
  BFLOAT = 0,  // bf16, else fp16
  HAS_BIAS = 1,
  ACTIVATION = 1,  // enum Activation
  PRODUCER_REGISTERS = 40,
  CONSUMER_REGISTERS = 232,
};
