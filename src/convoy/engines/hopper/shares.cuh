// What blocks of a cluster send each other that have one tile and a share of what it is summed over each: every block gets the others'
// sums of some items, and adds them.
//
// Wanted before: SPLIT, CONSUMERS, BN, GROUPS (of eight columns of a tile), PARTS (of 64 rows of a warpgroup).

// A tile's sums in items of sixteen columns and the rows of a part: each is stored by one block of a split, the owner.
#define PAIRS ((GROUPS + 1) / 2)
#define ITEMS (PARTS * PAIRS)
#define MOST_OWNED ((ITEMS + SPLIT - 1) / SPLIT)

#if SPLIT > 1
// How many sums an item has: of the last one perhaps the half.
DEVICE int quads(int item) { return item % PAIRS * 2 + 1 < GROUPS ? 2 : 1; }

// Where an owner gets four of a thread's sums from another rank.
DEVICE u32 inbox(u32 sums, int who, int owned, u32 other, int quad, int thread) {
  return sums + ((((who * MOST_OWNED + owned) * (SPLIT - 1) + other) * 2 + quad) * 128 + thread) * 16;
}

DEVICE u32 inbox_bytes(u32 rank) {
  u32 bytes = 0;
#pragma unroll
  for (int item = 0; item < ITEMS; item++)
    if (item % SPLIT == rank) bytes += quads(item) * CONSUMERS * (SPLIT - 1) * 128 * 16;
  return bytes;
}

DEVICE void send_sums(const float (&d)[PARTS][BN / 2], u32 sums, u32 arrived, u32 rank, int who, int thread) {
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    int owner = item % SPLIT;
    if (owner == rank) continue;
#pragma unroll
    for (int quad = 0; quad < quads(item); quad++) {
      const float* four = &d[item / PAIRS][item % PAIRS * 8 + quad * 4];
      send(inbox(sums, who, item / SPLIT, rank < owner ? rank : rank - 1, quad, thread), owner, four[0], four[1], four[2], four[3], arrived);
    }
  }
}

// Adds in the order of the ranks: the same bits whoever is first.
DEVICE void add_sums(float (&d)[BN / 2], int item, u32 sums, u32 rank, int who, int thread) {
#pragma unroll
  for (int quad = 0; quad < quads(item); quad++) {
    float* own = &d[item % PAIRS * 8 + quad * 4];
    float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (u32 from = 0; from < SPLIT; from++) {
      float four[4] = {own[0], own[1], own[2], own[3]};
      if (from != rank) receive(four, inbox(sums, who, item / SPLIT, from < rank ? from : from - 1, quad, thread));
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += four[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) own[i] = total[i];
  }
}
#endif
