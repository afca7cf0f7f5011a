// Convolution with blocks of zeros as an implicit GEMM: y^T[k, pixels] = weight[k, pieces] · x[pieces, pixels]. A piece is one tap and
// eight channels; a tile of filters has a list of the pieces in which any of its filters has a value, eight to an iteration.
//
// One warpgroup copies: all its threads gather pixels, sixteen bytes at a time, into rows of 128 bytes in the 128-byte swizzle; one
// copies the weights, which the host packed in the order of the lists. CONSUMERS warpgroups multiply, each ROWS filters by all pixels.
//
// Given by the host: ROWS (filters of a warpgroup, 64 or 128), BN (pixels of a tile, a multiple of 16), STAGES, CONSUMERS, BF16, BIAS,
// RESIDUAL, ACTIVATION (a number), registers, and multiply().

struct Sizes {
  int pixels, k, pitch, q, pq, h, w, c, units, tiles;
  int stride_h, stride_w, pad_h, pad_w;
  u32 q_factor, q_shift, pq_factor, pq_shift, tiles_factor, tiles_shift;
};
struct Tile { int first, last, filter, unused; };  // iterations of a tile of filters, and its first filter

#define FILTERS (ROWS * CONSUMERS)
#define PIXEL_BYTES (BN * 128)
#define CHUNK_BYTES (FILTERS * 128)
#define STAGE_BYTES (PIXEL_BYTES + CHUNK_BYTES)
#define PIECES 8
#define EACH (BN / 16)
#define LAG (STAGES >= 5 ? 3 : STAGES - 2)

// Where a pixel's first tap lies; outside the image for one that is not there.
struct Origin { int row, column, place; };

DEVICE Origin origin(int pixel, const Sizes& z) {
  int image = quotient(pixel, z.pq_factor, z.pq_shift), rest = pixel - image * z.pq;
  int line = quotient(rest, z.q_factor, z.q_shift);
  Origin found = {line * z.stride_h - z.pad_h, (rest - line * z.q) * z.stride_w - z.pad_w, 0};
  found.place = (image * z.h + found.row) * z.w + found.column;
  if (pixel >= z.pixels) found.row = -(1 << 20);
  return found;
}

// A thread has one of an iteration's eight pieces, of every sixteenth pixel: eight threads that follow each other often read
// neighbouring channels. What has landed is told LAG iterations later.
DEVICE void produce(const Value* x, const Tile* tiles, const int* __restrict__ pieces, const unsigned char* weights, u32 stages, u32 full, u32 empty, const Sizes& z) {
  Ring ring = {0, 0}, landed = {0, 0};
  int thread = threadIdx.x, mine = thread % PIECES, row0 = thread / PIECES, under_way = 0;
  for (int unit = blockIdx.x; unit < z.units; unit += gridDim.x) {
    int at = quotient(unit, z.tiles_factor, z.tiles_shift);
    Tile tile = tiles[at];
    int pixel0 = (unit - at * z.tiles) * BN;
    Origin origins[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) origins[i] = origin(pixel0 + row0 + 16 * i, z);
    int next = tile.first < tile.last ? pieces[tile.first * PIECES + mine] : -1;
    for (int iteration = tile.first; iteration < tile.last; iteration++) {
      int piece = next;  // rows down, columns right and channels, eight bits and eight and fifteen; or -1
      int down = piece >> 23, right = piece >> 15 & 255, channel = piece & 32767;
      if (iteration + 1 < tile.last) next = pieces[(iteration + 1) * PIECES + mine];  // on its way while this one is gathered
      u32 to = stages + ring.stage * STAGE_BYTES + row0 * 128 + ((mine ^ (row0 & 7)) << 4), bar = full + 8 * ring.stage;
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      if (thread == 0) {
        barrier_expect(bar, CHUNK_BYTES);
        copy_bytes(stages + ring.stage * STAGE_BYTES + PIXEL_BYTES, weights + (long long)iteration * CHUNK_BYTES, CHUNK_BYTES, bar);
      }
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        int row = origins[i].row + down, column = origins[i].column + right;
        bool inside = piece >= 0 && (unsigned)row < (unsigned)z.h && (unsigned)column < (unsigned)z.w;
        const Value* from = x + (inside ? (long long)(origins[i].place + down * z.w + right) * z.c + channel : 0);
        gather(to + i * 16 * 128, from, inside);
      }
      gathers_commit();
      ring.next();
      if (under_way < LAG) { under_way++; continue; }
      gathers_wait<LAG>();
      barrier_arrive(full + 8 * landed.stage);
      landed.next();
    }
  }
  gathers_wait<0>();
  for (; under_way > 0; under_way--, landed.next()) barrier_arrive(full + 8 * landed.stage);
}

DEVICE void consume(const Tile* tiles, u32 stages, u32 full, u32 empty, int who, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const Sizes& z) {
  Ring ring = {0, 0};
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  for (int unit = blockIdx.x; unit < z.units; unit += gridDim.x) {
    int at = quotient(unit, z.tiles_factor, z.tiles_shift);
    Tile tile = tiles[at];
    int filter0 = tile.filter + who * ROWS + warp * 16;
    float d[PARTS][BN / 2];
    begin(d, filter0, lane, z.k, bias);
    u32 before = 0;
    for (int iteration = tile.first; iteration < tile.last; iteration++) {
      u32 pixels = stages + ring.stage * STAGE_BYTES, weights = pixels + PIXEL_BYTES + who * ROWS * 128;
      barrier_wait(full + 8 * ring.stage, ring.phase);
      products_begin();
#pragma unroll
      for (int step = 0; step < 4; step++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
          multiply(d[part], operand(weights + part * 8192 + step * 32), operand(pixels + step * 32));
      products_commit();
      products_wait<1>();
      if (before && lane == 0) barrier_arrive(before);
      before = empty + 8 * ring.stage;
      ring.next();
    }
    products_wait<0>();
    if (before && lane == 0) barrier_arrive(before);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      store_sums(d[part], (unit - at * z.tiles) * BN, filter0 + part * 64, lane, z.pixels, z.k, z.pitch, y, residual);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
blocks(const Value* x, const Tile* tiles, const int* pieces, const unsigned char* weights, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes z) {
  SHARED_MEMORY;
  u32 base = opaque((shared_address(shared_memory) + 1023u) & ~1023u);
  u32 full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 128 + 1);
      barrier_init(empty + 8 * i, 4 * CONSUMERS);
    }
    barrier_init_done();
  }
  __syncthreads();
  wait_for_forerunner();
  let_successor_start();
  int group = threadIdx.x / 128;
  if (group == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    produce(x, tiles, pieces, weights, base, full, empty, z);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    consume(tiles, base, full, empty, group - 1, y, residual, bias, z);
  }
}
