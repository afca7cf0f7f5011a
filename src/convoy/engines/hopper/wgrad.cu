// The gradient of a convolution's weight: dweight[k, tap, c] = sum over pixels of dy[pixel, k] · x[pixel at the tap, c], as one product
// whose rows are filters and whose columns are groups of 64 channels, those of a tap after those of the one before.
//
// Both operands are copied as they lie, 64 values of a pixel by PIXELS pixels a box, and the products turn both over. One warpgroup
// copies, a thread x in im2col mode, another dy; what lies outside is zeros. CONSUMERS warpgroups multiply, each ROWS filters by all
// columns of the tile. With SPLIT, so many blocks of a cluster have one tile and a share of the pixels each: when all have multiplied,
// they send each other their sums, into the ring, and each adds and stores a part of the tile, in the order of the ranks. With WIDE,
// results are fp32 and the shares of several clusters, which another kernel adds.
//
// Given by the host: ROWS (filters of a warpgroup, 64 or 128), BN (columns of a tile, a multiple of 64), PIXELS (of an iteration, a
// multiple of 16), STAGES, CONSUMERS, SPLIT, BLOCKS, WIDE, FLAT (the pixels of x are those of dy: it is copied as dy is), BF16,
// registers, multiply_both(), and wgrad.cuh and shares.cuh before this file.

// Units are ordered filters first, then columns: those at one time share their pixels.
DEVICE void produce_x(const Map* x, const Room& room, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  wait_for_forerunner();
  let_successor_start();  // not before: of three kernels at one time, some multiprocessors would get two blocks of one
  for (int unit = first; unit < z.units; unit += step) {
    Tile tile(unit, room, z);
    Column at[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) at[i].find(tile.column + i, z);
    int held = z.columns - tile.column < COLUMNS ? z.columns - tile.column : COLUMNS;
    for (int i = 0; i < tile.count; i++) {
      u32 to = room.stages + ring.stage * STAGE_BYTES + FILTERS / 64 * BOX_BYTES, bar = room.full + 8 * ring.stage;
      int pixel = (tile.first + i) * PIXELS;
#if !FLAT
      int image = quotient(pixel, z.pq_factor, z.pq_shift), rest = pixel - image * z.pq, line = quotient(rest, z.q_factor, z.q_shift);
      int h = line * z.stride_h - z.pad_h, w = (rest - line * z.q) * z.stride_w - z.pad_w;
#endif
      barrier_wait(room.empty + 8 * ring.stage, ring.phase ^ 1);
      barrier_expect(bar, held * BOX_BYTES);
#pragma unroll
      for (int column = 0; column < COLUMNS; column++)
        if (column < held)
#if FLAT
          copy_box(to + column * BOX_BYTES, x, bar, at[column].c, pixel, 0, 0);
#else
          copy_pixels(to + column * BOX_BYTES, x, bar, at[column].c, w, h, image, (u16)at[column].right, (u16)at[column].down);
#endif
      ring.next();
    }
  }
}

DEVICE void produce_dy(const Map* dy, const Room& room, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  wait_for_forerunner();
  for (int unit = first; unit < z.units; unit += step) {
    Tile tile(unit, room, z);
    for (int i = 0; i < tile.count; i++) {
      u32 to = room.stages + ring.stage * STAGE_BYTES, bar = room.full + 8 * ring.stage;
      barrier_wait(room.empty + 8 * ring.stage, ring.phase ^ 1);
      barrier_expect(bar, FILTERS / 64 * BOX_BYTES);
#pragma unroll
      for (int part = 0; part < FILTERS / 64; part++)
        copy_box(to + part * BOX_BYTES, dy, bar, tile.filter + part * 64, (tile.first + i) * PIXELS, 0, 0);
      ring.next();
    }
  }
}

// Sixteen channels of a lane's two filters, eight apart: an item of a warp. Lanes exchange until each has sixteen bytes of one filter,
// and two have a sector.
DEVICE void store_item(const float* d, int item, int filter, const Tile& tile, int lane, const Sizes& z, Value* __restrict__ dweight) {
  Column at;
  int column = tile.column + item % PAIRS / 4;
  at.find(column, z);
  int c = at.c + item % PAIRS % 4 * 16;
#if WIDE
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int row = filter + i % 2 * 8, from = c + i / 2 * 8 + lane % 4 * 2;
    if (column < z.columns && row < z.k && from < z.c)
      *(float2*)(dweight + (long long)(tile.share * z.k + row) * z.row + at.tap * z.c + from) = make_float2(d[2 * i], d[2 * i + 1]);
  }
