// Convolution with 2:4 sparse weights as an implicit GEMM: y^T[k, pixels] = weight[k, taps and channels] · x^T, persistent and
// warp-specialised. The weight is the first operand, compressed: of every four channels two values, and which two as metadata.
//
// One warpgroup copies: a thread the pixels, by TMA in im2col mode; another weights and metadata, as one run of bytes that the host
// packed in the order of shared memory. CONSUMERS warpgroups multiply, each ROWS filters by all pixels of the tile. With CLUSTER, blocks have the same
// pixels and different filters: each copies its share of the pixels to all. One iteration is DEPTH blocks, each one tap and 64
// channels: two products of 32 channels. A thread's word of metadata serves both: even pairs of lanes have the first product's,
// odd pairs the second's.
//
// Given by the host: ROWS (filters of a warpgroup, 64 or 128), BN (pixels of a tile, a multiple of 8 * CLUSTER), STAGES, CONSUMERS,
// CLUSTER, DEPTH, BF16, BIAS, RESIDUAL, ACTIVATION (a number), registers, and multiply_sparse<half>().

struct Sizes {
  int pixels, k, pitch, q, pq, groups, units, channels, iterations, span_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  u32 q_factor, q_shift, pq_factor, pq_shift, groups_factor, groups_shift;
};

#define FILTERS (ROWS * CONSUMERS)
#define PIXEL_BYTES (BN * 128)
#define CHUNK_BYTES (FILTERS * 72)
#define STAGE_BYTES (DEPTH * PIXEL_BYTES + (DEPTH * CHUNK_BYTES + 1023) / 1024 * 1024)
#define CHANNELS 64
#define SHARE (BN / CLUSTER)
#define PENDING (PARTS * BN >= 384 ? 1 : STAGES >= 6 ? 3 : STAGES >= 4 ? 2 : 1)
#define SETS (PENDING + 1)

// Units are ordered filters first: those at one time share their pixels.
DEVICE void produce_pixels(const Map* x, u32 stages, u32 full, u32 empty, u32 rank, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  for (int unit = first; unit < z.units; unit += step) {
    int pixel = quotient(unit, z.groups_factor, z.groups_shift) * BN + (int)rank * SHARE;
    int image = quotient(pixel, z.pq_factor, z.pq_shift), rest = pixel - image * z.pq;
    int line = quotient(rest, z.q_factor, z.q_shift);
    int h = line * z.stride_h - z.pad_h, width = (rest - line * z.q) * z.stride_w - z.pad_w;
    int c = 0, right = 0, down = 0;
    for (int i = 0; i < z.iterations; i++) {
      u32 pixels = stages + ring.stage * STAGE_BYTES, bar = full + 8 * ring.stage;
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      barrier_expect(bar, DEPTH * PIXEL_BYTES);
#pragma unroll
      for (int block = 0; block < DEPTH; block++, pixels += PIXEL_BYTES) {
#if CLUSTER == 1
        copy_pixels(pixels, x, bar, c, width, h, image, (u16)right, (u16)down);
#else
        copy_pixels_to_all(pixels + rank * SHARE * 128, x, bar, c, width, h, image, (u16)right, (u16)down, (1 << CLUSTER) - 1);
#endif
        // The next channels, the next tap of the row, the next row.
        c += CHANNELS;
        if (c >= z.channels) {
          c = 0;
          right += z.dilation_w;
          if (right >= z.span_w) { right = 0; down += z.dilation_h; }
        }
      }
      ring.next();
    }
  }
}

DEVICE void produce_weights(const unsigned char* weights, u32 stages, u32 full, u32 empty, u32 rank, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  for (int unit = first; unit < z.units; unit += step) {
    int group = unit - quotient(unit, z.groups_factor, z.groups_shift) * z.groups;
    const unsigned char* chunk = weights + (long long)(group * CLUSTER + (int)rank) * z.iterations * (DEPTH * CHUNK_BYTES);
    for (int i = 0; i < z.iterations; i++) {
      u32 bar = full + 8 * ring.stage;
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      barrier_expect(bar, DEPTH * CHUNK_BYTES);
      copy_bytes(stages + ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES, chunk, DEPTH * CHUNK_BYTES, bar);
      chunk += DEPTH * CHUNK_BYTES;
      ring.next();
    }
  }
}

