// Squeeze-and-excitation and the 1x1 convolution behind it, NHWC, half values, in two launches:
//
//   y = relu(Wp · (x · outer(W2 · inner(W1 · mean(x) + bias) + shift)) + product_bias + residual)
//
//   squeeze   as in squeeze_excitation.cu.
//   gated     A block has PASSES times BLOCK_M pixels of one image and BLOCK_N filters. It adds the image's parts, makes the gates of all
//             channels, and multiplies pixels by gates in registers, between shared memory and the product: x · gate is
//             never stored.
//
//      shared memory                                  registers of a warp
//        ring of pixels  [STAGES][BLOCK_M][CHUNK] --->  A · gates  \
//        gates           [DEPTH]                  --->             /  product, every WARPS_K-th 16 channels
//        weights         [BLOCK_N][DEPTH]         --->  B
//        W2              [HIDDEN][CHANNELS]
//
// Weights are under way before the wait for the kernel in front: nobody writes them. Rows in shared memory are an odd number of 16 bytes
// apart, so that ldmatrix meets no bank twice. Parameters: squeeze_excitation_config.cuh, gated_1x1_config.cuh.
#include <gates/gated_1x1_config.cuh>
#include <gates/squeeze.cuh>
#include <warp_products.cuh>

enum : int {
  STEP = 16,  // channels of one product
  BLOCK_THREADS = 32 * WARPS_M * WARPS_K,
  CHUNKS = (CHANNELS + CHUNK - 1) / CHUNK,
  DEPTH = CHUNKS * CHUNK,
  ALL_CHUNKS = CHUNKS * PASSES,
  SLOTS = STAGES - 1 < ALL_CHUNKS ? STAGES : ALL_CHUNKS,  // no more than there are chunks
  TILES_M = (PIXELS + BLOCK_M * PASSES - 1) / (BLOCK_M * PASSES),
  TILES_N = (FILTERS + BLOCK_N - 1) / BLOCK_N,
  ROW_TILES = BLOCK_M / 16 / WARPS_M,  // of a warp
  COLUMN_TILES = BLOCK_N / 8,
  PIXEL_PITCH = CHUNK * 2 + 16,  // bytes
  WEIGHT_PITCH = DEPTH * 2 + 16,
  SUM_PITCH = BLOCK_N % 16 ? BLOCK_N : BLOCK_N + 8,  // words: rows of pairs without bank conflicts
  // Shared memory, in bytes.
  GATES = BLOCK_N * WEIGHT_PITCH,
  ADDED = GATES + DEPTH * 2,
  HIDDEN_AT = ADDED + Adders<BLOCK_THREADS>::COUNT * HIDDEN * 8,
  SECOND_AT = (HIDDEN_AT + HIDDEN * 8 + 15) / 16 * 16,
  RING = SECOND_AT + HIDDEN * CHANNELS * 2,
  // Of each warp along the channels. With one pass the ring is empty by then.
  SUMS = PASSES == 1 ? RING : RING + SLOTS * BLOCK_M * PIXEL_PITCH,
};

struct Tile {
  int columns, pixels, image;  // first filter, first pixel

  DEVICE_MEMBER Tile() {
    columns = blockIdx.x % TILES_N * BLOCK_N, pixels = blockIdx.x / TILES_N % TILES_M * (BLOCK_M * PASSES);
    image = blockIdx.x / (TILES_N * TILES_M);
  }
};

DEVICE void load_weights(u32 base, const Tile& tile, const Weight* __restrict__ weight, const Weight* __restrict__ second) {
  enum : int { VECTORS = DEPTH / 8 };
#pragma unroll 4
  for (int i = threadIdx.x; i < BLOCK_N * VECTORS; i += BLOCK_THREADS) {
    int row = i / VECTORS, channel = i % VECTORS * 8, filter = tile.columns + row;
    bool inside = channel < CHANNELS && filter < FILTERS;
    cp_async_16(base + row * WEIGHT_PITCH + channel * 2, weight + (inside ? filter * CHANNELS + channel : 0), inside);
  }
  for (int i = threadIdx.x; i < HIDDEN * CHANNELS / 8; i += BLOCK_THREADS) cp_async_16(base + SECOND_AT + i * 16, second + i * 8, true);
  cp_async_commit_group();
}

