// Depthwise convolution, NHWC, sums in registers. A thread has LANE_CHANNELS channels of STRIP output columns and goes
// down BAND_ROWS output rows. It reads every input row of its strip once, converts it to fp32 once, and adds it to all
// output rows that it belongs to.
//
//             SEEN input columns                        no shared memory; nobody waits for anybody
//           +-----------------------+
//   row i   |  ahead[i % AHEAD]     |  loaded AHEAD rows before it is needed
//           +-----------------------+
//              |  fp32, all taps (depthwise_sums.cuh)
//              v
//           sums[IN_FLIGHT][STRIP][LANE_CHANNELS]  --> bias, residual, activation --> one output row of the strip
//
// Neighbouring threads have neighbouring channels: a warp reads whole sectors. Parameters:
// depthwise_registers_config.cuh.
#include <activation.cuh>
#include <depthwise_registers_config.cuh>
#include <depthwise_sums.cuh>

struct Sizes {
  // Groups: of LANE_CHANNELS; bands: of BAND_ROWS output rows
  int threads, groups, strips, bands, h, w, p, q, pad_h, pad_w;
  int zero;                                                      // its value is unknown to the compiler
};

// Values of a thread in one column: as they lie in memory, and as fp32.
template <int BYTES> struct Column {
  typedef float Value;
  struct alignas(4 * LANE_CHANNELS) Values { float v[LANE_CHANNELS]; };
};
template <> struct Column<2> {
  typedef u16 Value;
  struct alignas(2 * LANE_CHANNELS) Values { u32 pairs[LANE_CHANNELS / 2]; };
};
typedef Column<VALUE_BYTES>::Value Value;
typedef Column<VALUE_BYTES>::Values Values;

DEVICE void to_floats(float (&v)[LANE_CHANNELS], const Column<2>::Values& values) {
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; c++)
    v[c] = half_to_float<BFLOAT>((u16)(values.pairs[c / 2] >> 16 * (c % 2) & 0xffff));
}
DEVICE void to_floats(float (&v)[LANE_CHANNELS], const Column<4>::Values& values) {
#pragma unroll
  for (int c = 0; c < LANE_CHANNELS; c++) v[c] = values.v[c];
}

DEVICE Values from_floats(const float (&v)[LANE_CHANNELS]) {
  Values values;
  if constexpr (VALUE_BYTES == 2) {
    u32* pairs = (u32*)&values;
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; c += 2) pairs[c / 2] = pack_pair<BFLOAT>(v[c], v[c + 1]);
  } else {
    float* floats = (float*)&values;
#pragma unroll
    for (int c = 0; c < LANE_CHANNELS; c++) floats[c] = v[c];
  }
  return values;
}

// A thread's channels of the columns of an input row; zeros outside the image.
DEVICE void load_row(Values (&row)[SEEN], const Value* __restrict__ x, long long at, int pitch, u32 columns) {
#pragma unroll
  for (int j = 0; j < SEEN; j++) {
    row[j] = {};
    if (columns >> j & 1) row[j] = *(const Values*)(x + at + (long long)j * pitch);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    depthwise_registers(const Value* __restrict__ x, const Floats* __restrict__ w, Value* __restrict__ y,
                        const Value* __restrict__ residual, const Value* __restrict__ bias,
                        const __grid_constant__ Sizes sizes) {
  int id = blockIdx.x * THREADS + threadIdx.x;
  if (id >= sizes.threads) return;
  int group = id % sizes.groups, rest = id / sizes.groups, pitch = sizes.groups * LANE_CHANNELS;
  int strip = rest % sizes.strips * STRIP, band = rest / sizes.strips % sizes.bands * BAND_ROWS;
  int image = rest / sizes.strips / sizes.bands;
  int left = strip * STRIDE_W - sizes.pad_w, top = band * STRIDE_H - sizes.pad_h;
  u32 columns = 0;
#pragma unroll
  for (int j = 0; j < SEEN; j++) columns |= (u32)(left + j >= 0 && left + j < sizes.w) << j;
  long long input = (((long long)image * sizes.h + top) * sizes.w + left) * pitch + group * LANE_CHANNELS;
  long long line = (long long)sizes.w * pitch;
  Floats held[FILTER_R * FILTER_S];
  if constexpr (WEIGHTS_IN_REGISTERS) {
#pragma unroll
    for (int tap = 0; tap < FILTER_R * FILTER_S; tap++) held[tap] = w[tap * sizes.groups + group];
  }
  if constexpr (DEPENDENT) {
    griddep_wait();
    griddep_launch_dependents();
  }
  float first[LANE_CHANNELS] = {};
  if constexpr (HAS_BIAS) to_floats(first, *(const Values*)(bias + group * LANE_CHANNELS));
  Values ahead[AHEAD][SEEN];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    load_row(ahead[i], x, input + i * line, pitch,
             i < INPUT_ROWS && top + i >= 0 && top + i < sizes.h ? columns : 0);
  }
  float sums[IN_FLIGHT][STRIP][LANE_CHANNELS] = {};
  const Floats* __restrict__ weights = w + group;
#pragma unroll 1
  for (int from = 0; from < INPUT_ROWS; from += PERIOD) {
#pragma unroll
    for (int u = 0; u < PERIOD; u++) {
      int i = from + u;
      if (i >= INPUT_ROWS) break;
      float in[SEEN][LANE_CHANNELS];
#pragma unroll
      for (int j = 0; j < SEEN; j++) to_floats(in[j], ahead[u % AHEAD][j]);
      // Adding zero keeps ptxas from holding all weights from one row to the next: they are more than the registers.
      if constexpr (!WEIGHTS_IN_REGISTERS) weights += sizes.zero;
      int next = i + AHEAD;
      load_row(ahead[u % AHEAD], x, input + next * line, pitch,
               next < INPUT_ROWS && top + next >= 0 && top + next < sizes.h ? columns : 0);
#pragma unroll
      for (int r = 0; r < FILTER_R; r++) {
        if (!meets(u, r)) continue;
        // Output rows of another band are left out. With small filters it is cheaper to compute them too.
        if (FILTER_R > 3 && (i < r || i - r >= BAND_ROWS * STRIDE_H)) continue;
#pragma unroll
        for (int s = 0; s < FILTER_S; s++) {
          int tap = r * FILTER_S + s;
          const Floats weight = WEIGHTS_IN_REGISTERS ? held[tap] : weights[tap * sizes.groups];
          add_tap(sums[slot_of(u, r)], in, weight, r, s, first);
        }
      }
      if (!ends(u, i)) continue;
      int row = band + (i - (FILTER_R - 1)) / STRIDE_H, slot = slot_of(u, FILTER_R - 1);
      long long place = (((long long)image * sizes.p + row) * sizes.q + strip) * pitch + group * LANE_CHANNELS;
#pragma unroll
      for (int t = 0; t < STRIP; t++) {
        if (row >= sizes.p || strip + t >= sizes.q) continue;
        float v[LANE_CHANNELS], more[LANE_CHANNELS];
        if constexpr (HAS_RESIDUAL) to_floats(more, *(const Values*)(residual + place + (long long)t * pitch));
#pragma unroll
        for (int c = 0; c < LANE_CHANNELS; c++) {
          v[c] = sums[slot][t][c];
          if constexpr (HAS_RESIDUAL) v[c] += more[c];
          v[c] = activate<ACTIVATION>(v[c]);
        }
        *(Values*)(y + place + (long long)t * pitch) = from_floats(v);
      }
    }
  }
}
