// Direct sparse convolution: the positions of a pruned weight's non-zeros are data (sparse_weights' direct tiles lay
// them out).
//
//   shared memory of a block                              a warp: FILTERS_OF_WARP filters by LANES * VECTORS positions
//
//     +--------------------------------------+
//     | x: its channels' part of the tile,   |            for every entry [offset, value] of the filter:
//     |    with padding inside               |              sum[v] += value * x[offset + 4 * lane + 4 * LANES * v]
//     +--------------------------------------+
//     | zeros, for entries that fill a four  |            PARTS warps share a filter's entries, SLICES blocks of a cluster its channels:
//     +--------------------------------------+            their sums go to the block that owns the filter ("received"), which adds them in
//     | barrier | received sums              |            the order of slices and parts, so that the bits do not depend on who is first
//     +--------------------------------------+
//     | list: starts of filters, entries     |            who waits: all threads once for the copies; the owner for the bytes it receives
//     +--------------------------------------+
//
// Parameters: direct_config.cuh.
#include <activation.cuh>
#include <direct_device.cuh>

enum : int {
  TILE = LANES * VECTORS,
  THREADS = LANES * FILTERS * PARTS / FILTERS_OF_WARP,
  SHARES = SLICES * PARTS,
  OWN = FILTERS / SLICES,
  SUMS = OWN * LANES * WIDTH,  // that a share sends to a block: WIDTH of a lane, VECTORS of them real
  OUTPUTS = (SUMS + THREADS - 1) / THREADS,
};

typedef StoredValue<HALF>::Type Value;

#if COPY_MODE == 2
// All channels as they lie in memory: one run.
DEVICE void stage(float* to, const Value* x, int channel, int channels, int) {
  const Value* from = x + channel * (X_ROWS * X_COLUMNS);
#pragma unroll 4
  for (int i = 4 * threadIdx.x; i < channels * (X_ROWS * X_COLUMNS); i += 4 * THREADS)
    cp_async_16(to + i, from + i, true);
}
#elif COPY_MODE == 1
// Pixels of a 1x1 filter as they lie in memory: those of a tile are one run of fours in each channel.
DEVICE void stage(float* to, const Value* x, int channel, int channels, int base) {
#pragma unroll 4
  for (int i = threadIdx.x; i < channels * (SPAN / 4); i += THREADS) {
    const int at = base + i % (SPAN / 4) * 4, image = at / (X_ROWS * X_COLUMNS);
    const bool inside = image < BATCH;
    cp_async_16(to + 4 * i,
                x + (inside ? (image * X_CHANNELS + channel + i / (SPAN / 4)) * (X_ROWS * X_COLUMNS) +
                                  at % (X_ROWS * X_COLUMNS)
                            : 0),
                inside);
  }
}
#else
enum : int {
  ROUNDS = (SPAN + ALONG - 1) / ALONG,
  ASIDE = THREADS / ALONG,
  PLANES_AT_ONCE = ROUNDS < ON_THEIR_WAY ? ON_THEIR_WAY / ROUNDS : 1,
};
// ALONG threads copy a plane together; each finds out once where its positions are in a channel's image.
DEVICE void stage(float* to, const Value* x, int channel, int channels, int base) {
  const int start = threadIdx.x % ALONG;
#pragma unroll 1
  for (int phase = 0; phase < PHASES_H * PHASES_W; phase++) {
    const int row = (int)(ROWS_OF_PHASES >> (8 * (phase / PHASES_W)) & 255);
    const int column = (int)(COLUMNS_OF_PHASES >> (8 * (phase % PHASES_W)) & 255);
    int source[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const int at = base + start + round * ALONG, line = at / PITCH;
      const int image = line / IMAGE_ROWS < BATCH ? line / IMAGE_ROWS : BATCH - 1;
      const int h = (line - image * IMAGE_ROWS) * STRIDE_H + row - PAD_H, w = at % PITCH * STRIDE_W + column - PAD_W;
      source[round] = h >= 0 && h < X_ROWS && w >= 0 && w < X_COLUMNS
                          ? image * (X_CHANNELS * X_ROWS * X_COLUMNS) + h * X_COLUMNS + w
                          : -1;
    }
    const int first = threadIdx.x / ALONG;
    // Through registers, many loads at once: cp.async of four bytes has a third of the speed.
#pragma unroll 1
    for (int plane = first; plane < channels; plane += ASIDE * PLANES_AT_ONCE) {
      Value got[PLANES_AT_ONCE][ROUNDS];
#pragma unroll
      for (int b = 0; b < PLANES_AT_ONCE; b++)
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
          const int p = plane + b * ASIDE;
          const bool inside = source[round] >= 0;
          got[b][round] =
              read(x + (channel + p) * (X_ROWS * X_COLUMNS) + (inside ? source[round] : 0), inside && p < channels);
        }
#pragma unroll
      for (int b = 0; b < PLANES_AT_ONCE; b++)
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
          const int p = plane + b * ASIDE, i = start + round * ALONG;
          if (p < channels && i < SPAN)
            put(to + (p * (PHASES_H * PHASES_W) + phase) * SPAN + i, to_float(got[b][round]));
        }
    }
  }
}
#endif

