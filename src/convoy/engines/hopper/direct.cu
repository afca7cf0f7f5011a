// Direct sparse convolution: the positions of a pruned weight's non-zeros are data (engines/sparse_weights/direct_sparse_tile.py lays them out).
//
// A block copies its channels' part of a tile of positions to shared memory, with padding inside, so that an entry (an offset there
// and a value) is one word from `offset + 4 * lane + 4 * LANES * v` on for each of a lane's VECTORS positions. A warp has EACH filters;
// PARTS warps share a filter's entries, SLICES blocks of a cluster its channels. Sums go to the block that owns the filter and are added
// there in the order of slices and parts.
//
// Given by the host: the macros of `Geometry.macros`. Words with a capital B are bytes of shared memory.
#define TILE (LANES * VECTORS)
#define THREADS (LANES * FILTERS * PARTS / EACH)
#define SHARES (SLICES * PARTS)
#define OWN (FILTERS / SLICES)
#define SUMS (OWN * LANES * WIDTH)  // that a share sends to a block: WIDTH of a lane, VECTORS of them real
#define OUTPUTS ((SUMS + THREADS - 1) / THREADS)

#if HALF
typedef unsigned short Value;
#else
typedef float Value;
#endif

#if COPY == 2
// All channels lie as they do in memory: one run.
DEVICE void stage(float* to, const Value* x, int channel, int channels, int) {
  const Value* from = x + channel * (H * W);
#pragma unroll 4
  for (int i = 4 * threadIdx.x; i < channels * (H * W); i += 4 * THREADS) copy16(to + i, from + i, true);
}
#elif COPY == 1
// Pixels of a 1x1 filter lie as they do in memory, a tile's of each channel as one run of fours.
DEVICE void stage(float* to, const Value* x, int channel, int channels, int base) {
#pragma unroll 4
  for (int i = threadIdx.x; i < channels * (SPAN / 4); i += THREADS) {
    const int at = base + i % (SPAN / 4) * 4, image = at / (H * W);
    const bool inside = image < N;
    copy16(to + 4 * i, x + (inside ? (image * C + channel + i / (SPAN / 4)) * (H * W) + at % (H * W) : 0), inside);
  }
}
#else
#define ROUNDS ((SPAN + ALONG - 1) / ALONG)
#define ASIDE (THREADS / ALONG)
#define BATCH (ROUNDS < ON_THEIR_WAY ? ON_THEIR_WAY / ROUNDS : 1)  // planes
// ALONG threads go along a plane; each finds out once where its positions are in a channel's image.
DEVICE void stage(float* to, const Value* x, int channel, int channels, int base) {
  const int start = threadIdx.x % ALONG;
#pragma unroll 1
  for (int phase = 0; phase < PHASES_H * PHASES_W; phase++) {
    const int row = (int)(ROWS_OF_PHASES >> (8 * (phase / PHASES_W)) & 255), column = (int)(COLUMNS_OF_PHASES >> (8 * (phase % PHASES_W)) & 255);
    int source[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const int at = base + start + round * ALONG, line = at / PITCH;
      const int image = line / IMAGE_ROWS < N ? line / IMAGE_ROWS : N - 1;
      const int h = (line - image * IMAGE_ROWS) * STRIDE_H + row - PAD_H, w = at % PITCH * STRIDE_W + column - PAD_W;
      source[round] = h >= 0 && h < H && w >= 0 && w < W ? image * (C * H * W) + h * W + w : -1;
    }
    const int first = threadIdx.x / ALONG;
    // Through registers, many on their way at once: copies of four bytes past them come at a third of the speed.
#pragma unroll 1
    for (int plane = first; plane < channels; plane += ASIDE * BATCH) {
      Value got[BATCH][ROUNDS];
#pragma unroll
      for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
          const int p = plane + b * ASIDE;
          const bool inside = source[round] >= 0;
          got[b][round] = read(x + (channel + p) * (H * W) + (inside ? source[round] : 0), inside && p < channels);
        }
#pragma unroll
      for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int round = 0; round < ROUNDS; round++) {
          const int p = plane + b * ASIDE, i = start + round * ALONG;
          if (p < channels && i < SPAN) put(to + (p * (PHASES_H * PHASES_W) + phase) * SPAN + i, wide(got[b][round]));
        }
    }
  }
}
#endif

// sums += value * input for all entries of some fours; the next four are loaded beforehand, at the end those behind the last.
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

// Where a position's pixel of filter 0 is in y; -1: between the rows.
DEVICE int place_of(int at) {
  const int line = at / PITCH, column = at % PITCH, image = line / IMAGE_ROWS, row = line % IMAGE_ROWS;
  return column < Q && row < P && image < N ? (image * K * P + row) * Q + column : -1;
}

