// Convolution as an implicit GEMM: y[pixels, k] = x[pixels, taps and channels] · weight^T, persistent and warp-specialised.
//
// One warpgroup copies: a tile's pixels come by TMA in im2col mode, so that a tile of any length crosses rows and images, and
// the filters' block by a plain box. CONSUMERS warpgroups multiply. With TURNS each has tiles of its own, in turn, and one stores
// while another multiplies; without, they share a tile's rows. With CLUSTER 2, two blocks have the same filters and different
// pixels: each copies half of the filters' block to both. Tiles are ordered filters first: those at one time share their pixels.
//
// Given by the host: ROWS (pixels of a warpgroup, 64 or 128), BN (filters of a tile, a multiple of 8), STAGES, CONSUMERS, TURNS,
// CLUSTER, BYTES (2: half, 4: TF32), BF16, BIAS, RESIDUAL, ACTIVATION (a number), DEPENDENT, and multiply().

struct Sizes {
  int pixels, k, pitch, q, pq, tiles_n, units, channels, iterations, span_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  u32 q_factor, q_shift, pq_factor, pq_shift, tiles_n_factor, tiles_n_shift;
};

// n / d for 0 <= n < 2^31, where the host made `factor` and `shift` of d: a division of its own takes some hundred cycles.
DEVICE int quotient(int n, u32 factor, u32 shift) { return (int)((u64)(u32)n * factor >> shift); }

#define TILE_M (TURNS ? ROWS : ROWS * CONSUMERS)
#define PARTS (ROWS / 64)
#define A_BYTES (TILE_M * 128)
#define STAGE_BYTES (A_BYTES + BN * 128)
#define CHANNELS (128 / BYTES)
#define SHARE (BN / CLUSTER)
#define GROUPS (BN / 8)

#if BYTES == 2
typedef u16 Value;
#else
typedef float Value;
#endif

struct Ring {  // a place in the ring of stages
  int stage;
  u32 phase;
  DEVICE_MEMBER void next() {
    if (++stage == STAGES) { stage = 0; phase ^= 1; }
  }
  DEVICE_MEMBER void skip(int count) {
    stage += count;
    phase ^= (stage / STAGES) & 1;
    stage %= STAGES;
  }
};

DEVICE float activated(float v) {
#if ACTIVATION == 1  // relu; NaN stays NaN
  return v < 0.f ? 0.f : v;
#elif ACTIVATION == 2  // relu6
  return v < 0.f ? 0.f : v > 6.f ? 6.f : v;
#elif ACTIVATION == 3  // silu
  return v / (1.f + expf(-v));
#elif ACTIVATION == 4  // hardswish
  float u = v + 3.f;
  return v * (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
#elif ACTIVATION == 5  // hardsigmoid
  float u = v + 3.f;
  return (u < 0.f ? 0.f : u > 6.f ? 6.f : u) / 6.f;
#elif ACTIVATION == 6  // sigmoid
  return 1.f / (1.f + expf(-v));
#elif ACTIVATION == 7  // gelu
  return 0.5f * v * (1.f + erff(v * 0.70710678f));
#else
  return v;
#endif
}

// Four lanes exchange four words each: word i of lane l becomes word l of lane i.
DEVICE void transpose(u32 (&v)[4], int lane) {
  bool odd = lane & 1, high = lane & 2;
  u32 a = swap_lanes(odd ? v[0] : v[1], 1), b = swap_lanes(odd ? v[2] : v[3], 1);
  if (odd) { v[0] = a; v[2] = b; } else { v[1] = a; v[3] = b; }
  a = swap_lanes(high ? v[0] : v[2], 2);
  b = swap_lanes(high ? v[1] : v[3], 2);
  if (high) { v[0] = a; v[1] = b; } else { v[2] = a; v[3] = b; }
}

// One row of a warpgroup's part: `values` are groups of eight filters, of which this lane has two neighbours each.
DEVICE void store_row(const float (&d)[BN / 2], int half, int pixel, int n0, int lane, Value* y, const Value* residual, const Value* bias, const Sizes& z) {
  bool inside = pixel < z.pixels;
  long long row = (long long)pixel * z.pitch;
#if BYTES == 2
#pragma unroll
  for (int g = 0; g < (GROUPS + 3) / 4; g++) {
    int column = n0 + (4 * g + lane) * 8;  // of this lane's sixteen bytes
    bool mine = inside && 4 * g + lane < GROUPS && column < z.k;
    u32 words[4];
#if RESIDUAL
    u32 added[4] = {0, 0, 0, 0};
    if (mine) {
      uint4 four = *(const uint4*)(residual + (long long)pixel * z.k + column);
      added[0] = four.x; added[1] = four.y; added[2] = four.z; added[3] = four.w;
    }
    transpose(added, lane);
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int group = 4 * g + i;
      float low = 0.f, high = 0.f;
      if (group < GROUPS) { low = d[4 * group + 2 * half]; high = d[4 * group + 2 * half + 1]; }
#if BIAS
      int at = n0 + group * 8 + 2 * lane;
      if (group < GROUPS && at < z.k) { low += unpack(bias[at]); high += unpack(bias[at + 1]); }
#endif
#if RESIDUAL
      low += unpack((u16)(added[i] & 0xffff));
      high += unpack((u16)(added[i] >> 16));
#endif
      words[i] = pack(activated(low), activated(high));
    }
    transpose(words, lane);
    if (mine) *(uint4*)(y + row + column) = make_uint4(words[0], words[1], words[2], words[3]);
  }
#else
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    int column = n0 + group * 8 + 2 * lane;
    if (!inside || column >= z.k) continue;
    float low = d[4 * group + 2 * half], high = d[4 * group + 2 * half + 1];
#if BIAS
    low += bias[column];
    high += bias[column + 1];
#endif
#if RESIDUAL
    float2 two = *(const float2*)(residual + (long long)pixel * z.k + column);
    low += two.x;
    high += two.y;
#endif
    *(float2*)(y + row + column) = make_float2(activated(low), activated(high));
  }
