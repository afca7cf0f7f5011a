// include/warp_products.cuh on the emulated device. Copies arrive at once.
#pragma once
#include <ptx.cuh>

DEVICE void cp_async_16(u32 to, const void* from, bool inside) {
  if (to % 16 || (uintptr_t)from % 16) faults++;
  if (to + 16 > here->memory.size()) { faults++; return; }
  if (inside) std::memcpy(here->memory.data() + to, from, 16);
  else std::memset(here->memory.data() + to, 0, 16);
}
DEVICE void cp_async_commit_group() {}
template <int COUNT> DEVICE void cp_async_wait_group() {}

static void rows_of_matrices(u32 (&v)[4], u32 at, int count) {
  int lane = threadIdx.x % 32;
  for (int m = 0; m < count; m++) {
    u32 row = from_lane(at, 8 * m + lane / 4);
    if (row % 16 || row + 16 > here->memory.size()) { faults++; continue; }
    std::memcpy(&v[m], here->memory.data() + row + lane % 4 * 4, 4);
  }
  together();
}
DEVICE void ldmatrix_x4(u32 (&v)[4], u32 at) { rows_of_matrices(v, at, 4); }
DEVICE void ldmatrix_x2(u32 (&v)[4], u32 at) { rows_of_matrices(v, at, 2); }

template <bool BFLOAT> DEVICE float low_half(u32 pair) { return half_to_float<BFLOAT>((u16)pair); }
template <bool BFLOAT> DEVICE float high_half(u32 pair) { return half_to_float<BFLOAT>((u16)(pair >> 16)); }
template <bool BFLOAT> DEVICE u32 multiply_pair(u32 a, u32 b) {
  return pack_pair<BFLOAT>(low_half<BFLOAT>(a) * low_half<BFLOAT>(b), high_half<BFLOAT>(a) * high_half<BFLOAT>(b));
}

template <bool BFLOAT> DEVICE void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  int lane = threadIdx.x % 32;
  const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  u32 all[6][32];
  Warp& w = *here->warps[threadIdx.x / 32];
  for (int r = 0; r < 6; r++) {
    w.words[lane] = own[r];
    w.meeting.meet();
    std::memcpy(all[r], w.words, sizeof(w.words));
    w.meeting.meet();
  }
  for (int i = 0; i < 4; i++) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      u32 left = all[row / 8 + k / 8 * 2][row % 8 * 4 + k % 8 / 2], right = all[4 + k / 8][column * 4 + k % 8 / 2];
      float x = k % 2 ? high_half<BFLOAT>(left) : low_half<BFLOAT>(left);
      d[i] += x * (k % 2 ? high_half<BFLOAT>(right) : low_half<BFLOAT>(right));
    }
  }
}
