// Results through shared memory: a warpgroup's 64 filters by a tile's pixels in rows of 128 bytes, in the 128-byte swizzle, and one
// tensor copy for them. Residuals come the same way, while products run, and lie where the results will.
// Where in y a tile begins, in the order of its dimensions.
struct Corner { int filter, column, row, image; };

#if STAGED
#define ROW 128

// The row of eight filters that a lane gives of the first sixteen pixels: two groups of pixels by two of filters.
DEVICE u32 staged_row(u32 staged, int thread) {
  int lane = thread % 32, row = lane % 8 + lane / 16 * 8, eight = thread / 32 * 2 + lane / 8 % 2;
  return staged + row * ROW + ((eight ^ lane % 8) << 4);
}

DEVICE void put_groups(u32 at, int g, const u32 (&words)[4]) {
  if (g + 1 < GROUPS) put_matrices(at, words); else put_two_matrices(at, words);
}

#if SPLIT == 1
DEVICE void ask_residuals(u32 staged, u32 bar, const Corner& from, int k, const Map* residual) {
  u32 bytes = 0;
#pragma unroll
  for (int part = 0; part < PARTS; part++) bytes += from.filter + part * 64 < k ? KEPT * ROW : 0;
  barrier_expect(bar, bytes);
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    if (from.filter + part * 64 < k)
      copy_box(staged + part * BN * ROW, residual, bar, from.filter + part * 64, from.column, from.row, from.image);
}

// A warpgroup's sums to y, each part of 64 filters as soon as it is there.
DEVICE void store_staged(const float (&d)[PARTS][BN / 2], u32 staged, int who, int thread, const Corner& to, int k, const Map* y) {
  u32 at = staged_row(staged, thread);
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
#pragma unroll
    for (int g = 0; g < GROUPS; g += 2) {
      u32 words[4], added[4] = {0, 0, 0, 0}, place = at + (part * BN + g * 8) * ROW;
#if RESIDUAL
      if (g + 1 < GROUPS) get_matrices(added, place); else get_two_matrices(added, place);
#endif
      finish(words, d[part], g, added);
      put_groups(place, g, words);
    }
    publish_writes();
    group_meet(who);
    if (thread == 0 && to.filter + part * 64 < k) {
      store_box(y, staged + part * BN * ROW, to.filter + part * 64, to.column, to.row, to.image);
      stores_commit();
    }
  }
}
#endif
#endif
