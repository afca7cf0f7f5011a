// Where blocks of swapped.cu share a tile: what they send each other, and what each makes of it.

#if SPLIT > 1
#if !WIDE
// Where a lane's residual of an item is, and its result where that is not staged.
DEVICE Place place_of(int item, int pixel0, int filter0, int lane, int unit, const Sizes& z) {
  Place at = place(item % PAIRS * 2, pixel0, filter0 + item / PAIRS * 64, lane, z.pixels, z.k);
#if PITCH
  Corner tile = corner(unit, z);
  int column = at.pixel - pixel0, row = tile.row + column / PITCH;
  at.inside = column < KEPT && column % PITCH < z.q && row < z.p && at.filter < z.k;
  at.pixel = (tile.image * z.p + row) * z.q + column % PITCH;
#endif
  return at;
}

// The items of this block. Residuals are asked for before the others' sums are there.
DEVICE void store_owned(float (&d)[PARTS][BN / 2], const Room& room, int who, int thread, int unit, int pixel0, int filter0, const Sizes& z, Value* __restrict__ y, const Value* __restrict__ residual) {
  int lane = thread % 32;
  u32 rank = room.rank;
#pragma unroll
  for (int from = 0; from < ITEMS; from += AT_ONCE * SPLIT) {
    uint4 more[AT_ONCE];
#pragma unroll
    for (int item = from; item < from + AT_ONCE * SPLIT && item < ITEMS; item++) {
      if (item % SPLIT != rank) continue;
      more[(item - from) / SPLIT] = make_uint4(0, 0, 0, 0);
#if RESIDUAL
      Place at = place_of(item, pixel0, filter0, lane, unit, z);
      if (at.inside) more[(item - from) / SPLIT] = *(const uint4*)(residual + (long long)at.pixel * z.k + at.filter);
#endif
    }
    if (from == 0 && inbox_bytes(rank)) barrier_wait_peers(room.arrived, 0);
#pragma unroll
    for (int item = from; item < from + AT_ONCE * SPLIT && item < ITEMS; item++) {
      if (item % SPLIT != rank) continue;
      add_sums(d[item / PAIRS], item, room.sums, rank, who, thread);
#if STAGED
      u32 words[4], added[4];
      spread(added, more[(item - from) / SPLIT], lane);
      finish(words, d[item / PAIRS], item % PAIRS * 2, added);
      put_groups(staged_row(room.staged + (who * MOST_OWNED + item / SPLIT) * 2048, thread), item % PAIRS * 2, words);
#else
      Place at = place_of(item, pixel0, filter0, lane, unit, z);
      store_groups(d[item / PAIRS], item % PAIRS * 2, more[(item - from) / SPLIT], at, lane, z.pitch, y);
#endif
    }
  }
}
#endif

#if STAGED
// What the warpgroup has put together, one copy for UNIT pixels of an item.
DEVICE void copy_owned(const Room& room, int who, int thread, const Corner& to, int k, const Map* y) {
  publish_writes();
  group_meet(who);
  if (thread) return;
  for (int item = room.rank; item < ITEMS; item += SPLIT) {
    int filter = to.filter + item / PAIRS * 64;
    for (int column = item % PAIRS * 16; column < item % PAIRS * 16 + 16 && column < BN && filter < k; column += UNIT)
      store_box(y, room.staged + (who * MOST_OWNED + item / SPLIT) * 2048 + column % 16 * 128, filter,
                PITCH ? column % (PITCH + !PITCH) : to.column + column, PITCH ? to.row + column / (PITCH + !PITCH) : 0, to.image);
  }
  stores_commit();
}
#endif
#endif