DEVICE void load_pixels(u32 base, const Tile& tile, const Weight* __restrict__ x, int chunk) {
  enum : int { VECTORS = CHUNK / 8 };
  u32 slot = base + RING + chunk % SLOTS * (BLOCK_M * PIXEL_PITCH);
#pragma unroll 4
  for (int i = threadIdx.x; i < BLOCK_M * VECTORS; i += BLOCK_THREADS) {
    int row = i / VECTORS, channel = chunk % CHUNKS * CHUNK + i % VECTORS * 8, pixel = tile.pixels + chunk / CHUNKS * BLOCK_M + row;
    bool inside = channel < CHANNELS && pixel < PIXELS;
    long long at = ((long long)tile.image * PIXELS + pixel) * CHANNELS + channel;
    cp_async_16(slot + row * PIXEL_PITCH + i % VECTORS * 16, x + (inside ? at : 0), inside);
  }
}

// The gates of all channels, by four: rounded to half values, as PyTorch rounds them. Zeros behind the last channel.
DEVICE void make_gates(u32 base, const float* __restrict__ shift) {
  for (int i = threadIdx.x; i < DEPTH / 4; i += BLOCK_THREADS) {
    float gate[4] = {};
    if (i * 4 < CHANNELS) {
#pragma unroll
      for (int j = 0; j < 4; j++) gate[j] = HAS_SHIFT ? shift[i * 4 + j] : 0.f;
#pragma unroll 8
      for (int h = 0; h < HIDDEN; h++) {
        float v = word_at(base + HIDDEN_AT + h * 8), words[2];
        ld_shared_v2(words, base + SECOND_AT + (h * CHANNELS + i * 4) * 2);
#pragma unroll
        for (int j = 0; j < 4; j++)
          gate[j] += v * half_to_float<BFLOAT>((u16)(float_as_u32(words[j / 2]) >> 16 * (j % 2) & 0xffff));
      }
#pragma unroll
      for (int j = 0; j < 4; j++) gate[j] = activate<OUTER>(gate[j]);
    }
    st_shared_v2(base + GATES + i * 8, pack_pair<BFLOAT>(gate[0], gate[1]), pack_pair<BFLOAT>(gate[2], gate[3]));
  }
}

// One chunk's products of a warp, of all chunks that the block has: of its rows, all columns, and every WARPS_K-th step.
DEVICE void multiply(float (&sums)[ROW_TILES][COLUMN_TILES][4], u32 base, int chunk) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = warp % WARPS_M * (ROW_TILES * 16);
  const u32 pixel = base + RING + chunk % SLOTS * (BLOCK_M * PIXEL_PITCH) + (rows + lane % 16) * PIXEL_PITCH + lane / 16 * 16;
  const u32 filter = base + (lane / 16 * 8 + lane % 8) * WEIGHT_PITCH + lane / 8 % 2 * 16 + chunk % CHUNKS * (CHUNK * 2);
  const u32 gate = base + GATES + chunk % CHUNKS * (CHUNK * 2) + lane % 4 * 4;
