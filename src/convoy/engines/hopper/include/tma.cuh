// Asynchronous copies between global and shared memory: the tensor memory accelerator (TMA), bulk copies of plain
// bytes, and cp.async. Tensor coordinates go from the innermost dimension out. Loads count their bytes at an mbarrier.
#pragma once
#include <ptx.cuh>

// A tensor map (CUtensorMap), as the driver encodes it: see tensor_maps.py.
struct __align__(64) TensorMap { u64 words[16]; };

// ---- Loads. Im2col mode: as many pixels as the map says, in the order of the output, from (w, h, n) on, moved by a filter tap that lies
// so far right and down; channels from c on.
DEVICE void tma_load_im2col(u32 to, const TensorMap* map, u32 bar, int c, int w, int h, int n, u16 right, u16 down) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};"
               ::"r"(to), "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(right), "h"(down) : "memory");
}
// To the same place in all blocks of the cluster that `ranks` names, bit by bit.
DEVICE void tma_load_im2col_multicast(u32 to, const TensorMap* map, u32 bar, int c, int w, int h, int n, u16 right,
                                      u16 down, u16 ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
      "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(right), "h"(down), "h"(ranks)
      : "memory");
}
// Boxes of a tensor of three dimensions: of a weight [filter, tap, channel].
DEVICE void tma_load_3d(u32 to, const TensorMap* map, u32 bar, int c, int tap, int k) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(c), "r"(tap), "r"(k) : "memory");
}
DEVICE void tma_load_3d_multicast(u32 to, const TensorMap* map, u32 bar, int c, int tap, int k, u16 ranks) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%4, %5, %6}], [%2], %3;"
               ::"r"(to), "l"(map), "r"(bar), "h"(ranks), "r"(c), "r"(tap), "r"(k) : "memory");
}
// Boxes of a tensor of four dimensions, to rows of 128 bytes in the 128-byte swizzle.
DEVICE void tma_load_4d(u32 to, const TensorMap* map, u32 bar, int a, int b, int c, int d) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(to), "l"(map), "r"(bar), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
// The same instruction with a map that has no swizzle.
DEVICE void tma_load_4d_no_swizzle(u32 to, const TensorMap* map, u32 bar, int a, int b, int c, int d) {
  tma_load_4d(to, map, bar, a, b, c, d);
}
// Sixteen bytes or a multiple, as they lie.
DEVICE void bulk_load(u32 to, const unsigned char* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
// The same, to the same place in all blocks of the cluster that `ranks` names, bit by bit.
DEVICE void bulk_load_multicast(u32 to, const unsigned char* from, u32 bytes, u32 bar, u16 ranks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1], %2, [%3], %4;"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar), "h"(ranks) : "memory");
}

// ---- Prefetches to L2.
DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DEVICE void tma_prefetch_3d(const TensorMap* map, int c, int tap, int k) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
               ::"l"(map), "r"(c), "r"(tap), "r"(k) : "memory");
}
DEVICE void bulk_prefetch(const unsigned char* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// ---- Stores. Parts of a box that lie outside the tensor are not written. `bulk_wait_group_read`: the stores of this thread have read
// their shared memory.
DEVICE void tma_store_4d(const TensorMap* map, u32 from, int a, int b, int c, int d) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               ::"l"(map), "r"(from), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void bulk_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---- cp.async: sixteen bytes, or zeros where nothing is inside. A thread that has waited makes its copies visible to products.
DEVICE void cp_async_16(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(LEFT) : "memory");
}
