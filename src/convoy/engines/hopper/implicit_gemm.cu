// Convolution as an implicit GEMM: y[pixels, k] = x[pixels, taps and channels] · weight^T, persistent and warp-specialised.
//
// One warpgroup copies: a thread the pixels, by TMA in im2col mode, so that a tile of any length crosses rows and images; another
// the filters' blocks, plain boxes. CONSUMERS warpgroups multiply. With TURNS each has tiles of its own, in turn, and one stores
// while another multiplies; without, they share a tile's rows. With CLUSTER 2, two blocks have the same filters and different
// pixels: each copies half of the filters' block to both. With SPLIT, so many blocks of a cluster have the same tile and a share of
// the taps and channels each; they send each other their sums, through shared memory, and each adds and stores a part of the
// tile, in the order of the ranks. Tiles are ordered filters first: those at one time share their pixels.
//
// Given by the host: ROWS (pixels of a warpgroup, 64 or 128), BN (filters of a tile, a multiple of 8), STAGES, CONSUMERS, TURNS,
// CLUSTER, SPLIT (one of both is 1), BYTES (2: half, 4: TF32), BF16, BIAS, RESIDUAL, ACTIVATION (a number), DEPENDENT, multiply().

struct Sizes {
  int pixels, k, pitch, q, pq, tiles_n, units, channels, iterations, each, s, c_blocks, span_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  u32 q_factor, q_shift, pq_factor, pq_shift, tiles_n_factor, tiles_n_shift, s_factor, s_shift, c_blocks_factor, c_blocks_shift;
};

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

// What is added to this lane's eight sums: loaded for several at once, for each load takes half a microsecond to come.
#if BYTES == 2
typedef uint4 Added;
#else
struct Added { float2 group[4]; };
#endif

DEVICE void load(Added& added, int g, int pixel, int n0, int lane, const Value* __restrict__ residual, const Sizes& z) {
  const Value* row = residual + (long long)pixel * z.k;
#if BYTES == 2
  int column = n0 + (4 * g + lane) * 8;  // of this lane's sixteen bytes
  added = make_uint4(0, 0, 0, 0);
  if (pixel < z.pixels && 4 * g + lane < GROUPS && column < z.k) added = *(const uint4*)(row + column);
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int group = 4 * g + i, column = n0 + group * 8 + 2 * lane;
    added.group[i] = make_float2(0.f, 0.f);
    if (pixel < z.pixels && group < GROUPS && column < z.k) added.group[i] = *(const float2*)(row + column);
  }
#endif
}

// Groups 4·g to 4·g + 3, of eight filters each, of one row: this lane has two neighbours of each group.
DEVICE void store(float (&v)[8], const Added& added, int g, int pixel, int n0, int lane, Value* __restrict__ y, const Sizes& z) {
  bool inside = pixel < z.pixels;
  long long row = (long long)pixel * z.pitch;
#if BYTES == 2
  int column = n0 + (4 * g + lane) * 8;
  u32 words[4];
#if RESIDUAL
  u32 given[4] = {added.x, added.y, added.z, added.w};
  transpose(given, lane);
#endif
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float low = v[2 * i], high = v[2 * i + 1];
#if RESIDUAL
    low += unpack((u16)(given[i] & 0xffff));
    high += unpack((u16)(given[i] >> 16));
#endif
    words[i] = pack(activated(low), activated(high));
  }
  transpose(words, lane);
  bool mine = inside && 4 * g + lane < GROUPS && column < z.k;
  if (mine) *(uint4*)(y + row + column) = make_uint4(words[0], words[1], words[2], words[3]);
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int group = 4 * g + i, column = n0 + group * 8 + 2 * lane;
    if (!inside || group >= GROUPS || column >= z.k) continue;
    float low = v[2 * i], high = v[2 * i + 1];
#if RESIDUAL
    low += added.group[i].x;
    high += added.group[i].y;
#endif
    *(float2*)(y + row + column) = make_float2(activated(low), activated(high));
  }
#endif
}

