// Results in fp32: each lane stores its own sums, four bytes each. Eight lanes have neighbouring filters of one pixel.
#if WIDE
// Where a lane's sums of a part belong: a warp's sixteen filters from `filter` on, of which it has its own and that eight below.
struct Target {
  int pixel0, filter;
  Corner tile;
};

// A tile's column as a pixel of y, or -1.
DEVICE int pixel_of(const Target& to, int column, const Sizes& z) {
#if PITCH
  int row = to.tile.row + column / PITCH, x = column % PITCH;
  return column < KEPT && x < z.q && row < z.p ? (to.tile.image * z.p + row) * z.q + x : -1;
#else
  int pixel = to.pixel0 + column;
  return pixel < z.pixels ? pixel : -1;
#endif
}

// What a filter's sums are multiplied with, and what is added: planes are scaled, and so their sums cannot begin with the bias.
struct Finish { float x, factor[2], bias[2]; };
DEVICE Finish finish_of(int filter, const Scales& scales, const Value* __restrict__ bias, const Sizes& z) {
  Finish found = {1.f, {1.f, 1.f}, {0.f, 0.f}};
#if PLANES == 2
  found.x = *scales.x;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (filter + 8 * half >= z.k) continue;
    found.factor[half] = scales.weight[filter + 8 * half];
#if BIAS
    found.bias[half] = bias[filter + 8 * half];
#endif
  }
#endif
  return found;
}

// A lane's sums of two groups of eight pixels: two neighbouring pixels of each of two filters, of each group.
#define EIGHT(i) int group = g + i / 4, half = i / 2 % 2, pixel = pixel_of(to, group * 8 + own + i % 2, z), filter = to.filter + half * 8; \
  bool inside = group < GROUPS && pixel >= 0 && filter < z.k

DEVICE void ask_eight(float (&more)[8], int g, const Target& to, int lane, const Value* __restrict__ residual, const Sizes& z) {
#if RESIDUAL
  int own = (int)opaque(lane % 4 * 2);  // or all columns' places would be worked out before the first product, and kept
#endif
#pragma unroll
  for (int i = 0; i < 8; i++) {
    more[i] = 0.f;
#if RESIDUAL
    EIGHT(i);
    if (inside) more[i] = residual[(long long)pixel * z.k + filter];
#endif
  }
}

DEVICE void store_eight(const float (&d)[BN / 2], int g, const float (&more)[8], const Target& to, int lane, const Finish& finish, const Sizes& z, Value* __restrict__ y) {
  int own = (int)opaque(lane % 4 * 2);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    EIGHT(i);
    if (!inside) continue;
    float v = d[4 * (g + i / 4) % (BN / 2) + i % 4];
#if PLANES == 2
    v = v * finish.x * finish.factor[half] + finish.bias[half];  // one after the other: their product may be no normal number
#endif
    y[(long long)pixel * z.pitch + filter] = activated(v + more[i]);
  }
}

#define ASKED (PARTS == 1 ? 2 : 1)  // where sums leave registers for so many

// A warp's sixteen filters of a part, by all pixels of the tile. Residuals are asked for some groups at a time, before these are
// stored: a load that stands behind a store waits for it.
DEVICE void store_wide(const float (&d)[BN / 2], const Target& to, int lane, const Finish& finish, const Sizes& z, Value* __restrict__ y, const Value* __restrict__ residual) {
#pragma unroll
  for (int first = 0; first < GROUPS; first += 2 * ASKED) {
    float more[ASKED][8];
#pragma unroll
    for (int i = 0; i < ASKED; i++) ask_eight(more[i], first + 2 * i, to, lane, residual, z);
#pragma unroll
    for (int i = 0; i < ASKED; i++)
      if (first + 2 * i < GROUPS) store_eight(d, first + 2 * i, more[i], to, lane, finish, z, y);
  }
}

#if SPLIT > 1
// The items of this block.
DEVICE void store_owned_wide(float (&d)[PARTS][BN / 2], const Room& room, int who, int thread, const Target& to, const Finish (&finish)[PARTS], const Sizes& z, Value* __restrict__ y, const Value* __restrict__ residual) {
  int lane = thread % 32;
  if (inbox_bytes(room.rank)) barrier_wait_peers(room.arrived, 0);
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (item % SPLIT != room.rank) continue;
    int part = item / PAIRS, g = item % PAIRS * 2;
    Target own = {to.pixel0, to.filter + part * 64, to.tile};
    float more[8];
    ask_eight(more, g, own, lane, residual, z);
    add_sums(d[part], item, room.sums, room.rank, who, thread);
    store_eight(d[part], g, more, own, lane, finish[part], z, y);
  }
}
#endif
#endif
