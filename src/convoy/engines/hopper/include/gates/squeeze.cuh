// The first launch of a squeeze-and-excitation block, and what both kernels that follow it do with its parts.
#pragma once
#include <activation.cuh>
#include <ptx.cuh>
#include <squeeze_excitation_config.cuh>

enum : int {
  VECTOR = 16 / VALUE_BYTES,  // values of a load
  LANES = BLOCK_C / VECTOR,
  LINES = THREADS / LANES,
  COLUMNS = (CHANNELS + BLOCK_C - 1) / BLOCK_C,
  PROGRAMS = ROWS * COLUMNS,  // parts of an image
  EACH = (PIXELS + ROWS - 1) / ROWS,
  PITCH = CHANNELS / VECTOR,
};

DEVICE float word_at(u32 at) { return u32_as_float(ld_shared_u32(at)); }
// Two words, of which a caller may need one.
DEVICE void put(u32 at, float a, float b) { st_shared_v2(at, float_as_u32(a), float_as_u32(b)); }

DEVICE void to_floats(float (&v)[VECTOR], uint4 values) {
  const u32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
  for (int i = 0; i < VECTOR; i++) {
    if constexpr (VALUE_BYTES == 4)
      v[i] = u32_as_float(words[i % 4]);
    else
      v[i] = half_to_float<BFLOAT>((u16)(words[i / 2] >> 16 * (i % 2) & 0xffff));
  }
}

DEVICE uint4 from_floats(const float (&v)[VECTOR]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (VALUE_BYTES == 4)
      words[i] = float_as_u32(v[i]);
    else
      words[i] = pack_pair<BFLOAT>(v[2 * i % VECTOR], v[(2 * i + 1) % VECTOR]);
  }
  return {words[0], words[1], words[2], words[3]};
}

struct Place {
  int column, row, image, lane, line;
  bool there;  // whether the thread's channels exist

  DEVICE_MEMBER Place() {
    column = blockIdx.x % COLUMNS, row = blockIdx.x / COLUMNS % ROWS, image = blockIdx.x / PROGRAMS;
    lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
    there = column * BLOCK_C + lane * VECTOR < CHANNELS;
  }
  DEVICE_MEMBER int begin() const { return row * EACH + line; }
  DEVICE_MEMBER int end() const { return (row + 1) * EACH < PIXELS ? (row + 1) * EACH : PIXELS; }
  // Where the thread's values of a pixel lie, in loads.
  DEVICE_MEMBER long long at(int pixel) const {
    return ((long long)image * PIXELS + pixel) * PITCH + column * (BLOCK_C / VECTOR) + lane;
  }
};

DEVICE void follow() {
  if constexpr (DEPENDENT) {
    griddep_wait();
    griddep_launch_dependents();
  }
}

// First layer: GROUP threads share a hidden channel, each with every GROUP-th channel of the block.
enum : int {
  AT_ONCE = HIDDEN < THREADS ? HIDDEN : THREADS,  // hidden channels
  GROUP = THREADS / AT_ONCE < BLOCK_C ? THREADS / AT_ONCE : BLOCK_C,
  TURNS = (HIDDEN + AT_ONCE - 1) / AT_ONCE,
  FACTORS = (BLOCK_C + GROUP - 1) / GROUP,
  HOLDS_FIRST = TURNS * FACTORS <= MOST_HELD,
};

template <int BYTES> struct Stored { typedef float Value; };
template <> struct Stored<2> { typedef u16 Value; };
typedef Stored<VALUE_BYTES>::Value Weight;

DEVICE float to_float(float v) { return v; }
DEVICE float to_float(u16 v) { return half_to_float<BFLOAT>(v); }

