// include/tma.cuh on the emulated device.
#pragma once
#include <ptx.cuh>

static inline void put(Block* b, u32 to, const uint8_t* from, int count) {  // sixteen bytes at a time, as the swizzle moves them
  for (int i = 0; i < count; i += 16) {
    uint8_t* p = b->memory.data() + swizzled(to + i);
    if (from) std::memcpy(p, from + i, 16); else std::memset(p, 0, 16);
  }
}
// One row of 128 bytes: channels from c on, as many as there are, zeros behind them.
static inline void row(Block* b, u32 to, const TensorMap* m, const uint8_t* at, int c, bool inside) {
  for (int i = 0; i < 128; i += 16) {
    bool real = inside && (c + i / EMULATED_VALUE_BYTES) < m->size[0];
    put(b, to + i, real ? at + (long long)c * EMULATED_VALUE_BYTES + i : nullptr, 16);
  }
}
static inline void pixels(Block* b, u32 to, const TensorMap* m, int c, int w, int h, int n, u16 right, u16 down) {
  if (right > 255 || down > 255 || m->low[0] < -128 || m->high[0] > 127) faults++;
  for (int i = 0; i < m->rows; i++) {
    long long x = w + right, y = h + down;
    bool inside = x >= 0 && x < m->size[1] && y >= 0 && y < m->size[2] && n < m->size[3];
    row(b, to + i * 128, m, m->base + n * m->stride[3] + y * m->stride[2] + x * m->stride[1], c, inside);
    w += m->step[0];
    if (w >= m->size[1] + m->high[0]) {
      w = m->low[0];
      h += m->step[1];
      if (h >= m->size[2] + m->high[1]) { h = m->low[1]; n++; }
    }
  }
}
DEVICE void tma_load_im2col(u32 to, const TensorMap* m, u32 bar, int c, int w, int h, int n, u16 right, u16 down) {
  pixels(here, to, m, c, w, h, n, right, down);
  change(here, bar, 0, -(long)m->rows * 128);
}
DEVICE void tma_load_3d_multicast(u32 to, const TensorMap* m, u32 bar, int c, int tap, int k, u16 ranks) {
  for (u32 rank = 0; rank < cluster->blocks.size(); rank++) {
    if (!(ranks >> rank & 1)) continue;
    Block* b = cluster->blocks[rank].get();
    reach(b, bar, [=, m = *m] {
      for (int i = 0; i < m.rows; i++)
        row(b, to + i * 128, &m, m.base + (k + i) * m.stride[2] + tap * m.stride[1], c, k + i < m.size[2]);
      counted(b, bar, 0, -(long)m.rows * 128);
    });
  }
}
DEVICE void tma_load_3d(u32 to, const TensorMap* m, u32 bar, int c, int tap, int k) {
  tma_load_3d_multicast(to, m, bar, c, tap, k, (u16)(1 << my_rank));
}

