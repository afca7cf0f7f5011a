// bottleneck.cu: from sums to shared memory, as the next product or the copy to y reads it: a row of 128 bytes for each
// pixel, 64 channels, in the 128-byte swizzle.
#pragma once
#include <bottleneck/bottleneck_layout.cuh>

// Of two groups of eight columns, a lane gives the address of one row of sixteen bytes: which column and which eight of
// the 64 channels.
DEVICE int column_of(int group, int lane) { return group * 8 + lane % 8 + lane / 16 * 8; }
DEVICE int eight_of(int warp, int lane) { return warp * 2 + lane / 8 % 2; }

template <int GROUPS> DEVICE void put_groups(u32 at, int group, const u32 (&words)[4]) {
  if (group + 1 < GROUPS) stmatrix_x4_trans(at, words); else stmatrix_x2_trans(at, words);
}

// The words of two groups: two neighbouring columns of a filter each.
template <int ACTIVATION, int COUNT>
DEVICE void words_of(u32 (&words)[4], const float (&d)[COUNT], int group, const u32 (&added)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int from = 4 * (group + i / 2) + 2 * (i % 2);
    float low = 0.f, high = 0.f;
    if (from < COUNT) { low = d[from]; high = d[from + 1]; }
    low += half_to_float<BFLOAT>((u16)(added[i] & 0xffff));
    high += half_to_float<BFLOAT>((u16)(added[i] >> 16));
    words[i] = pack_pair<BFLOAT>(activate<ACTIVATION>(low), activate<ACTIVATION>(high));
  }
}

// The first result, behind the two rows of the window that are there already. Rows outside the image are the next
// convolution's padding: zeros, whatever bias and activation make of them.
template <int COUNT>
DEVICE void store_first(const float (&d)[MID_BLOCKS][COUNT], const SmemLayout& smem, int consumer, int top, int height,
                        int warp, int lane) {
  enum { GROUPS = COUNT / 4 };
  u32 inside = 0;
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    int line = top + consumer * ROWS + row;
    inside |= (u32)(line >= 0 && line < height) << row;
  }
#pragma unroll
  for (int part = 0; part < MID_BLOCKS; part++) {
    u32 base = smem.first + part * FIRST_BYTES;
#pragma unroll
    for (int group = 0; group < GROUPS; group += 2) {
      u32 words[4], none[4] = {0, 0, 0, 0};
      words_of<FIRST_ACTIVATION>(words, d[part], group, none);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int column = (group + i / 2) * 8 + lane % 4 * 2;
        u32 low = inside >> column / WIDTH & 1 ? 0xffffu : 0u;
        u32 high = inside >> (column + 1) / WIDTH & 1 ? 0xffff0000u : 0u;
        words[i] &= low | high;
      }
      int column = column_of(group, lane), row = 2 + consumer * ROWS + column / WIDTH;
      put_groups<GROUPS>(eight_at(base, row * PITCH + 1 + column % WIDTH, eight_of(warp, lane)), group, words);
    }
  }
}

// The second result: its columns are rows of the image with zeros between them, which go to spare memory.
template <int COUNT>
DEVICE void store_second(const float (&d)[MID_BLOCKS][COUNT], const SmemLayout& smem, int consumer, int warp,
                         int lane) {
  enum { GROUPS = COUNT / 4 };
#pragma unroll
  for (int part = 0; part < MID_BLOCKS; part++) {
    u32 base = smem.second + part * SECOND_BYTES;
#pragma unroll
    for (int group = 0; group < GROUPS; group += 2) {
      u32 words[4], none[4] = {0, 0, 0, 0};
      words_of<SECOND_ACTIVATION>(words, d[part], group, none);
      int column = column_of(group, lane), row = column / PITCH, place = column % PITCH;
      bool real = row < ROWS && place < WIDTH;
      int pixel = consumer * OWN_PIXELS + row * WIDTH + place;
      u32 at = real ? eight_at(base, pixel, eight_of(warp, lane)) : smem.spare + lane * 16;
      put_groups<GROUPS>(at, group, words);
    }
  }
}

// 64 channels of y, in place of the residual.
template <int COUNT> DEVICE void store_last(const float (&d)[COUNT], u32 stage, int consumer, int warp, int lane) {
  enum { GROUPS = COUNT / 4 };
#pragma unroll
  for (int group = 0; group < GROUPS; group += 2) {
    u32 words[4], added[4] = {0, 0, 0, 0};
    u32 at = eight_at(stage, consumer * OWN_PIXELS + column_of(group, lane), eight_of(warp, lane));
    if constexpr (HAS_RESIDUAL) {
      if (group + 1 < GROUPS) ldmatrix_x4_trans(added, at); else ldmatrix_x2_trans(added, at);
    }
    words_of<LAST_ACTIVATION>(words, d, group, added);
    put_groups<GROUPS>(at, group, words);
  }
}

// The window moves down by a pass: its last two rows become its first two.
DEVICE void carry_rows(const SmemLayout& smem, int thread) {
  for (int i = thread; i < MID_BLOCKS * 2 * PITCH * 8; i += 128 * CONSUMERS) {
    int eight = i % 8, pixel = i / 8 % (2 * PITCH);
    u32 base = smem.first + i / (16 * PITCH) * FIRST_BYTES;
    st_shared_v4(eight_at(base, pixel, eight), ld_shared_v4(eight_at(base, PASS_ROWS * PITCH + pixel, eight)));
  }
}

// Zeros left and right of the rows, which nothing is stored to later.
DEVICE void clear_first(const SmemLayout& smem, int thread) {
  for (int i = thread; i < MID_BLOCKS * FIRST_BYTES / 16; i += 128 * CONSUMERS)
    st_shared_v4(smem.first + i * 16, make_uint4(0, 0, 0, 0));
}
