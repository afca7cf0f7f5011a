// Depthwise kernels: a thread has LANE_CHANNELS of STRIP output columns and goes down BAND_ROWS output rows. Each
// input row is added to all output rows that it belongs to; their sums are in registers, and come round after PERIOD
// input rows.
//
//   input rows        output rows in flight (3x3, stride 1: three)
//     i - 1   ----->  sums[0]  row r = 2: ends here, is stored, its registers begin a new row
//     i       ----->  sums[1]  row r = 1
//     i + 1   ----->  sums[2]  row r = 0
#pragma once
#include <ptx.cuh>

// The kernel's own *_config.cuh stands in front of this header.
enum : int {
  IN_FLIGHT = (FILTER_R + STRIDE_H - 1) / STRIDE_H,  // output rows that one input row belongs to, at most
  PERIOD = IN_FLIGHT * STRIDE_H,  // input rows after which sums have the same registers again
  SEEN = (STRIP - 1) * STRIDE_W + FILTER_S,  // input columns of a strip
  INPUT_ROWS = (BAND_ROWS - 1) * STRIDE_H + FILTER_R,
};

// Of input row u of a period: whether it meets row r of the filter, which sums its products go to, and whether output
// row `i` ends with it.
DEVICE constexpr bool meets(int u, int r) { return (u - r + FILTER_R * STRIDE_H) % STRIDE_H == 0; }
DEVICE constexpr int slot_of(int u, int r) { return (u - r + FILTER_R * PERIOD) / STRIDE_H % IN_FLIGHT; }
DEVICE constexpr bool ends(int u, int i) { return meets(u, FILTER_R - 1) && i >= FILTER_R - 1; }

struct alignas(4 * LANE_CHANNELS) Floats { float v[LANE_CHANNELS]; };

// One tap of a row of the filter, for all columns of the strip. The filter's first tap begins the sums with `first`.
DEVICE void add_tap(float (&sums)[STRIP][LANE_CHANNELS], const float (&in)[SEEN][LANE_CHANNELS], const Floats& weight,
                    int r, int s, const float (&first)[LANE_CHANNELS]) {
#pragma unroll
  for (int t = 0; t < STRIP; t++)
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; c++) {
      float before = r == 0 && s == 0 ? first[c] : sums[t][c];
      sums[t][c] = fmaf(in[t * STRIDE_W + s][c], weight.v[c], before);
    }
}
