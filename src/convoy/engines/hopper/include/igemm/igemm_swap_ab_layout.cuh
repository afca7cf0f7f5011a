// igemm_swap_ab.cu: the sizes that the host gives, the layout of shared memory, and where in the tensors a copy or a
// tile is.
#pragma once
#include <cluster_reduce.cuh>
#include <igemm/igemm_swap_ab_sums.cuh>
#include <ring.cuh>
#include <wgmma.cuh>

struct Sizes {
  int pixels, k, pitch, p, q, pq, groups, work_items, channels, iterations, each, s, c_blocks, span_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
#if !SPARSE
  int images;
#endif
#if WEIGHT_LAYOUT
  int taps;
#endif
  Divisor q_divisor, pq_divisor, groups_divisor, s_divisor, c_blocks_divisor;
};

enum : int {
  HAS_HALO = HALO_PITCH > 0,
  ROW_PITCH = HAS_HALO ? HALO_PITCH : 1,  // a divisor that is not zero without a halo
  FILTERS = WARPGROUP_M * CONSUMERS,
  PIXEL_BYTES = HAS_HALO ? 0 : TILE_N * 128 * PLANES,
  PART_WORDS = SPARSE ? 256 : 512,  // of sixteen bytes: the values of 64 filters
  PLANE_WORDS = FILTERS * 8,
  CHUNK_BYTES = FILTERS * (SPARSE ? 72 : 128 * PLANES),
  STAGE_BYTES = DEPTH * PIXEL_BYTES + (DEPTH * CHUNK_BYTES + 1023) / 1024 * 1024,
  CHANNELS = 128 / VALUE_BYTES,  // of a block
  HALO_COPIED = HALO_ROWS * HALO_PITCH * 128,
  BOX_BYTES = (HALO_COPIED + 1023) / 1024 * 1024,
  HALO_BYTES = BOX_BYTES * PLANES,
  HALOS_BYTES = HALO_STAGES * HALO_BYTES,
  SHARE = TILE_N / CLUSTER,  // pixels that one block of a cluster copies
  // Iterations whose products may be under way: their stages are not free yet.
  PENDING = PARTS * TILE_N >= 384 ? 1 : STAGES >= 6 ? 3 : STAGES >= 4 ? 2 : 1,
  // Threads that copy pixels. A wait knows a round by its parity alone: with an odd number of stages, a thread might
  // come to a stage whose last round it did not fill itself, and arrivals from other blocks might come out of order.
  COPIERS = CLUSTER > 1 && STAGES % 2 ? 1 : 2,
};

typedef RingPosition<STAGES> Ring;
typedef ClusterReduce<SPLIT, CONSUMERS, PARTS, TILE_N> Reduce;
enum : int {
  INBOX_BYTES = SPLIT == 1 ? 0 : CONSUMERS * Reduce::MOST_OWNED * (SPLIT - 1) * 4096,
  STAGED_BYTES = STAGED_STORE != 1 ? 0 : CONSUMERS * (SPLIT == 1 ? PARTS * TILE_N * 128 : Reduce::MOST_OWNED * 2048),
};

// A thread's sums. Of planes: the total, the body since it was last added to the total, and the correction.
template <int> struct SumsOf { float d[PARTS][TILE_N / 2]; };
template <> struct SumsOf<2> { float d[PARTS][TILE_N / 2], body[PARTS][TILE_N / 2], correction[PARTS][TILE_N / 2]; };
typedef SumsOf<PLANES> Sums;

// Addresses in shared memory, and the rank of this block in its cluster.
struct SmemLayout {
  u32 stages, halos, staged, sums, full, empty, halo_full, halo_empty, given, arrived, rank;
  u32 stage_word, halo_word;  // low descriptor words of stages and of halos
  DEVICE_MEMBER void place(u32 base) {
    stages = base;
    halos = stages + STAGES * STAGE_BYTES;
    sums = halos + HALOS_BYTES + STAGED_BYTES;
    staged = STAGED_STORE == 2 ? stages : halos + HALOS_BYTES;
    full = sums + INBOX_BYTES;
    empty = full + 8 * STAGES;
    halo_full = empty + 8 * STAGES;
    halo_empty = halo_full + 8 * HALO_STAGES;
    given = halo_empty + 8 * HALO_STAGES;
    arrived = given + 8 * CONSUMERS;
    stage_word = smem_desc_low(stages);
    halo_word = smem_desc_low(halos);
    rank = CLUSTER * SPLIT == 1 ? 0 : cluster_ctarank();
  }
};

// This block's iterations of a tile: all of them, or its share.
DEVICE int first_of(u32 rank, const Sizes& sizes) { return SPLIT == 1 ? 0 : (int)rank * sizes.each; }
DEVICE int count_of(u32 rank, const Sizes& sizes) {
  int left = sizes.iterations - first_of(rank, sizes);
  return SPLIT == 1 || left < sizes.each ? left : sizes.each;
}

// Where a block of channels is read: from c on, at a filter tap so far right and down.
struct Tap {
  int c, right, down;
  DEVICE_MEMBER void begin(int iteration, const Sizes& sizes) {
    c = right = down = 0;
    if constexpr (SPLIT > 1) {
      int at = iteration * DEPTH, tap = fast_div(at, sizes.c_blocks_divisor), row = fast_div(tap, sizes.s_divisor);
      c = (at - tap * sizes.c_blocks) * CHANNELS;
      right = (tap - row * sizes.s) * sizes.dilation_w;
      down = row * sizes.dilation_h;
    }
  }
  // The next channels, the next tap of the row, the next row.
  DEVICE_MEMBER void next(const Sizes& sizes) {
    c += CHANNELS;
    if (c < sizes.channels) return;
    c = 0;
    right += sizes.dilation_w;
    if (right >= sizes.span_w) { right = 0; down += sizes.dilation_h; }
  }
};

// A position in the ring of halos: which of a box's nine taps is next, and where its pixels begin, in units of sixteen
// bytes.
struct Halo {
  int stage;
  u32 phase, tap, at;
  DEVICE_MEMBER void advance() {
    tap = at = 0;
    if (++stage == HALO_STAGES) { stage = 0; phase ^= 1; }
  }
  DEVICE_MEMBER void next() {
    tap += DEPTH;
    if (tap == 9) return advance();
    at += DEPTH == 3 ? HALO_PITCH * 8 : tap == 3 || tap == 6 ? (HALO_PITCH - 2) * 8 : 8;
  }
};

// Where a tile begins in y, in the order of its dimensions.
struct Corner { int filter, column, row, image; };

DEVICE Corner corner(int work, const Sizes& sizes) {
  int tile = fast_div(work, sizes.groups_divisor);
  if constexpr (HAS_HALO) {
    int image = fast_div(tile, sizes.pq_divisor);  // `pq` tiles an image
    return {0, 0, (tile - image * sizes.pq) * (TILE_N / ROW_PITCH), image};
  } else {
    return {0, tile * TILE_N, 0, 0};
  }
}

// The image of a plane of x: the planes follow each other.
DEVICE int image_of_plane(int image, int plane, const Sizes& sizes) {
#if SPARSE
  return image;
#else
  return image + plane * sizes.images;
#endif
}
