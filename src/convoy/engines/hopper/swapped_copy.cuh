// The threads of swapped.cu that copy.

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
      barrier_expect(bar, HALO_COPIED * PLANES);
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++)
        copy_box(at.halos + halo.stage * HALO_BYTES + plane * BOX_BYTES, x, bar, c0 + i * CHANNELS, -1, from.row - 1, OF_PLANE(from.image, plane));
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
#pragma unroll
        for (int plane = 0; plane < PLANES; plane++)
          copy_pixels(pixels + plane * BN * 128, x, bar, at.c, width, h, OF_PLANE(image, plane), (u16)at.right, (u16)at.down);
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

#if WEIGHTS
typedef const Map* Weights;

// Weights as they lie, [k, taps, c]. With WEIGHTS 2 the filters are its channels and what is summed over are its filters, the taps
// from the last one on: 64 rows of what is summed over, each of 64 filters.
DEVICE void copy_block(u32 to, Weights weights, u32 bar, int c, int tap, int filter0, const Sizes& z) {
#if WEIGHTS == 1
  copy_weights(to, weights, bar, c, tap, filter0);
#else
#pragma unroll
  for (int part = 0; part < FILTERS; part += 64)
    copy_weights(to + part * 128, weights, bar, filter0 + part, z.taps - 1 - tap, c);
#endif
}

DEVICE void produce_weights(Weights weights, const Room& room, int first, int step, const Sizes& z) {
  Ring ring = {0, 0};
  int count = count_of(room.rank, z), start = first_of(room.rank, z) * DEPTH;
  wait_for_forerunner();  // which may have written them
  for (int unit = first; unit < z.units; unit += step) {
    int tile = quotient(unit, z.groups_factor, z.groups_shift), group = unit - tile * z.groups;
    if (CLUSTER > 1) group = group * CLUSTER + (int)room.rank;
#if PITCH
    int tap = 0, c = start / 9 * CHANNELS;
#else
    int tap = quotient(start, z.c_blocks_factor, z.c_blocks_shift), c = (start - tap * z.c_blocks) * CHANNELS;
#endif
    for (int i = 0; i < count; i++) {
      u32 bar = room.full + 8 * ring.stage, to = room.stages + ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES;
      barrier_wait(room.empty + 8 * ring.stage, ring.phase ^ 1);
      barrier_expect(bar, DEPTH * CHUNK_BYTES);
#pragma unroll
      for (int block = 0; block < DEPTH; block++) {
        copy_block(to + block * CHUNK_BYTES, weights, bar, c, tap, group * FILTERS, z);
#if PITCH
        if (++tap == 9) { tap = 0; c += CHANNELS; }
#else
        c += CHANNELS;
        if (c >= z.channels) { c = 0; tap++; }
#endif
      }
      ring.next();
    }
  }
  if (CLUSTER > 1) drain(ring, room.empty);
}
#else
typedef const unsigned char* Weights;
DEVICE void produce_weights(Weights weights, const Room& room, int first, int step, const Sizes& z) {
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
  if (CLUSTER > 1) drain(ring, room.empty);
}
#endif