#else
  u32 words[4] = {pack(d[0], d[1]), pack(d[4], d[5]), pack(d[2], d[3]), pack(d[6], d[7])};
  transpose(words, lane % 4);
  filter += lane % 4 / 2 * 8;
  c += lane % 2 * 8;
  if (column < z.columns && filter < z.k && c < z.c)
    *(uint4*)(dweight + (long long)filter * z.row + at.tap * z.c + c) = make_uint4(words[0], words[1], words[2], words[3]);
#endif
}

DEVICE void consume(const Room& room, int who, int first, int step, const Sizes& z, Value* __restrict__ dweight) {
  int thread = threadIdx.x % 128, lane = thread % 32;
  Ring ring = {0, 0};
  wait_for_forerunner();  // which may still read what is written here
  for (int unit = first; unit < z.units; unit += step) {
    Tile tile(unit, room, z);
    float d[PARTS][BN / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < BN / 2; i++) d[part][i] = 0.f;
    u32 before = 0;  // the stage whose products may still be under way
    for (int i = 0; i < tile.count; i++) {
      u32 rows = room.stage_word + ring.stage * (STAGE_BYTES / 16), columns = rows + FILTERS / 64 * BOX_WORDS;
      rows += who * PARTS * BOX_WORDS;
      barrier_wait_soon(room.full + 8 * ring.stage, ring.phase);
      products_begin();
#pragma unroll
      for (int step16 = 0; step16 < PIXELS / 16; step16++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)  // 16 rows of 128 bytes each
          multiply_both(d[part], turned_operand(rows + part * BOX_WORDS + step16 * 128), turned_operand(columns + step16 * 128));
      products_commit();
      products_wait<1>();
      // One arrival a warp: a warp may end its products before the others of its group have begun to wait for the stage.
      if (i && lane == 0) barrier_arrive(before);
      before = room.empty + 8 * ring.stage;
      ring.next();
    }
    products_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS; part++) keep(d[part]);
    int filter = tile.filter + who * ROWS + thread / 32 * 16 + lane / 4;
#if SPLIT > 1
    // Nobody reads a ring of the cluster any more, nothing comes to it, and the barriers are there.
    cluster_arrive();
    cluster_wait();
    send_sums(d, room.stages, room.arrived, room.rank, who, thread);
    if (inbox_bytes(room.rank)) barrier_wait_peers(room.arrived, 0);
#pragma unroll
    for (int item = 0; item < ITEMS; item++) {
      if (item % SPLIT != room.rank) continue;
      add_sums(d[item / PAIRS], item, room.stages, room.rank, who, thread);
      store_item(&d[item / PAIRS][item % PAIRS * 8], item, filter + item / PAIRS * 64, tile, lane, z, dweight);
    }
#else
    if (tile.count && lane == 0) barrier_arrive(before);
#pragma unroll
    for (int item = 0; item < ITEMS; item++)
      store_item(&d[item / PAIRS][item % PAIRS * 8], item, filter + item / PAIRS * 64, tile, lane, z, dweight);
#endif
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)
wgrad(const __grid_constant__ Map x, const __grid_constant__ Map dy, Value* __restrict__ dweight, const __grid_constant__ Sizes z) {
  SHARED_MEMORY;
  Room room;
  room.lay_out(opaque((shared_address(shared_memory) + 1023u) & ~1023u));
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      barrier_init(room.full + 8 * i, 2);
      barrier_init(room.empty + 8 * i, 4 * CONSUMERS);
    }
#if SPLIT > 1
    barrier_init(room.arrived, 1);
    barrier_expect(room.arrived, inbox_bytes(room.rank));
#endif
    barrier_init_done();
  }
  if (threadIdx.x == 64) prefetch_map(&x);
  if (threadIdx.x == 96) prefetch_map(&dy);
  __syncthreads();
  int group = threadIdx.x / 128, first = blockIdx.x / SPLIT, step = gridDim.x / SPLIT;
  if (group == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce_x(&x, room, first, step, z);
    if (threadIdx.x == 32) produce_dy(&dy, room, first, step, z);
#if SPLIT > 1
    cluster_arrive();
    cluster_wait();
#endif
  } else {
    registers_more<CONSUMER_REGISTERS>();
    consume(room, CONSUMERS == 1 ? 0 : (int)uniform(group - 1), first, step, z, dweight);
  }
}
