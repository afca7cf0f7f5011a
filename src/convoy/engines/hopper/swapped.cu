// Convolution as an implicit GEMM: y^T[k, pixels] = weight[k, taps and channels] · x^T, persistent and warp-specialised. The weight is
// the first operand.
//
// One warpgroup copies: two threads the pixels in turn, by TMA in im2col mode; another weights, as one run of bytes that the host
// packed in the order of shared memory. CONSUMERS warpgroups multiply, each ROWS filters by all pixels of the tile. With CLUSTER,
// blocks have the same pixels and different filters: each copies its share of the pixels to all. With SPLIT, so many blocks of a
// cluster have one tile and a share of the taps and channels each; they send each other their sums, and each adds and stores a
// part of the tile, in the order of the ranks. One iteration is DEPTH blocks, each one tap and 128 bytes of channels: four products.
// With BLOCKS 2, a multiprocessor has room for two: the next kernel's weights are there before this one has ended. With STAGED,
// results go through shared memory and by TMA: 1, through some of their own; 2, through the ring's, where a block has one tile.
//
// With PITCH, for 3x3 layers of stride 1, a tile is some rows of one image, PITCH columns each, of which the last ones are none of
// the image's; pixels beyond its rows make their number a multiple of eight. A block of channels of these rows and their neighbours
// is copied once, as a plain box, and read at nine places; the ring has weights alone, DEPTH taps an iteration.
//
// With SPARSE, weights are compressed: of every four channels two values, and which two as metadata. A block is two products. A
// thread's word of metadata serves both: even pairs of lanes have the first one's, odd pairs the second's. With WIDE, results are
// fp32, and each lane stores its own. With PLANES 2, x and the weight are two planes of halves each, high and low, and a block is
// twelve products. With WEIGHTS, weights change from launch to launch and are copied as they lie, by boxes: 1 as [k, taps, c], 2 for a
// gradient of x, where filters and channels change their roles and the products turn the first operand over.
//
// Given by the host: ROWS (filters of a warpgroup, 64 or 128), BN (pixels of a tile, a multiple of 8 * CLUSTER), STAGES, CONSUMERS,
// CLUSTER, SPLIT (one of both is 1), DEPTH, BLOCKS, STAGED, UNIT (pixels of a split's store), PITCH (0 without), KEPT (pixels of a
// tile that lie in its rows), HALO_ROWS, HALOS (boxes of pixels), SPARSE, PLANES, WEIGHTS, BYTES (of an operand's value), WIDE,
// BF16, BIAS, RESIDUAL, ACTIVATION (a number), registers, multiply(), multiply_fresh() and multiply_turned() or multiply_sparse<half>(),
// and the files swapped_*.cuh before this one.

#if WIDE
#define SCALES , const float* __restrict__ x_scale, const float* __restrict__ weight_scales
#define SCALES_GIVEN , x_scale, weight_scales
#else
#define SCALES
#define SCALES_GIVEN
#endif

// One arrival a warp: a warp may end its products before the others of its group have begun to wait for the stage.
DEVICE void release(u32 bar, int lane) {
#if CLUSTER == 1
  if (lane == 0) barrier_arrive(bar);
#else
  if (lane < CLUSTER) barrier_arrive_at(bar, lane);
#endif
}

// What consumers have read: a stage of the ring, and a box of pixels at its ninth tap.
struct Read {
  Ring ring;
#if PITCH
  Halo halo;
#endif
  DEVICE_MEMBER void next(const Room& room, int lane) {
    release(room.empty + 8 * ring.stage, lane);
    ring.next();
#if PITCH
    if (halo.tap == 9 - DEPTH) release(room.halo_empty + 8 * halo.stage, lane);
    halo.next();
#endif
  }
};

#if SPARSE
struct Metadata { u32 words[DEPTH][PARTS]; };
#else
struct Metadata {};
#endif

#if !SPARSE
// The products of 64 filters, or twice as many, by all pixels over one row of 128 bytes.
template <bool FRESH = false> DEVICE void products(float (&d)[PARTS][BN / 2], u32 a, u32 b) {
#pragma unroll
  for (int step = 0; step < 8; step += 2)
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#if WEIGHTS == 2
      multiply_turned(d[part], dense_operand(a + part * PART_WORDS + step * 64), dense_operand(b + step));  // 16 rows of 128 bytes each
#else
      u64 rows = dense_operand(a + part * PART_WORDS + step), columns = dense_operand(b + step);
      if (FRESH && step == 0) multiply_fresh(d[part], rows, columns); else multiply(d[part], rows, columns);
#endif
    }
}
#endif

