// Depthwise convolution, NHWC: a thread has CHANNELS (2 or 4) of STRIP output columns and goes down ROWS output rows. It reads every
// input row of its strip once, widens it once, and adds it to all output rows that see it: their sums are in registers.
//
// Given by the host: BYTES (2 or 4), BF16, CHANNELS, R, S, STRIDE_H, STRIDE_W, STRIP, ROWS, AHEAD (rows asked for before they are needed),
// HELD (weights in registers), BIAS, RESIDUAL, ACTIVATION (a number), DEPENDENT, THREADS, BLOCKS (on a multiprocessor, at least).

struct Sizes {
  int threads, groups, strips, bands, h, w, p, q, pad_h, pad_w;  // groups: of CHANNELS; bands: of ROWS output rows
  int still;                                                     // zero, which the compiler does not know
};

#if BYTES == 2
typedef u16 Value;
struct alignas(2 * CHANNELS) Some { u32 pairs[CHANNELS / 2]; };
#else
typedef float Value;
struct alignas(4 * CHANNELS) Some { float v[CHANNELS]; };
#endif
DEVICE void widen(float (&v)[CHANNELS], const Some& some) {
#pragma unroll
  for (int c = 0; c < CHANNELS; c++)
#if BYTES == 2
    v[c] = unpack((u16)(some.pairs[c / 2] >> 16 * (c % 2) & 0xffff));
#else
    v[c] = some.v[c];
#endif
}

DEVICE Some narrowed(const float (&v)[CHANNELS]) {
  Some some;
#if BYTES == 2
#pragma unroll
  for (int c = 0; c < CHANNELS; c += 2) some.pairs[c / 2] = pack(v[c], v[c + 1]);
#else
#pragma unroll
  for (int c = 0; c < CHANNELS; c++) some.v[c] = v[c];
#endif
  return some;
}

// This thread's channels of the columns of a row; zeros outside the image.
DEVICE void load_row(Some (&row)[SEEN], const Value* __restrict__ x, long long at, int pitch, u32 columns) {
#pragma unroll
  for (int j = 0; j < SEEN; j++) {
    row[j] = {};
    if (columns >> j & 1) row[j] = *(const Some*)(x + at + (long long)j * pitch);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
depthwise(const Value* __restrict__ x, const Floats* __restrict__ w, Value* __restrict__ y, const Value* __restrict__ residual, const Value* __restrict__ bias, const __grid_constant__ Sizes z) {
  int id = blockIdx.x * THREADS + threadIdx.x;
  if (id >= z.threads) return;
  int group = id % z.groups, rest = id / z.groups, pitch = z.groups * CHANNELS;
  int strip = rest % z.strips * STRIP, band = rest / z.strips % z.bands * ROWS, image = rest / z.strips / z.bands;
  int left = strip * STRIDE_W - z.pad_w, top = band * STRIDE_H - z.pad_h;
  u32 columns = 0;
#pragma unroll
  for (int j = 0; j < SEEN; j++) columns |= (u32)(left + j >= 0 && left + j < z.w) << j;
  long long input = (((long long)image * z.h + top) * z.w + left) * pitch + group * CHANNELS, line = (long long)z.w * pitch;
#if HELD
  Floats held[R * S];
#pragma unroll
  for (int tap = 0; tap < R * S; tap++) held[tap] = w[tap * z.groups + group];
#endif
#if DEPENDENT
  wait_for_forerunner();
  let_successor_start();
#endif
  float first[CHANNELS] = {};
#if BIAS
  widen(first, *(const Some*)(bias + group * CHANNELS));
#endif
  Some ahead[AHEAD][SEEN];
#pragma unroll
  for (int i = 0; i < AHEAD; i++) load_row(ahead[i], x, input + i * line, pitch, i < INPUT_ROWS && top + i >= 0 && top + i < z.h ? columns : 0);
  float sums[IN_FLIGHT][STRIP][CHANNELS] = {};
#if !HELD
  const Floats* __restrict__ weights = w + group;
#endif
#pragma unroll 1
  for (int from = 0; from < INPUT_ROWS; from += PERIOD) {
#pragma unroll
    for (int u = 0; u < PERIOD; u++) {
      int i = from + u;
      if (i >= INPUT_ROWS) break;
      float in[SEEN][CHANNELS];
#pragma unroll
      for (int j = 0; j < SEEN; j++) widen(in[j], ahead[u % AHEAD][j]);
#if !HELD
      weights += z.still;  // or the assembler would keep them all from one row to the next: there are more than registers
#endif
      int next = i + AHEAD;
      load_row(ahead[u % AHEAD], x, input + next * line, pitch, next < INPUT_ROWS && top + next >= 0 && top + next < z.h ? columns : 0);
#pragma unroll
      for (int r = 0; r < R; r++) {
        if (!SEES(u, r)) continue;
#if R > 3
        if (i < r || i - r >= ROWS * STRIDE_H) continue;  // an output row of another band
#endif
#pragma unroll
        for (int s = 0; s < S; s++) {
#if HELD
          const Floats weight = held[r * S + s];
#else
          const Floats weight = weights[(r * S + s) * z.groups];
#endif
          add_tap(sums[SLOT(u, r)], in, weight, r, s, first);
        }
      }
      if (!ENDS(u, i)) continue;
      int row = band + (i - (R - 1)) / STRIDE_H, slot = SLOT(u, R - 1);
      long long place = (((long long)image * z.p + row) * z.q + strip) * pitch + group * CHANNELS;
#pragma unroll
      for (int t = 0; t < STRIP; t++) {
        if (row >= z.p || strip + t >= z.q) continue;
        float v[CHANNELS];
#if RESIDUAL
        float more[CHANNELS];
        widen(more, *(const Some*)(residual + place + (long long)t * pitch));
#endif
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
          v[c] = sums[slot][t][c];
#if RESIDUAL
          v[c] += more[c];
#endif
          v[c] = activated(v[c]);
        }
        *(Some*)(y + place + (long long)t * pitch) = narrowed(v);
      }
    }
  }
}
