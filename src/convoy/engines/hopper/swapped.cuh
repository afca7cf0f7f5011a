// What kernels share whose rows are filters and whose columns are pixels: how their sums begin, and their stores. With WIDE, bias,
// residual and results are fp32.
#if WIDE
typedef float Value;
DEVICE float widened(Value v) { return v; }
// Of planes: 1 / s of x, and of each filter of the weight.
struct Scales { const float *x, *weight; };
#else
typedef u16 Value;
DEVICE float widened(Value v) { return unpack(v); }
#endif
#define GROUPS (BN / 8)
#define PARTS (ROWS / 64)
#define AT_ONCE 4

#if !WIDE
// The sixteen bytes of residual, or of y, that a lane has of two groups of eight pixels by the sixteen filters of a warp: eight
// filters of one pixel. None where they lie outside.
struct Place { int pixel, filter; bool inside; };
DEVICE Place place(int g, int pixel0, int filter0, int lane, int pixels, int k) {
  int part = lane % 4, pixel = pixel0 + (g + part / 2) * 8 + lane / 4, filter = filter0 + part % 2 * 8;
  return {pixel, filter, g + part / 2 < GROUPS && pixel < pixels && filter < k};
}

// Two groups as halves, with what is added to them: words of two neighbouring pixels of a filter.
DEVICE void finish(u32 (&words)[4], const float (&d)[BN / 2], int g, const u32 (&added)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int group = g + i / 2, half = i % 2;
    float low = 0.f, high = 0.f;
    if (group < GROUPS) { low = d[4 * group + 2 * half]; high = d[4 * group + 2 * half + 1]; }
#if RESIDUAL
    low += unpack((u16)(added[i] & 0xffff));
    high += unpack((u16)(added[i] >> 16));
#endif
    words[i] = pack(activated(low), activated(high));
  }
}

// Sixteen bytes of residual that a lane asked for as what it adds to its sums.
DEVICE void spread(u32 (&added)[4], uint4 more, int lane) {
  added[0] = more.x, added[1] = more.y, added[2] = more.z, added[3] = more.w;
#if RESIDUAL
  transpose(added, lane % 4);
#pragma unroll
  for (int i = 0; i < 4; i++) added[i] = transposed(added[i]);
#endif
}

// These two groups to y.
DEVICE void store_groups(const float (&d)[BN / 2], int g, uint4 more, const Place& to, int lane, int pitch, Value* __restrict__ y) {
  u32 words[4], added[4];
  spread(added, more, lane);
  finish(words, d, g, added);
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = transposed(words[i]);
  transpose(words, lane % 4);
  if (to.inside) *(uint4*)(y + (long long)to.pixel * pitch + to.filter) = make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp's sixteen filters of a part, by all pixels of the tile. Residuals are asked for some groups at a time, before these are
// stored: a load that stands behind a store waits for it.
DEVICE void store_sums(const float (&d)[BN / 2], int pixel0, int filter0, int lane, int pixels, int k, int pitch, Value* __restrict__ y, const Value* __restrict__ residual) {
#pragma unroll
  for (int first = 0; first < GROUPS; first += 2 * AT_ONCE) {
    Place to[AT_ONCE];
    uint4 more[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      to[i] = place(first + 2 * i, pixel0, filter0, lane, pixels, k);
      more[i] = make_uint4(0, 0, 0, 0);
#if RESIDUAL
      if (to[i].inside) more[i] = *(const uint4*)(residual + (long long)to[i].pixel * k + to[i].filter);
#endif
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (first + 2 * i < GROUPS) store_groups(d, first + 2 * i, more[i], to[i], lane, pitch, y);
  }
}

#endif

// Sums begin with the bias: it is asked for before anything is stored, and needs no registers of its own.
DEVICE void begin(float (&d)[PARTS][BN / 2], int filter0, int lane, int k, const Value* __restrict__ bias) {
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    float added[2] = {0.f, 0.f};
#if BIAS
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int filter = filter0 + part * 64 + half * 8 + lane / 4;
      if (filter < k) added[half] = widened(bias[filter]);
    }
#endif
#pragma unroll
    for (int i = 0; i < BN / 2; i++) d[part][i] = added[i / 2 % 2];
  }
}