// One iteration's products are begun.
DEVICE void iterate(Sums& sums, Metadata& metadata, Read& at, const Room& room, int who, int thread) {
  u32 columns = room.stage_word + at.ring.stage * (STAGE_BYTES / 16), rows = columns + DEPTH * PIXEL_BYTES / 16 + who * PARTS * PART_WORDS;
  barrier_wait_soon(room.full + 8 * at.ring.stage, at.ring.phase);
#if SPARSE
  u32 places = room.stages + at.ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES + FILTERS * 64 + (who * PARTS * 128 + thread) * 4;
#pragma unroll
  for (int block = 0; block < DEPTH; block++)
#pragma unroll
    for (int part = 0; part < PARTS; part++) metadata.words[block][part] = shared_word(places + block * CHUNK_BYTES + part * 512);
#endif
#if PITCH
  if (at.halo.tap == 0) barrier_wait_soon(room.halo_full + 8 * at.halo.stage, at.halo.phase);
  columns = room.halo_word + at.halo.stage * (HALO_BYTES / 16) + at.halo.at;
#endif
  products_begin();
#pragma unroll
  for (int block = 0; block < DEPTH; block++) {
    u32 a = rows + block * CHUNK_BYTES / 16, b = columns + block * (PITCH ? 8 : PIXEL_BYTES / 16);
#if SPARSE
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      multiply_sparse<0>(sums.d[part], sparse_operand(a + part * PART_WORDS), dense_operand(b), metadata.words[block][part]);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      multiply_sparse<1>(sums.d[part], sparse_operand(a + part * PART_WORDS + 2), dense_operand(b + 4), metadata.words[block][part]);
#elif PLANES == 1
    products(sums.d, a, b);
#else
    // The body, then what corrects it: high by low, low by high. Each block's body begins with zeros.
    u32 low = b + (PITCH ? BOX_BYTES : BN * 128) / 16;
    products<true>(sums.body, a, b);
    products_commit();
    products(sums.correction, a, low);
    products(sums.correction, a + PLANE_WORDS, b);
#endif
  }
  products_commit();
  at.ring.next();
#if PITCH
  at.halo.next();
#endif
}

#if PLANES == 2
// A tensor core cuts what it adds, toward zero: so its sums stay short, and each is added to the total as fp32 adds
// (docs/kernels/strict-fp32.md).
DEVICE void add_body(Sums& sums) {
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    keep(sums.body[part]);
#pragma unroll
    for (int i = 0; i < BN / 2; i++) sums.d[part][i] += sums.body[part][i];
  }
}

// The low planes are 2048 times what they stand for.
DEVICE void add_correction(Sums& sums) {
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    keep(sums.correction[part]);
#pragma unroll
    for (int i = 0; i < BN / 2; i++) sums.d[part][i] += sums.correction[part][i] * (1.f / 2048);
  }
}
#endif

DEVICE void consume(const Room& room, int who, int first, int step, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const Map* y_map, const Map* residual_map, const Sizes& z SCALES) {
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, count = count_of(room.rank, z);
  Read at = {}, done = {};
#if STAGED && SPLIT == 1
  u32 staged = room.staged + who * PARTS * BN * 128, given = room.given + 8 * who, round = 0;
#endif
  for (int unit = first; unit < z.units; unit += step) {
    int tile = quotient(unit, z.groups_factor, z.groups_shift), pixel0 = tile * BN, group = unit - tile * z.groups;
    if (CLUSTER > 1) group = group * CLUSTER + (int)room.rank;
    int filter0 = group * FILTERS + who * ROWS + warp * 16;
    Sums sums;
    // Of a split, the first block adds the bias: the others' filters all lie behind the last one that has any. Planes get theirs later.
    begin(sums.d, filter0, lane, PLANES == 1 && (SPLIT == 1 || room.rank == 0) ? z.k : 0, bias);
#if PLANES == 2
    begin(sums.correction, filter0, lane, 0, bias);
#endif
    if (unit == first) wait_for_forerunner();
    Corner to = corner(unit, z);
    to.filter = group * FILTERS + who * ROWS;
#if STAGED == 1 && SPLIT == 1 && RESIDUAL
    if (thread == 0) {
      stores_read();
      ask_residuals(staged, given, to, z.k, residual_map);
    }
#endif
#if PLANES == 2
    // When a block's body is there, so is the correction before it: its stage is free.
    for (int i = 0; i < count; i++) {
      Metadata none;
      iterate(sums, none, at, room, who, thread);
      products_wait<1>();
      if (i) done.next(room, lane);
      add_body(sums);
    }
    products_wait<0>();
    add_correction(sums);
#else
    // Products read their metadata's registers until they have ended: a set for each that may run, and one for the next.
    Metadata metadata[SETS];
    int i = 0;
    for (; i + SETS <= count; i += SETS)
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        iterate(sums, metadata[set], at, room, who, thread);
        products_wait<PENDING>();
        if (i + set >= PENDING) done.next(room, lane);
      }
#pragma unroll
    for (int set = 0; set < PENDING; set++)
      if (i + set < count) {
        iterate(sums, metadata[set], at, room, who, thread);
        products_wait<PENDING>();
        if (i + set >= PENDING) done.next(room, lane);
      }
    products_wait<0>();
#endif
#if STAGED == 2
    consumers_meet<CONSUMERS>();  // nobody reads the ring any more, and nothing comes to it
#if SPLIT == 1 && RESIDUAL
    if (thread == 0) ask_residuals(staged, given, to, z.k, residual_map);
#endif
#endif
#if WIDE
    Finish finish[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) finish[part] = finish_of(filter0 + part * 64 + lane / 4, {x_scale, weight_scales}, bias, z);
#endif
#if SPLIT > 1
    cluster_wait();  // the others' barriers are there
    send_sums(sums.d, room.sums, room.arrived, room.rank, who, thread);
#if WIDE
    store_owned_wide(sums.d, room, who, thread, {pixel0, filter0 + lane / 4, to}, finish, z, y, residual);
#else
    store_owned(sums.d, room, who, thread, unit, pixel0, filter0, z, y, residual);
#endif
#else
    while (done.ring.stage != at.ring.stage) done.next(room, lane);
#endif
#if STAGED
#if SPLIT > 1
    copy_owned(room, who, thread, to, z.k, y_map);
#else
#if RESIDUAL
    barrier_wait(given, round++ & 1);  // and so has the last tile's copy read what it had to
#else
    if (round++) {
      if (thread == 0) stores_read();
      group_meet(who);
    }
#endif
    store_staged(sums.d, staged, who, thread, to, z.k, y_map);
#endif
#elif SPLIT == 1 && WIDE
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      store_wide(sums.d[part], {pixel0, filter0 + part * 64 + lane / 4, to}, lane, finish[part], z, y, residual);
#elif SPLIT == 1
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      store_sums(sums.d[part], pixel0, filter0 + part * 64, lane, z.pixels, z.k, z.pitch, y, residual);
#endif
  }
}

