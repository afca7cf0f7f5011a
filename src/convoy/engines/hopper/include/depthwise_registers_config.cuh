// Parameters of depthwise_registers.cu. Each build replaces this file with its own numbers
// (nvrtc_source.config_header); these are one configuration that ships, so that an editor and a compiler can open the
// kernel by itself.
#pragma once

enum Parameter : int {
  VALUE_BYTES = 2,  // of x, bias, residual and y: 2 or 4
  BFLOAT = 0,  // bf16, else fp16
  LANE_CHANNELS = 4,  // channels of a thread: 2 or 4
  FILTER_R = 3,
  FILTER_S = 3,
  STRIDE_H = 1,
  STRIDE_W = 1,
  STRIP = 2,  // output columns of a thread
  BAND_ROWS = 4,  // output rows that a thread goes down
  AHEAD = 1,  // input rows that are loaded before they are needed
  WEIGHTS_IN_REGISTERS = 1,  // else they are loaded anew for each input row
  HAS_BIAS = 1,
  HAS_RESIDUAL = 0,
  ACTIVATION = 1,  // enum Activation
  DEPENDENT = 1,  // programmatic dependent launch: capability 9.0 and newer
  THREADS = 128,  // of a block
  MIN_BLOCKS_PER_SM = 4,
};
