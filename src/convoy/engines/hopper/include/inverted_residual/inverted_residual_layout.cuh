// Sizes of a block of threads of inverted_residual.cu or expand_depthwise.cu, its shared memory, and where the pixels of its tile lie.
#pragma once
#include <inverted_residual/inverted_residual_config.cuh>
#include <inverted_residual/inverted_residual_ptx.cuh>

typedef u16 Half;

enum : int {
  OUT_HEIGHT = (HEIGHT - 1) / STRIDE + 1,
  OUT_WIDTH = (WIDTH - 1) / STRIDE + 1,
  TILE_ROWS = ROWS * BANDS,  // of y
  TILE_COLUMNS = 8 * OCTETS,
  TILES_H = (OUT_HEIGHT + TILE_ROWS - 1) / TILE_ROWS,
  TILES_W = (OUT_WIDTH + TILE_COLUMNS - 1) / TILE_COLUMNS,
  SHARES = CLUSTER * SHARE,
  EACH = (SLICES + SHARES - 1) / SHARES,  // slices of a block
  PARTS = BLOCK_N ? (FILTERS + BLOCK_N - 1) / BLOCK_N : 1,
  PAIRS = OCTETS * BANDS / 2,  // of units
  WARPS = PAIRS * WARPS_K,
  BLOCK_THREADS = 32 * WARPS,
  // Of x with the halo. With stride 2 a row's even columns lie in front of its odd ones, so that an octet's pixels are neighbours.
  IN_ROWS = (TILE_ROWS - 1) * STRIDE + TAPS,
  IN_COLUMNS = (TILE_COLUMNS - 1) * STRIDE + TAPS,
  EVEN_COLUMNS = (IN_COLUMNS + 1) / 2,
  POSITIONS = IN_ROWS * IN_COLUMNS,
  EXPAND_TILES = (POSITIONS + 15) / 16,
  EXPAND_ITEMS = (EXPAND_TILES + EXPAND_M - 1) / EXPAND_M * EXPAND_N,
  EXPAND_COLUMNS = SLICE / EXPAND_N,
  AHEAD = STAGES - WINDOWS,  // slices of weights that are under way
  DEPTH = (CHANNELS + 15) / 16 * 16,
  EXPAND_UNROLL = DEPTH > 64 ? 2 : 4,  // steps; with all of many steps' loads in front, ptxas runs out of registers
  // Bytes from row to row: an odd number of 16 bytes, so that ldmatrix meets no bank twice.
  X_PITCH = DEPTH * 2 + 16,
  WINDOW_PITCH = SLICE * 2 + 16,
  SUM_PITCH = (BLOCK_N % 16 ? BLOCK_N : BLOCK_N + 8) * 4,
  // A slice's weights, in bytes: those of the first convolution, of the last one, of the depthwise filters, and biases.
  LAST_AT = SLICE * X_PITCH,
  TAP_WORDS = (TAPS * TAPS + 3) / 4 * 4,  // of two channels
  TAPS_AT = LAST_AT + BLOCK_N * WINDOW_PITCH,
  BIAS_AT = TAPS_AT + SLICE / 2 * TAP_WORDS * 4,
  STAGE_BYTES = BIAS_AT + SLICE * 8,
  // Shared memory, in bytes. The sums lie over weights and windows, which nobody reads any more.
  MASKS = POSITIONS * X_PITCH,  // a bit for each position: whether it is a pixel of the image
  WEIGHTS = MASKS + (POSITIONS + 127) / 128 * 16,
  WINDOW = WEIGHTS + STAGES * STAGE_BYTES,
  WINDOW_BYTES = POSITIONS * WINDOW_PITCH,
};
static_assert(CLUSTER == 1 || SHARE == 1, "the slices are divided once");
static_assert(OCTETS * BANDS % 2 == 0, "a warp has two units");
static_assert(EXPAND_M <= 2, "a word of bits for the tiles that a warp expands at a time");

// Which tile a block computes.
struct Tile {
  int part, top, left, image;  // top, left: of x, with the halo
  int rank, first, slices;  // among the blocks of the tile; the slices that the block has

  DEVICE_MEMBER Tile() {
    const int block = blockIdx.x / SHARES, rest = block / PARTS;
    rank = CLUSTER > 1 ? cluster_ctarank() : SHARE > 1 ? blockIdx.x % SHARE : 0, first = rank * EACH;
    slices = SHARES == 1 ? SLICES : SLICES - first < EACH ? SLICES - first : EACH;
    part = block % PARTS, left = rest % TILES_W * (TILE_COLUMNS * STRIDE) - TAPS / 2;
    top = rest / TILES_W % TILES_H * (TILE_ROWS * STRIDE) - TAPS / 2, image = rest / (TILES_W * TILES_H);
  }
  // Of a position in shared memory.
  DEVICE_MEMBER int row(u32 position) const { return top + (int)(position / IN_COLUMNS); }
  DEVICE_MEMBER int column(u32 position) const {
    int place = position % IN_COLUMNS;
    if (STRIDE == 2) place = place < EVEN_COLUMNS ? 2 * place : 2 * (place - EVEN_COLUMNS) + 1;
    return left + place;
  }
  DEVICE_MEMBER bool has(u32 position) const {
    return position < POSITIONS && (u32)row(position) < HEIGHT && (u32)column(position) < WIDTH;
  }
};

// How far the column of a tap lies behind that of the first one, in positions.
DEVICE constexpr int shift(int tap) { return STRIDE == 1 ? tap : tap % 2 * EVEN_COLUMNS + tap / 2; }
