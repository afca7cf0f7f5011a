// Parameters of bottleneck.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header); these
// are ResNet-50's first stage, so that an editor and a compiler can open the kernel by itself.
#pragma once

enum Parameter : int {
  WIDTH = 56,  // of the image
  ROWS = 1,  // of the image that a multiplying warpgroup computes in a pass; ROWS * WIDTH is a multiple of 8
  CONSUMERS = 2,  // multiplying warpgroups
  IN_BLOCKS = 4,  // of 64 channels of x
  MID_BLOCKS = 1,  // of 64 channels between the convolutions
  OUT_BLOCKS = 4,  // of 64 channels of y
  X_STAGES = 3,  // of the ring of pixels
  WEIGHT_STAGES = 17,  // of the ring of weights; all chunks if RESIDENT
  RESIDENT = 1,  // 1: a block copies the weights once and keeps them
  AHEAD = 1,  // 1: the last convolution multiplies 64 filters while it stores the 64 before them
  CLUSTER = 1,  // blocks that copy weights for each other
  HAS_RESIDUAL = 1,  // a tensor like y is added to the last convolution's result
  BFLOAT = 0,  // bf16, else fp16
  FIRST_ACTIVATION = 1,  // enum Activation
  SECOND_ACTIVATION = 1,
  LAST_ACTIVATION = 1,
  PRODUCER_REGISTERS = 40,
  CONSUMER_REGISTERS = 232,
};
