// What becomes of a row of the first layer's results (first.cu) where they stay fp32. A warp stores eight filters of four pixels at a time, 32
// bytes each: nothing is put together in shared memory for it.
typedef float Value;
#define GROUPS (BN / 8)
#define AT_ONCE (PAIRED ? 2 : 1)  // rows of y of one product
#define RESULT_BYTES 0

DEVICE float widened(Value v) { return v; }

// This lane's two filters of one row, or of the largest of some, as products leave them: of eight columns two of one filter, two of the other.
struct Row {
  float values[BN / 2];

  DEVICE_MEMBER void begin() {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) values[i] = word_as_float(0xff800000u);
  }

  // What the row has not is less than everything.
  DEVICE_MEMBER void take(const float (&d)[BN / 2], bool inside, int thread) {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) {
      values[i] = d[i];
      if (POOLED && (!inside || i / 4 * 8 + 8 > Q) && (!inside || i / 4 * 8 + thread % 4 * 2 + i % 2 >= Q)) values[i] = word_as_float(0xff800000u);
    }
  }

  DEVICE_MEMBER void add(const Row& made) {
#pragma unroll
    for (int i = 0; i < BN / 2; i++) values[i] = POOLED ? largest(values[i], made.values[i]) : made.values[i];
  }

#if POOLED
  // Of a group and one of the filters: the largest of this lane's two columns and of the one beside them.
  DEVICE_MEMBER float pooled(int half, int g, int thread) const {
    int own = thread % 4, lane = thread % 32, i = 4 * g + 2 * half;
#if POOL_PAD
    float given = values[i + 1];
    if (own == 3) given = g > 0 ? values[g > 0 ? i - 3 : 0] : word_as_float(0xff800000u);  // to the right, the column to the left of the next two
    float beside = word_as_float(lane_value(float_as_word(given), lane - own + (own + 3) % 4));
#else
    float given = values[i];
    if (own == 0) given = g + 1 < GROUPS ? values[g + 1 < GROUPS ? i + 4 : 0] : word_as_float(0xff800000u);
    float beside = word_as_float(lane_value(float_as_word(given), lane - own + (own + 1) % 4));
#endif
    return largest(largest(values[i], values[i + 1]), beside);
  }
#endif

  DEVICE_MEMBER void store(u32, int, int thread, int row, Value* __restrict__ y, int pitch) const {
    int down = AT_ONCE == 2 ? thread / 64 : 0, filter = thread % (128 / AT_ONCE) / 32 * 16 + thread % 32 / 4;
    Value* to = y + (long long)(row + down) * Y_COLUMNS * pitch + filter;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      bool there = row + down < Y_ROWS && filter + 8 * half < K;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
#if POOLED
        float v = activated(pooled(half, g, thread));
        int column = g * 4 + thread % 4;
        if (there && column < Y_COLUMNS) to[(long long)column * pitch + 8 * half] = v;
#else
#pragma unroll
        for (int i = 0; i < 2; i++) {
          int column = g * 8 + thread % 4 * 2 + i;
          if (there && column < Y_COLUMNS) to[(long long)column * pitch + 8 * half] = activated(values[4 * g + 2 * half + i]);
        }
#endif
      }
    }
  }
};
