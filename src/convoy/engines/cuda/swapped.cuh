// What kernels share whose rows are filters and whose columns are pixels: their place in the ring, and their stores.
typedef u16 Value;
#define GROUPS (BN / 8)

// n / d for 0 <= n < 2^31, where the host made `factor` and `shift` of d: a division of its own takes some hundred cycles.
DEVICE int quotient(int n, u32 factor, u32 shift) { return (int)((u64)(u32)n * factor >> shift); }

struct Ring {  // a place in the ring of stages
  int stage;
  u32 phase;
  DEVICE_MEMBER void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
};

// Two groups of eight pixels by the sixteen filters of a warp: a lane's sums are two neighbouring pixels of a filter, its sixteen
// bytes of y eight filters of a pixel.
DEVICE void store_groups(const float (&d)[BN / 2], int g, int pixel0, int filter0, int lane, const float (&added)[2], int pixels, int k, int pitch, Value* y, const Value* residual) {
  int part = lane % 4, pixel = pixel0 + (g + part / 2) * 8 + lane / 4, filter = filter0 + part % 2 * 8;
  bool mine = g + part / 2 < GROUPS && pixel < pixels && filter < k;
  u32 words[4];
#if RESIDUAL
  u32 more[4] = {0, 0, 0, 0};
  if (mine) {
    uint4 four = *(const uint4*)(residual + (long long)pixel * k + filter);
    more[0] = four.x; more[1] = four.y; more[2] = four.z; more[3] = four.w;
  }
  transpose(more, part);
#endif
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int group = g + i / 2, half = i % 2;
    float low = 0.f, high = 0.f;
    if (group < GROUPS) { low = d[4 * group + 2 * half]; high = d[4 * group + 2 * half + 1]; }
    low += added[half];
    high += added[half];
#if RESIDUAL
    u32 two = transposed(more[i]);
    low += unpack((u16)(two & 0xffff));
    high += unpack((u16)(two >> 16));
#endif
    words[i] = transposed(pack(activated(low), activated(high)));
  }
  transpose(words, part);
  if (mine) *(uint4*)(y + (long long)pixel * pitch + filter) = make_uint4(words[0], words[1], words[2], words[3]);
}

// A warp's sixteen filters of a part, by all pixels of the tile.
DEVICE void store_sums(const float (&d)[BN / 2], int pixel0, int filter0, int lane, int pixels, int k, int pitch, Value* y, const Value* residual, const Value* bias) {
  float added[2] = {0.f, 0.f};
#if BIAS
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int filter = filter0 + half * 8 + lane / 4;
    if (filter < k) added[half] = unpack(bias[filter]);
  }
#endif
#pragma unroll
  for (int g = 0; g < GROUPS; g += 2)
    store_groups(d, g, pixel0, filter0, lane, added, pixels, k, pitch, y, residual);
}