#endif
}

DEVICE void produce(const Map* x, const Map* w, u32 stages, u32 full, u32 empty, u32 rank, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  for (int unit = first; unit < z.units; unit += step) {
    int row = quotient(unit, z.tiles_n_factor, z.tiles_n_shift);
    int pixel = (row * CLUSTER + (int)rank) * TILE_M, n0 = (unit - row * z.tiles_n) * BN + (int)rank * SHARE;
    int image = quotient(pixel, z.pq_factor, z.pq_shift), rest = pixel - image * z.pq;
    int line = quotient(rest, z.q_factor, z.q_shift);
    int h = line * z.stride_h - z.pad_h, width = (rest - line * z.q) * z.stride_w - z.pad_w;
    int c = 0, tap = 0, right = 0, down = 0;
    for (int i = 0; i < z.iterations; i++) {
      u32 a = stages + ring.stage * STAGE_BYTES, b = a + A_BYTES + rank * SHARE * 128;
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      u32 bar = full + 8 * ring.stage;
      barrier_expect(bar, STAGE_BYTES);
      copy_pixels(a, x, bar, c, width, h, image, (u16)right, (u16)down);
#if CLUSTER == 1
      copy_weights(b, w, bar, c, tap, n0);
#else
      copy_weights_to_all(b, w, bar, c, tap, n0, (1 << CLUSTER) - 1);
#endif
      // The next channels, the next tap of the row, the next row: counted, since one thread has to keep up with the products.
      c += CHANNELS;
      if (c >= z.channels) {
        c = 0;
        tap++;
        right += z.dilation_w;
        if (right >= z.span_w) { right = 0; down += z.dilation_h; }
      }
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

DEVICE void consume(u32 stages, u32 full, u32 empty, u32 turns, u32 rank, int who, int first, int step, Value* y, const Value* residual, const Value* bias, const Sizes& z) {
  Ring ring = {0, 0};
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, turn = 0, own = 0;
  for (int unit = first; unit < z.units; unit += step) {
    if (TURNS && turn++ % CONSUMERS != who) {
      ring.skip(z.iterations);
      continue;
    }
    float d[PARTS][BN / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < BN / 2; i++) d[part][i] = 0.f;
    int row0 = TURNS ? 0 : who * ROWS;
#if TURNS
    // A wait knows a stage's round by its parity alone: so this group begins when the one before has waited for all of its own.
    barrier_wait(turns + 8 * who, (own++ & 1) ^ (who == 0));
#endif
    u32 before = 0;
    for (int i = 0; i < z.iterations; i++) {
      u32 a = stages + ring.stage * STAGE_BYTES, b = a + A_BYTES;
      barrier_wait(full + 8 * ring.stage, ring.phase);
      products_begin();
#pragma unroll
      for (int step_k = 0; step_k < 4; step_k++)
#pragma unroll
        for (int part = 0; part < PARTS; part++)
          multiply(d[part], operand(a + (row0 + part * 64) * 128 + step_k * 32), operand(b + step_k * 32));
      products_commit();
      if (i > 0) {  // the products before these have ended: their stage is free
        products_wait<1>();
        release(before, lane);
      }
      before = empty + 8 * ring.stage;
      ring.next();
    }
#if TURNS
    if (lane == 0) barrier_arrive(turns + 8 * ((who + 1) % CONSUMERS));
#endif
    products_wait<0>();
    release(before, lane);
    int tile = quotient(unit, z.tiles_n_factor, z.tiles_n_shift);
    int pixel = (tile * CLUSTER + (int)rank) * TILE_M + row0 + warp * 16 + lane / 4, n0 = (unit - tile * z.tiles_n) * BN;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        store_row(d[part], half, pixel + part * 64 + half * 8, n0, lane % 4, y, residual, bias, z);
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
implicit_gemm(const __grid_constant__ Map x, const __grid_constant__ Map w, Value* y, const Value* residual, const Value* bias, const __grid_constant__ Sizes z) {
  SHARED_MEMORY;
  u32 base = opaque((shared_address(shared_memory) + 1023u) & ~1023u);
  u32 full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES, turns = empty + 8 * STAGES;
  u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, (TURNS ? 4 : 4 * CONSUMERS) * CLUSTER);
    }
    for (int i = 0; i < CONSUMERS; i++) barrier_init(turns + 8 * i, 4);
    barrier_init_done();
  }
  if (CLUSTER == 1) __syncthreads(); else cluster_sync();
#if DEPENDENT
  wait_for_forerunner();
  let_successor_start();
#endif
  int group = threadIdx.x / 128, first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  if (group == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) produce(&x, &w, base, full, empty, rank, first, step, z);
  } else {
    registers_more<CONSUMER_REGISTERS>();
    consume(base, full, empty, turns, rank, group - 1, first, step, y, residual, bias, z);
  }
  if (CLUSTER > 1) cluster_sync();  // a block's memory must be there until its peers have written to it
}
