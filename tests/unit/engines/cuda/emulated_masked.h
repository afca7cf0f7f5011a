// What masked.cuh adds to the emulated device: copies to every block of a cluster, plain copies, sparse products, transposition.
DEVICE void copy_pixels_to_all(u32 to, const Map* m, u32 bar, int c, int w, int h, int n, u16 right, u16 down, u16 ranks) {
  Block* own = here;
  for (u32 rank = 0; rank < cluster->blocks.size(); rank++) {
    if (!(ranks >> rank & 1)) continue;
    here = cluster->blocks[rank].get();
    copy_pixels(to, m, bar, c, w, h, n, right, down);
  }
  here = own;
}
DEVICE void copy_bytes(u32 to, const unsigned char* from, u32 bytes, u32 bar) {
  if (bytes % 16 || to % 16 || (uintptr_t)from % 16) faults++;
  std::memcpy(here->memory.data() + to, from, bytes);
  change(here, bar, 0, -(long)bytes);
}
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() { cluster_sync(); }  // later than the device may go on, and every thread has to come
DEVICE u32 shared_word(u32 at) { u32 v; std::memcpy(&v, here->memory.data() + at, 4); return v; }
DEVICE u64 sparse_operand(u32 address) { return address; }
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
DEVICE void gather(u32 to, const void* from, bool inside) {
  if (to % 16 || (uintptr_t)from % 16) faults++;
  std::lock_guard<std::mutex> l(here->m);  // the host's threads would race for neighbouring bytes
  if (inside) std::memcpy(here->memory.data() + to, from, 16); else std::memset(here->memory.data() + to, 0, 16);
}
DEVICE void gathers_commit() {}
template <int LEFT> DEVICE void gathers_wait() {}
