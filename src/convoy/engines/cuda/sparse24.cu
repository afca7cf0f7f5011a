// Convolution with 2:4 sparse weights as an implicit GEMM: y^T[k, pixels] = weight[k, taps and channels] · x^T, persistent and
// warp-specialised. The weight is the first operand, compressed: of every four channels two values, and which two as metadata.
//
// One warpgroup copies: two threads the pixels in turn, by TMA in im2col mode; another weights and metadata, as one run of bytes
// that the host packed in the order of shared memory. CONSUMERS warpgroups multiply, each ROWS filters by all pixels of the tile.
// With CLUSTER, blocks have the same pixels and different filters: each copies its share of the pixels to all. With SPLIT, so many
// blocks of a cluster have one tile and a share of the taps and channels each; they send each other their sums, and each adds
// and stores a part of the tile, in the order of the ranks. One iteration is DEPTH blocks, each one tap and 64 channels: two
// products of 32 channels. A thread's word of metadata serves both: even pairs of lanes have the first product's, odd pairs the
// second's. With BLOCKS 2, a multiprocessor has room for two: the next kernel's weights are there before this one has ended. With
// STAGED, results go through shared memory and by TMA.
//
// With PITCH, for 3x3 layers of stride 1, a tile is some rows of one image, PITCH columns each, of which the last ones are none of
// the image's. A block of 64 channels of these rows and their neighbours is copied once, as a plain box, and read at nine places; the
// ring has weights alone, DEPTH taps an iteration.
//
// Given by the host: ROWS (filters of a warpgroup, 64 or 128), BN (pixels of a tile, a multiple of 8 * CLUSTER), STAGES, CONSUMERS,
// CLUSTER, SPLIT (one of both is 1), DEPTH, BLOCKS, STAGED, UNIT (pixels of a split's store), PITCH (0 without), HALO_ROWS, HALOS (boxes of
// pixels), BF16, BIAS, RESIDUAL, ACTIVATION (a number), registers, and multiply_sparse<half>().

struct Sizes {
  int pixels, k, pitch, p, q, pq, groups, units, channels, iterations, each, s, c_blocks, span_w;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  u32 q_factor, q_shift, pq_factor, pq_shift, groups_factor, groups_shift, s_factor, s_shift, c_blocks_factor, c_blocks_shift;
};

#define FILTERS (ROWS * CONSUMERS)
#define PIXEL_BYTES (PITCH ? 0 : BN * 128)
#define CHUNK_BYTES (FILTERS * 72)
#define STAGE_BYTES (DEPTH * PIXEL_BYTES + (DEPTH * CHUNK_BYTES + 1023) / 1024 * 1024)
#define CHANNELS 64
#define HALO_BYTES (HALO_ROWS * PITCH * 128)
#define HALOS_BYTES (HALOS * HALO_BYTES)
#define SHARE (BN / CLUSTER)
#define PENDING (PARTS * BN >= 384 ? 1 : STAGES >= 6 ? 3 : STAGES >= 4 ? 2 : 1)
#define SETS (PENDING + 1)
// Threads that copy pixels. A wait knows rounds by their parity alone: with an odd number of stages, a thread may come to one
// whose last round it did not fill itself, and arrivals from other blocks might not come in their order.
#define COPIERS (CLUSTER > 1 && STAGES % 2 ? 1 : 2)

// A tile's sums in items of sixteen pixels and the filters of a part: each is stored by one block of a split, the owner.
#define PAIRS ((GROUPS + 1) / 2)
#define ITEMS (PARTS * PAIRS)
#define MOST_OWNED ((ITEMS + SPLIT - 1) / SPLIT)
#define INBOX_BYTES (SPLIT == 1 ? 0 : CONSUMERS * MOST_OWNED * (SPLIT - 1) * 4096)
#define STAGED_BYTES (!STAGED ? 0 : CONSUMERS * (SPLIT == 1 ? PARTS * BN * 128 : MOST_OWNED * 2048))