// What the sums begin with: the bias, in one block of a split, so that it costs nothing where results are stored.
DEVICE void begin(float (&d)[PARTS][BN / 2], int n0, int lane, const Value* __restrict__ bias, u32 rank, const Sizes& z) {
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    float low = 0.f, high = 0.f;
#if BIAS
    int column = n0 + group * 8 + 2 * lane;
    if ((SPLIT == 1 || rank == 0) && column < z.k) {
#if BYTES == 2
      u32 two = *(const u32*)(bias + column);
      low = unpack((u16)(two & 0xffff));
      high = unpack((u16)(two >> 16));
#else
      float2 two = *(const float2*)(bias + column);
      low = two.x;
      high = two.y;
#endif
    }
#endif
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      d[part][4 * group] = d[part][4 * group + 2] = low;
      d[part][4 * group + 1] = d[part][4 * group + 3] = high;
    }
  }
}

// A tile's sums in items of one row and 32 filters: each is stored by one block of a split, the owner.
#define WIDTHS ((GROUPS + 3) / 4)
#define ITEMS (PARTS * 2 * WIDTHS)
#define MOST_OWNED ((ITEMS + SPLIT - 1) / SPLIT)
#define BATCH (BYTES == 4 ? (SPLIT > 2 ? SPLIT : 2) : (SPLIT > 4 ? SPLIT : 4))  // of items whose residuals are asked for at once

DEVICE int row_of(int item) { return item / (2 * WIDTHS) * 64 + item / WIDTHS % 2 * 8; }

// This lane's eight sums of an item.
DEVICE void take(float (&v)[8], const float (&d)[PARTS][BN / 2], int item) {
  int part = item / (2 * WIDTHS), half = item / WIDTHS % 2, g = item % WIDTHS;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int group = 4 * g + i / 2;
    v[i] = group < GROUPS ? d[part][4 * group + 2 * half + i % 2] : 0.f;
  }
}

#if SPLIT > 1
// Where an owner gets four of a thread's sums from a rank, in the room of the ring.
DEVICE u32 inbox(u32 stages, int who, int owned, u32 from, int quad, int thread) {
  return stages + ((((who * MOST_OWNED + owned) * SPLIT + from) * 2 + quad) * 128 + thread) * 16;
}

DEVICE u32 inbox_bytes(u32 rank) { return (ITEMS - rank + SPLIT - 1) / SPLIT * CONSUMERS * (SPLIT - 1) * 128 * 32; }

DEVICE void send_sums(const float (&d)[PARTS][BN / 2], u32 stages, u32 arrived, u32 rank, int who, int thread) {
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (item % SPLIT == rank) continue;
    float v[8];
    take(v, d, item);
#pragma unroll
    for (int quad = 0; quad < 2; quad++)
      send(inbox(stages, who, item / SPLIT, rank, quad, thread), item % SPLIT, v[4 * quad], v[4 * quad + 1], v[4 * quad + 2], v[4 * quad + 3], arrived);
  }
}

// Adds in the order of the ranks: the same bits whoever is first.
DEVICE void add_sums(float (&v)[8], u32 stages, u32 rank, int who, int owned, int thread) {
  float own[8];
#pragma unroll
  for (int i = 0; i < 8; i++) { own[i] = v[i]; v[i] = 0.f; }
#pragma unroll
  for (u32 from = 0; from < SPLIT; from++)
#pragma unroll
    for (int quad = 0; quad < 2; quad++) {
      float four[4] = {own[4 * quad], own[4 * quad + 1], own[4 * quad + 2], own[4 * quad + 3]};
      if (from != rank) receive(four, inbox(stages, who, owned, from, quad, thread));
#pragma unroll
      for (int i = 0; i < 4; i++) v[4 * quad + i] += four[i];
    }
}
#endif

// This block's iterations of a tile: all of them, or its share.
DEVICE int first_of(u32 rank, const Sizes& z) { return SPLIT == 1 ? 0 : (int)rank * z.each; }
DEVICE int count_of(u32 rank, const Sizes& z) {
  int left = z.iterations - first_of(rank, z);
  return SPLIT == 1 || left < z.each ? left : z.each;
}

