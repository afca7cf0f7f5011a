// What hopper_more.cuh adds to the emulated device: copies to every block of a cluster, plain copies, sparse products, transposition.
DEVICE void copy_pixels_to_all(u32 to, const Map* m, u32 bar, int c, int w, int h, int n, u16 right, u16 down, u16 ranks) {
  for (u32 rank = 0; rank < cluster->blocks.size(); rank++) {
    if (!(ranks >> rank & 1)) continue;
    Block* b = cluster->blocks[rank].get();
    reach(b, bar, [=, m = *m] {
      pixels(b, to, &m, c, w, h, n, right, down);
      counted(b, bar, 0, -(long)m.rows * 128);
    });
  }
}
DEVICE void copy_bytes(u32 to, const unsigned char* from, u32 bytes, u32 bar) {
  if (bytes % 16 || to % 16 || (uintptr_t)from % 16) faults++;
  std::memcpy(here->memory.data() + to, from, bytes);
  change(here, bar, 0, -(long)bytes);
}
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() { cluster_sync(); }  // later than the device may go on, and every thread has to come
DEVICE u32 shared_word(u32 at) { u32 v; std::memcpy(&v, here->memory.data() + at, 4); return v; }
DEVICE u32 operand_word(u32 address) { return address / 16; }
DEVICE u64 sparse_operand(u32 word) { return word * 16; }
DEVICE u64 dense_operand(u32 word) { return word * 16; }
DEVICE u32 uniform(u32 value) { return value; }
DEVICE void barrier_wait_soon(u32 bar, u32 parity) { barrier_wait(bar, parity); }
static inline u32 from_lane(u32 value, int lane) {
  Warp& w = *here->warps[threadIdx.x / 32];
  w.words[threadIdx.x % 32] = value;
  w.meeting.meet();
  u32 got = w.words[lane];
  w.meeting.meet();
  return got;
}
DEVICE u32 transposed(u32 v) {
  int lane = threadIdx.x % 32, column = lane / 4, row = lane % 4 * 2;
  u32 low = from_lane(v, row * 4 + column / 2), high = from_lane(v, (row + 1) * 4 + column / 2);
  int shift = column % 2 * 16;
  return (low >> shift & 0xffff) | (high >> shift & 0xffff) << 16;
}
static inline float compressed(u32 at) {
  u16 v;
  std::memcpy(&v, here->memory.data() + (at ^ (((at >> 7) & 3) << 4)), 2);
  return unpack(v);
}
// One lane's share of D[64, BN] += A · B^T over 32 columns of A, 16 of which are there. Lanes 2·HALF and 2·HALF + 1 of every four
// have the places of columns 0 to 15 and 16 to 31: of row lane/4 in the low half of the word, of that eight below in the high.
// An operand without a swizzle as its descriptor has it, and its element.
DEVICE u64 plain_operand(u32 address, u32 across, u32 down) {
  if (address % 16 || across % 16 || down % 16) faults++;
  return (u64)(address >> 4) | (u64)(across >> 4) << 16 | (u64)(down >> 4) << 32;
}
static inline float plain_element(u64 operand, int row, int k) {
  u32 at = (u32)(operand & 0x3fff) * 16, across = (u32)(operand >> 16 & 0x3fff) * 16, down = (u32)(operand >> 32 & 0x3fff) * 16;
  const int each = 16 / BYTES;  // values of sixteen bytes
  const uint8_t* from = here->memory.data() + at + row / 8 * down + row % 8 * 16 + k / each * across + k % each * BYTES;
#if BYTES == 2
  u16 v;
  std::memcpy(&v, from, 2);
  return unpack(v);
#else
  float v;
  std::memcpy(&v, from, 4);
  return v;
#endif
}
// A lies as 16 rows of 64 values: what is summed over is a row.
DEVICE void multiply_turned(float (&d)[BN / 2], u64 a, u64 b) {
  int t = threadIdx.x % 128, top = t / 32 * 16 + t % 32 / 4;
  for (int i = 0; i < BN / 2; i++) {
    int r = top + (i / 2 % 2) * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) d[i] += element((u32)a + k * 128, r) * element((u32)b + column * 128, k);
  }
}
// Operands that are both turned over, as their descriptors have them: address, leading and stride offsets in sixteen bytes, layout.
// Value `at` of what is summed over at `k`: 64 values in a row of 128 bytes, eight rows an atom.
DEVICE u32 turned_word(u32 address, u32 across) { return (address & 0x3ffff) >> 4 | (across >> 4) << 16; }
DEVICE u64 turned_operand(u32 word) { return (u64)word | (64ull << 32) | (1ull << 62); }
static inline float turned_element(u64 operand, int at, int k) {
  u32 from = (u32)(operand & 0x3fff) * 16, across = (u32)(operand >> 16 & 0x3fff) * 16, down = (u32)(operand >> 32 & 0x3fff) * 16;
  return element(from + at / 64 * across + k / 8 * down + k % 8 * 128, at % 64);
}
DEVICE void multiply_both(float (&d)[BN / 2], u64 a, u64 b) {
  if (a >> 62 != 1 || b >> 62 != 1 || a % 64 || b % 64) faults++;  // the 128-byte swizzle, from an atom's beginning
  int t = threadIdx.x % 128, top = t / 32 * 16 + t % 32 / 4;
  float rows[2][16];
  for (int below = 0; below < 2; below++)
    for (int k = 0; k < 16; k++) rows[below][k] = turned_element(a, top + below * 8, k);
  for (int i = 0; i < BN / 2; i++)
    for (int k = 0; k < 16; k++) d[i] += rows[i / 2 % 2][k] * turned_element(b, i / 4 * 8 + t % 4 * 2 + i % 2, k);
}
#ifdef PLAIN
DEVICE void multiply_plain(float (&d)[BN / 2], u64 a, u64 b) {
  int t = threadIdx.x % 128, top = t / 32 * 16 + t % 32 / 4;
  for (int i = 0; i < BN / 2; i++) {
    int r = top + (i / 2 % 2) * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    for (int k = 0; k < 32 / BYTES; k++) d[i] += plain_element(a, r, k) * plain_element(b, column, k);
  }
}
#endif
DEVICE void store_eight_bytes(u32 to, u32 a, u32 b) {
  if (to % 8) faults++;
  u32 v[2] = {a, b};
  std::memcpy(here->memory.data() + to, v, 8);
}
DEVICE void store_sixteen_bytes(u32 to, uint4 v) { if (to % 16) faults++; std::memcpy(here->memory.data() + to, &v, 16); }
DEVICE uint4 load_sixteen_bytes(u32 from) { uint4 v; if (from % 16) faults++; std::memcpy(&v, here->memory.data() + from, 16); return v; }
DEVICE u32 lane_value(u32 value, int lane) { return from_lane(value, lane); }
static inline u16 larger(u16 a, u16 b) {
  float x = unpack(a), y = unpack(b);
  return std::isnan(x) ? a : std::isnan(y) ? b : x > y ? a : b;
}
DEVICE u32 largest(u32 a, u32 b) { return larger((u16)a, (u16)b) | (u32)larger((u16)(a >> 16), (u16)(b >> 16)) << 16; }
DEVICE float largest(float x, float y) { return std::isnan(x) ? x : std::isnan(y) ? y : x > y ? x : y; }
DEVICE u32 float_as_word(float v) { return of(v); }
DEVICE float word_as_float(u32 b) { return bits(b); }
DEVICE u32 rounded_to_tf32(u32 b) { return (b + 0x1000) & ~0x1fffu; }
template <int COUNT> DEVICE void keep(float (&)[COUNT]) {}
DEVICE void multiply_fresh(float (&d)[BN / 2], u64 a, u64 b) {
  for (float& v : d) v = 0.f;
  multiply(d, a, b);
}
template <int HALF> DEVICE void multiply_sparse(float (&d)[BN / 2], u64 a, u64 b, u32 metadata) {
  int t = threadIdx.x % 128, lane = t % 32, top = t / 32 * 16 + lane / 4;
  u32 words[2] = {from_lane(metadata, lane / 4 * 4 + 2 * HALF), from_lane(metadata, lane / 4 * 4 + 2 * HALF + 1)};
  for (int below = 0; below < 2; below++) {
    float dense[32] = {};
    for (int four = 0; four < 8; four++) {
      u32 places = words[four / 4] >> (16 * below + 4 * (four % 4)) & 15;
      if ((places & 3) >= places >> 2) faults++;  // the manual wants them ascending
      for (int i = 0; i < 2; i++)
        dense[four * 4 + (places >> 2 * i & 3)] = compressed((u32)a + (top + 8 * below) * 64 + (four * 2 + i) * 2);
    }
    for (int i = 0; i < BN / 2; i++) {
      if (i / 2 % 2 != below) continue;
      int column = i / 4 * 8 + t % 4 * 2 + i % 2;
      for (int k = 0; k < 32; k++)
        if (dense[k] != 0.f) d[i] += dense[k] * element((u32)b + column * 128, k);
    }
  }
}
// Boxes of a tensor: rows of 128 bytes in the swizzle, zeros where they lie outside; of stores, nothing is written there.
template <typename Row> static void rows_of(const Map* m, int b, int c, int d, Row each) {
  if (m->box[0] * BYTES != 128) faults++;
  for (int z = 0, i = 0; z < m->box[3]; z++)
    for (int y = 0; y < m->box[2]; y++)
      for (int x = 0; x < m->box[1]; x++, i++) {
        long long at[3] = {b + x, c + y, d + z}, offset = 0;
        bool inside = true;
        for (int k = 0; k < 3; k++) { inside &= at[k] >= 0 && at[k] < m->size[k + 1]; offset += at[k] * m->stride[k + 1]; }
        each(i, m->base + offset, inside);
      }
}
DEVICE void copy_box(u32 to, const Map* m, u32 bar, int a, int b, int c, int d) {
  if (to % 1024 || a < 0) faults++;
  rows_of(m, b, c, d, [&](int i, const uint8_t* at, bool inside) { row(here, to + i * 128, m, at, a, inside); });
  change(here, bar, 0, -(long)m->box[1] * m->box[2] * m->box[3] * 128);
}
DEVICE void copy_plain_box(u32 to, const Map* m, u32 bar, int a, int b, int c, int d) {
  if (to % 128 || a < 0) faults++;
  rows_of(m, b, c, d, [&](int i, const uint8_t* at, bool inside) {
    for (int j = 0; j < 128; j += 16) {
      bool real = inside && a + j / BYTES < m->size[0];
      if (real) std::memcpy(here->memory.data() + to + i * 128 + j, at + a * BYTES + j, 16);
      else std::memset(here->memory.data() + to + i * 128 + j, 0, 16);
    }
  });
  change(here, bar, 0, -(long)m->box[1] * m->box[2] * m->box[3] * 128);
}
DEVICE void store_box(const Map* m, u32 from, int a, int b, int c, int d) {
  if (from % 1024 || a < 0 || a >= m->size[0]) faults++;
  rows_of(m, b, c, d, [&](int i, const uint8_t* at, bool inside) {
    for (int j = 0; j < 128 && inside; j += 16)
      if (a + j / 2 < m->size[0]) std::memcpy((uint8_t*)at + a * 2 + j, here->memory.data() + swizzled(from + i * 128 + j), 16);
  });
}
DEVICE void stores_commit() {}
DEVICE void stores_read() {}
DEVICE void publish_writes() {}
DEVICE void prefetch_bytes(const unsigned char*, u32 bytes) { if (bytes % 16) faults++; }
static std::map<std::pair<Block*, int>, std::unique_ptr<Meeting>> groups;
static std::mutex groups_mutex;
static void some_meet(int who, int threads) {
  Meeting* meeting;
  {
    std::lock_guard<std::mutex> l(groups_mutex);
    auto& found = groups[{here, who}];
    if (!found) found = std::make_unique<Meeting>(threads);
    meeting = found.get();
  }
  meeting->meet();
}
DEVICE void group_meet(int who) {
  if ((int)threadIdx.x / 128 != who + 1) faults++;
  some_meet(who, 128);
}
template <int WARPGROUPS> DEVICE void consumers_meet() { some_meet(3, 128 * WARPGROUPS); }
// Matrices of half values, transposed, to rows of sixteen bytes and back: lane 8·m + r gives row r of matrix m.
template <typename Element> static void matrices(u32 at, int count, Element each) {
  int lane = threadIdx.x % 32;
  for (int m = 0; m < count; m++)
    for (int j = 0; j < 2; j++) {
      u32 row = from_lane(at, 8 * m + lane % 4 * 2 + j);
      if (row % 16) faults++;
      each(m, j, here->memory.data() + row + lane / 4 * 2);
    }
}
DEVICE void put_some(u32 at, const u32 (&v)[4], int count) {
  matrices(at, count, [&](int m, int j, uint8_t* to) { u16 half = (u16)(v[m] >> 16 * j); std::memcpy(to, &half, 2); });
}
DEVICE void get_some(u32 (&v)[4], u32 at, int count) {
  u32 got[4] = {0, 0, 0, 0};
  matrices(at, count, [&](int m, int j, uint8_t* from) { u16 half; std::memcpy(&half, from, 2); got[m] |= (u32)half << 16 * j; });
  for (int m = 0; m < count; m++) v[m] = got[m];
  together();
}
DEVICE void put_matrices(u32 at, const u32 (&v)[4]) { put_some(at, v, 4); }
DEVICE void put_two_matrices(u32 at, const u32 (&v)[4]) { put_some(at, v, 2); }
DEVICE void get_matrices(u32 (&v)[4], u32 at) { get_some(v, at, 4); }
DEVICE void get_two_matrices(u32 (&v)[4], u32 at) { get_some(v, at, 2); }
DEVICE void gather(u32 to, const void* from, bool inside) {
  if (to % 16 || (uintptr_t)from % 16) faults++;
  std::lock_guard<std::mutex> l(here->m);  // the host's threads would race for neighbouring bytes
  if (inside) std::memcpy(here->memory.data() + to, from, 16); else std::memset(here->memory.data() + to, 0, 16);
}
DEVICE void gathers_commit() {}
template <int LEFT> DEVICE void gathers_wait() {}
