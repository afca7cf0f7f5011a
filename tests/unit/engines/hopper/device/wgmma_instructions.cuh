// The products on the emulated device, for any number of columns.
#pragma once
#include <wgmma.cuh>

static inline float loaded(const uint8_t* from) {
  if (EMULATED_VALUE_BYTES == 2) {
    u16 v;
    std::memcpy(&v, from, 2);
    return half_to_float<EMULATED_BFLOAT>(v);
  }
  float v;
  std::memcpy(&v, from, 4);
  return v;
}
static inline float element(u32 at, int index) {
  return loaded(here->memory.data() + swizzled(at + index * EMULATED_VALUE_BYTES));
}
static inline float plain_element(u64 operand, int row, int k) {
  u32 at = (u32)(operand & 0x3fff) * 16, across = (u32)(operand >> 16 & 0x3fff) * 16, down = (u32)(operand >> 32 & 0x3fff) * 16;
  const int each = 16 / EMULATED_VALUE_BYTES;  // values of sixteen bytes
  return loaded(here->memory.data() + at + row / 8 * down + row % 8 * 16 + k / each * across + k % each * EMULATED_VALUE_BYTES);
}
static inline float value_of_row(u64 operand, int row, int k) {
  return operand >> 62 ? element((u32)operand + row * 128, k) : plain_element(operand, row, k);
}

// One lane's share of D[64, columns] += A · B^T over 32 bytes: rows lane/4 and eight below, two neighbouring columns of each eight.
template <int COUNT> DEVICE void wgmma(float (&d)[COUNT], u64 a, u64 b) {
  int t = threadIdx.x % 128, top = t / 32 * 16 + t % 32 / 4;
  for (int i = 0; i < COUNT; i++) {
    int r = top + (i / 2 % 2) * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    for (int k = 0; k < 32 / EMULATED_VALUE_BYTES; k++) d[i] += value_of_row(a, r, k) * value_of_row(b, column, k);
  }
}
template <int COUNT> DEVICE void wgmma_zero_init(float (&d)[COUNT], u64 a, u64 b) {
  for (float& v : d) v = 0.f;
  wgmma(d, a, b);
}
// A lies as 16 rows of 64 values: what is summed over is a row.
template <int COUNT> DEVICE void wgmma_transposed_a(float (&d)[COUNT], u64 a, u64 b) {
  int t = threadIdx.x % 128, top = t / 32 * 16 + t % 32 / 4;
  for (int i = 0; i < COUNT; i++) {
    int r = top + (i / 2 % 2) * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) d[i] += element((u32)a + k * 128, r) * element((u32)b + column * 128, k);
  }
}
static inline float transposed_element(u64 operand, int at, int k) {
  u32 from = (u32)(operand & 0x3fff) * 16, across = (u32)(operand >> 16 & 0x3fff) * 16, down = (u32)(operand >> 32 & 0x3fff) * 16;
  return element(from + at / 64 * across + k / 8 * down + k % 8 * 128, at % 64);
}
template <int COUNT> DEVICE void wgmma_transposed_ab(float (&d)[COUNT], u64 a, u64 b) {
  if (a >> 62 != 1 || b >> 62 != 1 || a % 64 || b % 64) faults++;  // the 128-byte swizzle, from an atom's beginning
  int t = threadIdx.x % 128, top = t / 32 * 16 + t % 32 / 4;
  float rows[2][16];
  for (int below = 0; below < 2; below++)
    for (int k = 0; k < 16; k++) rows[below][k] = transposed_element(a, top + below * 8, k);
  for (int i = 0; i < COUNT; i++)
    for (int k = 0; k < 16; k++) d[i] += rows[i / 2 % 2][k] * transposed_element(b, i / 4 * 8 + t % 4 * 2 + i % 2, k);
}
static inline float compressed(u32 at) {
  u16 v;
  std::memcpy(&v, here->memory.data() + (at ^ (((at >> 7) & 3) << 4)), 2);
  return half_to_float<EMULATED_BFLOAT>(v);
}
// One lane's share of D[64, columns] += A · B^T over 32 columns of A, 16 of which are there. Lanes 2·HALF and 2·HALF + 1 of every four
// have the places of columns 0 to 15 and 16 to 31: of row lane/4 in the low half of the word, of that eight below in the high.
template <int HALF, int COUNT> DEVICE void wgmma_sparse(float (&d)[COUNT], u64 a, u64 b, u32 metadata) {
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
    for (int i = 0; i < COUNT; i++) {
      if (i / 2 % 2 != below) continue;
      int column = i / 4 * 8 + t % 4 * 2 + i % 2;
      for (int k = 0; k < 32; k++)
        if (dense[k] != 0.f) d[i] += dense[k] * element((u32)b + column * 128, k);
    }
  }
}