// Where an iteration reads: channels from c on, at a tap that lies so far to the right and down. Counted and not worked out, since a
// copying thread has to keep up with the products.
struct Place {
  int c, tap, right, down;
  DEVICE_MEMBER void begin(u32 rank, const Sizes& z) {
    c = tap = right = down = 0;
#if SPLIT > 1
    int at = first_of(rank, z);
    tap = quotient(at, z.c_blocks_factor, z.c_blocks_shift);
    c = (at - tap * z.c_blocks) * CHANNELS;
    int row = quotient(tap, z.s_factor, z.s_shift);
    right = (tap - row * z.s) * z.dilation_w;
    down = row * z.dilation_h;
#endif
  }
  DEVICE_MEMBER void next(const Sizes& z) {
    c += CHANNELS;
    if (c < z.channels) return;
    c = 0;
    tap++;
    right += z.dilation_w;
    if (right >= z.span_w) { right = 0; down += z.dilation_h; }
  }
};

DEVICE void produce_pixels(const Map* x, u32 stages, u32 full, u32 empty, u32 rank, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  int count = count_of(rank, z);
  for (int unit = first; unit < z.units; unit += step) {
    int tile = quotient(unit, z.tiles_n_factor, z.tiles_n_shift);
    int pixel = (CLUSTER == 1 ? tile : tile * CLUSTER + (int)rank) * TILE_M;
    int image = quotient(pixel, z.pq_factor, z.pq_shift), rest = pixel - image * z.pq;
    int line = quotient(rest, z.q_factor, z.q_shift);
    int h = line * z.stride_h - z.pad_h, w = (rest - line * z.q) * z.stride_w - z.pad_w;
    Place place;
    place.begin(rank, z);
    for (int i = 0; i < count; i++) {
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      u32 bar = full + 8 * ring.stage;
      barrier_expect(bar, A_BYTES);
      copy_pixels(stages + ring.stage * STAGE_BYTES, x, bar, place.c, w, h, image, (u16)place.right, (u16)place.down);
      place.next(z);
      ring.next();
    }
  }
}

DEVICE void produce_filters(const Map* w, u32 stages, u32 full, u32 empty, u32 rank, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  int count = count_of(rank, z);
  for (int unit = first; unit < z.units; unit += step) {
    int tile = quotient(unit, z.tiles_n_factor, z.tiles_n_shift);
    int n0 = (unit - tile * z.tiles_n) * BN;
    Place place;
    place.begin(rank, z);
    for (int i = 0; i < count; i++) {
      u32 b = stages + ring.stage * STAGE_BYTES + A_BYTES;
      barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
      u32 bar = full + 8 * ring.stage;
      barrier_expect(bar, BN * 128);
#if CLUSTER == 1
      copy_weights(b, w, bar, place.c, place.tap, n0);
#else
      copy_weights_to_all(b + rank * SHARE * 128, w, bar, place.c, place.tap, n0 + (int)rank * SHARE, (1 << CLUSTER) - 1);
#endif
      place.next(z);
      ring.next();
    }
  }
  if (CLUSTER > 1) drain(ring, empty);
}

