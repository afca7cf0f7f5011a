// What wgrad.cu works on: sizes, what lies where in shared memory, and which part of the sum a tile of a block is.

struct Sizes {
  int k, c, row, q, pq, units, tiles_k, tiles_n, columns, c_blocks, s, each, more;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  u32 q_factor, q_shift, pq_factor, pq_shift, tiles_k_factor, tiles_k_shift, tiles_n_factor, tiles_n_shift;
  u32 c_blocks_factor, c_blocks_shift, s_factor, s_shift;
};

#if WIDE
typedef float Value;
#else
typedef u16 Value;
#endif
#define PARTS (ROWS / 64)
#define GROUPS (BN / 8)
#define COLUMNS (BN / 64)
#define FILTERS (ROWS * CONSUMERS)
#define BOX_BYTES (PIXELS * 128)
#define BOX_WORDS (BOX_BYTES / 16)
#define STAGE_BYTES (FILTERS / 64 * BOX_BYTES + COLUMNS * BOX_BYTES)

// Where things lie in shared memory, and which block of the cluster this is. Sums from other blocks come into the ring.
struct Room {
  u32 stages, full, empty, arrived, rank, stage_word;
  DEVICE_MEMBER void lay_out(u32 base) {
    stages = base;
    full = stages + STAGES * STAGE_BYTES;
    empty = full + 8 * STAGES;
    arrived = empty + 8 * STAGES;
    stage_word = turned_word(stages, BOX_BYTES);
    rank = SPLIT == 1 ? 0 : cluster_rank();
  }
};

// One tile of the gradient, and this block's iterations of its sum. Shares differ by one iteration at most.
struct Tile {
  int filter, column, share, first, count;  // the first filter, and the first group of 64 channels, over all taps
  DEVICE_MEMBER Tile(int unit, const Room& room, const Sizes& z) {
    int rest = quotient(unit, z.tiles_k_factor, z.tiles_k_shift);
    share = quotient(rest, z.tiles_n_factor, z.tiles_n_shift);
    filter = (unit - rest * z.tiles_k) * FILTERS;
    column = (rest - share * z.tiles_n) * COLUMNS;
    int part = share * SPLIT + (int)room.rank;
    first = part * z.each + (part < z.more ? part : z.more);
    count = z.each + (part < z.more);
  }
};

// Where 64 channels of x are read: from c on, at a tap that lies so far to the right and down.
struct Column {
  int tap, c, right, down;
  DEVICE_MEMBER void find(int column, const Sizes& z) {
    tap = quotient(column, z.c_blocks_factor, z.c_blocks_shift);
    int row = quotient(tap, z.s_factor, z.s_shift);
    c = (column - tap * z.c_blocks) * 64;
    right = (tap - row * z.s) * z.dilation_w;
    down = row * z.dilation_h;
  }
};
