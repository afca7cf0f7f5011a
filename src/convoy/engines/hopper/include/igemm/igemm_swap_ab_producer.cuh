// igemm_swap_ab.cu: the threads that copy.
#pragma once
#include <igemm/igemm_swap_ab_layout.cuh>
#include <tma.cuh>

// With a halo: boxes of the pixels of this block's channels.
DEVICE void produce_halos(const TensorMap* x, const SmemLayout& smem, int first, int step, const Sizes& sizes) {
  Halo halo = {0, 0, 0, 0};
  int blocks = count_of(smem.rank, sizes) * DEPTH / 9, c0 = first_of(smem.rank, sizes) * DEPTH / 9 * CHANNELS;
  for (int work = first; work < sizes.work_items; work += step) {
    Corner from = corner(work, sizes);
    if (work == first) {
      griddep_wait();
      griddep_launch_dependents();
    }
    for (int i = 0; i < blocks; i++) {
      u32 bar = smem.halo_full + 8 * halo.stage;
      mbarrier_wait(smem.halo_empty + 8 * halo.stage, halo.phase ^ 1);
      mbarrier_arrive_expect_tx(bar, HALO_COPIED * PLANES);
#pragma unroll
      for (int plane = 0; plane < PLANES; plane++) {
        u32 to = smem.halos + halo.stage * HALO_BYTES + plane * BOX_BYTES;
        tma_load_4d(to, x, bar, c0 + i * CHANNELS, -1, from.row - 1, image_of_plane(from.image, plane, sizes));
      }
      halo.advance();
    }
  }
}

// Without a halo: one tap's pixels. Two threads copy every other iteration, beginning with `turn`: to find where an
// iteration reads and to start its copies takes one thread longer than the products of a small tile. Work items are
// ordered filters first: those that run at one time share their pixels.
DEVICE void produce_pixels(const TensorMap* x, const SmemLayout& smem, int turn, int first, int step,
                           const Sizes& sizes) {
  Ring ring = {0, 0};
  int count = count_of(smem.rank, sizes);
  if (turn) ring.next();
  for (int work = first; work < sizes.work_items; work += step) {
    int pixel = fast_div(work, sizes.groups_divisor) * TILE_N + (CLUSTER == 1 ? 0 : (int)smem.rank * SHARE);
    int image = fast_div(pixel, sizes.pq_divisor), rest = pixel - image * sizes.pq;
    int line = fast_div(rest, sizes.q_divisor), told = 0;
    int h = line * sizes.stride_h - sizes.pad_h, width = (rest - line * sizes.q) * sizes.stride_w - sizes.pad_w;
    Tap at;
    at.begin(first_of(smem.rank, sizes), sizes);
    if (turn)
      for (int block = 0; block < DEPTH; block++) at.next(sizes);
    if (work == first) {
      // The stages of the first round are empty: their barriers are told what will come before the kernel in front has
      // ended.
      told = count < STAGES ? count : STAGES;
      for (int i = turn; i < told; i += COPIERS) mbarrier_arrive_expect_tx(smem.full + 8 * i, DEPTH * PIXEL_BYTES);
      griddep_wait();
      // Not earlier: with three kernels at one time, some multiprocessors would get two blocks of one
      griddep_launch_dependents();
    }
    for (int i = turn; i < count; i += COPIERS) {
      u32 pixels = smem.stages + ring.stage * STAGE_BYTES, bar = smem.full + 8 * ring.stage;
      if (i >= told) {
        mbarrier_wait(smem.empty + 8 * ring.stage, ring.phase ^ 1);
        mbarrier_arrive_expect_tx(bar, DEPTH * PIXEL_BYTES);
      }
#pragma unroll
      for (int block = 0; block < DEPTH; block++, pixels += PIXEL_BYTES) {
        if constexpr (CLUSTER == 1) {
#pragma unroll
          for (int plane = 0; plane < PLANES; plane++)
            tma_load_im2col(pixels + plane * TILE_N * 128, x, bar, at.c, width, h, image_of_plane(image, plane, sizes),
                            (u16)at.right, (u16)at.down);
        } else {
          tma_load_im2col_multicast(pixels + smem.rank * SHARE * 128, x, bar, at.c, width, h, image, (u16)at.right,
                                    (u16)at.down, (1 << CLUSTER) - 1);
        }
        at.next(sizes);
      }
      ring.next();
      if constexpr (COPIERS == 2) {
#pragma unroll
        for (int block = 0; block < DEPTH; block++) at.next(sizes);
        ring.next();
      }
    }
    // The thread that had a tile's last iteration does not have the next tile's first
    if (COPIERS == 2) turn ^= count & 1;
  }
}