DEVICE void prefetch_tensormap(const TensorMap*) {}
DEVICE void tma_prefetch_3d(const TensorMap* m, int c, int tap, int k) {
  if (c < 0 || c >= m->size[0] || tap < 0 || tap >= m->size[1] || k < 0 || k >= m->size[2]) faults++;
}
DEVICE void tma_load_im2col_multicast(u32 to, const TensorMap* m, u32 bar, int c, int w, int h, int n, u16 right, u16 down, u16 ranks) {
  for (u32 rank = 0; rank < cluster->blocks.size(); rank++) {
    if (!(ranks >> rank & 1)) continue;
    Block* b = cluster->blocks[rank].get();
    reach(b, bar, [=, m = *m] {
      pixels(b, to, &m, c, w, h, n, right, down);
      counted(b, bar, 0, -(long)m.rows * 128);
    });
  }
}
DEVICE void bulk_load(u32 to, const unsigned char* from, u32 bytes, u32 bar) {
  if (bytes % 16 || to % 16 || (uintptr_t)from % 16) faults++;
  std::memcpy(here->memory.data() + to, from, bytes);
  change(here, bar, 0, -(long)bytes);
}
DEVICE void bulk_load_multicast(u32 to, const unsigned char* from, u32 bytes, u32 bar, u16 ranks) {
  if (bytes % 16 || to % 16 || (uintptr_t)from % 16) faults++;
  for (u32 rank = 0; rank < cluster->blocks.size(); rank++) {
    if (!(ranks >> rank & 1)) continue;
    Block* b = cluster->blocks[rank].get();
    reach(b, bar, [=] {
      std::memcpy(b->memory.data() + to, from, bytes);
      counted(b, bar, 0, -(long)bytes);
    });
  }
}
// Boxes of a tensor: rows of 128 bytes in the swizzle, zeros where they lie outside; of stores, nothing is written there.
template <typename Row> static void rows_of(const TensorMap* m, int b, int c, int d, Row each) {
  if (m->box[0] * EMULATED_VALUE_BYTES != 128) faults++;
  for (int z = 0, i = 0; z < m->box[3]; z++)
    for (int y = 0; y < m->box[2]; y++)
      for (int x = 0; x < m->box[1]; x++, i++) {
        long long at[3] = {b + x, c + y, d + z}, offset = 0;
        bool inside = true;
        for (int k = 0; k < 3; k++) { inside &= at[k] >= 0 && at[k] < m->size[k + 1]; offset += at[k] * m->stride[k + 1]; }
        each(i, m->base + offset, inside);
      }
}
DEVICE void tma_load_4d(u32 to, const TensorMap* m, u32 bar, int a, int b, int c, int d) {
  if (to % 1024 || a < 0) faults++;
  rows_of(m, b, c, d, [&](int i, const uint8_t* at, bool inside) { row(here, to + i * 128, m, at, a, inside); });
  change(here, bar, 0, -(long)m->box[1] * m->box[2] * m->box[3] * 128);
}
DEVICE void tma_load_4d_no_swizzle(u32 to, const TensorMap* m, u32 bar, int a, int b, int c, int d) {
  if (to % 128 || a < 0) faults++;
  rows_of(m, b, c, d, [&](int i, const uint8_t* at, bool inside) {
    for (int j = 0; j < 128; j += 16) {
      bool real = inside && a + j / EMULATED_VALUE_BYTES < m->size[0];
      if (real) std::memcpy(here->memory.data() + to + i * 128 + j, at + a * EMULATED_VALUE_BYTES + j, 16);
      else std::memset(here->memory.data() + to + i * 128 + j, 0, 16);
    }
  });
  change(here, bar, 0, -(long)m->box[1] * m->box[2] * m->box[3] * 128);
}
DEVICE void tma_store_4d(const TensorMap* m, u32 from, int a, int b, int c, int d) {
  if (from % 1024 || a < 0 || a >= m->size[0]) faults++;
  rows_of(m, b, c, d, [&](int i, const uint8_t* at, bool inside) {
    for (int j = 0; j < 128 && inside; j += 16)
      if (a + j / 2 < m->size[0]) std::memcpy((uint8_t*)at + a * 2 + j, here->memory.data() + swizzled(from + i * 128 + j), 16);
  });
}
DEVICE void bulk_commit_group() {}
DEVICE void bulk_wait_group_read() {}
DEVICE void bulk_prefetch(const unsigned char*, u32 bytes) { if (bytes % 16) faults++; }
DEVICE void cp_async_16(u32 to, const void* from, bool inside) {
  if (to % 16 || (uintptr_t)from % 16) faults++;
  if (inside) std::memcpy(here->memory.data() + to, from, 16); else std::memset(here->memory.data() + to, 0, 16);
}
DEVICE void cp_async_commit_group() {}
template <int LEFT> DEVICE void cp_async_wait_group() {}