// One arrival a warp: a warp may end its products before the others of its group have begun to wait for the stage.
DEVICE void release(u32 bar, int lane) {
#if CLUSTER == 1
  if (lane == 0) barrier_arrive(bar);
#else
  if (lane < CLUSTER) barrier_arrive_at(bar, lane);
#endif
}

// One iteration's products are begun.
DEVICE void iterate(float (&d)[PARTS][BN / 2], u32 (&metadata)[DEPTH][PARTS], Ring& ring, u32 stages, u32 full, int who, int thread) {
  u32 pixels = stages + ring.stage * STAGE_BYTES, weights = pixels + DEPTH * PIXEL_BYTES;
  barrier_wait(full + 8 * ring.stage, ring.phase);
#pragma unroll
  for (int block = 0; block < DEPTH; block++)
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      metadata[block][part] = shared_word(weights + block * CHUNK_BYTES + FILTERS * 64 + ((who * PARTS + part) * 128 + thread) * 4);
  products_begin();
#pragma unroll
  for (int block = 0; block < DEPTH; block++) {
    u32 rows = weights + block * CHUNK_BYTES + who * PARTS * 4096, columns = pixels + block * PIXEL_BYTES;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      multiply_sparse<0>(d[part], sparse_operand(rows + part * 4096), operand(columns), metadata[block][part]);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      multiply_sparse<1>(d[part], sparse_operand(rows + part * 4096 + 32), operand(columns + 64), metadata[block][part]);
  }
  products_commit();
  ring.next();
}

DEVICE void consume(u32 stages, u32 full, u32 empty, u32 rank, int who, int first, int step, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const Sizes& z) {
  Ring ring = {0, 0};
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  Ring done = {0, 0};
  for (int unit = first; unit < z.units; unit += step) {
    int tile = quotient(unit, z.groups_factor, z.groups_shift), pixel0 = tile * BN;
    int filter0 = ((unit - tile * z.groups) * CLUSTER + (int)rank) * FILTERS + who * ROWS + warp * 16;
    float d[PARTS][BN / 2];
    begin(d, filter0, lane, z.k, bias);
    // Products read their metadata's registers until they have ended: a set for each that may run, and one for the next.
    u32 metadata[SETS][DEPTH][PARTS];
    int i = 0;
    for (; i + SETS <= z.iterations; i += SETS)
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        iterate(d, metadata[set], ring, stages, full, who, thread);
        products_wait<PENDING>();
        if (i + set >= PENDING) { release(empty + 8 * done.stage, lane); done.next(); }
      }
#pragma unroll
    for (int set = 0; set < PENDING; set++)
      if (i + set < z.iterations) {
        iterate(d, metadata[set], ring, stages, full, who, thread);
        products_wait<PENDING>();
        if (i + set >= PENDING) { release(empty + 8 * done.stage, lane); done.next(); }
      }
    products_wait<0>();
    for (; done.stage != ring.stage; done.next()) release(empty + 8 * done.stage, lane);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      store_sums(d[part], pixel0, filter0 + part * 64, lane, z.pixels, z.k, z.pitch, y, residual);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
sparse24(const __grid_constant__ Map x, const unsigned char* weights, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes z) {
  SHARED_MEMORY;
  u32 base = opaque((shared_address(shared_memory) + 1023u) & ~1023u);
  u32 full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
  u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 2);
      barrier_init(empty + 8 * i, 4 * CONSUMERS * CLUSTER);
    }
    barrier_init_done();
  }
  if (CLUSTER == 1) __syncthreads(); else cluster_sync();
  // Weights were packed long ago: their copies wait for no kernel in front, everything else does.
  if (threadIdx.x / 32 != 1) wait_for_forerunner();
  let_successor_start();
  int group = threadIdx.x / 128, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (group == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce_pixels(&x, base, full, empty, rank, first, step, z);
    if (threadIdx.x == 32) produce_weights(weights, base, full, empty, rank, first, step, z);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    consume(base, full, empty, rank, group - 1, first, step, y, residual, bias, z);
  }
  if (CLUSTER > 1) cluster_sync();  // a block's memory must be there until its peers have written to it
}
