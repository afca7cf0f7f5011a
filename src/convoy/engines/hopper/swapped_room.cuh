// What swapped.cu works on: sizes, what lies where in shared memory, and where in the tensors a copy or a tile is.

struct Sizes {
  int pixels, k, pitch, p, q, pq, groups, units, channels, iterations, each, s, c_blocks, span_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
#if !SPARSE
  int images;
#endif
#if WEIGHTS
  int taps;
#endif
  u32 q_factor, q_shift, pq_factor, pq_shift, groups_factor, groups_shift, s_factor, s_shift, c_blocks_factor, c_blocks_shift;
};

#define FILTERS (ROWS * CONSUMERS)
#define PIXEL_BYTES (PITCH ? 0 : BN * 128 * PLANES)
#define PART_WORDS (SPARSE ? 256 : 512)  // of sixteen bytes: the values of 64 filters
#define PLANE_WORDS (FILTERS * 8)
#if SPARSE
#define OF_PLANE(image, plane) (image)
#else
#define OF_PLANE(image, plane) ((image) + (plane) * z.images)  // planes of x follow each other
#endif
#define CHUNK_BYTES (FILTERS * (SPARSE ? 72 : 128 * PLANES))
#define STAGE_BYTES (DEPTH * PIXEL_BYTES + (DEPTH * CHUNK_BYTES + 1023) / 1024 * 1024)
#define CHANNELS (128 / BYTES)
#define KEPT (PITCH ? BN / (PITCH + !PITCH) * PITCH : BN)  // pixels of a tile that are in its rows
#define HALO_COPIED (HALO_ROWS * PITCH * 128)
#define BOX_BYTES ((HALO_COPIED + 1023) / 1024 * 1024)
#define HALO_BYTES (BOX_BYTES * PLANES)
#define HALOS_BYTES (HALOS * HALO_BYTES)
#define SHARE (BN / CLUSTER)
#define PENDING (PARTS * BN >= 384 ? 1 : STAGES >= 6 ? 3 : STAGES >= 4 ? 2 : 1)
#define SETS (PENDING + 1)
// Threads that copy pixels. A wait knows rounds by their parity alone: with an odd number of stages, a thread may come to one
// whose last round it did not fill itself, and arrivals from other blocks might not come in their order.
#define COPIERS (CLUSTER > 1 && STAGES % 2 ? 1 : 2)

#define INBOX_BYTES (SPLIT == 1 ? 0 : CONSUMERS * MOST_OWNED * (SPLIT - 1) * 4096)
#define STAGED_BYTES (STAGED != 1 ? 0 : CONSUMERS * (SPLIT == 1 ? PARTS * BN * 128 : MOST_OWNED * 2048))

// A thread's sums. Of planes, the body's since they were last added to the total, and the correction's.
struct Sums {
  float d[PARTS][BN / 2];
#if PLANES == 2
  float body[PARTS][BN / 2], correction[PARTS][BN / 2];
#endif
};

// Where things lie in shared memory, and which block of the cluster this is.
struct Room {
  u32 stages, halos, staged, sums, full, empty, halo_full, halo_empty, given, arrived, rank;
  u32 stage_word, halo_word;  // of stages and of halos, as operands
  DEVICE_MEMBER void lay_out(u32 base) {
    stages = base;
    halos = stages + STAGES * STAGE_BYTES;
    sums = halos + HALOS_BYTES + STAGED_BYTES;
    staged = STAGED == 2 ? stages : halos + HALOS_BYTES;
    full = sums + INBOX_BYTES;
    empty = full + 8 * STAGES;
    halo_full = empty + 8 * STAGES;
    halo_empty = halo_full + 8 * HALOS;
    given = halo_empty + 8 * HALOS;
    arrived = given + 8 * CONSUMERS;
    stage_word = operand_word(stages);
    halo_word = operand_word(halos);
    rank = CLUSTER * SPLIT == 1 ? 0 : cluster_rank();
  }
};

// This block's iterations of a tile: all of them, or its share.
DEVICE int first_of(u32 rank, const Sizes& z) { return SPLIT == 1 ? 0 : (int)rank * z.each; }
DEVICE int count_of(u32 rank, const Sizes& z) {
  int left = z.iterations - first_of(rank, z);
  return SPLIT == 1 || left < z.each ? left : z.each;
}

// Where a block of channels is read: from c on, at a tap that lies so far to the right and down.
struct Tap {
  int c, right, down;
  DEVICE_MEMBER void begin(int iteration, const Sizes& z) {
    c = right = down = 0;
#if SPLIT > 1
    int at = iteration * DEPTH, tap = quotient(at, z.c_blocks_factor, z.c_blocks_shift), row = quotient(tap, z.s_factor, z.s_shift);
    c = (at - tap * z.c_blocks) * CHANNELS;
    right = (tap - row * z.s) * z.dilation_w;
    down = row * z.dilation_h;
#endif
  }
  // The next channels, the next tap of the row, the next row.
  DEVICE_MEMBER void next(const Sizes& z) {
    c += CHANNELS;
    if (c < z.channels) return;
    c = 0;
    right += z.dilation_w;
    if (right >= z.span_w) { right = 0; down += z.dilation_h; }
  }
};

#if PITCH
// A place in the ring of boxes, which of its nine places is next, and where its pixels begin, in steps of sixteen bytes.
struct Halo {
  int stage;
  u32 phase, tap, at;
  DEVICE_MEMBER void advance() {
    tap = at = 0;
    if (++stage == HALOS) { stage = 0; phase ^= 1; }
  }
  DEVICE_MEMBER void next() {
    tap += DEPTH;
    if (tap == 9) return advance();
    at += DEPTH == 3 ? PITCH * 8 : tap == 3 || tap == 6 ? (PITCH - 2) * 8 : 8;
  }
};
#endif

DEVICE Corner corner(int unit, const Sizes& z) {
  int tile = quotient(unit, z.groups_factor, z.groups_shift);
#if PITCH
  int image = quotient(tile, z.pq_factor, z.pq_shift);  // `pq` tiles an image
  return {0, 0, (tile - image * z.pq) * (BN / PITCH), image};
#else
  return {0, tile * BN, 0, 0};
#endif
}