#if WEIGHT_LAYOUT
typedef const TensorMap* Weights;

// A block of a weight [k, taps, c] as it lies. Layout 2, a gradient of x: the rows are the weight's channels and the
// sum is over its filters, with the taps from the last one on: 64 rows of shared memory for the sum, each of 64
// channels.
DEVICE void copy_weight_block(u32 to, Weights weights, u32 bar, int c, int tap, int filter0, const Sizes& sizes) {
  if constexpr (WEIGHT_LAYOUT == 1) {
    tma_load_3d(to, weights, bar, c, tap, filter0);
  } else {
#pragma unroll
    for (int part = 0; part < FILTERS; part += 64)
      tma_load_3d(to + part * 128, weights, bar, filter0 + part, sizes.taps - 1 - tap, c);
  }
}

DEVICE void produce_weights(Weights weights, const SmemLayout& smem, int first, int step, const Sizes& sizes) {
  Ring ring = {0, 0};
  int count = count_of(smem.rank, sizes), start = first_of(smem.rank, sizes) * DEPTH;
  griddep_wait();  // the kernel in front may have written them
  for (int work = first; work < sizes.work_items; work += step) {
    int tile = fast_div(work, sizes.groups_divisor), group = work - tile * sizes.groups;
    if (CLUSTER > 1) group = group * CLUSTER + (int)smem.rank;
    int tap = HAS_HALO ? 0 : fast_div(start, sizes.c_blocks_divisor);
    int c = HAS_HALO ? start / 9 * CHANNELS : (start - tap * sizes.c_blocks) * CHANNELS;
    for (int i = 0; i < count; i++) {
      u32 bar = smem.full + 8 * ring.stage, to = smem.stages + ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES;
      mbarrier_wait(smem.empty + 8 * ring.stage, ring.phase ^ 1);
      mbarrier_arrive_expect_tx(bar, DEPTH * CHUNK_BYTES);
#pragma unroll
      for (int block = 0; block < DEPTH; block++) {
        copy_weight_block(to + block * CHUNK_BYTES, weights, bar, c, tap, group * FILTERS, sizes);
        if constexpr (HAS_HALO) {
          if (++tap == 9) { tap = 0; c += CHANNELS; }
        } else {
          c += CHANNELS;
          if (c >= sizes.channels) { c = 0; tap++; }
        }
      }
      ring.next();
    }
  }
  if (CLUSTER > 1) wait_until_empty(ring, smem.empty);
}
#else
typedef const unsigned char* Weights;

// Packed weights: an iteration is one run of bytes. They were packed long ago, so that their copies wait for no kernel
// in front.
DEVICE void produce_weights(Weights weights, const SmemLayout& smem, int first, int step, const Sizes& sizes) {
  Ring ring = {0, 0};
  int count = count_of(smem.rank, sizes);
  for (int work = first; work < sizes.work_items; work += step) {
    int tile = fast_div(work, sizes.groups_divisor), group = work - tile * sizes.groups;
    if (CLUSTER > 1) group = group * CLUSTER + (int)smem.rank;
    long long iteration0 = (long long)group * sizes.iterations + first_of(smem.rank, sizes);
    const unsigned char* chunk = weights + iteration0 * (DEPTH * CHUNK_BYTES);
    for (int i = 0; i < count; i++) {
      u32 bar = smem.full + 8 * ring.stage;
      if (i == STAGES && work == first) {
        // The ring is full and waits for pixels: the weights that follow are brought to L2, a share by each block that
        // wants them.
        int shares = fast_div(step, sizes.groups_divisor);
        for (int ahead = tile; ahead < count - i; ahead += shares > 0 ? shares : 1)
          bulk_prefetch(chunk + ahead * (DEPTH * CHUNK_BYTES), DEPTH * CHUNK_BYTES);
      }
      mbarrier_wait(smem.empty + 8 * ring.stage, ring.phase ^ 1);
      mbarrier_arrive_expect_tx(bar, DEPTH * CHUNK_BYTES);
      bulk_load(smem.stages + ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES, chunk, DEPTH * CHUNK_BYTES, bar);
      chunk += DEPTH * CHUNK_BYTES;
      ring.next();
    }
  }
  if (CLUSTER > 1) wait_until_empty(ring, smem.empty);
}
#endif