// sums += value * input for all entries of some fours. The next four are loaded beforehand, at the end the four behind
// the last.
DEVICE void add(float (&sums)[WIDTH], const char* lane, const uint4* entries, int first, int last) {
  uint4 a = entries[2 * first], b = entries[2 * first + 1];
#pragma unroll 1
  for (int four = first; four < last; four++) {
    const unsigned offsets[4] = {a.x, a.z, b.x, b.z}, values[4] = {a.y, a.w, b.y, b.w};
    a = entries[2 * four + 2];
    b = entries[2 * four + 3];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* input = (const float*)(lane + offsets[i]);
#pragma unroll
      for (int v = 0; v < VECTORS; v++) sums[v] = fmaf(__uint_as_float(values[i]), input[v * LANES], sums[v]);
    }
  }
}

// Where a position's pixel of filter 0 is in y, or -1 between the rows.
DEVICE int place_of(int at) {
  const int line = at / PITCH, column = at % PITCH, image = line / IMAGE_ROWS, row = line % IMAGE_ROWS;
  return column < Y_COLUMNS && row < Y_ROWS && image < BATCH ? (image * Y_CHANNELS * Y_ROWS + row) * Y_COLUMNS + column
                                                             : -1;
}

DEVICE void finish(float sum, float more, int filter, int place, const float* bias, Value* y) {
  if constexpr (HAS_BIAS) sum += bias[filter];
  if constexpr (HAS_RESIDUAL) sum += more;
  y[place] = from_float<Value>(activate<ACTIVATION>(sum));
}

// The owner's part of a tile: the sums of all slices and parts, in their order.
DEVICE void add_shares(const float* received, void* bar, int rank, int tile, int group, int first_filter,
                       const float* bias, const Value* residual, Value* y) {
  const int thread = threadIdx.x;
  int place[OUTPUTS];
  float more[OUTPUTS];
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    const int at = thread + i * THREADS, v = at % WIDTH, f = first_filter + rank * OWN + at / (LANES * WIDTH);
    const int found = place_of(tile * TILE + v * LANES + at / WIDTH % LANES);
    const bool inside = at < SUMS && v < VECTORS && f < GROUP_FILTERS && found >= 0;
    place[i] = inside ? found + (group * GROUP_FILTERS + f) * (Y_ROWS * Y_COLUMNS) : -1;
    more[i] = HAS_RESIDUAL && place[i] >= 0 ? to_float(residual[place[i]]) : 0.f;
  }
  if constexpr (SLICES > 1) mbarrier_wait(bar); else __syncthreads();
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    const int at = thread + i * THREADS;
    if (place[i] < 0) continue;
    float sum = received[at];