DEVICE void finish(float sum, float more, int filter, int place, const float* bias, Value* y) {
#if BIAS
  sum += bias[filter];
#endif
#if RESIDUAL
  sum += more;
#endif
  y[place] = narrow(activated(sum));
}

// One block of a multiprocessor, because ptxas else takes 32 registers and waits for every two or three inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
direct(const Value* x, const uint4* lists, const int* begins, const float* bias, const Value* residual, Value* y) {
  SHARED_MEMORY;
  let_successor_start();
  const int thread = threadIdx.x, lane = thread % LANES, warp = thread / LANES, part = warp % PARTS, filter = warp / PARTS * EACH;
  const int rank = blockIdx.x % SLICES, tile = blockIdx.x / SLICES % TILES, block = blockIdx.x / (SLICES * TILES);
  const int group = block / BLOCKS, first_filter = block % BLOCKS * FILTERS;
  float* const zeros = (float*)(shared_memory + ZEROS_B);
  uint4* const list = (uint4*)(shared_memory + LIST_B);

  // What the kernel before does not write: entries, and zeros for those that fill a four.
  const int begin = begins[block * SLICES + rank], size = begins[block * SLICES + rank + 1] - begin;
#pragma unroll 1
  for (int i = thread; i < size; i += THREADS) copy16(list + i, lists + begin + i, true);
  copies_commit();
#pragma unroll 1
  for (int i = thread; i < TILE; i += THREADS) zeros[i] = 0.f;
#if SLICES > 1
  void* const bar = shared_memory + BARRIER_B;
  if (thread == 0) expect(bar, SHARES * SUMS * 4);
  cluster_arrive();
#endif
  wait_for_forerunner();

  const int channel = rank * CHANNELS, left = GROUP_CHANNELS - channel;
  stage((float*)shared_memory, x, group * GROUP_CHANNELS + channel, left < CHANNELS ? left : CHANNELS, tile * TILE);
  copies_commit();
#if SHARES == 1
  int found[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) found[v] = place_of(tile * TILE + v * LANES + lane);
#else
  float* const received = (float*)(shared_memory + RECEIVED_B);
#endif

  copies_wait();
  __syncthreads();
  const int* const starts = (const int*)list;
#pragma unroll 1
  for (int e = 0; e < EACH; e++) {
    float sums[WIDTH];
#pragma unroll
    for (int v = 0; v < WIDTH; v++) sums[v] = 0.f;
    const int first = starts[filter + e], count = starts[filter + e + 1] - first;
    add(sums, shared_memory + 4 * lane, list + HEAD / 4, first + count * part / PARTS, first + count * (part + 1) / PARTS);
#if SHARES == 1
    const int f = first_filter + filter + e, k = group * GROUP_FILTERS + f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int place = found[v] + k * (P * Q);
      if (found[v] >= 0 && f < GROUP_FILTERS) finish(sums[v], RESIDUAL ? wide(residual[place]) : 0.f, k, place, bias, y);
    }
#else
    float* const to = received + (((rank * PARTS + part) * OWN + (filter + e) % OWN) * LANES + lane) * WIDTH;
#if SLICES > 1
    if (!e) cluster_wait();  // all blocks are there
#pragma unroll
    for (int v = 0; v < WIDTH; v += PIECE) send(to + v, (filter + e) / OWN, sums + v, bar);
#else
#pragma unroll
    for (int v = 0; v < VECTORS; v++) to[v] = sums[v];
#endif
#endif
  }

#if SHARES > 1
  int place[OUTPUTS];
  float more[OUTPUTS];
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    const int at = thread + i * THREADS, v = at % WIDTH, f = first_filter + rank * OWN + at / (LANES * WIDTH);
    const int found = place_of(tile * TILE + v * LANES + at / WIDTH % LANES);
    place[i] = at < SUMS && v < VECTORS && f < GROUP_FILTERS && found >= 0 ? found + (group * GROUP_FILTERS + f) * (P * Q) : -1;
    more[i] = RESIDUAL && place[i] >= 0 ? wide(residual[place[i]]) : 0.f;
  }
#if SLICES > 1
  receive(bar);
#else
  __syncthreads();
#endif
#pragma unroll
  for (int i = 0; i < OUTPUTS; i++) {
    const int at = thread + i * THREADS;
    if (place[i] < 0) continue;
    float sum = received[at];
#pragma unroll
    for (int share = 1; share < SHARES; share++) sum += received[share * SUMS + at];
    finish(sum, more[i], group * GROUP_FILTERS + first_filter + rank * OWN + at / (LANES * WIDTH), place[i], bias, y);
  }
#endif
}