#pragma unroll
  for (int turn = 0; turn < CHUNK / STEP / WARPS_K; turn++) {
    const int step = (warp / WARPS_M + turn * WARPS_K) * (STEP * 2);  // bytes
    const u32 low = ld_shared_u32(gate + step), high = ld_shared_u32(gate + step + 16);
    u32 b[(COLUMN_TILES + 1) / 2][4];
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j += 2) {
      if (j + 1 < COLUMN_TILES) ldmatrix_x4(b[j / 2], filter + j * 8 * WEIGHT_PITCH + step);
      else ldmatrix_x2(b[j / 2], base + ((j * 8 + lane % 8) * WEIGHT_PITCH + lane / 8 % 2 * 16 + chunk % CHUNKS * (CHUNK * 2)) + step);
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
      u32 a[4];
      ldmatrix_x4(a, pixel + i * 16 * PIXEL_PITCH + step);
      a[0] = multiply_pair<BFLOAT>(a[0], low), a[1] = multiply_pair<BFLOAT>(a[1], low);
      a[2] = multiply_pair<BFLOAT>(a[2], high), a[3] = multiply_pair<BFLOAT>(a[3], high);
#pragma unroll
      for (int j = 0; j < COLUMN_TILES; j++) mma_16x8x16<BFLOAT>(sums[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

// A warp's sums, to shared memory.
DEVICE void keep(u32 base, const float (&sums)[ROW_TILES][COLUMN_TILES][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / WARPS_M * BLOCK_M + warp % WARPS_M * (ROW_TILES * 16) + lane / 4;
  const u32 place = base + SUMS + (row * SUM_PITCH + lane % 4 * 2) * 4;
#pragma unroll
  for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        put(place + ((i * 16 + half * 8) * SUM_PITCH + j * 8) * 4, sums[i][j][half * 2], sums[i][j][half * 2 + 1]);
}

// The sums of all warps along the channels, in one order, with what follows the product.
DEVICE void store(u32 base, const Tile& tile, int pass, const float* __restrict__ bias, const uint4* __restrict__ residual, uint4* __restrict__ y) {
  enum : int { VECTORS = BLOCK_N / 8 };
  for (int i = threadIdx.x; i < BLOCK_M * VECTORS; i += BLOCK_THREADS) {
    int row = i / VECTORS, column = i % VECTORS * 8, filter = tile.columns + column, pixel = tile.pixels + pass * BLOCK_M + row;
    if (filter >= FILTERS || pixel >= PIXELS) continue;
    long long at = (((long long)tile.image * PIXELS + pixel) * FILTERS + filter) / 8;
    float v[8] = {};
    if constexpr (HAS_PRODUCT_BIAS)
      for (int j = 0; j < 8; j++) v[j] = bias[filter + j];
#pragma unroll
    for (int k = 0; k < WARPS_K; k++)
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        float four[4];
        ld_shared_v4(four, base + SUMS + ((k * BLOCK_M + row) * SUM_PITCH + column + j) * 4);
        for (int l = 0; l < 4; l++) v[j + l] += four[l];
      }
    if constexpr (ADDS_RESIDUAL) {
      float more[8];
      to_floats(more, residual[at]);
      for (int j = 0; j < 8; j++) v[j] += more[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = RELU_AT_END ? activate<RELU>(v[j]) : v[j];
    y[at] = from_floats(v);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS_PER_SM)
    gated(const Weight* __restrict__ x, const float* __restrict__ bias, const Weight* __restrict__ second,
          const float* __restrict__ shift, const float* __restrict__ parts, const Weight* __restrict__ weight,
          const float* __restrict__ product_bias, const uint4* __restrict__ residual, uint4* __restrict__ y) {
  SHARED_MEMORY;
  const Tile tile;
  const u32 base = shared_address(shared_memory);
  load_weights(base, tile, weight, second);
  follow();
#pragma unroll
  for (int chunk = 0; chunk < STAGES - 1; chunk++) {
    if (chunk < ALL_CHUNKS) load_pixels(base, tile, x, chunk);
    cp_async_commit_group();
  }
  cp_async_wait_group<STAGES - 1>();
  add_parts<BLOCK_THREADS>(parts, bias, tile.image, base + ADDED, base + HIDDEN_AT);
  make_gates(base, shift);
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    float sums[ROW_TILES][COLUMN_TILES][4] = {};
#pragma unroll 1
    for (int chunk = pass * CHUNKS; chunk < (pass + 1) * CHUNKS; chunk++) {
      cp_async_wait_group<STAGES - 2>();
      __syncthreads();  // gates and this chunk are there; nobody reads the slot that is filled next
      if (chunk + STAGES - 1 < ALL_CHUNKS) load_pixels(base, tile, x, chunk + STAGES - 1);
      cp_async_commit_group();
      multiply(sums, base, chunk);
    }
    if constexpr (PASSES == 1) __syncthreads();
    keep(base, sums);
    __syncthreads();
    store(base, tile, pass, product_bias, residual, y);
  }
}