#pragma unroll
    for (int share = 1; share < SHARES; share++) sum += received[share * SUMS + at];
    finish(sum, more[i], group * GROUP_FILTERS + first_filter + rank * OWN + at / (LANES * WIDTH), place[i], bias, y);
  }
}

// One block a multiprocessor: otherwise ptxas takes 32 registers, and waits for every two or three inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
direct(const Value* x, const uint4* lists, const int* begins, const float* bias, const Value* residual, Value* y) {
  SHARED_MEMORY;
  griddep_launch_dependents();
  const int thread = threadIdx.x, lane = thread % LANES, warp = thread / LANES;
  const int part = warp % PARTS, filter = warp / PARTS * FILTERS_OF_WARP;
  const int rank = blockIdx.x % SLICES, tile = blockIdx.x / SLICES % TILES, block = blockIdx.x / (SLICES * TILES);
  const int group = block / FILTER_BLOCKS, first_filter = block % FILTER_BLOCKS * FILTERS;
  float* const zeros = (float*)(shared_memory + ZEROS_OFFSET);
  uint4* const list = (uint4*)(shared_memory + LIST_OFFSET);

  // Before the kernel in front has ended: entries, and the zeros for those that fill a four.
  const int begin = begins[block * SLICES + rank], size = begins[block * SLICES + rank + 1] - begin;
#pragma unroll 1
  for (int i = thread; i < size; i += THREADS) cp_async_16(list + i, lists + begin + i, true);
  cp_async_commit_group();
#pragma unroll 1
  for (int i = thread; i < TILE; i += THREADS) zeros[i] = 0.f;
  void* const bar = shared_memory + BARRIER_OFFSET;
  if constexpr (SLICES > 1) {
    if (thread == 0) mbarrier_init_expect_tx(bar, SHARES * SUMS * 4);
    cluster_arrive_relaxed();
  }
  griddep_wait();

  const int channel = rank * CHANNELS, left = GROUP_CHANNELS - channel;
  stage((float*)shared_memory, x, group * GROUP_CHANNELS + channel, left < CHANNELS ? left : CHANNELS, tile * TILE);
  cp_async_commit_group();
  int found[VECTORS];
  if constexpr (SHARES == 1) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) found[v] = place_of(tile * TILE + v * LANES + lane);
  }
  float* const received = (float*)(shared_memory + RECEIVED_OFFSET);

  cp_async_wait_all();
  __syncthreads();
  const int* const starts = (const int*)list;
#pragma unroll 1
  for (int e = 0; e < FILTERS_OF_WARP; e++) {
    float sums[WIDTH];
#pragma unroll
    for (int v = 0; v < WIDTH; v++) sums[v] = 0.f;
    const int first = starts[filter + e], count = starts[filter + e + 1] - first;
    add(sums, shared_memory + 4 * lane, list + LIST_HEAD / 4, first + count * part / PARTS,
        first + count * (part + 1) / PARTS);
    if constexpr (SHARES == 1) {
      const int f = first_filter + filter + e, k = group * GROUP_FILTERS + f;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const int place = found[v] + k * (Y_ROWS * Y_COLUMNS);
        if (found[v] >= 0 && f < GROUP_FILTERS)
          finish(sums[v], HAS_RESIDUAL ? to_float(residual[place]) : 0.f, k, place, bias, y);
      }
    } else {
      float* const to = received + (((rank * PARTS + part) * OWN + (filter + e) % OWN) * LANES + lane) * WIDTH;
      if constexpr (SLICES > 1) {
        if (!e) cluster_wait();  // all blocks of the cluster are there
#pragma unroll
        for (int v = 0; v < WIDTH; v += SEND_FLOATS) st_async(to + v, (filter + e) / OWN, sums + v, bar);
      } else {
#pragma unroll
        for (int v = 0; v < VECTORS; v++) to[v] = sums[v];
      }
    }
  }
  if constexpr (SHARES > 1) add_shares(received, bar, rank, tile, group, first_filter, bias, residual, y);
}
