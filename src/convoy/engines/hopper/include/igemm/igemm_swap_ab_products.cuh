// igemm_swap_ab.cu: the products of one iteration, and the stages that they release.
#pragma once
#include <igemm/igemm_swap_ab_layout.cuh>
#include <wgmma_instructions.cuh>

// One arrival a warp: a warp may end its products before the others of its group have begun to wait for the stage.
DEVICE void release(u32 bar, int lane) {
  if constexpr (CLUSTER == 1) {
    if (lane == 0) mbarrier_arrive(bar);
  } else {
    if (lane < CLUSTER) mbarrier_arrive_cluster(bar, lane);
  }
}

// What a warpgroup has read: a stage of the ring, and a box of pixels after its ninth tap.
struct ReadPosition {
  Ring ring;
  Halo halo;
  DEVICE_MEMBER void release_and_next(const SmemLayout& smem, int lane) {
    release(smem.empty + 8 * ring.stage, lane);
    ring.next();
    if constexpr (HAS_HALO) {
      if (halo.tap == 9 - DEPTH) release(smem.halo_empty + 8 * halo.stage, lane);
      halo.next();
    }
  }
};

// A thread's words of metadata for the 2:4 weights of an iteration. One word serves two products: even pairs of lanes
// have the first product's, odd pairs the second's.
struct Metadata { u32 words[DEPTH][PARTS]; };

#if SPARSE
DEVICE void load_metadata(Metadata& metadata, u32 places) {
#pragma unroll
  for (int block = 0; block < DEPTH; block++)
#pragma unroll
    for (int part = 0; part < PARTS; part++)
      metadata.words[block][part] = ld_shared_u32(places + block * CHUNK_BYTES + part * 512);
}

DEVICE void sparse_products(float (&d)[PARTS][TILE_N / 2], u32 a, u32 b, const u32 (&metadata)[PARTS]) {
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    wgmma_sparse<0>(d[part], smem_desc_sw64_of(a + part * PART_WORDS), smem_desc_sw128_of(b), metadata[part]);
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    wgmma_sparse<1>(d[part], smem_desc_sw64_of(a + part * PART_WORDS + 2), smem_desc_sw128_of(b + 4), metadata[part]);
}
#else
// The products of 64 filters, or twice as many, by all pixels over one row of 128 bytes.
template <bool ZERO_INIT = false> DEVICE void products(float (&d)[PARTS][TILE_N / 2], u32 a, u32 b) {
#pragma unroll
  for (int step = 0; step < 8; step += 2)
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#if WEIGHT_LAYOUT == 2
      u64 rows = smem_desc_sw128_of(a + part * PART_WORDS + step * 64);  // 16 rows of 128 bytes each
      wgmma_transposed_a(d[part], rows, smem_desc_sw128_of(b + step));
#else
      u64 rows = smem_desc_sw128_of(a + part * PART_WORDS + step), columns = smem_desc_sw128_of(b + step);
      if (ZERO_INIT && step == 0) wgmma_zero_init(d[part], rows, columns); else wgmma(d[part], rows, columns);
#endif
    }
}
#endif

// Starts the products of one iteration.
template <int PLANES_OF_SUMS>
DEVICE void start_iteration(SumsOf<PLANES_OF_SUMS>& sums, Metadata& metadata, ReadPosition& at, const SmemLayout& smem,
                            int consumer, int thread) {
  u32 columns = smem.stage_word + at.ring.stage * (STAGE_BYTES / 16);
  u32 rows = columns + DEPTH * PIXEL_BYTES / 16 + consumer * PARTS * PART_WORDS;
  mbarrier_try_then_wait(smem.full + 8 * at.ring.stage, at.ring.phase);
#if SPARSE
  u32 places = smem.stages + at.ring.stage * STAGE_BYTES + DEPTH * PIXEL_BYTES + FILTERS * 64;
  load_metadata(metadata, places + (consumer * PARTS * 128 + thread) * 4);
#endif
  if constexpr (HAS_HALO) {
    if (at.halo.tap == 0) mbarrier_try_then_wait(smem.halo_full + 8 * at.halo.stage, at.halo.phase);
    columns = smem.halo_word + at.halo.stage * (HALO_BYTES / 16) + at.halo.at;
  }
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < DEPTH; block++) {
    u32 a = rows + block * CHUNK_BYTES / 16, b = columns + block * (HAS_HALO ? 8 : PIXEL_BYTES / 16);
#if SPARSE
    sparse_products(sums.d, a, b, metadata.words[block]);
#else
    if constexpr (PLANES_OF_SUMS == 1) {
      products(sums.d, a, b);
    } else {
      // The body, which begins with zeros in each block; then the correction: high by low, low by high.
      u32 low = b + (HAS_HALO ? BOX_BYTES : TILE_N * 128) / 16;
      products<true>(sums.body, a, b);
      wgmma_commit_group();
      products(sums.correction, a, low);
      products(sums.correction, a + PLANE_WORDS, b);
    }
#endif
  }
  wgmma_commit_group();
  at.ring.next();
  if constexpr (HAS_HALO) at.halo.next();
}

// The correction begins with zeros: no filter is smaller than k = 0.
template <int PLANES_OF_SUMS>
DEVICE void begin_correction(SumsOf<PLANES_OF_SUMS>& sums, int filter0, int lane, const Value* bias) {
  begin(sums.correction, filter0, lane, 0, bias);
}

// All iterations of a tile. `done` follows `at` by the iterations whose products may be under way.
DEVICE void multiply_tile(Sums& sums, ReadPosition& at, ReadPosition& done, const SmemLayout& smem, int count,
                          int consumer, int thread, int lane) {
  // Products read the registers of their metadata until they have ended: one set for each iteration under way, and one
  // for the next.
  constexpr int SETS = PENDING + 1;
  Metadata metadata[SETS];
  int i = 0;
  for (; i + SETS <= count; i += SETS)
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      start_iteration(sums, metadata[set], at, smem, consumer, thread);
      wgmma_wait_group<PENDING>();
      if (i + set >= PENDING) done.release_and_next(smem, lane);
    }
#pragma unroll
  for (int set = 0; set < PENDING; set++)
    if (i + set < count) {
      start_iteration(sums, metadata[set], at, smem, consumer, thread);
      wgmma_wait_group<PENDING>();
      if (i + set >= PENDING) done.release_and_next(smem, lane);
    }
  wgmma_wait_group<0>();
}

// The same for planes. A tensor core cuts what it adds, toward zero: so each block's body is a short sum, added to the
// total as fp32 adds; the low planes are 2048 times their value (docs/kernels/strict-fp32.md).
template <int PLANES_OF_SUMS>
DEVICE void multiply_planes(SumsOf<PLANES_OF_SUMS>& sums, ReadPosition& at, ReadPosition& done, const SmemLayout& smem,
                            int count, int consumer, int thread, int lane) {
  for (int i = 0; i < count; i++) {
    Metadata none;
    start_iteration(sums, none, at, smem, consumer, thread);
    wgmma_wait_group<1>();  // this block's body has ended, and so has the correction before it: that stage is free
    if (i) done.release_and_next(smem, lane);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      fence_operand(sums.body[part]);
#pragma unroll
      for (int j = 0; j < TILE_N / 2; j++) sums.d[part][j] += sums.body[part][j];
    }
  }
  wgmma_wait_group<0>();
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    fence_operand(sums.correction[part]);
#pragma unroll
    for (int j = 0; j < TILE_N / 2; j++) sums.d[part][j] += sums.correction[part][j] * (1.f / 2048);
  }
}
