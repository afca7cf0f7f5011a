// Parameters of squeeze_excitation.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header);
// these are one configuration that ships, so that an editor and a compiler can open the kernel by itself.
#pragma once

enum Parameter : int {
  VALUE_BYTES = 2,  // of x, residual and y: 2 or 4
  BFLOAT = 0,  // bf16, else fp16
  CHANNELS = 480,
  HIDDEN = 20,  // channels between the layers
  PIXELS = 196,  // of an image
  ROWS = 4,  // parts of an image's pixels
  BLOCK_C = 64,  // channels of a block
  THREADS = 128,  // of a block
  MOST_HELD = 32,  // weights of a layer that a thread may hold in registers before they are needed
  MIN_BLOCKS_PER_SM = 0,  // 0: the compiler may spill registers for more blocks beside each other
  INNER = 3,  // enum Activation of the first layer
  OUTER = 6,  // of the second
  HAS_BIAS = 1,  // the first layer
  HAS_SHIFT = 1,  // the second one
  HAS_RESIDUAL = 0,
  RELU_BEHIND = 0,
  DEPENDENT = 1,  // programmatic dependent launch: capability 9.0 and newer
};