// Weights are there before the kernel in front has ended: the first tile's are brought to L2 meanwhile.
DEVICE void fetch_filters(const Map* w, u32 rank, int first, const Sizes& z) {
  int count = count_of(rank, z), tile = quotient(first, z.tiles_n_factor, z.tiles_n_shift);
  Place place;
  place.begin(rank, z);
  if (first >= z.units) return;
  for (int i = 0; i < count; i++) {
    prefetch_weights(w, place.c, place.tap, (first - tile * z.tiles_n) * BN);
    place.next(z);
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

DEVICE void consume(u32 stages, u32 full, u32 empty, u32 turns, u32 arrived, u32 rank, int who, int first, int step, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const Sizes& z) {
  Ring ring = {0, 0};
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, turn = 0, own = 0, count = count_of(rank, z);
  for (int unit = first; unit < z.units; unit += step) {
    if (TURNS && turn++ % CONSUMERS != who) {
      ring.skip(count);
      continue;
    }
    int tile = quotient(unit, z.tiles_n_factor, z.tiles_n_shift), n0 = (unit - tile * z.tiles_n) * BN;
    float d[PARTS][BN / 2];
    begin(d, n0, lane % 4, bias, rank, z);
    int row0 = TURNS ? 0 : who * ROWS;
#if TURNS
    // A wait knows a stage's round by its parity alone: so this group begins when the one before has waited for all of its own.
    barrier_wait(turns + 8 * who, (own++ & 1) ^ (who == 0));
#endif
    u32 before = 0;
    for (int i = 0; i < count; i++) {
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
    if (SPLIT == 1) release(before, lane);  // else nothing is loaded any more: a cluster has one tile
    int pixel = (CLUSTER == 1 ? tile : tile * CLUSTER + (int)rank) * TILE_M + row0 + warp * 16 + lane / 4;
#if SPLIT > 1
    cluster_meet();  // all have multiplied: nobody reads the ring any more
    send_sums(d, stages, arrived, rank, who, thread);
    if (inbox_bytes(rank)) barrier_wait_peers(arrived, 0);
#endif
#pragma unroll
    for (int from = 0; from < ITEMS; from += BATCH) {
      Added added[BATCH];
#if RESIDUAL
#pragma unroll
      for (int item = from; item < from + BATCH && item < ITEMS; item++)
        if (SPLIT == 1 || item % SPLIT == rank)
          load(added[item - from], item % WIDTHS, pixel + row_of(item), n0, lane % 4, residual, z);
#endif
#pragma unroll
      for (int item = from; item < from + BATCH && item < ITEMS; item++) {
        if (SPLIT > 1 && item % SPLIT != rank) continue;
        float v[8];
        take(v, d, item);
#if SPLIT > 1
        add_sums(v, stages, rank, who, item / SPLIT, thread);
#endif
        store(v, added[item - from], item % WIDTHS, pixel + row_of(item), n0, lane % 4, y, z);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), 1)
implicit_gemm(const __grid_constant__ Map x, const __grid_constant__ Map w, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes z) {
  SHARED_MEMORY;
  u32 base = opaque((shared_address(shared_memory) + 1023u) & ~1023u);
  u32 full = base + STAGES * STAGE_BYTES, empty = full + 8 * STAGES, turns = empty + 8 * STAGES, arrived = turns + 8 * CONSUMERS;
  u32 rank = CLUSTER * SPLIT == 1 ? 0 : cluster_rank();
  if (threadIdx.x == 0) {
    prefetch_map(&x);
    prefetch_map(&w);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 2);
      barrier_init(empty + 8 * i, (TURNS ? 4 : 4 * CONSUMERS) * CLUSTER);
    }
    for (int i = 0; i < CONSUMERS; i++) barrier_init(turns + 8 * i, 4);
#if SPLIT > 1
    barrier_init(arrived, 1);
    barrier_expect(arrived, inbox_bytes(rank));
#endif
    barrier_init_done();
  }
  if (CLUSTER == 1) __syncthreads(); else cluster_meet();
  int group = threadIdx.x / 128, first = blockIdx.x / (CLUSTER * SPLIT), step = gridDim.x / (CLUSTER * SPLIT);
  if (group == 0) {
    registers_fewer<PRODUCER_REGISTERS>();
#if DEPENDENT
    if (threadIdx.x == 64) fetch_filters(&w, rank, first, z);
    wait_for_forerunner();
    let_successor_start();
#endif
    if (threadIdx.x == 0) produce_pixels(&x, base, full, empty, rank, first, step, z);
    if (threadIdx.x == 32) produce_filters(&w, base, full, empty, rank, first, step, z);
    if (SPLIT > 1) cluster_meet();
  } else {
    registers_more<CONSUMER_REGISTERS>();
#if DEPENDENT
    wait_for_forerunner();
    let_successor_start();
#endif
    consume(base, full, empty, turns, arrived, rank, group - 1, first, step, y, residual, bias, z);
  }
}
