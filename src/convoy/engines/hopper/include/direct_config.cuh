// Parameters of direct.cu. Each build replaces this file with its own numbers (nvrtc_source.config_header); these are
// one configuration that ships, so that an editor and a compiler can open the kernel by itself. Offsets are bytes of
// shared memory.
#pragma once

#define COPY_MODE 0  // how x is copied: 0 a float at a time, 1 four at a time (1x1 filters), 2 all channels as one run
#define ROWS_OF_PHASES 0  // a byte each; more than four do not fit an int
#define COLUMNS_OF_PHASES 0
#define SEND_FLOATS 4  // floats of one store to another block: 1, 2 or 4

enum Parameter : int {
  HALF = 0,  // values in memory are fp16, else fp32; sums are fp32
  VECTORS = 4,  // positions of a lane
  FILTERS = 8,  // of a block
  SLICES = 2,  // blocks of a cluster, each with some of the channels
  PARTS = 1,  // warps that share a filter's entries
  FILTERS_OF_WARP = 1,  // one after another
  CHANNELS = 32,  // of a slice
  FILTER_BLOCKS = 8,  // of a group
  GROUP_CHANNELS = 64,
  GROUP_FILTERS = 64,
  TILES = 7,  // of positions
  BATCH = 1,
  X_CHANNELS = 64,
  X_ROWS = 28,
  X_COLUMNS = 28,
  Y_CHANNELS = 64,
  Y_ROWS = 28,
  Y_COLUMNS = 28,
  STRIDE_H = 1,
  STRIDE_W = 1,
  PAD_H = 1,
  PAD_W = 1,
  PITCH = 30,  // positions of a row
  IMAGE_ROWS = 30,  // of positions
  SPAN = 192,  // floats of a plane in shared memory
  PHASES_H = 1,  // rows that the taps of a strided filter begin at
  PHASES_W = 1,
  ALONG = 64,  // threads that copy a plane together
  ON_THEIR_WAY = 16,  // floats that a thread loads before it stores them
  WIDTH = 4,  // sums that a lane sends, VECTORS of them real
  ZEROS_OFFSET = 24576,
  BARRIER_OFFSET = 25088,
  RECEIVED_OFFSET = 25104,
  LIST_OFFSET = 33296,
  LIST_HEAD = 12,  // words in front of the entries
  HAS_BIAS = 1,
  HAS_RESIDUAL = 1,
  ACTIVATION = 1,  // enum Activation
};