// A weight of the first layer, [channel][hidden], and of the second one, [hidden][channel]: neighbouring threads read
// neighbours. Zero where there is none. The load has no condition: a few dozen of them would need as many predicate
// registers, of which there are seven.
DEVICE float chosen(const Weight* __restrict__ weight, bool there, int place) {
  Weight found = weight[there ? place : 0];
  return there ? to_float(found) : 0.f;
}
DEVICE float first_factor(const Weight* __restrict__ weight, int hidden, int channel) {
  return chosen(weight, hidden < HIDDEN && channel < CHANNELS, channel * HIDDEN + hidden);
}
DEVICE float second_factor(const Weight* __restrict__ weight, int hidden, int channel) {
  return chosen(weight, hidden < HIDDEN && channel < CHANNELS, hidden * CHANNELS + channel);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    squeeze(const uint4* __restrict__ x, const Weight* __restrict__ weight, float* __restrict__ parts) {
  SHARED_MEMORY;
  const Place place;
  // Sums of each line; behind them the means, and the shares of the first layer, by pairs of words.
  const u32 sums = shared_address(shared_memory), means = sums + LINES * BLOCK_C * 4, shares = means + BLOCK_C * 8;
  const int group = threadIdx.x / AT_ONCE, first = threadIdx.x % AT_ONCE;
  float held[HOLDS_FIRST ? TURNS * FACTORS : 1];
  if constexpr (HOLDS_FIRST) {
#pragma unroll
    for (int i = 0; i < TURNS * FACTORS; i++) {
      int c = group + i % FACTORS * GROUP;
      held[i] = c < BLOCK_C && group < GROUP ? first_factor(weight, first + i / FACTORS * AT_ONCE, place.column * BLOCK_C + c) : 0.f;
    }
  }
  follow();
  float total[VECTOR] = {};
  if (place.there) {
#pragma unroll 4
    for (int pixel = place.begin(); pixel < place.end(); pixel += LINES) {
      float v[VECTOR];
      to_floats(v, x[place.at(pixel)]);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) total[i] += v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; i += 2)
    put(sums + (place.line * BLOCK_C + place.lane * VECTOR + i) * 4, total[i], total[i + 1]);
  __syncthreads();
  if (threadIdx.x < BLOCK_C) {
    float sum = 0.f;
    for (int line = 0; line < LINES; line++) sum += word_at(sums + (line * BLOCK_C + threadIdx.x) * 4);
    put(means + threadIdx.x * 8, sum * (1.f / PIXELS), 0.f);
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    float share = 0.f;
    if constexpr (HOLDS_FIRST) {
#pragma unroll
      for (int i = 0; i < FACTORS; i++) {
        int c = group + i * GROUP;
        if (c < BLOCK_C) share += held[turn * FACTORS + i] * word_at(means + c * 8);
      }
    } else if (group < GROUP) {
#pragma unroll 4
      for (int c = group; c < BLOCK_C; c += GROUP)
        share += first_factor(weight, first + turn * AT_ONCE, place.column * BLOCK_C + c) * word_at(means + c * 8);
    }
    if (turn) __syncthreads();
    put(shares + threadIdx.x * 8, share, 0.f);
    __syncthreads();
    if (group || first + turn * AT_ONCE >= HIDDEN) continue;
    float sum = 0.f;
    for (int g = 0; g < GROUP; g++) sum += word_at(shares + (g * AT_ONCE + first) * 8);
    parts[((long long)blockIdx.x) / COLUMNS / ROWS * PROGRAMS * HIDDEN + blockIdx.x % PROGRAMS * HIDDEN + first + turn * AT_ONCE] = sum;
  }
}

// How a block of so many threads adds the parts of an image: COUNT threads add those of a hidden channel.
template <int BLOCK> struct Adders {
  enum : int {
    COUNT = BLOCK / HIDDEN > 1 ? (BLOCK / HIDDEN < PROGRAMS ? BLOCK / HIDDEN : PROGRAMS) : 1,
    TO_ADD = (PROGRAMS + COUNT - 1) / COUNT,  // parts
    AT_A_TIME = TO_ADD < 16 ? TO_ADD : 16,
  };
};

// The hidden channels of an image, with bias and activation, as pairs of words at `hidden`; all threads of the block see them
// afterwards. `added` has room for Adders::COUNT * HIDDEN pairs.
template <int BLOCK>
DEVICE void add_parts(const float* __restrict__ parts, const float* __restrict__ bias, int image, u32 added, u32 hidden) {
  enum : int { COUNT = Adders<BLOCK>::COUNT, AT_A_TIME = Adders<BLOCK>::AT_A_TIME };
  parts += (long long)image * PROGRAMS * HIDDEN;
  for (int t = threadIdx.x; t < COUNT * HIDDEN; t += BLOCK) {
    float sum = 0.f;
#pragma unroll 1
    for (int from = t / HIDDEN; from < PROGRAMS; from += COUNT * AT_A_TIME) {
      float some[AT_A_TIME];  // all loads are under way before the first is added
#pragma unroll
      for (int i = 0; i < AT_A_TIME; i++) {
        int p = from + i * COUNT;
        some[i] = parts[(p < PROGRAMS ? p : from) * HIDDEN + t % HIDDEN];
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; i++) sum += from + i * COUNT < PROGRAMS ? some[i] : 0.f;
    }
    put(added + t * 8, sum, 0.f);
  }
  __syncthreads();
  for (int h = threadIdx.x; h < HIDDEN; h += BLOCK) {
    float sum = HAS_BIAS ? bias[h] : 0.f;
    for (int a = 0; a < COUNT; a++) sum += word_at(added + (a * HIDDEN + h) * 8);
    put(hidden + h * 8, activate<INNER>(sum), 0.f);
  }
  __syncthreads();
}
