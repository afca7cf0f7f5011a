// Parameters of csr.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header); these are one
// configuration that ships, so that an editor and a compiler can open the kernels by themselves.
#pragma once

enum Parameter : int {
  HALF = 0,  // values in memory are fp16, else fp32; sums are fp32
  THREADS = 128,  // of a block
  PIXELS = 4,  // of a thread
  HAS_BIAS = 1,
  HAS_RESIDUAL = 1,
  ACTIVATION = 1,  // enum Activation
};