// Where things lie in shared memory, and which block of the cluster this is.
struct Room {
  u32 stages, halos, staged, sums, full, empty, halo_full, halo_empty, given, arrived, rank;
  u32 stage_word, halo_word;  // of stages and of halos, as operands
  DEVICE_MEMBER void lay_out(u32 base) {
    stages = base;
    halos = stages + STAGES * STAGE_BYTES;
    staged = halos + HALOS_BYTES;
    sums = staged + STAGED_BYTES;
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

#if STAGED
DEVICE Corner corner(int unit, const Sizes& z) {
  int tile = quotient(unit, z.groups_factor, z.groups_shift);
#if PITCH
  int image = quotient(tile, z.pq_factor, z.pq_shift);  // `pq` tiles an image
  return {0, 0, (tile - image * z.pq) * (BN / PITCH), image};
#else
  return {0, tile * BN, 0, 0};
#endif
}
#endif

#if PITCH
// The boxes of pixels of this block's channels.
DEVICE void produce_halos(const Map* x, const Room& at, int first, int step, const Sizes& z) {
  Halo halo = {0, 0, 0, 0};
  int blocks = count_of(at.rank, z) * DEPTH / 9, c0 = first_of(at.rank, z) * DEPTH / 9 * CHANNELS;
  for (int unit = first; unit < z.units; unit += step) {
    Corner from = corner(unit, z);
    if (unit == first) {
      wait_for_forerunner();
      let_successor_start();
    }
    for (int i = 0; i < blocks; i++) {
      u32 bar = at.halo_full + 8 * halo.stage;
      barrier_wait(at.halo_empty + 8 * halo.stage, halo.phase ^ 1);
      barrier_expect(bar, HALO_BYTES);
      copy_box(at.halos + halo.stage * HALO_BYTES, x, bar, c0 + i * CHANNELS, -1, from.row - 1, from.image);
      halo.advance();
    }
  }
}
#else
// Every other iteration where two threads do it, from `turn` on: to find out where one reads and to ask for it takes a thread
// longer than a small tile's products. Units are ordered filters first: those at one time share their pixels.
DEVICE void produce_pixels(const Map* x, const Room& room, int turn, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  int count = count_of(room.rank, z);
  if (turn) ring.next();
  for (int unit = first; unit < z.units; unit += step) {
    int pixel = quotient(unit, z.groups_factor, z.groups_shift) * BN + (CLUSTER == 1 ? 0 : (int)room.rank * SHARE);
    int image = quotient(pixel, z.pq_factor, z.pq_shift), rest = pixel - image * z.pq;
    int line = quotient(rest, z.q_factor, z.q_shift), told = 0;
    int h = line * z.stride_h - z.pad_h, width = (rest - line * z.q) * z.stride_w - z.pad_w;
    Tap at;
    at.begin(first_of(room.rank, z), z);
    if (turn)
      for (int block = 0; block < DEPTH; block++) at.next(z);
    if (unit == first) {
      // The first round's stages are empty, and may know what they will get before the kernel in front has ended.
      told = count < STAGES ? count : STAGES;
      for (int i = turn; i < told; i += COPIERS) barrier_expect(room.full + 8 * i, DEPTH * PIXEL_BYTES);
      wait_for_forerunner();
      let_successor_start();  // not before: of three kernels at one time, some multiprocessors would get two blocks of one
    }
    for (int i = turn; i < count; i += COPIERS) {
      u32 pixels = room.stages + ring.stage * STAGE_BYTES, bar = room.full + 8 * ring.stage;
      if (i >= told) {
        barrier_wait(room.empty + 8 * ring.stage, ring.phase ^ 1);
        barrier_expect(bar, DEPTH * PIXEL_BYTES);
      }
#pragma unroll
      for (int block = 0; block < DEPTH; block++, pixels += PIXEL_BYTES) {
#if CLUSTER == 1
        copy_pixels(pixels, x, bar, at.c, width, h, image, (u16)at.right, (u16)at.down);
#else
        copy_pixels_to_all(pixels + room.rank * SHARE * 128, x, bar, at.c, width, h, image, (u16)at.right, (u16)at.down, (1 << CLUSTER) - 1);
#endif
        at.next(z);
      }
      ring.next();
#if COPIERS == 2
#pragma unroll
      for (int block = 0; block < DEPTH; block++) at.next(z);
      ring.next();
#endif
    }
    if (COPIERS == 2) turn ^= count & 1;  // who had a tile's last iteration does not have the next one's first
  }
}
#endif

DEVICE void produce_weights(const unsigned char* weights, const Room& room, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  int count = count_of(room.rank, z);
  for (int unit = first; unit < z.units; unit += step) {
    int tile = quotient(unit, z.groups_factor, z.groups_shift), group = unit - tile * z.groups;
    if (CLUSTER > 1) group = group * CLUSTER + (int)room.rank;
    const unsigned char* chunk = weights + ((long long)group * z.iterations + first_of(room.rank, z)) * (DEPTH * CHUNK_BYTES);
    for (int i = 0; i < count; i++) {
      u32 bar = room.full + 8 * ring.stage;
      if (i == STAGES && unit == first) {
        // With a full ring there is nothing to do until pixels come: what follows is brought to L2, a share by each block that wants it.
        int shares = quotient(step, z.groups_factor, z.groups_shift);
        for (int ahead = tile; ahead < count - i; ahead += shares > 0 ? shares : 1)
          prefetch_bytes(chunk + ahead * (DEPTH * CHUNK_BYTES), DEPTH * CHUNK_BYTES);
      }
      barrier_wait(room.empty + 8 * ring.stage, ring.phase ^ 1);
      barrier_expect(bar, DEPTH * CHUNK_BYTES);
      copy_bytes(room.stages + ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES, chunk, DEPTH * CHUNK_BYTES, bar);
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

// One iteration's products are begun.
DEVICE void iterate(float (&d)[PARTS][BN / 2], u32 (&metadata)[DEPTH][PARTS], Read& at, const Room& room, int who, int thread) {
  u32 columns = room.stage_word + at.ring.stage * (STAGE_BYTES / 16), rows = columns + DEPTH * PIXEL_BYTES / 16 + who * PARTS * 256;
  u32 places = room.stages + at.ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES + FILTERS * 64 + (who * PARTS * 128 + thread) * 4;
  barrier_wait_soon(room.full + 8 * at.ring.stage, at.ring.phase);
#pragma unroll
  for (int block = 0; block < DEPTH; block++)
#pragma unroll
    for (int part = 0; part < PARTS; part++) metadata[block][part] = shared_word(places + block * CHUNK_BYTES + part * 512);
#if PITCH
  if (at.halo.tap == 0) barrier_wait_soon(room.halo_full + 8 * at.halo.stage, at.halo.phase);
  columns = room.halo_word + at.halo.stage * (HALO_BYTES / 16) + at.halo.at;
#endif
  products_begin();
#pragma unroll
  for (int block = 0; block < DEPTH; block++) {
    u32 a = rows + block * CHUNK_BYTES / 16, b = columns + block * (PITCH ? 8 : PIXEL_BYTES / 16);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      multiply_sparse<0>(d[part], sparse_operand(a + part * 256), dense_operand(b), metadata[block][part]);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      multiply_sparse<1>(d[part], sparse_operand(a + part * 256 + 2), dense_operand(b + 4), metadata[block][part]);
  }
  products_commit();
  at.ring.next();
#if PITCH
  at.halo.next();
#endif
}

#if SPLIT > 1
// How many sums an item has: of the last one perhaps the half.
DEVICE int quads(int item) { return item % PAIRS * 2 + 1 < GROUPS ? 2 : 1; }

// Where an owner gets four of a thread's sums from another rank.
DEVICE u32 inbox(u32 sums, int who, int owned, u32 other, int quad, int thread) {
  return sums + ((((who * MOST_OWNED + owned) * (SPLIT - 1) + other) * 2 + quad) * 128 + thread) * 16;
}

DEVICE u32 inbox_bytes(u32 rank) {
  u32 bytes = 0;
#pragma unroll
  for (int item = 0; item < ITEMS; item++)
    if (item % SPLIT == rank) bytes += quads(item) * CONSUMERS * (SPLIT - 1) * 128 * 16;
  return bytes;
}

DEVICE void send_sums(const float (&d)[PARTS][BN / 2], u32 sums, u32 arrived, u32 rank, int who, int thread) {
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    int owner = item % SPLIT;
    if (owner == rank) continue;
#pragma unroll
    for (int quad = 0; quad < quads(item); quad++) {
      const float* four = &d[item / PAIRS][item % PAIRS * 8 + quad * 4];
      send(inbox(sums, who, item / SPLIT, rank < owner ? rank : rank - 1, quad, thread), owner, four[0], four[1], four[2], four[3], arrived);
    }
  }
}

// Adds in the order of the ranks: the same bits whoever is first.
DEVICE void add_sums(float (&d)[BN / 2], int item, u32 sums, u32 rank, int who, int thread) {
#pragma unroll
  for (int quad = 0; quad < quads(item); quad++) {
    float* own = &d[item % PAIRS * 8 + quad * 4];
    float total[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (u32 from = 0; from < SPLIT; from++) {
      float four[4] = {own[0], own[1], own[2], own[3]};
      if (from != rank) receive(four, inbox(sums, who, item / SPLIT, from < rank ? from : from - 1, quad, thread));
#pragma unroll
      for (int i = 0; i < 4; i++) total[i] += four[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) own[i] = total[i];
  }
}

// Where a lane's residual of an item is, and its result where that is not staged.
DEVICE Place place_of(int item, int pixel0, int filter0, int lane, int unit, const Sizes& z) {
  Place at = place(item % PAIRS * 2, pixel0, filter0 + item / PAIRS * 64, lane, z.pixels, z.k);
#if PITCH
  Corner tile = corner(unit, z);
  int column = at.pixel - pixel0, row = tile.row + column / PITCH;
  at.inside = column < BN && column % PITCH < z.q && row < z.p && at.filter < z.k;
  at.pixel = (tile.image * z.p + row) * z.q + column % PITCH;
#endif
  return at;
}

// The items of this block. Residuals are asked for before the others' sums are there.
DEVICE void store_owned(float (&d)[PARTS][BN / 2], const Room& room, int who, int thread, int unit, int pixel0, int filter0, const Sizes& z, Value* __restrict__ y, const Value* __restrict__ residual) {
  int lane = thread % 32;
  u32 rank = room.rank;
#pragma unroll
  for (int from = 0; from < ITEMS; from += AT_ONCE * SPLIT) {
    uint4 more[AT_ONCE];
#pragma unroll
    for (int item = from; item < from + AT_ONCE * SPLIT && item < ITEMS; item++) {
      if (item % SPLIT != rank) continue;
      more[(item - from) / SPLIT] = make_uint4(0, 0, 0, 0);
#if RESIDUAL
      Place at = place_of(item, pixel0, filter0, lane, unit, z);
      if (at.inside) more[(item - from) / SPLIT] = *(const uint4*)(residual + (long long)at.pixel * z.k + at.filter);
#endif
    }
    if (from == 0 && inbox_bytes(rank)) barrier_wait_peers(room.arrived, 0);
#pragma unroll
    for (int item = from; item < from + AT_ONCE * SPLIT && item < ITEMS; item++) {
      if (item % SPLIT != rank) continue;
      add_sums(d[item / PAIRS], item, room.sums, rank, who, thread);
#if STAGED
      u32 words[4], added[4];
      spread(added, more[(item - from) / SPLIT], lane);
      finish(words, d[item / PAIRS], item % PAIRS * 2, added);
      put_groups(staged_row(room.staged + (who * MOST_OWNED + item / SPLIT) * 2048, thread), item % PAIRS * 2, words);
#else
      Place at = place_of(item, pixel0, filter0, lane, unit, z);
      store_groups(d[item / PAIRS], item % PAIRS * 2, more[(item - from) / SPLIT], at, lane, z.pitch, y);
#endif
    }
  }
}

#if STAGED
// What the warpgroup has put together, one copy for UNIT pixels of an item.
DEVICE void copy_owned(const Room& room, int who, int thread, const Corner& to, int k, const Map* y) {
  publish_writes();
  group_meet(who);
  if (thread) return;
  for (int item = room.rank; item < ITEMS; item += SPLIT) {
    int filter = to.filter + item / PAIRS * 64;
    for (int column = item % PAIRS * 16; column < item % PAIRS * 16 + 16 && column < BN && filter < k; column += UNIT)
      store_box(y, room.staged + (who * MOST_OWNED + item / SPLIT) * 2048 + column % 16 * 128, filter,
                PITCH ? column % (PITCH + !PITCH) : to.column + column, PITCH ? to.row + column / (PITCH + !PITCH) : 0, to.image);
  }
  stores_commit();
}
#endif
#endif

DEVICE void consume(const Room& room, int who, int first, int step, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const Map* y_map, const Map* residual_map, const Sizes& z) {
  int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, count = count_of(room.rank, z);
  Read at = {}, done = {};
#if STAGED && SPLIT == 1
  u32 staged = room.staged + who * PARTS * BN * 128, given = room.given + 8 * who, round = 0;
#endif
  for (int unit = first; unit < z.units; unit += step) {
    int tile = quotient(unit, z.groups_factor, z.groups_shift), pixel0 = tile * BN, group = unit - tile * z.groups;
    if (CLUSTER > 1) group = group * CLUSTER + (int)room.rank;
    int filter0 = group * FILTERS + who * ROWS + warp * 16;
    float d[PARTS][BN / 2];
    // Of a split, the first block adds the bias: the others' filters all lie behind the last one that has any.
    begin(d, filter0, lane, SPLIT == 1 || room.rank == 0 ? z.k : 0, bias);
    if (unit == first) wait_for_forerunner();
#if STAGED && SPLIT == 1 && RESIDUAL
    if (thread == 0) {
      Corner from = corner(unit, z);
      from.filter = group * FILTERS + who * ROWS;
      stores_read();
      ask_residuals(staged, given, from, z.k, residual_map);
    }
#endif
    // Products read their metadata's registers until they have ended: a set for each that may run, and one for the next.
    u32 metadata[SETS][DEPTH][PARTS];
    int i = 0;
    for (; i + SETS <= count; i += SETS)
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        iterate(d, metadata[set], at, room, who, thread);
        products_wait<PENDING>();
        if (i + set >= PENDING) done.next(room, lane);
      }
#pragma unroll
    for (int set = 0; set < PENDING; set++)
      if (i + set < count) {
        iterate(d, metadata[set], at, room, who, thread);
        products_wait<PENDING>();
        if (i + set >= PENDING) done.next(room, lane);
      }
    products_wait<0>();
#if SPLIT > 1
    cluster_wait();  // the others' barriers are there
    send_sums(d, room.sums, room.arrived, room.rank, who, thread);
    store_owned(d, room, who, thread, unit, pixel0, filter0, z, y, residual);
#else
    while (done.ring.stage != at.ring.stage) done.next(room, lane);
#endif
#if STAGED
    Corner to = corner(unit, z);
    to.filter = group * FILTERS + who * ROWS;
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
    store_staged(d, staged, who, thread, to, z.k, y_map);
#endif
#elif SPLIT == 1
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      store_sums(d[part], pixel0, filter0 + part * 64, lane, z.pixels, z.k, z.pitch, y, residual);
#endif
  }
}

#if STAGED
#define MAPS , const __grid_constant__ Map y_map, const __grid_constant__ Map residual_map
#define MAPS_GIVEN &y_map, &residual_map
#else
#define MAPS
#define MAPS_GIVEN nullptr, nullptr
#endif

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)
sparse24(const __grid_constant__ Map x, const unsigned char* weights, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes z MAPS) {
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
    if (threadIdx.x == 32) produce_weights(weights, room, first, step, z);
#if SPLIT > 1
    cluster_wait();
#endif
  } else {
    registers_more<CONSUMER_REGISTERS>();
    consume(room, CONSUMERS == 1 ? 0 : (int)uniform(group - 1), first, step, y, residual, bias, MAPS_GIVEN, z);
  }
#if STAGED
  stores_read();  // of whoever asked for any; within the branch above, the assembler would not count on its registers
#endif
  if (CLUSTER > 1) cluster_meet();  // a block's memory must be there until its peers have written to it
}