#if WEIGHTS
#define WEIGHTS_GIVEN const __grid_constant__ Map weights
#define WEIGHTS_AT &weights
#else
#define WEIGHTS_GIVEN const unsigned char* weights
#define WEIGHTS_AT weights
#endif

#if STAGED
#define MAPS , const __grid_constant__ Map y_map, const __grid_constant__ Map residual_map
#define MAPS_GIVEN &y_map, &residual_map
#else
#define MAPS
#define MAPS_GIVEN nullptr, nullptr
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)
swapped(const __grid_constant__ Map x, WEIGHTS_GIVEN, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes z MAPS SCALES) {
  SHARED_MEMORY;
  Room room;
  room.lay_out(opaque((shared_address(shared_memory) + 1023u) & ~1023u));
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
      barrier_init(room.full + 8 * i, PITCH ? 1 : 2);
      barrier_init(room.empty + 8 * i, 4 * CONSUMERS * CLUSTER);
    }
#pragma unroll
    for (int i = 0; i < HALOS; i++) {
      barrier_init(room.halo_full + 8 * i, 1);
      barrier_init(room.halo_empty + 8 * i, 4 * CONSUMERS);
    }
#if STAGED && RESIDUAL && SPLIT == 1
#pragma unroll
    for (int i = 0; i < CONSUMERS; i++) barrier_init(room.given + 8 * i, 1);
#endif
#if SPLIT > 1
    barrier_init(room.arrived, 1);
    barrier_expect(room.arrived, inbox_bytes(room.rank));
#endif
    barrier_init_done();
  }
  if (threadIdx.x == 64) prefetch_map(&x);
#if STAGED
  if (threadIdx.x == 96) {
    prefetch_map(&y_map);
    if (RESIDUAL && SPLIT == 1) prefetch_map(&residual_map);
  }
#endif
  if (CLUSTER == 1) __syncthreads(); else cluster_meet();
#if SPLIT > 1
  cluster_arrive();
#endif
  int group = threadIdx.x / 128, first = blockIdx.x / (CLUSTER * SPLIT), step = gridDim.x / (CLUSTER * SPLIT);
  if (group == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    // Weights were packed long ago: their copies wait for no kernel in front, everything else does.
#if PITCH
    if (threadIdx.x == 0) produce_halos(&x, room, first, step, z);
#else
    if (threadIdx.x == 0 || (COPIERS == 2 && threadIdx.x == 64)) produce_pixels(&x, room, threadIdx.x / 64, first, step, z);
#endif
    if (threadIdx.x == 32) produce_weights(WEIGHTS_AT, room, first, step, z);
#if SPLIT > 1
    cluster_wait();
#endif
  } else {
    registers_more<CONSUMER_REGISTERS>();
    consume(room, CONSUMERS == 1 ? 0 : (int)uniform(group - 1), first, step, y, residual, bias, MAPS_GIVEN, z SCALES_GIVEN);
  }
#if STAGED
  stores_read();  // of whoever asked for any; within the branch above, the assembler would not count on its registers
#endif
}
