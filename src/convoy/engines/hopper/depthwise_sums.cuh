// What depthwise kernels share: a thread has CHANNELS of STRIP output columns and goes down ROWS output rows; each input row is added to all
// output rows that see it, whose sums are in registers.
#define IN_FLIGHT ((R + STRIDE_H - 1) / STRIDE_H)  // output rows that one input row belongs to, at most
#define PERIOD (IN_FLIGHT * STRIDE_H)              // input rows after which their sums have the same registers again
#define SEEN ((STRIP - 1) * STRIDE_W + S)          // input columns of a strip
#define INPUT_ROWS ((ROWS - 1) * STRIDE_H + R)     // of a band
// Of an input row: whether a row of the filter sees it, which sums that row's products go to, whether an output row ends with it.
#define SEES(u, r) (((u) - (r) + R * STRIDE_H) % STRIDE_H == 0)
#define SLOT(u, r) (((u) - (r) + R * PERIOD) / STRIDE_H % IN_FLIGHT)
#define ENDS(u, i) (SEES(u, R - 1) && (i) >= R - 1)

struct alignas(4 * CHANNELS) Floats { float v[CHANNELS]; };

// One tap of a row of the filter, for all columns of the strip. A filter's first tap begins with what its results begin with.
DEVICE void add_tap(float (&sums)[STRIP][CHANNELS], const float (&in)[SEEN][CHANNELS], const Floats& weight, int r, int s, const float (&first)[CHANNELS]) {
#pragma unroll
  for (int t = 0; t < STRIP; t++)
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
      float before = r == 0 && s == 0 ? first[c] : sums[t][c];
      sums[t][c] = fmaf(in[t * STRIDE_W + s][c], weight.v[c], before);
    }
}
