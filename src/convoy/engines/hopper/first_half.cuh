// What becomes of a row of the first layer's results (first.cu) where they are rounded to halves: two neighbouring ones to a word.
typedef u16 Value;
#define GROUPS (BN / 8)
#define AT_ONCE (PAIRED ? 2 : 1)  // rows of y of one product
#define STAGED_PIXELS ((POOLED ? (GROUPS + 1) / 2 : GROUPS) * 8)
#define RESULT_BYTES (STAGED_PIXELS * 128)
#define LEAST (BF16 ? 0xFF80u : 0xFC00u)

DEVICE float widened(Value v) { return unpack(v); }

// Matrices of eight filters by eight pixels, transposed, to where a pixel has its filters side by side.
DEVICE void put_pair(u32 staged, int pair, int thread, const u32 (&words)[4], bool both) {
  int row = thread % 8, eight = thread / 32 * 2 + thread / 8 % 2;
#if POOLED
  row = row % 2 * 4 + row / 2;  // a word has one lane's results of two groups: a matrix's columns are those of one and the other in turn
#endif
  int pixel = pair * 16 + thread / 16 % 2 * 8 + row;
  u32 at = staged + pixel * 128 + ((eight ^ pixel % 8) << 4);
  if (both) put_matrices(at, words); else put_two_matrices(at, words);
}

// Rows of y from `row` on, as sixteen bytes a thread.
DEVICE void copy_out(u32 staged, int who, int thread, int row, Value* __restrict__ y, int pitch) {
  const int each = K / 8, line = Y_COLUMNS * each;
  group_meet(who - 1);
#pragma unroll 4
  for (int i = thread; i < AT_ONCE * line; i += 128) {
    int down = i / line, pixel = (i - down * line) / each, eight = i % each;
    if (row + down >= Y_ROWS) break;
    *(uint4*)(y + ((long long)(row + down) * Y_COLUMNS + pixel) * pitch + eight * 8) =
        load_sixteen_bytes(staged + pixel * 128 + ((down * 4 + eight ^ pixel % 8) << 4));
  }
}

#if POOLED
// Of a group: the largest of this lane's two columns and of the one beside them, in the low half.
DEVICE u32 pooled(const u32 (&rows)[GROUPS], int g, int thread) {
  int own = thread % 4, lane = thread % 32;
  u32 none = LEAST | LEAST << 16, given = rows[g];
#if POOL_PAD
  if (own == 3) given = g > 0 ? rows[g > 0 ? g - 1 : 0] : none;  // to the right, the column to the left of the next two
  u32 beside = lane_value(given, lane - own + (own + 3) % 4) >> 16;
#else
  if (own == 0) given = g + 1 < GROUPS ? rows[g + 1 < GROUPS ? g + 1 : g] : none;
  u32 beside = lane_value(given, lane - own + (own + 1) % 4);
#endif
  return largest(largest(rows[g], rows[g] >> 16), beside) & 0xffff;
}

DEVICE u32 activated_pair(u32 word) { return pack(activated(unpack((u16)(word & 0xffff))), activated(unpack((u16)(word >> 16)))); }
#endif

// What a word of `put_pair` is: half of the filters, and either a group's two columns or two groups' pooled ones.
DEVICE u32 given_word(const u32 (&rows)[2][GROUPS], int pair, int i, int thread) {
  const int half = i % 2;
#if POOLED
  const int g = pair * 4 + i / 2 * 2;
  u32 low = g < GROUPS ? pooled(rows[half], g < GROUPS ? g : 0, thread) : 0;
  u32 high = g + 1 < GROUPS ? pooled(rows[half], g + 1 < GROUPS ? g + 1 : 0, thread) : 0;
  return activated_pair(low | high << 16);
#else
  const int g = pair * 2 + i / 2;
  return g < GROUPS ? rows[half][g < GROUPS ? g : 0] : 0;
#endif
}

DEVICE void store_rows(const u32 (&rows)[2][GROUPS], u32 staged, int who, int thread, int row, Value* __restrict__ y, int pitch) {
  const int each = POOLED ? 4 : 2;  // groups of a pair
#pragma unroll
  for (int pair = 0; pair < (GROUPS + each - 1) / each; pair++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = given_word(rows, pair, i, thread);
    put_pair(staged, pair, thread, words, pair * each + each / 2 < GROUPS);
  }
  copy_out(staged, who, thread, row, y, pitch);  // all have read it before they meet again, for the next row
}

// This lane's two filters of one row, or of the largest of some.
struct Row {
  u32 words[2][GROUPS];

  DEVICE_MEMBER void begin() {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) words[half][g] = LEAST | LEAST << 16;
  }

  // What the row has not is less than everything.
  DEVICE_MEMBER void take(const float (&d)[BN / 2], bool inside, int thread) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        float low = d[4 * g + 2 * half], high = d[4 * g + 2 * half + 1];
        u32 word = POOLED ? pack(low, high) : pack(activated(low), activated(high));
        if (POOLED && (!inside || g * 8 + 8 > Q)) {
          int column = g * 8 + thread % 4 * 2;
          if (!inside || column >= Q) word = word & 0xffff0000 | LEAST;
          if (!inside || column + 1 >= Q) word = word & 0xffff | LEAST << 16;
        }
        words[half][g] = word;
      }
  }

  DEVICE_MEMBER void add(const Row& made) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int g = 0; g < GROUPS; g++) words[half][g] = POOLED ? largest(words[half][g], made.words[half][g]) : made.words[half][g];
  }

  DEVICE_MEMBER void store(u32 staged, int who, int thread, int row, Value* __restrict__ y, int pitch) const { store_rows(words, staged, who, thread, row, y, pitch); }
};
