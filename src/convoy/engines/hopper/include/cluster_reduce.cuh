// The sum over the blocks of a cluster that share a tile (split-K through distributed shared memory). A tile's sums
// are cut into items of 64 rows by sixteen columns; item i belongs to block i % SPLIT, the owner. Every block sends
// the owner its own sums; the owner adds them in the order of the ranks, so that the bits do not depend on who is
// first.
#pragma once
#include <ptx.cuh>

// SPLIT: blocks. CONSUMERS: warpgroups of a block. PARTS: groups of 64 rows of a warpgroup. TILE_N: columns.
template <int SPLIT, int CONSUMERS, int PARTS, int TILE_N> struct ClusterReduce {
  enum : int {
    GROUPS = TILE_N / 8,  // of eight columns
    PAIRS = (GROUPS + 1) / 2,  // of groups: the columns of an item
    ITEMS = PARTS * PAIRS,  // of a warpgroup
    MOST_OWNED = (ITEMS + SPLIT - 1) / SPLIT,  // items of one owner
  };

  // Groups of four sums of a thread in an item: the last item may have one group of columns only.
  static DEVICE_MEMBER int quads(int item) { return item % PAIRS * 2 + 1 < GROUPS ? 2 : 1; }

  // Where an owner receives four sums of a thread. `other` numbers the ranks without the owner.
  static DEVICE_MEMBER u32 inbox(u32 sums, int consumer, int owned, u32 other, int quad, int thread) {
    return sums + ((((consumer * MOST_OWNED + owned) * (SPLIT - 1) + other) * 2 + quad) * 128 + thread) * 16;
  }

  static DEVICE_MEMBER u32 inbox_bytes(u32 rank) {
    u32 bytes = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; item++)
      if (item % SPLIT == rank) bytes += quads(item) * CONSUMERS * (SPLIT - 1) * 128 * 16;
    return bytes;
  }

  static DEVICE_MEMBER void send(const float (&d)[PARTS][TILE_N / 2], u32 sums, u32 arrived, u32 rank, int consumer,
                                 int thread) {
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
      int owner = item % SPLIT;
      if (owner == rank) continue;
#pragma unroll
      for (int quad = 0; quad < quads(item); quad++) {
        const float* four = &d[item / PAIRS][item % PAIRS * 8 + quad * 4];
        u32 to = inbox(sums, consumer, item / SPLIT, rank < owner ? rank : rank - 1, quad, thread);
        st_async_v4(to, owner, four[0], four[1], four[2], four[3], arrived);
      }
    }
  }

  // The total of one item, in the owner.
  static DEVICE_MEMBER void add(float (&d)[TILE_N / 2], int item, u32 sums, u32 rank, int consumer, int thread) {
#pragma unroll
    for (int quad = 0; quad < quads(item); quad++) {
      float* own = &d[item % PAIRS * 8 + quad * 4];
      float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (u32 from = 0; from < SPLIT; from++) {
        float four[4] = {own[0], own[1], own[2], own[3]};
        if (from != rank)
          ld_shared_v4(four, inbox(sums, consumer, item / SPLIT, from < rank ? from : from - 1, quad, thread));
#pragma unroll
        for (int i = 0; i < 4; i++) total[i] += four[i];
      }
#pragma unroll
      for (int i = 0; i < 4; i++) own[i] = total[i];
    }
  }
};
